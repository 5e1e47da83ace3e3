"""Matrices in shared memory and the descriptors of multiplies (PTX ISA 9.0, 9.7.15.5, 9.7.16.4)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .._errors import IllegalInstructionError
from .._hardware.memory import CHUNK
from .._hardware.registers import Array
from ..tma import Swizzle, swizzle_address

__all__ = ["DEPTH_BYTES", "KINDS", "Kind", "MultiplyDescriptor", "SharedMatrix"]

#: Bytes of a row that one multiply takes (9.7.16.2.1).
DEPTH_BYTES = 32

#: Rows that repeat a pattern.
_ATOM_ROWS = 8


@dataclass(frozen=True)
class SharedMatrix:
    """A shared memory descriptor (9.7.15.5.1, 9.7.16.4.1).

    Attributes:
        start: The first byte's offset in its block's shared memory.
        leading: The leading dimension byte offset.
        stride: The stride dimension byte offset.
        swizzle: The pattern.
    """

    start: int
    leading: int
    stride: int
    swizzle: Swizzle

    @classmethod
    def of_wgmma(cls, bits: int) -> SharedMatrix:
        """Decodes a descriptor of wgmma.

        Raises:
            IllegalInstructionError: A base offset, which tiles at multiples of their pattern do
                not have.
        """
        if bits >> 49 & 7:
            raise IllegalInstructionError(f"descriptor {bits:#x}: a base offset is not supported")
        return cls(*_fields(bits), _WGMMA_SWIZZLES[bits >> 62 & 3])

    @classmethod
    def of_tcgen05(cls, bits: int) -> SharedMatrix:
        """Decodes a descriptor of tcgen05.

        Raises:
            IllegalInstructionError: With the field that is wrong or not supported.
        """
        if bits >> 46 & 7 != 1:
            raise IllegalInstructionError(
                f"matrix descriptor {bits:#x}: bits 46 to 48 are {bits >> 46 & 7}; 1 is allowed"
            )
        if bits >> 53 & 0xFF:
            raise IllegalInstructionError(f"matrix descriptor {bits:#x}: bits 53 to 60 must be 0")
        if bits >> 49 & 7 or bits >> 52 & 1:
            raise IllegalInstructionError(
                f"matrix descriptor {bits:#x}: a base offset, or an absolute leading dimension, "
                "is not supported"
            )
        swizzle = _SWIZZLES.get(bits >> 61)
        if swizzle is None:
            raise IllegalInstructionError(
                f"matrix descriptor {bits:#x}: swizzling mode {bits >> 61}; 0, 1, 2, 4 and 6 are "
                "allowed"
            )
        return cls(*_fields(bits), swizzle)

    def chunks(self, rows: int, depth: int, transposed: bool) -> Array:
        """Chunks of 16 bytes, by their number in the block's shared memory.

        ``[rows, depth]`` if a row's elements lie side by side ("K-major"), ``depth`` in chunks.
        Transposed ("MN-major") ``[depth, rows]``, ``depth`` in products and ``rows`` in chunks.
        """
        return _chunks(self, rows, depth, transposed)


def _fields(bits: int) -> tuple[int, int, int]:
    """Start, leading and stride dimension offset, in bytes."""
    start, leading, stride = ((bits >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    return start, leading, stride


_WGMMA_SWIZZLES = (Swizzle.NONE, Swizzle.B128, Swizzle.B64, Swizzle.B32)

_SWIZZLES = {
    0: Swizzle.NONE,
    1: Swizzle.B128_ATOM_32B,
    2: Swizzle.B128,
    4: Swizzle.B64,
    6: Swizzle.B32,
}


@lru_cache(maxsize=4096)
def _chunks(matrix: SharedMatrix, rows: int, depth: int, transposed: bool) -> Array:
    """The canonical layouts (9.7.15.5.1, 9.7.16.3.3).

    CUTLASS's ``mma_sm90_desc.hpp`` and ``mma_sm100_desc.hpp`` spell them out. In chunks, with a
    pattern's span of s chunks: K-major ``((8, m), k):((s, SBO), 1)``, without a swizzle
    ``((8, m), k):((1, SBO), LBO)``; MN-major ``((s, m), (8, k)):((1, LBO), (s, SBO))``, without a
    swizzle ``(m, (8, k)):(SBO, (1, LBO))``, with atoms of 32 bytes 4 instead of 8.
    """
    row, column = np.arange(rows)[:, None], np.arange(depth)[None, :]
    leading, stride = matrix.leading // CHUNK, matrix.stride // CHUNK
    span = matrix.swizzle.span // CHUNK
    if not transposed:
        pitch, step = (span, 1) if span else (1, leading)
        where = row // _ATOM_ROWS * stride + row % _ATOM_ROWS * pitch + column * step
    else:
        atom = 4 if matrix.swizzle is Swizzle.B128_ATOM_32B else _ATOM_ROWS
        if span:
            where = row // span * leading + row % span
            where = where + column // atom * stride + column % atom * span
        else:
            where = row * stride + column // atom * leading + column % atom
        where = where.T
    found: Array = swizzle_address(matrix.start + where * CHUNK, matrix.swizzle) // CHUNK
    found.setflags(write=False)
    return found


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of multiply.

    Attributes:
        name: As the opcode has it.
        sums: Types of D by their code.
        elements: Types of A and B by their code; those that hold fewer bits than a byte are not
            supported.
        size: Bytes of an element.
    """

    name: str
    sums: dict[int, str]
    elements: dict[int, str]
    size: int


