"""Logic, shifts, bytes, packing (PTX ISA 9.0, 9.7.8, 9.7.9.3, 9.7.9.4, 9.7.9.7), by bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .case import Family, lane_case, words

FAMILY = Family("logic")

_COUNT = 512
_MASK = 0xFFFFFFFF


def _operands(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(3):
        drawn = rng.integers(0, 1 << 32, _COUNT, np.uint64)
        # Small numbers too: amounts and selectors.
        small = rng.integers(0, 70, _COUNT, np.uint64)
        found.append([int(v) for v in np.where(rng.integers(0, 3, _COUNT) == 0, small, drawn)])
    return found


def _add(
    opcode: str, function: Callable[[int, int, int], int], operands: int, code: str = ""
) -> None:
    columns = _operands(operands + len(opcode))
    expected = words(*(function(*row) for row in zip(*columns, strict=True)))
    letters = ", ".join(f"%{letter}" for letter in "abc"[:operands])
    inputs = [words(*column) for column in columns]
    lane_case(FAMILY, opcode, code or f"{opcode} %o, {letters};", expected, *inputs)


_add("and.b32", lambda a, b, c: a & b, 2)
_add("or.b32", lambda a, b, c: a | b, 2)
_add("xor.b32", lambda a, b, c: a ^ b, 2)
_add("not.b32", lambda a, b, c: ~a, 1)
_add("cnot.b32", lambda a, b, c: int(a == 0), 1)
_add("shl.b32", lambda a, b, c: a << b if b < 32 else 0, 2)
_add("shr.b32", lambda a, b, c: a >> b if b < 32 else 0, 2)


def _look_up(table: int) -> Callable[[int, int, int], int]:
    """9.7.8.6: bit ``4a + 2b + c`` of the table, for every bit."""

    def operation(a: int, b: int, c: int) -> int:
        found = 0
        for i in range(32):
            index = (a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1
            found |= (table >> index & 1) << i
        return found

    return operation


for _table in (0x00, 0xE8, 0x96, 0xCA, 0x1B, 0xFF, 0x80, 0xFE):
    _code = f"lop3.b32 %o, %a, %b, %c, {_table:#x};"
    _add(f"lop3.b32.{_table:02x}", _look_up(_table), 3, _code)


def _funnel(left: bool, wrap: bool) -> Callable[[int, int, int], int]:
    """9.7.8.7: a the low half, b the high one, c the amount."""

    def operation(a: int, b: int, c: int) -> int:
        amount = c % 32 if wrap else min(c, 32)
        both = b << 32 | a
        return both << amount >> 32 if left else both >> amount

    return operation


for _side in ("l", "r"):
    for _mode in ("wrap", "clamp"):
        _add(f"shf.{_side}.{_mode}.b32", _funnel(_side == "l", _mode == "wrap"), 3)


def _byte(a: int, b: int, index: int) -> int:
    return (b << 32 | a) >> 8 * (index & 7) & 0xFF


def _permuted(a: int, b: int, c: int) -> int:
    """9.7.9.7, the default mode: bit 3 of a selector spreads the byte's sign."""
    found = 0
    for k in range(4):
        selector = c >> 4 * k & 15
        value = _byte(a, b, selector)
        if selector & 8:
            value = 0xFF if value & 0x80 else 0
        found |= value << 8 * k
    return found


_add("prmt.b32", _permuted, 3)

#: 9.7.9.7's table: the bytes that the result has, lowest first, by the selector's low two bits.
_MODES = {
    "f4e": ((0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)),
    "b4e": ((0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)),
    "rc8": ((0,) * 4, (1,) * 4, (2,) * 4, (3,) * 4),
    "ecl": ((0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)),
    "rc16": ((0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)),
}


def _by_mode(mode: str) -> Callable[[int, int, int], int]:
    def operation(a: int, b: int, c: int) -> int:
        row = _MODES[mode][c & 3]
        return sum(_byte(a, b, index) << 8 * k for k, index in enumerate(row))

    return operation


for _mode in _MODES:
    _add(f"prmt.b32.{_mode}", _by_mode(_mode), 3)

_add(
    "selp.b32",
    lambda a, b, c: a if b > c else b,
    3,
    "setp.gt.u32 %p, %b, %c; selp.b32 %o, %a, %b, %p;",
)
_add(
    "mov.b64",
    lambda a, b, c: (a & 0xFFFF) << 16 | b >> 16,
    2,
    "{ .reg .b64 %w; .reg .b16 %h<4>; mov.b64 %w, {%a, %b}; mov.b64 {%h0, %h1, %h2, %h3}, %w; "
    "mov.b32 %o, {%h3, %h0}; }",
)
_add(
    "predicates",
    lambda a, b, c: int((a > b) ^ (not ((b > c) and (a > c)) or (a > b))),
    3,
    "{ .reg .pred %x, %y; setp.gt.u32 %p, %a, %b; setp.gt.u32 %q, %b, %c; setp.gt.u32 %x, %a, %c; "
    "and.pred %y, %q, %x; not.pred %y, %y; or.pred %y, %y, %p; xor.pred %y, %y, %p; "
    "selp.b32 %o, 1, 0, %y; }",
)
