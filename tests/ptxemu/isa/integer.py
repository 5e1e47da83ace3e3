"""Integer arithmetic and comparisons (PTX ISA 9.0, 9.7.1, 9.7.2, 9.7.6), by Python's integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .case import Family, lane_case, words

FAMILY = Family("integer")

_EDGES = (
    *(0, 1, 2, 3, 7, 31, 32, 33, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 0x10000),
    *(0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF, 0x12345678, 0xDEADBEEF),
    0xAAAAAAAA,
)
_COUNT = 640


def _operands(bits: int, count: int) -> list[list[int]]:
    """Every pair of edges, then random numbers, for each operand."""
    rng = np.random.default_rng(bits)
    columns: list[list[int]] = [[], [], []]
    for x in _EDGES:
        for y in _EDGES:
            # In 64 bits an edge is also one of the upper half.
            columns[0].append(x if bits < 64 or x % 3 else x << 32 | y)
            columns[1].append(y if bits < 64 or y % 5 else y << 32 | x)
            columns[2].append(x * 0x9E3779B1 ^ y)
    for column in columns:
        column += [int(v) for v in rng.integers(0, 1 << 63, _COUNT - len(column), np.uint64)]
    return [[value % (1 << bits) for value in column] for column in columns[:count]]


def _signed(value: int, bits: int) -> int:
    value %= 1 << bits
    return value - (1 << bits) if value >> (bits - 1) else value


def _add(
    opcode: str,
    bits: int,
    function: Callable[..., int],
    operands: int,
    *,
    signed: bool = False,
    result: int = 0,
    code: str = "",
    nonzero: bool = False,
) -> None:
    """An instruction of one type: ``function`` of Python integers."""
    columns = _operands(bits, operands)
    if nonzero:
        columns[1] = [value or 5 for value in columns[1]]
    rows = zip(*columns, strict=True)
    seen = [[_signed(x, bits) if signed else x for x in row] for row in rows]
    kind: Any = f"u{(result or bits) // 8}"
    expected = words(*(function(*row) for row in seen), dtype=kind)
    inputs = [words(*column, dtype=f"u{bits // 8}") for column in columns]
    letters = ", ".join(f"%{letter}" for letter in "abc"[:operands])
    lane_case(FAMILY, opcode, code or f"{opcode} %o, {letters};", expected, *inputs)


def _truncated(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return -quotient if (a < 0) != (b < 0) else quotient


def _field(value: int, position: int, length: int, bits: int, signed: bool) -> int:
    """9.7.1.19's pseudocode: the sign is the field's top bit, or the number's beyond its end."""
    position, length = position & 0xFF, length & 0xFF
    sign = 0 if not signed or length == 0 else value >> min(position + length - 1, bits - 1) & 1
    found = 0
    for i in range(bits):
        inside = i < length and position + i < bits
        found |= (value >> (position + i) & 1 if inside else sign) << i
    return found


def _insert(a: int, b: int, position: int, length: int, bits: int) -> int:
    position, length = position & 0xFF, length & 0xFF
    for i in range(length):
        if position + i < bits:
            at = 1 << (position + i)
            b = b & ~at | (at if a >> i & 1 else 0)
    return b


def _find(value: int, bits: int, signed: bool) -> int:
    """9.7.1.16: the highest one, of a negative number the highest zero; -1 if there is none."""
    if signed and value < 0:
        value = ~value
    return (value % (1 << bits)).bit_length() - 1


def _reverse(value: int, bits: int) -> int:
    return int(f"{value:0{bits}b}"[::-1], 2)


