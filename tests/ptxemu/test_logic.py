"""Logic, moves, and permutations."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from tests.ptxemu.warps import lanes


@pytest.mark.parametrize("name", ["and", "or", "xor"])
def test_two_operands(name: str, rng: np.random.Generator) -> None:
    a, b = (rng.integers(0, 1 << 63, 32, np.uint64) for _ in range(2))
    operation = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[name]
    assert np.array_equal(lanes(f"{name}.b64 %o, %a, %b;", np.uint64, a, b), operation(a, b))


def test_one_operand() -> None:
    a = np.array([0, 1, 0xFFFF], np.uint16)
    assert lanes("not.b16 %o, %a;", np.uint16, a)[:3].tolist() == [0xFFFF, 0xFFFE, 0]
    assert lanes("cnot.b16 %o, %a;", np.uint16, a)[:3].tolist() == [1, 0, 0]


def test_every_table_of_three_inputs() -> None:
    """9.7.8.6: a, b, c of these values make the table the result's low byte."""
    inputs = [np.array([value], np.uint32) for value in (0xF0, 0xCC, 0xAA)]
    for table in (0x00, 0x80, 0x96, 0xE8, 0x1B, 0xFF):
        found = lanes(f"lop3.b32 %o, %a, %b, %c, {table};", np.uint32, *inputs)[0]
        assert int(found) & 0xFF == table


def test_funnel_shifts() -> None:
    low, high = np.uint32(0x89ABCDEF), np.uint32(0x01234567)
    amounts = np.array([0, 4, 31, 32, 36], np.uint32)
    arrays = np.full(5, low), np.full(5, high), amounts
    wide = int(high) << 32 | int(low)
    left = lanes("shf.l.wrap.b32 %o, %a, %b, %c;", np.uint32, *arrays)[:5]
    assert left.tolist() == [(wide << (int(n) % 32) >> 32) % (1 << 32) for n in amounts]
    right = lanes("shf.r.clamp.b32 %o, %a, %b, %c;", np.uint32, *arrays)[:5]
    assert right.tolist() == [(wide >> min(int(n), 32)) % (1 << 32) for n in amounts]


def test_permutation_of_bytes() -> None:
    """9.7.9.7: with bytes 7..0 of b:a named 0x77..0x00."""
    a, b = np.array([0x33221100], np.uint32), np.array([0xF7665544], np.uint32)
    for selector, expected in [(0x3210, 0x33221100), (0x7654, 0xF7665544), (0xF0F4, 0xFF00FF44)]:
        assert lanes(f"prmt.b32 %o, %a, %b, {selector};", np.uint32, a, b)[0] == expected


def test_packing() -> None:
    a = np.array([0x1122334455667788], np.uint64)
    body = """.reg .b16 %h<4>; .reg .b32 x, y; mov.b64 {%h0, %h1, %h2, %h3}, %a;
    mov.b32 x, {%h3, %h2}; mov.b32 y, {%h1, %h0}; mov.b64 %o, {y, x};"""
    assert lanes(body, np.uint64, a)[0] == 0x3344112277885566
    wide = """.reg .b128 w; .reg .b64 x, y; mov.b128 w, {%a, %b}; mov.b128 {x, y}, w;
    sub.s64 %o, y, x;"""
    assert lanes(wide, np.uint64, a, a + np.uint64(5))[0] == 5


def test_special_registers() -> None:
    names = ["tid.x", "laneid", "lanemask_lt", "ntid.x", "ctaid.y", "nctaid.z", "warpid"]
    expected: list[npt.ArrayLike] = [
        np.arange(32),
        np.arange(32),
        (1 << np.arange(32)) - 1,
        32,
        0,
        1,
        0,
    ]
    for name, values in zip(names, expected, strict=True):
        found = lanes(f"mov.u32 %o, %{name};", np.uint32)
        assert np.array_equal(found, np.broadcast_to(values, 32)), name


def test_predicates() -> None:
    a = np.arange(32, dtype=np.int32)
    body = """.reg .pred p, q, r; setp.lt.s32 p, %a, 20; setp.gt.s32 q, %a, 10;
    and.pred r, p, q; xor.pred q, p, q; not.pred q, q; mov.b32 %o, 0;
    @r mov.b32 %o, 1; @!q add.s32 %o, %o, 2;"""
    both, one = (a < 20) & (a > 10), (a < 20) != (a > 10)
    assert np.array_equal(lanes(body, np.int32, a), both + 2 * one)
