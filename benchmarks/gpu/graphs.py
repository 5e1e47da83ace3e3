"""Times convolutions through MAX graphs on a GPU, the cost of a launch included.

    python benchmarks/gpu/graphs.py build/gpu_problems.txt > graphs.jsonl
    python benchmarks/gpu/graphs.py --compile sm_90a build/graphs
    python benchmarks/gpu/graphs.py build/gpu_problems.txt --graphs build/graphs > graphs.jsonl

The second form needs no GPU, and the third then compiles nothing.
Needs MAX with a GPU; `max_fcrs` also needs cuDNN 9 where MAX finds it. Takes the problems with a
3x3 filter, stride 1 and one group: graphs with symbolic sizes serve them all. A call is one
`model.execute`; calls are enqueued back to back and waited for together. One JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from max import driver
from max.driver import Accelerator, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.engine._precompiled_mefs import MefStore
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from max.graph.type import FilterLayout

import maxconv

SECONDS = 0.2
ROUNDS = 7
MAX_CALLS = 64

Build = Callable[[TensorValue, TensorValue], TensorValue]

CONTENDERS: dict[str, tuple[tuple[str | int, ...], Build]] = {
    "ours_graph": (
        ("k", 3, 3, "c"),
        lambda x, w: maxconv.conv2d(x, w, padding=(1, 1, 1, 1), filter_layout="KRSC"),
    ),
    "ours_graph_fused": (
        ("k", 3, 3, "c"),
        lambda x, w: ops.silu(
            maxconv.conv2d(x, w, padding=(1, 1, 1, 1), filter_layout="KRSC") + 0.5
        ),
    ),
    "max_rscf": (
        (3, 3, "c", "k"),
        lambda x, w: ops.conv2d(x, w, padding=(1, 1, 1, 1)),
    ),
    "max_fcrs": (
        ("k", "c", 3, 3),
        lambda x, w: ops.conv2d(x, w, padding=(1, 1, 1, 1), filter_layout=FilterLayout.FCRS),
    ),
}


def graph_of(name: str) -> Graph:
    """Returns a contender's graph."""
    shape, build = CONTENDERS[name]
    device = DeviceRef.GPU()
    types = [
        TensorType(DType.bfloat16, ("n", "h", "w", "c"), device),
        TensorType(DType.bfloat16, shape, device),
    ]
    library = maxconv.kernel_library()
    with Graph(name, input_types=types, kernel_library=library) as graph:
        x, w = (value.tensor for value in graph.inputs)
        graph.output(build(x, w))
    return graph


def random_buffer(shape: tuple[int, ...], device: Accelerator) -> Buffer:
    """Random bfloat16 values in device memory."""
    values = np.random.default_rng(len(shape)).standard_normal(shape, np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    return Buffer.from_numpy(bits).view(DType.bfloat16).to(device)


def time_calls(model: Model, operands: list[Buffer], device: Accelerator) -> list[float]:
    """Milliseconds of a call in each round, sorted."""

    def burst(calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            model.execute(*operands)
        device.synchronize()
        return (time.perf_counter() - begin) * 1e3 / calls

    burst(2)
    calls = max(1, min(MAX_CALLS, int(SECONDS * 1e3 / burst(2))))
    return sorted(burst(calls) for _ in range(ROUNDS))


def compile_graphs(names: list[str], architecture: str, folder: Path) -> None:
    """Compiles contenders' graphs for a GPU that is not there; ends the process."""
    # Before MAX looks for a device.
    driver.set_virtual_device_api("cuda")
    driver.set_virtual_device_target_arch(architecture)
    driver.set_virtual_device_count(1)
    session = InferenceSession(devices=[Accelerator()], export_mefs=str(folder))
    for name in names:
        session.load(graph_of(name))
        print(name, flush=True)
    # A virtual device cannot be taken down.
    os._exit(0)


def time_problem(name: str, model: Model, line: str, device: Accelerator) -> None:
    """Times a contender on a problem that it takes, and prints a line."""
    problem, *words = line.split()
    n = [int(word) for word in words]
    batch, channels, filters, groups = n[:4]
    if (groups, n[7:10], n[10:13]) != (1, [1, 3, 3], [1, 1, 1]):
        return
    sizes: dict[str | int, int] = {"k": filters, "c": channels}
    operands = [
        random_buffer((batch, n[5], n[6], channels), device),
        random_buffer(tuple(sizes.get(size, 3) for size in CONTENDERS[name][0]), device),
    ]
    result: dict[str, object] = {"problem": problem, "contender": name}
    try:
        times = time_calls(model, operands, device)
    except Exception as error:
        result["why"] = str(error)
    else:
        result |= {
            "launch_ms": statistics.median(times),
            "fastest": times[0],
            "slowest": times[-1],
        }
    print(json.dumps(result), flush=True)


def main() -> None:
    """Times every contender on the problems of a file that it takes."""
    parser = argparse.ArgumentParser(description="times convolutions through MAX graphs")
    parser.add_argument("problems", type=Path, nargs="?", help="lines of lines.py")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--compile", nargs=2, metavar=("ARCHITECTURE", "FOLDER"))
    parser.add_argument("--graphs", help="where --compile wrote the graphs")
    arguments = parser.parse_args()
    if arguments.compile:
        architecture, folder = arguments.compile
        compile_graphs(arguments.contenders, architecture, Path(folder))
    if arguments.problems is None:
        parser.error("problems: a file of lines.py's lines, or --compile")
    if arguments.graphs:
        InferenceSession.default_mef_store = MefStore.for_import(arguments.graphs)
    device = Accelerator()
    session = InferenceSession(devices=[device])
    for name in arguments.contenders:
        try:
            model = session.load(graph_of(name))
        except Exception as error:  # the others are still worth timing
            print(json.dumps({"contender": name, "why": str(error)}), flush=True)
            continue
        for line in arguments.problems.read_text().splitlines():
            time_problem(name, model, line, device)


if __name__ == "__main__":
    main()
