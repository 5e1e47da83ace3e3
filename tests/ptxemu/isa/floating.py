"""Floating-point arithmetic (PTX ISA 9.0, 9.7.3 to 9.7.5), by rational numbers rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from . import exact
from .case import Array, Family, lane_case
from .exact import BF16, F16, F32, bits_of, floats

FAMILY = Family("floating")

_INF, _NAN = math.inf, math.nan
_COUNT = 768

#: What rounding, signs and ranges turn on, in each format.
_SPECIAL = {
    "f32": (
        *(0.0, 1.0, 1.5, 2.0, 3.0, 0.5, 1 + 2.0**-23, 1 - 2.0**-24, 2.0**-126, 2.0**-149),
        *(2.0**-126 - 2.0**-149, 3 * 2.0**-149, float(F32.largest), 2.0**127, 16777217.0 - 1),
        *(1 / 3, 0.1, 1e-20, 1e20, _INF, _NAN),
    ),
    "f16": (
        *(0.0, 1.0, 1.5, 2.0, 3.0, 0.5, 1 + 2.0**-10, 1 - 2.0**-11, 2.0**-14, 2.0**-24),
        *(2.0**-14 - 2.0**-24, 3 * 2.0**-24, 65504.0, 32768.0, 2049.0 - 1, _INF, _NAN),
    ),
    "bf16": (
        *(0.0, 1.0, 1.5, 2.0, 3.0, 0.5, 1 + 2.0**-7, 1 - 2.0**-8, 2.0**-126, 2.0**-133),
        *(2.0**-126 - 2.0**-133, 3 * 2.0**-133, float(BF16.largest), 257.0 - 1, _INF, _NAN),
    ),
}
_FORMATS = {"f32": F32, "f16": F16, "bf16": BF16}


def _snap(value: float, kind: str) -> float:
    if value == 0 or not math.isfinite(value):
        return value
    return exact.rounded(Fraction(value), _FORMATS[kind])


def _operands(kind: str, count: int) -> list[list[float]]:
    """Special values against each other, then numbers of nearby exponents, then of any."""
    rng = np.random.default_rng(len(kind) + count)
    special = [s * v for v in _SPECIAL[kind] for s in (1.0, -1.0)]
    columns: list[list[float]] = [[] for _ in range(count)]
    for k in range(_COUNT):
        if k < 400:
            row = [special[int(i)] for i in rng.integers(0, len(special), count)]
        else:
            scale = 6 if k < 600 else _FORMATS[kind].smallest * -0.9
            row = list(rng.standard_normal(count) * 2.0 ** rng.uniform(-scale, scale, count))
        for column, value in zip(columns, row, strict=True):
            column.append(_snap(float(value), kind))
    return columns


def _flushed(value: float) -> float:
    return math.copysign(0.0, value) if abs(value) < 2.0**-126 else value


def _add(
    opcode: str,
    function: Callable[..., float],
    operands: int,
    kind: str,
    code: str = "",
    **options: Any,
) -> None:
    """An instruction of one type; ``function`` of Python floats gives what the type holds."""
    columns = _operands(kind, operands)
    results = [function(*row) for row in zip(*columns, strict=True)]
    expected = floats(results, kind)
    inputs = [floats(column, kind) for column in columns]
    letters = ", ".join(f"%{letter}" for letter in "abc"[:operands])
    text = code or f"{opcode} %o, {letters};"
    lane_case(FAMILY, opcode, text, expected, *inputs, **options)


def _pairs(opcode: str, function: Callable[..., float], operands: int, kind: str) -> None:
    """An instruction on two elements of 16 bits: the second has the operands' other half."""
    columns = _operands(kind, operands)
    results = [bits_of(function(*row), kind) for row in zip(*columns, strict=True)]

    def packed(bits: Sequence[int]) -> Array:
        return np.array([b << 16 | a for a, b in zip(bits, bits[::-1], strict=True)], np.uint32)

    inputs = [packed([bits_of(value, kind) for value in column]) for column in columns]
    letters = ", ".join(f"%{letter}" for letter in "abc"[:operands])
    lane_case(FAMILY, opcode, f"{opcode} %o, {letters};", packed(results), *inputs)


