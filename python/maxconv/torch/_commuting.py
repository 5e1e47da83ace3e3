"""What in a traced model does the same to 8-bit integers as to the floats that they stand for.

Elements that are only moved, repeated or left out keep their scale; so does the largest of some.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn import functional

from ._patterns import is_identity, module_of, mutates
from ._quantized import max_pool, repeated_nearest
from ._tracing import is_plain, unpacked

__all__ = ["inputs_of", "is_channelwise", "make_integral"]

Modules = Mapping[str, nn.Module]

_POOLS: Final = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_ENLARGING: Final = (nn.Upsample, nn.UpsamplingNearest2d)
_ZERO_PADS: Final = (
    *(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d),
    *(nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
)
_OTHER_PADS: Final = (
    *(nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d),
    *(nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d),
)
#: Modules that treat each channel alike and apart.
_CHANNELWISE: Final = (*_POOLS, *_ENLARGING, *_ZERO_PADS, *_OTHER_PADS, nn.ReLU)
_MODULES: Final = (
    *_CHANNELWISE,
    *(nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle),
)

_RELU: Final = (functional.relu, torch.relu, "relu")
_POOL_FUNCTIONS: Final = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
_CHANNELWISE_FUNCTIONS: Final = frozenset(
    (*_RELU, *_POOL_FUNCTIONS, functional.interpolate, functional.pad, "contiguous")
)
_JOINING: Final = (torch.cat, torch.concat)
_FUNCTIONS: Final = _CHANNELWISE_FUNCTIONS | frozenset(
    (
        *(torch.flatten, torch.permute, torch.transpose, torch.reshape, torch.unflatten),
        *(torch.squeeze, torch.unsqueeze, torch.chunk, torch.split, torch.movedim),
        *(functional.pixel_shuffle, functional.pixel_unshuffle, functional.channel_shuffle),
        *("flatten", "permute", "transpose", "reshape", "view", "squeeze", "unsqueeze"),
        *("chunk", "split", "movedim"),
        *(operator.getitem, unpacked, *_JOINING),
    )
)
#: What gives several tensors.
_DIVIDING: Final = (torch.chunk, torch.split, "chunk", "split", unpacked)
_REPEATING: Final = ("nearest", "nearest-exact")


def inputs_of(node: Node, modules: Modules) -> list[Node] | None:
    """Returns the tensors whose elements a node moves, or ``None`` if it does something else."""
    module = module_of(node, modules)
    if is_identity(node, modules):
        return _first(node)
    if mutates(node, modules):
        return None
    if module is not None:
        return _first(node) if _is_moving(module) else None
    if node.op not in ("call_function", "call_method") or node.target not in _FUNCTIONS:
        return None
    if any(isinstance(value, torch.dtype) for value in (*node.args, *node.kwargs.values())):
        return None
    if node.target is unpacked or node.target is operator.getitem:
        return _first(node) if _is_part(node) else None
    if node.target in _JOINING:
        tensors = node.args[0] if node.args else node.kwargs.get("tensors")
        if not isinstance(tensors, tuple | list) or not tensors:
            return None
        found = [tensor for tensor in tensors if isinstance(tensor, Node)]
        return found if len(found) == len(tensors) else None
    if node.target is functional.pad:
        given = _given(node)
        if given["mode"] == "constant" and given["value"] not in (None, 0):
            return None
    if node.target is functional.interpolate and _given(node)["mode"] not in _REPEATING:
        return None
    if node.target in _POOL_FUNCTIONS and node.kwargs.get("return_indices"):
        return None
    return _first(node)


def _is_part(node: Node) -> bool:
    """Whether a node takes a part of a tensor, or one of those that a tensor was divided into."""
    whole, index = node.args[0], node.args[1]
    if isinstance(whole, Node) and whole.target in _DIVIDING:
        return True
    # What a number picks may be no tensor; a slice of a tuple is a tuple.
    places = index if isinstance(index, tuple) else ()
    return bool(places) and all(isinstance(place, slice) or place is ... for place in places)


def is_channelwise(node: Node, modules: Modules) -> bool:
    """Whether a node that moves elements leaves each in its channel."""
    module = module_of(node, modules)
    if module is not None:
        return type(module) in _CHANNELWISE or is_identity(node, modules)
    return node.target in _CHANNELWISE_FUNCTIONS or is_identity(node, modules)


def _first(node: Node) -> list[Node] | None:
    given = node.args[0] if node.args else node.kwargs.get("input")
    return [given] if isinstance(given, Node) else None


def _is_moving(module: nn.Module) -> bool:
    if type(module) not in _MODULES or not is_plain(module):
        return False
    if isinstance(module, _POOLS):
        return not module.return_indices
    if isinstance(module, nn.Upsample):
        return module.mode in _REPEATING
    return not isinstance(module, _ZERO_PADS) or module.value == 0


def _given(node: Node) -> dict[str, Any]:
    """Returns a function's arguments by name, defaults included."""
    bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type] # a function
    bound.apply_defaults()
    return bound.arguments


