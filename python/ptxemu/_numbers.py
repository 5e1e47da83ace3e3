"""Number formats that numpy does not have: bfloat16, tf32, 8-bit floats; and how PTX rounds.

bfloat16 is computed with as the float32 that it is the upper half of.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ._hardware.registers import Array

__all__ = [
    "NAN",
    "REDUCTIONS",
    "ROUNDINGS",
    "SMALLEST_NORMAL",
    "bfloat16_bits",
    "decode",
    "eight_codes",
    "eight_values",
    "exact",
    "flush",
    "nearest_bfloat16",
    "round_to",
    "to_odd",
]

#: What reductions do with two values, by their modifier.
REDUCTIONS: dict[str, np.ufunc] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}

#: Modifiers that say how a float is rounded.
ROUNDINGS = ("rn", "rz", "rm", "rp", "rna")

#: The NaN that arithmetic gives, by type (9.7.3, 9.7.4).
NAN = {"f32": 0x7FFFFFFF, "f16": 0x7FFF, "bf16": 0x7FFF}

_INTEGERS: dict[str, Any] = {"u8": np.uint8, "s8": np.int8}

#: Of float32.
SMALLEST_NORMAL = np.float32(2.0**-126)

_HALF, _ODD, _BELOW_TIE = np.uint32(16), np.uint32(1), np.uint32(0x7FFF)
_BELOW_SIGN, _INFINITY = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)


def flush(values: Array) -> Array:
    """Subnormal float32 to zeros of their sign (``.ftz``)."""
    flushed: Array = np.where(np.abs(values) < SMALLEST_NORMAL, np.copysign(0, values), values)
    result: Array = flushed.astype(np.float32)
    return result


def exact(bits: Array) -> Array:
    """bf16, as unsigned integers, to float32."""
    widened: Array = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return widened


def bfloat16_bits(values: Array) -> Array:
    """The bits of bf16 that float32 holds exactly; NaN becomes the ISA's."""
    bits = (values.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    result: Array = np.where(np.isnan(values), np.uint16(NAN["bf16"]), bits)
    return result


def nearest_bfloat16(bits: Array) -> Array:
    """Bits of float32 as bits of bf16: to nearest, ties to even; NaN is 0x7fff (9.7.9.21)."""
    rounded = (bits + _BELOW_TIE + (bits >> _HALF & _ODD)) >> _HALF
    found: Array = np.where(bits & _BELOW_SIGN > _INFINITY, _BELOW_TIE, rounded)
    return found


def to_odd(value: Array, error: Array) -> Array:
    """Rounds value + error to odd: a float64 from which any narrower rounding is right."""
    inexact = error != 0
    if not inexact.any():
        return value
    bits = value.view(np.int64)
    even = inexact & ((bits & 1) == 0) & np.isfinite(value)
    outwards = (error > 0) == (value > 0)
    step = np.where(outwards, 1, -1)
    # A sum that is exactly zero has no error.
    return (bits + np.where(even, step, 0)).view(np.float64)


def round_to(type_name: str, values: Array, rounding: str = "rn") -> Array:
    """Rounds float64 to a type.

    Args:
        type_name: ``f64``, ``f32``, ``f16`` or ``bf16``.
        values: Exact, or rounded to odd.
        rounding: ``rn``, ``rz``, ``rm``, ``rp`` or ``rna``.

    Returns:
        Numbers; for ``bf16`` its bits as float32 rows would hold them, exact in float32.
    """
    if type_name == "f64":
        return values
    kind: Any = {"f32": np.float32, "f16": np.float16, "bf16": np.float32}[type_name]
    if type_name == "bf16":
        return _round_bfloat16(values, rounding)
    nearest: Array = values.astype(kind)
    if rounding == "rn":
        return nearest
    back = nearest.astype(np.float64)
    up, down = back > values, back < values
    below: Array = np.nextafter(nearest, kind(-np.inf))
    above: Array = np.nextafter(nearest, kind(np.inf))
    if rounding == "rm":
        return np.where(up, below, nearest)
    if rounding == "rp":
        return np.where(down, above, nearest)
    if rounding == "rz":
        towards = np.where(values > 0, np.where(up, below, nearest), np.where(down, above, nearest))
        return towards.astype(kind)
    raise ValueError(rounding)


def _round_bfloat16(values: Array, rounding: str) -> Array:
    """Rounds float64 to bf16's eight bits of significand, as float32."""
    toward_zero = round_to("f32", values, "rz")
    bits = toward_zero.view(np.uint32).astype(np.int64)
    # What was cut off keeps the sum from looking like a tie.
    sticky = (toward_zero.astype(np.float64) != values) & np.isfinite(toward_zero)
    low = ((bits & 0xFFFF) << 1) | sticky
    kept = bits >> 16
    negative = bits >> 31 != 0
    if rounding in ("rn", "rna"):
        tie_up = (kept & 1) == 1 if rounding == "rn" else np.ones(bits.shape, np.bool_)
        up = (low > 0x10000) | ((low == 0x10000) & tie_up)
    elif rounding == "rz":
        up = np.zeros(bits.shape, np.bool_)
    else:
        up = (low != 0) & (negative == (rounding == "rm"))
    kept = kept + (up & np.isfinite(toward_zero))
    overflow = np.isinf(values) | np.isnan(values)
    rounded = (kept.astype(np.uint32) << np.uint32(16)).view(np.float32)
    result: Array = np.where(overflow, values.astype(np.float32), rounded)
    return result


@cache
def eight_values(type_name: str) -> Array:
    """The 256 values of an 8-bit float (9.7.9.21, 5.2.3), as float64.

    Args:
        type_name: ``e4m3``, which has no infinities, or ``e5m2``.
    """
    exponent, mantissa, bias = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15)}[type_name]
    codes = np.arange(256)
    fraction = codes & ((1 << mantissa) - 1)
    power = codes >> mantissa & ((1 << exponent) - 1)
    normal = (1 + fraction / (1 << mantissa)) * 2.0 ** (power - bias)
    small = fraction / (1 << mantissa) * 2.0 ** (1 - bias)
    values = np.where(power == 0, small, normal)
    top = power == (1 << exponent) - 1
    if mantissa == 3:
        values = np.where(top & (fraction == 7), np.nan, values)
    else:
        values = np.where(top, np.where(fraction == 0, np.inf, np.nan), values)
    found: Array = np.where(codes >= 128, -values, values)
    found.setflags(write=False)
    return found


