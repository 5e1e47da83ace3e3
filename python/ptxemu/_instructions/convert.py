"""Conversions (PTX ISA 9.0, 9.7.9.21)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .._hardware.registers import LANES, Array, view_of
from .._numbers import (
    ROUNDINGS,
    bfloat16_bits,
    eight_codes,
    eight_values,
    exact,
    flush,
    nearest_bfloat16,
    round_to,
    to_odd,
)
from .._text.syntax import type_bits
from .._warps.paths import Path, Step
from .._warps.table import Form, assign, instruction
from .floating import writer

_INTEGER_ROUNDINGS = ("rni", "rzi", "rmi", "rpi")
_FLOATS = ("f16", "bf16", "f32", "f64")
_EIGHT_BITS = ("e4m3x2", "e5m2x2")

_TO_INTEGER: dict[str, Callable[[Array], Array]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}


@instruction("cvt")
def _convert(form: Form) -> Step:
    """By the types; the destination's comes first."""
    to_integer = form.take(*_INTEGER_ROUNDINGS)
    rounding = form.take(*ROUNDINGS)
    saturate, ftz, relu = form.flag("sat"), form.flag("ftz"), form.flag("relu")
    satfinite = form.flag("satfinite")
    target, source = form.type(), form.type()
    if target in _EIGHT_BITS:
        return _to_eight(form, target, source, relu)
    if source in _EIGHT_BITS:
        return _from_eight(form, target, source, relu)
    if target in ("f16x2", "bf16x2"):
        return _to_pair(form, target, rounding, relu, satfinite)
    if satfinite and target != "tf32":
        form.refuse("the modifier .satfinite is not supported")
    form.arity(2)
    if target == "tf32":
        return _row(form, "u32", "f32", lambda a: _to_tf32(a, rounding, relu))
    source_float, target_float = source in _FLOATS, target in _FLOATS
    if source_float and target_float:
        operation = _between_floats(target, source, rounding, to_integer, ftz, saturate, relu)
    elif source_float:
        operation = _float_to_integer(target, source, to_integer or "rzi", ftz)
    elif target_float:
        operation = _integer_to_float(target, rounding or "rn")
    else:
        operation = _between_integers(target, source, saturate)
    return _row(form, target, source, operation)


def _row(form: Form, target: str, source: str, operation: Callable[[Array], Array]) -> Step:
    """A step from one row to another; registers may be wider than their types (9.4.1)."""
    wide_target, wide_source = form.wide_type(0, target), form.wide_type(1, source)
    d, a = form.target(0, wide_target), form.source(1, wide_source)
    into, seen = view_of(wide_target), view_of(wide_source)
    kind = _numpy_type(source)
    bits = type_bits(target)
    widen: Any = np.dtype(f"u{type_bits(wide_target) // 8}")
    signed = target.startswith("s") and type_bits(wide_target) > bits

    def step(t: Path) -> None:
        value = operation(_narrow(t.files[seen][a], kind))
        raw = value.view(f"u{value.dtype.itemsize}")
        if signed:
            raw = value.view(f"i{value.dtype.itemsize}")
        assign(t, into, d, raw.astype(widen))

    return step


def _narrow(row: Array, kind: np.dtype[Any]) -> Array:
    """The low bytes of a register, as a type."""
    if row.dtype.itemsize == kind.itemsize:
        return row.view(kind)
    return row.astype(f"u{kind.itemsize}").view(kind)


def _numpy_type(type_name: str) -> np.dtype[Any]:
    bits = type_bits(type_name)
    if type_name in ("f16", "f32", "f64"):
        return np.dtype(f"f{bits // 8}")
    return np.dtype(f"{'i' if type_name.startswith('s') else 'u'}{bits // 8}")


def _between_integers(target: str, source: str, saturate: bool) -> Callable[[Array], Array]:
    kind = _numpy_type(target)
    if not saturate:
        return lambda a: a.astype(kind)
    limits = np.iinfo(kind)
    own = np.iinfo(_numpy_type(source))
    low, high = max(limits.min, own.min), min(limits.max, own.max)
    return lambda a: np.clip(a, low, high).astype(kind)


def _float_to_integer(
    target: str, source: str, rounding: str, ftz: bool
) -> Callable[[Array], Array]:
    """Out-of-range values become the nearest; NaN 0, or the top bit where 64 bits are involved."""
    kind = _numpy_type(target)
    limits = np.iinfo(kind)
    wide = source == "f64" or type_bits(target) == 64
    nan = 1 << (type_bits(target) - 1) if wide else 0

    def operation(a: Array) -> Array:
        values = exact(a) if source == "bf16" else a
        if ftz and source == "f32":
            values = flush(values)
        whole = _TO_INTEGER[rounding](values.astype(np.float64))
        low, high = whole <= float(limits.min), whole >= float(limits.max)
        safe = np.where(low | high | np.isnan(whole), 0, whole).astype(kind)
        result = np.where(high, limits.max, np.where(low, limits.min, safe)).astype(kind)
        bits = result.view(f"u{kind.itemsize}")
        return np.where(np.isnan(whole), nan, bits).astype(bits.dtype).view(kind)

    return operation


