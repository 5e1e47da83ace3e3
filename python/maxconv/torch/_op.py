"""``torch.ops.maxconv.conv``: the one operator that PyTorch's dispatcher and compiler see.

It is functional (its output is new) and has a fake implementation, so that ``torch.compile`` takes
it into a graph as it stands. A schema has no dataclasses: ``call`` flattens ``ConvArguments`` for
it, and the implementations make them again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch
from max.driver import Buffer
from torch import Tensor, library

from .._arguments import ConvArguments, Flat
from .._checks import LAYOUTS, check_bias, check_residual, filter_shape_parts, renamed
from .._emit import Operands, encode
from .._fields import Layout, Precision
from .._native import Family, Prepared
from .._native import library as library_of
from .._packing import packed_length
from .._problem import ConvProblem, output_size
from ._dtypes import BY_NAME, DTYPES, NAMES
from ._engine import Signature, absent, as_buffer, run, shape_operand
from ._filters import OPERANDS
from ._threads import parallel_function, threads

__all__ = ["call", "output_shape"]

#: Permutations of ``[N, C, *spatial]`` to ``[N, *spatial, C]`` and back, by spatial rank.
_CHANNELS_LAST: Final = {1: (0, 2, 1), 2: (0, 2, 3, 1), 3: (0, 2, 3, 4, 1)}
_CHANNELS_FIRST: Final = {1: (0, 2, 1), 2: (0, 3, 1, 2), 3: (0, 4, 1, 2, 3)}

# Codes whose enumerations' members are slow to hash: these are part of a call's key.
_PACKED, _KRSC, _FCRS = int(Layout.PACKED), int(Layout.KRSC), int(Layout.FCRS)
_TF32 = int(Precision.TF32)

# What is no tensor is a ConvArguments, flat; ``call`` writes it, ``_unflatten`` reads it.
_SCHEMA: Final = (
    "conv(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, Tensor? scale, int[] stride,"
    " int[] padding, int[] dilation, int groups, int[] activations, float[] scalars,"
    " int? precision, str? out_dtype, bool channels_last, bool constant) -> Tensor"
)


@dataclass(frozen=True)
class _Plan:
    """What of a call depends on shapes, types and arguments only."""

    signature: Signature
    output: tuple[int, ...]
    """Channels last."""
    out_dtype: torch.dtype
    empty: bool
    """Whether the output has no elements; the call then ends here."""
    geometry: Buffer
    scalars: Buffer
    shape: Buffer
    no_bias: Buffer | None
    """What stands for a bias that is not there."""
    no_residual: Buffer | None
    """The same for the residual."""


def call(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    arguments: ConvArguments,
    channels_last: bool,
    constant: bool,
) -> Tensor:
    """Calls the operator; the tensors' types and devices are checked.

    Args:
        input: ``[N, C, *spatial]``.
        weight: ``[K, C / groups, *taps]``.
        bias: ``[K]``, or ``None``.
        residual: ``[N, K, *spatial]``, or ``None``.
        scale: ``[K]``, or ``None``.
        arguments: What is no tensor.
        channels_last: Whether the output is, in memory.
        constant: Whether weight and bias are a module's, packed once.

    Raises:
        ValueError: The sizes are those of no convolution.
    """
    output: Tensor = _operator(
        input, weight, bias, residual, scale, *arguments.flatten(), channels_last, constant
    )
    return output


def _unflatten(values: tuple[Any, ...]) -> tuple[Flat, bool, bool]:
    """Returns what follows the tensors in ``_SCHEMA``: arguments, ``channels_last``, ``constant``.

    The arguments are as ``ConvArguments.of_flat`` takes them.
    """
    stride, padding, dilation, groups, activations, scalars, *others = values
    precision, out_dtype, channels_last, constant = others
    flat = (
        tuple(stride),
        tuple(padding),
        tuple(dilation),
        groups,
        tuple(activations),
        tuple(scalars),
        precision,
        out_dtype,
    )
    return flat, channels_last, constant


@lru_cache(maxsize=4096)
def _problem(
    input_shape: Sequence[int], weight_shape: Sequence[int], arguments: ConvArguments
) -> ConvProblem:
    """Checks the sizes, in the words of PyTorch's arguments."""
    batch, channels, *spatial = input_shape
    with renamed(filter="weight"):
        layout = LAYOUTS[arguments.rank][2]
        filters, taps, group_channels = filter_shape_parts(weight_shape, layout, arguments.rank)
        return ConvProblem.of(
            arguments,
            (batch, *spatial, channels),
            filters=filters,
            filter_size=taps,
            group_channels=group_channels,
        )


