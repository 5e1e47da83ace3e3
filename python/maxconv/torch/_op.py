"""``torch.ops.maxconv.conv``: the one operator that PyTorch's dispatcher and compiler see.

It is functional (its output is new) and has a fake implementation, so that ``torch.compile`` takes
it into a graph as it stands. Its arguments are resolved: one number a spatial dimension, names
turned to codes; ``functional`` resolves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, cast

import torch
from max.driver import Buffer
from torch import Tensor, library

from .._fields import Activation, Layout, Precision, encode_scalars
from ..arguments import check_bias, check_residual
from ..problem import ConvProblem, output_size
from ._engine import DTYPES, HOST, Operands, Signature, absent, as_buffer, run, shape_operand
from ._filters import OPERANDS

__all__ = ["CHANNELS_FIRST", "CHANNELS_LAST", "Resolved", "conv", "output_shape"]

#: Permutations of ``[N, C, *spatial]`` to ``[N, *spatial, C]`` and back, by spatial rank.
CHANNELS_LAST: Final = {1: (0, 2, 1), 2: (0, 2, 3, 1), 3: (0, 2, 3, 4, 1)}
CHANNELS_FIRST: Final = {1: (0, 2, 1), 2: (0, 3, 1, 2), 3: (0, 4, 1, 2, 3)}

_SCHEMA: Final = (
    "conv(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, Tensor? scale, int[] stride,"
    " int[] padding, int[] dilation, int groups, int[] activations, float[] scalars,"
    " int? precision, ScalarType? out_dtype, bool channels_last, bool constant) -> Tensor"
)


class Resolved(NamedTuple):
    """A convolution's arguments other than tensors, as the operator takes them."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    """``(before, after)`` a spatial dimension, outermost first."""
    dilation: tuple[int, ...]
    groups: int
    activations: tuple[int, int]
    """Codes of the activation and of the final activation."""
    scalars: tuple[float, ...]
    """In the order of ``_fields.SCALARS``."""
    precision: int | None
    """The code of what is left of float32 operands; ``None`` follows PyTorch's setting."""
    out_dtype: torch.dtype | None
    """Of output and residual, where it is not the input's."""


@dataclass(frozen=True)
class _Plan:
    """The operands of a call that depend on shapes and arguments only."""

    output: tuple[int, ...]
    """Channels last."""
    geometry: Buffer
    scalars: Buffer
    shape: Buffer


def _problem(
    input_shape: Sequence[int], weight_shape: Sequence[int], resolved: Resolved
) -> ConvProblem:
    """Checks the sizes, in the words of PyTorch's arguments."""
    batch, channels, *spatial = input_shape
    filters, group_channels, *taps = weight_shape
    try:
        return ConvProblem.from_parts(
            (batch, *spatial, channels),
            filters=filters,
            filter_size=tuple(taps),
            group_channels=group_channels,
            stride=resolved.stride,
            dilation=resolved.dilation,
            padding=resolved.padding,
            groups=resolved.groups,
        )
    except ValueError as error:
        name, rest = str(error).split(":", maxsplit=1)
        raise ValueError(f"{'weight' if name == 'filter' else name}:{rest}") from None


def output_shape(
    input_shape: Sequence[int], weight_shape: Sequence[int], resolved: Resolved
) -> tuple[int, ...]:
    """Returns the output's shape ``[N, K, *spatial]``; the sizes may be PyTorch's symbols."""
    rank = len(resolved.stride)
    spatial = (
        output_size(
            input_shape[2 + i],
            taps=weight_shape[2 + i],
            stride=resolved.stride[i],
            dilation=resolved.dilation[i],
            pad_before=resolved.padding[2 * i],
            pad_after=resolved.padding[2 * i + 1],
        )
        for i in range(rank)
    )
    return (input_shape[0], weight_shape[0], *cast("tuple[int, ...]", tuple(spatial)))


