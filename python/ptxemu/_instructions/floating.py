"""Floating-point arithmetic (PTX ISA 9.0, 9.7.3 to 9.7.5).

Sums and products of f16, bf16 and f32 are computed in float64 with the rounding error kept, then
rounded once, in the mode that the instruction names: bit for bit what the ISA says. Approximate
instructions (``.approx``, 9.7.3) give the correctly rounded value: hardware is within the error
that the ISA allows of it, and kernels must not depend on more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .._hardware.registers import Array, view_of
from .._numbers import (
    NAN,
    ROUNDINGS,
    SMALLEST_NORMAL,
    bfloat16_bits,
    exact,
    flush,
    round_to,
    to_odd,
)
from .._warps.paths import Path, Step
from .._warps.table import Form, assign, instruction

__all__ = ["build", "reader", "writer"]

Unary = Callable[[Array], Array]


def _tiny(values: Array, rounding: str) -> Array:
    """Float64 results that ``.ftz`` flushes to zeros; the others as they are.

    An H200 flushes what lies below the normal numbers when it has been rounded to 24 bits, as if
    exponents had no end (``tests/ptxemu/isa/floating.py``): the subnormals' rounding comes too
    late.
    """
    scaled = round_to("f32", values * 2.0**64, rounding)
    small = np.abs(scaled) < SMALLEST_NORMAL * np.float32(2.0**64)
    flushed: Array = np.where(small, np.copysign(0, values), values)
    return flushed


def reader(type_name: str, ftz: bool = False) -> Unary:
    """Returns what turns a type's row into numbers that numpy computes with."""
    if type_name == "bf16":
        return exact
    if ftz and type_name == "f32":
        return flush
    return lambda row: row


def _sum(a: Array, b: Array, rounding: str = "rn") -> tuple[Array, Array]:
    """A sum in float64 and its rounding error; down, what cancels leaves -0 (IEEE 754, 6.3)."""
    total = a + b
    if rounding == "rm":
        total = np.where((total == 0) & (np.signbit(a) | np.signbit(b)), -0.0, total)
    b_part = total - a
    error = (a - (total - b_part)) + (b - b_part)
    return total, np.where(np.isfinite(error), error, 0.0)


def writer(type_name: str, ftz: bool = False, saturate: bool = False) -> Unary:
    """Returns what turns rounded numbers into a row; NaN is the ISA's, ``.sat`` is 0 to 1."""

    def write(values: Array) -> Array:
        if saturate:
            # The maximum of zeros may be -0, which .sat is not.
            clipped = np.where(values > 0, np.minimum(values, 1), 0)
            values = clipped.astype(values.dtype)
        if ftz and type_name == "f32":
            values = flush(values)
        if type_name == "bf16":
            return bfloat16_bits(values)
        if type_name == "f64":
            return values
        if type_name == "f32":
            return _canonical(values.astype(np.float32), np.uint32, NAN["f32"])
        return _canonical(values.astype(np.float16), np.uint16, NAN["f16"])

    return write


def _canonical(values: Array, kind: Any, nan: int) -> Array:
    lost = np.isnan(values)
    if lost.any():
        values = values.copy()
        values.view(kind)[lost] = nan
    return values


#: Types of two elements in a register, and the element's.
_PAIRS = {"f16x2": "f16", "bf16x2": "bf16", "f32x2": "f32"}

#: What numpy sees the elements of a pair as.
_PAIR_KINDS: dict[str, Any] = {"f16": np.float16, "bf16": np.uint16, "f32": np.float32}


def _step(form: Form, type_name: str, operation: Callable[..., Array], count: int) -> Step:
    """A step: reads ``count`` operands, computes, writes. ``operation`` gets and gives numbers."""
    ftz, saturate = form.flag("ftz"), form.flag("sat")
    form.arity(count + 1)
    element = _PAIRS.get(type_name, type_name)
    read, write = reader(element, ftz), writer(element, ftz, saturate)
    if type_name in _PAIRS:
        return _pair_step(form, element, read, write, operation, count)
    view = view_of(type_name)
    d = form.target(0, type_name)
    sources = [form.source(i + 1, type_name) for i in range(count)]

    def step(t: Path) -> None:
        rows = t.files[view]
        assign(t, view, d, write(operation(*[read(rows[row]) for row in sources])))

    return step


