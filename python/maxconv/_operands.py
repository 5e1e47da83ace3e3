"""Operands of ``maxconv.conv``, from what a caller of the graph functions may pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
from max.graph import DeviceRef, TensorValue, ops

from ._fields import PANEL, Layout
from ._graph import constant, constant_array, flatten, is_graph_value, is_loaded_once
from .arguments import (
    BLACKWELL_BYTES,
    DTYPE_BYTES,
    FLOAT8,
    INPUT_BYTES,
    LAYOUTS,
    Size,
    check_bias,
    check_device,
    check_dtype,
    check_filter_layout,
    check_integer,
    check_residual,
    check_same_dtype,
    filter_shape_parts,
)
from .packing import Array, PackedFilter, cast_array, krsc_elements, pack_elements, read_array

__all__ = [
    "FilterLike",
    "FilterOperand",
    "bias_operand",
    "channels_first",
    "filter_operand",
    "graph_value",
    "input_operand",
    "residual_operand",
    "scale_operand",
    "to_channels_first",
    "to_channels_last",
]

#: A filter: a graph value, an array (numpy or ``__dlpack__``), or a ``PackedFilter``.
FilterLike: TypeAlias = Any


@dataclass(frozen=True)
class FilterOperand:
    """A filter on its way to the op: flat, and what its shape was."""

    value: TensorValue
    layout: Layout
    filters: Size
    filter_size: tuple[int, ...]
    group_channels: Size
    groups: int


def graph_value(name: str, value: object, why: str) -> TensorValue:
    """Returns a tensor value of the current graph; ``why`` ends the ``TypeError``'s message."""
    if not is_graph_value(value):
        raise TypeError(f"{name}: a {type(value).__name__} is not a graph value; {why}")
    return TensorValue(cast(Any, value))


def filter_operand(
    filter: FilterLike,
    filter_layout: object,
    groups: object,
    *,
    rank: int,
    dtype: str,
    device: DeviceRef,
) -> FilterOperand:
    """Reads the ``filter``, ``filter_layout`` and ``groups`` arguments.

    A filter whose elements are known is packed here. One that is loaded with the model is packed by
    the graph, which MAX runs once, at load time. Any other is packed by the op, in every call. For
    a GPU "packed" is ``[K, *taps, C / groups]``, for a CPU it is what ``pack_filter`` makes.

    Args:
        filter: The argument.
        filter_layout: The argument; a ``PackedFilter`` has its own.
        groups: The argument; a ``PackedFilter`` knows it, and 1 then stands for what it knows.
        rank: Spatial dimensions.
        dtype: The activation's type.
        device: The activation's device.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An argument has a value that is not allowed.
    """
    count = check_integer("groups", groups)
    if isinstance(filter, PackedFilter):
        if filter.spatial_rank != rank:
            raise ValueError(
                f"filter: the packed filter has {filter.spatial_rank} spatial dimensions; "
                f"{rank} are needed"
            )
        if count not in (1, filter.groups):
            raise ValueError(
                f"groups: {count} is not what the filter was packed for; {filter.groups} is allowed"
            )
        check_same_dtype("filter", filter.dtype, (dtype,), "is the input's")
        if device.is_gpu():
            return _krsc(filter.unpack(), dtype, filter.groups, device)
        return _packed(filter, device)
    layout = check_filter_layout(filter_layout, rank)
    if not is_graph_value(filter):
        array, kind = read_array("filter", filter, integers=True)
        return _known(array, kind, layout, count, dtype, device)
    value = TensorValue(filter)
    kind = check_dtype("filter", value.dtype, INPUT_BYTES)
    check_same_dtype("filter", kind, (dtype,), "is the input's")
    if value.device != device:
        raise ValueError(f"filter: device {value.device} is not the input's; {device} is needed")
    filters, filter_size, group_channels = filter_shape_parts(value.shape, layout, rank)
    sizes = (filters, group_channels)
    if count >= 1 and all(isinstance(size, int) for size in sizes):
        elements = constant_array(value)
        if elements is not None:
            return _known(elements, dtype, layout, count, dtype, device)
        if cast(int, filters) % count == 0 and is_loaded_once(value):
            if device.is_gpu():
                value = _permuted_to_krsc(value, layout, rank)
                return FilterOperand(
                    flatten(value), Layout.KRSC, filters, filter_size, group_channels, count
                )
            packed_value = _pack_in_graph(value, layout, count, rank)
            return FilterOperand(
                packed_value, Layout.PACKED, filters, filter_size, group_channels, count
            )
    code = Layout(1 + LAYOUTS[rank].index(layout))
    return FilterOperand(flatten(value), code, filters, filter_size, group_channels, count)


