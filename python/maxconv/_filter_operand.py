"""The op's operand ``filter``, from what a caller of the graph functions may pass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, TensorValue, ops

from ._arguments import ConvArguments
from ._blocked_filter import blocks_of, krsc_of_array, without_blocks
from ._blocks import krsc_of_value
from ._checks import (
    LAYOUTS,
    Size,
    check_dtype,
    check_filter_layout,
    check_same_device,
    check_same_dtype,
    filter_shape_parts,
)
from ._dtypes import FILTER_BYTES, INT8
from ._fields import BLOCKED_FILTERS, PANEL, Layout
from ._graph import (
    constant,
    constant_array,
    flatten,
    is_graph_value,
    is_loaded_once,
    loaded_from_host,
)
from ._packing import (
    Array,
    PackedFilter,
    cast_array,
    packed_elements,
    panel_groups,
    panel_layout,
    read_array,
    to_krsc,
)
from ._problem import ConvProblem

__all__ = [
    "FilterArgument",
    "KnownFilter",
    "filter_argument",
    "filter_operand",
    "permuted_to_krsc",
]


@dataclass(frozen=True)
class KnownFilter:
    """A filter whose elements are known when the graph is built."""

    values: Array
    """As ``read_array`` returned them."""
    kind: str
    """The name of their type."""


@dataclass(frozen=True)
class FilterArgument:
    """The argument ``filter``, checked, and not yet in the op's order."""

    held: PackedFilter | KnownFilter | TensorValue
    layout: str
    """A name in ``LAYOUTS``; a ``PackedFilter`` has none."""
    filters: Size
    filter_size: tuple[int, ...]
    group_channels: Size

    @property
    def rank(self) -> int:
        """Spatial dimensions."""
        return len(self.filter_size)

    def known_groups(self, groups: int) -> int:
        """Returns the groups: a ``PackedFilter`` knows them, and 1 then stands for what it knows.

        Raises:
            ValueError: ``groups`` contradicts it.
        """
        if not isinstance(self.held, PackedFilter):
            return groups
        if groups not in (1, self.held.groups):
            raise ValueError(
                f"groups: {groups} is not what the filter was packed for; {self.held.groups} is "
                "allowed"
            )
        return self.held.groups

    def problem(self, x: TensorValue, arguments: ConvArguments, groups: int) -> ConvProblem:
        """Returns the convolution of ``[N, *spatial, C]`` with this filter.

        Raises:
            ValueError: The sizes are those of no convolution.
        """
        return ConvProblem.of(
            arguments,
            x.shape,
            filters=self.filters,
            filter_size=self.filter_size,
            group_channels=self.group_channels,
            groups=groups,
        )


def filter_argument(
    filter: object, filter_layout: object, *, rank: int, dtype: str, device: DeviceRef
) -> FilterArgument:
    """Reads the arguments ``filter`` and ``filter_layout``.

    Args:
        filter: A graph value, an array (numpy or ``__dlpack__``), or a ``PackedFilter``.
        filter_layout: The argument; a ``PackedFilter`` disregards it.
        rank: Spatial dimensions.
        dtype: The activation's type.
        device: The activation's device.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An argument has a value that is not allowed.
    """
    held: PackedFilter | KnownFilter | TensorValue
    if isinstance(filter, PackedFilter):
        if filter.spatial_rank != rank:
            raise ValueError(
                f"filter: the packed filter has {filter.spatial_rank} spatial dimensions; "
                f"{rank} are needed"
            )
        check_same_dtype("filter", filter.dtype, (dtype,), "is the input's")
        return FilterArgument(filter, "", filter.filters, filter.filter_size, filter.group_channels)
    blocked = rank == 2 and blocks_of(filter_layout) is not None
    others = tuple(BLOCKED_FILTERS) if rank == 2 else ()
    layout = "KRSC" if blocked else check_filter_layout(filter_layout, rank, others)
    if is_graph_value(filter):
        held = value = TensorValue(cast(Any, filter))
        if blocked:
            held = value = _without_blocks(value, filter_layout)
        kind = check_dtype("filter", value.dtype, FILTER_BYTES)
        check_same_dtype("filter", kind, (dtype,), "is the input's")
        check_same_device("filter", value.device, device)
        parts = filter_shape_parts(value.shape, layout, rank)
        known = isinstance(parts[0], int) and isinstance(parts[2], int)
        elements = constant_array(value) if known else None
        if elements is not None:
            held = KnownFilter(elements, kind)
    else:
        values, kind = read_array("filter", filter, integers=(INT8,))
        if blocked:
            values, _ = without_blocks(values, filter_layout)
        held = KnownFilter(values, kind)
        parts = filter_shape_parts(held.values.shape, layout, rank)
    return FilterArgument(held, layout, *parts)


def _without_blocks(value: TensorValue, filter_layout: object) -> TensorValue:
    """Returns ``[C / x, R, S, K, x]`` as ``[K, R, S, C]``.

    A constant stays one, and what is loaded from host memory is permuted there.

    Raises:
        ValueError: The shape is none of the layout.
    """
    blocks_of(filter_layout, value.shape)
    if (elements := constant_array(value)) is not None:
        return constant(krsc_of_array(elements), value.dtype.name, value.device)
    if (source := loaded_from_host(value)) is not None:
        return ops.transfer_to(krsc_of_value(source), value.device)
    return krsc_of_value(value)