_BASIC: dict[str, Callable[..., int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": min,
    "max": max,
}

for _bits in (16, 32, 64):
    for _kind, _is_signed in (("u", False), ("s", True)):
        _type = f"{_kind}{_bits}"
        for _name, _function in _BASIC.items():
            _add(f"{_name}.{_type}", _bits, _function, 2, signed=_is_signed)
        _add(f"mul.hi.{_type}", _bits, lambda a, b, n=_bits: a * b >> n, 2, signed=_is_signed)
        _add(f"mad.lo.{_type}", _bits, lambda a, b, c: a * b + c, 3, signed=_is_signed)
        _add(f"div.{_type}", _bits, _truncated, 2, signed=_is_signed, nonzero=True)
        _add(
            f"rem.{_type}",
            _bits,
            lambda a, b: a - b * _truncated(a, b),
            2,
            signed=_is_signed,
            nonzero=True,
        )
        if _bits < 64:
            _add(
                f"mul.wide.{_type}",
                _bits,
                lambda a, b: a * b,
                2,
                signed=_is_signed,
                result=2 * _bits,
            )
        _add(f"sad.{_type}", _bits, lambda a, b, c: c + abs(a - b), 3, signed=_is_signed)
        _add(
            f"shr.{_type}",
            _bits,
            lambda a, b, n=_bits: a >> min(b % (1 << n), n),
            2,
            signed=_is_signed,
            code=f"{{ .reg .b32 %n; cvt.u32.u{_bits} %n, %b; shr.{_type} %o, %a, %n; }}"
            if _bits < 64
            else "{ .reg .b32 %n; .reg .pred %x; cvt.u32.u64 %n, %b; setp.gt.u64 %x, %b, 255; "
            f"@%x mov.b32 %n, 255; shr.{_type} %o, %a, %n; }}",
        )
    _add(f"abs.s{_bits}", _bits, abs, 1, signed=True)
    _add(f"neg.s{_bits}", _bits, lambda a: -a, 1, signed=True)

for _bits in (32, 64):
    _add(f"popc.b{_bits}", _bits, lambda a: a.bit_count(), 1, result=32)
    _add(f"clz.b{_bits}", _bits, lambda a, n=_bits: n - a.bit_length(), 1, result=32)
    _add(f"brev.b{_bits}", _bits, lambda a, n=_bits: _reverse(a, n), 1)
    for _kind, _is_signed in (("u", False), ("s", True)):
        _type = f"{_kind}{_bits}"
        _add(
            f"bfind.{_type}",
            _bits,
            lambda a, n=_bits, s=_is_signed: _find(a, n, s),
            1,
            signed=_is_signed,
            result=32,
        )
        _add(
            f"bfind.shiftamt.{_type}",
            _bits,
            lambda a, n=_bits, s=_is_signed: -1 if _find(a, n, s) < 0 else n - 1 - _find(a, n, s),
            1,
            signed=_is_signed,
            result=32,
        )
        _narrow = "{ .reg .b32 %m, %n; cvt.u32.uN %m, %b; cvt.u32.uN %n, %c; "
        # In 64 bits the GPU does not take the low byte alone, as the ISA says it does.
        _low = "and.b32 %m, %m, 255; and.b32 %n, %n, 255; "
        _narrow = (_narrow + (_low if _bits == 64 else "")).replace("N", str(_bits))
        _add(
            f"bfe.{_type}",
            _bits,
            lambda a, b, c, n=_bits, s=_is_signed: _field(a, b, c, n, s),
            3,
            code=f"{_narrow} bfe.{_type} %o, %a, %m, %n; }}",
        )
    # The third operand gives position and length.
    _add(
        f"bfi.b{_bits}",
        _bits,
        lambda a, b, c, n=_bits: _insert(a, b, c, c >> 8, n),
        3,
        code=f"{{ .reg .b32 %m, %n; cvt.u32.u{_bits} %m, %c; shr.u32 %n, %m, 8; "
        + ("and.b32 %m, %m, 255; and.b32 %n, %n, 255; " if _bits == 64 else "")
        + f"bfi.b{_bits} %o, %a, %b, %m, %n; }}",
    )


def _saturated(value: int) -> int:
    return max(-(1 << 31), min((1 << 31) - 1, value))


_add("add.sat.s32", 32, lambda a, b: _saturated(a + b), 2, signed=True)
_add("sub.sat.s32", 32, lambda a, b: _saturated(a - b), 2, signed=True)
_add("mad.hi.sat.s32", 32, lambda a, b, c: _saturated((a * b >> 32) + c), 3, signed=True)
_add("mad.hi.u32", 32, lambda a, b, c: (a * b >> 32) + c, 3)
_add(
    "mad.wide.s32",
    32,
    lambda a, b, c: a * b + c,
    3,
    signed=True,
    result=64,
    code="{ .reg .b64 %w; cvt.s64.s32 %w, %c; mad.wide.s32 %o, %a, %b, %w; }",
)


def _carried(a: int, b: int, c: int) -> int:
    """128 bits: a:b + c:a, the middle of it."""
    return ((a << 32 | b) + (c << 32 | a)) >> 32


_add(
    "add.cc.u32",
    32,
    _carried,
    3,
    code="{ .reg .b32 %x; add.cc.u32 %x, %b, %a; addc.u32 %o, %a, %c; }",
)
_add(
    "sub.cc.u32",
    32,
    lambda a, b, c: ((a << 32 | b) - (c << 32 | a)) >> 32,
    3,
    code="{ .reg .b32 %x; sub.cc.u32 %x, %b, %a; subc.u32 %o, %a, %c; }",
)


def _dot(a: int, b: int, c: int, a_signed: bool, b_signed: bool) -> int:
    total = c
    for k in range(4):
        x, y = a >> 8 * k & 0xFF, b >> 8 * k & 0xFF
        total += (_signed(x, 8) if a_signed else x) * (_signed(y, 8) if b_signed else y)
    return total


for _a in "us":
    for _b in "us":
        _add(
            f"dp4a.{_a}32.{_b}32",
            32,
            lambda a, b, c, p=_a == "s", q=_b == "s": _dot(a, b, c, p, q),
            3,
        )

_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
for _name, _compare in _COMPARISONS.items():
    for _kind, _is_signed in (("u", False), ("s", True)):
        _add(
            f"setp.{_name}.{_kind}32",
            32,
            lambda a, b, f=_compare: 7 if f(a, b) else 9,
            2,
            signed=_is_signed,
            code=f"setp.{_name}.{_kind}32 %p, %a, %b; selp.b32 %o, 7, 9, %p;",
        )
for _name in ("lo", "ls", "hi", "hs"):
    _same = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}[_name]
    _add(
        f"setp.{_name}.u32",
        32,
        lambda a, b, f=_COMPARISONS[_same]: 7 if f(a, b) else 9,
        2,
        code=f"setp.{_name}.u32 %p, %a, %b; selp.b32 %o, 7, 9, %p;",
    )
for _name in ("and", "or", "xor"):
    _join = {"and": all, "or": any, "xor": lambda pair: pair[0] != pair[1]}[_name]
    _add(
        f"setp.lt.{_name}.s32",
        32,
        lambda a, b, c, f=_join: 10 * f((a < b, c < a)) + f((not a < b, c < a)),
        3,
        signed=True,
        # p|q: the second predicate has the comparison negated (9.7.6.2).
        code="{ .reg .pred %y; .reg .b32 %x; setp.lt.s32 %y, %c, %a; "
        f"setp.lt.{_name}.s32 %p|%q, %a, %b, %y; selp.b32 %o, 10, 0, %p; selp.b32 %x, 1, 0, %q; "
        "add.s32 %o, %o, %x; }",
    )
_add("set.ge.u32.s32", 32, lambda a, b: 0xFFFFFFFF if a >= b else 0, 2, signed=True)
