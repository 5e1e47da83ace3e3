"""What a node of an ATen graph is, as far as a convolution's kernel can take it over."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Node

from .._arguments import ConvArguments
from .._subpixel import saves_products
from ..activations import NONE, ActivationSpec
from ._dtypes import DTYPES
from ._enlargements import enlargement_of
from ._op import _operator as _conv
from ._patterns import Addition, _clamp, _gelu, _hardtanh, _leaky_relu, _Maker, _named
from ._transposed import _operator as _conv_transpose

__all__ = [
    "CONVOLUTION",
    "KEPT",
    "OPERATORS",
    "Convolution",
    "GroupNorm",
    "Norm",
    "activation_of",
    "addition_of",
    "arguments_of",
    "channels_last",
    "group_norm_of",
    "known_equal",
    "lies_in",
    "norm_of",
    "place_of",
    "read",
    "value",
]

_aten: Any = torch.ops.aten

#: The one operator that every convolution of PyTorch becomes.
CONVOLUTION: Final[Any] = _aten.convolution.default

#: maxconv's operators.
OPERATORS: Final = frozenset((_conv, _conv_transpose))

#: What makes the activation of an operator, from arguments that have the names of its schema.
_ACTIVATIONS: Final[dict[Any, _Maker]] = {
    _aten.relu.default: _named("relu"),
    _aten.relu6.default: _named("relu6"),
    _aten.hardtanh.default: _hardtanh,
    _aten.clamp.default: _clamp,
    _aten.clamp_min.default: _clamp,
    _aten.clamp_max.default: _clamp,
    _aten.leaky_relu.default: _leaky_relu,
    _aten.sigmoid.default: _named("sigmoid"),
    _aten.silu.default: _named("silu"),
    _aten.hardswish.default: _named("hardswish"),
    _aten.hardsigmoid.default: _named("hardsigmoid"),
    _aten.gelu.default: _gelu,
    _aten.tanh.default: _named("tanh"),
}

#: Normalizations by running statistics; some only where their argument ``training`` is false.
_NORMS: Final = (
    _aten._native_batch_norm_legit_no_training.default,
    _aten._native_batch_norm_legit.default,
    _aten._batch_norm_no_update.default,
    _aten.native_batch_norm.default,
    _aten.cudnn_batch_norm.default,
)

_GROUP_NORM: Final[Any] = _aten.native_group_norm.default

#: Operators that must reach this file in one piece: a tracer is not to decompose them.
KEPT: Final = frozenset((*_ACTIVATIONS, *_NORMS, _GROUP_NORM))


def value(node: Any) -> Any:
    """Returns what stands for a node's result: a fake tensor, or what is no tensor itself."""
    return node.meta["val"] if isinstance(node, Node) else node


def arguments_of(node: Node) -> dict[str, Any]:
    """Returns the arguments of an operator's call by the names of its schema, defaults included."""
    target: Any = node.target
    parameters = target._schema.arguments
    given = {p.name: p.default_value for p in parameters if p.has_default_value()}
    given.update(zip((p.name for p in parameters), node.args, strict=False))
    return given | node.kwargs


def channels_last(rank: int) -> tuple[int, ...]:
    """Returns the order of a tensor's dimensions in memory, outermost first, if channels are last.

    Args:
        rank: Of the tensor.
    """
    return (0, *range(2, rank), 1)


def known_equal(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether sizes or strides are equal whatever the graph's symbols stand for."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return len(left) == len(right) and all(
        statically_known_true(a == b) for a, b in zip(left, right, strict=True)
    )


def lies_in(tensor: Tensor, order: Sequence[int]) -> bool:
    """Whether a tensor is dense, and its dimensions lie in memory in an order, outermost first.

    Unlike ``is_contiguous`` this asks for no guard: it is false where a symbol decides.
    """
    stride: Any = 1
    for axis in reversed(order):
        size = tensor.shape[axis]
        if not (known_equal([size], [1]) or known_equal([tensor.stride(axis)], [stride])):
            return False
        stride = stride * size
    return True


