"""Convolutions with the arguments of ``torch.nn.functional``, and what can be fused into them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, is_grad_enabled, strided
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from .._arguments import ConvArguments
from ..activations import ActivationLike
from . import _op
from ._arguments import (
    Ints,
    check_ranks,
    check_tensors,
    expanded_scale,
    is_channels_last,
    read,
)
from ._plan import Plan, find, is_kept, rounding

__all__ = [
    "call_key",
    "conv1d",
    "conv2d",
    "conv3d",
    "convolve",
    "is_plain_memory",
    "is_watched",
    "plan_of",
]

#: Classes of tensors that are memory, and nothing else.
_PLAIN: Final = (Tensor, torch.nn.Parameter)

#: How many plans of calls are kept.
_KEPT: Final = 4096

# Who watches or changes operators; PyTorch has no public way to ask.
_c: Any = torch._C
_dispatch_modes = _c._len_torch_dispatch_stack
_function_modes = _c._len_torch_function_stack
_interpreters = _c._functorch.peek_interpreter_stack
_tracing = _c._get_tracing_state
_profiled = _c._autograd._profiler_enabled


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    activation: ActivationLike = None,
    residual: Tensor | None = None,
    beta: float = 1.0,
    final_activation: ActivationLike = None,
    precision: str | None = None,
    scale: Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    upsample: Ints = 1,
    zero_point: int = 0,
    residual_zero_point: int = 0,
    out_scale: float | None = None,
    out_zero_point: int = 0,
) -> Tensor:
    """Convolves ``[N, C, L]`` or ``[C, L]`` with ``[K, C / groups, S]``.

    The arguments are those of ``conv2d``, with one spatial dimension; so is what it raises.

    Returns:
        ``[N, K, Q]``, or ``[K, Q]`` for an input without a batch.
    """
    arguments = read(
        1,
        stride,
        padding,
        dilation,
        groups,
        activation,
        beta,
        final_activation,
        precision,
        out_dtype,
        upsample,
        (zero_point, residual_zero_point, out_zero_point),
        out_scale,
    )
    return convolve(input, weight, bias, residual, scale, arguments)


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    activation: ActivationLike = None,
    residual: Tensor | None = None,
    beta: float = 1.0,
    final_activation: ActivationLike = None,
    precision: str | None = None,
    scale: Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    upsample: Ints = 1,
    zero_point: int = 0,
    residual_zero_point: int = 0,
    out_scale: float | None = None,
    out_zero_point: int = 0,
) -> Tensor:
    """Convolves ``[N, C, H, W]`` or ``[C, H, W]`` with ``[K, C / groups, R, S]``.

    Computes ``final_activation(activation(scale * conv(input, weight) + bias) + beta * residual)``.
    Sums are in float32 (of integers, in int32) and rounded once, whatever the dtype. Integers of 8
    bits stand for real numbers: ``input - zero_point`` is convolved, ``beta * (residual -
    residual_zero_point)`` added, and an output ``y`` of integers is ``clamp(round(y * (1 /
    out_scale)) + out_zero_point)``, as ``torch.quantize_per_tensor`` has it.

    A channels-last input is read where it lies and gives a channels-last output. So does a
    channels-last weight; otherwise a contiguous input gives a contiguous output, at the price of
    converting both: prefer channels last.

    The weight is packed in every call: a module (``Conv2d``) packs it once.

    Args:
        input: float32, bfloat16, float16 or int8, on the CPU or a GPU; on the CPU also uint8, on a
            GPU float8_e4m3fn, on one of compute capability 9.0, 10.0 or 10.3 float8_e5m2.
        weight: Of the input's dtype; beside uint8 int8.
        bias: ``[K]`` of the input's dtype (the output's for a dtype of 8 bits) or float32.
        stride: One integer or two.
        padding: Zeros on both sides, one integer or two; ``"valid"`` for none; ``"same"`` for an
            output of the input's size.
        dilation: One integer or two.
        groups: Divides the channels of input and output.
        activation: ``"relu"``, ``"relu6"``, ``"leaky_relu"``, ``"sigmoid"``, ``"silu"``,
            ``"hardswish"``, ``"hardsigmoid"``, ``"gelu"``, ``"gelu_tanh"``, ``"tanh"``,
            ``("clamp", min, max)``, ``("leaky_relu", slope)``, or what ``maxconv.activations``
            makes.
        residual: Of the output's shape and dtype.
        beta: Factor of the residual.
        final_activation: As ``activation``.
        precision: What is left of float32 operands when a GPU multiplies them: ``"tf32"`` lets it
            round them to tf32, which its tensor cores take (the norm of the result's error is then
            about 3e-4 of the result's); with ``"float32"`` nothing is rounded, and its CUDA
            cores multiply, many times more slowly. ``None`` does what PyTorch's own convolutions do
            in this call, by ``torch.backends.cudnn.conv.fp32_precision`` (or
            ``torch.backends.cudnn.allow_tf32``): tf32, unless that was changed. A CPU rounds
            nothing either way.
        scale: What sums are multiplied with: a number, or float32 ``[K]`` or ``[1]``. With
            float8_e4m3fn: the product of the scales by which input and weight were divided.
        out_dtype: Of the output: float32, bfloat16 or float16; on the CPU also int8 and uint8. By
            default the input's; it must be given with an input of 8 bits.
        upsample: How often each pixel is repeated before the image is convolved, as
            ``interpolate(input, scale_factor=upsample)`` does: one integer or two. Padding and
            dilation are of the enlarged image, which is never in memory: a convolution of ``input``
            itself computes a block of pixels at a time, with filters whose taps were summed and
            rounded to the weight's dtype. Of a 3x3 weight and a factor of 2 it has 2.25 times fewer
            products. The stride must be 1, dtypes of 8 bits are not allowed, and a residual is not.
        zero_point: The integer that stands for 0 in the input, and in its padding; 0 for floats,
            and on a GPU.
        residual_zero_point: The same in the residual.
        out_scale: What a step of an output of integers stands for; for floats ``None``.
        out_zero_point: The integer that stands for 0 in the output.

    Returns:
        ``[N, K, P, Q]``, or ``[K, P, Q]`` for an input without a batch.

    Raises:
        TypeError: An argument is of a wrong type, or tensors are of dtypes that are unsupported or
            do not go together.
        ValueError: An argument has a value, a shape or a device that is not allowed.
        RuntimeError: A tensor requires grad while grad mode is on: there is no backward pass.
    """
    arguments = read(
        2,
        stride,
        padding,
        dilation,
        groups,
        activation,
        beta,
        final_activation,
        precision,
        out_dtype,
        upsample,
        (zero_point, residual_zero_point, out_zero_point),
        out_scale,
    )
    return convolve(input, weight, bias, residual, scale, arguments)


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    activation: ActivationLike = None,
    residual: Tensor | None = None,
    beta: float = 1.0,
    final_activation: ActivationLike = None,
    precision: str | None = None,
    scale: Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    upsample: Ints = 1,
    zero_point: int = 0,
    residual_zero_point: int = 0,
    out_scale: float | None = None,
    out_zero_point: int = 0,
) -> Tensor:
    """Convolves ``[N, C, D, H, W]`` or ``[C, D, H, W]`` with ``[K, C / groups, T, R, S]``.

    The arguments are those of ``conv2d``, with three spatial dimensions; so is what it raises.

    Returns:
        ``[N, K, Z, P, Q]``, or ``[K, Z, P, Q]`` for an input without a batch.
    """
    arguments = read(
        3,
        stride,
        padding,
        dilation,
        groups,
        activation,
        beta,
        final_activation,
        precision,
        out_dtype,
        upsample,
        (zero_point, residual_zero_point, out_zero_point),
        out_scale,
    )
    return convolve(input, weight, bias, residual, scale, arguments)


def convolve(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | float | None,
    arguments: ConvArguments,
    *,
    constant: bool = False,
    channels_last: bool | None = None,
) -> Tensor:
    """Checks the tensors and calls the operator.

    A call like an earlier one has its plan, and needs neither checks nor PyTorch's dispatcher,
    whose work is most of a small convolution's time. Where somebody watches or changes operators
    (a tracer, a mode, a profiler), the operator is called.

    Args:
        input: ``[N, C, *spatial]`` or ``[C, *spatial]``.
        weight: ``[K, C / groups, *taps]``.
        bias: ``[K]``, or ``None``.
        residual: Of the output's shape, or ``None``.
        scale: A number, ``[K]`` or ``[1]``, or ``None``.
        arguments: What is no tensor, checked.
        constant: Whether the weight is a module's, packed once.
        channels_last: Whether the output is; ``None`` follows input and weight, as PyTorch does.

    Raises:
        TypeError: A tensor is none, or of a dtype that is unsupported or does not go with others.
        ValueError: A tensor's shape or device is not allowed.
        RuntimeError: A tensor requires grad while grad mode is on.
    """
    key = None
    # A scale of one element, or a number, is expanded in each call.
    whole = scale is None or (isinstance(scale, Tensor) and scale.shape == weight.shape[:1])
    if whole and not is_dynamo_compiling():
        tensors = input, weight, bias, residual, cast("Tensor | None", scale)
        key = _key(tensors, arguments, constant, channels_last)
        plan = None if key is None else _plans.get(key)
        if plan is not None:
            return plan.run(*tensors)
    check_ranks(input, weight, arguments)
    factors = None if scale is None else expanded_scale(scale, weight, input)
    check_tensors(input, weight, bias, residual, factors, arguments.out_dtype)
    unbatched = input.dim() == arguments.rank + 1
    if channels_last is None:
        channels_last = is_channels_last(input, unbatched) or is_channels_last(weight)
    if unbatched:
        input = input.unsqueeze(0)
        residual = None if residual is None else residual.unsqueeze(0)
    output = _op.call(
        input,
        weight,
        bias,
        residual,
        factors,
        arguments,
        channels_last,
        constant,
    )
    if unbatched:
        return output.squeeze(0)
    if key is not None:
        _keep(
            key,
            find(
                *(input, weight, bias, residual, factors),
                arguments.flatten(),
                channels_last,
                constant,
            ),
        )
    return output


def plan_of(
    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
    arguments: ConvArguments,
    *,
    constant: bool = False,
    channels_last: bool | None = None,
) -> Plan | None:
    """Returns the plan of a call of ``convolve`` that was made before.

    Args:
        tensors: Activation, filter, bias, residual and scale.
        arguments: As ``convolve`` takes them, and so are the others.

    Returns:
        ``None`` if nobody made it, or without a plan.
    """
    key = _key(tensors, arguments, constant, channels_last)
    return None if key is None else _plans.get(key)


#: Plans by everything that they were chosen by, for calls that nobody watches.
_plans: dict[Any, Plan] = {}


def _keep(key: Any, plan: Plan) -> None:
    if len(_plans) >= _KEPT:
        _plans.clear()
    _plans[key] = plan


def is_watched() -> bool:
    """Whether somebody watches or changes operators: a tracer, a mode, a profiler."""
    return bool(
        _dispatch_modes() or _function_modes() or _profiled() or _tracing() or _is_transformed()
    )


def _is_transformed() -> bool:
    """Whether tensors may have a batch or a tangent besides: a transform, or forward AD."""
    return bool(_interpreters() or forward_ad._current_level >= 0)


def is_plain_memory(tensor: Tensor) -> bool:
    """Whether a tensor has no tangent, no batch of ``vmap`` and no other meaning besides."""
    return type(tensor) in _PLAIN and not tensor.is_neg() and not _is_transformed()


def _key(
    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
    arguments: ConvArguments,
    constant: bool,
    channels_last: bool | None,
) -> Any:
    """Returns what tells calls apart that have different plans.

    Returns:
        ``None`` for a call that the operator must see: somebody watches, a gradient is asked for,
        or a tensor is not plain memory.
    """
    known = call_key(tensors)
    if known is None:
        return None
    flat = arguments.flatten()
    input, weight, *_ = tensors
    return known, flat, constant, channels_last, is_kept(weight, constant), rounding(input, flat)


def call_key(tensors: Sequence[Tensor | None]) -> tuple[Any, ...] | None:
    """Returns what tells calls apart whose tensors differ in more than addresses.

    Returns:
        ``None`` for a call that PyTorch's operators must see: somebody watches, a gradient is asked
        for, or a tensor is not plain memory.
    """
    if is_watched():
        return None
    grad = is_grad_enabled()
    parts: list[Any] = []
    for tensor in tensors:
        if tensor is None:
            parts.append(None)
            continue
        if (
            tensor.__class__ not in _PLAIN
            or (grad and tensor.requires_grad)
            or tensor.layout is not strided
            or tensor.is_neg()
        ):
            return None
        parts += tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    return tuple(parts)
