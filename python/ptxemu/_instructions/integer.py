"""Integer arithmetic (PTX ISA 9.0, 9.7.1) and carries (9.7.2).

The opcodes that floats have too hand those on to ``floating``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .._hardware.registers import LANES, PRED, Array, view_of
from .._text.syntax import type_bits
from .._warps.paths import Path, Step
from .._warps.table import Form, assign, instruction
from . import floating

__all__ = ["is_float"]


def is_float(type_name: str) -> bool:
    """Whether a type is a floating-point one."""
    return "f" in type_name


def _direct(form: Form, type_name: str, operation: np.ufunc) -> Step:
    """A step that is one of numpy's functions of rows."""
    view = view_of(type_name)
    d = form.target(0, type_name)
    sources = [form.source(i, type_name) for i in range(1, len(form.operands))]
    if len(sources) == 1:
        (a,) = sources

        def unary(t: Path) -> None:
            rows = t.files[view]
            operation(rows[a], out=rows[d], where=t.where)

        return unary
    a, b = sources

    def binary(t: Path) -> None:
        rows = t.files[view]
        operation(rows[a], rows[b], out=rows[d], where=t.where)

    return binary


def _computed(form: Form, types: list[str], result: str, operation: Callable[..., Array]) -> Step:
    """A step that computes a row, then writes the active lanes."""
    d, view = form.target(0, result), view_of(result)
    sources = [(view_of(name), form.source(i + 1, name)) for i, name in enumerate(types)]

    def step(t: Path) -> None:
        files = t.files
        assign(t, view, d, operation(*[files[v][row] for v, row in sources]))

    return step


def _packed(type_name: str) -> bool:
    return type_name in ("u16x2", "s16x2")


@instruction("add", "sub", "mul", "mad", "fma", "div", "abs", "neg", "min", "max")
def _arithmetic(form: Form) -> Step:
    """9.7.1.1 to 9.7.1.13 and 9.7.3, 9.7.4, 9.7.5: by the type."""
    type_name = form.type()
    if is_float(type_name):
        return floating.build(form, type_name)
    name = form.instruction.base
    form.arity({"mad": 4, "abs": 2, "neg": 2}.get(name, 3))
    if _packed(type_name):
        form.refuse("packed integers are not supported")
    return _INTEGER[name](form, type_name)


def _add(form: Form, type_name: str) -> Step:
    """9.7.1.1, 9.7.1.2; with .cc 9.7.2."""
    operation = np.add if form.instruction.base == "add" else np.subtract
    if form.flag("cc"):
        return _carrying(form, type_name, with_carry=False, sets_carry=True)
    if form.flag("sat"):

        def saturated(a: Array, b: Array) -> Array:
            wide: Array = operation(a.astype(np.int64), b.astype(np.int64))
            clipped: Array = np.clip(wide, -(1 << 31), (1 << 31) - 1)
            return clipped

        return _computed(form, [type_name] * 2, type_name, saturated)
    return _direct(form, type_name, operation)


def _multiply(form: Form, type_name: str) -> Step:
    """9.7.1.3."""
    part = form.take("lo", "hi", "wide") or form.refuse("no .lo, .hi or .wide")
    if part == "lo":
        return _direct(form, type_name, np.multiply)
    result = _wider(type_name) if part == "wide" else type_name
    operation = _wide_product(result) if part == "wide" else _high_product(type_name)
    return _computed(form, [type_name] * 2, result, operation)


def _multiply_add(form: Form, type_name: str) -> Step:
    """9.7.1.4."""
    part = form.take("lo", "hi", "wide") or form.refuse("no .lo, .hi or .wide")
    if part == "lo":

        def low(a: Array, b: Array, c: Array) -> Array:
            product: Array = a * b + c
            return product

        return _computed(form, [type_name] * 3, type_name, low)
    result = _wider(type_name) if part == "wide" else type_name
    operation = _wide_product(result) if part == "wide" else _high_product(type_name)
    if part == "hi" and type_name == "s32" and form.flag("sat"):

        def saturated(a: Array, b: Array, c: Array) -> Array:
            wide = operation(a, b) + c.astype(np.int64)
            clipped: Array = np.clip(wide, -(1 << 31), (1 << 31) - 1)
            return clipped

        return _computed(form, [type_name] * 3, result, saturated)
    return _computed(
        form, [type_name, type_name, result], result, lambda a, b, c: operation(a, b) + c
    )


def _wider(type_name: str) -> str:
    return f"{type_name[0]}{2 * type_bits(type_name)}"


_NUMPY = {
    "u16": np.uint16,
    "s16": np.int16,
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
}


