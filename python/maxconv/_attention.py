"""Attention over few wide heads, as image decoders have it, made of convolutions.

Both products are convolutions of one tap over one row of pixels: with the keys as the filter it
gives the scores, with the values as the filter it gives their means. Between the two MAX's softmax
runs. The scores are in memory: 10 bytes for each pair of a query and a key, of one head of one
image at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorValue, ops

from . import _ops
from ._graph import constant_array, import_kernels, is_graph_value

__all__ = ["ATTENTION_OP", "is_wide", "take_attention"]

#: The operator of MAX's ``flash_attention_gpu``.
ATTENTION_OP: Final = "mo.mha.no_cache"

#: The widest heads that MAX's fused kernels are fast for; ``flash`` attention in general holds a
#: tile of a head's output in registers.
_NARROW: Final = 256

#: Each head of an image is computed on its own; that pays only for a few.
_MOST_HEADS: Final = 4


def is_wide(arguments: Mapping[str, Any]) -> bool:
    """Whether ``ops.custom`` is asked for attention that is faster as convolutions.

    Args:
        arguments: Those of ``ops.custom``.
    """
    if arguments["name"] != ATTENTION_OP or not is_graph_value(arguments["values"][0]):
        return False
    query = TensorValue(cast(Any, arguments["values"][0]))
    if query.rank != 4 or not query.device.is_gpu():
        return False
    heads, channels = query.shape[2:]
    return heads in range(1, _MOST_HEADS + 1) and channels not in range(_NARROW + 1)


def take_attention(arguments: Mapping[str, Any]) -> list[TensorValue]:
    """Computes ``ATTENTION_OP`` with maxconv.

    Args:
        arguments: Those of ``ops.custom``.

    Returns:
        What ``ops.custom`` does: a list of results, here of one.

    Raises:
        TypeError: maxconv does not take it.
        ValueError: The same.
    """
    query, key, value, factor = (TensorValue(given) for given in arguments["values"])
    parameters = dict(arguments["parameters"] or {})
    mask, window = parameters.get("mask_str"), parameters.get("local_window_size", -1)
    if mask != "null" or window != -1:
        raise ValueError(f"mask_str: {mask!r} with a window of {window} is not allowed; none is")
    scale = constant_array(factor)
    if scale is None:
        raise ValueError("scale: a value of the graph is not allowed; a number is")
    import_kernels(Graph.current)
    return [attention(query, key, value, float(scale))]


def attention(
    query: TensorValue, key: TensorValue, value: TensorValue, scale: float
) -> TensorValue:
    """Returns ``softmax(scale * query @ key^T) @ value`` for each head of each image.

    Args:
        query: ``[N, queries, heads, channels]``; the heads and channels are known.
        key: ``[N, keys, heads, channels]``.
        value: The same.
        scale: The factor.

    Returns:
        A tensor of the query's shape and type.

    Raises:
        TypeError: An argument is not allowed.
        ValueError: The same.
    """
    if query.shape[0] == 1:
        return _of_image(query, key, value, scale, None)
    return _of_each_image(query, key, value, scale)


def _of_each_image(
    query: TensorValue, key: TensorValue, value: TensorValue, scale: float
) -> TensorValue:
    """Returns the attention of any number of images, one after the other."""
    images, device = query.shape[0], query.device
    count = ops.shape_to_tensor((images,))[0]
    numbers = ops.reshape(ops.range(0, images, 1, device=device, dtype=DType.int64), (-1, 1, 1, 1))

    def is_left(image: TensorValue, *_: TensorValue) -> TensorValue:
        return image < count

    def add_image(image: TensorValue, number: TensorValue, done: TensorValue) -> list[TensorValue]:
        result = _of_image(query, key, value, scale, image)
        there = ops.rebind(numbers, (images, 1, 1, 1)) == number
        return [
            image + 1,
            number + 1,
            ops.where(there, ops.broadcast_to(result, query.shape), done),
        ]

    # The number is in both memories: a copy within the loop would be captured with its address.
    first, number = (ops.constant(0, DType.int64, place) for place in (DeviceRef.CPU(), device))
    empty = ops.broadcast_to(ops.constant(0, query.dtype, device), query.shape)
    return ops.while_loop([first, number, empty], is_left, cast(Any, add_image))[-1].tensor


def _of_image(
    query: TensorValue,
    key: TensorValue,
    value: TensorValue,
    scale: float,
    image: TensorValue | None,
) -> TensorValue:
    """Returns the attention of an image, ``[1, queries, heads, channels]``.

    Args:
        query: As of ``attention``.
        key: The same.
        value: The same.
        scale: The same.
        image: Which one, in host memory; ``None`` where there is one only.
    """

    def matrix(x: TensorValue, head: int) -> TensorValue:
        """Returns a head's ``[tokens, channels]``."""
        shape = x.shape[1], x.shape[3]
        if image is not None or x.shape[2] != 1:
            place: Any = slice(None) if image is None else (slice(image, image + 1), 1)
            x = x[place, :, head]
        return ops.reshape(x, shape)

    heads = []
    for head in range(int(query.shape[2])):
        q, k, v = (matrix(x, head) for x in (query, key, value))
        heads.append(_of_head(q, k, v, scale))
    return ops.reshape(ops.stack(heads, axis=1) if heads[1:] else heads[0], (1, *query.shape[1:]))


def _of_head(query: TensorValue, key: TensorValue, value: TensorValue, scale: float) -> TensorValue:
    """Returns the attention of ``[queries, channels]`` over ``[keys, channels]``."""
    (queries, channels), keys = query.shape, key.shape[0]
    scores = _ops.conv2d(
        ops.reshape(query, (1, 1, queries, channels)),
        ops.reshape(key, (keys, 1, 1, channels)),
        filter_layout="KRSC",
        scale=scale,
        out_dtype=DType.float32,
    )
    shares = ops.softmax(scores).cast(query.dtype)
    means = _ops.conv2d(shares, ops.reshape(value, (1, 1, keys, channels)))
    return ops.reshape(means, (queries, channels))
