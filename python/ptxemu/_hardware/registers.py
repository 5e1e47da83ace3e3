"""Where registers live: rows of 32 lanes, one array for each width.

Literals, special registers and addresses of variables are rows too, filled when a warp starts, so
that an instruction only ever reads rows. A row is seen through views: the same 32-bit row is
``U32``, ``S32`` and ``F32``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .._errors import PtxSyntaxError
from .._text.syntax import (
    Constant,
    Instruction,
    Operand,
    Register,
    Sink,
    Special,
    Symbol,
    type_bits,
)

__all__ = [
    "B128",
    "F16",
    "F32",
    "F64",
    "LANES",
    "PRED",
    "S16",
    "S32",
    "S64",
    "U16",
    "U32",
    "U64",
    "Array",
    "Layout",
    "group_of",
    "literal_bits",
    "view_of",
]

Array = npt.NDArray[Any]

#: Threads of a warp.
LANES = 32

PRED, U16, S16, F16, U32, S32, F32, U64, S64, F64, B128 = range(11)

_GROUPS = {1: 0, 8: 1, 16: 1, 32: 2, 64: 3, 128: 4}
_DTYPES: tuple[Any, ...] = (np.bool_, np.uint16, np.uint32, np.uint64, np.uint64)
_VIEWS: tuple[tuple[int, Any], ...] = (
    (0, np.bool_),
    (1, np.uint16),
    (1, np.int16),
    (1, np.float16),
    (2, np.uint32),
    (2, np.int32),
    (2, np.float32),
    (3, np.uint64),
    (3, np.int64),
    (3, np.float64),
    (4, np.uint64),
)
_BY_TYPE = {
    "pred": PRED,
    "s8": S16,
    "s16": S16,
    "f16": F16,
    "s32": S32,
    "f32": F32,
    "tf32": U32,
    "s64": S64,
    "f64": F64,
    "b128": B128,
}
_UNSIGNED = {8: U16, 16: U16, 32: U32, 64: U64}

#: What registers hold before anything is written to them.
_POISON = (0, 0xA5A5, 0xA5A5A5A5, 0xA5A5A5A5A5A5A5A5, 0xA5A5A5A5A5A5A5A5)


def view_of(type_name: str) -> int:
    """Returns the view by which an instruction of a type sees its registers.

    Types that numpy does not have (``bf16``, ``e4m3x2``) are seen as unsigned integers.
    """
    known = _BY_TYPE.get(type_name)
    return known if known is not None else _UNSIGNED[type_bits(type_name)]


def group_of(bits: int) -> int:
    """Returns the array that registers of a width live in."""
    return _GROUPS[bits]


def literal_bits(literal: Constant, type_name: str) -> int:
    """Returns a literal's bits as an operand of a type."""
    bits = type_bits(type_name)
    value = literal.value
    if type_name in ("f32", "f64", "f16"):
        if literal.float_bits == bits:
            return int(value)
        if literal.float_bits:
            code = "<f" if literal.float_bits == 32 else "<d"
            value = struct.unpack(code, int(value).to_bytes(literal.float_bits // 8, "little"))[0]
        elif isinstance(value, int) and type_name == "f16":
            return value & 0xFFFF
        code = {"f32": "<f", "f64": "<d", "f16": "<e"}[type_name]
        return int.from_bytes(struct.pack(code, float(value)), "little")
    if literal.float_bits:
        return int(value) & ((1 << bits) - 1)
    if isinstance(value, float):
        raise PtxSyntaxError(f"{value} is no operand of type .{type_name}")
    return value & ((1 << bits) - 1)


class Layout:
    """Gives every register, literal, special register and symbol of a function its row."""

    def __init__(self) -> None:
        self.counts = [0] * 5
        self.rows: dict[tuple[int, str], int] = {}
        self.constants: dict[tuple[int, int], int] = {}
        self.symbols: dict[tuple[int, str, int], int] = {}
        self.specials: dict[tuple[int, str], int] = {}

    def _new(self, group: int) -> int:
        self.counts[group] += 1
        return self.counts[group] - 1

    def register(self, register: Register) -> int:
        """Returns a register's row."""
        key = (_GROUPS[register.bits], register.name)
        if key not in self.rows:
            self.rows[key] = self._new(key[0])
        return self.rows[key]

    def constant(self, group: int, bits: int) -> int:
        """Returns the row that holds a literal."""
        key = (group, bits)
        if key not in self.constants:
            self.constants[key] = self._new(group)
        return self.constants[key]

    def source(self, operand: Operand, type_name: str, instruction: Instruction) -> int:
        """Returns the row that an operand of a type is read from.

        Raises:
            PtxSyntaxError: The operand has no value, or its register is of another width.
        """
        bits = type_bits(type_name)
        group = _GROUPS[bits]
        if isinstance(operand, Register):
            if _GROUPS[operand.bits] != group:
                raise PtxSyntaxError(
                    f"line {instruction.line}: {operand.name} has {operand.bits} bits, "
                    f".{type_name} needs {bits}"
                )
            return self.register(operand)
        if isinstance(operand, Constant):
            return self.constant(group, literal_bits(operand, type_name))
        if isinstance(operand, Symbol):
            key = (group, operand.name, operand.offset)
            if key not in self.symbols:
                self.symbols[key] = self._new(group)
            return self.symbols[key]
        if isinstance(operand, Special):
            special = (group, operand.name)
            if special not in self.specials:
                self.specials[special] = self._new(group)
            return self.specials[special]
        kind = type(operand).__name__.lower()
        raise PtxSyntaxError(f"line {instruction.line}: a {kind} has no value of type .{type_name}")

    def target(self, operand: Operand, type_name: str, instruction: Instruction) -> int:
        """Returns the row that a result of a type is written to.

        Raises:
            PtxSyntaxError: The operand is no register of that width.
        """
        if isinstance(operand, Sink):
            return self.register(Register("_", type_bits(type_name)))
        if not isinstance(operand, Register):
            raise PtxSyntaxError(f"line {instruction.line}: the result needs a register")
        return self.source(operand, type_name, instruction)

    def template(self, symbol: Callable[[str], int]) -> list[Array]:
        """Returns the arrays that every warp of a launch starts with, ``[rows, 32]`` each.

        Args:
            symbol: The address of a variable or parameter.
        """
        arrays: list[Array] = []
        for group, (count, dtype) in enumerate(zip(self.counts, _DTYPES, strict=True)):
            shape = (count, LANES) if group < 4 else (count, LANES, 2)
            arrays.append(np.full(shape, _POISON[group], dtype))
        for (group, bits), row in self.constants.items():
            if group == 4:
                arrays[group][row] = (bits & (2**64 - 1), bits >> 64)
            else:
                arrays[group][row] = bits
        for (group, name, offset), row in self.symbols.items():
            arrays[group][row] = symbol(name) + offset
        return arrays


def files_of(arrays: list[Array]) -> list[list[Array]]:
    """Returns the rows of a warp's arrays, as every view sees them."""
    return [list(arrays[group].view(dtype)) for group, dtype in _VIEWS]
