"""Operands of the op, from what a caller of the graph functions may pass."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from max.graph import DeviceRef, Graph, TensorValue, ops

from ._arguments import ConvArguments
from ._blocks import BLOCK_LAYOUTS
from ._checks import (
    AXES,
    Size,
    check_beside_upsample,
    check_bias,
    check_device,
    check_dtype,
    check_residual,
    check_same_device,
    check_same_dtype,
)
from ._dtypes import (
    CPU_BYTES,
    DTYPE_BYTES,
    GPU_BYTES,
    INPUT_BYTES,
    INTEGERS,
    bias_dtype,
    filter_dtype,
)
from ._emit import Tensors
from ._fields import HOPPER_DTYPES, Kernel, Layout
from ._filter_operand import filter_argument, filter_operand
from ._graph import (
    constant,
    is_graph_value,
    require_kernels,
    zeros_behind,
)
from ._packing import cast_array, read_array
from ._problem import ConvProblem
from ._signature import filters_missing
from ._upsample import repeated, subpixel_filter

__all__ = [
    "GraphCall",
    "bias_operand",
    "images_operand",
    "in_whole_pieces",
    "input_operand",
    "read_call",
    "residual_operand",
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
    others = tuple(BLOCK_LAYOUTS) if arguments.rank == 2 else ()
    value, first = input_operand(x, input_layout, arguments.rank, others=others)
    dtype, device = value.dtype.name, value.device
    out_dtype = arguments.output_dtype(dtype)
    arguments.check_types(dtype)
    of_filter = filter_dtype(dtype)
    given = filter_argument(
        filter, filter_layout, rank=arguments.rank, dtype=of_filter, device=device
    )
    groups = given.known_groups(arguments.groups)
    problem = given.problem(value, arguments, groups)
    beside = bias_dtype(dtype, out_dtype)
    added = bias_operand(bias, problem.filters, dtype=beside, device=device)
    factors = scale_operand(scale, problem.filters, device)
    if problem.upsamples:
        check_beside_upsample(problem.upsample, dtype, residual=residual is not None)
        given = subpixel_filter(given, problem, groups, dtype)
        added, factors = (repeated(vector, problem, groups) for vector in (added, factors))
    elements, layout = filter_operand(given, groups, dtype=of_filter, device=device)
    tensors = Tensors(
        x=value,
        filter=elements,
        filter_layout=layout,
        bias=added,
        residual=residual_operand(
            residual, problem.output_shape, dtype=out_dtype, device=device, first=first
        ),
        scale=factors,
    )
    return GraphCall(problem, tensors, arguments.kernel(device), out_dtype, first)


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
    places = math.prod(problem.upsample)

    def behind(value: TensorValue | None, each: int) -> TensorValue | None:
        return None if value is None else zeros_behind(value, missing * each, places)

    return replace(
        call,
        problem=replace(problem, filters=filters + missing),
        tensors=replace(
            tensors,
            filter=zeros_behind(tensors.filter, missing * problem.subpixel.taps * channels, places),
            bias=behind(tensors.bias, 1),
            scale=behind(tensors.scale, 1),
        ),
    )


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


def residual_operand(
    residual: object,
    output_shape: Sequence[Size],
    *,
    dtype: str,
    device: DeviceRef,
    first: bool = False,
) -> TensorValue | None:
    """Reads the ``residual`` argument.

    Args:
        residual: The argument.
        output_shape: The output's, as the op has it.
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
        integers = (dtype,) if dtype in INTEGERS else ()
        values, kind = read_array("residual", residual, integers=integers)
        if integers:
            check_same_dtype("residual", kind, integers, "is the output's")
        value = constant(cast_array(values, kind, dtype), dtype, device)
    shape = list(output_shape)
    if first:
        shape.insert(1, shape.pop())
    check_residual(value.shape, shape)
    return _to_channels_last(value) if first else value


def input_operand(
    x: object,
    input_layout: object,
    rank: int,
    dtypes: Mapping[str, int] = INPUT_BYTES,
    others: Sequence[str] = (),
) -> tuple[TensorValue, bool]:
    """Reads the input and its layout; returns it with the channels last, and if they came first.

    Args:
        x: The argument.
        input_layout: The argument.
        rank: Spatial dimensions.
        dtypes: The storage types that are allowed.
        others: Layouts that are read elsewhere, for messages.

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
    first = _channels_first(input_layout, rank, others)
    check_device("input", value.device)
    dtype = check_dtype("input", value.dtype, dtypes)
    everywhere = {**CPU_BYTES, **GPU_BYTES} if value.device.is_gpu() else CPU_BYTES
    if dtype not in everywhere:
        anywhere = [name for name in {**GPU_BYTES, **INTEGERS} if name not in HOPPER_DTYPES]
        raise ValueError(
            f"input: dtype {dtype} on device {value.device} is not supported; on a CPU "
            f"{', '.join(CPU_BYTES)} are allowed, on a GPU {', '.join(DTYPE_BYTES)}, "
            f"{', '.join(anywhere[:-1])} and {anywhere[-1]}, and on one of compute "
            f"capability 9.0, 10.0 or 10.3 {' and '.join(HOPPER_DTYPES)}"
        )
    # A wrong rank is reported with the problem's other errors, by whoever builds the problem.
    if first and value.rank == rank + 2:
        return _to_channels_last(value), True
    return value, first


def images_operand(
    x: object, input_layout: object, taker: str, dtypes: Mapping[str, int] = INPUT_BYTES
) -> tuple[TensorValue, bool]:
    """Reads the input of what takes images of any rank, as ``input_operand`` does.

    Args:
        x: The argument.
        input_layout: The argument.
        taker: What takes it, for messages.
        dtypes: The storage types that are allowed.

    Raises:
        TypeError: ``x`` is not a graph value, or ``input_layout`` no layout.
        ValueError: A rank, a layout, a type or a device that is not allowed, or the graph was not
            given maxconv's kernels.
    """
    require_kernels(Graph.current)
    rank = TensorValue(cast(Any, x)).rank - 2 if is_graph_value(x) else 2
    if rank not in AXES:
        raise ValueError(
            f"input: rank {rank + 2} is not allowed; {taker} takes rank 3 to 5: batch, one to "
            "three spatial dimensions, channels"
        )
    return input_operand(x, input_layout, rank, dtypes)


def _channels_first(input_layout: object, rank: int, others: Sequence[str]) -> bool:
    """Reads the ``input_layout`` argument: NHWC and NCHW, or these with the rank's own dimensions.

    Raises:
        TypeError: It is neither a name nor a ``max.graph.ConvInputLayout``.
        ValueError: An unknown name.
    """
    axes = {1: "W", 2: "HW", 3: "DHW"}[rank]
    last, first = ("NHWC", f"N{axes}C"), ("NCHW", f"NC{axes}")
    names = list(dict.fromkeys((*last, *first, *others)))
    name = getattr(input_layout, "value", input_layout)
    if not isinstance(name, str):
        raise TypeError(
            f"input_layout: {input_layout!r} is a {type(input_layout).__name__}; a "
            f"ConvInputLayout or one of {', '.join(names)} is allowed"
        )
    if name not in (*last, *first):
        raise ValueError(
            f"input_layout: {name!r} is not an input layout; {', '.join(names)} are allowed"
        )
    return name in first


def _to_channels_last(value: TensorValue) -> TensorValue:
    """Permutes ``[N, C, *spatial]`` to ``[N, *spatial, C]``."""
    return ops.permute(value, [0, *range(2, value.rank), 1])
