"""What nodes of a graph are computed from."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

__all__ = ["closure"]


def closure(nodes: Iterable[Node]) -> set[Node]:
    """Returns nodes and all that they are computed from."""
    found: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found