def _wide_product(result: str) -> Callable[[Array, Array], Array]:
    kind: Any = _NUMPY[result]
    return lambda a, b: a.astype(kind) * b.astype(kind)


def _high_product(type_name: str) -> Callable[[Array, Array], Array]:
    if type_name == "u64":
        return _high_u64
    if type_name == "s64":
        return _high_s64
    kind: Any = _NUMPY[_wider(type_name)]
    return lambda a, b: (a.astype(kind) * b.astype(kind)) >> kind(type_bits(type_name))


def _high_u64(a: Array, b: Array) -> Array:
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a0, a1, b0, b1 = a & low, a >> half, b & low, b >> half
    middle = a1 * b0 + (a0 * b0 >> half)
    other = a0 * b1 + (middle & low)
    high: Array = a1 * b1 + (middle >> half) + (other >> half)
    return high


def _high_s64(a: Array, b: Array) -> Array:
    high = _high_u64(a.view(np.uint64), b.view(np.uint64)).view(np.int64)
    signed: Array = high - np.where(a < 0, b, 0) - np.where(b < 0, a, 0)
    return signed


def _quotient(a: Array, b: Array) -> Array:
    """Truncated towards zero; all ones where the divisor is zero, as the hardware does."""
    zero = b == 0
    safe = np.where(zero, 1, b).astype(a.dtype)
    if a.dtype.kind == "u":
        quotient = a // safe
    else:
        quotient = a // safe
        inexact = (a - quotient * safe) != 0
        quotient = quotient + (inexact & ((a < 0) != (safe < 0))).astype(a.dtype)
        lowest = np.iinfo(a.dtype).min
        quotient = np.where((a == lowest) & (safe == -1), lowest, quotient)
    ones = np.array(-1).astype(a.dtype)
    result: Array = np.where(zero, ones, quotient)
    return result


def _divide(form: Form, type_name: str) -> Step:
    """9.7.1.8."""
    return _computed(form, [type_name] * 2, type_name, _quotient)


@instruction("rem")
def _remainder(form: Form) -> Step:
    """9.7.1.9: has the dividend's sign."""
    type_name = form.type()
    form.arity(3)

    def operation(a: Array, b: Array) -> Array:
        result: Array = np.where(b == 0, a, a - _quotient(a, b) * b)
        return result

    return _computed(form, [type_name] * 2, type_name, operation)


def _extreme(form: Form, type_name: str) -> Step:
    """9.7.1.12, 9.7.1.13; .relu clamps below at zero."""
    operation: np.ufunc = np.minimum if form.instruction.base == "min" else np.maximum
    if form.flag("relu"):
        return _computed(
            form, [type_name] * 2, type_name, lambda a, b: np.maximum(operation(a, b), 0)
        )
    return _direct(form, type_name, operation)


def _absolute(form: Form, type_name: str) -> Step:
    """9.7.1.10."""
    return _direct(form, type_name, np.absolute)


def _negate(form: Form, type_name: str) -> Step:
    """9.7.1.11."""
    return _direct(form, type_name, np.negative)


_INTEGER: dict[str, Callable[[Form, str], Step]] = {
    "add": _add,
    "sub": _add,
    "mul": _multiply,
    "mad": _multiply_add,
    "div": _divide,
    "min": _extreme,
    "max": _extreme,
    "abs": _absolute,
    "neg": _negate,
    "fma": lambda form, type_name: form.refuse("no such type"),
}


@instruction("addc", "subc")
def _with_carry(form: Form) -> Step:
    """9.7.2.2, 9.7.2.4."""
    return _carrying(form, form.type(), with_carry=True, sets_carry=form.flag("cc"))


def _carrying(form: Form, type_name: str, with_carry: bool, sets_carry: bool) -> Step:
    bits = type_bits(type_name)
    unsigned = f"u{bits}"
    view = view_of(unsigned)
    d, a, b = form.target(0, unsigned), form.source(1, unsigned), form.source(2, unsigned)
    subtracts = form.instruction.base.startswith("sub")

    def step(t: Path) -> None:
        rows = t.files[view]
        carry = t.warp.carry
        x, y = rows[a], rows[b]
        taken = carry.astype(x.dtype) if with_carry else np.zeros(LANES, x.dtype)
        if subtracts:
            result = x - y - taken
            out = (x < y) | ((x == y) & (taken != 0))
        else:
            result = x + y + taken
            out = (result < x) | ((result == x) & (taken != 0) & (y != 0))
        if sets_carry:
            np.copyto(carry, out, where=t.where)
        assign(t, view, d, result)

    return step


