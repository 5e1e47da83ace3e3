"""Rewrites an ATen graph: each convolution, with what follows it, becomes one call of a kernel."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from .._arguments import ConvArguments
from ..activations import NONE, ActivationSpec
from ._arguments import check_ranks, check_tensors
from ._aten import (
    CONVOLUTION,
    Convolution,
    Norm,
    activation_of,
    addition_of,
    arguments_of,
    known_equal,
    norm_of,
    read,
    value,
)
from ._inline import inline
from ._layouts import evaluate
from ._op import _encoded_operator, _operator
from ._patterns import Addition
from ._report import ConversionReport, Left, Replaced

__all__ = ["encode", "replace_convolutions"]


def replace_convolutions(graph: Graph) -> ConversionReport:
    """Replaces the convolutions of a graph, with what can be fused into each, in place.

    The graph is one of PyTorch's AOT compilation: it is functional, and its nodes have fake
    tensors. The calls return channels-last tensors; what stands for their results has the strides
    of what was replaced.

    Returns:
        What was replaced and what was left, in the graph's order.
    """
    report = ConversionReport()
    # Backwards, so that of two convolutions that are added the later one adds the other's output.
    for node in reversed(list(graph.nodes)):
        if node.target is not CONVOLUTION:
            continue
        done = _replace(graph, node)
        if isinstance(done, Replaced):
            report.replaced.insert(0, done)
        else:
            report.left.insert(0, done)
    graph.eliminate_dead_code()
    return report


@dataclass
class _Chain:
    """A convolution and what follows it, as far as one kernel does it all."""

    conv: Convolution
    tail: Node
    members: list[Node] = field(init=False)
    fused: list[str] = field(default_factory=list)
    note: str = ""
    norm: Norm | None = None
    activation: ActivationSpec = NONE
    addition: Addition | None = None
    final: ActivationSpec = NONE

    def __post_init__(self) -> None:
        self.members = [self.tail]
        if self.conv.arguments.upsample is not None:
            self.fused.append("upsample")

    def grow(self) -> None:
        """Takes node after node into the chain."""
        while len(self.tail.users) == 1:
            (user,) = self.tail.users
            if not self._take(user):
                return
        readers = map(self._what, self.tail.users)
        if len(self.tail.users) > 1 and not all(isinstance(r, str | None) for r in readers):
            self.note = f"{len(self.tail.users)} nodes read its output"

    def _what(self, user: Node) -> Norm | ActivationSpec | Addition | str | None:
        """Returns what a reader of the tail does, if it has a place in the kernel."""
        plain = not self.activation.kind and self.addition is None
        if plain and self.norm is None and (norm := norm_of(user)) is not None:
            return norm
        if plain or (self.addition is not None and not self.final.kind):
            spec = activation_of(user)
            if spec is not None:
                return spec
        adds = self.conv.output_padding is None and self.conv.arguments.upsample is None
        if self.addition is None and adds:
            return addition_of(user, self.tail)
        return None

    def _take(self, user: Node) -> bool:
        """Takes the reader of the tail, if the kernel can do it."""
        what = self._what(user)
        if isinstance(what, str):
            self.note = what
        if what is None or isinstance(what, str):
            return False
        tail = what.output if isinstance(what, Norm) else user
        if not _alike(value(tail), value(self.tail)):
            self.note = f"{user.target} gives another dtype or shape"
            return False
        if isinstance(what, Norm):
            self.norm = what
            self.members.append(user)
            self.fused.append("batch_norm")
        elif isinstance(what, Addition):
            self.addition = what
            self.fused.append("residual")
        else:
            if self.addition is None:
                self.activation = what
            else:
                self.final = what
            self.fused.append(what.kind.name.lower())
        self.members.append(tail)
        self.tail = tail
        return True


def _alike(left: Tensor, right: Tensor) -> bool:
    """Whether a convolution that returns one may return the other."""
    return left.dtype == right.dtype and known_equal(left.shape, right.shape)


def _replace(graph: Graph, node: Node) -> Replaced | Left:
    """Puts one call in the place of a convolution and what follows it."""
    name, conv = _name(node), read(node)
    if isinstance(conv, str):
        return Left(name, _kind(node), conv)
    chain = _Chain(conv, node)
    chain.grow()
    with graph.inserting_before(chain.tail):
        weight, bias = conv.weight, conv.bias
        if chain.norm is not None:
            weight, bias = _folded(graph, conv, chain.norm)
        try:
            new = _emit(graph, chain, weight, bias)
        except (TypeError, ValueError) as error:
            return Left(name, _kind(node), str(error))
    chain.tail.replace_all_uses_with(new)
    _erase(graph, chain.members)
    return Replaced(name, _kind(node), tuple(chain.fused), chain.note)


def _emit(graph: Graph, chain: _Chain, weight: Node, bias: Node | None) -> Node:
    """Writes the call.

    Raises:
        TypeError: Kernels do not take tensors of such dtypes.
        ValueError: They do not take such sizes or devices.
    """
    conv, arguments = chain.conv, _with_epilogue(chain)
    residual = None if chain.addition is None else chain.addition.residual
    given: tuple[Any, ...] = (conv.input, weight, bias)
    x, w, b, r = map(value, (*given, residual))
    with torch.no_grad():
        if conv.output_padding is None:
            check_ranks(x, w, arguments)
        check_tensors(x, w, b, r, None, None)
    given += (residual, None) if conv.output_padding is None else (conv.output_padding,)
    new = graph.call_function(conv.operator, (*given, *arguments.flatten(), True, False))
    try:
        evaluate(new)
    except ValueError:
        graph.erase_node(new)
        raise
    new.meta = dict(chain.tail.meta)
    return new


def _with_epilogue(chain: _Chain) -> ConvArguments:
    return replace(
        chain.conv.arguments,
        activation=chain.activation,
        final_activation=chain.final,
        beta=1.0 if chain.addition is None else chain.addition.beta,
    )


def _erase(graph: Graph, nodes: Iterable[Node]) -> None:
    for node in reversed(list(nodes)):
        graph.erase_node(node)


def _folded(graph: Graph, conv: Convolution, norm: Norm) -> tuple[Node, Node]:
    """Writes a filter and a bias that do what a normalization behind them did."""
    tensors = [conv.weight, norm.mean, norm.variance]
    optional = [conv.bias, norm.weight, norm.bias]
    given = [node for node in optional if node is not None]
    eps, groups = norm.eps, conv.arguments.groups

    def fold(weight: Tensor, mean: Tensor, variance: Tensor, *others: Tensor) -> Any:
        rest = iter(others)
        bias, gamma, beta = (None if node is None else next(rest).double() for node in optional)
        scale = (variance.double() + eps).rsqrt()
        scale = scale if gamma is None else scale * gamma
        offset = (0.0 if bias is None else bias) - mean.double()
        offset = offset * scale if beta is None else offset * scale + beta
        # Filters come first, behind their group; in a transposed convolution channels do.
        axes = (groups, 1, -1) if conv.output_padding is not None else (groups, -1, 1)
        grouped = weight.double().view(groups, -1, *weight.shape[1:])
        folded = grouped * scale.view(*axes, *(1,) * (weight.dim() - 2))
        return folded.reshape(weight.shape).to(weight.dtype), offset.to(weight.dtype)

    weight, bias = inline(graph, fold, [*tensors, *given])
    return weight, bias


def _kind(node: Node) -> str:
    rank = value(node).dim() - 2
    return f"{'conv_transpose' if node.args[6] else 'conv'}{rank}d"


def _name(node: Node) -> str:
    """Returns the path of the module that a node is from, and the node's own name if there is."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return node.name
    path = str(list(stack.values())[-1][0])
    # As in "L['self']._modules['layer']._modules['0']", or "L['self'].layer.0".
    path = re.sub(r"^\w\['\w+'\]", "", path)
    return re.sub(r"\._modules\['(.*?)'\]", r".\1", path).lstrip(".") or node.name


def encode(graph: Graph) -> None:
    """Has calls of maxconv's convolution hand over a string for what is no tensor.

    Calls stay where such an argument is computed in the graph.
    """
    tensors = len(_encoded_operator._schema.arguments) - 1
    names = [argument.name for argument in _operator._schema.arguments]
    for node in graph.find_nodes(op="call_function", target=_operator):
        given = arguments_of(node)
        values = [given[name] for name in names]
        others = values[tensors:]
        if not any(isinstance(leaf, Node) for leaf in pytree.tree_leaves(others)):
            node.target, node.kwargs = _encoded_operator, {}
            node.args = (*values[:tensors], json.dumps(others))
