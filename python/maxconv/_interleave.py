"""The interleaved layouts NC/xHWx and C/xRSKx, and convolutions of int8 that have them on a GPU.

``[N, H, W, C]`` is ``[N, C / x, H, W, x]`` there: x neighbouring channels lie side by side, then
the pixels of a row. The element of image n, channel c, row h and column w has the offset ``c % x +
x * w + s0 * h + s1 * (c // x) + s2 * n``, with ``s0 = x * W``, ``s1 = s0 * H`` and ``s2 = s1 * C /
x``. A filter is ``[C / x, R, S, K, x]``: neighbouring filters are neighbours. With x = 4 a GPU's
``dp4a`` takes such a block in one access, and multiplies it in one instruction.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, Dim, TensorType, TensorValue, TensorValueLike, ops

from ._arguments import ConvArguments
from ._checks import check_at_least, check_integer, check_same_dtype, check_size, show
from ._dtypes import INT8
from ._emit import emit, output_shape
from ._fields import INTERLEAVED, INTERLEAVED_LAYOUT, Layout
from ._filter_operand import FilterArgument, KnownFilter, filter_argument, permuted_to_krsc
from ._graph import constant, flatten, host_constant, is_graph_value, loaded_from_host
from ._operands import bias_operand, residual_operand, scale_operand
from ._packing import Array, PackedFilter, cast_array, to_krsc
from ._problem import ConvProblem, encode
from ._signature import Operands

__all__ = ["convolve_interleaved", "deinterleave", "interleave", "is_interleaved"]


def interleave(x: TensorValueLike, channels: int = INTERLEAVED) -> TensorValue:
    """Brings an image from ``NHWC`` to NC/xHWx, with operations that MAX fuses into neighbours.

    Args:
        x: The image, ``[N, H, W, C]``, of any type and on any device.
        channels: How many neighbouring channels lie side by side, a divisor of ``C``. Convolutions
            take 4.

    Returns:
        ``[N, C / channels, H, W, channels]``.

    Raises:
        TypeError: ``channels`` is no integer.
        ValueError: The rank is not 4, or ``C`` is symbolic or no multiple of ``channels``.
    """
    value, block = TensorValue(x), check_integer("channels", channels)
    check_at_least("channels", block, 1)
    if value.rank != 4:
        raise ValueError(
            f"x: shape {show(tuple(value.shape))} has rank {value.rank}; rank 4 is allowed: "
            "[batch, h, w, channels]"
        )
    *outer, last = value.shape
    count = check_size("x", last)
    if not isinstance(count, int) or count % block:
        raise ValueError(
            f"x: {count} channels; a multiple of channels={block} is needed, known when the graph "
            "is built"
        )
    pieces = ops.reshape(value, (*outer, count // block, block))
    return ops.permute(pieces, [0, 3, 1, 2, 4])


def deinterleave(x: TensorValueLike) -> TensorValue:
    """Brings an image from NC/xHWx to ``NHWC``, with operations that MAX fuses into neighbours.

    Args:
        x: The image, ``[N, C / x, H, W, x]``, of any type and on any device.

    Returns:
        ``[N, H, W, C]``.

    Raises:
        ValueError: The rank is not 5.
    """
    value = TensorValue(x)
    if value.rank != 5:
        raise ValueError(
            f"x: shape {show(tuple(value.shape))} has rank {value.rank}; rank 5 is allowed: "
            "[batch, channels / x, h, w, x]"
        )
    batch, pieces, height, width, block = value.shape
    last = ops.permute(value, [0, 2, 3, 1, 4])
    return ops.reshape(last, (batch, height, width, pieces * block))


def is_interleaved(input_layout: object, rank: int) -> bool:
    """Whether the argument ``input_layout`` is the interleaved one; only images have it.

    Args:
        input_layout: The argument.
        rank: Spatial dimensions.
    """
    return rank == 2 and getattr(input_layout, "value", input_layout) == INTERLEAVED_LAYOUT


def convolve_interleaved(
    x: object,
    filter: object,
    arguments: ConvArguments,
    bias: object,
    residual: object,
    scale: object,
    filter_layout: object,
) -> TensorValue:
    """Adds a convolution of int8 in ``INTERLEAVED_LAYOUT`` to the current graph.

    Args:
        x: The argument, like all that follow.
        filter: A graph value, an array, or a ``PackedFilter``.
        arguments: What is no tensor, checked.
        bias: A graph value, an array, or ``None``.
        residual: The same, of the result's shape and type.
        scale: The same, or a number.
        filter_layout: The order of the filter's dimensions.

    Returns:
        ``[N, K / 4, P, Q, 4]``.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An argument has a value that is not allowed, or the sizes are those of no
            convolution.
    """
    value = _activation(x)
    device, out_dtype = value.device, arguments.output_dtype(INT8)
    arguments.check_types(INT8, on_gpu=device.is_gpu())
    kernel = arguments.kernel(device, interleaved=True)
    batch, pieces, height, width, _ = value.shape
    given = filter_argument(filter, filter_layout, rank=2, dtype=INT8, device=device)
    groups = given.known_groups(arguments.groups)
    for name, number in (("groups", groups), ("upsample", arguments.upsample or 1)):
        if number != 1:
            raise ValueError(
                f"{name}: {show(number)} is not supported in {INTERLEAVED_LAYOUT}; 1 is allowed"
            )
    given = _with_whole_blocks(given, check_size("input", pieces * INTERLEAVED))
    problem = ConvProblem.of(
        arguments,
        (batch, height, width, pieces * INTERLEAVED),
        filters=given.filters,
        filter_size=given.filter_size,
        group_channels=given.group_channels,
        groups=groups,
    )
    n, p, q, k = output_shape(problem, [Dim(size) for size in problem.output_shape])
    output = TensorType(DType[out_dtype], (n, k // INTERLEAVED, p, q, INTERLEAVED), device)
    added = bias_operand(bias, problem.filters, dtype=out_dtype, device=device)
    further = residual_operand(residual, tuple(output.shape), dtype=out_dtype, device=device)
    geometry, scalars = encode(
        problem,
        arguments,
        filter_layout=Layout.INTERLEAVED,
        has_bias=added is not None,
        has_residual=further is not None,
        kernel=kernel,
    )
    operands = Operands(
        x=value,
        filter=_filter_operand(given, device),
        bias=added,
        residual=further,
        scale=scale_operand(scale, problem.filters, device),
        geometry=host_constant(geometry),
        scalars=host_constant(scalars),
    )
    return emit(operands, output, interleaved=True)


def _activation(x: object) -> TensorValue:
    """Reads the argument ``x``.

    Raises:
        TypeError: It is no graph value.
        ValueError: It has another type, device, rank or block.
    """
    if not is_graph_value(x):
        raise TypeError(
            f"input: a {type(x).__name__} is not a graph value; maxconv.interleave gives one"
        )
    value = TensorValue(cast(Any, x))
    check_same_dtype("input", value.dtype.name, (INT8,), f"is allowed in {INTERLEAVED_LAYOUT}")
    if not value.device.is_gpu():
        raise ValueError(
            f"input: device {value.device} is not supported in {INTERLEAVED_LAYOUT}; a GPU is "
            "allowed"
        )
    shape = tuple(value.shape)
    if value.rank != 5 or shape[4] != INTERLEAVED:
        raise ValueError(
            f"input: shape {show(shape)} is not in {INTERLEAVED_LAYOUT}; [batch, channels / "
            f"{INTERLEAVED}, h, w, {INTERLEAVED}] is allowed, which maxconv.interleave makes of an "
            "image"
        )
    return value


def _with_whole_blocks(filter: FilterArgument, channels: object) -> FilterArgument:
    """Returns a filter with channels of zeros behind its own, as many as fill the last block.

    Args:
        filter: The filter.
        channels: Of the activation, where they are known.

    Raises:
        ValueError: Its sizes are symbolic, its filters are no multiple of a block, or its channels
            would have to be filled and are not known.
    """
    filters, own = filter.filters, filter.group_channels
    if not isinstance(filters, int) or not isinstance(own, int):
        raise ValueError(
            f"filter: {filters} filters and {own} channels; in {INTERLEAVED_LAYOUT} numbers that "
            "are known when the graph is built are allowed"
        )
    if filters % INTERLEAVED:
        raise ValueError(
            f"filter: {filters} filters are not supported in {INTERLEAVED_LAYOUT}; multiples of "
            f"{INTERLEAVED} are allowed"
        )
    whole = -(-own // INTERLEAVED) * INTERLEAVED
    if whole == own or (isinstance(channels, int) and channels != whole):
        return filter
    if isinstance(filter.held, TensorValue):
        raise ValueError(
            f"filter: {own} channels of a filter that is computed are not supported in "
            f"{INTERLEAVED_LAYOUT}; multiples of {INTERLEAVED} are allowed"
        )
    return replace(filter, group_channels=whole)


def _filter_operand(filter: FilterArgument, device: DeviceRef) -> TensorValue:
    """Returns a filter's elements, flat, as C/4RSK4.

    They are packed here where they are known, by the graph when it is loaded where they are loaded
    with the model, and in every call otherwise.

    Raises:
        ValueError: An element is beyond int8.
    """
    held = filter.held
    if isinstance(held, TensorValue):
        if (source := loaded_from_host(held)) is not None:
            return ops.transfer_to(_packed_in_graph(source, filter.layout), device)
        return _packed_in_graph(held, filter.layout)
    if isinstance(held, PackedFilter):
        krsc = held.unpack()
    else:
        krsc = cast_array(_krsc_of(held, filter.layout), held.kind, INT8)
    return constant(interleaved_filter(krsc).reshape(-1), INT8, device)


def _krsc_of(filter: KnownFilter, layout: str) -> Array:
    return np.ascontiguousarray(to_krsc(filter.values, layout))


def interleaved_filter(krsc: Array) -> Array:
    """Returns ``[K, R, S, C]`` as ``[C / 4, R, S, K, 4]``, zeros behind the last channel.

    Args:
        krsc: The filter.
    """
    filters, rows, columns, channels = krsc.shape
    filled = np.pad(krsc, [(0, 0)] * 3 + [(0, -channels % INTERLEAVED)])
    blocks = filled.reshape(filters, rows, columns, -1, INTERLEAVED)
    return np.ascontiguousarray(blocks.transpose(3, 1, 2, 0, 4))


def _packed_in_graph(value: TensorValue, layout: str) -> TensorValue:
    """The same with graph operations, of whole blocks, flat."""
    krsc = permuted_to_krsc(value, layout)
    *outer, channels = (int(size) for size in krsc.shape)
    blocks = ops.reshape(krsc, (*outer, channels // INTERLEAVED, INTERLEAVED))
    return flatten(ops.permute(blocks, [3, 1, 2, 0, 4]))
