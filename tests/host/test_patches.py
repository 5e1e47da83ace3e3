"""Rows of patches taken for pixels: a convolution whose filter is as long as its stride is the same
function of the same memory, whatever it is called."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from tests.reference import conv_reference

Floats = npt.NDArray[np.float64]


def _convolve(x: Floats, filters: Floats, stride: tuple[int, int]) -> Floats:
    none = (0, 0)
    return conv_reference(
        x, filters, stride=stride, dilation=(1, 1), pad_before=none, pad_after=none
    )


@pytest.mark.parametrize(
    ("h", "w", "c", "r", "s"), [(32, 48, 3, 16, 16), (28, 28, 4, 14, 14), (16, 24, 1, 2, 8)]
)
def test_memory_stays_as_it_is(h: int, w: int, c: int, r: int, s: int) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, h, w, c))
    filters = rng.standard_normal((24, r, s, c))
    whole = _convolve(x, filters, (r, s))
    rows = x.reshape(2 * (h // r), r, w // s, s * c)
    merged = _convolve(rows, filters.reshape(24, r, 1, s * c), (1, 1))
    assert np.allclose(merged.reshape(whole.shape), whole, rtol=1e-12, atol=1e-12)