for _mode in ("rn", "rz", "rm", "rp"):
    for _ftz in ("", ".ftz"):
        _in = _flushed if _ftz else float

        def _rounded(
            function: Callable[..., float],
            mode: str = _mode,
            flush: Callable[[float], float] = _in,
        ) -> Callable[..., float]:
            ftz = flush is _flushed
            return lambda *row: function(*(flush(x) for x in row), F32, mode, ftz)

        _add(f"add.{_mode}{_ftz}.f32", _rounded(exact.add), 2, "f32")
        _add(f"mul.{_mode}{_ftz}.f32", _rounded(exact.mul), 2, "f32")
        _add(f"fma.{_mode}{_ftz}.f32", _rounded(exact.fma), 3, "f32")
    _add(f"sub.{_mode}.f32", lambda a, b, m=_mode: exact.add(a, -b, F32, m), 2, "f32")


def _around_normal(name: str, down: float) -> None:
    """Products just below the smallest normal number, closer than its 24 bits tell."""
    a = np.full(128, 2.0**-63 * (1 + down), np.float32)
    b = np.full(128, 2.0**-63 * (1 - down), np.float32)
    b[1::2] *= -1
    a[64:] *= 1 + 2.0**-22
    rows = zip(a.tolist(), b.tolist(), strict=True)
    expected = floats([exact.mul(x, y, F32, "rn", True) for x, y in rows], "f32")
    lane_case(FAMILY, "mul.rn.ftz.f32", "mul.rn.ftz.f32 %o, %a, %b;", expected, a, b, suffix=name)
    lane_case(
        FAMILY,
        "fma.rn.ftz.f32",
        "fma.rn.ftz.f32 %o, %a, %b, 0f80000000;",
        floats(
            [v if v else -0.0 if k % 2 else 0.0 for k, v in enumerate(expected.tolist())], "f32"
        ),
        a,
        b,
        suffix=name,
    )


_around_normal("_tiny", 2.0**-23)


def _saturated(value: float) -> float:
    """To [0, 1]; NaN becomes 0 (9.7.3.3)."""
    return min(1.0, value) if value > 0 else 0.0


_add("add.sat.f32", lambda a, b: _saturated(exact.add(a, b, F32)), 2, "f32")
_add("fma.rn.sat.f32", lambda a, b, c: _saturated(exact.fma(a, b, c, F32)), 3, "f32")

for _kind, _form in (("f16", F16), ("bf16", BF16)):
    _add(f"fma.rn.{_kind}", lambda a, b, c, f=_form: exact.fma(a, b, c, f), 3, _kind)
    _pairs(f"fma.rn.{_kind}x2", lambda a, b, c, f=_form: exact.fma(a, b, c, f), 3, _kind)
    _add(
        f"fma.rn.relu.{_kind}",
        lambda a, b, c, f=_form: (lambda v: v if v > 0 or v != v else 0.0)(exact.fma(a, b, c, f)),
        3,
        _kind,
    )
    _pairs(f"add.rn.{_kind}x2", lambda a, b, f=_form: exact.add(a, b, f), 2, _kind)
    _pairs(f"mul.rn.{_kind}x2", lambda a, b, f=_form: exact.mul(a, b, f), 2, _kind)
    _add(f"sub.rn.{_kind}", lambda a, b, f=_form: exact.add(a, -b, f), 2, _kind)


def _extreme(larger: bool, nan: bool) -> Callable[[float, float], float]:
    """9.7.3.11, 9.7.3.12: the number beside a NaN, unless .NaN; -0 lies below 0."""

    def operation(a: float, b: float) -> float:
        if a != a or b != b:
            return _NAN if nan or (a != a and b != b) else (b if a != a else a)
        if a == b == 0:
            signs = math.copysign(1, a), math.copysign(1, b)
            return math.copysign(0.0, max(signs) if larger else min(signs))
        return max(a, b) if larger else min(a, b)

    return operation


for _name, _larger in (("min", False), ("max", True)):
    _add(f"{_name}.f32", _extreme(_larger, False), 2, "f32")
    _add(f"{_name}.NaN.f32", _extreme(_larger, True), 2, "f32")
    _pairs(f"{_name}.f16x2", _extreme(_larger, False), 2, "f16")
    _pairs(f"{_name}.bf16x2", _extreme(_larger, False), 2, "bf16")
    _pairs(f"{_name}.NaN.bf16x2", _extreme(_larger, True), 2, "bf16")


def _quotient(a: float, b: float) -> float:
    if a != a or b != b or (a == b == 0) or (math.isinf(a) and math.isinf(b)):
        return _NAN
    sign = math.copysign(1, a) * math.copysign(1, b)
    if math.isinf(a) or b == 0:
        return sign * _INF
    if math.isinf(b) or a == 0:
        return sign * 0.0
    return exact.rounded(Fraction(a) / Fraction(b), F32)


