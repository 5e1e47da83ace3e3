"""The class of traced models: they refuse to train, and keep their hooks when they are pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.fx import GraphModule
from torch.fx.graph import PythonCode

from ._chains import chained
from ._inference import refuse_training

__all__ = ["ConvertedGraph"]

_Self = TypeVar("_Self", bound="ConvertedGraph")


class ConvertedGraph(GraphModule):
    """A module as a graph, for inference; convolutions that follow each other are chained."""

    def recompile(self) -> PythonCode:
        """Makes code of the graph, as ``GraphModule`` does."""
        code = super().recompile()
        # Each graph has a class of its own.
        kind: Any = type(self)
        kind.forward = chained(kind.forward)
        return code

    def train(self: _Self, mode: bool = True) -> _Self:
        """Sets eval mode, and refuses training mode before anything is changed.

        Raises:
            RuntimeError: ``mode`` is true.
        """
        refuse_training(mode)
        return super().train(mode)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles what ``GraphModule`` does; that restores neither the class nor hooks."""
        rebuild, (body, imports) = super().__reduce__()
        return _unpickled, (rebuild, body, imports)


def _unpickled(rebuild: Callable[..., GraphModule], body: dict[str, Any], imports: str) -> Any:
    held = dict(body)
    plain = rebuild(body, imports)
    graph = ConvertedGraph(plain, plain.graph, type(plain).__name__)
    for name in vars(nn.Module()):
        if name.endswith(("_hooks", "_with_kwargs", "_always_called")):
            graph.__dict__[name] = held[name]
    for name, value in vars(plain).items():
        graph.__dict__.setdefault(name, value)
    return graph
