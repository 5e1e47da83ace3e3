"""Operands in a graph of a convolution whose input is enlarged: those of its sub-pixel form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import cast

import numpy as np
from max.dtype import DType
from max.graph import TensorValue, ops

from ._checks import show
from ._filter_operand import FilterArgument, KnownFilter, permuted_to_krsc
from ._graph import constant, loaded_from_host, repeat
from ._packing import Array, PackedFilter, cast_array, to_krsc
from ._problem import ConvProblem
from ._subpixel import SubpixelAxis, fold_array, fold_axes

__all__ = ["repeated", "subpixel_filter"]


def subpixel_filter(
    filter: FilterArgument, problem: ConvProblem, groups: int, dtype: str
) -> FilterArgument:
    """Returns the filter that the kernels run, its taps summed in float64 or float32.

    Elements that are known are summed here, those of a weight when the model is loaded, any other
    in each call.

    Args:
        filter: The caller's.
        problem: The convolution, which ``upsamples``.
        groups: Of the convolution.
        dtype: Of input and filter, of 16 or 32 bits.

    Raises:
        ValueError: A graph value's filters have symbolic sizes.
    """
    axes, run = problem.subpixel_axes, problem.subpixel
    held: KnownFilter | TensorValue
    if isinstance(filter.held, PackedFilter):
        packed = filter.held
        held = _folded_array(packed.unpack(), packed.dtype, axes, groups, dtype)
    elif isinstance(filter.held, KnownFilter):
        known = filter.held
        held = _folded_array(to_krsc(known.values, filter.layout), known.kind, axes, groups, dtype)
    else:
        held = _folded_value(filter, axes, groups)
    return replace(
        filter, held=held, layout="KRSC", filters=run.filters, filter_size=run.filter_size
    )


def _folded_array(
    krsc: Array, kind: str, axes: Sequence[SubpixelAxis], groups: int, dtype: str
) -> KnownFilter:
    folded = fold_array(cast_array(krsc, kind, "float32"), axes, groups)
    return KnownFilter(cast_array(folded, "float32", dtype), dtype)


def _folded_value(filter: FilterArgument, axes: Sequence[SubpixelAxis], groups: int) -> TensorValue:
    value = cast(TensorValue, filter.held)
    filters, channels = filter.filters, filter.group_channels
    if not isinstance(filters, int) or not isinstance(channels, int):
        raise ValueError(
            f"filter: shape {show(tuple(value.shape))} is symbolic; with upsample a static shape "
            "is allowed"
        )
    if (source := loaded_from_host(value)) is not None:
        folded = _folded_value(replace(filter, held=source), axes, groups)
        return ops.transfer_to(folded, value.device)

    def sum_of(whole: TensorValue, at: int, taps: tuple[int, ...]) -> TensorValue:
        if not taps:
            rest = [size for i, size in enumerate(whole.shape) if i != at]
            zero = constant(np.zeros(1, np.float32), "float32", whole.device)
            return ops.broadcast_to(zero, rest)
        before = (slice(None),) * at
        # Python 3.10 unpacks nothing into an index.
        parts = (whole[before + (tap,)] for tap in taps)  # noqa: RUF005
        return reduce(lambda left, right: left + right, parts)

    krsc = permuted_to_krsc(value, filter.layout).cast(DType.float32)
    folded = fold_axes(krsc, axes, 1, sum_of=sum_of, stack=lambda v, at: ops.stack(v, axis=at))
    places = math.prod(axis.block for axis in axes)
    taps = tuple(axis.taps for axis in axes)
    folded = ops.reshape(folded, (places, groups, filters // groups, *taps, channels))
    folded = ops.permute(folded, [1, 0, *range(2, folded.rank)])
    return ops.reshape(folded, (places * filters, *taps, channels)).cast(value.dtype)


def repeated(value: TensorValue | None, problem: ConvProblem, groups: int) -> TensorValue | None:
    """Returns a vector of the filters' with a copy for each place in a block.

    Args:
        value: ``[K]``, or ``None``.
        problem: The convolution, which ``upsamples``.
        groups: Of the convolution.
    """
    places = math.prod(problem.upsample)
    if value is None or groups == 1:
        return None if value is None else repeat(value, places)
    split = ops.reshape(value, (groups, 1, cast(int, problem.filters) // groups))
    return ops.reshape(ops.tile(split, (1, places, 1)), (-1,))