# For integers -----------------------------------------------------------------------------------


def make_integral(model: GraphModule, modules: Modules, node: Node, zero_point: int) -> None:
    """Has a node that moves elements take integers, where it would not as it is.

    Args:
        model: Whose graph the node is in.
        modules: The model's.
        node: A node of which ``inputs_of`` knows the inputs.
        zero_point: The integer that stands for 0.
    """
    module = module_of(node, modules)
    if is_identity(node, modules):
        return
    source = inputs_of(node, modules)
    assert source is not None
    replaced: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None
    x = source[0]
    if isinstance(module, nn.ReLU) or (module is None and node.target in _RELU):
        replaced = torch.clamp, (x,), {"min": zero_point}
    elif isinstance(module, _ZERO_PADS):
        replaced = functional.pad, (x, tuple(module.padding), "constant", zero_point), {}
    elif isinstance(module, nn.Upsample):
        options = {name: getattr(module, name) for name in ("size", "scale_factor", "mode")}
        replaced = repeated_nearest, (x,), options
    elif isinstance(module, _POOLS):
        given = {name: getattr(module, name) for name in _POOL_ARGUMENTS[1:]}
        replaced = max_pool, (x, *_pooling(given, _POOLS.index(type(module)) + 1)), {}
    elif module is None and node.target is functional.pad:
        given = _given(node)
        if given["mode"] == "constant":
            replaced = functional.pad, (x, given["pad"], "constant", zero_point), {}
    elif module is None and node.target is functional.interpolate:
        given = _given(node)
        options = {name: given[name] for name in ("size", "scale_factor", "mode")}
        replaced = repeated_nearest, (x,), options
    elif module is None and node.target in _POOL_FUNCTIONS:
        given = dict(zip(_POOL_ARGUMENTS, node.args, strict=False)) | node.kwargs
        replaced = max_pool, (x, *_pooling(given, _POOL_FUNCTIONS.index(node.target) + 1)), {}
    if replaced is None:
        return
    target, args, keywords = replaced
    with model.graph.inserting_before(node):
        new = model.graph.call_function(target, args, keywords)
    node.replace_all_uses_with(new)
    model.graph.erase_node(node)


_POOL_ARGUMENTS: Final = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode")


def _pooling(given: Mapping[str, Any], rank: int) -> tuple[Any, ...]:
    """Returns the arguments of ``max_pool`` behind the tensor."""

    def each(value: Any) -> tuple[Any, ...]:
        values = tuple(value) if isinstance(value, tuple | list) else (value,)
        return values * rank if len(values) == 1 else values

    size = each(given["kernel_size"])
    stride = each(given["stride"]) if given.get("stride") else size
    rest = each(given.get("padding", 0)), each(given.get("dilation", 1))
    return size, stride, *rest, given.get("ceil_mode", False)
