"""Finds the convolutions of a traced model, and makes the modules that take their places."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from ._dtypes import DTYPES
from ._functional import conv1d, conv2d, conv3d
from ._modules import Conv1d, Conv2d, Conv3d, _Conv
from ._patterns import module_of
from ._tracing import has_hooks

__all__ = ["FUNCTIONS", "Refused", "Site", "find", "fold", "refusal", "replacement"]

_CLASSES: Final[dict[type[nn.Module], type[_Conv]]] = {
    nn.Conv1d: Conv1d,
    nn.Conv2d: Conv2d,
    nn.Conv3d: Conv3d,
}
_BY_RANK: Final[dict[int, type[_Conv]]] = {1: Conv1d, 2: Conv2d, 3: Conv3d}

#: The functions that take the place of PyTorch's, by spatial rank.
FUNCTIONS: Final[dict[int, Callable[..., Tensor]]] = {1: conv1d, 2: conv2d, 3: conv3d}

_RANKS: Final[dict[Any, int]] = {
    functional.conv1d: 1,
    functional.conv2d: 2,
    functional.conv3d: 3,
    torch.conv1d: 1,
    torch.conv2d: 2,
    torch.conv3d: 3,
}
_TRANSPOSED: Final[frozenset[Any]] = frozenset(
    (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)
)
_ARGUMENTS: Final = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_NO_TRANSPOSED: Final = "transposed convolutions are not converted"


@dataclass(frozen=True)
class Site:
    """A convolution in a traced model."""

    kind: str
    """``Conv2d`` for a module, ``conv2d`` for a function."""
    rank: int
    input: Any
    module: _Conv | None
    """What takes its place; ``None`` for a function whose weight is computed in the model."""


@dataclass(frozen=True)
class Refused:
    """A convolution that stays as it is."""

    kind: str
    reason: str


def refusal(conv: _ConvNd) -> str:
    """Returns why a module cannot be replaced, and nothing if it can."""
    kind = type(conv).__name__
    if "Transpose" in kind:
        return _NO_TRANSPOSED
    if parametrize.is_parametrized(conv):
        return "it is parametrized; call torch.nn.utils.parametrize.remove_parametrizations first"
    if kind.startswith("Lazy"):
        return "it is not initialized; call the model once first"
    if type(conv) not in _CLASSES:
        return f"a {kind} may compute something else"
    return "it has forward hooks" if has_hooks(conv) else _weight_refusal(conv.weight)


def _weight_refusal(weight: Tensor) -> str:
    if weight.dtype not in DTYPES:
        return f"dtype {weight.dtype} is not supported"
    return (
        "" if weight.device.type in ("cpu", "cuda") else f"device {weight.device} is not supported"
    )


def replacement(conv: _ConvNd) -> _Conv:
    """Returns the module that takes the place of one that ``refusal`` does not refuse."""
    module = _CLASSES[type(conv)].from_torch(conv)
    # The very parameters: a model may use one in several places.
    module.weight, module.bias = conv.weight, conv.bias
    return module


def fold(conv: _Conv, norm: _BatchNorm) -> None:
    """Puts a normalization's scale into the weight and its offset into the bias, in float64."""
    weight, dtype = conv.weight.detach().double(), conv.weight.dtype
    mean, variance = cast(Tensor, norm.running_mean), cast(Tensor, norm.running_var)
    scale = (variance.double() + norm.eps).rsqrt()
    if norm.affine:
        scale = scale * norm.weight.detach().double()
    offset = -mean.double() * scale
    if conv.bias is not None:
        offset = offset + conv.bias.detach().double() * scale
    if norm.affine:
        offset = offset + norm.bias.detach().double()
    weight = weight * scale.view(-1, *(1,) * (weight.dim() - 1))
    conv.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
    conv.bias = nn.Parameter(offset.to(dtype), requires_grad=False)


def find(model: GraphModule, modules: Mapping[str, nn.Module], node: Node) -> Site | Refused | None:
    """Returns what convolution a node is; ``None`` if it is none, or one of maxconv's already."""
    module = module_of(node, modules)
    if isinstance(module, _ConvNd) and not isinstance(module, _Conv):
        kind = type(module).__name__
        if reason := refusal(module):
            return Refused(kind, reason)
        own = replacement(module)
        return Site(kind, own.rank, _arguments(node)["input"], own)
    if node.op != "call_function":
        return None
    kind = str(getattr(node.target, "__name__", node.target))
    if node.target in _TRANSPOSED:
        return Refused(kind, _NO_TRANSPOSED)
    rank = _RANKS.get(node.target)
    return None if rank is None else _function(model, node, kind, rank)


def _arguments(node: Node) -> dict[str, Any]:
    return dict(zip(_ARGUMENTS, node.args, strict=False)) | node.kwargs


def _function(model: GraphModule, node: Node, kind: str, rank: int) -> Site | Refused:
    given = _arguments(node)
    weight, bias = _own_tensor(model, given["weight"]), _own_tensor(model, given.get("bias"))
    if weight is not None and (reason := _weight_refusal(weight)):
        return Refused(kind, reason)
    geometry = {name: given[name] for name in _ARGUMENTS[3:] if name in given}
    computed = any(_holds_node(value) for value in geometry.values())
    if weight is None or computed or (bias is None) != (given.get("bias") is None):
        return Site(kind, rank, given["input"], None)
    filters, group_channels, *taps = weight.shape
    module = _BY_RANK[rank](
        group_channels * geometry.get("groups", 1),
        filters,
        tuple(taps),
        bias=bias is not None,
        device="meta",
        dtype=weight.dtype,
        **geometry,
    )
    module.weight = _parameter(weight)
    module.bias = None if bias is None else _parameter(bias)
    return Site(kind, rank, given["input"], module)


def _own_tensor(model: GraphModule, value: object) -> Tensor | None:
    """Returns the tensor of the model's own that an argument is, if it is one."""
    if not isinstance(value, Node) or value.op != "get_attr":
        return None
    found: Any = model
    for part in str(value.target).split("."):
        found = getattr(found, part)
    return found if isinstance(found, Tensor) else None


def _parameter(tensor: Tensor) -> nn.Parameter:
    if isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor.detach(), requires_grad=False)


def _holds_node(value: object) -> bool:
    if isinstance(value, tuple | list):
        return any(_holds_node(entry) for entry in value)
    return isinstance(value, Node)
