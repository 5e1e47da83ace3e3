"""Rounding by its definition: rational numbers, integers, and nothing of the emulator's."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    *("BF16", "E4M3", "E5M2", "F16", "F32", "TF32"),
    *("Format", "add", "bits_of", "fma", "floats", "mul", "rounded"),
]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Format:
    """A binary floating-point format (PTX ISA 9.0, 5.2.3; IEEE 754).

    Attributes:
        precision: Bits of the significand, the leading one included.
        smallest: Exponent of the smallest normal number.
        largest: The largest finite number.
    """

    precision: int
    smallest: int
    largest: Fraction


def _format(precision: int, smallest: int) -> Format:
    return Format(precision, smallest, (2 - Fraction(2) ** (1 - precision)) * 2 ** (1 - smallest))


F32 = _format(24, -126)
F16 = _format(11, -14)
BF16 = _format(8, -126)
TF32 = _format(11, -126)
E5M2 = _format(3, -14)
#: Has no infinities: its largest exponent holds numbers up to 448.
E4M3 = Format(4, -6, Fraction(448))


def rounded(value: Fraction, form: Format, mode: str = "rn", overflow: bool = True) -> float:
    """A number in a format, as a Python float.

    Args:
        value: The exact number; not zero.
        form: The format.
        mode: ``rn``, ``rz``, ``rm``, ``rp`` or ``rna`` (ties away from zero).
        overflow: Whether what is too large becomes infinite, where the mode says so.
    """
    sign = -1.0 if value < 0 else 1.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, form.smallest) - form.precision + 1)
    whole = magnitude // unit
    rest = magnitude / unit - whole
    half = Fraction(1, 2)
    up = {
        "rn": rest > half or (rest == half and whole % 2 == 1),
        "rna": rest >= half,
        "rz": False,
        "rm": rest > 0 and value < 0,
        "rp": rest > 0 and value > 0,
    }[mode]
    result = (whole + up) * unit
    if result > form.largest:
        to_infinity = mode in ("rn", "rna") or mode == ("rp" if value > 0 else "rm")
        return sign * (math.inf if overflow and to_infinity else float(form.largest))
    return sign * float(result)


def fma(a: float, b: float, c: float, form: Format, mode: str = "rn", flush: bool = False) -> float:
    """``a * b + c`` rounded once (IEEE 754, 6.3, for the signs of zeros).

    With ``flush`` a zero where the result, rounded as if exponents had no end, is no normal number.
    """
    if not all(math.isfinite(entry) for entry in (a, b, c)):
        with np.errstate(all="ignore"):
            # The product of finite numbers is finite here, and infinite or NaN ones need no bits.
            return float(np.float64(a) * np.float64(b) + np.float64(c))
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if flush and exact:
        unbounded = rounded(exact * 2**64, form, mode)
        if abs(unbounded) < 2.0 ** (form.smallest + 64):
            return -0.0 if exact < 0 else 0.0
    if exact:
        return rounded(exact, form, mode)
    negative = math.copysign(1, a) * math.copysign(1, b) < 0
    if Fraction(a) * Fraction(b) == 0 and negative == (math.copysign(1, c) < 0):
        return -0.0 if negative else 0.0
    return -0.0 if mode == "rm" else 0.0


def add(a: float, b: float, form: Format, mode: str = "rn", flush: bool = False) -> float:
    """``a + b``."""
    return fma(a, 1.0, b, form, mode, flush)


def mul(a: float, b: float, form: Format, mode: str = "rn", flush: bool = False) -> float:
    """``a * b``; the zero that is added must not change the sign."""
    zero = math.copysign(0.0, math.copysign(1, a) * math.copysign(1, b))
    return fma(a, b, zero, form, mode, flush)


def bits_of(value: float, kind: str) -> int:
    """The bits of a float that a format holds exactly; NaN is the one that the ISA names."""
    if kind == "f16":
        return 0x7FFF if value != value else int(struct.unpack("<H", struct.pack("<e", value))[0])
    wide = 0x7FFFFFFF if value != value else int(struct.unpack("<I", struct.pack("<f", value))[0])
    return wide if kind == "f32" else wide >> 16


def floats(values: list[float], kind: str) -> Array:
    """Floats as elements: float32, or the bits of f16 and bf16."""
    bits = [bits_of(value, kind) for value in values]
    if kind == "f32":
        return np.array(bits, np.uint32).view(np.float32)
    return np.array(bits, np.uint16)
