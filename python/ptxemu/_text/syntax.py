"""PTX as the parser hands it on: a module's variables and functions, with every name resolved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = [
    "Address",
    "Branch",
    "Constant",
    "Function",
    "Instruction",
    "Label",
    "Module",
    "Negated",
    "Operand",
    "Pair",
    "Parameter",
    "Register",
    "Sink",
    "Special",
    "Symbol",
    "Variable",
    "Vector",
    "type_bits",
]

_OTHER_BITS = {
    **{"pred": 1, "f32x2": 64, "f16x2": 32, "bf16x2": 32, "tf32": 32},
    **{"e4m3x2": 16, "e5m2x2": 16},
}


def type_bits(name: str) -> int:
    """Returns the bits of a fundamental or alternate type (PTX ISA 9.0, 5.2), without its dot."""
    known = _OTHER_BITS.get(name)
    return known if known is not None else int(name.lstrip("abcdefghijklmnopqrstuvwxyz"))


@dataclass(frozen=True)
class Register:
    """A register; ``name`` is unique in its function, ``bits`` is 1 for a predicate."""

    name: str
    bits: int


@dataclass(frozen=True)
class Special:
    """A special register, such as ``%tid.x``."""

    name: str


@dataclass(frozen=True)
class Constant:
    """A literal: an integer, a fraction, or the bits of a float of ``float_bits`` bits."""

    value: int | float
    float_bits: int = 0


@dataclass(frozen=True)
class Symbol:
    """A variable's or parameter's address, plus bytes."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Label:
    """A place in the function: the index of an instruction, or of a list of branch targets."""

    name: str


@dataclass(frozen=True)
class Sink:
    """``_``: a result that nobody wants."""


@dataclass(frozen=True)
class Negated:
    """A predicate with ``!``."""

    register: Register


@dataclass(frozen=True)
class Pair:
    """Two results joined by ``|``."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Vector:
    """Operands in braces."""

    elements: tuple[Operand, ...]


@dataclass(frozen=True)
class Address:
    """An address in brackets: base plus bytes; for a tensor also its coordinates."""

    base: Operand
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


Operand: TypeAlias = (
    Register | Special | Constant | Symbol | Label | Sink | Negated | Pair | Vector | Address
)


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: As it is written, with all modifiers.
        operands: In the order in which they are written.
        guard: The predicate under which it runs.
        negated: Whether the guard is.
        line: In the text, from 1.
    """

    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | None
    negated: bool
    line: int

    @property
    def base(self) -> str:
        """The opcode up to its first dot."""
        return self.opcode.split(".", 1)[0]


@dataclass(frozen=True)
class Variable:
    """A variable in a state space; ``size`` is in bytes, 0 for an extern array."""

    name: str
    space: str
    size: int
    align: int
    initial: bytes = b""
    extern: bool = False


@dataclass(frozen=True)
class Parameter:
    """A kernel's parameter: bytes and where they begin."""

    name: str
    size: int
    align: int
    offset: int


@dataclass(frozen=True)
class Branch:
    """A list of targets (``.branchtargets``), as indices of instructions."""

    targets: tuple[int, ...]


@dataclass
class Function:
    """A kernel: its parameters, registers, instructions, and where labels point."""

    name: str
    line: int
    is_entry: bool
    parameters: list[Parameter] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, Branch] = field(default_factory=dict)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass
class Module:
    """A PTX text."""

    version: str
    target: str
    variables: list[Variable]
    functions: dict[str, Function]
    lines: list[str]
