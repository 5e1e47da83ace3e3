"""Reads a call's arguments in the forms that PyTorch takes, and checks its tensors.

Sizes are the operator's to check.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._arguments import ConvArguments, read_upsample
from .._checks import (
    check_device,
    check_integer,
    check_number,
    check_precision,
    check_same_device,
    read_padding,
    spatial_tuple,
)
from .._dtypes import bias_dtype, filter_dtype
from ..activations import ActivationLike, parse
from ._dtypes import (
    BY_NAME,
    CPU_DTYPES,
    DTYPES,
    GPU_DTYPES,
    HOPPER_DTYPES,
    NAMES,
    OUTPUTS,
    TENSOR_CORES,
    listed,
)

__all__ = [
    "Ints",
    "check_dimensions",
    "check_input_dtype",
    "check_ranks",
    "check_tensors",
    "expanded_scale",
    "is_channels_last",
    "read",
    "wanted_format",
]

#: One integer for every spatial dimension, or one for each.
Ints: TypeAlias = int | Sequence[int]

_INPUT_SIZES = {1: "L", 2: "H, W", 3: "D, H, W"}
_TAPS = {1: "S", 2: "R, S", 3: "T, R, S"}


def read(
    rank: int,
    stride: Ints,
    padding: Ints | str,
    dilation: Ints,
    groups: int,
    activation: ActivationLike,
    beta: float,
    final_activation: ActivationLike,
    precision: str | None,
    out_dtype: torch.dtype | None,
    upsample: Ints = 1,
    zero_points: tuple[int, int, int] = (0, 0, 0),
    out_scale: float | None = None,
) -> ConvArguments:
    """Returns a call's arguments, checked; equal ones are read once.

    Args:
        rank: Spatial dimensions; ``maxconv.torch.conv2d`` documents the others.
        stride: One integer or ``rank``; a sequence of one stands for all.
        padding: The same, for both sides; ``"same"`` or ``"valid"``.
        dilation: As ``stride``.
        groups: An integer.
        activation: An ``ActivationLike``.
        beta: A number.
        final_activation: An ``ActivationLike``.
        precision: The name of a ``Precision``, or ``None``.
        out_dtype: One of ``OUTPUTS``, or ``None``.
        upsample: As ``stride``.
        zero_points: Of input, residual and output: integers.
        out_scale: A number, or ``None``.

    Raises:
        TypeError: An argument is of a wrong Python type, or ``out_dtype`` is unsupported.
        ValueError: An argument has a value that is not allowed.
    """
    arguments = (
        *(rank, stride, padding, dilation, groups, activation, beta),
        *(final_activation, precision, out_dtype, upsample, zero_points, out_scale),
    )
    if torch.compiler.is_compiling():
        return _read(*arguments)
    try:
        return _read_once(*arguments)
    except TypeError:
        # A list has no hash; any other TypeError comes again, and is the caller's.
        return _read(*arguments).remembered()


def _read(
    rank: int,
    stride: Ints,
    padding: Ints | str,
    dilation: Ints,
    groups: int,
    activation: ActivationLike,
    beta: float,
    final_activation: ActivationLike,
    precision: str | None,
    out_dtype: torch.dtype | None,
    upsample: Ints,
    zero_points: tuple[int, int, int],
    out_scale: float | None,
) -> ConvArguments:
    if out_dtype is not None and out_dtype not in OUTPUTS:
        raise TypeError(f"out_dtype: {out_dtype} is not supported; {listed(OUTPUTS)} are allowed")
    own, of_residual, of_output = zero_points
    return ConvArguments(
        stride=_spatial("stride", stride, rank),
        dilation=_spatial("dilation", dilation, rank),
        padding=read_padding(padding, rank)
        if isinstance(padding, str)
        else _spatial("padding", padding, rank),
        groups=check_integer("groups", groups),
        activation=parse("activation", activation),
        final_activation=parse("final_activation", final_activation),
        beta=check_number("beta", beta),
        precision=None if precision is None else check_precision(precision),
        out_dtype=None if out_dtype is None else NAMES[out_dtype],
        upsample=read_upsample(_one_for_all(upsample), rank),
        zero_point=check_integer("zero_point", own),
        residual_zero_point=check_integer("residual_zero_point", of_residual),
        out_zero_point=check_integer("out_zero_point", of_output),
        out_scale=None if out_scale is None else check_number("out_scale", out_scale),
    )


@lru_cache(maxsize=4096, typed=True)
def _read_once(*arguments: Any) -> ConvArguments:
    return _read(*arguments).remembered()


def _spatial(name: str, value: object, rank: int) -> tuple[int, ...]:
    return spatial_tuple(name, _one_for_all(value), rank)


def _one_for_all(value: object) -> object:
    # PyTorch takes a sequence of one for any rank.
    return value[0] if isinstance(value, tuple | list) and len(value) == 1 else value


def check_ranks(input: Tensor, weight: Tensor, arguments: ConvArguments) -> None:
    """Checks the ranks of input and weight, the input's dtype, and that the output has one.

    Raises:
        TypeError: One is no tensor, or the input's dtype is unsupported.
        ValueError: One is of another rank.
    """
    check_dimensions(input, weight, arguments.rank)
    if input.dtype not in DTYPES:
        check_input_dtype(input, arguments.out_dtype)


def check_dimensions(input: Tensor, weight: Tensor, rank: int, *, transposed: bool = False) -> None:
    """Checks the ranks of input and weight.

    Args:
        input: Of the call.
        weight: Of the call.
        rank: Spatial dimensions.
        transposed: Of which convolution they are.

    Raises:
        TypeError: One is no tensor.
        ValueError: One is of another rank.
    """
    for name, tensor in (("input", input), ("weight", weight)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: a {type(tensor).__name__} is not a tensor; a torch.Tensor is")
    what = f"conv_transpose{rank}d" if transposed else f"conv{rank}d"
    channels = "C, K / groups" if transposed else "K, C / groups"
    if weight.dim() != rank + 2:
        raise ValueError(
            f"weight: shape {tuple(weight.shape)} has rank {weight.dim()}; {what} takes rank "
            f"{rank + 2}: [{channels}, {_TAPS[rank]}]"
        )
    if input.dim() not in (rank + 1, rank + 2):
        sizes = _INPUT_SIZES[rank]
        raise ValueError(
            f"input: shape {tuple(input.shape)} has rank {input.dim()}; {what} takes rank "
            f"{rank + 2}: [N, C, {sizes}], or {rank + 1}: [C, {sizes}]"
        )


def check_input_dtype(input: Tensor, out_dtype: str | None) -> None:
    """Checks a dtype that not every device takes: not one of ``DTYPES``.

    Raises:
        TypeError: It is unsupported, or ``out_dtype`` is not given.
    """
    allowed: tuple[torch.dtype, ...] = CPU_DTYPES
    if input.is_cuda:
        allowed = (*DTYPES, *GPU_DTYPES)
        # What stands for a tensor while a program is traced may be on a GPU that is not there.
        if (
            torch.cuda.is_available()
            and torch.cuda.get_device_capability(input.device) in TENSOR_CORES
        ):
            allowed += HOPPER_DTYPES
    if input.dtype not in allowed:
        raise TypeError(
            f"input: dtype {input.dtype} is not supported; {listed(allowed)} are allowed"
        )
    if out_dtype is None:
        raise TypeError(
            f"out_dtype: None stands for the input's {input.dtype}, which is no dtype of outputs; "
            f"{listed()} are allowed"
        )


def expanded_scale(scale: Tensor | float, weight: Tensor, input: Tensor) -> Tensor:
    """Returns a scale with one element a filter, if it has one for all; checks nothing."""
    if isinstance(scale, int | float) and not isinstance(scale, bool):
        return torch.full((weight.shape[0],), scale, dtype=torch.float32, device=input.device)
    if isinstance(scale, Tensor) and scale.dim() <= 1 and scale.numel() == 1:
        return scale.reshape(1).expand(weight.shape[0])
    return scale  # type: ignore[return-value] # what is no tensor is refused with the others


def check_tensors(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    out_dtype: str | None,
) -> None:
    """Checks dtypes, devices and memory layouts, and that no gradient is asked for.

    Raises:
        TypeError: One is no tensor, or its dtype does not go with the others'.
        ValueError: A device, a memory layout or the residual's rank is not allowed.
        RuntimeError: One requires grad while grad mode is on.
    """
    dtype, single = input.dtype, torch.float32
    of_output = dtype if out_dtype is None else BY_NAME[out_dtype]
    beside = BY_NAME[bias_dtype(NAMES[dtype], NAMES[of_output])]
    of_weight = BY_NAME[filter_dtype(NAMES[dtype])]
    on_host, grad = input.is_cpu, torch.is_grad_enabled()
    for name, tensor, allowed, other in (
        ("input", input, dtype, dtype),
        ("weight", weight, of_weight, of_weight),
        ("bias", bias, beside, single),
        ("residual", residual, of_output, of_output),
        ("scale", scale, single, single),
    ):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name}: a {type(tensor).__name__} is not a tensor; a torch.Tensor or None is"
            )
        if tensor.dtype != allowed and tensor.dtype != other:
            raise TypeError(
                f"{name}: dtype {tensor.dtype} does not match; {_whose(name, dtype, of_output)}"
                f"{' or '.join(map(str, dict.fromkeys((allowed, other))))} is allowed"
            )
        if not (on_host and tensor.is_cpu):
            _check_device(name, tensor, input)
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"{name}: layout {tensor.layout} is not supported; torch.strided is allowed"
            )
        if grad and tensor.requires_grad:
            raise RuntimeError(
                f"{name}: requires grad, but maxconv computes no gradients (forward only); call it "
                "under torch.no_grad() or torch.inference_mode(), or detach() the tensor"
            )
        if forward_ad._current_level >= 0 and _tangent(tensor) is not None:
            raise RuntimeError(
                f"{name}: has a tangent, but maxconv computes no derivatives (forward-mode AD); "
                "detach() the tensor"
            )
    if residual is not None and residual.dim() != input.dim():
        raise ValueError(
            f"residual: shape {tuple(residual.shape)} has rank {residual.dim()}; the output has "
            f"rank {input.dim()}"
        )


def _tangent(tensor: Tensor) -> Tensor | None:
    """Returns what forward-mode AD carries along with a tensor."""
    tangent: Tensor | None = cast(Any, forward_ad).unpack_dual(tensor).tangent
    return tangent


def _whose(name: str, dtype: torch.dtype, of_output: torch.dtype) -> str:
    """Says whose dtype a tensor must have, for a message."""
    if name == "scale":
        return ""
    of_input = name == "weight" or (dtype in DTYPES if name == "bias" else dtype == of_output)
    return f"the {'input' if of_input else 'output'}'s "


def _check_device(name: str, tensor: Tensor, input: Tensor) -> None:
    if not (tensor.is_cpu or tensor.is_meta):
        check_device(name, tensor.device, ("cpu", "cuda"))
    if tensor.is_cuda != input.is_cuda or (tensor.is_cuda and tensor.device != input.device):
        check_same_device(name, tensor.device, input.device)


def is_channels_last(tensor: Tensor, unbatched: bool = False) -> bool:
    """Whether a tensor's channels are its innermost dimension in memory.

    Where sizes of one leave several orders, the strides say which is meant, as in PyTorch.
    """
    axis = 0 if unbatched else 1
    strides, channels = tensor.stride(), tensor.shape[axis]
    if strides[axis] != 1 or strides[-1] < channels:
        return False
    return channels > 1 or any(size > 1 for size in tensor.shape[axis + 1 :])


def wanted_format(wanted: str, input: object, rank: int) -> bool | None:
    """Returns whether a module's output is channels last; ``None`` where PyTorch's rule says it.

    Args:
        wanted: ``"always"``, ``"input"`` for the input's format, or ``""`` for PyTorch's rule.
        input: The input, not checked yet.
        rank: Spatial dimensions.
    """
    if wanted == "always":
        return True
    if (
        wanted != "input"
        or not isinstance(input, Tensor)
        or input.dim() not in (rank + 1, rank + 2)
    ):
        return None
    spatial = input.stride()[input.dim() - rank :]
    # Of a transposed image PyTorch says that it is not.
    ordered = all(outer >= inner for outer, inner in itertools.pairwise(spatial))
    return ordered and is_channels_last(input, input.dim() == rank + 1)
