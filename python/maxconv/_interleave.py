"""Convolutions of interleaved images: on a CPU in every layout of ``_blocks``, on a GPU in one.

The operands' layouts and the units that multiply them are paired: 4 int8 are what one ``dp4a`` of a
GPU's CUDA cores takes, 16 bytes an access of its tensor cores. A CPU's units copy a task's pixels
into a block of their own before they multiply, and take each layout.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, Dim, TensorType, TensorValue, ops

from ._arguments import ConvArguments
from ._blocked_filter import array_of_krsc
from ._blocks import BLOCK_LAYOUTS, LAST, BlockLayout, value_of_krsc
from ._checks import check_same_dtype, check_size, show
from ._dtypes import HALF_DTYPES, INT8, INTEGERS, bias_dtype, filter_dtype
from ._emit import emit, output_shape
from ._fields import INTERLEAVED, INTERLEAVED_LAYOUT, Layout
from ._filter_operand import (
    FilterArgument,
    KnownFilter,
    filter_argument,
    filter_operand,
    permuted_to_krsc,
)
from ._graph import (
    constant,
    flatten,
    host_constant,
    is_graph_value,
    loaded_from_host,
    to_channels_first,
)
from ._operands import bias_operand, input_operand, residual_operand, scale_operand
from ._packing import PackedFilter, cast_array, to_krsc
from ._problem import ConvProblem, encode
from ._signature import Operands, centered

__all__ = ["CPU_DTYPES", "convolve_interleaved", "is_interleaved", "pairing_refusal"]

#: Types of an input in blocks on a CPU.
CPU_DTYPES = (*INTEGERS, *HALF_DTYPES)


def _name(layout: object) -> object:
    return getattr(layout, "value", layout)


def is_interleaved(input_layout: object, output_layout: object, rank: int) -> bool:
    """Whether an argument is an interleaved layout; only images have them.

    Args:
        input_layout: The argument.
        output_layout: The argument.
        rank: Spatial dimensions.
    """
    return rank == 2 and not {_name(input_layout), _name(output_layout)}.isdisjoint(BLOCK_LAYOUTS)


def pairing_refusal(source: str, target: str, *, on_gpu: bool) -> str | None:
    """Says why no kernel takes an image in one layout and gives it in another.

    A CPU's kernels take every pair. On a GPU ``dp4a`` takes blocks of 4 of neighbouring pixels;
    the other pairings of layouts and units that are known elsewhere (blocks of 4 of neighbouring
    images with ``dp4a``, blocks of 32 on tensor cores, and from one to the other) are not built.

    Args:
        source: The name of the input's layout.
        target: The name of the output's.
        on_gpu: Whether they are on a GPU.
    """
    if not on_gpu or (source, target) == (INTERLEAVED_LAYOUT, INTERLEAVED_LAYOUT):
        return None
    layouts = [BLOCK_LAYOUTS.get(name, LAST) for name in (source, target)]
    if source != target:
        why = "no kernel stores another layout than it reads"
    elif layouts[0].batch_last:
        why = "no kernel reads neighbouring images"
    else:
        why = (
            f"dp4a reads blocks of {INTERLEAVED}, and no kernel of tensor cores reads blocks: they "
            "take NHWC"
        )
    return (
        f"from {source} to {target} is not supported on a GPU: {why}; {INTERLEAVED_LAYOUT} to "
        f"{INTERLEAVED_LAYOUT} is allowed, and on a CPU everything"
    )


def convolve_interleaved(
    x: object,
    filter: object,
    arguments: ConvArguments,
    bias: object,
    residual: object,
    scale: object,
    input_layout: object,
    filter_layout: object,
    output_layout: object = None,
) -> TensorValue:
    """Adds a convolution to the current graph whose input or output is interleaved.

    Args:
        x: The argument, like all that follow.
        filter: A graph value, an array, or a ``PackedFilter``.
        arguments: What is no tensor, checked.
        bias: A graph value, an array, or ``None``.
        residual: The same, of the result's shape and type.
        scale: The same, or a number.
        input_layout: The order of the dimensions of the input.
        filter_layout: The order of the filter's dimensions.
        output_layout: The order of those of residual and result; ``None`` is the input's.

    Returns:
        The result, in its layout.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An argument has a value that is not allowed, or the sizes are those of no
            convolution.
    """
    value, placed = _activation(x, input_layout)
    out_placed, first = _output_layout(input_layout if output_layout is None else output_layout)
    device, dtype, on_gpu = value.device, value.dtype.name, value.device.is_gpu()
    names = [_name(input_layout), _name(input_layout if output_layout is None else output_layout)]
    if refusal := pairing_refusal(str(names[0]), str(names[1]), on_gpu=on_gpu):
        raise ValueError(f"input_layout: {refusal}")
    both = f"from {names[0]} to {names[1]}" if names[0] != names[1] else f"in {names[0]}"
    allowed = tuple(INTEGERS) if on_gpu else CPU_DTYPES
    check_same_dtype("input", dtype, allowed, f"is allowed {both}")
    out_dtype = arguments.output_dtype(dtype)
    arguments.check_types(dtype)
    kernel = arguments.kernel(device, interleaved=True)
    of_filter = filter_dtype(dtype)
    given = filter_argument(filter, filter_layout, rank=2, dtype=of_filter, device=device)
    groups = given.known_groups(arguments.groups)
    for name, number in (("groups", groups), ("upsample", arguments.upsample or 1)):
        if number != 1:
            raise ValueError(f"{name}: {show(number)} is not supported {both}; 1 is allowed")
    shape = placed.to_last(value.shape)
    given = _with_whole_blocks(given, placed, out_placed, check_size("input", shape[3]))
    problem = ConvProblem.of(
        arguments,
        shape,
        filters=given.filters,
        filter_size=given.filter_size,
        group_channels=given.group_channels,
        groups=groups,
    )
    last = output_shape(problem, [Dim(size) for size in problem.output_shape])
    output = TensorType(DType[out_dtype], out_placed.of_last(last), device)
    beside = bias_dtype(dtype, out_dtype)
    added = bias_operand(bias, problem.filters, dtype=beside, device=device)
    further = residual_operand(
        residual, tuple(output.shape), dtype=out_dtype, device=device, first=first
    )
    if on_gpu:
        elements, layout = _filter_in_blocks(given, device), Layout.INTERLEAVED
    else:
        elements, layout = filter_operand(given, groups, dtype=of_filter, device=device)
    geometry, scalars = encode(
        problem,
        arguments,
        filter_layout=layout,
        has_bias=added is not None,
        has_residual=further is not None,
        kernel=kernel,
        batch_last=(placed.batch_last, out_placed.batch_last),
    )
    operands = Operands(
        x=value,
        filter=elements,
        bias=added,
        residual=further,
        scale=scale_operand(scale, problem.filters, device),
        geometry=host_constant(geometry),
        scalars=host_constant(scalars),
    )
    known = centered(arguments) if on_gpu else {"kernel": int(kernel)}
    result = emit(operands, output, known=known, interleaved=True)
    return to_channels_first(result) if first else result


def _activation(x: object, input_layout: object) -> tuple[TensorValue, BlockLayout]:
    """Reads the argument ``x``, of which the channels come last where it is not interleaved.

    Raises:
        TypeError: It is no graph value.
        ValueError: It has another type, device, rank or block.
    """
    placed = BLOCK_LAYOUTS.get(cast(str, _name(input_layout)))
    if placed is None:
        value, _ = input_operand(x, input_layout, 2, others=tuple(BLOCK_LAYOUTS))
        if value.rank != 4:
            raise ValueError(
                f"input: shape {show(tuple(value.shape))} has rank {value.rank}; rank 4 is allowed"
            )
        return value, LAST
    if not is_graph_value(x):
        raise TypeError(
            f"input: a {type(x).__name__} is not a graph value; maxconv.interleave gives one"
        )
    value = TensorValue(cast(Any, x))
    shape = tuple(value.shape)
    if value.rank != 5 or shape[4] != placed.channels:
        raise ValueError(
            f"input: shape {show(shape)} is not in {placed.name}; {placed.form} is allowed, which "
            "maxconv.interleave makes of an image"
        )
    return value, placed


def _output_layout(layout: object) -> tuple[BlockLayout, bool]:
    """Returns the layout of the op's output, and whether the caller's has the channels first.

    Raises:
        TypeError: It is neither a name nor a ``max.graph.ConvInputLayout``.
        ValueError: An unknown name.
    """
    name = _name(layout)
    names = ", ".join(("NHWC", "NCHW", *BLOCK_LAYOUTS))
    if not isinstance(name, str):
        raise TypeError(
            f"output_layout: {layout!r} is a {type(layout).__name__}; a ConvInputLayout or one of "
            f"{names} is allowed"
        )
    if name not in ("NHWC", "NCHW", *BLOCK_LAYOUTS):
        raise ValueError(f"output_layout: {name!r} is no layout; {names} are allowed")
    return BLOCK_LAYOUTS.get(name, LAST), name == "NCHW"


def _with_whole_blocks(
    filter: FilterArgument, placed: BlockLayout, out_placed: BlockLayout, channels: object
) -> FilterArgument:
    """Returns a filter with channels of zeros behind its own, as many as fill the last block.

    Args:
        filter: The filter.
        placed: The layout of the input.
        out_placed: That of the output.
        channels: Of the activation, where they are known.

    Raises:
        ValueError: Its sizes are symbolic, its filters are no multiple of a block, or its channels
            would have to be filled and are not known.
    """
    filters, own = filter.filters, filter.group_channels
    block, out_block = placed.channels or 1, out_placed.channels or 1
    where = out_placed.name if out_block > 1 else placed.name
    if not isinstance(filters, int) or not isinstance(own, int):
        raise ValueError(
            f"filter: {filters} filters and {own} channels; in {where} numbers that are known when "
            "the graph is built are allowed"
        )
    if filters % out_block:
        raise ValueError(
            f"filter: {filters} filters are not supported in {where}; multiples of {out_block} are "
            "allowed"
        )
    whole = -(-own // block) * block
    if whole == own or (isinstance(channels, int) and channels != whole):
        return filter
    held = filter.held
    if isinstance(held, TensorValue):
        raise ValueError(
            f"filter: {own} channels of a filter that is computed are not supported in "
            f"{placed.name}; multiples of {block} are allowed"
        )
    if isinstance(held, PackedFilter):
        krsc, kind = held.unpack(), held.dtype
    else:
        krsc, kind = to_krsc(held.values, filter.layout), held.kind
    filled = np.pad(krsc, [(0, 0)] * 3 + [(0, whole - own)])
    return replace(filter, held=KnownFilter(filled, kind), layout="KRSC", group_channels=whole)


def _filter_in_blocks(filter: FilterArgument, device: DeviceRef) -> TensorValue:
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
        krsc = cast_array(
            np.ascontiguousarray(to_krsc(held.values, filter.layout)), held.kind, INT8
        )
    return constant(array_of_krsc(krsc, INTERLEAVED).reshape(-1), INT8, device)


def _packed_in_graph(value: TensorValue, layout: str) -> TensorValue:
    """The same with graph operations, of whole blocks."""
    return flatten(value_of_krsc(permuted_to_krsc(value, layout), INTERLEAVED))
