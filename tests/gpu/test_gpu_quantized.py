"""Convolutions of int8 with int8 outputs on a GPU, against sums of 64-bit integers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest
from tests.gpu.network import QUANTIZED, QUANTIZED_BIAS, QUANTIZED_SCALE, quantized

if TYPE_CHECKING:
    from max.driver import Device
    from max.engine import InferenceSession

pytestmark = pytest.mark.gpu

Array = npt.NDArray[np.generic]


def sums(x: Array, filter: Array) -> npt.NDArray[np.int64]:
    """A 3x3 convolution with padding 1, of 64-bit integers."""
    height, width = x.shape[1:3]
    padded = np.pad(x.astype(np.int64), ((0, 0), (1, 1), (1, 1), (0, 0)))
    return sum(  # type: ignore[no-any-return]
        padded[:, r : r + height, s : s + width] @ filter[r, s].astype(np.int64)
        for r in range(3)
        for s in range(3)
    )


def integers(values: npt.NDArray[np.float64], zero_point: int = 0) -> npt.NDArray[np.int8]:
    """Rounded, halves to even, and clamped."""
    rounded: npt.NDArray[np.int8] = np.clip(np.rint(values) + zero_point, -128, 127).astype(np.int8)
    return rounded


def test_quantized(gpu_session: InferenceSession, gpu: Device) -> None:
    from max.driver import CPU, Buffer

    model = gpu_session.load(quantized("int8"))
    rng = np.random.default_rng(5)
    for shape in ((2, 9, 11), (1, 40, 37), (3, 1, 1)):
        x = rng.integers(-128, 128, (*shape, 32)).astype(np.int8)
        residual = rng.integers(-64, 64, (*shape, 48)).astype(np.float32) / 8
        first, second = (
            output.to(CPU()).to_numpy()
            for output in model.execute(
                Buffer.from_numpy(x).to(gpu), Buffer.from_numpy(residual).to(gpu)
            )
        )
        # Scales are powers of two, and sums are below 2**24: float64 and float32 agree.
        scaled = sums(x, QUANTIZED["first"]) * QUANTIZED_SCALE.astype(np.float64)
        wanted = integers(np.maximum(scaled + QUANTIZED_BIAS, 0) / 0.5)
        assert len(np.unique(wanted)) > 50
        np.testing.assert_array_equal(first, wanted)
        added = np.maximum(sums(wanted, QUANTIZED["second"]) * 2.0**-9, 0) + residual
        wanted = integers(added / 0.25, -20)
        assert len(np.unique(wanted)) > 50
        np.testing.assert_array_equal(second, wanted)
