"""A transposed convolution as convolutions of stride 1: their geometry, without tensors.

With stride ``s``, output ``p = s * q + phase`` receives from input ``i`` through tap ``r`` where
``s * i + dilation * r = p + pad``. For one phase these taps are every ``s / gcd(s, dilation)``-th
one, and as ``q`` advances so does ``i``: a convolution of stride 1 with a part of the filter,
reversed. The phases are then interleaved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ._arguments import ConvArguments
from ._checks import AXES, Size, check_at_least, show

__all__ = ["AxisPhase", "AxisSplit", "check_transposed", "split_axes", "split_axis"]


@dataclass(frozen=True)
class AxisPhase:
    """One phase along one dimension: a convolution of stride 1."""

    taps: tuple[int, ...]
    """Indices of the filter's taps, in the convolution's order; empty where none contributes."""
    dilation: int
    pad_before: int
    pad_after: int
    """Zeros around the input; a negative number is cut from the convolution's output instead."""


@dataclass(frozen=True)
class AxisSplit:
    """All phases along one dimension."""

    phases: tuple[AxisPhase, ...]
    growth: int
    """Output elements of each phase beyond the input's size."""
    surplus: int
    """Elements to cut from the end of the interleaved phases."""

    def output_size(self, size: int) -> int:
        """Returns the output's extent for an input's; both may be PyTorch's symbols."""
        return (size + self.growth) * len(self.phases) - self.surplus


def split_axis(
    *, taps: int, stride: int, dilation: int, pad_before: int, pad_after: int, output_padding: int
) -> AxisSplit:
    """Splits a transposed convolution along one dimension into its phases."""
    total = dilation * (taps - 1) + 1 + output_padding - pad_before - pad_after
    growth = -(-total // stride) - 1
    common = math.gcd(stride, dilation)
    step = dilation // common
    phases = []
    for phase in range(stride):
        shift, residue = divmod(phase + pad_before, stride)
        indices = [r for r in range(taps) if r * dilation % stride == residue]
        first = (indices[0] * dilation - residue) // stride if indices else shift
        span = step * max(len(indices) - 1, 0)
        before = first + span - shift
        phases.append(AxisPhase(tuple(reversed(indices)), step, before, growth - before + span))
    return AxisSplit(tuple(phases), growth, stride * (growth + 1) - total)


def split_axes(
    taps: Sequence[int], arguments: ConvArguments, output_paddings: tuple[int, ...]
) -> tuple[AxisSplit, ...]:
    """Splits a transposed convolution along each spatial dimension.

    Args:
        taps: The filter's, one number a spatial dimension.
        arguments: Those of the transposed convolution; its padding has a size.
        output_paddings: One a spatial dimension.

    Raises:
        ValueError: An output padding is negative, or not below both stride and dilation.
    """
    strides, dilations = arguments.stride, arguments.dilation
    before, after = arguments.pads(taps)
    check_at_least("output_paddings", output_paddings, 0)
    if any(e >= max(s, d) for e, s, d in zip(output_paddings, strides, dilations, strict=True)):
        raise ValueError(
            f"output_paddings: {show(output_paddings)} has an entry that is not below the stride "
            f"{show(strides)} or the dilation {show(dilations)}"
        )
    return tuple(
        split_axis(
            taps=taps[i],
            stride=strides[i],
            dilation=dilations[i],
            pad_before=before[i],
            pad_after=after[i],
            output_padding=output_paddings[i],
        )
        for i in range(arguments.rank)
    )


def check_transposed(sizes: Sequence[Size], axes: Sequence[AxisSplit]) -> None:
    """Checks the input's extents, as far as they are known, and the output's.

    Raises:
        ValueError: An extent of the input or the output is empty.
    """
    for name, size, axis in zip(AXES[len(sizes)], sizes, axes, strict=True):
        if not isinstance(size, int):
            continue
        if size < 1:
            raise ValueError(f"input: {name} extent {size} is empty; at least 1 is needed")
        if (output := axis.output_size(size)) < 1:
            raise ValueError(
                f"padding: cuts the output's {name} extent down to {output}; at least 1 must remain"
            )
