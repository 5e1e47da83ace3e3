"""Convolutions of int8 in NC/4HW4 on a GPU, against sums that are exact in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.gpu import interleaved
from tests.gpu.network import to_float32
from tests.reference import conv_reference

if TYPE_CHECKING:
    from max.driver import Device
    from max.engine import InferenceSession, Model

pytestmark = pytest.mark.gpu

Array = npt.NDArray[Any]


def blocks(x: Array) -> Array:
    """``[N, H, W, C]`` as ``[N, C / 4, H, W, 4]``."""
    n, h, w, c = x.shape
    return np.ascontiguousarray(np.moveaxis(x.reshape(n, h, w, c // 4, 4), 3, 1))


def integers(values: Array, zero_point: int = 0) -> npt.NDArray[np.int8]:
    """Rounded, halves to even, and clamped."""
    rounded: npt.NDArray[np.int8] = np.clip(np.rint(values) + zero_point, -128, 127).astype(np.int8)
    return rounded


def sums(x: Array, krsc: Array, **given: Any) -> npt.NDArray[np.float64]:
    """A convolution: stride, dilation and padding are 1, 1 and 0 unless given."""
    one, none = (1, 1), (0, 0)
    plain = {"stride": one, "dilation": one, "pad_before": none, "pad_after": none}
    return conv_reference(x, krsc, **{**plain, **given})


@pytest.fixture(scope="module")
def model(gpu_session: InferenceSession) -> Model:
    return gpu_session.load(interleaved.graph("int8"))


#: Images and their sizes, of the wide ones and of those of 4 channels: few pixels and many, rows
#: of any length, and pixels that are, or are not, whole vectors.
SHAPES = (((2, 9, 11), (3, 9, 11)), ((1, 40, 36), (1, 64, 61)), ((3, 1, 1), (2, 5, 6)))


@pytest.mark.parametrize("case", range(len(SHAPES)))
@pytest.mark.parametrize("coded", [False, True], ids=["random", "coded"])
def test_interleaved(model: Model, gpu: Device, case: int, coded: bool) -> None:
    from max.driver import Buffer

    rng = np.random.default_rng(case)
    wide, few = SHAPES[case]
    x = rng.integers(-128, 128, (*wide, 32)).astype(np.int8)
    colours = rng.integers(-128, 128, (*few, 4)).astype(np.int8)
    filter = rng.integers(-128, 128, interleaved.GIVEN).astype(np.int8)
    if coded:
        # Elements that name their coordinates, and a filter that takes one channel each.
        x = (np.indices(x.shape).reshape(4, -1).T @ [53, 17, 29, 3] % 251 - 125).astype(np.int8)
        x = x.reshape(*wide, 32)
        filter = np.zeros(interleaved.GIVEN, np.int8)
        filter[np.arange(len(filter)), np.arange(len(filter)) * 7 % 32] = 1
    residual = rng.integers(-64, 64, (*wide, 48)).astype(np.float32) / 8
    operands = (x, blocks(residual), blocks(colours), filter)
    first, second, stem, given = (
        to_float32(output)
        for output in model.execute(*(Buffer.from_numpy(value).to(gpu) for value in operands))
    )
    around: dict[str, Any] = {"pad_before": (1, 1), "pad_after": (1, 1)}
    # Scales are powers of two, and scaled sums are rounded once: float64 and float32 agree.
    scaled = sums(x, np.moveaxis(interleaved.FIRST, -1, 0), **around).astype(np.float32)
    scaled = scaled * interleaved.SCALE
    rounded = integers(np.maximum(scaled + interleaved.BIAS, 0) / 0.5)
    np.testing.assert_array_equal(first, blocks(rounded))
    added = sums(rounded, np.moveaxis(interleaved.SECOND, -1, 0), **around).astype(np.float32)
    rounded = integers((added * np.float32(2.0**-15) + residual) / 0.25, -20)
    np.testing.assert_array_equal(second, rounded)
    assert len(np.unique(rounded)) > 20
    # The activation's fourth channel meets no filter.
    coloured = sums(
        colours[..., :3],
        np.moveaxis(interleaved.STEM, -1, 0),
        stride=(2, 2),
        pad_before=(3, 3),
        pad_after=(2, 1),
    )
    # bfloat16 keeps 8 bits; rounding to the nearest loses half of the last one.
    np.testing.assert_allclose(stem, blocks(coloured), rtol=2.0**-8, atol=0)
    exact = sums(x, filter.transpose(0, 2, 3, 1), stride=(2, 1)).astype(np.float32)
    np.testing.assert_array_equal(given, blocks(exact))
