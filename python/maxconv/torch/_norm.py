"""Group normalization, with an activation behind it.

Decoders and UNets have one in front of every convolution. On a GPU PyTorch's own makes a contiguous
copy of a channels-last tensor first, and gives a contiguous one back.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from .. import _native
from .._checks import check_integer, check_number
from .._fields import Activation
from ..activations import ActivationLike, ActivationSpec, parse
from . import _op
from ._activations import apply
from ._dtypes import DTYPES, NAMES
from ._functional import is_plain_memory, is_watched
from ._plan import gpu_target, raw_stream
from ._reorder import lies
from ._tracing import recorded

__all__ = ["GroupNorm", "group_norm", "normalized"]


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: ActivationLike = None,
) -> Tensor:
    """Returns ``torch.nn.functional.group_norm``, followed by an activation.

    maxconv computes it for channels-last tensors of one to three spatial dimensions on a GPU, in
    float32 with one rounding; its output is channels last too. Others, tensors that need a
    gradient, and what autocast computes in another dtype are PyTorch's.

    Args:
        input: ``[N, C, *spatial]``.
        num_groups: Groups of neighbouring channels; a divisor of ``C``.
        weight: ``[C]``, which the normalized values are multiplied with, or ``None``. maxconv takes
            a weight and a bias, or neither, both of the input's dtype or of float32.
        bias: ``[C]``, which is added, or ``None``.
        eps: Added to the variance; not negative.
        activation: What follows; see ``conv2d``.

    Returns:
        ``[N, C, *spatial]``, of the input's dtype.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An argument has a value that is not allowed.
    """
    if not isinstance(input, Tensor):
        raise TypeError(f"input: a {type(input).__name__} is not a torch.Tensor")
    if input.dim() < 2:
        raise ValueError(f"input: {input.dim()} dimensions; [N, C, *spatial] is allowed")
    channels = input.shape[1]
    groups = check_integer("num_groups", num_groups)
    if groups < 1 or channels % groups != 0:
        raise ValueError(
            f"num_groups: {groups} does not divide the {channels} channels; a divisor is allowed"
        )
    _check_vector("weight", weight, channels)
    _check_vector("bias", bias, channels)
    added = check_number("eps", eps)
    if not 0 <= added < math.inf:
        raise ValueError(f"eps: {added} is not allowed; 0 and above are, but not infinity")
    behind = parse("activation", activation)
    if _is_ours(input, groups, weight, bias):
        return _normalize(input, groups, weight, bias, added, behind)
    return _by_pytorch(input, groups, weight, bias, added, behind)


def _check_vector(name: str, given: object, channels: int) -> None:
    """Checks ``weight`` or ``bias``."""
    if given is None:
        return
    if not isinstance(given, Tensor):
        raise TypeError(
            f"{name}: a {type(given).__name__} is not a torch.Tensor; a tensor or None is allowed"
        )
    if given.dim() != 1 or given.shape[0] != channels:
        raise ValueError(f"{name}: shape {tuple(given.shape)}; ({channels},) is allowed")


def _by_pytorch(
    input: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: ActivationSpec,
) -> Tensor:
    return apply(activation, functional.group_norm(input, groups, weight, bias, eps))


def _normalize(
    input: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: ActivationSpec,
) -> Tensor:
    """Normalizes what ``_is_ours``."""
    if is_dynamo_compiling() or is_watched():
        code, (p0, p1) = int(activation.kind), activation.parameters
        output: Tensor = _operator(input, groups, weight, bias, eps, code, p0, p1)
        return output
    return _enqueue(input, groups, weight, bias, eps, activation)


def _is_ours(input: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether maxconv's kernels take a call."""
    if not _is_on_gpu(input) or input.dtype not in DTYPES or not 3 <= input.dim() <= 5:
        return False
    # Of one value alone PyTorch takes no mean.
    if groups < 1 or input.shape[1] % groups != 0 or input.numel() <= groups:
        return False
    # Autocast normalizes in float32.
    if input.dtype is not torch.float32 and torch.is_autocast_enabled(input.device.type):
        return False
    if not _are_factors(weight, bias, input):
        return False
    return _is_readable(input) and _is_channels_last(input)


