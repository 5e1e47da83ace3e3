"""Means over pixels, and, on a CPU, integers made of floats: means of one pixel."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._library_files import Family
from .._native import Host, Mean, beside, host
from ._dtypes import CPU_DTYPES, NAMES
from ._functional import call_key
from ._plan import Direct, gpu_target, runners

__all__ = [
    "MeanPlan",
    "Rounded",
    "is_dense_image",
    "mean_output",
    "plan_average",
    "plan_mean",
    "plan_rounding",
]

_FORMATS: Any = {4: torch.channels_last, 5: torch.channels_last_3d}


class Rounded(NamedTuple):
    """Integers that come out."""

    dtype: torch.dtype
    factor: float
    """Steps in 1."""
    zero_point: int


class MeanPlan:
    """A call without addresses.

    Args:
        library: Of the types.
        constants: What its function takes in front of the addresses.
        output: The output's shape, strides and dtype.
        index: The GPU's, or -1: the CPU.
        keeps: What must live as long.
    """

    def __init__(
        self,
        library: Host | Mean,
        constants: tuple[int, ...],
        output: tuple[tuple[int, ...], tuple[int, ...], torch.dtype],
        *,
        index: int = -1,
        keeps: Any = None,
    ) -> None:
        self._library, self._constants, self._output = library, constants, output
        self._index, self._keeps = index, keeps

    def run(self, input: Tensor) -> Tensor:
        """Returns the means of a tensor of which the plan knows everything but its address."""
        shape, strides, dtype = self._output
        output = input.new_empty_strided(shape, strides, dtype=dtype)
        addresses = input.data_ptr(), output.data_ptr()
        if failed := self._library.mean(*self._constants, *addresses, *runners(self._index)):
            raise self._library.error(failed)
        return output

    def direct(self, input: Tensor) -> Direct:
        """Returns what ``run`` does."""
        run, constants = self._library.mean, self._constants
        return Direct(
            self._library, run, constants, (input,), {}, *self._output, self._keeps, self._index
        )


def _on_cpu(
    family: Family,
    sizes: tuple[int, int, int],
    scalars: tuple[float, ...],
    output: tuple[tuple[int, ...], tuple[int, ...], torch.dtype],
    *,
    rounds: bool,
) -> MeanPlan:
    """Returns the plan of a CPU's call.

    Args:
        family: The types.
        sizes: Images, pixels and channels.
        scalars: What a sum is multiplied with, what is then added, steps in 1 and zero point.
        output: Its shape, strides and dtype.
        rounds: Whether the input is float32 whatever the library's type.
    """
    numbers = np.array(scalars, np.float32)
    constants = (*sizes, numbers.ctypes.data, int(rounds))
    return MeanPlan(host(family), constants, output, keeps=numbers)


def is_dense_image(input: Tensor) -> bool:
    """Whether a tensor ``[N, C, *spatial]`` is channels last without gaps, and holds anything."""
    if not 3 <= input.dim() <= 5 or input.numel() == 0:
        return False
    if input.dim() == 3:
        return input.transpose(1, 2).is_contiguous()
    return input.is_contiguous(memory_format=_FORMATS[input.dim()])


def plan_mean(
    input: Tensor, factor: float, shift: float, dtype: torch.dtype, rounded: Rounded | None = None
) -> MeanPlan | None:
    """Returns the plan of the mean over all pixels, times a factor, plus a summand.

    Args:
        input: ``[N, C, *spatial]``, of a type that convolutions take.
        factor: Of the mean.
        shift: What is added.
        dtype: Of floats that come out.
        rounded: Integers that come out instead.

    Returns:
        ``None`` for what PyTorch's operators must see, and for what is no dense image of a CPU.
    """
    if not input.is_cpu or input.dtype not in CPU_DTYPES or not is_dense_image(input):
        return None
    if call_key((input,)) is None:
        return None
    return _plan_mean(input.shape, input.dtype, factor, shift, dtype, rounded)


@lru_cache(maxsize=4096)
def plan_average(shape: torch.Size, dtype: torch.dtype, index: int) -> MeanPlan:
    """Returns the plan of the mean over all pixels of a dense image, of its own type.

    Args:
        shape: ``[N, C, *spatial]``.
        dtype: A float.
        index: The GPU's, or -1: the CPU.
    """
    if index < 0:
        return _plan_mean(shape, dtype, 1.0, 0.0, dtype, None)
    library = beside(Mean, NAMES[dtype], gpu_target(index).architecture)
    batch, channels, *spatial = shape
    constants = library.device(index), batch, math.prod(spatial), channels
    return MeanPlan(library, constants, mean_output(shape, dtype), index=index)


def mean_output(
    shape: torch.Size, dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Returns shape, strides and dtype of the means over pixels."""
    batch, channels, *spatial = shape
    return (
        (batch, channels, *(1 for _ in spatial)),
        (channels, 1, *(channels for _ in spatial)),
        dtype,
    )


@lru_cache(maxsize=4096)
def _plan_mean(
    shape: torch.Size,
    dtype: torch.dtype,
    factor: float,
    shift: float,
    floats: torch.dtype,
    rounded: Rounded | None,
) -> MeanPlan:
    batch, channels, *spatial = shape
    pixels = math.prod(spatial)
    coming = floats if rounded is None else rounded.dtype
    integers = not dtype.is_floating_point
    bias = "float32" if integers else NAMES[dtype]
    return _on_cpu(
        Family(NAMES[dtype], bias, NAMES[coming], scaled=integers),
        (batch, pixels, channels),
        (factor / pixels, shift, *((1.0, 0.0) if rounded is None else rounded[1:])),
        mean_output(shape, coming),
        rounds=False,
    )


def plan_rounding(input: Tensor, rounded: Rounded) -> MeanPlan | None:
    """Returns the plan of integers made of float32, element by element.

    Returns:
        ``None`` for what PyTorch's operators must see, and for another type, device or a tensor
        with gaps.
    """
    if not input.is_cpu or input.dtype != torch.float32 or input.numel() == 0:
        return None
    if call_key((input,)) is None:
        return None
    return _plan_rounding(input.shape, input.stride(), rounded)


@lru_cache(maxsize=4096)
def _plan_rounding(
    shape: torch.Size, strides: tuple[int, ...], rounded: Rounded
) -> MeanPlan | None:
    # Whether elements fill the memory: from the smallest stride on, each is the product before it.
    extent = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and stride != extent:
            return None
        extent *= size
    kind = NAMES[rounded.dtype]
    return _on_cpu(
        Family(kind, "float32", kind, scaled=True),
        (1, 1, extent),
        (1.0, 0.0, *rounded[1:]),
        (tuple(shape), strides, rounded.dtype),
        rounds=True,
    )