def _integer_to_float(target: str, rounding: str) -> Callable[[Array], Array]:
    def operation(a: Array) -> Array:
        if rounding == "rn" and target in ("f32", "f64"):
            return a.astype(_numpy_type(target))
        wide, error = _exact_float(a)
        rounded = round_to(target, wide if target == "f64" else to_odd(wide, error), rounding)
        return bfloat16_bits(rounded) if target == "bf16" else rounded

    return operation


def _exact_float(a: Array) -> tuple[Array, Array]:
    """Integers as float64, and what that leaves out."""
    wide = a.astype(np.float64)
    if a.dtype.itemsize < 8:
        return wide, np.zeros(LANES)
    error = [int(x) - int(y) for x, y in zip(a, wide, strict=True)]
    return wide, np.array(error, np.float64)


def _between_floats(
    target: str,
    source: str,
    rounding: str,
    to_integer: str,
    ftz: bool,
    saturate: bool,
    relu: bool,
) -> Callable[[Array], Array]:
    write = writer(target, ftz, saturate)

    def operation(a: Array) -> Array:
        values = exact(a) if source == "bf16" else a
        if ftz and source == "f32":
            values = flush(values)
        wide = values.astype(np.float64)
        if to_integer:
            wide = _TO_INTEGER[to_integer](wide)
        if relu:
            wide = np.where(wide > 0, wide, np.where(np.isnan(wide), wide, 0.0))
        if target == "f64" or target == source:
            return write(wide if target == "f64" else round_to(target, wide))
        return write(round_to(target, wide, rounding or "rn"))

    return operation


def _to_tf32(a: Array, rounding: str, relu: bool) -> Array:
    """9.7.9.21: 10 bits of significand; .rna rounds ties away, .rn to even."""
    bits = a.view(np.uint32).astype(np.uint64)
    tie = np.uint64(0x1000) if rounding in ("rna", "") else 0xFFF + (bits >> np.uint64(13) & 1)
    rounded = (bits + tie) & np.uint64(0xFFFFE000)
    if rounding == "rz":
        rounded = bits & np.uint64(0xFFFFE000)
    result: Array = np.where(np.isnan(a), np.uint64(0x7FFFFFFF), rounded)
    if relu:
        result = np.where((a < 0) & ~np.isnan(a), 0, result)
    narrowed: Array = result.astype(np.uint32)
    return narrowed


def _to_pair(form: Form, target: str, rounding: str, relu: bool, satfinite: bool) -> Step:
    """9.7.9.21: ``d, a, b``: a goes to the upper half, b to the lower."""
    form.arity(3)
    if satfinite:
        form.refuse("the modifier .satfinite is not supported")
    d, a, b = form.target(0, "u32"), form.source(1, "f32"), form.source(2, "f32")
    numbers, words = view_of("f32"), view_of("u32")
    element = target[:-2]
    if element == "bf16" and rounding == "rn" and not relu:

        def nearest(t: Path) -> None:
            rows = t.files[words]
            assign(
                t, words, d, nearest_bfloat16(rows[a]) << np.uint32(16) | nearest_bfloat16(rows[b])
            )

        return nearest
    operation = _between_floats(element, "f32", rounding, "", False, False, relu)

    def step(t: Path) -> None:
        rows = t.files[numbers]
        high, low = operation(rows[a]).view(np.uint16), operation(rows[b]).view(np.uint16)
        assign(t, words, d, high.astype(np.uint32) << np.uint32(16) | low)

    return step


def _to_eight(form: Form, target: str, source: str, relu: bool) -> Step:
    """9.7.9.21: .satfinite: rounded to nearest even, clamped to the largest; NaN is 0x7f."""
    if source != "f32":
        form.refuse(f"from .{source} is not supported")
    form.arity(3)
    d, a, b = form.target(0, "u16"), form.source(1, "f32"), form.source(2, "f32")
    numbers, halves = view_of("f32"), view_of("u16")
    element = target[:-2]

    def encode(x: Array) -> Array:
        code = eight_codes(x.astype(np.float64), element)
        return np.where(x <= 0, np.uint16(0), code) if relu else code

    def step(t: Path) -> None:
        rows = t.files[numbers]
        assign(t, halves, d, encode(rows[a]) << np.uint16(8) | encode(rows[b]))

    return step


def _from_eight(form: Form, target: str, source: str, relu: bool) -> Step:
    """9.7.9.21: two 8-bit floats to f16x2, exactly."""
    if target != "f16x2":
        form.refuse(f"to .{target} is not supported")
    form.arity(2)
    d, a = form.target(0, "u32"), form.source(1, "u16")
    values = eight_values(source[:-2])
    with np.errstate(all="ignore"):
        halves = values.astype(np.float16).view(np.uint16).astype(np.uint32)
    halves = np.where(np.isnan(values), 0x7FFF, halves).astype(np.uint32)
    if relu:
        halves = np.where(values <= 0, 0, halves)

    def step(t: Path) -> None:
        both = t.files[view_of("u16")][a]
        result = halves[both >> 8] << np.uint32(16) | halves[both & 0xFF]
        assign(t, view_of("u32"), d, result)

    return step
