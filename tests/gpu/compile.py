"""Compiles the GPU tests' graphs for a GPU that is not there, in a process of its own.

Takes the architecture, the folder to write to, and the graphs: ``every`` or ``functions``, a colon
and a type. MAX writes what each graph becomes to the folder.
"""

from __future__ import annotations

import os
import sys

from max import driver


def main() -> None:
    """Compiles; the process ends with 1 if a graph does not."""
    architecture, folder, *names = sys.argv[1:]
    # Before MAX looks for a device.
    driver.set_virtual_device_api("cuda")
    driver.set_virtual_device_target_arch(architecture)
    driver.set_virtual_device_count(1)
    from max.engine import InferenceSession
    from tests.gpu.network import every_fusion, functions

    InferenceSession.debug.ir_output_dir = folder
    session = InferenceSession(devices=[driver.Accelerator()])
    for name in names:
        which, dtype = name.split(":")
        graph = every_fusion(dtype) if which == "every" else functions(dtype)
        session.load(graph)
        print(graph.name, flush=True)
    # A virtual device cannot be taken down.
    os._exit(0)


if __name__ == "__main__":
    main()
