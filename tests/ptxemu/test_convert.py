"""Conversions: rounding, saturation, NaN, registers wider than their types."""

from __future__ import annotations

import numpy as np
import pytest
from tests.ptxemu.warps import lanes

from ptxemu._numbers import eight_values

FLOATS = np.array(
    [0.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.7, 2.7, 3e9, -3e9, 1e20, -1e20, np.nan, np.inf, -np.inf],
    np.float32,
)


@pytest.mark.parametrize(
    ("rounding", "function"),
    [("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)],
)
@pytest.mark.parametrize("kind", [np.int32, np.uint32, np.int64, np.uint64, np.int16])
def test_floats_become_integers(rounding: str, function: np.ufunc, kind: type[np.integer]) -> None:
    info = np.iinfo(kind)
    name = f"{'s' if info.min else 'u'}{info.bits}"
    found = lanes(f"cvt.{rounding}.{name}.f32 %o, %a;", kind, FLOATS)[: len(FLOATS)]
    expected = []
    for value in function(FLOATS.astype(np.float64)):
        if np.isnan(value):
            # Zero, unless 64 bits are involved: then the top bit alone.
            top = 1 << 63 if info.bits == 64 else 0
            expected.append(top - (1 << 64) if top and info.min else top)
        else:
            expected.append(int(min(max(value, info.min), info.max)))
            if np.isinf(value) or expected[-1] > info.max:
                expected[-1] = info.max if value > 0 else info.min
    assert found.tolist() == expected


def test_integers_become_floats() -> None:
    big = np.array([0, 1, -1, 16777217, 16777219, 0x7FFFFFFF, -(1 << 31)], np.int32)
    count = len(big)
    nearest = lanes("cvt.rn.f32.s32 %o, %a;", np.float32, big)[:count]
    assert np.array_equal(nearest, big.astype(np.float64).astype(np.float32))
    down = lanes("cvt.rm.f32.s32 %o, %a;", np.float32, big)[:count]
    assert down.tolist() == [0, 1, -1, 16777216, 16777218, 2147483520, -(2**31)]
    up = lanes("cvt.rp.f32.s32 %o, %a;", np.float32, big)[:count]
    assert up.tolist() == [0, 1, -1, 16777218, 16777220, 2147483648, -(2**31)]
    wide = np.array([(1 << 63) + 1, (1 << 40) + 1], np.uint64)
    assert lanes("cvt.rz.f32.u64 %o, %a;", np.float32, wide)[:2].tolist() == [2.0**63, 2.0**40]


def test_integers_of_other_sizes() -> None:
    a = np.array([0x80, 0x7F, 0x1FF, 0xFFFF], np.uint16)
    assert lanes("cvt.s32.s8 %o, %a;", np.int32, a)[:4].tolist() == [-128, 127, -1, -1]
    assert lanes("cvt.u32.u8 %o, %a;", np.int32, a)[:4].tolist() == [128, 127, 255, 255]
    assert lanes("cvt.s64.s16 %o, %a;", np.int64, a)[:4].tolist() == [128, 127, 511, -1]
    wide = np.array([300, -300, 5], np.int32)
    assert lanes("cvt.sat.s8.s32 %o, %a;", np.int16, wide)[:3].tolist() == [127, -128, 5]
    assert lanes("cvt.sat.u32.s32 %o, %a;", np.uint32, wide)[:3].tolist() == [300, 0, 5]


@pytest.mark.parametrize("rounding", ["rn", "rz"])
def test_bfloat16(rounding: str) -> None:
    bits = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x3F80FFFF, 0xBF808001, 0x7F7FFFFF, 0x7F800000],
        np.uint32,
    )
    nearest = [0x3F80, 0x3F82, 0x3F81, 0x3F81, 0xBF81, 0x7F80, 0x7F80]
    expected = nearest if rounding == "rn" else [int(value) >> 16 for value in bits]
    body = f"cvt.{rounding}.bf16.f32 %o, %a;"
    assert lanes(body, np.uint16, bits)[:7].tolist() == expected
    assert lanes(body, np.uint16, np.array([np.nan], np.float32))[0] == 0x7FFF
    back = lanes("cvt.f32.bf16 %o, %a;", np.uint32, np.array(nearest, np.uint16))[:7]
    assert back.tolist() == [value << 16 for value in nearest]


def test_pairs() -> None:
    high, low = np.array([1.5], np.float32), np.array([-2.0], np.float32)
    assert lanes("cvt.rn.bf16x2.f32 %o, %a, %b;", np.uint32, high, low)[0] == 0x3FC0C000
    assert lanes("cvt.rn.f16x2.f32 %o, %a, %b;", np.uint32, high, low)[0] == 0x3E00C000
    assert lanes("cvt.rn.relu.f16x2.f32 %o, %a, %b;", np.uint32, high, low)[0] == 0x3E000000


def test_half() -> None:
    a = np.array([65519, 65520, 1e-8, 2.0**-24, 1 + 2.0**-11], np.float32)
    found = lanes("cvt.rn.f16.f32 %o, %a;", np.float16, a)[:5]
    assert found.tolist() == [65504, np.inf, 0, 2.0**-24, 1]
    down = lanes("cvt.rz.f16.f32 %o, %a;", np.float16, a)[:5]
    assert down.tolist() == [65504, 65504, 0, 2.0**-24, 1]


def test_tf32() -> None:
    a = np.array([0x3F801000, 0x3F803000, 0x3F800FFF, 0xBF801000], np.uint32)
    away = lanes("cvt.rna.tf32.f32 %o, %a;", np.uint32, a)[:4]
    assert away.tolist() == [0x3F802000, 0x3F804000, 0x3F800000, 0xBF802000]
    even = lanes("cvt.rn.tf32.f32 %o, %a;", np.uint32, a)[:4]
    assert even.tolist() == [0x3F800000, 0x3F804000, 0x3F800000, 0xBF800000]


@pytest.mark.parametrize(
    ("name", "largest", "smallest"),
    [("e4m3x2", 448.0, 2.0**-9), ("e5m2x2", 57344.0, 2.0**-16)],
)
def test_eight_bits(name: str, largest: float, smallest: float) -> None:
    values = eight_values(name[:-2])
    finite = np.flatnonzero(np.isfinite(values))
    assert np.nanmax(values[finite]) == largest
    assert values[1] == smallest
    codes = finite[:: max(1, len(finite) // 31)][:31].astype(np.uint16)
    numbers = values[codes].astype(np.float32)
    body = f"cvt.rn.satfinite.{name}.f32 %o, %a, %a;"
    assert np.array_equal(lanes(body, np.uint16, numbers)[: len(codes)], codes * 257)
    edges = np.array([1e9, -1e9, np.nan, np.inf, smallest / 2, smallest * 0.75], np.float32)
    top = int(np.nanargmax(np.where(np.isfinite(values), values, -1)))
    found = lanes(body, np.uint16, edges)[:6] & 0xFF
    assert found.tolist() == [top, top | 0x80, 0x7F, top, 0, 1]
    back = lanes(f"cvt.rn.f16x2.{name} %o, %a;", np.uint32, codes * np.uint16(257))
    halves = back[: len(codes)].view(np.float16).reshape(-1, 2)
    assert np.array_equal(halves[:, 0], numbers.astype(np.float16))
    assert np.array_equal(halves[:, 1], numbers.astype(np.float16))
