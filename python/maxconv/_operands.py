"""Operands of the op, from what a caller of the graph functions may pass."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from max.graph import DeviceRef, TensorValue, ops

from ._arguments import ConvArguments
from ._checks import (
    LAYOUTS,
    Size,
    check_bias,
    check_device,
    check_dtype,
    check_filter_layout,
    check_residual,
    check_same_device,
    check_same_dtype,
    filter_shape_parts,
)
from ._dtypes import BLACKWELL_BYTES, DTYPE_BYTES, FLOAT8, INPUT_BYTES
from ._emit import Tensors
from ._fields import PANEL, Kernel, Layout
from ._graph import (
    constant,
    constant_array,
    flatten,
    is_graph_value,
    is_loaded_once,
    loaded_from_host,
    zeros_behind,
)
from ._packing import Array, PackedFilter, cast_array, packed_elements, read_array, to_krsc
from ._problem import ConvProblem
from ._signature import filters_missing

__all__ = [
    "FilterArgument",
    "GraphCall",
    "KnownFilter",
    "bias_operand",
    "filter_argument",
    "filter_operand",
    "in_whole_pieces",
    "input_operand",
    "permuted_to_krsc",
    "read_call",
    "scale_operand",
    "with_zeros",
]


@dataclass(frozen=True)
class GraphCall:
    """A call of a graph function, read and checked."""

    problem: ConvProblem
    tensors: Tensors
    kernel: Kernel
    """What must run."""
    out_dtype: str
    """The output's type."""
    channels_first: bool
    """Whether the caller's tensors have the channels first."""


def read_call(
    x: object,
    filter: object,
    arguments: ConvArguments,
    bias: object,
    residual: object,
    scale: object,
    input_layout: object,
    filter_layout: object,
) -> GraphCall:
    """Reads the tensors of a call: as values of the current graph, in the op's layouts.

    Args:
        x: The argument, like all that follow.
        filter: A graph value, an array, or a ``PackedFilter``.
        arguments: What is no tensor, checked.
        bias: A graph value, an array, or ``None``.
        residual: The same.
        scale: The same, or a number.
        input_layout: The order of the dimensions of input and residual.
        filter_layout: The order of the filter's dimensions.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An argument has a value that is not allowed, or the sizes are those of no
            convolution.
    """
    value, first = input_operand(x, input_layout, arguments.rank)
    dtype, device = value.dtype.name, value.device
    out_dtype = arguments.output_dtype(dtype)
    given = filter_argument(filter, filter_layout, rank=arguments.rank, dtype=dtype, device=device)
    groups = given.known_groups(arguments.groups)
    problem = given.problem(value, arguments, groups)
    elements, layout = filter_operand(given, groups, dtype=dtype, device=device)
    beside = dtype if dtype in DTYPE_BYTES else out_dtype
    tensors = Tensors(
        x=value,
        filter=elements,
        filter_layout=layout,
        bias=bias_operand(bias, problem.filters, dtype=beside, device=device),
        residual=_residual_operand(
            residual, problem.output_shape, dtype=out_dtype, device=device, first=first
        ),
        scale=scale_operand(scale, problem.filters, device),
    )
    return GraphCall(problem, tensors, arguments.kernel(device, dtype), out_dtype, first)


def in_whole_pieces(call: GraphCall) -> GraphCall:
    """Returns a call with the filters of zeros that ``filters_missing`` asks for on a GPU.

    Whoever asks cuts off their results. It is the same call if there are none, or a residual, which
    would have to be widened, or if the filter is packed in each call.

    Args:
        call: The call.
    """
    tensors = call.tensors
    if not tensors.x.device.is_gpu() or tensors.residual is not None:
        return call
    if tensors.filter_layout is not Layout.KRSC:
        return call
    dtype = tensors.x.dtype.name
    missing = filters_missing(call.problem, dtype, call.out_dtype, call.kernel)
    return with_zeros(call, missing) if missing else call


