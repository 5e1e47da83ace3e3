"""Transposed convolutions: ``torch.ops.maxconv.conv_transpose`` and its functions.

The operator calls ``maxconv::conv`` once a phase of the output (``maxconv._phases``), and PyTorch
interleaves the phases.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, cast

import torch
from torch import Tensor

from .._arguments import ConvArguments, Flat
from .._checks import check_bias, renamed, spatial_tuple
from .._phases import AxisPhase, AxisSplit, check_transposed, split_axes
from ..activations import ActivationLike
from . import _op
from ._activations import apply
from ._arguments import (
    Ints,
    check_dimensions,
    check_tensors,
    is_channels_last,
    read,
)
from ._dtypes import DTYPES, listed
from ._filters import OPERANDS
from ._op import _CHANNELS_FIRST, _new_output, _unflatten, define
from ._weights import last_in_memory

__all__ = [
    "SideBySide",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "convolve_transposed",
    "read_transposed",
    "side_by_side",
]

# What is no tensor is as in the schema of ``maxconv::conv``.
_SCHEMA: Final = (
    "conv_transpose(Tensor input, Tensor weight, Tensor? bias, int[] output_padding, int[] stride,"
    " int[] padding, int[] dilation, int groups, int[] activations, float[] scalars,"
    " int? precision, str? out_dtype, int[] upsample, int[] zero_points, float? out_scale,"
    " bool channels_last, bool constant) -> Tensor"
)


# The operator -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Phase:
    """One phase: which of the output's elements it gives, and their convolution."""

    offset: tuple[int, ...]
    """The first element of the output, a spatial dimension; the stride leads to the next."""
    axes: tuple[AxisPhase, ...]
    arguments: ConvArguments

    @property
    def geometry(self) -> tuple[tuple[int, ...], ...]:
        """What phases must have in common for one convolution to compute them."""
        return tuple((len(a.taps), a.dilation, a.pad_before, a.pad_after) for a in self.axes)


# Equal by identity: quick to hash.
@dataclass(frozen=True, eq=False)
class _Plan:
    """What of a call depends on the filter's size and the arguments only."""

    axes: tuple[AxisSplit, ...]
    phases: tuple[_Phase, ...]
    stride: tuple[int, ...]
    groups: int
    single: bool
    """Whether the output is that of one convolution as it stands."""
    merged: bool
    """Whether one convolution computes all phases, side by side in the channels of each group."""

    @property
    def parts(self) -> list[tuple[_Phase, ...]]:
        """The phases that one convolution computes, for each."""
        return [self.phases] if self.merged else [(phase,) for phase in self.phases]


@lru_cache(maxsize=4096)
def _plan(taps: tuple[int, ...], flat: Flat, output_padding: tuple[int, ...]) -> _Plan:
    arguments = ConvArguments.of_flat(flat)
    with renamed(output_paddings="output_padding"):
        axes = split_axes(taps, arguments, output_padding)
    phases = []
    for offset in itertools.product(*(range(stride) for stride in arguments.stride)):
        chosen = tuple(axis.phases[i] for axis, i in zip(axes, offset, strict=True))
        own = replace(
            arguments,
            stride=(1,) * len(axes),
            dilation=tuple(axis.dilation for axis in chosen),
            padding=tuple(max(pad, 0) for a in chosen for pad in (a.pad_before, a.pad_after)),
        )
        phases.append(_Phase(offset, chosen, own.remembered()))
    first, *others = (phase.geometry for phase in phases)
    merged = bool(others) and all(own == first for own in others) and all(p[0] for p in first)
    single = not others and all(min(pads) >= 0 for _, _, *pads in first)
    return _Plan(axes, tuple(phases), arguments.stride, arguments.groups, single, merged)


def _checked(input: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan) -> None:
    """Checks the sizes of a call."""
    channels, group_filters, groups = weight.shape[0], weight.shape[1], plan.groups
    if channels % groups:
        raise ValueError(f"weight: {channels} channels are not divisible by groups={groups}")
    if input.shape[1] != channels:
        raise ValueError(
            f"weight: {channels} channels do not match the input's {input.shape[1]}; a transposed "
            f"convolution needs {input.shape[1]}"
        )
    if bias is not None:
        check_bias(bias.shape, group_filters * groups)
    check_transposed(input.shape[2:], plan.axes)


