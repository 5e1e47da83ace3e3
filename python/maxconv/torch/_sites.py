"""Finds the convolutions of a traced model, and makes the modules that take their places."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.modules.conv import _ConvNd

from ._arguments import is_channels_last
from ._dtypes import DTYPES
from ._functional import conv1d, conv2d, conv3d
from ._modules import Conv1d, Conv2d, Conv3d, _Conv
from ._patterns import Normalization, module_of, own_tensor
from ._subclasses import RANKS, TRANSPOSED_RANKS, Redirected
from ._tracing import has_hooks, is_plain
from ._transposed import conv_transpose1d, conv_transpose2d, conv_transpose3d
from ._transposed_modules import (
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    _ConvTranspose,
)
from ._weights import why_computed

__all__ = [
    "Own",
    "Refused",
    "Site",
    "find",
    "fold",
    "is_exact",
    "is_own",
    "operands",
    "refusal",
    "replacement",
]

#: A module of maxconv's.
Own: TypeAlias = _Conv | _ConvTranspose

_CLASSES: Final[dict[type[nn.Module], type[Own]]] = {
    nn.Conv1d: Conv1d,
    nn.Conv2d: Conv2d,
    nn.Conv3d: Conv3d,
    nn.ConvTranspose1d: ConvTranspose1d,
    nn.ConvTranspose2d: ConvTranspose2d,
    nn.ConvTranspose3d: ConvTranspose3d,
}
_BY_RANK: Final[dict[int, type[_Conv]]] = {1: Conv1d, 2: Conv2d, 3: Conv3d}
_FUNCTIONS: Final[dict[int, Callable[..., Tensor]]] = {1: conv1d, 2: conv2d, 3: conv3d}
_TRANSPOSED_BY_RANK: Final[dict[int, type[_ConvTranspose]]] = {
    1: ConvTranspose1d,
    2: ConvTranspose2d,
    3: ConvTranspose3d,
}
_TRANSPOSED_FUNCTIONS: Final[dict[int, Callable[..., Tensor]]] = {
    1: conv_transpose1d,
    2: conv_transpose2d,
    3: conv_transpose3d,
}
_ARGUMENTS: Final = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED_ARGUMENTS: Final = (
    *("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"),
)


@dataclass(frozen=True)
class Site:
    """A convolution in a traced model."""

    kind: str
    """``Conv2d`` for a module, ``conv2d`` for a function."""
    rank: int
    args: tuple[Any, ...]
    """What its module is called with; for a function without one, the function's arguments."""
    kwargs: Mapping[str, Any]
    module: Own | None
    """What takes its place; ``None`` for a function whose weight is computed in the model."""
    function: Callable[..., Tensor] | None = None
    """What takes its place then."""

    @property
    def adds(self) -> bool:
        """Whether its kernel can add a residual."""
        return isinstance(self.module, _Conv)


@dataclass(frozen=True)
class Refused:
    """A convolution that stays as it is."""

    kind: str
    reason: str


def is_own(module: object) -> bool:
    """Whether a module convolves with maxconv already."""
    return isinstance(module, _Conv | _ConvTranspose | Redirected)


def refusal(conv: _ConvNd) -> str:
    """Returns why a module cannot be replaced, and nothing if it can."""
    kind = type(conv).__name__
    if kind.startswith("Lazy"):
        return "it is not initialized; call the model once first"
    if reason := why_computed(conv):
        return reason
    if is_exact(conv) and not is_plain(conv):
        return "it has forward hooks" if has_hooks(conv) else "it has a forward of its own"
    return _weight_refusal(conv.weight)


def is_exact(conv: nn.Module) -> bool:
    """Whether a module is one of PyTorch's own classes, for which there is one of maxconv's."""
    return type(conv) in _CLASSES


def _weight_refusal(weight: Tensor) -> str:
    if weight.dtype not in DTYPES:
        return f"dtype {weight.dtype} is not supported"
    return (
        "" if weight.device.type in ("cpu", "cuda") else f"device {weight.device} is not supported"
    )


def replacement(conv: Any) -> Own:
    """Returns the module that takes the place of one that ``refusal`` does not refuse."""
    module: Own = _CLASSES[type(conv)].from_torch(conv)
    # The very parameters: a model may use one in several places.
    module.weight, module.bias = conv.weight, conv.bias
    # Whether this weight, in a model that is not converted, makes the output channels last.
    module.channels_last = "" if is_channels_last(conv.weight) else "input"
    return module