#: Table 42 of 9.7.16.4.2.
KINDS = {
    "f16": Kind("f16", {0: "f16", 1: "f32"}, {0: "f16", 1: "bf16"}, 2),
    "tf32": Kind("tf32", {1: "f32"}, {2: "tf32"}, 4),
    "f8f6f4": Kind("f8f6f4", {0: "f16", 1: "f32"}, {0: "e4m3", 1: "e5m2"}, 1),
    "i8": Kind("i8", {2: "s32"}, {0: "u8", 1: "s8"}, 1),
}


@dataclass(frozen=True)
class MultiplyDescriptor:
    """An instruction descriptor (9.7.16.4.2).

    Attributes:
        rows: M.
        columns: N.
        sum_type: Of D.
        a_type: Of A.
        b_type: Of B.
        sign: Of the products: -1 if one of A and B is negated.
        a_transposed: Whether A is M-major.
        b_transposed: Whether B is N-major.
        saturates: Whether integer sums stop at their type's ends.
    """

    rows: int
    columns: int
    sum_type: str
    a_type: str
    b_type: str
    sign: int
    a_transposed: bool
    b_transposed: bool
    saturates: bool

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, bits: int, kind: Kind, blocks: int) -> MultiplyDescriptor:
        """Decodes a descriptor for one block or two.

        Raises:
            IllegalInstructionError: With the field that is wrong.
        """
        name = f"instruction descriptor {bits:#x} of .kind::{kind.name}"
        if bits >> 2 & 1:
            raise IllegalInstructionError(f"{name}: says sparse")
        if bits >> 6 & 1 or bits >> 23 & 1 or bits >> 29 & 1 or bits & 3 or bits >> 30:
            raise IllegalInstructionError(f"{name}: a bit that must be 0 is not")
        if kind.name != "i8" and bits >> 3 & 1:
            raise IllegalInstructionError(f"{name}: saturates, which only integers do")
        if kind.name == "i8" and bits >> 13 & 3:
            raise IllegalInstructionError(f"{name}: negates, which only floats do")
        types: list[str] = []
        for matrix, code, known in (
            ("D", bits >> 4 & 3, kind.sums),
            ("A", bits >> 7 & 7, kind.elements),
            ("B", bits >> 10 & 7, kind.elements),
        ):
            if code not in known:
                allowed = ", ".join(f"{k} ({v})" for k, v in known.items())
                raise IllegalInstructionError(
                    f"{name}: the type of {matrix} is {code}; supported: {allowed}"
                )
            types.append(known[code])
        if kind.name == "f16" and types[0] == "f16" and types[1:] != ["f16", "f16"]:
            raise IllegalInstructionError(f"{name}: sums of f16 are of products of f16")
        rows, columns = (bits >> 24 & 31) << 4, (bits >> 17 & 63) << 3
        _check_shape(name, kind, rows, columns, blocks)
        negated_a, negated_b, *flags = (bool(bits >> shift & 1) for shift in (13, 14, 15, 16, 3))
        sign = -1 if negated_a != negated_b else 1
        return cls(rows, columns, types[0], types[1], types[2], sign, *flags)


def _check_shape(name: str, kind: Kind, rows: int, columns: int, blocks: int) -> None:
    """Table 39 of 9.7.16.2.1, dense."""
    if rows not in (64 * blocks, 128 * blocks):
        raise IllegalInstructionError(
            f"{name}: M is {rows}; {64 * blocks} and {128 * blocks} are allowed with "
            f".cta_group::{blocks}"
        )
    step = 8 * blocks
    if kind.name == "i8":
        step = 32 if blocks == 2 else 8 if columns <= 24 else 16
    if columns % step or not step <= columns <= 256:
        raise IllegalInstructionError(
            f"{name}: N is {columns}; multiples of {step} up to 256 are allowed with "
            f".cta_group::{blocks}"
        )