def _known(
    values: Array, kind: str, layout: str, groups: int, dtype: str, device: DeviceRef
) -> FilterOperand:
    """Packs a filter whose elements are known now."""
    if device.is_gpu():
        elements = krsc_elements(values, kind, layout, groups=groups, dtype=dtype)
        return _krsc(elements, dtype, groups, device)
    return _packed(pack_elements(values, kind, layout, groups=groups, dtype=dtype), device)


def _krsc(elements: Array, dtype: str, groups: int, device: DeviceRef) -> FilterOperand:
    """Makes a constant of ``[K, *taps, C / groups]``."""
    filters, *filter_size, group_channels = elements.shape
    return FilterOperand(
        constant(elements.reshape(-1), dtype, device),
        Layout.KRSC,
        filters,
        tuple(filter_size),
        group_channels,
        groups,
    )


def _permuted_to_krsc(value: TensorValue, layout: str, rank: int) -> TensorValue:
    """Permutes a filter to ``[K, *taps, C / groups]`` with a graph operation."""
    own, default, _ = LAYOUTS[rank]
    if layout == own:
        return value
    if layout == default:
        return ops.permute(value, [rank + 1, *range(rank + 1)])
    return ops.permute(value, [0, *range(2, rank + 2), 1])


def _packed(filter: PackedFilter, device: DeviceRef) -> FilterOperand:
    return FilterOperand(
        constant(filter.data, filter.dtype, device),
        Layout.PACKED,
        filter.filters,
        filter.filter_size,
        filter.group_channels,
        filter.groups,
    )