def place_of(target: Any, name: str) -> int | None:
    """Returns the place of an operator's argument, if it has one of that name."""
    names = [parameter.name for parameter in target._schema.arguments]
    return names.index(name) if name in names else None


# Convolutions -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Convolution:
    """A convolution of the graph."""

    input: Node
    weight: Node
    bias: Node | None
    arguments: ConvArguments
    output_padding: tuple[int, ...] | None
    """``None``: it is not a transposed one."""

    @property
    def operator(self) -> Any:
        """The one of maxconv's that computes it."""
        return _conv if self.output_padding is None else _conv_transpose


def read(node: Node) -> Convolution | str:
    """Returns the convolution that a call of ``CONVOLUTION`` is, or why kernels cannot do it."""
    given = arguments_of(node)
    input, weight = given["input"], given["weight"]
    rank = value(weight).dim() - 2
    if rank not in (1, 2, 3):
        return f"it has {rank} spatial dimensions; 1, 2 and 3 are supported"
    names = ("stride", "padding", "dilation", "output_padding")
    sizes = {name: _sizes(given[name], rank) for name in names}
    stride, padding, dilation, output_padding = sizes.values()
    if stride is None or padding is None or dilation is None or output_padding is None:
        return "its stride, padding or dilation is computed at run time"
    arguments = ConvArguments(
        stride, dilation, padding, given["groups"], NONE, NONE, precision=None
    )
    transposed = given["transposed"]
    found = Convolution(
        input, weight, given["bias"], arguments, output_padding if transposed else None
    )
    return found if transposed else _with_upsampling_in_front(_with_zeros_in_front(found))


def _sizes(given: Sequence[Any], rank: int) -> tuple[int, ...] | None:
    """Returns one integer a spatial dimension, where a single one stands for all."""
    whole = tuple(given) * (rank if len(given) == 1 else 1)
    return whole if all(type(size) is int for size in whole) else None


def _with_zeros_in_front(conv: Convolution) -> Convolution:
    """Makes zeros that are put around a convolution's input part of its padding."""
    node, rank = conv.input, conv.arguments.rank
    if node.target is not _aten.constant_pad_nd.default:
        return conv
    given = arguments_of(node)
    # Innermost first, before and after each dimension.
    amounts = list(given["pad"])
    if given["value"] != 0 or not all(type(a) is int and a >= 0 for a in amounts):
        return conv
    if any(amounts[2 * rank :]):
        return conv
    amounts = (amounts + [0] * 6)[: 2 * rank]
    before, after = conv.arguments.pads(value(conv.weight).shape[2:])
    padding = [
        zeros + own
        for i in range(rank)
        for zeros, own in zip(amounts[2 * (rank - 1 - i) :][:2], (before[i], after[i]), strict=True)
    ]
    arguments = replace(conv.arguments, padding=tuple(padding))
    return replace(conv, input=given["self"], arguments=arguments)


def _with_upsampling_in_front(conv: Convolution) -> Convolution:
    """Makes an enlargement of a convolution's input part of it, where that saves products."""
    arguments, (_, group_channels, *taps) = conv.arguments, value(conv.weight).shape
    if set(arguments.stride) != {1} or (found := enlargement_of(conv.input)) is None:
        return conv
    image, factors = found
    if not saves_products(factors, taps, arguments.dilation, group_channels):
        return conv
    return replace(conv, input=image, arguments=replace(arguments, upsample=factors))


# What follows one -------------------------------------------------------------------------------


def activation_of(node: Node) -> ActivationSpec | None:
    """Returns the activation that a node computes, if kernels have it and it is known now."""
    make = _ACTIVATIONS.get(node.target)
    if make is None:
        return None
    given = arguments_of(node)
    del given["self"]
    if not all(v is None or type(v) in (int, float, str) for v in given.values()):
        return None
    try:
        return make(**given)
    except ValueError:
        # A bound or a slope that is NaN.
        return None