def fold(conv: Own, norm: Normalization) -> None:
    """Puts a normalization's scale into the weight and its offset into the bias, in float64."""
    weight, dtype = conv.weight.detach().double(), conv.weight.dtype
    scale = (norm.variance.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    offset = -norm.mean.double() * scale
    if conv.bias is not None:
        offset = offset + conv.bias.detach().double() * scale
    if norm.bias is not None:
        offset = offset + norm.bias.detach().double()
    if isinstance(conv, _ConvTranspose):
        # [C, K / groups, *taps]: each group of channels has filters of its own.
        groups = conv.groups
        grouped = weight.reshape(groups, -1, *weight.shape[1:])
        factors = scale.view(groups, 1, -1, *(1,) * (weight.dim() - 2))
        weight = (grouped * factors).flatten(0, 1)
    else:
        weight = weight * scale.view(-1, *(1,) * (weight.dim() - 1))
    # In the memory's order of before.
    folded = torch.empty_like(conv.weight).copy_(weight)
    conv.weight = nn.Parameter(folded, requires_grad=False)
    conv.bias = nn.Parameter(offset.to(dtype), requires_grad=False)


def find(model: GraphModule, modules: Mapping[str, nn.Module], node: Node) -> Site | Refused | None:
    """Returns what convolution a node is; ``None`` if it is none, or one of maxconv's already."""
    module = module_of(node, modules)
    if isinstance(module, _ConvNd) and not is_own(module):
        kind = type(module).__name__
        reason = refusal(module)
        if reason or not is_exact(module):
            return Refused(kind, reason or f"a {kind} may compute something else")
        own = replacement(module)
        return Site(kind, own.rank, node.args, node.kwargs, own)
    called = _called(node)
    return None if called is None else _function(model, node, *called)


def operands(node: Node) -> list[Node]:
    """Returns weight and bias of a function that convolves; of any other node, nothing."""
    called = _called(node)
    if called is None:
        return []
    given = _given(node, called[1])
    return [n for name in ("weight", "bias") if isinstance(n := given.get(name), Node)]


def _called(node: Node) -> tuple[int, tuple[str, ...]] | None:
    """Returns the rank and the arguments' names of PyTorch's convolution that a node calls."""
    if node.op == "call_function":
        for ranks, names in ((RANKS, _ARGUMENTS), (TRANSPOSED_RANKS, _TRANSPOSED_ARGUMENTS)):
            if node.target in ranks:
                return ranks[node.target], names
    return None


def _given(node: Node, names: tuple[str, ...]) -> dict[str, Any]:
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def _function(model: GraphModule, node: Node, rank: int, names: tuple[str, ...]) -> Site | Refused:
    kind = str(getattr(node.target, "__name__", node.target))
    given = _given(node, names)
    weight, bias = own_tensor(model, given["weight"]), own_tensor(model, given.get("bias"))
    if weight is not None and (reason := _weight_refusal(weight)):
        return Refused(kind, reason)
    transposed = names is _TRANSPOSED_ARGUMENTS
    geometry: dict[str, Any] = {name: given[name] for name in names[3:] if name in given}
    computed = any(_holds_node(value) for value in geometry.values())
    if weight is None or computed or (bias is None) != (given.get("bias") is None):
        function = (_TRANSPOSED_FUNCTIONS if transposed else _FUNCTIONS)[rank]
        return Site(kind, rank, node.args, node.kwargs, None, function)
    first, second, *taps = weight.shape
    groups = geometry.get("groups", 1)
    channels = (first, second * groups) if transposed else (second * groups, first)
    made: Any = (_TRANSPOSED_BY_RANK if transposed else _BY_RANK)[rank]
    module: Own = made(
        *channels, tuple(taps), bias=bias is not None, device="meta", dtype=weight.dtype, **geometry
    )
    module.weight = _parameter(weight)
    module.bias = None if bias is None else _parameter(bias)
    module.channels_last = "" if is_channels_last(weight) else "input"
    return Site(kind, rank, (given["input"],), {}, module)


def _parameter(tensor: Tensor) -> nn.Parameter:
    if isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor.detach(), requires_grad=False)


def _holds_node(value: object) -> bool:
    if isinstance(value, tuple | list):
        return any(_holds_node(entry) for entry in value)
    return isinstance(value, Node)
