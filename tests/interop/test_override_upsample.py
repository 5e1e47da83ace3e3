"""``override_max``: ``ops.resize_nearest`` in front of a convolution becomes part of it.

Nothing is compiled here: the outputs of MAX's decoders, which have it, are in test_max_models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.interop.graphs import input_type

import maxconv


def built(
    size: Sequence[int] = (2, 2),
    modes: tuple[int, int] = (2, 2),
    filter: tuple[int, ...] = (3, 3, 6, 8),
    *,
    first: bool = False,
    both: bool = False,
    **arguments: Any,
) -> tuple[bool, list[str]]:
    """Whether the op enlarges, and the result's shape.

    Args:
        size: Factors along h and w; fractions are sizes.
        modes: How MAX finds a pixel, and how it rounds.
        filter: The filter's shape.
        first: Whether the image has its channels first, and is permuted.
        both: Whether channels are repeated too.
        arguments: Of ``ops.conv2d``.
    """
    from max.graph import Graph, ops

    shape: tuple[int | str, ...] = ("n", 6, "h", 5) if first else ("n", "h", 5, 6)
    with Graph("enlarged", input_types=[input_type(shape)]) as graph:
        x = graph.inputs[0].tensor
        sizes = list(x.shape)
        for axis, factor in zip((2, 3) if first else (1, 2), size, strict=True):
            sizes[axis] = sizes[axis] * factor
        if both:
            sizes[3] = sizes[3] * 2
        large = ops.resize_nearest(x, sizes, *modes)
        with maxconv.override_max() as report:
            y = ops.conv2d(
                ops.permute(large, [0, 2, 3, 1]) if first else large,
                np.zeros(filter, np.float32),
                **arguments,
            )
        graph.output(y)
    assert len(report.taken) == 1
    assert not report.left
    return "depth_to_space" in str(graph), [str(size) for size in y.shape]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("modes", [(2, 2), (0, 0), (0, 1)])
def test_what_repeats_pixels_is_taken(modes: tuple[int, int], first: bool) -> None:
    taken, shape = built(modes=modes, first=first, padding=(1, 1, 1, 1))
    assert taken
    assert shape == ["n", "h * 2", "10", "8"]
    taken, shape = built((1, 3), modes, first=first)
    assert taken
    assert shape[2] == "13"


@pytest.mark.parametrize(
    "arguments",
    [
        {"modes": (1, 2)},
        {"modes": (2, 3)},
        {"size": (9, 2)},
        {"filter": (1, 1, 6, 8)},
        {"filter": (3, 3, 1, 6), "groups": 6},
        {"stride": (2, 2)},
        {"filter": (3, 3, 12, 8), "both": True},
    ],
    ids=str,
)
def test_what_does_not_or_would_not_save_products_stays(arguments: dict[str, Any]) -> None:
    assert not built(**arguments)[0]


def test_modes_repeat_pixels_by_their_definition() -> None:
    """What MAX documents of them, for the factors that are looked for."""
    for factor in range(1, 9):
        places = np.arange(5 * factor)
        expected = places // factor
        half = (places + 0.5) / factor - 0.5
        assert (np.floor(places / factor) == expected).all()
        assert (np.clip(np.ceil(half - 0.5), 0, 4) == expected).all()
        assert (np.clip(np.floor(half + 0.5), 0, 4) == expected).all()
