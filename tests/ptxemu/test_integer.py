"""Integer instructions against Python's integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.ptxemu.warps import lanes

from ptxemu import UnsupportedError

EDGES_32 = [0, 1, 2, 3, 7, 31, 32, 33, 100, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF]
EDGES_64 = [0, 1, 5, 63, 64, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


def pairs(bits: int) -> tuple[list[int], list[int]]:
    """Edges against edges, in an order that meets each twice or more."""
    edges = EDGES_32 if bits == 32 else EDGES_64
    rng = np.random.default_rng(bits)
    first = [edges[i % len(edges)] for i in range(32)]
    second = [edges[int(i)] for i in rng.permutation(32) % len(edges)]
    return first, second


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def truncated(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return -quotient if (a < 0) != (b < 0) else quotient


Operation = Callable[[int, int], int]

#: By opcode: of Python's integers, as the type has them.
BINARY: dict[str, Operation] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": min,
    "max": max,
    "div": lambda a, b: -1 if b == 0 else truncated(a, b),
    "rem": lambda a, b: a if b == 0 else a - b * truncated(a, b),
}


@pytest.mark.parametrize("type_name", ["u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("name", BINARY)
def test_arithmetic(name: str, type_name: str) -> None:
    bits = int(type_name[1:])
    a, b = pairs(bits)
    kind = np.dtype(f"u{bits // 8}")
    found = lanes(f"{name}.{type_name} %o, %a, %b;", kind, np.array(a, kind), np.array(b, kind))
    view = (lambda v: signed(v, bits)) if type_name[0] == "s" else (lambda v: v)
    expected = [BINARY[name](view(x), view(y)) % (1 << bits) for x, y in zip(a, b, strict=True)]
    assert found.tolist() == expected


@pytest.mark.parametrize("type_name", ["u32", "s32", "u64", "s64"])
def test_high_products(type_name: str) -> None:
    bits = int(type_name[1:])
    a, b = pairs(bits)
    kind = np.dtype(f"u{bits // 8}")
    found = lanes(f"mul.hi.{type_name} %o, %a, %b;", kind, np.array(a, kind), np.array(b, kind))
    view = (lambda v: signed(v, bits)) if type_name[0] == "s" else (lambda v: v)
    expected = [(view(x) * view(y) >> bits) % (1 << bits) for x, y in zip(a, b, strict=True)]
    assert found.tolist() == expected


@pytest.mark.parametrize("type_name", ["u32", "s32"])
def test_wide_products(type_name: str) -> None:
    a, b = pairs(32)
    arrays = np.array(a, np.uint32), np.array(b, np.uint32)
    view = (lambda v: signed(v, 32)) if type_name[0] == "s" else (lambda v: v)
    product = [view(x) * view(y) for x, y in zip(a, b, strict=True)]
    found = lanes(f"mul.wide.{type_name} %o, %a, %b;", np.uint64, *arrays)
    assert found.tolist() == [value % (1 << 64) for value in product]
    added = lanes(f"mov.b64 %o, 5; mad.wide.{type_name} %o, %a, %b, %o;", np.uint64, *arrays)
    assert added.tolist() == [(value + 5) % (1 << 64) for value in product]


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("name", ["shl.b", "shr.u", "shr.s"])
def test_shifts_beyond_the_width(name: str, bits: int) -> None:
    values, _ = pairs(bits)
    amounts = [0, 1, 15, 31, 32, 33, 63, 64, 255, 0x80000000, 0xFFFFFFFF]
    amount = [amounts[i % len(amounts)] for i in range(32)]
    kind = np.dtype(f"u{bits // 8}")
    found = lanes(
        f"{name}{bits} %o, %a, %b;", kind, np.array(values, kind), np.array(amount, np.uint32)
    )
    expected = []
    for value, by in zip(values, amount, strict=True):
        if name == "shl.b":
            result = value << by if by < bits else 0
        elif name == "shr.u":
            result = value >> by if by < bits else 0
        else:
            result = signed(value, bits) >> min(by, bits - 1)
        expected.append(result % (1 << bits))
    assert found.tolist() == expected


def test_saturating_sum() -> None:
    a = np.array([0x7FFFFFFF, -(1 << 31), 5, -5], np.int32)
    b = np.array([1, -1, 6, -6], np.int32)
    found = lanes("add.sat.s32 %o, %a, %b;", np.int32, a, b)[:4]
    assert found.tolist() == [0x7FFFFFFF, -(1 << 31), 11, -11]
    assert lanes("min.relu.s32 %o, %a, %b;", np.int32, a, b)[:4].tolist() == [1, 0, 5, 0]


def test_carries() -> None:
    a, b = pairs(64)
    body = """.reg .b32 al, ah, bl, bh, lo, hi;
    mov.b64 {al, ah}, %a; mov.b64 {bl, bh}, %b;
    OP.cc.u32 lo, al, bl; OPc.u32 hi, ah, bh; mov.b64 %o, {lo, hi};"""
    arrays = np.array(a, np.uint64), np.array(b, np.uint64)
    total = lanes(body.replace("OP", "add"), np.uint64, *arrays)
    assert total.tolist() == [(x + y) % (1 << 64) for x, y in zip(a, b, strict=True)]
    difference = lanes(body.replace("OP", "sub"), np.uint64, *arrays)
    assert difference.tolist() == [(x - y) % (1 << 64) for x, y in zip(a, b, strict=True)]


def test_bits() -> None:
    values, _ = pairs(32)
    array = np.array(values, np.uint32)
    texts = [f"{value:032b}" for value in values]
    assert lanes("popc.b32 %o, %a;", np.uint32, array).tolist() == [t.count("1") for t in texts]
    assert lanes("clz.b32 %o, %a;", np.uint32, array).tolist() == [
        32 - value.bit_length() for value in values
    ]
    assert lanes("brev.b32 %o, %a;", np.uint32, array).tolist() == [int(t[::-1], 2) for t in texts]
    assert lanes("bfind.u32 %o, %a;", np.int32, array).tolist() == [
        value.bit_length() - 1 for value in values
    ]
    folded = [~signed(v, 32) if signed(v, 32) < 0 else v for v in values]
    assert lanes("bfind.s32 %o, %a;", np.int32, array).tolist() == [
        value.bit_length() - 1 for value in folded
    ]


@pytest.mark.parametrize("type_name", ["u32", "s32"])
def test_bit_fields(type_name: str) -> None:
    value = 0xB00F1234
    starts = np.array([0, 0, 4, 28, 31, 32, 40, 16, 0, 255], np.uint32)
    lengths = np.array([32, 8, 0, 4, 5, 4, 1, 16, 255, 255], np.uint32)
    array = np.full(10, value, np.uint32)
    found = lanes(f"bfe.{type_name} %o, %a, %b, %c;", np.uint32, array, starts, lengths)[:10]
    expected = []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        signs = type_name == "s32" and length > 0
        sign = value >> min(start + length - 1, 31) & 1 if signs else 0
        inside = [i < length and start + i <= 31 for i in range(32)]
        bits = [value >> (start + i) & 1 if inside[i] else sign for i in range(32)]
        expected.append(sum(bit << i for i, bit in enumerate(bits)))
    assert found.tolist() == expected


def test_insertion() -> None:
    a, b = np.uint32(0xFFFF00AB), np.uint32(0x12345678)
    starts, lengths = np.array([0, 8, 28, 32, 4], np.uint32), np.array([8, 8, 8, 4, 0], np.uint32)
    body = "bfi.b32 %o, %a, %b, %c, %d;"
    found = lanes(body, np.uint32, np.full(5, a), np.full(5, b), starts, lengths)[:5]
    expected = [0x123456AB, 0x1234AB78, 0xB2345678, 0x12345678, 0x12345678]
    assert found.tolist() == expected


def test_dot_products_of_bytes() -> None:
    a, b = np.array([0x01FF7F80], np.uint32), np.array([0x02FE8101], np.uint32)
    c = np.array([10], np.int32)
    assert lanes("dp4a.u32.u32 %o, %a, %b, %c;", np.uint32, a, b, c)[0] == (
        1 * 2 + 255 * 254 + 127 * 129 + 128 * 1 + 10
    )
    assert lanes("dp4a.s32.s32 %o, %a, %b, %c;", np.int32, a, b, c)[0] == (
        1 * 2 + (-1) * (-2) + 127 * -127 + -128 * 1 + 10
    )


def dot_of_bytes(types: tuple[str, str], a: int, b: int, c: int) -> int:
    """``dp4a`` (PTX ISA, 9.7.1.23) of registers' bits, in Python's integers."""
    total = c
    for shift in (0, 8, 16, 24):
        x, y = (
            signed(word >> shift & 0xFF, 8) if name == "s32" else word >> shift & 0xFF
            for name, word in zip(types, (a, b), strict=True)
        )
        total += x * y
    return total % (1 << 32)


@pytest.mark.parametrize("second", ["u32", "s32"])
@pytest.mark.parametrize("first", ["u32", "s32"])
def test_dot_products_of_any_signs(first: str, second: str) -> None:
    """Edges of bytes and of c, where the sum leaves 32 bits at both ends, and random words."""
    rng = np.random.default_rng(4)
    edges = [0, 0x80808080, 0x7F7F7F7F, 0xFFFFFFFF, 0x807F80FF, 0x01020304, 0x00800000]
    a = [edges[i % 7] for i in range(24)] + rng.integers(0, 1 << 32, 8).tolist()
    b = [edges[i // 4] for i in range(24)] + rng.integers(0, 1 << 32, 8).tolist()
    c = [EDGES_32[i % len(EDGES_32)] for i in range(32)]
    operands = (np.array(values, np.uint32) for values in (a, b, c))
    found = lanes(f"dp4a.{first}.{second} %o, %a, %b, %c;", np.uint32, *operands)
    expected = [dot_of_bytes((first, second), *row) for row in zip(a, b, c, strict=True)]
    assert found.tolist() == expected


def test_a_dot_product_wraps_around() -> None:
    a, b = np.array([0x80808080], np.uint32), np.array([0x80808080], np.uint32)
    c = np.array([0x7FFFFFFF], np.uint32)
    body = "dp4a.s32.s32 %o, %a, %b, %c;"
    assert lanes(body, np.int32, a, b, c)[0] == (1 << 31) - 1 + 4 * 128 * 128 - (1 << 32)


@pytest.mark.parametrize("types", ["s32.f32", "s16.s32", "b32.b32"])
def test_dot_products_are_of_integers(types: str) -> None:
    word = np.array([0], np.uint32)
    with pytest.raises(UnsupportedError, match=r"the types are \.u32 and \.s32"):
        lanes(f"dp4a.{types} %o, %a, %b, %c;", np.uint32, word, word, word)


@pytest.mark.parametrize(
    ("comparison", "expected"),
    [
        ("lt.s32", [1, 0, 0, 1]),
        ("lt.u32", [0, 0, 1, 1]),
        ("hi.u32", [1, 0, 0, 0]),
        ("ge.s32", [0, 1, 1, 0]),
        ("ne.b32", [1, 0, 1, 1]),
    ],
)
def test_comparisons(comparison: str, expected: list[int]) -> None:
    a, b = np.array([-1, 4, 7, -9], np.int32), np.array([1, 4, -7, -8], np.int32)
    body = f".reg .pred p; setp.{comparison} p, %a, %b; selp.b32 %o, 1, 0, p;"
    assert lanes(body, np.int32, a, b)[:4].tolist() == expected


def test_comparison_with_two_results() -> None:
    a = np.arange(32, dtype=np.int32)
    body = """.reg .pred p, q, r; .reg .b32 x, y; setp.gt.s32 r, %a, 20;
    setp.lt.or.s32 p|q, %a, 10, r; selp.b32 x, 1, 0, p; selp.b32 y, 2, 0, q;
    add.s32 %o, x, y;"""
    expected = [(a < 10) | (a > 20), (a >= 10) | (a > 20)]
    assert np.array_equal(lanes(body, np.int32, a), expected[0] + 2 * expected[1])