@instruction("popc", "clz", "bfind", "brev")
def _bits(form: Form) -> Step:
    """9.7.1.14 to 9.7.1.18."""
    name = form.instruction.base
    type_name = form.type()
    form.arity(2)
    bits = type_bits(type_name)
    if name == "popc":
        return _computed(form, [f"u{bits}"], "u32", lambda a: _bit_matrix(a, bits).sum(axis=0))
    if name == "brev":
        return _computed(form, [f"u{bits}"], f"u{bits}", lambda a: _reverse(a, bits))
    if name == "clz":
        return _computed(form, [f"u{bits}"], "u32", lambda a: bits - 1 - _highest(a, bits))
    shifts = form.flag("shiftamt")
    signed = type_name.startswith("s")

    def find(a: Array) -> Array:
        if signed:
            a = np.where(a >> (bits - 1), ~a, a).astype(a.dtype)
        highest = _highest(a, bits)
        moved: Array = np.where(highest < 0, -1, bits - 1 - highest if shifts else highest)
        return moved

    return _computed(form, [f"u{bits}"], "u32", find)


def _bit_matrix(a: Array, bits: int) -> Array:
    matrix: Array = (a[None, :] >> np.arange(bits, dtype=a.dtype)[:, None]) & a.dtype.type(1)
    return matrix


def _highest(a: Array, bits: int) -> Array:
    """The position of the highest bit that is set; -1 if there is none."""
    weights = np.arange(1, bits + 1)[:, None]
    highest: Array = (_bit_matrix(a, bits) * weights).max(axis=0).astype(np.int64) - 1
    return highest


def _reverse(a: Array, bits: int) -> Array:
    weights = (a.dtype.type(1) << np.arange(bits, dtype=a.dtype))[::-1, None]
    reversed_: Array = (_bit_matrix(a, bits) * weights).sum(axis=0, dtype=a.dtype)
    return reversed_


@instruction("bfe")
def _extract(form: Form) -> Step:
    """9.7.1.19: position and length are the low eight bits of their operands."""
    type_name = form.type()
    form.arity(4)
    bits = type_bits(type_name)
    signed = type_name.startswith("s")

    def operation(a: Array, start: Array, length: Array) -> Array:
        position, count = start.astype(np.int64) & 0xFF, length.astype(np.int64) & 0xFF
        shifted = _shifted(a, position, bits, signed)
        keep = np.where(count >= bits, bits, count)
        mask = _low_mask(keep, bits)
        found = shifted & mask
        if signed:
            last = np.minimum(position + count - 1, bits - 1)
            sign = (a >> last.astype(a.dtype)) & a.dtype.type(1)
            found = np.where((count > 0) & (sign != 0), found | ~mask, found)
        result: Array = np.where(count == 0, 0, found).astype(a.dtype)
        return result

    unsigned = f"u{bits}"
    return _computed(form, [unsigned, "u32", "u32"], unsigned, operation)


def _low_mask(count: Array, bits: int) -> Array:
    """``count`` low bits set, up to all."""
    kind: Any = np.uint64 if bits == 64 else np.uint32
    full = (1 << bits) - 1
    safe = np.minimum(count, bits - 1).astype(kind)
    mask: Array = np.where(count >= bits, kind(full), (kind(1) << safe) - kind(1))
    return mask


def _shifted(a: Array, amount: Array, bits: int, signed: bool) -> Array:
    """``a >> amount``, for any amount."""
    if signed:
        kind: Any = np.int64 if bits == 64 else np.int32
        moved: Array = a.view(kind) >> np.minimum(amount, bits - 1).astype(kind)
        signed_result: Array = moved.view(a.dtype)
        return signed_result
    safe = np.minimum(amount, bits - 1).astype(a.dtype)
    result: Array = np.where(amount >= bits, 0, a >> safe).astype(a.dtype)
    return result


@instruction("bfi")
def _insert(form: Form) -> Step:
    """9.7.1.20."""
    bits = type_bits(form.type())
    form.arity(5)
    unsigned = f"u{bits}"

    def operation(a: Array, b: Array, start: Array, length: Array) -> Array:
        position, count = start.astype(np.int64) & 0xFF, length.astype(np.int64) & 0xFF
        end = np.minimum(position + count, bits)
        mask = np.where(position >= bits, 0, _low_mask(end, bits) & ~_low_mask(position, bits))
        mask = mask.astype(a.dtype)
        moved = a << np.minimum(position, bits - 1).astype(a.dtype)
        result: Array = (moved & mask) | (b & ~mask)
        return result

    return _computed(form, [unsigned, unsigned, "u32", "u32"], unsigned, operation)


@instruction("sad")
def _sum_of_differences(form: Form) -> Step:
    """9.7.1.7."""
    type_name = form.type()
    form.arity(4)
    return _computed(
        form, [type_name] * 3, type_name, lambda a, b, c: c + np.where(a > b, a - b, b - a)
    )