def addition_of(node: Node, tail: Node) -> Addition | str | None:
    """Returns what a node adds to ``tail``, or why a kernel cannot; ``None`` if it adds nothing."""
    if node.target not in (_aten.add.Tensor, _aten.sub.Tensor):
        return None
    given = arguments_of(node)
    left, right, alpha = given["self"], given["other"], given["alpha"]
    if not isinstance(left, Node) or not isinstance(right, Node) or left is right:
        return "no other tensor is added"
    if type(alpha) not in (int, float):
        return "alpha is computed at run time"
    beta = float(-alpha if node.target is _aten.sub.Tensor else alpha)
    if left is tail:
        residual = right
    elif beta == 1.0:
        residual = left
    else:
        return "it is scaled in the addition"
    of_tail, of_residual = value(tail), value(residual)
    if not isinstance(of_residual, Tensor) or of_residual.dtype != of_tail.dtype:
        return "what is added is of another dtype"
    if not known_equal(of_residual.shape, of_tail.shape):
        return "what is added is of another shape"
    if of_residual.device != of_tail.device:
        return "what is added is on another device"
    return Addition(residual, beta, in_place=False)


@dataclass(frozen=True)
class Norm:
    """A normalization by running statistics; each a tensor of one element a channel."""

    output: Node
    """The normalized tensor: the first of what the operator returns."""
    weight: Node | None
    bias: Node | None
    mean: Node
    variance: Node
    eps: float


def norm_of(node: Node) -> Norm | str | None:
    """Returns the normalization that a node computes, or why it cannot become part of a filter."""
    if node.target not in _NORMS:
        return None
    given = arguments_of(node)
    if given.get("training"):
        return "it is in training mode; call eval() first"
    mean, variance = given["running_mean"], given["running_var"]
    if mean is None or variance is None:
        return "it has no running statistics"
    outputs = list(node.users)
    eps = given["eps"] if "eps" in given else given["epsilon"]
    if len(outputs) != 1 or outputs[0].target is not operator.getitem or outputs[0].args[1] != 0:
        return "more of it is read than the normalized tensor"
    return Norm(outputs[0], given["weight"], given["bias"], mean, variance, eps)


# Normalizations by group --------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupNorm:
    """A normalization by group, and the activation that follows it."""

    input: Node
    weight: Node | None
    bias: Node | None
    groups: int
    eps: float
    activation: ActivationSpec
    members: tuple[Node, ...]
    """The nodes that it consists of, in the graph's order; the last is what is read."""


def group_norm_of(node: Node) -> GroupNorm | None:
    """Returns the normalization that a node computes, where kernels have it."""
    if node.target is not _GROUP_NORM:
        return None
    given = arguments_of(node)
    image, weight, bias = given["input"], given["weight"], given["bias"]
    outputs = list(node.users)
    if len(outputs) != 1 or outputs[0].target is not operator.getitem or outputs[0].args[1] != 0:
        return None
    # PyTorch's kernel wants the contiguous copy.
    if image.target is _aten.clone.default:
        image = image.args[0]
    of_image = value(image)
    factors = [value(factor) for factor in (weight, bias) if factor is not None]
    kinds = {factor.dtype for factor in factors}
    if not _is_on_gpu(of_image) or of_image.dtype not in DTYPES or len(factors) == 1:
        return None
    if (
        not 3 <= of_image.dim() <= 5
        or len(kinds) > 1
        or not kinds <= {of_image.dtype, torch.float32}
    ):
        return None
    members, activation = [node, outputs[0]], NONE
    if len(outputs[0].users) == 1:
        (user,) = outputs[0].users
        if (spec := activation_of(user)) is not None:
            activation = spec
            members.append(user)
    return GroupNorm(image, weight, bias, given["group"], given["eps"], activation, tuple(members))


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"
