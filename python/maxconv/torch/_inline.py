"""Puts what a function of tensors computes into an ATen graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ._aten import value

__all__ = ["decompose", "inline"]

#: How operators are computed from others.
Decompositions = Mapping[Any, Callable[..., Any]]


def inline(
    graph: Graph,
    function: Callable[..., Any],
    inputs: Sequence[Node],
    decompositions: Decompositions | None = None,
) -> Any:
    """Writes a function's operators into a graph, at its insertion point.

    Args:
        graph: The graph.
        function: Takes tensors, and returns a tensor or several.
        inputs: What it takes.
        decompositions: Of operators that are not to be written as they are.

    Returns:
        The nodes of what it returns.
    """
    traced = make_fx(function, decomposition_table=dict(decompositions or {}))(*map(value, inputs))
    nodes: dict[Node, Node] = {}
    places = iter(inputs)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            nodes[node] = next(places)
        elif node.op == "output":
            return torch.fx.map_arg(node.args[0], nodes.__getitem__)
        else:
            nodes[node] = graph.node_copy(node, nodes.__getitem__)
    raise AssertionError("a traced graph ends with its output")


def decompose(graph: Graph, targets: frozenset[Any], decompositions: Decompositions) -> None:
    """Writes the calls of some operators as what they are computed from, where a table has it."""
    for node in list(graph.nodes):
        if node.target not in targets or node.target not in decompositions:
            continue
        leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Node)]

        def call(
            *tensors: Any,
            node: Node = node,
            leaves: Any = leaves,
            places: Any = places,
            structure: Any = structure,
        ) -> Any:
            given = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                given[place] = tensor
            args, kwargs = pytree.tree_unflatten(given, structure)
            target: Any = node.target
            return target(*args, **kwargs)

        with graph.inserting_before(node):
            results = inline(graph, call, [leaves[place] for place in places], decompositions)
        if isinstance(results, tuple | list):
            for reader in list(node.users):
                reader.replace_all_uses_with(results[reader.args[1]])
                graph.erase_node(reader)
        else:
            node.replace_all_uses_with(results)
        graph.erase_node(node)