def output_shape(
    input_shape: Sequence[int], weight_shape: Sequence[int], arguments: ConvArguments
) -> tuple[int, ...]:
    """Returns the output's shape ``[N, K, *spatial]``; the sizes may be PyTorch's symbols."""
    taps = weight_shape[2:]
    before, after = arguments.pads(taps)
    spatial = (
        output_size(
            input_shape[2 + i],
            taps=taps[i],
            stride=arguments.stride[i],
            dilation=arguments.dilation[i],
            pad_before=before[i],
            pad_after=after[i],
        )
        for i in range(arguments.rank)
    )
    return (input_shape[0], weight_shape[0], *cast("tuple[int, ...]", tuple(spatial)))


@dataclass(frozen=True)
class _Checked:
    """What of a call depends on shapes and arguments only, on every device."""

    problem: ConvProblem
    output: tuple[int, ...]
    """Channels last."""
    empty: bool
    """Whether the output has no elements; the call then ends here."""
    geometry: npt.NDArray[np.int64]
    scalars: npt.NDArray[np.float32]


def _checked(
    shapes: tuple[torch.Size | None, ...], layout: int, precision: int, flat: Flat
) -> _Checked:
    """Checks the sizes of a call, and encodes what it is; the arguments are ``_plan``'s."""
    input_shape, weight_shape, bias_shape, residual_shape, scale_shape = shapes
    assert input_shape is not None and weight_shape is not None
    arguments = ConvArguments.of_flat(flat)
    problem = _problem(input_shape, weight_shape, arguments)
    output = cast("tuple[int, ...]", problem.output_shape)
    if bias_shape is not None:
        check_bias(bias_shape, problem.filters)
    if scale_shape is not None:
        check_bias(scale_shape, problem.filters, "scale")
    if residual_shape is not None:
        check_residual(residual_shape, (output[0], output[-1], *output[1:-1]))
    geometry, scalars = encode(
        problem,
        arguments,
        filter_layout=Layout(layout),
        has_bias=bias_shape is not None,
        has_residual=residual_shape is not None,
        precision=Precision(precision),
    )
    return _Checked(problem, output, 0 in output, geometry, scalars)


def _output_dtype(dtype: torch.dtype, asked: str | None) -> torch.dtype:
    """Returns the output's dtype; ``dtype`` is the input's."""
    return dtype if asked is None else BY_NAME[asked]


def _filter_length(problem: ConvProblem, layout: int, shape: torch.Size | None) -> int:
    """Returns how many elements a filter has in a layout; ``shape`` is its own."""
    if layout != _PACKED:
        return math.prod(shape or ())
    return packed_length(
        filters=int(problem.filters),
        group_channels=int(problem.group_channels),
        taps=int(problem.taps),
        groups=int(problem.groups),
    )


@dataclass(frozen=True)
class _HostPlan:
    """A call on the CPU without its pointers."""

    output: tuple[int, ...]
    """Channels last."""
    out_dtype: torch.dtype
    prepared: Prepared | None
    """``None``: the output has no elements."""


