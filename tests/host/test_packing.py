"""Packed filters against their definition, element by element."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import maxconv
from maxconv._checks import LAYOUTS
from maxconv._fields import PANEL
from maxconv._packing import (
    PackedFilter,
    bfloat16_to_float32,
    cast_array,
    float8_to_float32,
    float8_wide_to_float32,
    float32_to_bfloat16,
    float32_to_float8,
    float32_to_float8_wide,
    pack_filter,
    packed_length,
    read_array,
    to_krsc,
)

Array = npt.NDArray[Any]

# (filters, taps, channels a group, groups): whole panels, part of one, several, one filter only.
SHAPES = [
    (16, (3, 3), 4, 1),
    (5, (2, 3), 3, 1),
    (33, (1, 1), 7, 1),
    (48, (3, 2), 2, 3),
    (34, (2, 2), 3, 2),
    (6, (3, 3), 1, 6),
    (12, (3, 3), 1, 6),
    (4, (2, 2), 2, 4),
    (1, (3, 3), 1, 1),
    (7, (5,), 3, 1),
    (8, (4,), 1, 8),
    (18, (2, 3, 2), 4, 2),
    (3, (2, 2, 2), 1, 3),
]


def coordinate_coded(filters: int, taps: tuple[int, ...], channels: int) -> Array:
    """Returns ``[K, *taps, C / groups]`` whose elements differ: a swapped index cannot hide."""
    shape = (filters, *taps, channels)
    return np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)


def in_layout(krsc: Array, layout: str) -> Array:
    """Writes ``[K, *taps, C]`` in another layout, by loops over its coordinates."""
    rank = krsc.ndim - 2
    own, default, _ = LAYOUTS[rank]
    filters, *taps, channels = krsc.shape
    shape = {own: krsc.shape, default: (*taps, channels, filters)}.get(
        layout, (filters, channels, *taps)
    )
    out = np.empty(shape, krsc.dtype)
    for k, *tap, c in itertools.product(*map(range, krsc.shape)):
        at = {own: (k, *tap, c), default: (*tap, c, k)}.get(layout, (k, c, *tap))
        source = (k, *tap, c)
        out[at] = krsc[source]
    return out


def packed_by_definition(krsc: Array, groups: int, *, paired: bool = False) -> Array:
    """The packing formula, one element at a time, over an array that starts as zeros; ``paired`` as
    types of 16 bits are, in filter rows of 32 products."""
    filters, *taps, channels = krsc.shape
    per_group = filters // groups
    tap_list = list(itertools.product(*map(range, taps)))
    if channels == 1 and per_group == 1:
        out = np.zeros(len(tap_list) * filters, krsc.dtype)
        for (i, tap), k in itertools.product(enumerate(tap_list), range(filters)):
            source = (k, *tap, 0)
            out[i * filters + k] = krsc[source]
        return out
    panels = (per_group + PANEL - 1) // PANEL
    row = taps[-1] * channels
    row_depth = -(-row // 32) * 32 if paired else row
    depth = len(tap_list) // taps[-1] * row_depth
    out = np.zeros(groups * panels * depth * PANEL, krsc.dtype)
    for filter_index, (i, tap), c in itertools.product(
        range(filters), enumerate(tap_list), range(channels)
    ):
        group, within = divmod(filter_index, per_group)
        panel, lane = divmod(within, PANEL)
        element = (filter_index, *tap, c)
        k = i // taps[-1] * row_depth + i % taps[-1] * channels + c
        at = k * PANEL + lane
        if paired:
            at = (k // 2 * PANEL + lane) * 2 + k % 2
        out[(group * panels + panel) * depth * PANEL + at] = krsc[element]
    return out


@pytest.mark.parametrize(("filters", "taps", "channels", "groups"), SHAPES)
def test_every_layout_packs_as_the_definition_says(
    filters: int, taps: tuple[int, ...], channels: int, groups: int
) -> None:
    krsc = coordinate_coded(filters, taps, channels)
    for dtype, layout in itertools.product(("float32", "float16"), LAYOUTS[len(taps)]):
        expected = packed_by_definition(krsc, groups, paired=dtype == "float16")
        source = in_layout(krsc, layout)
        np.testing.assert_array_equal(to_krsc(source, layout), krsc)
        before = source.copy()
        packed = pack_filter(source, layout, groups=groups, dtype=dtype)
        np.testing.assert_array_equal(packed.data, expected)
        np.testing.assert_array_equal(packed.unpack(), krsc)
        np.testing.assert_array_equal(source, before)
        assert not np.may_share_memory(packed.data, source)
        assert (packed.filters, packed.filter_size) == (filters, taps)
        assert (packed.group_channels, packed.groups) == (channels, groups)
        assert (packed.channels, packed.spatial_rank) == (channels * groups, len(taps))
        assert packed.taps == int(np.prod(taps))
        assert packed.is_depthwise == (channels == 1 and filters == groups)
        assert packed.nbytes == packed.data.nbytes
        assert packed.data.size == packed_length(
            taps, filters=filters, group_channels=channels, groups=groups, dtype=dtype
        )


@pytest.mark.parametrize(
    ("width", "dtype", "side"),
    [(2, "int8", 1), (4, "int8", 4), (8, "int8", 4), (2, "float16", 2), (8, "float16", 2)],
)
def test_narrow_groups_share_panels(width: int, dtype: str, side: int) -> None:
    """As many products of a filter lie side by side as a type has, if a group has as many."""
    filters, taps = 48, (2, 3)
    krsc = coordinate_coded(filters, taps, width) % 251 - 125
    packed = pack_filter(krsc, "KRSC", groups=filters // width, dtype=dtype)
    depth = 6 * width
    panels = packed.data.reshape(filters // PANEL, -1)
    elements = panels[:, : depth * PANEL].reshape(-1, depth // side, PANEL, side)
    lanes = elements.transpose(0, 2, 1, 3).reshape(filters, depth)
    np.testing.assert_array_equal(lanes, krsc.reshape(filters, depth))
    sums = panels[:, depth * PANEL :].copy().view(np.int32).reshape(-1)
    expected = krsc.reshape(filters, depth).sum(axis=1) if side == 4 else []
    np.testing.assert_array_equal(sums, expected)
    np.testing.assert_array_equal(packed.unpack(), krsc)


def test_strided_and_readonly_arrays_pack_alike() -> None:
    krsc = coordinate_coded(20, (3, 3), 4)
    expected = packed_by_definition(krsc, 1)
    wide = np.repeat(krsc, 2, axis=3)
    np.testing.assert_array_equal(pack_filter(wide[..., ::2], "KRSC").data, expected)
    fortran = np.asfortranarray(krsc)
    fortran.flags.writeable = False
    np.testing.assert_array_equal(pack_filter(fortran, "KRSC").data, expected)
    big_endian = krsc.astype(">f4")
    np.testing.assert_array_equal(pack_filter(big_endian, "KRSC").data, expected)


def test_packed_data_is_readonly() -> None:
    packed = pack_filter(coordinate_coded(3, (1, 1), 2), "KRSC")
    with pytest.raises(ValueError, match="read-only"):
        packed.data[0] = 1


def test_types() -> None:
    values = coordinate_coded(17, (2, 2), 3)
    for source, dtype, expected in (
        (np.float32, None, "float32"),
        (np.float64, None, "float32"),
        (np.float16, None, "float16"),
        (np.float32, "float16", "float16"),
        (np.float64, "bfloat16", "bfloat16"),
        (np.float16, "bfloat16", "bfloat16"),
        (np.float16, "float32", "float32"),
    ):
        packed = pack_filter(values.astype(source), "KRSC", dtype=dtype)
        assert packed.dtype == expected
        data = packed.data
        # These integers are exact in every type.
        wide = bfloat16_to_float32(data) if expected == "bfloat16" else data.astype(np.float32)
        paired = expected != "float32"
        np.testing.assert_array_equal(wide, packed_by_definition(values, 1, paired=paired))


def test_torch_tensors_pack_without_a_detour() -> None:
    torch = pytest.importorskip("torch")
    krsc = coordinate_coded(18, (3, 2), 2)
    expected = packed_by_definition(krsc, 1)
    fcrs = torch.tensor(in_layout(krsc, "FCRS"))
    for tensor in (fcrs, torch.nn.Parameter(fcrs), fcrs.to(memory_format=torch.channels_last)):
        np.testing.assert_array_equal(pack_filter(tensor, "FCRS").data, expected)
    half = pack_filter(fcrs.to(torch.float16), maxconv.FilterLayout.FCRS)
    paired = packed_by_definition(krsc, 1, paired=True)
    np.testing.assert_array_equal(half.data, paired.astype(np.float16))
    brain = pack_filter(torch.nn.Parameter(fcrs.to(torch.bfloat16)), "FCRS")
    assert brain.dtype == "bfloat16"
    np.testing.assert_array_equal(bfloat16_to_float32(brain.data), paired)


def test_max_buffers_pack() -> None:
    from max.driver import Buffer
    from max.dtype import DType

    krsc = coordinate_coded(20, (1, 2), 2)
    expected = packed_by_definition(krsc, 1)
    np.testing.assert_array_equal(pack_filter(Buffer.from_numpy(krsc), "KRSC").data, expected)
    bits = Buffer.from_numpy(float32_to_bfloat16(krsc)).view(DType.bfloat16)
    np.testing.assert_array_equal(
        bfloat16_to_float32(pack_filter(bits, "KRSC").data),
        packed_by_definition(krsc, 1, paired=True),
    )


def test_bfloat16_rounds_as_torch_does(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    special = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x00000001, 0x3F808000]
    special += [0x3F818000, 0x3F807FFF, 0x3F808001, 0x7F7F8000, 0x00008000]
    values = np.concatenate([bits, np.array(special, np.uint32)]).view(np.float32)
    ours = float32_to_bfloat16(values)
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    nan = np.isnan(values)
    np.testing.assert_array_equal(ours[~nan], theirs[~nan])
    assert np.isnan(bfloat16_to_float32(ours[nan])).all()
    # Every bfloat16 is a float32 and comes back as itself.
    every = np.arange(2**16, dtype=np.uint16)
    wide = bfloat16_to_float32(every)
    finite = ~np.isnan(wide)
    np.testing.assert_array_equal(float32_to_bfloat16(wide)[finite], every[finite])


def test_cast_array_copies_only_to_convert() -> None:
    values = np.ones(3, np.float32)
    assert cast_array(values, "float32", "float32") is values
    assert cast_array(values, "float32", "float16").dtype == np.float16
    assert cast_array(float32_to_bfloat16(values), "bfloat16", "float16").tolist() == [1, 1, 1]
    array, kind = read_array("x", values)
    assert kind == "float32"
    assert np.shares_memory(array, values)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([1.0, 2.0], "KRSC", 1), TypeError, ["filter", "list", "numpy array"]),
        ((np.ones((3, 3), np.float32), "KRSC", 1), ValueError, ["filter", "(3, 3)", "rank 4"]),
        ((np.ones((2, 3, 3, 4), int), "KRSC", 1), ValueError, ["filter", "int64", "float32"]),
        ((np.ones((2, 3, 3, 4), bool), "KRSC", 1), ValueError, ["filter", "bool", "float32"]),
        ((np.ones((2, 3, 3, 4)), "CRSK", 1), ValueError, ["filter_layout", "CRSK", "KRSC", "FCRS"]),
        ((np.ones((2, 3, 3, 4)), "X", 1), ValueError, ["filter_layout", "X", "KRSC", "SCF"]),
        ((np.ones((2, 3, 3, 4)), 7, 1), TypeError, ["filter_layout", "7", "KRSC"]),
        ((np.ones((3, 3, 3, 4)), "KRSC", 2), ValueError, ["filter", "3 filters", "groups=2"]),
        ((np.ones((3, 3, 3, 4)), "KRSC", 0), ValueError, ["groups", "0", "at least 1"]),
        ((np.ones((3, 3, 3, 4)), "KRSC", 1.0), TypeError, ["groups", "float", "integers"]),
        ((np.ones((3, 0, 3, 4)), "KRSC", 1), ValueError, ["filter", "(3, 0, 3, 4)", "at least 1"]),
        ((np.ones((0, 3, 3, 4)), "KRSC", 1), ValueError, ["filter", "(0, 3, 3, 4)", "at least 1"]),
        ((np.ones((4, 3, 3, 0)), "KRSC", 1), ValueError, ["filter", "(4, 3, 3, 0)", "at least 1"]),
    ],
)
def test_errors_name_argument_value_and_allowed(
    arguments: tuple[Any, Any, Any], error: type[Exception], words: list[str]
) -> None:
    array, layout, groups = arguments
    with pytest.raises(error) as caught:
        pack_filter(array, layout, groups=groups)
    for word in words:
        assert word in str(caught.value)


def test_packed_filter_refuses_contradicting_fields() -> None:
    data = np.zeros(9 * 4 * 16, np.float32)
    assert PackedFilter(8, 4, (3, 3), 1, "float32", data.copy()).taps == 9
    whole_rows = np.zeros(3 * 32 * 16, np.float16)
    assert PackedFilter(8, 4, (3, 3), 1, "float16", whole_rows).channels == 4
    with pytest.raises(ValueError, match=r"576 elements do not match 1152 .* layout PACKED"):
        PackedFilter(17, 4, (3, 3), 1, "float32", data)
    with pytest.raises(ValueError, match="dtype float32 does not hold float16"):
        PackedFilter(8, 4, (3, 3), 1, "float16", np.zeros(3 * 32 * 16, np.float32))
    with pytest.raises(ValueError, match="dtype float64 is not supported; float32, bfloat16"):
        PackedFilter(8, 4, (3, 3), 1, "float64", data)
    with pytest.raises(ValueError, match="8 filters are not divisible by groups=3"):
        PackedFilter(8, 4, (3, 3), 3, "float32", data)
    with pytest.raises(TypeError, match=r"filters: 8.0 holds a float"):
        PackedFilter(8.0, 4, (3, 3), 1, "float32", data)  # type: ignore[arg-type]


def float8_value(code: int) -> float:
    """A sign, 4 bits of exponent with bias 7, 3 of mantissa; all ones is NaN."""
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return float("nan")
    fraction = mantissa / 8 + (exponent > 0)
    return (-1.0) ** sign * fraction * 2.0 ** (max(exponent, 1) - 7)


def test_float8_is_widened_exactly() -> None:
    wanted = [float8_value(code) for code in range(256)]
    np.testing.assert_array_equal(float8_to_float32(np.arange(256)), np.array(wanted, np.float32))


def test_float8_rounds_to_nearest_and_ties_to_even() -> None:
    values = np.array([float8_value(code) for code in range(127)], np.float32)
    assert (float32_to_float8(values) == np.arange(127)).all()
    halves = (values[:-1] + values[1:]) / 2
    below, above = np.nextafter(halves, np.float32(0)), np.nextafter(halves, np.float32(500))
    codes = np.arange(126)
    assert (float32_to_float8(below) == codes).all()
    assert (float32_to_float8(above) == codes + 1).all()
    assert (float32_to_float8(halves) == codes + codes % 2).all()
    assert (float32_to_float8(-halves) == codes + codes % 2 + 128).all()
    # 464 is halfway to the number that would follow the largest.
    edges = np.array([464, 464.1, 480, 1e30, np.inf, np.nan], np.float32)
    assert float32_to_float8(edges).tolist() == [126, *[127] * 5]


def test_float8_of_five_bits_of_exponent() -> None:
    codes = np.arange(256)
    values = float8_wide_to_float32(codes)
    exponents, mantissas = (codes >> 2) & 31, codes & 3
    signs = np.where(codes < 128, 1.0, -1.0)
    normal = signs * (4 + mantissas) * 2.0 ** (exponents - 17)
    wanted = np.where(exponents > 0, normal, signs * mantissas * 2.0**-16)
    finite = exponents < 31
    np.testing.assert_array_equal(values[finite], wanted[finite])
    np.testing.assert_array_equal(float32_to_float8_wide(values[finite]), codes[finite])
    # Halfway between neighbours the even one wins; above it the farther from 0.
    low, high = values[:123], values[1:124]
    halves = (low + high) / 2
    assert (float32_to_float8_wide(halves) == codes[:123] + codes[:123] % 2).all()
    assert (float32_to_float8_wide(np.nextafter(halves, np.float32(0))) == codes[:123]).all()
    assert (float32_to_float8_wide(np.nextafter(halves, high)) == codes[1:124]).all()
    edges = np.array([61439, 61440, 1e30, np.inf, -np.inf, np.nan], np.float32)
    assert float32_to_float8_wide(edges).tolist() == [123, 124, 124, 124, 252, 126]


def test_filters_of_int8() -> None:
    values = np.array([-127.4, -1.5, 0.5, 2.5, 127.4]).reshape(5, 1, 1, 1)
    packed = pack_filter(values, "KRSC", dtype="int8")
    assert packed.data.dtype == np.int8
    np.testing.assert_array_equal(packed.unpack().reshape(-1), [-127, -2, 0, 2, 127])
    exact = np.arange(-128, 128, dtype=np.int8).reshape(256, 1, 1, 1)
    np.testing.assert_array_equal(pack_filter(exact, "KRSC").unpack(), exact)
    for beyond in (127.5, np.nan):
        with pytest.raises(ValueError, match=r"filter: a value of magnitude .* is beyond int8; va"):
            pack_filter(np.full((1, 1, 1, 1), beyond), "KRSC", dtype="int8")


def test_float8_filters() -> None:
    values = np.random.default_rng(3).standard_normal((5, 3, 3, 4)).astype(np.float32)
    packed = pack_filter(values, "KRSC", dtype="float8_e4m3fn")
    assert packed.nbytes == 9 * 4 * 16
    bits = float32_to_float8(values)
    assert (packed.unpack() == bits).all()
    with pytest.raises(ValueError, match=r"^filter: a value of magnitude 465 is beyond"):
        pack_filter(np.full((1, 1, 1, 1), -465.0), "KRSC", dtype="float8_e4m3fn")
