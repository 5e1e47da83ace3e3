"""Computes, once, the weights that a traced model would compute from its parameters in every call.

Weight standardization is such a computation, and so is whatever else a subclass of PyTorch's
convolutions does to its weight before it convolves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from ._dependencies import closure
from ._loading import guard_model
from ._patterns import mutates, own_tensor

__all__ = ["fold_computed"]


def fold_computed(
    model: GraphModule, modules: Mapping[str, nn.Module], operands: Iterable[Node]
) -> None:
    """Makes parameters of operands that follow from a traced model's own tensors, in place.

    An operand stays computed where that gives other values each time or writes to a tensor, or
    where the model has another use for what it is computed from.

    Args:
        model: The model; no grad mode is on.
        modules: Its modules by their paths.
        operands: Nodes of its graph: weights and biases of convolutions.
    """
    static = _static_nodes(model, modules)
    wanted = [node for node in dict.fromkeys(operands) if node in static and node.op != "get_attr"]
    while wanted:
        needed = closure(wanted)
        shared = {node for node in needed - set(wanted) if not needed.issuperset(node.users)}
        kept = [node for node in wanted if closure([node]).isdisjoint(shared)]
        if kept == wanted:
            break
        wanted = kept
    if not wanted:
        return
    order = [node for node in model.graph.nodes if node in needed]
    values = _values(model, order)
    if values is None:
        return
    for node in wanted:
        _replace(model, node, values[node])
    _drop(model, order)


def _static_nodes(model: GraphModule, modules: Mapping[str, nn.Module]) -> set[Node]:
    """Returns the nodes that follow from the model's own tensors, none of which it writes to."""
    static: set[Node] = set()
    for node in model.graph.nodes:
        if node.op == "get_attr":
            if own_tensor(model, node) is not None and _is_dropped_with_its_node(model, node):
                static.add(node)
        elif node.op in ("call_function", "call_method") and not mutates(node, modules):
            sources = node.all_input_nodes
            if sources and static.issuperset(sources):
                static.add(node)
    for node in model.graph.nodes:
        if mutates(node, modules):
            # What it writes to may share memory with whatever that is made of, or is made of it.
            static -= _connected(static.intersection(node.all_input_nodes), static)
    return static


def _is_dropped_with_its_node(model: GraphModule, node: Node) -> bool:
    """Whether nothing but nodes of the graph reads a tensor: no module that the graph calls."""
    owner, _, _ = str(node.target).rpartition(".")
    return not owner or type(model.get_submodule(owner)) is nn.Module


def _connected(nodes: Iterable[Node], within: set[Node]) -> set[Node]:
    """Returns the nodes of a set that some of its nodes lead to, along edges in either direction.

    Reads of one tensor are taken for one node.
    """
    found: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node in found or node not in within:
            continue
        found.add(node)
        pending += [*node.all_input_nodes, *node.users]
        if node.op == "get_attr":
            pending += [other for other in within if other.target == node.target]
    return found


def _values(model: GraphModule, order: list[Node]) -> dict[Node, Any] | None:
    """Returns what nodes compute; ``None`` if it is not the same each time, or writes to a tensor.

    Tensors on the meta device have no values: ``None`` too.

    Args:
        model: The model.
        order: The nodes, each behind those that it reads.
    """
    own = [tensor for node in order if (tensor := own_tensor(model, node)) is not None]
    if any(tensor.device.type not in ("cpu", "cuda") for tensor in own):
        return None
    before, drawn = [tensor.clone() for tensor in own], torch.get_rng_state()
    try:
        first, second = _computed(model, order), _computed(model, order)
    finally:
        changed = not torch.equal(drawn, torch.get_rng_state())
        torch.set_rng_state(drawn)
        for tensor, value in zip(own, before, strict=True):
            if not torch.equal(tensor, value):
                changed = True
                tensor.copy_(value)
    tensors = [node for node in order if isinstance(first[node], Tensor)]
    same = all(torch.equal(first[node], second[node]) for node in tensors)
    return first if same and not changed else None


def _computed(model: GraphModule, order: list[Node]) -> dict[Node, Any]:
    values: dict[Node, Any] = {}
    for node in order:
        if node.op == "get_attr":
            values[node] = own_tensor(model, node)
            continue
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
        target: Any = node.target
        if node.op == "call_method":
            target, args = getattr(args[0], target), args[1:]
        values[node] = target(*args, **kwargs)
    return values


def _replace(model: GraphModule, node: Node, value: Tensor) -> None:
    """Puts a new parameter of the model in the place of a node."""
    name, number = node.name, 0
    while hasattr(model, name):
        number += 1
        name = f"{node.name}_{number}"
    model.register_parameter(name, nn.Parameter(value.detach().clone(), requires_grad=False))
    with model.graph.inserting_before(node):
        node.replace_all_uses_with(model.graph.get_attr(name))


def _drop(model: GraphModule, order: list[Node]) -> None:
    """Removes nodes that nobody reads, and the tensors that only they read."""
    sources = {str(node.target) for node in order if node.op == "get_attr"}
    for node in reversed(order):
        if not node.users:
            model.graph.erase_node(node)
    sources -= {str(node.target) for node in model.graph.nodes if node.op == "get_attr"}
    for path in sources:
        owner, _, name = path.rpartition(".")
        delattr(model.get_submodule(owner), name)
    guard_model(model, sources)
