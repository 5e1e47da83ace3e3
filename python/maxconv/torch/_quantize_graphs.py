"""What ``quantize`` does with graphs besides: it looks into them, and makes some."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor, fx, nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from ._graphs import ConvertedGraph
from ._modules import _Conv
from ._quantize_report import Difference
from ._quantized import added_module
from ._reading import reads_weights
from ._sites import is_own

__all__ = ["Alone", "compare", "probes"]


def compare(difference: Difference, actual: Any, wanted: Any) -> None:
    """Adds the difference of all floats in two structures of tensors."""
    for own, other in zip(pytree.tree_leaves(actual), pytree.tree_leaves(wanted), strict=True):
        if isinstance(other, Tensor) and other.is_floating_point():
            exact = other.double()
            difference.squares += float((own.double() - exact).square().sum())
            difference.wanted += float(exact.square().sum())


# Probes -----------------------------------------------------------------------------------------


class _Probe(nn.Module):
    """Calls a function with the tensors that a graph has at some place."""

    def __init__(self, function: Callable[..., None]) -> None:
        super().__init__()
        self.function = function
        self.training = False

    def forward(self, *tensors: Tensor) -> None:
        self.function(*tensors)


@contextmanager
def probes() -> Iterator[Callable[..., None]]:
    """Adds probes to graphs, which are still to be recompiled, and removes them in the end.

    Gives a function of a graph, the node in front of which the probe is, what is called there, and
    the nodes that are given to it.
    """
    added: list[tuple[GraphModule, Node]] = []

    def add(model: GraphModule, before: Node, function: Callable[..., None], *nodes: Node) -> None:
        path = added_module(model, "probe", _Probe(function))
        with model.graph.inserting_before(before):
            added.append((model, model.graph.call_module(path, nodes)))

    try:
        yield add
    finally:
        for model, node in added:
            model.graph.erase_node(node)
            model.delete_submodule(str(node.target))
        for model in dict.fromkeys(model for model, _ in added):
            model.recompile()


# Convolutions without a graph -------------------------------------------------------------------


@dataclass
class Alone:
    """Gives graphs of their own to convolutions that modules call which cannot be traced."""

    model: nn.Module
    """The model; another one where it is such a convolution itself."""
    names: dict[nn.Module, str] = field(default_factory=dict)
    """The convolutions' paths, by their graphs."""

    def __post_init__(self) -> None:
        """Makes the graphs, unless code of the model may read a convolution's weight."""
        others = {type(part) for part in self.model.modules() if not is_own(part)}
        if reads_weights(others):
            return
        called = {
            graph.get_submodule(str(node.target))
            for graph in self.model.modules()
            if isinstance(graph, GraphModule)
            for node in graph.graph.nodes
            if node.op == "call_module"
        }
        for path, part in list(self.model.named_modules()):
            # What ``convert`` put there is called with an image, and nothing else.
            if isinstance(part, _Conv) and part.converted and part not in called:
                graph = _of_one(part)
                self.names[graph] = path or "(model)"
                self._put(path, graph)

    def _put(self, path: str, module: nn.Module) -> None:
        if path:
            self.model.set_submodule(path, module)
        else:
            self.model = module

    def finish(self) -> nn.Module:
        """Returns the model, in which convolutions that are as they were have no graphs."""
        for graph, name in self.names.items():
            part = graph.get_submodule("conv")
            if isinstance(part, _Conv):
                self._put("" if name == "(model)" else name, part)
        return self.model


def _of_one(conv: _Conv) -> GraphModule:
    """Returns a graph that calls a convolution."""
    root = nn.Module()
    root.conv = conv
    graph = fx.Graph()
    graph.output(graph.call_module("conv", (graph.placeholder("input"),)))
    made = ConvertedGraph(root, graph, "Convolution")
    made.train(False)
    for name in _READ:
        value = getattr(conv, name)
        # A parameter would be one of the graph, and in its state.
        setattr(made, name, value.detach() if isinstance(value, Tensor) else value)
    return made


#: What code around a convolution may read of it, to pad its input for example.
_READ: Final = (
    *("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups"),
    *("padding_mode", "transposed", "output_padding", "bias"),
)