def with_zeros(call: GraphCall, missing: int) -> GraphCall:
    """Returns a call with filters of zeros behind its own.

    Args:
        call: The call: one group, no residual, filters in ``Layout.KRSC``, known sizes of these.
        missing: How many filters.
    """
    problem, tensors = call.problem, call.tensors
    filters, channels = cast(int, problem.filters), cast(int, problem.channels)
    return replace(
        call,
        problem=replace(problem, filters=filters + missing),
        tensors=replace(
            tensors,
            filter=zeros_behind(tensors.filter, missing * problem.taps * channels),
            bias=None if tensors.bias is None else zeros_behind(tensors.bias, missing),
            scale=None if tensors.scale is None else zeros_behind(tensors.scale, missing),
        ),
    )


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
    layout = check_filter_layout(filter_layout, rank)
    if is_graph_value(filter):
        held = value = TensorValue(cast(Any, filter))
        kind = check_dtype("filter", value.dtype, INPUT_BYTES)
        check_same_dtype("filter", kind, (dtype,), "is the input's")
        check_same_device("filter", value.device, device)
        parts = filter_shape_parts(value.shape, layout, rank)
        known = isinstance(parts[0], int) and isinstance(parts[2], int)
        elements = constant_array(value) if known else None
        if elements is not None:
            held = KnownFilter(elements, kind)
    else:
        held = KnownFilter(*read_array("filter", filter, integers=True))
        parts = filter_shape_parts(held.values.shape, layout, rank)
    return FilterArgument(held, layout, *parts)


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
    check_same_device("bias", value.device, device)
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
        check_same_device("scale", value.device, device)
    else:
        if isinstance(scale, int | float) and not isinstance(scale, bool):
            scale = np.array([scale], np.float64)
        values, kind = read_array("scale", scale)
        value = constant(cast_array(values, kind, "float32"), "float32", device)
    if value.rank == 0 or (value.rank == 1 and value.shape[0] == 1):
        return ops.broadcast_to(ops.reshape(value, (1,)), (filters,))
    check_bias(value.shape, filters, "scale")
    return value


def _residual_operand(
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
        check_same_device("residual", value.device, device, "output")
    else:
        values, kind = read_array("residual", residual)
        value = constant(cast_array(values, kind, dtype), dtype, device)
    shape = list(output_shape)
    if first:
        shape.insert(1, shape.pop())
    check_residual(value.shape, shape)
    return _to_channels_last(value) if first else value


def input_operand(
    x: object, input_layout: object, rank: int, dtypes: Mapping[str, int] = INPUT_BYTES
) -> tuple[TensorValue, bool]:
    """Reads the input and its layout; returns it with the channels last, and if they came first.

    Args:
        x: The argument.
        input_layout: The argument.
        rank: Spatial dimensions.
        dtypes: The storage types that are allowed.

    Raises:
        TypeError: ``x`` is not a graph value, or ``input_layout`` no layout.
        ValueError: An unknown layout, or an unsupported type or device.
    """
    if not is_graph_value(x):
        raise TypeError(
            f"input: a {type(x).__name__} is not a graph value; make it one with "
            "max.graph.ops.constant"
        )
    value = TensorValue(cast(Any, x))
    first = _channels_first(input_layout, rank)
    check_device("input", value.device)
    dtype = check_dtype("input", value.dtype, dtypes)
    if dtype not in DTYPE_BYTES and not value.device.is_gpu():
        raise ValueError(
            f"input: dtype {dtype} on device {value.device} is not supported; there "
            f"{', '.join(DTYPE_BYTES)} are allowed, on a GPU {FLOAT8} too, and on one of compute "
            f"capability 10.0 or 10.3 {' and '.join(BLACKWELL_BYTES)}"
        )
    # A wrong rank is reported with the problem's other errors, by whoever builds the problem.
    if first and value.rank == rank + 2:
        return _to_channels_last(value), True
    return value, first


def _channels_first(input_layout: object, rank: int) -> bool:
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


def _to_channels_last(value: TensorValue) -> TensorValue:
    """Permutes ``[N, C, *spatial]`` to ``[N, *spatial, C]``."""
    return ops.permute(value, [0, *range(2, value.rank), 1])
