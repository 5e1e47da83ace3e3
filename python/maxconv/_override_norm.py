"""Normalizations of images that MAX's models call, computed by maxconv's ops on a GPU.

MAX's take longer there than the convolutions beside them. On a CPU maxconv's own are made of MAX's
operations, and what has no pixels, as the tokens of a transformer, is none of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from max.graph import Graph, TensorValue, ops

from . import _norm
from ._graph import import_kernels, is_graph_value

__all__ = ["NORMALIZERS", "is_of_images"]


def is_of_images(input: object) -> bool:
    """Whether a normalization's input is images on a GPU: batch, two or three sizes, channels."""
    if not is_graph_value(input):
        return False
    x = TensorValue(cast(Any, input))
    return x.device.is_gpu() and 4 <= x.rank <= 5


def _group_norm(arguments: Mapping[str, Any]) -> TensorValue:
    """Computes ``group_norm``, whose channels are the second dimension.

    Args:
        arguments: All of its arguments, by name.

    Raises:
        TypeError: maxconv does not take it.
        ValueError: The same.
    """
    x = TensorValue(arguments["input"])
    import_kernels(Graph.current)
    result = _norm.group_norm(
        ops.permute(x, [0, *range(2, x.rank), 1]),
        arguments["num_groups"],
        TensorValue(arguments["gamma"]),
        TensorValue(arguments["beta"]),
        arguments["epsilon"],
    )
    return ops.permute(result, [0, x.rank - 1, *range(1, x.rank - 1)])


def _rms_norm(arguments: Mapping[str, Any]) -> TensorValue:
    """Computes ``rms_norm``; what MAX rounds before the weight, maxconv rounds behind it.

    Args:
        arguments: All of its arguments, by name.

    Raises:
        TypeError: maxconv does not take it.
        ValueError: The same.
    """
    x, weight = TensorValue(arguments["input"]), TensorValue(arguments["weight"])
    import_kernels(Graph.current)
    if offset := arguments["weight_offset"]:
        weight = weight + offset
    return _norm.rms_norm(x, weight, arguments["epsilon"])


#: What computes a normalization of MAX's, by its name in ``max.graph.ops``.
NORMALIZERS: Final[Mapping[str, Callable[[Mapping[str, Any]], TensorValue]]] = {
    "group_norm": _group_norm,
    "rms_norm": _rms_norm,
}
