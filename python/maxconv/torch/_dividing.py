"""Into how many tensors a traced call divides one, where the graph tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.fx import Node
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

__all__ = ["parts_of"]

_CHUNK: Final = (torch.chunk, "chunk")
_SPLIT: Final = (torch.split, "split")
#: Modules that leave the number of channels as it is.
_ELEMENTWISE: Final = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.SiLU, nn.GELU, nn.ELU, nn.Mish, nn.Sigmoid, nn.Tanh),
    *(nn.Hardswish, nn.Hardsigmoid, nn.Identity, nn.Dropout, nn.Dropout2d),
)


def parts_of(node: Node, module_of: Callable[[Node], nn.Module | None]) -> int | None:
    """Returns how many tensors a node gives, or ``None`` if its arguments do not tell.

    ``split`` says it by the sizes that it is given. ``chunk`` gives fewer than it is asked for
    where the dimension is short: that of channels is known behind a convolution.

    Args:
        node: What is looped over.
        module_of: Returns the module that a node calls, or ``None``.
    """
    if node.target in _SPLIT:
        sizes = _argument(node, 1, "split_size_or_sections", "split_size")
        return len(sizes) if isinstance(sizes, list | tuple) else None
    if node.target not in _CHUNK:
        return None
    chunks, dim = _argument(node, 1, "chunks"), _argument(node, 2, "dim")
    if not isinstance(chunks, int) or chunks < 1 or dim != 1:
        return None
    channels = _channels(node.args[0] if node.args else None, module_of)
    if channels is None:
        return None
    # Each but the last has as many channels, as PyTorch divides.
    each = -(-channels // chunks)
    return -(-channels // each)


def _argument(node: Node, place: int, *names: str) -> Any:
    if len(node.args) > place:
        return node.args[place]
    return next((node.kwargs[name] for name in names if name in node.kwargs), None)


def _channels(node: object, module_of: Callable[[Node], nn.Module | None]) -> int | None:
    """Returns how many channels the tensor of a node has, if modules in front of it say so."""
    while isinstance(node, Node):
        module = module_of(node)
        if isinstance(module, _ConvNd):
            return module.out_channels
        if isinstance(module, _BatchNorm):
            return module.num_features
        if type(module) not in _ELEMENTWISE:
            return None
        node = node.args[0] if node.args else None
    return None