def _pair_step(
    form: Form, element: str, read: Unary, write: Unary, operation: Callable[..., Array], count: int
) -> Step:
    """The same for two elements in a register: they are computed as rows of 64."""
    kind = _PAIR_KINDS[element]
    register = "u64" if element == "f32" else "u32"
    register_kind: Any = np.uint64 if element == "f32" else np.uint32
    view = view_of(register)
    d = form.target(0, register)
    sources = [form.source(i + 1, register) for i in range(count)]

    def step(t: Path) -> None:
        rows = t.files[view]
        values = [read(rows[row].view(kind)) for row in sources]
        result = write(operation(*values)).astype(kind)
        assign(t, view, d, result.view(register_kind))

    return step


def _rounding(form: Form) -> str:
    return form.take(*ROUNDINGS) or "rn"


def build(form: Form, type_name: str) -> Step:
    """Builds add, sub, mul, mad, fma, div, abs, neg, min, max of floats."""
    return _BUILD[form.instruction.base](form, type_name)


def _element(type_name: str) -> str:
    return _PAIRS.get(type_name, type_name)


def _add(form: Form, type_name: str) -> Step:
    """9.7.3.3, 9.7.3.4, 9.7.4.1, 9.7.4.2."""
    rounding, element = _rounding(form), _element(type_name)
    sign = 1.0 if form.instruction.base == "add" else -1.0
    if element in ("f32", "f64") and rounding == "rn":
        operation: Any = np.add if sign > 0 else np.subtract
        return _step(form, type_name, operation, 2)

    def exactly(a: Array, b: Array) -> Array:
        total, error = _sum(a.astype(np.float64), sign * b.astype(np.float64), rounding)
        return round_to(element, to_odd(total, error), rounding)

    _only_nearest(form, element, rounding)
    return _step(form, type_name, exactly, 2)


def _only_nearest(form: Form, element: str, rounding: str) -> None:
    if element == "f64" and rounding != "rn":
        form.refuse("f64 is rounded to nearest only")


def _multiply(form: Form, type_name: str) -> Step:
    """9.7.3.5, 9.7.4.3."""
    rounding, element = _rounding(form), _element(type_name)
    _only_nearest(form, element, rounding)
    flushes = element == "f32" and "ftz" in form.modifiers
    if element in ("f32", "f64") and rounding == "rn" and not flushes:
        return _step(form, type_name, np.multiply, 2)

    def exactly(a: Array, b: Array) -> Array:
        product = a.astype(np.float64) * b.astype(np.float64)
        return round_to(element, _tiny(product, rounding) if flushes else product, rounding)

    return _step(form, type_name, exactly, 2)


def _fma(form: Form, type_name: str) -> Step:
    """9.7.3.6, 9.7.3.7, 9.7.4.4: one rounding; .relu clamps below at zero."""
    rounding, element = _rounding(form), _element(type_name)
    relu, flushes = form.flag("relu"), "ftz" in form.modifiers
    if element == "f64":
        return _step(form, type_name, _fma_f64, 3)

    def operation(a: Array, b: Array, c: Array) -> Array:
        product = a.astype(np.float64) * b.astype(np.float64)
        total, error = _sum(product, c.astype(np.float64), rounding)
        total = to_odd(total, error)
        if flushes:
            total = _tiny(total, rounding)
        result = round_to(element, total, rounding)
        # -0 becomes 0 too, as on an H200.
        return np.where(result <= 0, 0, result).astype(result.dtype) if relu else result

    return _step(form, type_name, operation, 3)


def _fma_f64(a: Array, b: Array, c: Array) -> Array:
    """With numpy's longest float: right unless a tie lies beyond its 64 bits."""
    wide = a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)
    return wide.astype(np.float64)


def _divide(form: Form, type_name: str) -> Step:
    """9.7.3.8."""
    if not form.flag("approx") and not form.flag("full"):
        rounding = _rounding(form)
        if rounding != "rn":
            form.refuse("division is rounded to nearest only")
    return _step(form, type_name, np.divide, 2)


