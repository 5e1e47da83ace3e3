"""Finds images that are enlarged by repeating pixels, in an ATen graph.

PyTorch traces ``interpolate`` as an index of the image with computed places. Where these depend on
nothing but sizes, they are computed here, and compared with what an integer factor gives.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node

__all__ = ["enlargement_of"]

_aten: Any = torch.ops.aten
_prims: Any = torch.ops.prims

_INDICES: Final = (_aten._unsafe_index.Tensor, _aten.index.Tensor)

#: Of what places are computed, from sizes alone.
_ARITHMETIC: Final = frozenset(
    (
        *(operator.mul, operator.add, operator.floordiv),
        *(_prims.iota.default, _prims.convert_element_type.default),
        *(_aten.arange.default, _aten.arange.start_step, _aten.full.default),
        *(_aten.scalar_tensor.default, _aten.add.Tensor, _aten.mul.Tensor, _aten.div.Tensor),
        *(_aten.true_divide.Tensor, _aten.unsqueeze.default, _aten.view.default),
        *(_aten._to_copy.default, _aten.floor.default, _aten.clamp.default),
    )
)

#: Nodes that compute the places along one dimension, at most.
_LONGEST: Final = 64

#: Sizes at which places are compared where sizes are symbols.
_SIZES: Final = (1, 2, 7, 64)

#: The largest factor that is looked for where sizes are symbols.
_LARGEST: Final = 8


def enlargement_of(node: Node) -> tuple[Node, tuple[int, ...]] | None:
    """Returns the image of which a node repeats the pixels, and how often along each dimension."""
    if node.target not in _INDICES:
        return None
    image, places = node.args[0], node.args[1]
    if not isinstance(image, Node) or not isinstance(places, Sequence):
        return None
    before = image.meta["val"].shape[2:]
    # All spatial dimensions are indexed, whatever the factors are.
    if len(places) != 2 + len(before) or list(places[:2]) != [None, None]:
        return None
    last = len(before) - 1
    factors = tuple(_factor(places[2 + i], size, last - i) for i, size in enumerate(before))
    return None if 0 in factors else (image, factors)


def _factor(place: Any, size: Any, behind: int) -> int:
    """Returns how often each element of a dimension is repeated; 0 if that is not what happens.

    Args:
        place: The node that computes the places.
        size: The dimension's.
        behind: How many dimensions are behind it: the places' shape is ``[n, 1, ...]``.
    """
    if not isinstance(place, Node):
        return 0
    found = place.meta["val"]
    sizes = _sizes(place)
    if sizes is None or not isinstance(found, Tensor) or found.dim() > 1 + behind:
        return 0
    if type(size) is int and not sizes:
        count = found.numel()
        factor = count // size if size and count % size == 0 else 0
        return factor if factor and _repeats(place, {}, size, factor) else 0
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if len(sizes) != 1 or not statically_known_true(sizes[0].meta["val"] == size):
        return 0
    (symbol,) = sizes
    for factor in range(1, _LARGEST + 1):
        if all(_repeats(place, {symbol: known}, known, factor) for known in _SIZES):
            return factor
    return 0


def _sizes(place: Node) -> list[Node] | None:
    """Returns the graph's inputs that places depend on, all of them sizes; ``None`` of others."""
    seen, waiting, inputs = set[Node](), [place], list[Node]()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder" and isinstance(node.meta["val"], torch.SymInt):
            inputs.append(node)
        elif node.target not in _ARITHMETIC or len(seen) > _LONGEST:
            return None
        waiting += node.all_input_nodes
    return inputs


def _repeats(place: Node, sizes: Mapping[Node, int], size: int, factor: int) -> bool:
    """Whether the places, computed for some sizes, repeat each of ``size`` elements."""
    with unset_fake_temporarily(), torch.no_grad():
        found = _computed(place, dict(sizes))
        expected = torch.arange(size).repeat_interleave(factor)
        along = found.dim() and found.shape[0] == found.numel()
        return bool(along) and torch.equal(found.reshape(-1), expected)


def _computed(node: Node, known: dict[Node, Any]) -> Any:
    """Returns what a node computes of known sizes, on the CPU."""
    if node not in known:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: _computed(n, known))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        target: Any = node.target
        known[node] = target(*args, **kwargs)
    return known[node]