def _is_on_gpu(input: Tensor) -> bool:
    return input.is_cuda


def _are_factors(weight: Tensor | None, bias: Tensor | None, input: Tensor) -> bool:
    """Whether the kernels take a weight and a bias."""
    if weight is None or bias is None:
        return weight is bias
    return weight.dtype in (input.dtype, torch.float32) and all(
        factors.dtype == weight.dtype
        and factors.device == input.device
        and factors.shape == input.shape[1:2]
        and _is_readable(factors)
        and factors.is_contiguous()
        for factors in (weight, bias)
    )


def _is_readable(tensor: Tensor) -> bool:
    """Whether a tensor is memory, and nobody wants its gradient."""
    if tensor.layout is not torch.strided or (torch.is_grad_enabled() and tensor.requires_grad):
        return False
    return is_dynamo_compiling() or is_plain_memory(tensor)


def _is_channels_last(input: Tensor) -> bool:
    return input.movedim(1, -1).is_contiguous()


def _new_output(input: Tensor, *others: object) -> Tensor:
    """Returns what holds nothing, of the input's shape, channels last."""
    _, channels, *spatial = input.shape
    image, *steps = (channels * math.prod(spatial[i:]) for i in range(len(spatial) + 1))
    return input.new_empty_strided(input.shape, (image, 1, *steps))


def _run(
    input: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    code: int,
    p0: float,
    p1: float,
) -> Tensor:
    """The operator, which others than ``group_norm`` may call."""
    activation = ActivationSpec(Activation(code), p0, p1)
    if _is_ours(input, groups, weight, bias):
        return _enqueue(input, groups, weight, bias, eps, activation)
    output = _by_pytorch(input, groups, weight, bias, eps, activation)
    made = _new_output(input)
    return output if lies(output.shape, output.stride(), made.stride()) else made.copy_(output)


def _enqueue(
    input: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: ActivationSpec,
) -> Tensor:
    """Enqueues the kernels on PyTorch's current stream."""
    index = input.get_device()
    batch, channels, *spatial = input.shape
    shape = (batch, math.prod(spatial), channels, groups)
    output = _new_output(input)
    architecture = gpu_target(index).architecture
    library = _native.beside(_native.GroupNorm, NAMES[input.dtype], architecture)
    needed = library.workspace(index, input.data_ptr(), output.data_ptr(), *shape)
    # PyTorch hands its memory on in the stream's order.
    workspace = input.new_empty(needed, dtype=torch.float32)
    library.run(
        index,
        input.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        output.data_ptr(),
        workspace.data_ptr(),
        *shape,
        eps,
        activation,
        raw_stream(index),
        wide=weight is not None and weight.dtype is torch.float32,
    )
    return output


_SCHEMA: Final = (
    "group_norm(Tensor input, int num_groups, Tensor? weight, Tensor? bias, float eps,"
    " int activation, float p0, float p1) -> Tensor"
)
_operator: Final = _op.define(_SCHEMA, _run, _new_output)


# In converted models ------------------------------------------------------------------------------


@recorded
def normalized(
    input: Any,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: ActivationLike = None,
) -> Tensor:
    """Returns what ``group_norm`` does; what PyTorch refuses, PyTorch refuses in its own words.

    Args:
        input: ``[N, C, *spatial]``.
        num_groups: As ``group_norm`` takes it, like the others.
        weight: The same.
        bias: The same.
        eps: The same.
        activation: The same.
    """
    behind = parse("activation", activation)
    given = (num_groups, weight, bias)
    if isinstance(input, Tensor) and _is_ours(input, *given):
        return _normalize(input, *given, eps, behind)
    if isinstance(input, Tensor) and not _is_on_gpu(input):
        # PyTorch's CPU kernel for channels-last tensors is less exact.
        input = input.contiguous()
    return _by_pytorch(input, *given, eps, behind)


class GroupNorm(nn.GroupNorm):
    """``nn.GroupNorm`` in a converted model, which may be called with an activation."""

    def forward(self, input: Tensor, activation: ActivationLike = None) -> Tensor:
        """See ``group_norm``; what the kernels do not take is PyTorch's."""
        return normalized(input, self.num_groups, self.weight, self.bias, self.eps, activation)