def _absolute(form: Form, type_name: str) -> Step:
    """9.7.3.9, 9.7.4.6."""
    return _step(form, type_name, np.abs, 1)


def _negate(form: Form, type_name: str) -> Step:
    """9.7.3.10, 9.7.4.5."""
    return _step(form, type_name, np.negative, 1)


def _extreme(form: Form, type_name: str) -> Step:
    """9.7.3.11, 9.7.3.12, 9.7.4.7, 9.7.4.8: NaN loses unless .NaN; -0 is less than +0."""
    keeps_nan, absolute = form.flag("NaN"), form.flag("abs")
    if absolute or form.flag("xorsign"):
        form.refuse("the modifier .abs or .xorsign is not supported")
    smaller = form.instruction.base == "min"
    count = len(form.operands) - 1
    choose: np.ufunc = np.fmin if smaller else np.fmax

    def operation(*values: Array) -> Array:
        result = values[0]
        for value in values[1:]:
            equal = result == value
            zero = np.where(np.signbit(result) == smaller, result, value)
            result = np.where(equal, zero, choose(result, value))
        if keeps_nan:
            lost = np.logical_or.reduce([np.isnan(value) for value in values])
            result = np.where(lost, np.nan, result)
        return result.astype(values[0].dtype)

    return _step(form, type_name, operation, count)


_BUILD: dict[str, Callable[[Form, str], Step]] = {
    "add": _add,
    "sub": _add,
    "mul": _multiply,
    "mad": _fma,
    "fma": _fma,
    "div": _divide,
    "abs": _absolute,
    "neg": _negate,
    "min": _extreme,
    "max": _extreme,
}


def _accurate(function: np.ufunc) -> Unary:
    """A function of float32 by way of float64."""

    def apply(a: Array) -> Array:
        result: Array = function(a.astype(np.float64)).astype(a.dtype)
        return result

    return apply


def _reciprocal(a: Array) -> Array:
    result: Array = a.dtype.type(1) / a
    return result


def _reciprocal_root(a: Array) -> Array:
    result: Array = (1 / np.sqrt(a.astype(np.float64))).astype(a.dtype)
    return result


_FUNCTIONS: dict[str, Unary] = {
    "rcp": _reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": _reciprocal_root,
    "sin": _accurate(np.sin),
    "cos": _accurate(np.cos),
    "lg2": _accurate(np.log2),
    "ex2": _accurate(np.exp2),
    "tanh": _accurate(np.tanh),
}


@instruction(*_FUNCTIONS)
def _function(form: Form) -> Step:
    """9.7.3.13 to 9.7.3.22: reciprocal, roots, sine, logarithm, exponential, tanh."""
    form.flag("approx")
    if _rounding(form) != "rn":
        form.refuse("functions are rounded to nearest only")
    type_name = form.type()
    function = _FUNCTIONS[form.instruction.base]
    if type_name == "bf16" or type_name == "bf16x2":
        return _step(form, type_name, lambda a: round_to("bf16", function(a.astype(np.float64))), 1)
    return _step(form, type_name, function, 1)


@instruction("copysign")
def _copysign(form: Form) -> Step:
    """9.7.3.2: the sign of a on the magnitude of b."""
    return _step(form, form.type(), lambda a, b: np.copysign(b, a), 2)


@instruction("testp")
def _test(form: Form) -> Step:
    """9.7.3.1."""
    tests: dict[str, Unary] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda a: ~np.isnan(a),
        "notanumber": np.isnan,
        "normal": lambda a: np.isfinite(a) & (np.abs(a) >= np.finfo(a.dtype).tiny),
        "subnormal": lambda a: (a != 0) & (np.abs(a) < np.finfo(a.dtype).tiny),
    }
    test = tests[form.take(*tests) or form.refuse("no test")]
    type_name = form.type()
    p, a, view = form.target(0, "pred"), form.source(1, type_name), view_of(type_name)

    def step(t: Path) -> None:
        assign(t, 0, p, test(t.files[view][a]))

    return step
