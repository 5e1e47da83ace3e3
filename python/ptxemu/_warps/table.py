"""The table of instructions: opcode to the function that builds its step.

A builder gets a ``Form``, takes the modifiers that it knows from it, asks for the rows of its
operands, and returns a function of a path. Modifiers that nobody took are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np

from .._errors import EmulatorError, PtxSyntaxError, UnsupportedError
from .._hardware.registers import PRED, Array, Layout, group_of, view_of
from .._hardware.scheduler import Wait
from .._text.syntax import (
    Address,
    Instruction,
    Negated,
    Operand,
    Pair,
    Register,
    Vector,
    type_bits,
)
from .paths import Path, Step

__all__ = ["Builder", "Form", "assign", "build", "instruction"]

_TYPES = (
    *("pred", "b8", "b16", "b32", "b64", "b128", "u8", "u16", "u32", "u64", "s8", "s16", "s32"),
    *("s64", "f16", "f16x2", "bf16", "bf16x2", "tf32", "f32", "f64", "e4m3", "e5m2", "e4m3x2"),
    *("e5m2x2", "f32x2", "u16x2", "s16x2"),
)


class Form:
    """One instruction on its way to a step.

    Attributes:
        instruction: It.
        modifiers: Those of its opcode that no one has taken.
    """

    def __init__(self, layout: Layout, instruction: Instruction, modifiers: list[str]) -> None:
        self.layout = layout
        self.instruction = instruction
        self.modifiers = modifiers
        self.used: set[tuple[int, int]] = set()

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The instruction's operands."""
        return self.instruction.operands

    def refuse(self, reason: str) -> NoReturn:
        """Raises that the instruction is not supported."""
        raise UnsupportedError(f"line {self.instruction.line}: {self.instruction.opcode}: {reason}")

    def take(self, *names: str) -> str:
        """Takes the first modifier that is one of some; empty if there is none."""
        for modifier in self.modifiers:
            if modifier in names:
                self.modifiers.remove(modifier)
                return modifier
        return ""

    def flag(self, name: str) -> bool:
        """Takes a modifier; whether it was there."""
        return bool(self.take(name))

    def take_aligned(self) -> None:
        """Takes ``.sync`` and ``.aligned``, which an instruction of a whole warp may have."""
        self.take("sync")
        self.take("aligned")

    def type(self) -> str:
        """Takes the first type.

        Raises:
            UnsupportedError: There is none.
        """
        return self.take(*_TYPES) or self.refuse("no type")

    def arity(self, *allowed: int) -> None:
        """Checks the number of operands."""
        if len(self.operands) not in allowed:
            raise PtxSyntaxError(
                f"line {self.instruction.line}: {self.instruction.opcode} with "
                f"{len(self.operands)} operands"
            )

    def _used(self, row: int, type_name: str) -> int:
        self.used.add((group_of(type_bits(type_name)), row))
        return row

    def _operand(self, operand: int | Operand) -> Operand:
        return self.operands[operand] if isinstance(operand, int) else operand

    def source(self, operand: int | Operand, type_name: str) -> int:
        """The row of an operand that is read, by its position or itself."""
        chosen = self._operand(operand)
        return self._used(self.layout.source(chosen, type_name, self.instruction), type_name)

    def target(self, operand: int | Operand, type_name: str) -> int:
        """The row of an operand that is written."""
        chosen = self._operand(operand)
        return self._used(self.layout.target(chosen, type_name, self.instruction), type_name)

    def targets(self, operand: int | Operand, type_name: str) -> tuple[int, int | None]:
        """The rows of ``d``, and of the predicate in ``d|p``."""
        chosen = self._operand(operand)
        if isinstance(chosen, Pair):
            return self.target(chosen.first, type_name), self.target(chosen.second, "pred")
        return self.target(chosen, type_name), None

    def wide_type(self, operand: int | Operand, type_name: str) -> str:
        """The type by which a register is seen that may be wider than an access (9.4.1)."""
        chosen = self._operand(operand)
        bits = max(type_bits(type_name), 16)
        if isinstance(chosen, Register) and chosen.bits > bits:
            bits = chosen.bits
        return f"u{bits}"

    def predicate(self, operand: int | Operand) -> tuple[int, bool]:
        """The row of a predicate that is read, and whether it is negated."""
        chosen = self._operand(operand)
        if isinstance(chosen, Negated):
            return self.source(chosen.register, "pred"), True
        return self.source(chosen, "pred"), False

    def vector(self, operand: int) -> tuple[Operand, ...]:
        """The elements of an operand; one that is no vector is its only element."""
        chosen = self.operands[operand]
        return chosen.elements if isinstance(chosen, Vector) else (chosen,)

    def address(self, operand: int | Operand) -> Address:
        """An operand in brackets."""
        chosen = self._operand(operand)
        if not isinstance(chosen, Address):
            raise PtxSyntaxError(f"line {self.instruction.line}: an address needs brackets")
        return chosen

    def address_row(self, operand: int | Operand) -> tuple[int, int, int]:
        """View, row and displacement of an address."""
        address = self.address(operand)
        base = address.base
        wide = isinstance(base, Register) and base.bits == 64
        type_name = "u64" if wide or not isinstance(base, Register) else "u32"
        return view_of(type_name), self.source(base, type_name), address.offset

    def literal(self, operand: int, what: str) -> int:
        """An operand that must be an integer literal; ``what`` names it in messages."""
        value = getattr(self.operands[operand], "value", None)
        if not isinstance(value, int):
            self.refuse(f"{what} must be a literal")
        return value

    def finish(self) -> None:
        """Refuses modifiers that nobody took."""
        if self.modifiers:
            self.refuse(f"the modifier .{self.modifiers[0]} is not supported")


Builder = Callable[[Form], Step]

_TABLE: dict[str, Builder] = {}


def instruction(*names: str) -> Callable[[Builder], Builder]:
    """Enters a builder for opcodes: those that begin with one of some names."""

    def enter(builder: Builder) -> Builder:
        for name in names:
            _TABLE[name] = builder
        return builder

    return enter


def build(layout: Layout, written: Instruction) -> tuple[Step, frozenset[tuple[int, int]]]:
    """Builds an instruction's step; also returns the registers that it uses.

    Raises:
        UnsupportedError: The opcode, or a modifier, is not known.
        PtxSyntaxError: An operand does not fit.
    """
    parts = written.opcode.split(".")
    for count in range(len(parts), 0, -1):
        builder = _TABLE.get(".".join(parts[:count]))
        if builder is not None:
            form = Form(layout, written, parts[count:])
            step = builder(form)
            form.finish()
            if written.guard is not None:
                step = _guarded(step, form.source(written.guard, "pred"), written.negated)
            return step, frozenset(form.used)
    raise UnsupportedError(f"line {written.line}: {written.opcode} is not supported")


def _guarded(step: Step, row: int, negated: bool) -> Step:
    def run(t: Path) -> Wait | None:
        condition = t.files[PRED][row]
        mask = t.mask & (~condition if negated else condition)
        if not mask.any():
            return None
        saved = t.mask, t.where
        t.mask = mask
        t.where = True if mask.all() else mask
        try:
            return step(t)
        except EmulatorError as error:
            error.lanes = mask
            raise
        finally:
            t.mask, t.where = saved

    return run


def assign(t: Path, view: int, row: int, values: Array) -> None:
    """Writes values to the active lanes of a register."""
    np.copyto(t.files[view][row], values, where=t.where, casting="unsafe")