def _part(weight: Tensor, plan: _Plan, phases: Sequence[_Phase]) -> Tensor:
    """Returns the filters ``[K, C / groups, *taps]`` of phases, those of a group side by side."""
    channels, group_filters, *taps = weight.shape
    groups = plan.groups
    grouped = weight.detach().reshape(groups, channels // groups, group_filters, *taps)
    pieces = []
    for phase in phases:
        piece = grouped.transpose(1, 2)
        for axis, entry in enumerate(phase.axes, 3):
            step = entry.taps[0] - entry.taps[1] if len(entry.taps) > 1 else 1
            index = (slice(None),) * axis + (slice(entry.taps[-1], entry.taps[0] + 1, step),)
            piece = piece[index].flip(axis)
        pieces.append(piece)
    whole = torch.stack(pieces, 1)
    part = whole.reshape(-1, *whole.shape[3:])
    # The kernels' own order.
    return last_in_memory(part)


def _parts(weight: Tensor, plan: _Plan) -> list[Tensor | None]:
    """Returns the filters of each convolution; ``None`` where no tap contributes."""
    # A part made under inference_mode has no version: its packed copy could not be kept.
    with torch.inference_mode(False), torch.no_grad():
        return [
            _part(weight, plan, phases) if all(axis.taps for axis in phases[0].axes) else None
            for phases in plan.parts
        ]


def _spread(bias: Tensor, plan: _Plan, constant: bool) -> Tensor:
    """Returns a bias for phases that lie side by side."""

    def make() -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return bias.detach().view(plan.groups, 1, -1).repeat(1, len(plan.phases), 1).view(-1)

    held = OPERANDS.derived(bias, plan, make) if constant else None
    return make() if held is None else cast(Tensor, held)


def _conv_transpose(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    output_padding: Sequence[int],
    *others: Any,
) -> Tensor:
    """Runs the convolutions of the phases, and interleaves what they give."""
    flat, channels_last, constant = _unflatten(others)
    plan = _plan(tuple(weight.shape[2:]), flat, tuple(output_padding))
    _checked(input, weight, bias, plan)
    parts: list[Any] | None = None
    if constant:
        parts = OPERANDS.derived(weight, plan, lambda: _parts(weight, plan))
    # A weight without a version has its parts made for this call.
    constant = parts is not None
    filters: list[Any] = parts or _parts(weight, plan)
    if plan.single or plan.merged:
        if plan.merged and bias is not None:
            bias = _spread(bias, plan, constant)
        arguments, as_asked = plan.phases[0].arguments, channels_last or plan.merged
        y = _op.call(input, filters[0], bias, None, None, arguments, as_asked, constant)
        return _shuffled(y, input, plan, channels_last) if plan.merged else y
    output = _empty(input, weight, plan, channels_last)
    for phase, part in zip(plan.phases, filters, strict=True):
        place = output
        for i, (first, step) in enumerate(zip(phase.offset, plan.stride, strict=True), 2):
            place = place[(slice(None),) * i + (slice(first, None, step),)]
        if part is None:
            # Bias and activation of no sum at all.
            value = weight.new_zeros(output.shape[1]) if bias is None else bias.detach()
            value = apply(phase.arguments.activation, value)
            place.copy_(value.view(1, -1, *(1,) * len(plan.axes)))
        else:
            y = _op.call(input, part, bias, None, None, phase.arguments, True, constant)
            place.copy_(_cut(y, phase, place.shape[2:]))
    return output


class SideBySide:
    """A transposed convolution whose phases lie side by side in the channels of one convolution."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        first = plan.phases[0]
        self.padding = tuple(max(axis.pad_before, 0) for axis in first.axes)
        """Zeros on both sides, a dimension."""
        self.dilation = tuple(first.arguments.dilation)
        """The convolution's."""

    def filters(self, weight: Tensor) -> Tensor:
        """Returns the convolution's filters ``[K, C / groups, *taps]``."""
        return _part(weight, self._plan, self._plan.phases)

    def spread(self, bias: Tensor) -> Tensor:
        """Returns the convolution's bias."""
        return _spread(bias, self._plan, constant=False)

    def interleave(self, y: Tensor, input: Tensor) -> Tensor:
        """Returns the output, for what the convolution gives of an input; both have a batch."""
        return _shuffled(y, input, self._plan, channels_last=True)


@lru_cache(maxsize=4096)
def _side_by_side(
    taps: tuple[int, ...], flat: Flat, output_padding: tuple[int, ...]
) -> SideBySide | None:
    plan = _plan(taps, flat, output_padding)
    alike = all(axis.pad_before == axis.pad_after for axis in plan.phases[0].axes)
    return SideBySide(plan) if plan.merged and alike else None


def side_by_side(
    taps: tuple[int, ...], arguments: ConvArguments, output_padding: tuple[int, ...]
) -> SideBySide | None:
    """Returns the one convolution that computes all phases; ``None`` if that takes several.

    Args:
        taps: The filter's size.
        arguments: What else is no tensor, as ``read_transposed`` returns it.
        output_padding: What is added to the end of the output, a dimension.
    """
    return _side_by_side(taps, arguments.flatten(), output_padding)


def _cut(y: Tensor, phase: _Phase, sizes: Sequence[int]) -> Tensor:
    """Cuts off what negative padding says, and what is beyond the output's end."""
    for i, (axis, size) in enumerate(zip(phase.axes, sizes, strict=True), 2):
        y = y.narrow(i, max(-axis.pad_before, 0), size)
    return y


def _shuffled(y: Tensor, input: Tensor, plan: _Plan, channels_last: bool) -> Tensor:
    """Interleaves phases that lie side by side in the channels of each group."""
    rank, groups = len(plan.axes), plan.groups
    batch, filters = y.shape[0], y.shape[1] // len(plan.phases)
    sizes = [size + axis.growth for size, axis in zip(input.shape[2:], plan.axes, strict=True)]
    tiles = _cut(y, plan.phases[0], sizes)
    tiles = tiles.reshape(batch, groups, *plan.stride, filters // groups, *sizes)
    strides, lengths = range(2, 2 + rank), range(3 + rank, 3 + 2 * rank)
    order = [0, *(axis for pair in zip(lengths, strides, strict=True) for axis in pair)]
    extents = [size * step for size, step in zip(sizes, plan.stride, strict=True)]
    whole = tiles.permute(*order, 1, 2 + rank).reshape(batch, *extents, filters)
    for i, axis in enumerate(plan.axes, 1):
        whole = whole.narrow(i, 0, whole.shape[i] - axis.surplus)
    first = _CHANNELS_FIRST[rank + 2]
    dense = whole if channels_last else whole.permute(first)
    # A view gives dimensions of size one the strides of a new tensor.
    dense = dense.contiguous().view(-1).view(dense.shape)
    return dense.permute(first) if channels_last else dense


def _empty(input: Tensor, weight: Tensor, plan: _Plan, channels_last: bool) -> Tensor:
    sizes = zip(plan.axes, input.shape[2:], strict=True)
    spatial = (axis.output_size(size) for axis, size in sizes)
    shape = (input.shape[0], *spatial, weight.shape[1] * plan.groups)
    return _new_output(input, shape, channels_last, input.dtype)


def _conv_transpose_fake(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    output_padding: Sequence[int],
    *others: Any,
) -> Tensor:
    """Returns an output of the right shape and strides; checks sizes where all are known."""
    flat, channels_last, _ = _unflatten(others)
    plan = _plan(tuple(map(int, weight.shape[2:])), flat, tuple(output_padding))
    if all(type(size) is int for size in (*input.shape, *weight.shape)):
        _checked(input, weight, bias, plan)
    return _empty(input, weight, plan, channels_last)


#: The operator; its arguments are those of ``_SCHEMA``.
_operator: Final = define(_SCHEMA, _conv_transpose, _conv_transpose_fake)


# Functions --------------------------------------------------------------------------------------


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    activation: ActivationLike = None,
    precision: str | None = None,
) -> Tensor:
    """Convolves ``[N, C, L]`` or ``[C, L]``, transposed, with ``[C, K / groups, S]``.

    The arguments are those of ``conv_transpose2d``, with one spatial dimension; so is what it
    raises.

    Returns:
        ``[N, K, Q]``, or ``[K, Q]`` for an input without a batch.
    """
    arguments = read_transposed(1, stride, padding, dilation, groups, activation, precision)
    return convolve_transposed(input, weight, bias, output_padding, arguments)


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    activation: ActivationLike = None,
    precision: str | None = None,
) -> Tensor:
    """Convolves ``[N, C, H, W]`` or ``[C, H, W]``, transposed, with ``[C, K / groups, R, S]``.

    Computes ``activation(conv_transpose(input, weight) + bias)`` as one convolution of stride 1
    for each phase of the output, or as one for all phases where these have as many taps each. A
    channels-last input or weight gives a channels-last output, as in PyTorch.

    The filters of the phases are made in every call: a module (``ConvTranspose2d``) makes and packs
    them once.

    Args:
        input: float32, bfloat16 or float16, on the CPU or a GPU.
        weight: Of the input's dtype.
        bias: ``[K]`` of the input's dtype or float32.
        stride: One integer or two.
        padding: What is cut from both sides of the output, beside ``dilation * (taps - 1)``.
        output_padding: What is added to the end of the output; below the stride or the dilation.
        groups: Divides the channels of input and output.
        dilation: One integer or two.
        activation: As in ``conv2d``.
        precision: As in ``conv2d``.

    Returns:
        ``[N, K, P, Q]``, or ``[K, P, Q]`` for an input without a batch.

    Raises:
        TypeError: An argument is of a wrong type, or tensors are of dtypes that are unsupported or
            do not go together.
        ValueError: An argument has a value, a shape or a device that is not allowed.
        RuntimeError: A tensor requires grad while grad mode is on: there is no backward pass.
    """
    arguments = read_transposed(2, stride, padding, dilation, groups, activation, precision)
    return convolve_transposed(input, weight, bias, output_padding, arguments)


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    activation: ActivationLike = None,
    precision: str | None = None,
) -> Tensor:
    """Convolves ``[N, C, D, H, W]``, transposed, with ``[C, K / groups, T, R, S]``.

    The arguments are those of ``conv_transpose2d``, with three spatial dimensions; so is what it
    raises.

    Returns:
        ``[N, K, Z, P, Q]``, or ``[K, Z, P, Q]`` for an input without a batch.
    """
    arguments = read_transposed(3, stride, padding, dilation, groups, activation, precision)
    return convolve_transposed(input, weight, bias, output_padding, arguments)


