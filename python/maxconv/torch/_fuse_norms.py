"""Group normalizations of a converted model: each becomes maxconv's, with what follows it."""

from __future__ import annotations

from itertools import chain
from typing import Any, cast

from torch import nn
from torch.fx import GraphModule, Node
from torch.nn import functional

from ..activations import ActivationSpec
from ._activations import as_argument
from ._norm import GroupNorm, normalized
from ._patterns import Modules, activation_of, is_identity, is_metadata, module_of
from ._tracing import is_plain

__all__ = ["fuse_group_norms", "is_on_gpu"]


def fuse_group_norms(model: GraphModule, modules: Modules) -> list[Node]:
    """Makes the group normalizations of a traced model maxconv's, in place.

    A call takes along an activation that follows it, if nothing else reads its output. Modules with
    hooks and of other classes stay PyTorch's.

    Args:
        model: The model; on a CPU it stays as it is.
        modules: The model's.

    Returns:
        The calls.
    """
    if not is_on_gpu(model):
        return []
    calls = []
    for node in list(model.graph.nodes):
        by_function = node.op == "call_function" and node.target is functional.group_norm
        if by_function:
            node.target = normalized
        module = module_of(node, modules)
        if type(module) is nn.GroupNorm and is_plain(module):
            # The state stays as it is, whoever else has the module.
            cast(Any, module).__class__ = GroupNorm
        if by_function or type(module) is GroupNorm:
            _take_activation(node, modules)
            calls.append(node)
    return calls


def is_on_gpu(model: nn.Module) -> bool:
    """Whether some of a model's tensors are."""
    return any(tensor.is_cuda for tensor in chain(model.parameters(), model.buffers()))


def _take_activation(norm: Node, modules: Modules) -> None:
    """Has a normalization compute the activation that follows it, if one does."""
    spec, followers = _activation_behind(norm, modules)
    if spec is None:
        return
    norm.kwargs = {**norm.kwargs, "activation": as_argument(spec)}
    for node in reversed(followers):
        node.replace_all_uses_with(norm)
        norm.graph.erase_node(node)


def _activation_behind(node: Node, modules: Modules) -> tuple[ActivationSpec | None, list[Node]]:
    """Returns the activation of a node's only reader, and the nodes up to it.

    Those that read what the activation's output has in common with its input do not count.
    """
    followers: list[Node] = []
    while True:
        users = [user for user in node.users if not is_metadata(user)]
        if len(users) != 1:
            return None, []
        (node,) = users
        followers.append(node)
        spec = activation_of(node, modules)
        if spec is not None:
            return spec, followers
        if not is_identity(node, modules):
            return None, []
