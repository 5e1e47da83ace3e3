"""Compiles and runs a graph of fused convolutions, in a process of its own.

MAX reads where to write what a graph becomes once, so no graph may have been compiled before.
Takes the folder to write to and the graph's name; writes the largest errors of its two outputs
beside it, to errors.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops

import maxconv

Array = npt.NDArray[np.floating]


def build(name: str, wide: Array, narrow: Array) -> Graph:
    """Returns a graph whose convolutions have elementwise work behind and in front of them."""
    cpu = DeviceRef.CPU()
    dims: list[int | str] = ["n", "h", "w"]
    types = [
        TensorType(DType.float32, [*dims, 24], cpu),
        TensorType(DType.float32, [20], cpu),
        TensorType(DType.float32, [*dims, 20], cpu),
    ]
    with Graph(name, input_types=types, kernel_library=maxconv.kernel_library()) as graph:
        x, bias, residual = (value.tensor for value in graph.inputs)
        conv = maxconv.conv2d(x, wide, padding=(1, 1, 1, 1))
        pointwise = maxconv.conv2d(ops.exp(x), narrow)
        graph.output(ops.silu(conv + bias) + residual, ops.tanh(pointwise))
    return graph


def expected(
    wide: Array, narrow: Array, x: Array, bias: Array, residual: Array
) -> tuple[Array, Array]:
    """Returns both outputs in float64."""
    x, bias, residual = (value.astype(np.float64) for value in (x, bias, residual))
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    height, width = x.shape[1:3]
    conv = sum(
        padded[:, r : r + height, s : s + width] @ wide[r, s].astype(np.float64)
        for r in range(3)
        for s in range(3)
    )
    biased = conv + bias
    silu = biased / (1 + np.exp(-biased))
    return silu + residual, np.tanh(np.exp(x) @ narrow[0, 0].astype(np.float64))


def main() -> None:
    """Writes the compiled graph and its errors."""
    folder, name = sys.argv[1:]
    generator = np.random.default_rng(7)
    wide = generator.standard_normal((3, 3, 24, 20)).astype(np.float32)
    narrow = generator.standard_normal((1, 1, 24, 20)).astype(np.float32)
    InferenceSession.debug.ir_output_dir = folder
    model = InferenceSession(devices=[CPU()]).load(build(name, wide, narrow))
    inputs = [
        generator.standard_normal(shape).astype(np.float32)
        for shape in ((1, 5, 6, 24), (20,), (1, 5, 6, 20))
    ]
    outputs = [np.from_dlpack(result) for result in model.execute(*inputs)]
    wanted = expected(wide, narrow, *inputs)
    errors = [float(np.abs(a - b).max()) for a, b in zip(outputs, wanted, strict=True)]
    (Path(folder) / "errors.json").write_text(json.dumps(errors))
    assert (Path(folder) / f"{name}.mojo").is_file()


if __name__ == "__main__":
    main()
