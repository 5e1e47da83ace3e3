"""The descriptors of a convolution: their loads, tile by tile, against a padded image."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ptxemu.tma import (
    DataType,
    Fprop,
    L2Promotion,
    Swizzle,
    activation_descriptor,
    filter_descriptor,
    filter_offsets,
    load,
    pixel_coordinates,
    refusals,
    validate,
)

Array = npt.NDArray[Any]


def numbered(shape: tuple[int, ...]) -> Array:
    """16-bit numbers without zero; neighbours along every axis differ."""
    return (np.arange(math.prod(shape)) % 65521 + 1).astype(np.uint16).reshape(shape)


def in_order(shared_memory: Array, span: int, row_elements: int) -> Array:
    """The rows of a tile, 16-bit elements, with the swizzle undone.

    Written apart from the model: chunk ``j`` of line ``i`` of 128 bytes stands at ``j`` with its
    lowest ``log2(span / 16)`` bits exchanged by those of ``i``.
    """
    if not span:
        return shared_memory.view(np.uint16).reshape(-1, row_elements)
    size = -(-shared_memory.size // 128) * 128
    lines = np.zeros(size, np.uint8)
    lines[: shared_memory.size] = shared_memory
    chunks = lines.reshape(-1, 8, 16)
    ordered = np.empty_like(chunks)
    for i in range(len(chunks)):
        for j in range(8):
            ordered[i, j] = chunks[i, j ^ (i % (span // 16))]
    rows = ordered.reshape(-1)[: shared_memory.size].view(np.uint16).reshape(-1, span // 2)
    return rows[:, :row_elements]


def padded_image(problem: Fprop, activation: Array) -> Array:
    before_after = zip(problem.pad_before, problem.pad_after, strict=True)
    return np.pad(activation, [(0, 0), *before_after, (0, 0)])


def column(problem: Fprop, padded: Array, first: int, count: int, tap: Any) -> Array:
    """Rows ``first`` to ``first + count`` of the implicit GEMM's left matrix at one tap, ``[count,
    C]``: zeros behind the last output pixel.
    """
    shape = (problem.input_shape[0], *problem.output_size)
    rows = np.zeros((count, padded.shape[-1]), padded.dtype)
    for row, pixel in enumerate(itertools.islice(np.ndindex(*shape), first, first + count)):
        n, *at = pixel
        where = [
            p * s + r * d
            for p, s, r, d in zip(at, problem.stride, tap, problem.dilation, strict=True)
        ]
        index = (n, *where)
        rows[row] = padded[index]
    return rows


FILTERS = st.integers(1, 9)


@st.composite
def problems(draw: st.DrawFn) -> Fprop:
    """Problems of every rank that TMA can take."""
    rank = draw(st.integers(1, 3))
    largest = {1: 24, 2: 9, 3: 6}[rank]

    def per_axis(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    size, taps = per_axis(1, largest), per_axis(1, 4)
    stride, dilation = per_axis(1, 4), per_axis(1, 3)
    before, after = per_axis(0, 5), per_axis(0, 5)
    spans = [d * (r - 1) + 1 for r, d in zip(taps, dilation, strict=True)]
    padded = [sum(sides) for sides in zip(size, before, after, strict=True)]
    assume(all(span <= extent for span, extent in zip(spans, padded, strict=True)))
    batch, channels, filters = draw(st.integers(1, 3)), 8 * draw(st.integers(1, 5)), draw(FILTERS)
    return Fprop(
        (batch, *size, channels),
        (filters, *taps, channels),
        stride=stride,
        dilation=dilation,
        pad_before=before,
        pad_after=after,
    )


SWIZZLES = st.sampled_from([Swizzle.NONE, Swizzle.B32, Swizzle.B64, Swizzle.B128])


@settings(deadline=None, max_examples=150)
@given(problem=problems(), swizzle=SWIZZLES, data=st.data())
def test_the_loads_of_all_tiles_and_taps_are_im2col(
    problem: Fprop, swizzle: Swizzle, data: st.DataObject
) -> None:
    channels = 8 * data.draw(st.integers(1, (swizzle.span or 128) // 16))
    pixels = data.draw(st.integers(1, 70))
    activation = numbered(problem.input_shape)
    descriptor = activation_descriptor(
        problem,
        DataType.UINT16,
        channels_per_pixel=channels,
        pixels_per_column=pixels,
        swizzle=swizzle,
    )
    padded = padded_image(problem, activation)
    taps = list(np.ndindex(*problem.filter_shape[1:-1]))
    offsets = filter_offsets(problem)
    rows = problem.input_shape[0] * math.prod(problem.output_size)
    assert len(offsets) == len(taps) == problem.taps
    for tap, offset in zip(taps, offsets, strict=True):
        for first in range(0, rows, pixels):
            wanted = column(problem, padded, first, pixels, tap)
            wide = np.pad(wanted, [(0, 0), (0, channels)])
            for channel in range(0, problem.input_shape[-1], channels):
                where = pixel_coordinates(problem, first, channel)
                tile = in_order(load(descriptor, activation, where, offset), swizzle.span, channels)
                assert np.array_equal(tile, wide[:, channel : channel + channels])


@settings(deadline=None, max_examples=150)
@given(problem=problems(), swizzle=SWIZZLES, data=st.data())
def test_the_loads_of_the_filter_are_its_taps(
    problem: Fprop, swizzle: Swizzle, data: st.DataObject
) -> None:
    channels = 8 * data.draw(st.integers(1, (swizzle.span or 128) // 16))
    count = data.draw(st.integers(1, 12))
    descriptor = filter_descriptor(
        problem, DataType.UINT16, filters=count, channels=channels, swizzle=swizzle
    )
    krsc = numbered(problem.filter_shape)
    wide = np.pad(krsc, [(0, count), *[(0, 0)] * problem.spatial_rank, (0, channels)])
    for number, tap in enumerate(np.ndindex(*problem.filter_shape[1:-1])):
        for k in range(0, problem.filter_shape[0], count):
            for c in range(0, problem.input_shape[-1], channels):
                tile = in_order(load(descriptor, krsc, (c, number, k)), swizzle.span, channels)
                index = (slice(k, k + count), *tap, slice(c, c + channels))
                assert np.array_equal(tile, wide[index])


def made(arguments: dict[str, Any]) -> Fprop:
    """A problem; ``padding`` is before and after each dimension."""
    padding = arguments.pop("padding", ())
    return Fprop(**arguments, pad_before=padding[0::2], pad_after=padding[1::2])


def make(**changes: Any) -> Fprop:
    """A 2-D problem with some arguments changed."""
    arguments: dict[str, Any] = {
        "input_shape": (2, 20, 24, 64),
        "filter_shape": (32, 3, 5, 64),
    }
    return made(arguments | changes)


def test_the_fields_of_both_descriptors() -> None:
    problem = make(stride=(2, 1), dilation=(3, 2), padding=(1, 2, 3, 4))
    activation = activation_descriptor(
        problem,
        DataType.BFLOAT16,
        channels_per_pixel=64,
        pixels_per_column=256,
        l2_promotion=L2Promotion.L2_128B,
        global_address=4096,
    )
    assert activation.global_address == 4096
    assert activation.global_dim == (64, 24, 20, 2)
    assert activation.global_strides == (128, 3072, 61440)
    assert activation.pixel_box_lower_corner == (-3, -1)
    assert activation.pixel_box_upper_corner == (4 - 8, 2 - 6)
    assert activation.element_strides == (1, 1, 2, 1)
    assert activation.pixels_per_column == 256
    assert activation.l2_promotion is L2Promotion.L2_128B
    assert activation.swizzle is Swizzle.B128
    filters = filter_descriptor(
        problem, DataType.BFLOAT16, filters=32, channels=64, global_address=8192
    )
    assert filters.global_address == 8192
    assert filters.global_dim == (64, 15, 32)
    assert filters.global_strides == (128, 1920)
    assert filters.box_dim == (64, 1, 32)
    assert validate(activation) == validate(filters) == []
    assert filter_offsets(problem)[:6] == [(0, 0), (2, 0), (4, 0), (6, 0), (8, 0), (0, 3)]


def test_groups_that_fill_whole_boxes() -> None:
    problem = make(filter_shape=(32, 3, 5, 32), groups=2)
    assert refusals(problem, DataType.FLOAT16, channels_per_pixel=32) == []
    filters = filter_descriptor(problem, DataType.FLOAT16, filters=16, channels=32)
    assert filters.global_dim == (32, 15, 32)


def along(size: int, **changes: Any) -> Fprop:
    """A 1-D problem of 16 channels."""
    arguments: dict[str, Any] = {
        "input_shape": (1, size, 16),
        "filter_shape": (8, 2, 16),
    }
    return made(arguments | changes)


def in_space(**changes: Any) -> Fprop:
    """A 3-D problem of 16 channels."""
    arguments: dict[str, Any] = {
        "input_shape": (1, 60, 60, 60, 16),
        "filter_shape": (8, 2, 2, 2, 16),
    }
    return made(arguments | changes)


TILE: dict[str, Any] = {"channels_per_pixel": 16}
REASONS: list[tuple[Fprop, dict[str, Any], list[str]]] = [
    (
        make(input_shape=(2, 20, 24, 3), filter_shape=(32, 3, 5, 3)),
        TILE,
        ["input: 3 channels of 16 bits are 6 bytes; multiples of 16 bytes are allowed"],
    ),
    (
        make(filter_shape=(64, 3, 5, 1), groups=64),
        TILE,
        [
            "input: 1 channels in each of 64 groups of 16 bits are 2 bytes; multiples of 16 bytes "
            "are allowed"
        ],
    ),
    (
        make(filter_shape=(32, 3, 5, 8), groups=8),
        TILE,
        [
            "groups: 8 channels a group are no multiple of the 16 that one load moves: it would "
            "read the next group's"
        ],
    ),
    (make(stride=(1, 9)), TILE, ["stride: 9 along w; at most 8 is allowed"]),
    (
        make(padding=(129, 0, 0, 128)),
        TILE,
        [
            "padding: the lower corner along h would be -129; -128 to 127 are allowed in 2 spatial "
            "dimensions"
        ],
    ),
    (
        make(padding=(0, 0, 0, 132)),
        TILE,
        [
            "padding: the upper corner along w would be 128; -128 to 127 are allowed in 2 spatial "
            "dimensions"
        ],
    ),
    (
        make(input_shape=(1, 400, 24, 64), dilation=(65, 1)),
        TILE,
        [
            "padding: the upper corner along h would be -130; -128 to 127 are allowed in 2 spatial "
            "dimensions"
        ],
    ),
    (
        make(input_shape=(1, 400, 24, 64), dilation=(128, 1), padding=(0, 128, 0, 0)),
        TILE,
        [
            "dilation: the last tap's offset along h would be 256; at most 255 is allowed in 2 "
            "spatial dimensions"
        ],
    ),
    (
        along(70000, padding=(32769, 0)),
        TILE,
        [
            "padding: the lower corner along w would be -32769; -32768 to 32767 are allowed in 1 "
            "spatial dimensions"
        ],
    ),
    (
        along(70000, padding=(0, 40000), dilation=(65536,)),
        TILE,
        [
            "dilation: the last tap's offset along w would be 65536; at most 65535 is allowed in 1 "
            "spatial dimensions"
        ],
    ),
    (
        in_space(padding=(0, 0, 17, 0, 0, 0)),
        TILE,
        [
            "padding: the lower corner along h would be -17; -16 to 15 are allowed in 3 spatial "
            "dimensions"
        ],
    ),
    (
        in_space(padding=(0, 16, 0, 0, 0, 0), dilation=(32, 1, 1)),
        TILE,
        [
            "dilation: the last tap's offset along d would be 32; at most 31 is allowed in 3 "
            "spatial dimensions"
        ],
    ),
    (
        make(),
        {"channels_per_pixel": 64, "swizzle": Swizzle.B32, "pixels_per_column": 1100},
        [
            "activation: channels_per_pixel: 64 (128 bytes); at most 32 bytes are allowed (a row "
            "fits the span of CU_TENSOR_MAP_SWIZZLE_32B)",
            "activation: pixels_per_column: 1100; 1 to 1024 are allowed (the driver's limit on a "
            "column)",
            "filter: box_dim[0]: 64 (128 bytes); at most 32 bytes are allowed (a row fits the "
            "span of CU_TENSOR_MAP_SWIZZLE_32B)",
        ],
    ),
    (
        along((1 << 31) + 1),
        TILE,
        [
            "activation: pixel_box_upper_corner[0]: -1; at most -2 is allowed (the box's end, the "
            "W size 2147483649 plus this, is a number of 32 bits)",
            "input: a size of 2147483649; coordinates have 32 bits with their sign",
        ],
    ),
    (
        make(input_shape=(0, 20, 24, 64)),
        TILE,
        [
            "activation: global_dim[3]: 0; 1 to 4294967296 are allowed (the driver's limit on a "
            "size)"
        ],
    ),
]


@pytest.mark.parametrize(("problem", "tile", "reasons"), REASONS)
def test_why_tma_cannot_take_a_problem(
    problem: Fprop, tile: dict[str, Any], reasons: list[str]
) -> None:
    assert refusals(problem, DataType.BFLOAT16, **tile) == reasons
    with pytest.raises(ValueError) as raised:
        activation_descriptor(problem, DataType.BFLOAT16, **tile)
    message = str(raised.value)
    assert message == f"problem: {problem} cannot be loaded by TMA: {'; '.join(reasons)}"


def test_a_filter_that_tma_cannot_take() -> None:
    with pytest.raises(ValueError, match=r"cannot be loaded by TMA: stride: 9 along h; at most 8"):
        filter_descriptor(make(stride=(9, 1)), DataType.FLOAT16, filters=32, channels=64)
    with pytest.raises(ValueError, match=r"cannot be loaded by TMA: box_dim\[2\]: 257; 1 to 256"):
        filter_descriptor(make(), DataType.FLOAT16, filters=257, channels=64)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"input_shape": ("batch", 20, 24, 64)},
        TypeError,
        "input_shape: ('batch', 20, 24, 64) holds a str; integers are allowed",
    ),
    (
        {"input_shape": (20, 64)},
        ValueError,
        "input_shape: (20, 64); 3 to 5 sizes are allowed",
    ),
    ({"stride": (1, 0)}, ValueError, "stride: (1, 0); 2 numbers from 1 on are allowed"),
    ({"dilation": (1, 1, 1)}, ValueError, "dilation: (1, 1, 1); 2 numbers from 1 on are allowed"),
    ({"pad_after": (-1, 0)}, ValueError, "pad_after: (-1, 0); 2 numbers from 0 on are allowed"),
    ({"groups": True}, TypeError, "groups: True holds a bool; integers are allowed"),
    (
        {"groups": 2},
        ValueError,
        "filter_shape: (32, 3, 5, 64); 4 sizes are allowed, of which the last times 2 groups is "
        "64, the input's",
    ),
]


@pytest.mark.parametrize(("changes", "kind", "message"), WRONG)
def test_a_problem_that_is_none(
    changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {"input_shape": (2, 20, 24, 64), "filter_shape": (32, 3, 5, 64)}
    with pytest.raises(kind) as raised:
        Fprop(**(arguments | changes))
    assert str(raised.value) == message


@pytest.mark.parametrize(
    "problem",
    [
        along(70000, padding=(32768, 32768)),
        along(70000, padding=(0, 32767), dilation=(65535,)),
        make(padding=(128, 129, 128, 131)),
        make(
            input_shape=(1, 400, 24, 64),
            filter_shape=(8, 2, 1, 64),
            dilation=(255, 1),
            padding=(0, 127, 0, 0),
        ),
        in_space(padding=(16, 16, 16, 16, 16, 16)),
        in_space(padding=(0, 15, 0, 15, 0, 15), dilation=(31, 31, 31)),
    ],
)
def test_the_farthest_corners_and_offsets_are_taken(problem: Fprop) -> None:
    assert refusals(problem, DataType.FLOAT16, channels_per_pixel=16) == []
