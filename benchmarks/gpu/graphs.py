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
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from max import driver
from max.driver import Accelerator, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.engine._precompiled_mefs import MefStore
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from max.graph.type import FilterLayout

import maxconv

#: Seconds in front of each round: the chip neither grows hot nor falls asleep.
PAUSE = 0.25
ROUNDS = 7
CALLS = 96

#: A contender whose first call takes longer is timed by fewer rounds of one call.
SLOW_MS = 100.0
SLOW_ROUNDS = 3

#: Bytes of operands that calls take in turn.
ROTATED_NBYTES = 256 << 20

#: Different values of a buffer: a prime, so that no row of pixels repeats another.
PERIOD = 1_048_573

PADDING = (1, 1, 1, 1)

#: Shapes of the filter as the graph's own layout has them.
KRSC = ("k", 3, 3, "c")
RSCF = (3, 3, "c", "k")
FCRS = ("k", "c", 3, 3)

#: From the activation and the filter, and if it is fused the bias and the residual.
Build = Callable[..., TensorValue]


class Contender(NamedTuple):
    """A way to compute a convolution in a MAX graph."""

    filter_shape: tuple[str | int, ...]
    fused: bool  # bias, SiLU and a residual follow
    build: Build


def ours(x: TensorValue, w: TensorValue) -> TensorValue:
    """Our convolution."""
    return maxconv.conv2d(x, w, padding=PADDING, filter_layout="KRSC")


def max_fcrs(x: TensorValue, w: TensorValue) -> TensorValue:
    """MAX's convolution with torch's filter layout, which takes cuDNN's where it finds it."""
    return ops.conv2d(x, w, padding=PADDING, filter_layout=FilterLayout.FCRS)


def followed(
    convolution: Build, activation: Callable[[TensorValue], TensorValue] = ops.silu
) -> Build:
    """Returns the convolution with the work that follows written as MAX's operations."""
    return lambda x, w, bias, residual: activation(convolution(x, w) + bias) + residual


CONTENDERS: dict[str, Contender] = {
    "ours_graph": Contender(KRSC, False, ours),
    "ours_graph_fused": Contender(KRSC, True, followed(ours)),
    "ours_graph_fused_relu": Contender(KRSC, True, followed(ours, ops.relu)),
    "ours_graph_arguments": Contender(
        KRSC,
        True,
        lambda x, w, bias, residual: maxconv.conv2d(
            x,
            w,
            padding=PADDING,
            filter_layout="KRSC",
            bias=bias,
            activation="silu",
            residual=residual,
        ),
    ),
    "max_rscf": Contender(RSCF, False, lambda x, w: ops.conv2d(x, w, padding=PADDING)),
    "max_fcrs": Contender(FCRS, False, max_fcrs),
    "max_fcrs_fused": Contender(FCRS, True, followed(max_fcrs)),
}


def operand_shapes(contender: Contender) -> list[tuple[str | int, ...]]:
    """Shapes of a graph's inputs: activation, filter, and if it is fused bias and residual."""
    shapes: list[tuple[str | int, ...]] = [("n", "h", "w", "c"), contender.filter_shape]
    if contender.fused:
        shapes += [("k",), ("n", "h", "w", "k")]
    return shapes


def graph_of(name: str) -> Graph:
    """Returns a contender's graph."""
    contender = CONTENDERS[name]
    types = [
        TensorType(DType.bfloat16, shape, DeviceRef.GPU()) for shape in operand_shapes(contender)
    ]
    library = maxconv.kernel_library()
    with Graph(name, input_types=types, kernel_library=library) as graph:
        graph.output(contender.build(*(value.tensor for value in graph.inputs)))
    return graph


def random_buffer(shape: tuple[int, ...], device: Accelerator) -> Buffer:
    """Random bfloat16 values in device memory; large buffers repeat them."""
    values = np.random.default_rng(len(shape)).standard_normal(PERIOD, np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    return Buffer.from_numpy(np.resize(bits, shape)).view(DType.bfloat16).to(device)


def operand_sets(shapes: list[tuple[int, ...]], device: Accelerator) -> list[list[Buffer]]:
    """Operands for calls in turn: together more than the GPU's L2 cache keeps."""
    nbytes = sum(2 * math.prod(shape) for shape in shapes)
    count = max(1, math.ceil(ROTATED_NBYTES / nbytes))
    return [[random_buffer(shape, device) for shape in shapes] for _ in range(count)]


def time_calls(model: Model, operands: list[list[Buffer]], device: Accelerator) -> list[float]:
    """Milliseconds of a call in each round, sorted."""
    turns = itertools.cycle(operands)

    def burst(calls: int) -> float:
        time.sleep(PAUSE)
        begin = time.perf_counter()
        for _ in range(calls):
            model.execute(*next(turns))
        device.synchronize()
        return (time.perf_counter() - begin) * 1e3 / calls

    slow = burst(1) > SLOW_MS
    return sorted(burst(1 if slow else CALLS) for _ in range(SLOW_ROUNDS if slow else ROUNDS))


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
    sizes: dict[str | int, int] = {"n": batch, "h": n[5], "w": n[6], "k": filters, "c": channels}
    shapes = [
        tuple(sizes.get(size, 3) for size in shape) for shape in operand_shapes(CONTENDERS[name])
    ]
    operands = operand_sets(shapes, device)
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
