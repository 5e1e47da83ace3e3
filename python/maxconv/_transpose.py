"""A transposed convolution in a graph: convolutions of stride 1, whose outputs are interleaved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from max.graph import DeviceRef, Dim, TensorValue, ops

from ._arguments import ConvArguments
from ._checks import Size, check_size, show
from ._filter_operand import FilterArgument, KnownFilter, filter_argument, permuted_to_krsc
from ._graph import constant
from ._packing import Array, PackedFilter, cast_array, to_krsc
from ._phases import AxisPhase, check_transposed, split_axes

__all__ = ["Phase", "Split", "split_phases"]


@dataclass(frozen=True)
class Phase:
    """A convolution of stride 1 that gives one phase of the output, or all of them side by side."""

    filter: FilterArgument
    arguments: ConvArguments
    cut: tuple[tuple[int, int], ...]
    """Elements to cut from the start and the end of its output, a dimension."""


@dataclass(frozen=True)
class Split:
    """What a transposed convolution consists of."""

    phases: tuple[Phase, ...]
    """``stride_h * stride_w`` phases, row by row; or one, whose filters are those of all phases."""
    stride: tuple[int, ...]
    surplus: tuple[int, ...]
    sizes: tuple[Size, ...]
    """Of each phase's output, when it is cut."""
    filters: int

    @property
    def merged(self) -> bool:
        """Whether one convolution computes all phases."""
        return len(self.phases) == 1 and self.stride != (1, 1)

    def assemble(self, outputs: Sequence[TensorValue]) -> TensorValue:
        """Puts the phases' outputs, ``[N, H', W', filters]`` each, in their places."""
        cut = [
            self._of_size(_cut(output, phase.cut))
            for output, phase in zip(outputs, self.phases, strict=True)
        ]
        rows, columns = self.stride
        if self.stride == (1, 1):
            return cut[0]
        batch, height, width, _ = cut[0].shape
        if self.merged:
            split = (batch, height, width, rows, columns, self.filters)
            tiles = ops.permute(ops.reshape(cut[0], split), [0, 1, 3, 2, 4, 5])
        else:
            lines = [ops.stack(cut[r * columns : (r + 1) * columns], axis=3) for r in range(rows)]
            tiles = ops.stack(lines, axis=2)
        whole = ops.reshape(tiles, (batch, height * rows, width * columns, self.filters))
        return _cut(whole, tuple((0, extra) for extra in self.surplus))

    def _of_size(self, value: TensorValue) -> TensorValue:
        """Returns a phase's output as what it is: all are equally large.

        The size of some may say what becomes of an input that is smaller than the filter.
        """
        batch, *found, filters = value.shape
        if found == list(map(Dim, self.sizes)):
            return value
        return ops.rebind(value, [batch, *self.sizes, filters])


def split_phases(
    input_shape: Sequence[Any],
    filter: object,
    filter_layout: object,
    arguments: ConvArguments,
    output_paddings: tuple[int, ...],
    *,
    dtype: str,
    device: DeviceRef,
) -> Split:
    """Reads what only a transposed convolution has, and splits it.

    Args:
        input_shape: ``[N, H, W, C]``.
        filter: The argument: a graph value or an array, of ``C`` filters.
        filter_layout: The argument.
        arguments: Those of the transposed convolution; its padding has a size.
        output_paddings: One a spatial dimension.
        dtype: The input's type, to which an array is converted.
        device: The input's device.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An argument has a value that is not allowed.
    """
    rank, count = arguments.rank, arguments.groups
    if isinstance(filter, PackedFilter):
        raise TypeError(
            "filter: a PackedFilter is not in the order that a transposed convolution reads; an "
            "array or a graph value is allowed"
        )
    given = filter_argument(filter, filter_layout, rank=rank, dtype=dtype, device=device)
    source = _filter_source(given, count, dtype)
    _check_input(input_shape, given.filters, count)
    axes = split_axes(given.filter_size, arguments, output_paddings)
    sizes = [check_size("input", size) for size in input_shape[1:-1]]
    check_transposed(sizes, axes)
    rows, columns = (axis.phases for axis in axes)
    combined = [(row, column) for row in rows for column in columns]
    same = len({_geometry(*pair) for pair in combined}) == 1
    # Groups would have to be interleaved with the phases; they stay apart instead.
    if same and count == 1 and len(combined) > 1:
        phases = [_phase(combined, source, arguments)]
    else:
        phases = [_phase([pair], source, arguments) for pair in combined]
    surplus = tuple(axis.surplus for axis in axes)
    phase_sizes = tuple(size + axis.growth for size, axis in zip(sizes, axes, strict=True))
    return Split(tuple(phases), arguments.stride, surplus, phase_sizes, source.filters)


def _geometry(*axes: AxisPhase) -> tuple[tuple[int, ...], ...]:
    return tuple((max(len(a.taps), 1), a.dilation, a.pad_before, a.pad_after) for a in axes)


