"""Tensors for the tests of ``maxconv.torch``, and the comparison with PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import maxconv.torch as mt

CONVOLVE = {1: mt.conv1d, 2: mt.conv2d, 3: mt.conv3d}
REFERENCE: dict[int, Callable[..., Tensor]] = {
    1: functional.conv1d,
    2: functional.conv2d,
    3: functional.conv3d,
}
#: Unit roundoffs: what one rounding to the dtype costs at most, relative to the value.
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def last(tensor: Tensor) -> Tensor:
    """The same values, the channels innermost in memory."""
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


def close(actual: Tensor, exact: Tensor, magnitude: Tensor | float, terms: int) -> None:
    """Compares with a float64 result.

    The kernels multiply and add ``terms`` products in float32, which costs at most ``terms`` units
    of the sum of their absolute values, and round to the output's type once.
    """
    assert actual.shape == exact.shape
    units = UNIT[actual.dtype] * exact.abs() + (terms + 4) * 2.0**-24 * magnitude
    # The smallest step of float16, and functions such as exp, are not relative to the sum.
    error = (actual.double() - exact).abs() - 1.2 * units - 2.0**-22
    assert error.numel() == 0 or error.max() <= 0, f"{error.max()} beyond what rounding explains"


def check(
    rank: int, actual: Tensor, x: Tensor, w: Tensor, b: Tensor | None, *geometry: Any
) -> None:
    """Compares a convolution without an epilogue with PyTorch's."""
    convolve = REFERENCE[rank]
    bias = None if b is None else b.double()
    exact = convolve(x.double(), w.double(), bias, *geometry)
    size = convolve(
        x.double().abs(), w.double().abs(), None if b is None else b.double().abs(), *geometry
    )
    close(actual, exact, size, w[0].numel() + 1)