@instruction("dp4a")
def _dot(form: Form) -> Step:
    """9.7.1.23: four products of bytes, added to c; what is beyond 32 bits is lost.

    Each type says how the bytes of its operand are read; c and d are signed unless both are not.
    """
    types = form.type(), form.type()
    form.arity(4)
    if not set(types) <= _BYTES.keys():
        form.refuse("the types are .u32 and .s32")
    first, second = (_BYTES[name] for name in types)

    def operation(a: Array, b: Array, c: Array) -> Array:
        x = a.view(first).reshape(LANES, 4).astype(np.int64)
        y = b.view(second).reshape(LANES, 4).astype(np.int64)
        total: Array = (x * y).sum(axis=1) + c
        return total

    return _computed(form, ["u32", "u32", "s32" if "s32" in types else "u32"], "u32", operation)


#: How dp4a reads the bytes of an operand, by its type.
_BYTES: dict[str, Any] = {"u32": np.uint8, "s32": np.int8}


@instruction("setp")
def _compare_any(form: Form) -> Step:
    """9.7.6.2, 9.7.7.2: by the type; an unordered float comparison is true for NaN."""
    comparison = form.take(*_COMPARISONS) or form.refuse("no comparison")
    combine = form.take("and", "or", "xor")
    type_name = form.type()
    ftz = form.flag("ftz")
    compare = _COMPARISONS[comparison]
    unsigned_only = comparison in ("lo", "ls", "hi", "hs")
    seen = f"u{type_bits(type_name)}" if unsigned_only else type_name
    view = view_of(seen)
    a, b = form.source(1, seen), form.source(2, seen)
    p, q = form.targets(0, "pred")
    extra = form.predicate(3) if combine else None
    convert = floating.reader(type_name, ftz) if is_float(type_name) else None

    def step(t: Path) -> None:
        rows = t.files[view]
        x, y = rows[a], rows[b]
        if convert is not None:
            x, y = convert(x), convert(y)
        found = compare(x, y)
        opposite = ~found
        if extra is not None:
            other = t.files[PRED][extra[0]]
            other = ~other if extra[1] else other
            found, opposite = _COMBINE[combine](found, other), _COMBINE[combine](opposite, other)
        assign(t, PRED, p, found)
        if q is not None:
            assign(t, PRED, q, opposite)

    if extra is None and q is None and convert is None and isinstance(compare, np.ufunc):

        def plain(t: Path) -> None:
            rows = t.files[view]
            compare(rows[a], rows[b], out=t.files[PRED][p], where=t.where)

        return plain
    return step


def _unordered(compare: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)


_COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": lambda a, b: (a != b) & ~_nan(a) & ~_nan(b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
    "equ": _unordered(np.equal),
    "neu": np.not_equal,
    "ltu": _unordered(np.less),
    "leu": _unordered(np.less_equal),
    "gtu": _unordered(np.greater),
    "geu": _unordered(np.greater_equal),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}

_COMBINE: dict[str, np.ufunc] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
}


def _nan(a: Array) -> Array:
    """Where a is NaN; integers never are."""
    return np.isnan(a) if a.dtype.kind == "f" else np.zeros(a.shape, np.bool_)


@instruction("selp")
def _select(form: Form) -> Step:
    """9.7.6.3."""
    type_name = form.type()
    form.arity(4)
    unsigned = f"u{type_bits(type_name)}"
    view = view_of(unsigned)
    # Literals are those of the type, whatever the view.
    d, a, b = form.target(0, type_name), form.source(1, type_name), form.source(2, type_name)
    c, negated = form.predicate(3)

    def step(t: Path) -> None:
        rows = t.files[view]
        condition = t.files[PRED][c]
        x, y = (rows[b], rows[a]) if negated else (rows[a], rows[b])
        assign(t, view, d, np.where(condition, x, y))

    return step


@instruction("set")
def _set(form: Form) -> Step:
    """9.7.6.1: all ones, or 1.0, where the comparison holds."""
    comparison = form.take(*_COMPARISONS) or form.refuse("no comparison")
    ftz = form.flag("ftz")
    result, type_name = form.type(), form.type()
    form.arity(3)
    compare = _COMPARISONS[comparison]
    convert = floating.reader(type_name, ftz) if is_float(type_name) else (lambda x: x)

    def operation(a: Array, b: Array) -> Array:
        found = compare(convert(a), convert(b))
        if result == "f32":
            return found.astype(np.float32)
        ones: Array = np.where(found, 0xFFFFFFFF, 0)
        return ones

    return _computed(form, [type_name] * 2, result if result == "f32" else "u32", operation)