@lru_cache(maxsize=4096)
def _host_plan(
    shapes: tuple[torch.Size | None, ...],
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    layout: int,
    flat: Flat,
) -> _HostPlan:
    """Checks the sizes of a call on the CPU, and prepares what all calls like it have in common.

    The arguments are those of ``_plan``.
    """
    checked = _checked(shapes, layout, _TF32, flat)
    out_dtype = _output_dtype(dtype, flat[7])
    if checked.empty:
        return _HostPlan(checked.output, out_dtype, None)
    made = library_of(
        Family(NAMES[dtype], NAMES[bias_dtype or dtype], NAMES[out_dtype], shapes[-1] is not None)
    )
    problem = checked.problem
    prepared = made.prepare(
        cast("tuple[int, ...]", problem.input_shape),
        checked.output,
        _filter_length(problem, layout, shapes[1]),
        checked.geometry,
        checked.scalars,
    )
    return _HostPlan(checked.output, out_dtype, prepared)


@lru_cache(maxsize=4096)
def _plan(
    shapes: tuple[torch.Size | None, ...],
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    device: int,
    layout: int,
    precision: int,
    flat: Flat,
) -> _Plan:
    """Checks the sizes of a call, and prepares what all calls like it have in common.

    Args:
        shapes: Of input, weight, bias, residual and scale.
        dtype: Of the input.
        bias_dtype: Of the bias.
        device: As in ``Signature``.
        layout: The ``Layout`` of the filter's elements.
        precision: The ``Precision`` of float32.
        flat: The arguments.
    """
    checked = _checked(shapes, layout, precision, flat)
    _, _, bias_shape, residual_shape, scale_shape = shapes
    output, empty, rank = checked.output, checked.empty, len(flat[0])
    out_dtype = _output_dtype(dtype, flat[7])
    of_bias = bias_dtype or (dtype if dtype in DTYPES else torch.float32)
    return _Plan(
        # Of equal types one graph serves, however they are asked for.
        Signature(
            *(rank, dtype, of_bias, device),
            out_dtype=None if out_dtype == dtype else out_dtype,
            scaled=scale_shape is not None,
        ),
        output,
        out_dtype,
        empty,
        Buffer.from_numpy(checked.geometry),
        Buffer.from_numpy(checked.scalars),
        shape_operand(output),
        None if empty or bias_shape is not None else absent(1, of_bias, device),
        None if empty or residual_shape is not None else absent(rank + 2, out_dtype, device),
    )


def _torch_precision() -> Precision:
    """Returns what PyTorch's own convolutions leave of float32 operands on a GPU now."""
    cudnn: Any = torch.backends.cudnn
    # From PyTorch 2.9 on operators have settings of their own, and asking for all raises where
    # these differ.
    setting = getattr(getattr(cudnn, "conv", None), "fp32_precision", None)
    rounds = cudnn.allow_tf32 if setting is None else setting == "tf32"
    return Precision.TF32 if rounds else Precision.FLOAT32


def _channels_last(tensor: Tensor, rank: int) -> Tensor:
    """Returns ``[N, *spatial, C]``, contiguous: a view of a channels-last tensor."""
    return tensor.permute(_CHANNELS_LAST[rank]).contiguous()


def _channels_first(output: Tensor, rank: int, channels_last: bool) -> Tensor:
    """Returns ``[N, K, *spatial]`` of ``[N, *spatial, K]``; channels last, a view."""
    output = output.permute(_CHANNELS_FIRST[rank])
    if channels_last:
        return output
    # contiguous() lets dimensions of size one have any stride; a view that makes them does not.
    return output.contiguous().view(-1).view(output.shape)


def _raw_filter(weight: Tensor, rank: int) -> tuple[Tensor, int]:
    """Returns a weight's elements in the order of its memory, and what that order is."""
    if not weight.is_contiguous():
        last = weight.permute(_CHANNELS_LAST[rank])
        if last.is_contiguous():
            return last.reshape(-1), _KRSC
    return weight.contiguous().reshape(-1), _FCRS


def _shapes(*tensors: Tensor | None) -> tuple[torch.Size | None, ...]:
    return tuple(None if tensor is None else tensor.shape for tensor in tensors)


