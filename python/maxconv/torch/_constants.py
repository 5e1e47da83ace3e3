"""Weights that a graph computes from parameters alone: computed once, and when one has changed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from ._aten import OPERATORS, channels_last, lies_in, place_of, value
from ._dependencies import closure
from ._filters import OPERANDS, state_of
from ._inline import inline
from ._static import forget

__all__ = ["Constants", "keep_weights", "repack"]


def keep_weights(graph: Graph, places: Iterable[int], captured: bool) -> Constants | None:
    """Has weights that depend on parameters alone computed and packed once.

    Args:
        graph: It calls maxconv's operators, and is changed: what is computed becomes an input
            behind all others.
        places: Which of its inputs are the same tensors in most calls: parameters and buffers.
        captured: Whether a CUDA graph calls the operators: what they keep for themselves it would
            go on reading after a parameter has changed.

    Returns:
        What computes the new inputs, in order; ``None`` if there are none.
    """
    inputs = graph.find_nodes(op="placeholder")
    static = _static_nodes(graph, [inputs[place] for place in places])
    wanted: dict[Node, None] = {}
    for node in list(graph.nodes):
        if node.target not in OPERATORS:
            continue
        weight, bias = node.args[1:3]
        if weight in static and captured and value(weight).is_cuda:
            # As kernels read it, so that the operator makes no copy.
            weight = _channels_last(graph, node, weight)
            static.add(weight)
            node.update_arg(1, weight)
        elif weight in static and (bias is None or bias in static):
            node.update_arg(place_of(node.target, "constant"), True)
        wanted.update((n, None) for n in (weight, bias) if n in static and n not in inputs)
    return _hoist(graph, inputs, list(wanted)) if wanted else None


def _channels_last(graph: Graph, reader: Node, weight: Node) -> Node:
    """Returns a copy of a weight in KRSC order; the weight itself if that is its order."""
    axes = channels_last(value(weight).dim())
    if lies_in(value(weight), axes):
        return weight

    def reorder(weight: Tensor) -> Tensor:
        last = weight.movedim(1, -1).clone(memory_format=torch.contiguous_format)
        return last.movedim(-1, 1)

    with graph.inserting_before(reader):
        copy: Node = inline(graph, reorder, [weight])
    return copy


def _static_nodes(graph: Graph, inputs: Iterable[Node]) -> set[Node]:
    """Returns the nodes whose results depend on nothing but some of the graph's inputs.

    An input that the graph writes to is none of them.
    """
    written = {
        tensor
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        for tensor in node.all_input_nodes
    }
    static = {node for node in inputs if node not in written and _is_fixed(value(node))}
    for node in graph.nodes:
        sources = node.all_input_nodes
        if sources and static.issuperset(sources) and _is_function(node):
            static.add(node)
    return static


def _is_function(node: Node) -> bool:
    """Whether a node's result depends on its arguments only, and has a size that is known now."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace not in ("aten", "prims") or target._schema.is_mutable:
            return False
        if torch.Tag.nondeterministic_seeded in target.tags:
            return False
    elif getattr(target, "__name__", "") != "getitem":
        return False
    results = value(node)
    results = results if isinstance(results, tuple | list) else (results,)
    return all(_is_fixed(result) for result in results)


def _is_fixed(result: object) -> bool:
    return isinstance(result, Tensor) and all(type(size) is int for size in result.shape)


def _hoist(graph: Graph, inputs: Sequence[Node], wanted: Sequence[Node]) -> Constants:
    """Takes computed nodes out of a graph; they become inputs behind all others."""
    needed = closure(wanted)
    own = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        if node in needed:
            copies[node] = own.node_copy(node, copies.__getitem__)
    own.output(tuple(copies[node] for node in wanted))
    places = [place for place, node in enumerate(inputs) if node in needed]
    strides = []
    for node in wanted:
        with graph.inserting_before(inputs[-1].next):
            constant = graph.placeholder(f"maxconv_constant_{node.name}")
        # A copy: an expanded tensor, for one, has other strides than what will be kept of it.
        constant.meta["val"] = value(node).detach().clone()
        strides.append(constant.meta["val"].stride())
        node.replace_all_uses_with(constant)
        inputs = [*inputs, constant]
    graph.eliminate_dead_code()
    return Constants(GraphModule(nn.Module(), own), places, strides)


@dataclass
class _Entry:
    """What was computed from certain tensors, and what of these says that it still holds."""

    state: Any
    results: list[Tensor]
    references: list[weakref.ref[Tensor]]


class Constants:
    """Tensors that are computed from some of a compiled graph's inputs, and kept.

    They are known by the inputs' objects, versions and addresses. Where a version has changed they
    are computed again into the same memory, which a CUDA graph may have captured. One compiled
    graph may serve several models: each has its own.
    """

    def __init__(
        self, module: GraphModule, inputs: Sequence[int], strides: Sequence[tuple[int, ...]]
    ) -> None:
        self._module = module
        self._inputs = tuple(inputs)
        self._strides = strides
        self._entries: dict[tuple[int, ...], _Entry] = {}
        # Reentrant: a parameter may be collected while this thread holds the lock.
        self._lock = threading.RLock()
        _ALL.add(self)

    def __call__(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Returns the constants for a call's inputs.

        Raises:
            RuntimeError: They must be computed, but a CUDA graph is being captured.
        """
        tensors = [inputs[place] for place in self._inputs]
        key = tuple(map(id, tensors))
        state = state_of(tensors)
        entry = self._entries.get(key)
        if entry is not None and state is not None and entry.state == state:
            return entry.results
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or state is None or entry.state != state:
                entry = self._compute(key, tensors)
                entry.state = state
            return entry.results

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Has what depends on one of these tensors computed again by the next call."""
        changed = set(map(id, tensors))
        for key, entry in list(self._entries.items()):
            if changed.intersection(key):
                entry.state = None

    def _compute(self, key: tuple[int, ...], tensors: list[Tensor]) -> _Entry:
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        if devices and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "maxconv: weights that the model computes from its parameters are not up to date, "
                "and cannot be computed while a CUDA graph is captured; call the model once before"
            )
        # Under inference_mode results would have no version, and could not be packed once.
        with torch.inference_mode(False), torch.no_grad():
            new = self._module(*tensors)
            entry = self._entries.get(key)
            if entry is None:
                results = [
                    result.new_empty_strided(result.shape, stride)
                    for result, stride in zip(new, self._strides, strict=True)
                ]
                references = [weakref.ref(tensor, self._drop(key)) for tensor in tensors]
                entry = self._entries[key] = _Entry(None, results, references)
            for result, computed in zip(entry.results, new, strict=True):
                result.copy_(computed)
        # Whatever stream a later call is on.
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return entry

    def _drop(self, key: tuple[int, ...]) -> Any:
        entries = self._entries
        return lambda _: entries.pop(key, None)


_ALL: Final[weakref.WeakSet[Constants]] = weakref.WeakSet()


def repack(module: nn.Module) -> None:
    """Forgets what was derived from a model's parameters and buffers; the next call makes it anew.

    Needed only after a write that PyTorch does not count: through ``parameter.data``, or through a
    numpy array that shares the memory.

    Args:
        module: A model, compiled or converted or neither.
    """
    tensors = [*module.parameters(), *module.buffers()]
    for tensor in tensors:
        OPERANDS.forget(tensor)
    for constants in list(_ALL):
        constants.forget(tensors)
    for part in module.modules():
        forget(part)