def _phase(
    members: Sequence[tuple[AxisPhase, AxisPhase]],
    source: _ArrayFilter | _GraphFilter,
    arguments: ConvArguments,
) -> Phase:
    """Returns the convolution of one phase, or of several with the same geometry."""
    axes = members[0]
    filter = source.part([(row.taps, column.taps) for row, column in members])
    shape = filter.shape if isinstance(filter, TensorValue) else filter.values.shape
    filters, *filter_size, group_channels = (check_size("filter", size) for size in shape)
    return Phase(
        FilterArgument(
            filter, "KRSC", filters, tuple(int(size) for size in filter_size), group_channels
        ),
        replace(
            arguments,
            stride=(1,) * len(axes),
            dilation=tuple(axis.dilation for axis in axes),
            padding=tuple(max(pad, 0) for a in axes for pad in (a.pad_before, a.pad_after)),
        ),
        tuple((max(-a.pad_before, 0), max(-a.pad_after, 0)) for a in axes),
    )


#: Rows and columns of taps, in the order of a convolution.
_Taps: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class _ArrayFilter:
    """``[K, R, S, C / groups]`` with known elements, of which parts are taken."""

    forward: Array
    dtype: str

    @property
    def filters(self) -> int:
        return int(self.forward.shape[0])

    def part(self, taps: Sequence[_Taps]) -> KnownFilter:
        """Returns the filters of these parts one after the other; no tap becomes a zero."""
        pieces = []
        for rows, columns in taps:
            piece = self.forward[:, list(rows)][:, :, list(columns)]
            pieces.append(np.pad(piece, [(0, int(size == 0)) for size in piece.shape]))
        return KnownFilter(np.concatenate(pieces), self.dtype)


@dataclass(frozen=True)
class _GraphFilter:
    """``[K, R, S, C / groups]`` in a graph, of which parts are taken."""

    forward: TensorValue

    @property
    def filters(self) -> int:
        return int(self.forward.shape[0])

    def part(self, taps: Sequence[_Taps]) -> TensorValue:
        """Returns the filters of these parts one after the other; no tap becomes a zero."""
        pieces = [self._piece(*pair) for pair in taps]
        return ops.concat(pieces) if len(pieces) > 1 else pieces[0]

    def _piece(self, rows: tuple[int, ...], columns: tuple[int, ...]) -> TensorValue:
        value = self.forward
        filters, *_, channels = value.shape
        if not rows or not columns:
            zero = constant(np.zeros(1, np.float32), "float32", value.device).cast(value.dtype)
            shape = (filters, max(len(rows), 1), max(len(columns), 1), channels)
            return ops.broadcast_to(zero, shape)
        for axis, indices in ((1, rows), (2, columns)):
            if indices != tuple(range(int(value.shape[axis]))):
                order = ops.constant(np.array(indices, np.int64), device=value.device)
                value = ops.gather(value, order, axis)
        return value


def _filter_source(filter: FilterArgument, groups: int, dtype: str) -> _ArrayFilter | _GraphFilter:
    """Returns where parts of a filter come from: channels and filters swapped in each group."""
    channels, group_filters = filter.filters, filter.group_channels
    if not isinstance(channels, int) or not isinstance(group_filters, int):
        assert isinstance(filter.held, TensorValue)
        shape = show(tuple(filter.held.shape))
        raise ValueError(f"filter: shape {shape} is symbolic; a static shape is allowed")
    if channels % groups:
        raise ValueError(f"filter: {channels} filters are not divisible by groups={groups}")
    split = (groups, channels // groups, *filter.filter_size, group_filters)
    whole = (groups * group_filters, *filter.filter_size, channels // groups)
    if isinstance(filter.held, KnownFilter):
        values = cast_array(filter.held.values, filter.held.kind, dtype)
        grouped = to_krsc(values, filter.layout).reshape(split)
        return _ArrayFilter(grouped.transpose(0, 4, 2, 3, 1).reshape(whole), dtype)
    assert isinstance(filter.held, TensorValue)
    krsc = permuted_to_krsc(filter.held, filter.layout)
    turned = ops.permute(ops.reshape(krsc, split), [0, 4, 2, 3, 1])
    return _GraphFilter(ops.reshape(turned, whole))


def _check_input(shape: Sequence[Any], channels: object, groups: int) -> None:
    if len(shape) != 4:
        raise ValueError(
            f"input: shape {show(tuple(shape))} has rank {len(shape)}; a transposed convolution "
            "takes rank 4: [batch, h, w, channels]"
        )
    size = check_size("input", shape[-1])
    if isinstance(size, int) and size % groups:
        raise ValueError(f"input: {size} channels are not divisible by groups={groups}")
    if isinstance(size, int) and size != channels:
        raise ValueError(
            f"filter: {channels} filters do not match the input's {size} channels; a transposed "
            f"convolution needs {size}"
        )


def _cut(value: TensorValue, spatial: Sequence[tuple[int, int]]) -> TensorValue:
    """Cuts ``(start, end)`` elements off each spatial dimension of ``[N, H, W, K]``."""
    if not any(start or end for start, end in spatial):
        return value
    index = (slice(None), *(slice(start, -end if end else None) for start, end in spatial))
    return value[index]