def eight_codes(x: Array, type_name: str) -> Array:
    """Float64 as codes of an 8-bit float: nearest even, the largest beyond it, NaN 0x7f.

    Args:
        x: Any shape.
        type_name: ``e4m3`` or ``e5m2``.
    """
    positive = eight_values(type_name)[:128]
    largest = int(np.nanargmax(np.where(np.isfinite(positive), positive, -1)))
    table = positive[: largest + 1]
    magnitude = np.abs(x)
    above = np.clip(np.searchsorted(table, magnitude), 1, largest)
    down, up = magnitude - table[above - 1], table[above] - magnitude
    take_up = (up < down) | ((up == down) & (above % 2 == 0))
    code = np.where(take_up, above, above - 1)
    code = np.where(magnitude >= table[largest], largest, code)
    code = np.where(np.signbit(x), code | 0x80, code)
    return np.where(np.isnan(x), 0x7F, code).astype(np.uint16)


def decode(type_name: str) -> Callable[[Array], Array]:
    """Returns what turns bytes ``[rows, bytes]`` into float64 elements of a matrix's type.

    tf32 ignores the low 13 bits of a 32-bit float (9.7.14.2).
    """
    if type_name == "bf16":
        return lambda raw: exact(raw.view(np.uint16)).astype(np.float64)
    if type_name == "f16":
        return lambda raw: raw.view(np.float16).astype(np.float64)
    if type_name == "tf32":
        return lambda raw: (
            (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
        )
    if type_name in _INTEGERS:
        kind = _INTEGERS[type_name]
        return lambda raw: raw.view(kind).astype(np.float64)
    values = eight_values(type_name)

    def look_up(raw: Array) -> Array:
        found: Array = values[raw]
        return found

    return look_up
