"""Convolutions of int8 with int8 outputs on a GPU, against sums that are exact in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest
from tests.gpu.network import (
    INTEGER_OUT_ZERO,
    INTEGER_RESIDUAL_ZERO,
    INTEGER_ZERO,
    QUANTIZED,
    QUANTIZED_BIAS,
    QUANTIZED_SCALE,
    quantized,
)
from tests.gpu.network import integers as integer_graph
from tests.reference import conv_reference

if TYPE_CHECKING:
    from max.driver import Device
    from max.engine import InferenceSession

pytestmark = pytest.mark.gpu


def sums(x: npt.ArrayLike, filter: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """A 3x3 convolution with padding 1 and a filter ``[R, S, C, K]``, exact: far below 2**53."""
    one = (1, 1)
    return conv_reference(
        x, np.moveaxis(filter, -1, 0), stride=one, dilation=one, pad_before=one, pad_after=one
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
        assert len(np.unique(wanted)) > min(50, wanted.size // 8)
        np.testing.assert_array_equal(first, wanted)
        added = np.maximum(sums(wanted, QUANTIZED["second"]) * 2.0**-9, 0) + residual
        wanted = integers(added / 0.25, -20)
        assert len(np.unique(wanted)) > min(50, wanted.size // 8)
        np.testing.assert_array_equal(second, wanted)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_zero_points(gpu_session: InferenceSession, gpu: Device, dtype: str) -> None:
    from max.driver import CPU, Buffer

    model = gpu_session.load(integer_graph(dtype))
    rng, limits = np.random.default_rng(6), np.iinfo(dtype)
    for shape in ((2, 9, 11), (1, 40, 37), (3, 1, 1)):
        x, residual = (
            rng.integers(limits.min, limits.max + 1, (*shape, channels)).astype(dtype)
            for channels in (32, 64)
        )
        first, second = (
            output.to(CPU()).to_numpy()
            for output in model.execute(*(Buffer.from_numpy(a).to(gpu) for a in (x, residual)))
        )
        scaled = sums(x.astype(np.float64) - INTEGER_ZERO, QUANTIZED["first"]) * QUANTIZED_SCALE
        added = 0.5 * (residual.astype(np.float64) - INTEGER_RESIDUAL_ZERO)
        steps = np.rint((np.maximum(scaled + QUANTIZED_BIAS, 0) + added) / 0.5)
        wanted = np.clip(steps + INTEGER_OUT_ZERO, limits.min, limits.max)
        assert len(np.unique(wanted)) > min(50, wanted.size // 8)
        np.testing.assert_array_equal(first, wanted)
        of_second = sums(wanted - INTEGER_OUT_ZERO, QUANTIZED["second"]) * 2.0**-9
        np.testing.assert_array_equal(second, of_second)
