"""Elementwise neighbours run inside the convolution's kernel: read off the compiled graph.

MAX writes the Mojo program that a graph becomes; every kernel in it opens one trace span, whose
label names all the operations in that kernel.
"""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import maxconv

if TYPE_CHECKING:
    from max.engine import InferenceSession

SPAN = re.compile(r'tracing\.Trace\[[^"]*?TraceLevel\.OP[^"]*?(?:"cpu"[^"]*?)"([^"]+)"', re.S)


def kernels_of(program: str) -> list[str]:
    """Returns the labels of a compiled graph's kernels."""
    return SPAN.findall(program)


@pytest.fixture
def compiled(tmp_path: Path, session: InferenceSession) -> tuple[list[str], list[float]]:
    """A graph of fused convolutions: its kernels' labels, and its largest errors."""
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType, ops

    generator = np.random.default_rng(7)
    cpu = DeviceRef.CPU()
    dims: list[int | str] = ["n", "h", "w"]
    wide = generator.standard_normal((3, 3, 24, 20)).astype(np.float32)
    narrow = generator.standard_normal((1, 1, 24, 20)).astype(np.float32)
    types = [
        TensorType(DType.float32, [*dims, 24], cpu),
        TensorType(DType.float32, [20], cpu),
        TensorType(DType.float32, [*dims, 20], cpu),
    ]
    # A name that no cache knows, so that the graph is compiled and written.
    name = f"fusion_{uuid.uuid4().hex}"
    with Graph(name, input_types=types, kernel_library=maxconv.kernel_library()) as graph:
        x, bias, residual = (value.tensor for value in graph.inputs)
        conv = maxconv.conv2d(x, wide, padding=(1, 1, 1, 1))
        pointwise = maxconv.conv2d(ops.exp(x), narrow)
        graph.output(ops.silu(conv + bias) + residual, ops.tanh(pointwise))
    debug = type(session).debug
    before = debug.ir_output_dir
    debug.ir_output_dir = str(tmp_path)
    try:
        model = session.load(graph)
    finally:
        debug.ir_output_dir = before
    inputs = [
        generator.standard_normal(shape).astype(np.float32)
        for shape in ((1, 5, 6, 24), (20,), (1, 5, 6, 20))
    ]
    outputs = [np.asarray(result.to_numpy(), np.float64) for result in model.execute(*inputs)]
    errors = [
        float(np.abs(output - wanted).max())
        for output, wanted in zip(outputs, expected(wide, narrow, *inputs), strict=True)
    ]
    return kernels_of((tmp_path / f"{name}.mojo").read_text()), errors


def expected(
    wide: np.ndarray, narrow: np.ndarray, x: np.ndarray, bias: np.ndarray, residual: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
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


def test_one_kernel_runs_a_convolution_and_its_neighbours(
    compiled: tuple[list[str], list[float]],
) -> None:
    labels, errors = compiled
    # float32 sums of 216 products of order 1; what follows has a slope of about 1.
    assert max(errors) < 1e-4
    conv, pointwise = sorted(label for label in labels if "conv" in label), labels
    assert len(conv) == 2, labels
    after = next(label for label in conv if "silu" in label)
    around = next(label for label in conv if "tanh" in label)
    assert after.count("add") == 2 and "Epilogue(conv" in after
    assert "exp" in around
    # Nothing elementwise is left to a kernel of its own.
    left = [label for label in pointwise if label not in conv]
    assert not [label for label in left if re.search(r"add|silu|tanh|exp", label)], labels