def _pack_in_graph(value: TensorValue, layout: str, groups: int, rank: int) -> TensorValue:
    """Packs a filter with graph operations, of which MAX makes at most a pad and a permutation."""
    filters, filter_size, group_channels = filter_shape_parts(value.shape, layout, rank)
    filters, group_channels = cast(int, filters), cast(int, group_channels)
    taps = int(np.prod(filter_size))
    own, default, _ = LAYOUTS[rank]
    if group_channels == 1 and filters == groups:
        by_filter = layout != default
        tapwise = ops.reshape(value, (filters, taps) if by_filter else (taps, filters))
        return flatten(ops.permute(tapwise, [1, 0]) if by_filter else tapwise)
    group_filters = filters // groups
    panels = -(-group_filters // PANEL)
    lanes: int
    outer: tuple[int, ...]
    inner: tuple[int, ...]
    order: tuple[int, ...]
    # Position of the lanes' dimension, the shape around it, and the order that packing wants.
    if layout == default:
        lanes, outer, inner, order = 2, (taps * group_channels, groups), (), (1, 2, 0, 3)
    elif layout == own:
        lanes, outer, inner, order = 1, (groups,), (taps * group_channels,), (0, 1, 3, 2)
    else:
        lanes, outer, inner, order = 1, (groups,), (group_channels, taps), (0, 1, 4, 3, 2)
    value = ops.reshape(value, (*outer, group_filters, *inner))
    if missing := panels * PANEL - group_filters:
        paddings = [0] * (2 * value.rank)
        paddings[2 * lanes + 1] = missing
        value = ops.pad(value, paddings)
    value = ops.reshape(value, (*outer, panels, PANEL, *inner))
    return flatten(ops.permute(value, list(order)))


def bias_operand(
    bias: object, filters: Size, *, dtype: str, device: DeviceRef
) -> TensorValue | None:
    """Reads the ``bias`` argument; an array of another type than ``dtype`` becomes float32.

    Args:
        bias: The argument.
        filters: How many elements it must have.
        dtype: The type that it may have beside float32.
        device: The input's device.

    Raises:
        TypeError: It is neither a graph value nor an array.
        ValueError: It has a rank, a length, a type or a device that is not allowed.
    """
    if bias is None:
        return None
    if not is_graph_value(bias):
        values, kind = read_array("bias", bias)
        check_bias(values.shape, filters)
        target = kind if kind == dtype else "float32"
        return constant(cast_array(values, kind, target), target, device)
    value = TensorValue(cast(Any, bias))
    check_bias(value.shape, filters)
    allowed = (dtype, "float32")
    check_same_dtype("bias", value.dtype.name, allowed, "is allowed for this input")
    if value.device != device:
        raise ValueError(f"bias: device {value.device} is not the input's; {device} is needed")
    return value


def scale_operand(scale: object, filters: Size, device: DeviceRef) -> TensorValue | None:
    """Reads the ``scale`` argument as one float32 for each filter.

    Args:
        scale: The argument: a number, an array of rank 1, or a graph value of rank 0 or 1.
        filters: How many elements it must have; a number, or one element, stands for all.
        device: The input's device.

    Raises:
        TypeError: It is none of these.
        ValueError: It has a rank, a length, a type or a device that is not allowed.
    """
    if scale is None:
        return None
    if is_graph_value(scale):
        value = TensorValue(cast(Any, scale))
        check_same_dtype("scale", value.dtype.name, ("float32",), "is allowed")
        if value.device != device:
            raise ValueError(f"scale: device {value.device} is not the input's; {device} is needed")
    else:
        if isinstance(scale, int | float) and not isinstance(scale, bool):
            scale = np.array([scale], np.float64)
        values, kind = read_array("scale", scale)
        value = constant(cast_array(values, kind, "float32"), "float32", device)
    if value.rank == 0 or (value.rank == 1 and value.shape[0] == 1):
        return ops.broadcast_to(ops.reshape(value, (1,)), (filters,))
    check_bias(value.shape, filters, "scale")
    return value


def residual_operand(
    residual: object, output_shape: Sequence[Size], *, dtype: str, device: DeviceRef, first: bool
) -> TensorValue | None:
    """Reads the ``residual`` argument.

    Args:
        residual: The argument.
        output_shape: The output's, channels last.
        dtype: The output's type, which the residual must have; an array is converted.
        device: The output's device.
        first: Whether the caller's tensors have the channels first.

    Raises:
        TypeError: It is neither a graph value nor an array.
        ValueError: It has a shape, a type or a device that is not allowed.
    """
    if residual is None:
        return None
    if is_graph_value(residual):
        value = TensorValue(cast(Any, residual))
        check_same_dtype("residual", value.dtype.name, (dtype,), "is the output's")
        if value.device != device:
            raise ValueError(
                f"residual: device {value.device} is not the output's; {device} is needed"
            )
    else:
        values, kind = read_array("residual", residual)
        value = constant(cast_array(values, kind, dtype), dtype, device)
    shape = list(output_shape)
    if first:
        shape.insert(1, shape.pop())
    check_residual(value.shape, shape)
    return to_channels_last(value) if first else value


def input_operand(x: object, input_layout: object, rank: int) -> tuple[TensorValue, bool]:
    """Reads the input and its layout; returns it with the channels last, and if they came first.

    Raises:
        TypeError: ``x`` is not a graph value, or ``input_layout`` no layout.
        ValueError: An unknown layout, or an unsupported rank, type or device.
    """
    value = graph_value("input", x, "make it one with max.graph.ops.constant")
    first = channels_first(input_layout, rank)
    check_device("input", value.device)
    dtype = check_dtype("input", value.dtype, INPUT_BYTES)
    if dtype not in DTYPE_BYTES and not value.device.is_gpu():
        raise ValueError(
            f"input: dtype {dtype} on device {value.device} is not supported; there "
            f"{', '.join(DTYPE_BYTES)} are allowed, on a GPU {FLOAT8} too, and on one of compute "
            f"capability 10.0 or 10.3 {' and '.join(BLACKWELL_BYTES)}"
        )
    # A wrong rank is reported with the problem's other errors, by whoever builds the problem.
    if first and value.rank == rank + 2:
        return to_channels_last(value), True
    return value, first


def channels_first(input_layout: object, rank: int) -> bool:
    """Reads the ``input_layout`` argument: NHWC and NCHW, or these with the rank's own dimensions.

    Raises:
        TypeError: It is neither a name nor a ``max.graph.ConvInputLayout``.
        ValueError: An unknown name.
    """
    axes = {1: "W", 2: "HW", 3: "DHW"}[rank]
    last, first = ("NHWC", f"N{axes}C"), ("NCHW", f"NC{axes}")
    names = list(dict.fromkeys((*last, *first)))
    name = getattr(input_layout, "value", input_layout)
    if not isinstance(name, str):
        raise TypeError(
            f"input_layout: {input_layout!r} is a {type(input_layout).__name__}; a "
            f"ConvInputLayout or one of {', '.join(names)} is allowed"
        )
    if name not in names:
        raise ValueError(
            f"input_layout: {name!r} is not an input layout; {', '.join(names)} are allowed"
        )
    return name in first


def to_channels_last(value: TensorValue) -> TensorValue:
    """Permutes ``[N, C, *spatial]`` to ``[N, *spatial, C]``."""
    return ops.permute(value, [0, *range(2, value.rank), 1])


def to_channels_first(value: TensorValue) -> TensorValue:
    """Permutes ``[N, *spatial, C]`` to ``[N, C, *spatial]``."""
    return ops.permute(value, [0, value.rank - 1, *range(1, value.rank - 1)])