def filter_operand(
    filter: FilterArgument, groups: int, *, dtype: str, device: DeviceRef
) -> tuple[TensorValue, Layout]:
    """Returns a filter's elements, flat, and their order.

    A filter whose elements are known is packed here. One that is loaded with the model is packed by
    the graph, which MAX runs once, at load time. Any other is packed by the op, in every call. For
    a GPU "packed" is ``[K, *taps, C / groups]``, for a CPU it is what ``pack_filter`` makes.

    Args:
        filter: What ``filter_argument`` returned.
        groups: A divisor of the filters, if their number is known.
        dtype: The activation's type.
        device: The activation's device.

    Raises:
        ValueError: An element is beyond a type of 8 bits.
    """
    held, on_gpu = filter.held, device.is_gpu()
    if isinstance(held, PackedFilter):
        elements, kind, layout = held.data, held.dtype, Layout.PACKED
        if on_gpu:
            elements, layout = held.unpack().reshape(-1), Layout.KRSC
        return constant(elements, kind, device), layout
    if isinstance(held, KnownFilter):
        krsc = to_krsc(held.values, filter.layout)
        if on_gpu:
            elements = cast_array(np.ascontiguousarray(krsc), held.kind, dtype)
            return constant(elements.reshape(-1), dtype, device), Layout.KRSC
        elements = packed_elements(krsc, held.kind, groups=groups, dtype=dtype)
        return constant(elements, dtype, device), Layout.PACKED
    known = isinstance(filter.filters, int) and isinstance(filter.group_channels, int)
    if known and on_gpu and (source := loaded_from_host(held)) is not None:
        packed = flatten(permuted_to_krsc(source, filter.layout))
        return ops.transfer_to(packed, device), Layout.KRSC
    if known and not on_gpu and is_loaded_once(held):
        return _packed_in_graph(held, filter, groups), Layout.PACKED
    return flatten(held), Layout(1 + LAYOUTS[filter.rank].index(filter.layout))


def permuted_to_krsc(value: TensorValue, layout: str) -> TensorValue:
    """Permutes a filter to ``[K, *taps, C / groups]`` with a graph operation."""
    rank = value.rank - 2
    own, default, _ = LAYOUTS[rank]
    if layout == own:
        return value
    if layout == default:
        return ops.permute(value, [rank + 1, *range(rank + 1)])
    return ops.permute(value, [0, *range(2, rank + 2), 1])


def _packed_in_graph(value: TensorValue, filter: FilterArgument, groups: int) -> TensorValue:
    """Packs a filter with graph operations, of which MAX makes at most a pad and a permutation."""
    filters, group_channels = cast(int, filter.filters), cast(int, filter.group_channels)
    taps, layout = math.prod(filter.filter_size), filter.layout
    own, default, _ = LAYOUTS[filter.rank]
    if group_channels == 1 and filters == groups:
        by_filter = layout != default
        tapwise = ops.reshape(value, (filters, taps) if by_filter else (taps, filters))
        return flatten(ops.permute(tapwise, [1, 0]) if by_filter else tapwise)
    shared = panel_groups(filters=filters, group_channels=group_channels, groups=groups)
    # Narrow groups share panels as if their filters were one group's.
    sets = groups // shared
    group_filters = filters // sets
    panels = -(-group_filters // PANEL)
    lanes: int
    outer: tuple[int, ...]
    inner: tuple[int, ...]
    order: tuple[int, ...]
    # Position of the lanes' dimension, the shape around it, and the order that packing wants.
    if layout == default:
        lanes, outer, inner, order = 2, (taps * group_channels, sets), (), (1, 2, 0, 3)
    elif layout == own:
        lanes, outer, inner, order = 1, (sets,), (taps * group_channels,), (0, 1, 3, 2)
    else:
        lanes, outer, inner, order = 1, (sets,), (group_channels, taps), (0, 1, 4, 3, 2)
    value = ops.reshape(value, (*outer, group_filters, *inner))
    if missing := panels * PANEL - group_filters:
        paddings = [0] * (2 * value.rank)
        paddings[2 * lanes + 1] = missing
        value = ops.pad(value, paddings)
    value = ops.reshape(value, (*outer, panels, PANEL, *inner))
    value = ops.permute(value, list(order))
    rows = panel_layout(
        filter.filter_size,
        filters=filters,
        group_channels=group_channels,
        groups=groups,
        dtype=value.dtype.name,
    )
    if rows.interleaved == 1:
        return flatten(value)
    value = ops.reshape(value, (sets * panels, rows.rows, rows.products, PANEL))
    if missing := rows.row_depth - rows.products:
        value = ops.pad(value, [0, 0, 0, 0, 0, missing, 0, 0])
    pairs = (sets * panels, rows.rows, rows.row_depth // rows.interleaved)
    value = ops.reshape(value, (*pairs, rows.interleaved, PANEL))
    value = ops.permute(value, [0, 1, 2, 4, 3])
    if not rows.has_sums:
        return flatten(value)
    whole = ops.reshape(value, (sets * panels, rows.sums_offset))
    return flatten(ops.concat([whole, _filter_sums(value)], axis=1))


def _filter_sums(panels: TensorValue) -> TensorValue:
    """Adds up the filters of packed panels of int8; the bytes of int32, ``[panels, 4 * PANEL]``.

    There is no operation that takes numbers for bytes, so float32, which holds such sums
    exactly, is taken apart.
    """
    count, rows, sets, lanes, side = (int(cast(Any, size)) for size in panels.shape)
    products = ops.permute(ops.cast(panels, DType.float32), [0, 3, 1, 2, 4])
    sums = ops.sum(ops.reshape(products, (count, lanes, rows * sets * side)), axis=-1)
    signed = []
    for _ in range(4):
        higher = ops.floor(sums * (1 / 256))
        unsigned = sums - higher * 256.0
        # 128 and above are negative as int8.
        signed.append(unsigned - 256.0 * ops.floor(unsigned * (1 / 128)))
        sums = higher
    return ops.reshape(ops.cast(ops.concat(signed, axis=-1), DType.int8), (count, lanes * 4))
