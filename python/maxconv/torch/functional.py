"""Convolutions with the arguments of ``torch.nn.functional``, and what can be fused into them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from ..activations import ActivationLike, parse
from ..arguments import (
    check_at_least,
    check_device,
    check_integer,
    check_precision,
    resolve_padding,
    spatial_tuple,
)
from ._engine import BLACKWELL, BLACKWELL_DTYPES, DTYPES, FLOAT8
from ._op import Resolved, conv

__all__ = ["Ints", "conv1d", "conv2d", "conv3d"]

#: One integer for every spatial dimension, or one for each.
Ints: TypeAlias = int | Sequence[int]

_SHAPES = {1: "L", 2: "H, W", 3: "D, H, W"}


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
) -> Tensor:
    """Convolves ``[N, C, L]`` or ``[C, L]`` with ``[K, C / groups, S]``; else as ``conv2d``."""
    resolved = resolve(
        1,
        weight,
        stride,
        padding,
        dilation,
        groups,
        activation,
        beta,
        final_activation,
        precision,
        out_dtype,
    )
    return convolve(input, weight, bias, residual, resolved, scale)


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
) -> Tensor:
    """Convolves ``[N, C, H, W]`` or ``[C, H, W]`` with ``[K, C / groups, R, S]``.

    Computes ``final_activation(activation(scale * conv(input, weight) + bias) + beta * residual)``.
    Sums are in float32 and rounded once, whatever the dtype. A channels-last input is read where it
    lies and gives a channels-last output. So does a channels-last weight; otherwise a contiguous
    input gives a contiguous output, at the price of converting both: prefer channels last.

    The weight is packed in every call: a module (``Conv2d``) packs it once.

    Args:
        input: float32, bfloat16 or float16, on the CPU or a GPU; on a GPU also float8_e4m3fn, on
            one of compute capability 10.0 or 10.3 float8_e5m2 and int8.
        weight: Of the input's dtype.
        bias: ``[K]`` of the input's dtype (the output's for a dtype of 8 bits) or float32.
        stride: One integer or two.
        padding: Zeros on both sides, one integer or two; ``"valid"`` for none; ``"same"`` for an
            output of the input's size.
        dilation: One integer or two.
        groups: Divides the channels of input and output.
        activation: ``"relu"``, ``"relu6"``, ``"leaky_relu"``, ``"sigmoid"``, ``"silu"``,
            ``"hardswish"``, ``"gelu"``, ``"gelu_tanh"``, ``"tanh"``, ``("clamp", min, max)``,
            ``("leaky_relu", slope)``, or what ``maxconv.activations`` makes.
        residual: Of the output's shape and dtype.
        beta: Factor of the residual.
        final_activation: As ``activation``.
        precision: What is left of float32 operands when a GPU multiplies them: ``"tf32"`` lets it
            round them to tf32, which its tensor cores take (the norm of the result's error is then
            about 3e-4 of the result's); with ``"float32"`` nothing is rounded, and its ordinary
            units multiply, many times more slowly. ``None`` does what PyTorch's own convolutions do
            in this call, by ``torch.backends.cudnn.conv.fp32_precision`` (or
            ``torch.backends.cudnn.allow_tf32``): tf32, unless that was changed. A CPU rounds
            nothing either way.
        scale: What sums are multiplied with: a number, or float32 ``[K]`` or ``[1]``. With
            float8_e4m3fn: the product of the scales by which input and weight were divided.
        out_dtype: Of the output: float32, bfloat16 or float16. By default the input's; it must be
            given with float8_e4m3fn.

    Returns:
        ``[N, K, P, Q]``, or ``[K, P, Q]`` for an input without a batch.

    Raises:
        TypeError: An argument is of a wrong type, or tensors are of dtypes that are unsupported or
            do not go together.
        ValueError: An argument has a value, a shape or a device that is not allowed.
        RuntimeError: A tensor requires grad while grad mode is on: there is no backward pass.
    """
    resolved = resolve(
        2,
        weight,
        stride,
        padding,
        dilation,
        groups,
        activation,
        beta,
        final_activation,
        precision,
        out_dtype,
    )
    return convolve(input, weight, bias, residual, resolved, scale)


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
) -> Tensor:
    """Convolves ``[N, C, D, H, W]`` with ``[K, C / groups, T, R, S]``; else as ``conv2d``."""
    resolved = resolve(
        3,
        weight,
        stride,
        padding,
        dilation,
        groups,
        activation,
        beta,
        final_activation,
        precision,
        out_dtype,
    )
    return convolve(input, weight, bias, residual, resolved, scale)


def resolve(
    rank: int,
    weight: Tensor,
    stride: Ints,
    padding: Ints | str,
    dilation: Ints,
    groups: int,
    activation: ActivationLike,
    beta: float,
    final_activation: ActivationLike,
    precision: str | None,
    out_dtype: torch.dtype | None,
) -> Resolved:
    """Returns a call's arguments as the operator takes them; see ``conv2d`` for what is raised."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight: a {type(weight).__name__} is not a tensor; a torch.Tensor is")
    if weight.dim() != rank + 2:
        raise ValueError(
            f"weight: shape {tuple(weight.shape)} has rank {weight.dim()}; conv{rank}d takes rank "
            f"{rank + 2}: [K, C / groups, {', '.join(('T', 'R', 'S')[3 - rank :])}]"
        )
    # Only "same" looks at the taps, which are then not symbols.
    taps = tuple(weight.shape[2:]) if padding == "same" else (1,) * rank
    arguments = (
        rank,
        taps,
        stride,
        padding,
        dilation,
        groups,
        activation,
        beta,
        final_activation,
        precision,
        out_dtype,
    )
    if torch.compiler.is_compiling():
        return _resolve(*arguments)
    try:
        return _resolve_cached(*arguments)
    except TypeError:
        # A list has no hash; any other TypeError comes again, and is the caller's.
        return _resolve(*arguments)


def _spatial(name: str, value: object, rank: int) -> tuple[int, ...]:
    # PyTorch takes a sequence of one for any rank.
    if isinstance(value, tuple | list) and len(value) == 1:
        value = value[0]
    return spatial_tuple(name, value, rank)


def _resolve(
    rank: int,
    taps: tuple[int, ...],
    stride: Ints,
    padding: Ints | str,
    dilation: Ints,
    groups: int,
    activation: ActivationLike,
    beta: float,
    final_activation: ActivationLike,
    precision: str | None,
    out_dtype: torch.dtype | None,
) -> Resolved:
    strides = _spatial("stride", stride, rank)
    check_at_least("stride", strides, 1)
    dilations = _spatial("dilation", dilation, rank)
    check_at_least("dilation", dilations, 1)
    count = check_integer("groups", groups)
    check_at_least("groups", count, 1)
    if isinstance(padding, str):
        before, after = resolve_padding(
            padding, filter_size=taps, stride=strides, dilation=dilations
        )
    else:
        before = after = _spatial("padding", padding, rank)
        check_at_least("padding", before, 0)
    if isinstance(beta, bool) or not isinstance(beta, int | float):
        raise TypeError(f"beta: {beta!r} is a {type(beta).__name__}; a number is allowed")
    first = parse("activation", activation)
    last = parse("final_activation", final_activation)
    if out_dtype is not None and out_dtype not in DTYPES:
        raise TypeError(f"out_dtype: {out_dtype} is not supported; {_names(DTYPES)} are allowed")
    return Resolved(
        strides,
        tuple(side for pair in zip(before, after, strict=True) for side in pair),
        dilations,
        count,
        (int(first.kind), int(last.kind)),
        (float(beta), first.p0, first.p1, last.p0, last.p1),
        None if precision is None else int(check_precision(precision)),
        out_dtype,
    )


_resolve_cached = lru_cache(maxsize=4096, typed=True)(_resolve)


def convolve(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    resolved: Resolved,
    scale: Tensor | float | None = None,
    *,
    constant: bool = False,
    channels_last: bool | None = None,
) -> Tensor:
    """Checks the tensors and calls the operator.

    Args:
        input: As in ``conv2d``; so are ``weight``, ``bias`` and ``residual``.
        weight: Its rank was checked with ``resolved``.
        bias: Or ``None``.
        residual: Or ``None``.
        resolved: What ``resolve`` returned.
        scale: Or ``None``.
        constant: Whether weight and bias are a module's, packed once.
        channels_last: Whether the output is; ``None`` follows input and weight, as PyTorch does.
    """
    rank = len(resolved.stride)
    _check_input(rank, input, resolved.out_dtype)
    out_dtype = resolved.out_dtype or input.dtype
    factors = None if scale is None else _factors(scale, weight, input)
    _check_tensors(input, weight, bias, residual, factors, out_dtype)
    unbatched = input.dim() == rank + 1
    if channels_last is None:
        channels_last = is_channels_last(input, unbatched) or is_channels_last(weight)
    if unbatched:
        input = input.unsqueeze(0)
        residual = None if residual is None else residual.unsqueeze(0)
    output: Tensor = conv(
        input,
        weight,
        bias,
        residual,
        factors,
        resolved.stride,
        resolved.padding,
        resolved.dilation,
        resolved.groups,
        resolved.activations,
        resolved.scalars,
        resolved.precision,
        None if out_dtype == input.dtype else out_dtype,
        channels_last,
        constant,
    )
    return output.squeeze(0) if unbatched else output


def is_channels_last(tensor: Tensor, unbatched: bool = False) -> bool:
    """Whether a tensor's channels are its innermost dimension in memory.

    Where sizes of one leave several orders, the strides say which is meant, as in PyTorch.
    """
    axis = 0 if unbatched else 1
    strides, channels = tensor.stride(), tensor.shape[axis]
    if strides[axis] != 1 or strides[-1] < channels:
        return False
    return channels > 1 or any(size > 1 for size in tensor.shape[axis + 1 :])


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(map(str, dtypes))


def _factors(scale: Tensor | float, weight: Tensor, input: Tensor) -> Tensor:
    """Returns a scale with one element a filter, if it has one for all."""
    filters = weight.shape[0]
    if isinstance(scale, int | float) and not isinstance(scale, bool):
        return torch.full((filters,), scale, dtype=torch.float32, device=input.device)
    if isinstance(scale, Tensor) and scale.dim() <= 1 and scale.numel() == 1:
        return scale.reshape(1).expand(filters)
    return scale  # type: ignore[return-value] # what is no tensor is refused with the others


def _check_input(rank: int, input: Tensor, out_dtype: torch.dtype | None) -> None:
    if not isinstance(input, Tensor):
        raise TypeError(f"input: a {type(input).__name__} is not a tensor; a torch.Tensor is")
    if input.dim() not in (rank + 1, rank + 2):
        shape = _SHAPES[rank]
        raise ValueError(
            f"input: shape {tuple(input.shape)} has rank {input.dim()}; conv{rank}d takes rank "
            f"{rank + 2}: [N, C, {shape}], or {rank + 1}: [C, {shape}]"
        )
    allowed: tuple[torch.dtype, ...] = DTYPES
    if input.is_cuda:
        allowed = (*DTYPES, FLOAT8)
        # What stands for a tensor while a program is traced may be on a GPU that is not there.
        if (
            torch.cuda.is_available()
            and torch.cuda.get_device_capability(input.device) in BLACKWELL
        ):
            allowed += BLACKWELL_DTYPES
    if input.dtype not in allowed:
        raise TypeError(
            f"input: dtype {input.dtype} is not supported; {_names(allowed)} are allowed"
        )
    if input.dtype not in DTYPES and out_dtype is None:
        raise TypeError(
            f"out_dtype: None stands for the input's {input.dtype}, which is no dtype of outputs; "
            f"{_names(DTYPES)} are allowed"
        )


def _check_tensors(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    dtype, grad = input.dtype, torch.is_grad_enabled()
    single, wide = torch.float32, dtype in DTYPES
    beside = dtype if wide else out_dtype
    of_output = "output" if out_dtype != dtype else "input"
    for name, tensor, allowed, whose in (
        ("input", input, (dtype,), ""),
        ("weight", weight, (dtype,), "the input's "),
        ("bias", bias, (beside, single), f"the {'input' if wide else 'output'}'s "),
        ("residual", residual, (out_dtype,), f"the {of_output}'s "),
        ("scale", scale, (single,), ""),
    ):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name}: a {type(tensor).__name__} is not a tensor; a torch.Tensor or None is"
            )
        if tensor.dtype not in allowed:
            raise TypeError(
                f"{name}: dtype {tensor.dtype} does not match; {whose}"
                f"{' or '.join(map(str, dict.fromkeys(allowed)))} is allowed"
            )
        if not (tensor.is_cpu or tensor.is_meta):
            check_device(name, tensor.device, ("cpu", "cuda"))
        if tensor.is_cuda != input.is_cuda or (tensor.is_cuda and tensor.device != input.device):
            raise ValueError(
                f"{name}: device {tensor.device} is not the input's; {input.device} is needed"
            )
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"{name}: layout {tensor.layout} is not supported; torch.strided is allowed"
            )
        if grad and tensor.requires_grad:
            raise RuntimeError(
                f"{name}: requires grad, but maxconv computes no gradients (forward only); call it "
                "under torch.no_grad() or torch.inference_mode(), or detach() the tensor"
            )
    if residual is not None and residual.dim() != input.dim():
        raise ValueError(
            f"residual: shape {tuple(residual.shape)} has rank {residual.dim()}; the output has "
            f"rank {input.dim()}"
        )