def read_transposed(
    rank: int,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    activation: ActivationLike,
    precision: str | None,
) -> ConvArguments:
    """Returns a call's arguments, checked; they are those of ``conv_transpose2d``."""
    if isinstance(padding, str):
        raise TypeError(
            f"padding: {padding!r} is a str; an integer or a tuple of {rank} integers is allowed"
        )
    return read(rank, stride, padding, dilation, groups, activation, 1.0, None, precision, None)


def convolve_transposed(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    output_padding: Ints,
    arguments: ConvArguments,
    *,
    constant: bool = False,
    channels_last: bool | None = None,
) -> Tensor:
    """Checks the tensors and calls the operator.

    Args:
        input: ``[N, C, *spatial]`` or ``[C, *spatial]``.
        weight: ``[C, K / groups, *taps]``.
        bias: ``[K]``, or ``None``.
        output_padding: One integer, or one a spatial dimension.
        arguments: What else is no tensor, checked.
        constant: Whether weight and bias are a module's, whose phases are made once.
        channels_last: Whether the output is; ``None`` follows input and weight, as PyTorch does.

    Raises:
        TypeError: A tensor is none, or of a dtype that is unsupported or does not go with others.
        ValueError: A tensor's shape or device is not allowed.
        RuntimeError: A tensor requires grad while grad mode is on.
    """
    check_dimensions(input, weight, arguments.rank, transposed=True)
    if input.dtype not in DTYPES:
        raise TypeError(f"input: dtype {input.dtype} is not supported; {listed()} are allowed")
    check_tensors(input, weight, bias, None, None, None)
    if isinstance(output_padding, tuple | list) and len(output_padding) == 1:
        output_padding = output_padding[0]
    extra = spatial_tuple("output_padding", output_padding, arguments.rank)
    unbatched = input.dim() == arguments.rank + 1
    if channels_last is None:
        channels_last = is_channels_last(input, unbatched) or is_channels_last(weight)
    if unbatched:
        input = input.unsqueeze(0)
    output: Tensor = _operator(
        input, weight, bias, extra, *arguments.flatten(), channels_last, constant
    )
    return output.squeeze(0) if unbatched else output
