"""Compiles the GPU tests' graphs for a GPU that is not there, in a process of its own.

Takes the architecture, the folder to write to, and the graphs: a key of ``GRAPHS``, a colon and a
type, which for ``every`` is a key of ``network.TYPES``, for ``bridge`` the name of a graph. MAX
writes to the folder what each graph becomes. With ``MAXCONV_GPU_GRAPHS`` in the environment it also
writes to that folder, beside what is there, what the tests on a GPU machine run: they find it by
its name and its inputs, and then compile nothing.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from max import driver
from max.graph import Graph
from tests.gpu import interleaved, network


def bridge(which: str) -> Graph:
    """Returns a graph of ``tests/gpu/bridge.py``: ``custom_op`` or ``block``."""
    from tests.gpu import bridge

    return {"custom_op": bridge.custom_op_graph, "block": bridge.block_graph}[which]()


GRAPHS = {
    "attention": network.attention,
    "bridge": bridge,
    "every": network.every_fusion,
    "functions": network.functions,
    "fusions": network.fusions,
    "integers": network.integers,
    "interleaved": interleaved.graph,
    "layers": network.layers,
    "quantized": network.quantized,
    "subgraph": network.subgraph,
}


def exported_graphs(manifest: Path) -> list[dict[str, Any]]:
    """Returns what a folder's manifest names."""
    graphs: list[dict[str, Any]] = []
    if manifest.is_file():
        graphs = json.loads(manifest.read_text(encoding="utf-8"))["graphs"]
    return graphs


def keep_in_manifest(manifest: Path, earlier: list[dict[str, Any]]) -> None:
    """Names an earlier process's graphs too: MAX writes each process's manifest anew."""
    contents = json.loads(manifest.read_text(encoding="utf-8"))
    now = {graph["key"] for graph in contents["graphs"]}
    contents["graphs"] += [graph for graph in earlier if graph["key"] not in now]
    manifest.write_text(json.dumps(contents, indent=2), encoding="utf-8")


def main() -> None:
    """Compiles; the process ends with 1 if a graph does not."""
    architecture, folder, *names = sys.argv[1:]
    # Before MAX looks for a device.
    driver.set_virtual_device_api("cuda")
    driver.set_virtual_device_target_arch(architecture)
    driver.set_virtual_device_count(1)
    from max.engine import InferenceSession

    InferenceSession.debug.ir_output_dir = folder
    exported = os.environ.get("MAXCONV_GPU_GRAPHS")
    manifest = Path(exported or folder, "manifest.json")
    earlier = exported_graphs(manifest)
    session = InferenceSession(devices=[driver.Accelerator()], export_mefs=exported)
    for name in names:
        which, dtype = name.split(":")
        graph = GRAPHS[which](dtype)
        session.load(graph, weights_registry=network.graph_weights(which, dtype))
        print(graph.name, flush=True)
    if exported:
        keep_in_manifest(manifest, earlier)
    # A virtual device cannot be taken down.
    os._exit(0)


if __name__ == "__main__":
    main()
