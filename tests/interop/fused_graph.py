"""A graph of fused convolutions; as a program, writes the Mojo that MAX makes of it.

MAX reads where to write what a graph becomes once, before it compiles any: in a process of its own.
The only argument is the folder to write to.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import numpy.typing as npt
from max.driver import CPU
from max.dtype import DType
from max.engine import CompilationStopped, InferenceSession
from max.graph import DeviceRef, Graph, Module, TensorType, ops

import maxconv

Array = npt.NDArray[np.floating]

NAME = "fusion"

_GENERATOR = np.random.default_rng(7)
WIDE = _GENERATOR.standard_normal((3, 3, 24, 20)).astype(np.float32)
NARROW = _GENERATOR.standard_normal((1, 1, 24, 20)).astype(np.float32)
#: Scales of the integers that a third convolution is rounded to.
STEPS = _GENERATOR.uniform(0.02, 0.2, 20)


def build(name: str, module: Module | None = None) -> Graph:
    """Returns a graph whose convolutions have elementwise work behind and in front of them."""
    cpu = DeviceRef.CPU()
    dims: list[int | str] = ["n", "h", "w"]
    types = [
        TensorType(DType.float32, [*dims, 24], cpu),
        TensorType(DType.float32, [20], cpu),
        TensorType(DType.float32, [*dims, 20], cpu),
    ]
    library = maxconv.kernel_library()
    with Graph(name, input_types=types, kernel_library=library, module=module) as graph:
        x, bias, residual = (value.tensor for value in graph.inputs)
        conv = maxconv.conv2d(x, WIDE, padding=(1, 1, 1, 1))
        pointwise = maxconv.conv2d(ops.exp(x), NARROW)
        rounded = maxconv.quantize_linear(maxconv.conv2d(x, NARROW, bias=bias), STEPS, -7)
        graph.output(ops.silu(conv + bias) + residual, ops.tanh(pointwise), rounded)
    return graph


def expected(x: Array, bias: Array, residual: Array) -> tuple[Array, Array, Array]:
    """Returns the outputs in float64, the last one before it is rounded."""
    x, bias, residual = (value.astype(np.float64) for value in (x, bias, residual))
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    height, width = x.shape[1:3]
    conv = sum(
        padded[:, r : r + height, s : s + width] @ WIDE[r, s].astype(np.float64)
        for r in range(3)
        for s in range(3)
    )
    biased = conv + bias
    silu = biased / (1 + np.exp(-biased))
    pointwise = NARROW[0, 0].astype(np.float64)
    steps = np.clip((x @ pointwise + bias) / STEPS - 7, -128, 127)
    return silu + residual, np.tanh(np.exp(x) @ pointwise), steps


def main() -> None:
    """Writes the Mojo, and compiles it no further."""
    (folder,) = sys.argv[1:]
    InferenceSession.debug.ir_output_dir = folder
    InferenceSession.debug.pre_jit = True
    try:
        InferenceSession(devices=[CPU()]).load(build(NAME))
    except CompilationStopped:
        # What stopped cannot be taken down.
        os._exit(0)
    raise AssertionError("MAX did not stop before it compiled the Mojo")


if __name__ == "__main__":
    main()