def _root(a: float) -> float:
    """The root of a scaled integer, with a bit for what it leaves."""
    if a != a or a < 0:
        return _NAN
    if a == 0 or math.isinf(a):
        return a
    fraction = Fraction(a) * 4**200
    whole = math.isqrt(fraction.numerator // fraction.denominator)
    inexact = whole * whole != fraction
    return exact.rounded((Fraction(whole) + Fraction(inexact, 2)) / 2**200, F32)


_add("div.rn.f32", _quotient, 2, "f32")
_add("rcp.rn.f32", lambda a: _quotient(1.0, a), 1, "f32")
_add("sqrt.rn.f32", _root, 1, "f32")
_add("abs.f32", lambda a: _NAN if a != a else abs(a), 1, "f32")
_add("neg.f32", lambda a: _NAN if a != a else -a, 1, "f32")

_TESTS: dict[str, Callable[[float, float], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a == a and b == b and a != b,
    "lt": lambda a, b: a < b,
    "ge": lambda a, b: a >= b,
    "equ": lambda a, b: a == b or a != a or b != b,
    "neu": lambda a, b: a != b,
    "ltu": lambda a, b: a < b or a != a or b != b,
    "num": lambda a, b: a == a and b == b,
    "nan": lambda a, b: a != a or b != b,
}
for _name, _test in _TESTS.items():
    _add(
        f"setp.{_name}.f32",
        lambda a, b, f=_test: 7.0 if f(a, b) else 9.0,
        2,
        "f32",
        f"setp.{_name}.f32 %p, %a, %b; selp.f32 %o, 7.0, 9.0, %p;",
    )


def _approximate(
    opcode: str, function: Callable[[float], float], low: float, high: float, **error: Any
) -> None:
    """An instruction of which the ISA bounds the error, on a range."""
    rng = np.random.default_rng(7)
    inputs = np.concatenate([rng.uniform(low, high, 500), np.linspace(low, high, 140)]).astype(
        np.float32
    )
    results = np.array([function(float(value)) for value in inputs], np.float32)
    lane_case(FAMILY, opcode, f"{opcode} %o, %a;", results, inputs, **error)


# The bounds of 9.7.3.13 to 9.7.3.22 and 9.7.4.10, half a unit for the reference's own rounding.
_HALF = 2.0**-24
_approximate("ex2.approx.f32", lambda x: 2.0**x, -100, 100, relative=2.0**-22 + _HALF)
_approximate("ex2.approx.ftz.f32", lambda x: 2.0**x, -20, 20, relative=2.0**-22 + _HALF)
_approximate("lg2.approx.f32", math.log2, 0.001, 1000, absolute=2.0**-22, relative=2.0**-22)
_approximate("rcp.approx.f32", lambda x: 1 / x, 0.01, 100, relative=2.0**-23 + _HALF)
_approximate("rsqrt.approx.f32", lambda x: x**-0.5, 0.01, 100, relative=2.0**-22.9 + _HALF)
_approximate("sqrt.approx.f32", math.sqrt, 0.01, 100, relative=2.0**-23 + _HALF)
_approximate("sin.approx.f32", math.sin, -3.14, 3.14, absolute=2.0**-20.5 + _HALF)
_approximate("cos.approx.f32", math.cos, -3.14, 3.14, absolute=2.0**-20.5 + _HALF)
_approximate("tanh.approx.f32", math.tanh, -8, 8, relative=2.0**-11)


def _ratio(opcode: str) -> None:
    rng = np.random.default_rng(8)
    a, b = (rng.uniform(0.01, 100, 640).astype(np.float32) for _ in range(2))
    results = (a.astype(np.float64) / b).astype(np.float32)
    lane_case(FAMILY, opcode, f"{opcode} %o, %a, %b;", results, a, b, relative=2.0**-22 + _HALF)


_ratio("div.approx.f32")
_ratio("div.full.f32")


def _half_functions() -> None:
    """ex2 and tanh of 16-bit elements (9.7.4.10, 9.7.4.9): one bound is relative, one absolute."""
    rng = np.random.default_rng(9)
    values = rng.uniform(-4, 4, 640)
    halves = values.astype(np.float16)
    bounds = {"ex2": {"relative": 2.0**-9.9}, "tanh": {"absolute": 2.0**-10.987}}
    for name, function in (("ex2", np.exp2), ("tanh", np.tanh)):
        # Compared as numbers, converted by the kernel.
        lane_case(
            FAMILY,
            f"{name}.approx.f16",
            f"{{ .reg .b16 %h; {name}.approx.f16 %h, %a; cvt.f32.f16 %o, %h; }}",
            function(halves.astype(np.float64)).astype(np.float32),
            halves.view(np.uint16),
            **bounds[name],
        )


_half_functions()
