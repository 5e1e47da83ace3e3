"""Has the convolutions of an ATen graph hand channels-last tensors to each other.

Group normalizations of channels-last tensors become maxconv's on the way: PyTorch's would make them
contiguous.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from ._aten import (
    OPERATORS,
    GroupNorm,
    channels_last,
    group_norm_of,
    known_equal,
    lies_in,
    place_of,
    value,
)
from ._norm import _operator as _group_norm

__all__ = ["evaluate", "prefer_channels_last"]

_aten: Any = torch.ops.aten

#: Operators of PyTorch whose results depend on strides, or that refuse some.
_READERS: Final = frozenset(
    getattr(_aten, name)
    for name in (
        *("as_strided", "as_strided_", "as_strided_scatter", "as_strided_copy", "resize"),
        *("resize_as", "set_", "sym_stride", "sym_storage_offset", "view_as_complex"),
    )
)


#: Memory formats of PyTorch's, and the orders of dimensions that they are.
_FORMATS: Final = (
    (torch.channels_last, channels_last(4)),
    (torch.channels_last_3d, channels_last(5)),
)


def prefer_channels_last(graph: Graph) -> None:
    """Lets what is computed from maxconv's convolutions be channels last, as their outputs are.

    Group normalizations of channels-last tensors become maxconv's, with the activation behind them.
    What stands for a convolution's result still has the strides of what was replaced. They are
    restored for whoever may look at them: the graph's outputs, operators that are not PyTorch's
    own, and a few that are.
    """
    _Layouts(graph).run()


def evaluate(node: Node) -> Any:
    """Returns what a call in the graph returns, computed from what stands for its arguments."""
    target: Any = node.target
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value)
    with torch.no_grad():
        return target(*args, **kwargs)


def _equal_strides(left: Any, right: Any) -> bool:
    pairs = zip(pytree.tree_leaves(left), pytree.tree_leaves(right), strict=True)
    return all(known_equal(a.stride(), b.stride()) for a, b in pairs if isinstance(a, Tensor))


class _Layouts:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        #: Nodes whose strides are others than they were, and what stood for them.
        self.before: dict[Node, Any] = {}
        self.restored: dict[Node, Node] = {}
        self.converted: dict[Node, Node] = {}

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op in ("placeholder", "get_attr") or node._erased:
                continue
            if (norm := group_norm_of(node)) is not None and self._is_last(norm.input):
                self._normalize(norm)
                continue
            own = node.target in OPERATORS
            if not own and self.before.keys().isdisjoint(node.all_input_nodes):
                continue
            with self.graph.inserting_before(node):
                if own:
                    self._convert(node)
                elif _sees_strides(node):
                    node.args = torch.fx.map_arg(node.args, self._restore)
                    node.kwargs = torch.fx.map_arg(node.kwargs, self._restore)
                    continue
            if _keeps_its_result(node):
                continue
            if node.target in (_aten.view.default, _aten._unsafe_view.default):
                node.target = _aten.reshape.default
            before = value(node)
            node.meta["val"] = evaluate(node)
            if not _equal_strides(before, value(node)):
                self.before[node] = before

    def _is_last(self, image: Node) -> bool:
        return lies_in(value(image), channels_last(value(image).dim()))

    def _normalize(self, norm: GroupNorm) -> None:
        """Puts a call of maxconv's in the place of a normalization."""
        *_, last = norm.members
        spec = norm.activation
        behind = (int(spec.kind), *map(float, spec.parameters))
        with self.graph.inserting_before(last):
            given = (norm.input, norm.groups, norm.weight, norm.bias, norm.eps, *behind)
            new = self.graph.call_function(_group_norm, given)
        new.meta = dict(last.meta)
        new.meta["val"] = evaluate(new)
        self.before[new] = value(last)
        last.replace_all_uses_with(new)
        for node in reversed(norm.members):
            self.graph.erase_node(node)

    def _convert(self, node: Node) -> None:
        """Makes a convolution's tensors channels last."""
        for name in ("input", "residual"):
            place = place_of(node.target, name)
            if place is not None and isinstance(image := node.args[place], Node):
                node.update_arg(place, self._channels_last(image))

    def _channels_last(self, image: Node) -> Node:
        if self._is_last(image):
            return image
        order = channels_last(value(image).dim())
        if image not in self.converted:
            self.converted[image] = self._ordered(image, order)
        return self.converted[image]

    def _restore(self, node: Node) -> Node:
        """Returns what has a node's values and the strides that it had."""
        before = self.before.get(node)
        if before is None:
            return node
        if node not in self.restored:
            self.restored[node] = self._copy(node, before)
        return self.restored[node]

    def _copy(self, node: Node, before: Any) -> Node:
        if isinstance(before, Tensor):
            for order in _orders(before):
                if lies_in(before, order):
                    return self._ordered(node, order)
        # A view of some elements, for one: the same of what it is a view of.
        copy = self.graph.node_copy(node, self._restore)
        copy.meta["val"] = evaluate(copy)
        return copy

    def _ordered(self, node: Node, order: Sequence[int]) -> Node:
        """Returns a copy of a node whose dimensions lie in memory in an order, outermost first."""
        plain = tuple(range(len(order)))
        for memory_format, known in ((torch.contiguous_format, plain), *_FORMATS):
            if known == order:
                return self._call(_aten.clone.default, node, memory_format=memory_format)
        back = sorted(range(len(order)), key=order.__getitem__)
        moved = self._call(_aten.permute.default, node, list(order))
        copy = self._call(_aten.clone.default, moved, memory_format=torch.contiguous_format)
        return self._call(_aten.permute.default, copy, back)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = evaluate(node)
        return node


def _orders(tensor: Tensor) -> list[tuple[int, ...]]:
    """Returns orders that a tensor's dimensions may have in memory, outermost first."""
    rank, strides = tensor.dim(), tensor.stride()
    orders = [tuple(range(rank))]
    if rank in (4, 5):
        orders.append(channels_last(rank))
    if all(type(stride) is int for stride in strides):
        orders.append(tuple(sorted(range(rank), key=lambda axis: -strides[axis])))
    return orders


def _keeps_its_result(node: Node) -> bool:
    """Whether a node writes to a tensor that lies where it lay, or has a size of its own making."""
    target: Any = node.target
    writes = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    return writes or "unbacked_bindings" in node.meta


def _sees_strides(node: Node) -> bool:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace not in ("aten", "prims") or target.overloadpacket in _READERS:
            return True
        random = torch.Tag.nondeterministic_seeded in target.tags
        return random or target is _aten.view.dtype
    return target is not operator.getitem
