"""Has an ATen graph's means over pixels computed by ``global_avg_pool``."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.fx import Graph, Node

from ._aten import OPERATORS, arguments_of, channels_last, lies_in, value
from ._dtypes import DTYPES
from ._layouts import evaluate
from ._pooling import operator, runs_on_gpu

__all__ = ["replace_means"]

_aten: Any = torch.ops.aten

_MEAN: Final[Any] = _aten.mean.dim


def replace_means(graph: Graph) -> None:
    """Replaces the means over all pixels of what maxconv's convolutions return, on a GPU.

    Inductor would make one or two kernels of each, and can fuse none into a convolution. Of other
    tensors it computes the mean where it computes the tensor.

    Args:
        graph: Its convolutions are maxconv's, and return channels-last tensors.
    """
    for node in list(graph.find_nodes(op="call_function", target=_MEAN)):
        given = arguments_of(node)
        image = given["self"]
        if not _is_image(image) or not _is_over_pixels(given, value(image).dim()):
            continue
        # Whoever looks at strides might see another's.
        if any(user.op == "output" for user in node.users):
            continue
        with graph.inserting_before(node):
            new = graph.call_function(operator, (image,))
            new.meta["val"] = evaluate(new)
            if not given["keepdim"]:
                new = graph.call_function(_aten.squeeze.dims, (new, list(given["dim"])))
                new.meta["val"] = evaluate(new)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _is_image(node: Any) -> bool:
    """Whether a node is a convolution of maxconv's whose output the kernel takes."""
    if not isinstance(node, Node) or node.target not in OPERATORS:
        return False
    image = value(node)
    return (
        runs_on_gpu(image) and image.dtype in DTYPES and lies_in(image, channels_last(image.dim()))
    )


def _is_over_pixels(given: dict[str, Any], rank: int) -> bool:
    """Whether a mean with such arguments is one over all pixels, in its input's dtype."""
    if given["dtype"] is not None or given["dim"] is None:
        return False
    places = [place % rank for place in given["dim"]]
    return sorted(places) == list(range(2, rank))
