"""The oracle: convolutions in float64, written as the definition reads.

Rank-agnostic and channels last: an activation is ``[N, *spatial, C]``, a filter
``[K, *taps, C / groups]``. One loop
over the taps; numpy does the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def conv_reference(
    x: npt.ArrayLike,
    w_krsc: npt.ArrayLike,
    *,
    stride: Sequence[int],
    dilation: Sequence[int],
    pad_before: Sequence[int],
    pad_after: Sequence[int],
    groups: int = 1,
    bias: npt.ArrayLike | None = None,
    activation: Callable[[Floats], Floats] | None = None,
    residual: npt.ArrayLike | None = None,
    beta: float = 1.0,
    final_activation: Callable[[Floats], Floats] | None = None,
) -> Floats:
    """Returns ``final(activation(conv(x, w) + bias) + beta * residual)``, ``[N, *out, K]``."""
    image = np.asarray(x, dtype=np.float64)
    filters = np.asarray(w_krsc, dtype=np.float64)
    taps = filters.shape[1:-1]
    padding = [(0, 0), *zip(pad_before, pad_after, strict=True), (0, 0)]
    image = np.pad(image, padding)
    out = tuple(
        (image.shape[1 + i] - dilation[i] * (taps[i] - 1) - 1) // stride[i] + 1
        for i in range(len(taps))
    )
    count, per_group = filters.shape[0], filters.shape[-1]
    result = np.zeros((image.shape[0], *out, count))
    for tap in itertools.product(*map(range, taps)):
        window = tuple(
            slice(t * d, t * d + (o - 1) * s + 1, s)
            for t, d, o, s in zip(tap, dilation, out, stride, strict=True)
        )
        at: tuple[Any, ...] = (slice(None), *window)
        pixels = image[at]
        for group in range(groups):
            k = slice(group * count // groups, (group + 1) * count // groups)
            c = slice(group * per_group, (group + 1) * per_group)
            part: tuple[Any, ...] = (k, *tap)
            result[..., k] += pixels[..., c] @ filters[part].T
    if bias is not None:
        result = result + np.asarray(bias, dtype=np.float64)
    if activation is not None:
        result = activation(result)
    if residual is not None:
        result = result + beta * np.asarray(residual, dtype=np.float64)
    if final_activation is not None:
        result = final_activation(result)
    return result


def conv_transpose_reference(
    x: npt.ArrayLike,
    w_krsc: npt.ArrayLike,
    *,
    stride: Sequence[int],
    dilation: Sequence[int],
    pad_before: Sequence[int],
    pad_after: Sequence[int],
    output_padding: Sequence[int],
    groups: int = 1,
    bias: npt.ArrayLike | None = None,
) -> Floats:
    """Returns the transposed convolution ``[N, *out, K]``: every input scatters a scaled filter.

    ``w_krsc`` is the filter of the convolution that is transposed, ``[C, *taps, K / groups]``.
    """
    image = np.asarray(x, dtype=np.float64)
    filters = np.asarray(w_krsc, dtype=np.float64)
    taps, group_filters = filters.shape[1:-1], filters.shape[-1]
    rank = len(taps)
    size = image.shape[1:-1]
    # Room for what output_padding asks for beyond the last scattered element.
    full = tuple(
        (size[i] - 1) * stride[i] + dilation[i] * (taps[i] - 1) + 1 + output_padding[i]
        for i in range(rank)
    )
    result = np.zeros((image.shape[0], *full, group_filters * groups))
    per_group = image.shape[-1] // groups
    for tap in itertools.product(*map(range, taps)):
        window = tuple(
            slice(t * d, t * d + (n - 1) * s + 1, s)
            for t, d, n, s in zip(tap, dilation, size, stride, strict=True)
        )
        for group in range(groups):
            c = slice(group * per_group, (group + 1) * per_group)
            k = slice(group * group_filters, (group + 1) * group_filters)
            at: tuple[Any, ...] = (slice(None), *window, k)
            part: tuple[Any, ...] = (c, *tap)
            result[at] += image[..., c] @ filters[part]
    kept = tuple(slice(pad_before[i], full[i] - pad_after[i]) for i in range(rank))
    inside: tuple[Any, ...] = (slice(None), *kept)
    cropped: Floats = result[inside]
    return cropped if bias is None else cropped + np.asarray(bias, dtype=np.float64)


def pool_reference(
    x: npt.ArrayLike,
    window: Sequence[int],
    *,
    stride: Sequence[int],
    dilation: Sequence[int],
    pad_before: Sequence[int],
    pad_after: Sequence[int],
    output: Sequence[int],
    average: bool,
    count_boundary: bool = True,
) -> Floats:
    """Returns the largest element or the mean of each window, ``[N, *output, C]``.

    A window counts those of its elements that lie in the input; with ``count_boundary`` a mean also
    counts those in the padding, but nothing behind it.
    """
    image = np.asarray(x, dtype=np.float64)
    result = np.zeros((image.shape[0], *output, image.shape[-1]))
    for place in itertools.product(*map(range, output)):
        inside, counted = [], 0
        for tap in itertools.product(*map(range, window)):
            at = [
                p * s + t * d - before
                for p, s, t, d, before in zip(place, stride, tap, dilation, pad_before, strict=True)
            ]
            sizes = image.shape[1:-1]
            if all(0 <= a < size for a, size in zip(at, sizes, strict=True)):
                inside.append(image[_element(at)])
                counted += 1
            elif count_boundary:
                ends = (size + after for size, after in zip(sizes, pad_after, strict=True))
                counted += all(a < end for a, end in zip(at, ends, strict=True))
        values = np.stack(inside or [np.full((image.shape[0], image.shape[-1]), -np.inf)])
        result[_element(place)] = values.sum(0) / counted if average else values.max(0)
    return result


def attention_reference(
    query: npt.ArrayLike, key: npt.ArrayLike, value: npt.ArrayLike, *, scale: float
) -> Floats:
    """Returns the attention of ``[N, tokens, heads, channels]``, each head of each image."""
    q, k, v = (np.asarray(given, dtype=np.float64) for given in (query, key, value))
    scores = np.einsum("nqhc,nkhc->nhqk", q, k) * scale
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    means: Floats = np.einsum("nhqk,nkhc->nqhc", shares / shares.sum(-1, keepdims=True), v)
    return means


def _element(place: Sequence[int]) -> tuple[Any, ...]:
    """The index of a pixel's channels in all images."""
    return (slice(None), *place)