@lru_cache(maxsize=4096)
def _plan(
    input_shape: torch.Size,
    weight_shape: torch.Size,
    bias_shape: torch.Size | None,
    residual_shape: torch.Size | None,
    scale_shape: torch.Size | None,
    layout: Layout,
    resolved: Resolved,
) -> _Plan:
    problem = _problem(input_shape, weight_shape, resolved)
    output = cast("tuple[int, ...]", problem.output_shape)
    if bias_shape is not None:
        check_bias(bias_shape, problem.filters)
    if scale_shape is not None:
        check_bias(scale_shape, problem.filters, "scale")
    if residual_shape is not None:
        check_residual(residual_shape, (output[0], output[-1], *output[1:-1]))
    activation, final = resolved.activations
    geometry = problem.geometry(
        filter_layout=layout,
        activation=Activation(activation),
        final_activation=Activation(final),
        has_bias=bias_shape is not None,
        has_residual=residual_shape is not None,
        precision=Precision(resolved.precision or Precision.TF32),
    )
    beta, p0, p1, q0, q1 = resolved.scalars
    scalars = encode_scalars(beta=beta, activation_parameters=(p0, p1), final_parameters=(q0, q1))
    return _Plan(
        output, Buffer.from_numpy(geometry), Buffer.from_numpy(scalars), shape_operand(output)
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
    return tensor.permute(CHANNELS_LAST[rank]).contiguous()


def _raw_filter(weight: Tensor, rank: int) -> tuple[Tensor, Layout]:
    """Returns a weight's elements in the order of its memory, and what that order is."""
    if not weight.is_contiguous():
        last = weight.permute(CHANNELS_LAST[rank])
        if last.is_contiguous():
            return last.reshape(-1), Layout.KRSC
    return weight.contiguous().reshape(-1), Layout.FCRS


def _conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    activations: list[int],
    scalars: list[float],
    precision: int | None,
    out_dtype: torch.dtype | None,
    channels_last: bool,
    constant: bool,
) -> Tensor:
    """Runs the convolution; see ``functional`` for what the arguments mean."""
    rank = len(stride)
    activation, final = activations
    device = input.get_device()
    rounds = device != HOST and input.dtype == torch.float32
    resolved = Resolved(
        tuple(stride),
        tuple(padding),
        tuple(dilation),
        groups,
        (activation, final),
        tuple(scalars),
        # One plan for all where it makes no difference.
        (_torch_precision() if precision is None else precision) if rounds else Precision.TF32,
        out_dtype,
    )
    filter_buffer = OPERANDS.filter(weight, groups) if constant else None
    layout = Layout.PACKED if device == HOST else Layout.KRSC
    if filter_buffer is None:
        raw, layout = _raw_filter(weight.detach(), rank)
    plan = _plan(
        input.shape,
        weight.shape,
        None if bias is None else bias.shape,
        None if residual is None else residual.shape,
        None if scale is None else scale.shape,
        layout,
        resolved,
    )
    if 0 in plan.output:
        return _new_output(input, plan.output, channels_last, out_dtype)
    dtype = input.dtype
    if bias is None:
        bias_dtype = dtype if dtype in DTYPES else torch.float32
        bias_buffer = absent(1, bias_dtype, device)
    else:
        bias_dtype, held = bias.dtype, OPERANDS.bias(bias) if constant else None
        bias_buffer = as_buffer(bias.detach().contiguous()) if held is None else held
    operands = Operands(
        input=as_buffer(_channels_last(input, rank)),
        filter=as_buffer(raw) if filter_buffer is None else filter_buffer,
        bias=bias_buffer,
        residual=absent(rank + 2, out_dtype or dtype, device)
        if residual is None
        else as_buffer(_channels_last(residual, rank)),
        geometry=plan.geometry,
        scalars=plan.scalars,
        shape=plan.shape,
        scale=None if scale is None else as_buffer(scale.detach().contiguous()),
    )
    signature = Signature(rank, dtype, bias_dtype, device, out_dtype, scale is not None)
    output = run(signature, operands).permute(CHANNELS_FIRST[rank])
    if channels_last:
        return output
    # contiguous() lets dimensions of size one have any stride; a view that makes them does not.
    return output.contiguous().view(-1).view(output.shape)


def _new_output(
    input: Tensor, shape: Sequence[int], channels_last: bool, dtype: torch.dtype | None
) -> Tensor:
    """Returns an output that holds nothing; ``shape`` is channels last."""
    if channels_last:
        return input.new_empty(shape, dtype=dtype).permute(CHANNELS_FIRST[len(shape) - 2])
    return input.new_empty((shape[0], shape[-1], *shape[1:-1]), dtype=dtype)


def _conv_fake(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    activations: list[int],
    scalars: list[float],
    precision: int | None,
    out_dtype: torch.dtype | None,
    channels_last: bool,
    constant: bool,
) -> Tensor:
    """Returns an output of the right shape and strides; checks sizes where all are known."""
    resolved = Resolved(
        tuple(stride),
        tuple(padding),
        tuple(dilation),
        groups,
        (activations[0], activations[1]),
        tuple(scalars),
        precision,
        out_dtype,
    )
    batch, filters, *spatial = output_shape(input.shape, weight.shape, resolved)
    if all(type(size) is int for size in (*input.shape, *weight.shape)):
        _problem(input.shape, weight.shape, resolved)
    return _new_output(input, (batch, *spatial, filters), channels_last, out_dtype)


# PyTorch takes a library's registrations back when the object goes.
_library = cast(Any, library.Library)("maxconv", "DEF")
_library.define(_SCHEMA, tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
_library.impl("conv", _conv, "CPU")
_library.impl("conv", _conv, "CUDA")
library.register_fake("maxconv::conv", _conv_fake, lib=_library)

#: The operator; its arguments are those of ``_SCHEMA``.
conv = torch.ops.maxconv.conv.default