def _conv_cpu(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    *others: Any,
) -> Tensor:
    """Runs the convolution on the CPU, by the shared library."""
    flat, channels_last, constant = _unflatten(others)
    rank, layout = len(flat[0]), _PACKED
    filter = OPERANDS.filter(weight, flat[3]) if constant else None
    if filter is None:
        filter, layout = _raw_filter(weight.detach(), rank)
    plan = _host_plan(
        _shapes(input, weight, bias, residual, scale),
        input.dtype,
        None if bias is None else bias.dtype,
        layout,
        flat,
    )
    if plan.prepared is None:
        return _new_output(input, plan.output, channels_last, plan.out_dtype)
    x = _channels_last(input, rank)
    # Named, so that they live until the call has ended.
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else _channels_last(residual, rank)
    scale = None if scale is None else scale.contiguous()
    y = x.new_empty(plan.output, dtype=plan.out_dtype)
    plan.prepared.run(
        x.data_ptr(),
        filter.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        0 if scale is None else scale.data_ptr(),
        y.data_ptr(),
        threads(),
        parallel_function(),
    )
    return _channels_first(y, rank, channels_last)


def _conv_gpu(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    *others: Any,
) -> Tensor:
    """Runs the convolution on a GPU, by a MAX graph."""
    flat, channels_last, constant = _unflatten(others)
    groups, precision = flat[3], flat[6]
    rank, dtype, device = len(flat[0]), input.dtype, input.get_device()
    # One plan for all where it makes no difference.
    rounding = _TF32
    if dtype == torch.float32:
        rounding = int(_torch_precision()) if precision is None else precision
    filter_buffer = OPERANDS.filter(weight, groups) if constant else None
    layout = _KRSC
    if filter_buffer is None:
        raw, layout = _raw_filter(weight.detach(), rank)
    plan = _plan(
        _shapes(input, weight, bias, residual, scale),
        dtype,
        None if bias is None else bias.dtype,
        device,
        layout,
        rounding,
        flat,
    )
    if plan.empty:
        return _new_output(input, plan.output, channels_last, plan.out_dtype)
    bias_buffer = plan.no_bias
    if bias is not None:
        held = OPERANDS.bias(bias) if constant else None
        bias_buffer = as_buffer(bias.detach().contiguous()) if held is None else held
    operands = Operands(
        as_buffer(_channels_last(input, rank)),
        as_buffer(raw) if filter_buffer is None else filter_buffer,
        bias_buffer,
        plan.no_residual if residual is None else as_buffer(_channels_last(residual, rank)),
        None if scale is None else as_buffer(scale.detach().contiguous()),
        plan.geometry,
        plan.scalars,
    )
    return _channels_first(run(plan.signature, operands, plan.shape), rank, channels_last)


def _new_output(
    input: Tensor, shape: Sequence[int], channels_last: bool, dtype: torch.dtype
) -> Tensor:
    """Returns an output that holds nothing; ``shape`` is channels last."""
    if channels_last:
        return input.new_empty(shape, dtype=dtype).permute(_CHANNELS_FIRST[len(shape) - 2])
    return input.new_empty((shape[0], shape[-1], *shape[1:-1]), dtype=dtype)


def _conv_fake(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    *others: Any,
) -> Tensor:
    """Returns an output of the right shape and strides; checks sizes where all are known."""
    flat, channels_last, _ = _unflatten(others)
    arguments = ConvArguments.of_flat(flat)
    if all(type(size) is int for size in (*input.shape, *weight.shape)):
        _problem(input.shape, weight.shape, arguments)
    batch, filters, *spatial = output_shape(input.shape, weight.shape, arguments)
    kind = _output_dtype(input.dtype, arguments.out_dtype)
    return _new_output(input, (batch, *spatial, filters), channels_last, kind)


# PyTorch takes a library's registrations back when the object goes.
_library = cast(Any, library.Library)("maxconv", "DEF")
_library.define(_SCHEMA, tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
_library.impl("conv", _conv_cpu, "CPU")
_library.impl("conv", _conv_gpu, "CUDA")
library.register_fake("maxconv::conv", _conv_fake, lib=_library)

#: The operator; its arguments are those of ``_SCHEMA``.
_operator: Final[Any] = torch.ops.maxconv.conv.default
