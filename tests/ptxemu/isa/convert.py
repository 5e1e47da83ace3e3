"""Conversions (PTX ISA 9.0, 9.7.9.21), by rational numbers rounded by their definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from . import exact
from .case import Array, Family, lane_case, words
from .exact import BF16, E4M3, E5M2, F16, F32, TF32, Format, bits_of, floats

FAMILY = Family("convert")

_COUNT = 640


def _numbers(form: Format) -> list[float]:
    """float32 values around what a narrower format turns on: ties, limits, subnormals."""
    rng = np.random.default_rng(form.precision)
    unit = 2.0 ** (1 - form.precision)
    found: list[float] = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0]
    for base in (
        1.0,
        2.0,
        1.5,
        float(form.largest),
        2.0**form.smallest,
        2.0 ** (form.smallest - 2),
    ):
        spacing = max(unit * base, 2.0**form.smallest * unit)
        for k in (0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 3.5, 0.5 + 2.0**-6, 0.5 - 2.0**-6):
            for sign in (1.0, -1.0):
                found += [sign * (base + k * spacing), sign * (base - k * spacing / 2)]
    scale = -form.smallest + 4
    while len(found) < _COUNT:
        found.append(float(rng.standard_normal() * 2.0 ** rng.uniform(-scale, scale)))
    with np.errstate(all="ignore"):
        return [float(np.float32(value)) for value in found[:_COUNT]]


def _narrow(form: Format, mode: str, relu: bool = False) -> Callable[[float], float]:
    def operation(value: float) -> float:
        if value != value:
            return value
        if relu and (value < 0 or value == 0):
            return 0.0
        if value == 0 or math.isinf(value):
            return value
        return exact.rounded(Fraction(value), form, mode)

    return operation


def _to_half(opcode: str, form: Format, kind: str, mode: str, relu: bool = False) -> None:
    values = _numbers(form)
    results = [_narrow(form, mode, relu)(value) for value in values]
    lane_case(FAMILY, opcode, f"{opcode} %o, %a;", floats(results, kind), floats(values, "f32"))


for _mode in ("rn", "rz", "rm", "rp"):
    _to_half(f"cvt.{_mode}.f16.f32", F16, "f16", _mode)
for _mode in ("rn", "rz"):
    _to_half(f"cvt.{_mode}.bf16.f32", BF16, "bf16", _mode)
    _to_half(f"cvt.{_mode}.relu.bf16.f32", BF16, "bf16", _mode, relu=True)


def _to_pair(opcode: str, form: Format, kind: str, mode: str) -> None:
    """``d, a, b``: a is the upper half."""
    values = _numbers(form)
    bits = [bits_of(_narrow(form, mode)(value), kind) for value in values]
    expected = words(*(high << 16 | low for high, low in zip(bits, bits[::-1], strict=True)))
    inputs = floats(values, "f32"), floats(values[::-1], "f32")
    lane_case(FAMILY, opcode, f"{opcode} %o, %a, %b;", expected, *inputs)


for _mode in ("rn", "rz"):
    _to_pair(f"cvt.{_mode}.f16x2.f32", F16, "f16", _mode)
    _to_pair(f"cvt.{_mode}.bf16x2.f32", BF16, "bf16", _mode)


def _eight(value: float, form: Format, relu: bool) -> int:
    """Bits of an 8-bit float: saturated; NaN is 0x7f."""
    if value != value:
        return 0x7F
    if relu and value <= 0:
        return 0
    sign = 0x80 if math.copysign(1, value) < 0 else 0
    largest = float(form.largest)
    if value == 0:
        return sign
    if math.isinf(value):
        magnitude = largest
    else:
        magnitude = min(abs(exact.rounded(Fraction(value), form, "rn", overflow=False)), largest)
    if magnitude == 0:
        return sign
    mantissa = form.precision - 1
    exponent = max(math.frexp(magnitude)[1] - 1, form.smallest)
    steps = int(Fraction(magnitude) / Fraction(2) ** (exponent - mantissa))
    # A subnormal's steps stay below the leading bit, so that its exponent field is 0.
    return sign | ((exponent - form.smallest) << mantissa) + steps


def _to_eights(opcode: str, form: Format, relu: bool) -> None:
    values = _numbers(form)
    codes = [_eight(value, form, relu) for value in values]
    expected = np.array([a << 8 | b for a, b in zip(codes, codes[::-1], strict=True)], np.uint16)
    inputs = floats(values, "f32"), floats(values[::-1], "f32")
    lane_case(FAMILY, opcode, f"{opcode} %o, %a, %b;", expected, *inputs)


def _from_eights(opcode: str, form: Format, relu: bool) -> None:
    """All 256 codes, twice and a half: f16 holds every one of them."""
    codes = np.arange(_COUNT) % 256

    def value(code: int) -> float:
        mantissa, top = form.precision - 1, 0x7F >> (form.precision - 1)
        power, fraction = (code & 0x7F) >> mantissa, code & ((1 << mantissa) - 1)
        sign = -1.0 if code & 0x80 else 1.0
        if form is E4M3 and code & 0x7F == 0x7F:
            return math.nan
        if form is E5M2 and power == top:
            return math.nan if fraction else sign * math.inf
        if power == 0:
            return sign * fraction * 2.0 ** (form.smallest - mantissa)
        return sign * (1 + fraction * 2.0**-mantissa) * 2.0 ** (power - 1 + form.smallest)

    def half(code: int) -> int:
        number = value(code)
        if relu and (number < 0 or number == 0):
            return 0
        return bits_of(number, "f16")

    inputs = np.array([c << 8 | (255 - c) for c in codes], np.uint16)
    expected = words(*(half(int(c)) << 16 | half(255 - int(c)) for c in codes))
    lane_case(FAMILY, opcode, f"{opcode} %o, %a;", expected, inputs)


for _name, _form in (("e4m3x2", E4M3), ("e5m2x2", E5M2)):
    _to_eights(f"cvt.rn.satfinite.{_name}.f32", _form, False)
    _to_eights(f"cvt.rn.satfinite.relu.{_name}.f32", _form, True)
    _from_eights(f"cvt.rn.f16x2.{_name}", _form, False)
    _from_eights(f"cvt.rn.relu.f16x2.{_name}", _form, True)


def _to_tf32(mode: str) -> None:
    """10 bits of fraction are kept; the result is only defined where it is a number."""
    values = [value for value in _numbers(TF32) if math.isfinite(value) and value]
    values += [1.0] * (_COUNT - len(values))
    results = [exact.rounded(Fraction(value), TF32, mode) for value in values]
    opcode = f"cvt.{mode}.tf32.f32"
    lane_case(FAMILY, opcode, f"{opcode} %o, %a;", floats(results, "f32"), floats(values, "f32"))


_to_tf32("rna")

_WHOLE: dict[str, Callable[[Fraction], int]] = {
    "rni": lambda x: round(x),
    "rzi": lambda x: math.trunc(x),
    "rmi": lambda x: math.floor(x),
    "rpi": lambda x: math.ceil(x),
}


def _integer_inputs() -> list[float]:
    rng = np.random.default_rng(3)
    found = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, 0.75, -0.75, math.inf, -math.inf, math.nan]
    for power in (7, 8, 15, 16, 31, 32, 63, 64):
        for sign in (1.0, -1.0):
            found += [
                sign * 2.0**power,
                sign * (2.0**power - 1),
                sign * 2.0**power * (1 - 2.0**-24),
            ]
    while len(found) < _COUNT:
        found.append(float(rng.standard_normal() * 2.0 ** rng.uniform(-2, 66)))
    return [float(np.float32(value)) for value in found]


def _to_integer(opcode: str, mode: str, kind: str, bits: int) -> None:
    """Out of range gives the nearest; NaN 0, with 64 bits the top bit alone (9.7.9.21)."""
    low = -(1 << (bits - 1)) if kind == "s" else 0
    high = (1 << (bits - (kind == "s"))) - 1

    def operation(value: float) -> int:
        if value != value:
            return 1 << 63 if bits == 64 else 0
        if math.isinf(value):
            return high if value > 0 else low
        return max(low, min(high, _WHOLE[mode](Fraction(value))))

    values = _integer_inputs()
    kind_of: Any = f"u{bits // 8}"
    expected = words(*(operation(value) for value in values), dtype=kind_of)
    lane_case(FAMILY, opcode, f"{opcode} %o, %a;", expected, floats(values, "f32"))


for _mode in _WHOLE:
    for _bits in (16, 32, 64):
        for _kind in "us":
            _to_integer(f"cvt.{_mode}.{_kind}{_bits}.f32", _mode, _kind, _bits)
    _values = [value for value in _integer_inputs() if math.isfinite(value)]
    _values += [0.0] * (_COUNT - len(_values))
    _results = [math.copysign(float(_WHOLE[_mode](Fraction(value))), value) for value in _values]
    lane_case(
        FAMILY,
        f"cvt.{_mode}.f32.f32",
        f"cvt.{_mode}.f32.f32 %o, %a;",
        floats(_results, "f32"),
        floats(_values, "f32"),
    )


def _from_integer(mode: str, kind: str, bits: int, target: str, form: Format) -> None:
    rng = np.random.default_rng(bits)
    values = [0, 1, 2, 3, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1]
    for power in range(8, bits, 3):
        values += [(1 << power) + d for d in (-1, 1, 1 << power - 8, (1 << power - 8) + 1)]
    while len(values) < _COUNT:
        values.append(int(rng.integers(0, 1 << 63, dtype=np.uint64)) >> int(rng.integers(0, bits)))
    values = [value % (1 << bits) for value in values[:_COUNT]]
    seen = [v - (1 << bits) if kind == "s" and v >> (bits - 1) else v for v in values]
    results = [exact.rounded(Fraction(v), form, mode) if v else 0.0 for v in seen]
    opcode = f"cvt.{mode}.{target}.{kind}{bits}"
    dtype: Any = f"u{bits // 8}"
    inputs = words(*values, dtype=dtype)
    lane_case(FAMILY, opcode, f"{opcode} %o, %a;", floats(results, target), inputs)


for _mode in ("rn", "rz", "rm", "rp"):
    for _kind in "us":
        for _bits in (16, 32, 64):
            _from_integer(_mode, _kind, _bits, "f32", F32)
    _from_integer(_mode, "s", 32, "f16", F16)


def _widen(source: str) -> None:
    """Every code of a 16-bit float, or nearly."""
    codes = (np.arange(_COUNT) * 103 % 65536).astype(np.uint16)
    if source == "bf16":
        wide = codes.astype(np.uint32) << 16
    else:
        wide = codes.view(np.float16).astype(np.float32).view(np.uint32)
    numbers = wide.view(np.float32)
    # A NaN keeps or loses its payload: the ISA does not say; numbers only.
    codes = np.where(np.isnan(numbers), np.uint16(0), codes).astype(np.uint16)
    expected: Array = np.where(np.isnan(numbers), np.float32(0), numbers)
    opcode = f"cvt.f32.{source}"
    lane_case(FAMILY, opcode, f"{opcode} %o, %a;", expected, codes)


_widen("f16")
_widen("bf16")


def _between(target: str, source: str, saturate: bool) -> None:
    """Integers: the low bits, or the nearest that the target holds."""
    rng = np.random.default_rng(5)
    source_bits, bits = int(source[1:]), int(target[1:])
    values = [
        int(v) >> int(s)
        for v, s in zip(
            rng.integers(0, 1 << 63, _COUNT, dtype=np.uint64),
            rng.integers(0, 62, _COUNT),
            strict=True,
        )
    ]
    values = [(v if k % 2 else -v) % (1 << source_bits) for k, v in enumerate(values)]
    low = -(1 << (bits - 1)) if target[0] == "s" else 0
    high = (1 << (bits - (target[0] == "s"))) - 1
    results = []
    for v in values:
        if source[0] == "s" and v >> (source_bits - 1):
            v -= 1 << source_bits
        results.append(max(low, min(high, v)) if saturate else v)
    opcode = f"cvt.{'sat.' if saturate else ''}{target}.{source}"
    # 8-bit results stand in wider registers, extended.
    code = f"{opcode} %o, %a;"
    into: Any = f"u{max(16, bits) // 8}"
    if bits == 8:
        results = [v - 256 if target[0] == "s" and v % 256 > 127 else v % 256 for v in results]
        results = [((v + 128) % 256) - 128 if target[0] == "s" else v % 256 for v in results]
    seen: Any = f"u{source_bits // 8}"
    inputs = words(*values, dtype=seen)
    lane_case(FAMILY, opcode, code, words(*results, dtype=into), inputs)


for _target, _source in (
    *(("u16", "u32"), ("s16", "s32"), ("u32", "s64"), ("s32", "u64"), ("u64", "u32")),
    *(("s64", "s32"), ("s32", "s16"), ("u32", "u16"), ("s8", "s32"), ("u8", "u32")),
):
    _between(_target, _source, False)
for _target, _source in (
    ("s16", "s32"),
    ("u16", "s32"),
    ("s32", "s64"),
    ("u8", "s32"),
    ("s8", "s32"),
):
    _between(_target, _source, True)
