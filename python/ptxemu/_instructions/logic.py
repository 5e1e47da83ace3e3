"""Logic, shifts and moves (PTX ISA 9.0, 9.7.8, 9.7.9.3, 9.7.9.4, 9.7.9.7)."""

from __future__ import annotations

import numpy as np

from .._hardware.registers import LANES, Array, view_of
from .._text.syntax import Special, Vector, type_bits
from .._warps.paths import Path, Step
from .._warps.table import Form, assign, instruction

_LOGIC: dict[str, tuple[np.ufunc, np.ufunc]] = {
    "and": (np.bitwise_and, np.logical_and),
    "or": (np.bitwise_or, np.logical_or),
    "xor": (np.bitwise_xor, np.logical_xor),
}


@instruction("and", "or", "xor")
def _binary(form: Form) -> Step:
    """9.7.8.1 to 9.7.8.3."""
    type_name = form.type()
    form.arity(3)
    operation = _LOGIC[form.instruction.base][type_name == "pred"]
    view = view_of(type_name)
    d, a, b = form.target(0, type_name), form.source(1, type_name), form.source(2, type_name)

    def step(t: Path) -> None:
        rows = t.files[view]
        operation(rows[a], rows[b], out=rows[d], where=t.where)

    return step


@instruction("not", "cnot")
def _unary(form: Form) -> Step:
    """9.7.8.4, 9.7.8.5."""
    type_name = form.type()
    form.arity(2)
    view = view_of(type_name)
    d, a = form.target(0, type_name), form.source(1, type_name)
    if form.instruction.base == "cnot":

        def zero(t: Path) -> None:
            rows = t.files[view]
            assign(t, view, d, rows[a] == 0)

        return zero

    def step(t: Path) -> None:
        rows = t.files[view]
        np.invert(rows[a], out=rows[d], where=t.where)

    return step


@instruction("lop3")
def _three(form: Form) -> Step:
    """9.7.8.6: each of the eight bits of the table says whether its combination gives a one."""
    form.type()
    form.arity(5)
    d = form.target(0, "u32")
    sources = [form.source(i, "u32") for i in (1, 2, 3)]
    table = form.literal(4, "operand 4")
    view = view_of("u32")

    def step(t: Path) -> None:
        rows = t.files[view]
        a, b, c = (rows[row] for row in sources)
        result = np.zeros(LANES, np.uint32)
        for bits in range(8):
            if table >> bits & 1:
                x = a if bits & 4 else ~a
                y = b if bits & 2 else ~b
                result |= x & y & (c if bits & 1 else ~c)
        assign(t, view, d, result)

    return step


@instruction("shl", "shr")
def _shift(form: Form) -> Step:
    """9.7.8.8, 9.7.8.9: amounts beyond the width shift everything out."""
    type_name = form.type()
    form.arity(3)
    left = form.instruction.base == "shl"
    bits = type_bits(type_name)
    signed = type_name.startswith("s") and not left
    view = view_of(type_name if signed else f"u{bits}")
    d, a = form.target(0, type_name), form.source(1, type_name)
    b, amounts = form.source(2, "u32"), view_of("u32")

    def step(t: Path) -> None:
        value, amount = t.files[view][a], t.files[amounts][b]
        safe = np.minimum(amount, bits - 1).astype(value.dtype)
        if signed:
            assign(t, view, d, value >> safe)
            return
        moved = value << safe if left else value >> safe
        assign(t, view, d, np.where(amount >= bits, 0, moved))

    return step


@instruction("shf")
def _funnel(form: Form) -> Step:
    """9.7.8.7: 32 of the 64 bits b:a; .wrap takes the amount modulo 32, .clamp at most 32."""
    left = (form.take("l", "r") or form.refuse("no direction")) == "l"
    wrap = (form.take("wrap", "clamp") or form.refuse("no .wrap or .clamp")) == "wrap"
    form.type()
    form.arity(4)
    d = form.target(0, "u32")
    a, b, c = (form.source(i, "u32") for i in (1, 2, 3))
    view = view_of("u32")

    def step(t: Path) -> None:
        rows = t.files[view]
        amount = rows[c].astype(np.uint64)
        amount = amount & np.uint64(31) if wrap else np.minimum(amount, np.uint64(32))
        wide = rows[b].astype(np.uint64) << np.uint64(32) | rows[a]
        if left:
            assign(t, view, d, (wide << amount) >> np.uint64(32))
        else:
            assign(t, view, d, wide >> amount)

    return step


#: The selectors that the modes of prmt stand for, by the low two bits of c (9.7.9.7, table).
_SELECTORS: dict[str, Array] = {
    mode: np.array(selectors, np.uint32)
    for mode, selectors in {
        "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
        "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
        "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
        "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
        "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
        "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
    }.items()
}


@instruction("prmt")
def _permute(form: Form) -> Step:
    """9.7.9.7: every nibble of c names one of the eight bytes of b:a; its top bit spreads signs."""
    form.type()
    selectors = _SELECTORS.get(form.take(*_SELECTORS))
    form.arity(4)
    d = form.target(0, "u32")
    a, b, c = (form.source(i, "u32") for i in (1, 2, 3))
    view = view_of("u32")

    def step(t: Path) -> None:
        rows = t.files[view]
        wide = rows[b].astype(np.uint64) << np.uint64(32) | rows[a]
        result = np.zeros(LANES, np.uint64)
        nibbles = rows[c] if selectors is None else selectors[rows[c] & 3]
        for k in range(4):
            selector = (nibbles >> np.uint32(4 * k)).astype(np.uint64)
            byte = wide >> ((selector & np.uint64(7)) * np.uint64(8)) & np.uint64(0xFF)
            sign = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
            chosen = np.where(selector & np.uint64(8), sign, byte)
            result |= chosen << np.uint64(8 * k)
        assign(t, view, d, result)

    return step


_CLOCKS = ("%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo")


@instruction("mov")
def _move(form: Form) -> Step:
    """9.7.9.3, 9.7.9.4: also packs and unpacks vectors, and reads special registers."""
    type_name = form.type()
    form.arity(2)
    target, source = form.operands
    if isinstance(target, Vector):
        return _unpack(form, type_name, target)
    if isinstance(source, Vector):
        return _pack(form, type_name, source)
    if isinstance(source, Special) and source.name in _CLOCKS:
        return _read_clock(form, type_name)
    view = view_of(type_name)
    d, a = form.target(0, type_name), form.source(1, type_name)
    if type_name == "b128":

        def copy_wide(t: Path) -> None:
            rows = t.files[view]
            rows[d][t.mask] = rows[a][t.mask]

        return copy_wide

    def step(t: Path) -> None:
        rows = t.files[view]
        np.copyto(rows[d], rows[a], where=t.where)

    return step


def _read_clock(form: Form, type_name: str) -> Step:
    """10.23, 10.24, 10.28: the instructions that all warps have executed."""
    d, view = form.target(0, type_name), view_of(type_name)

    def step(t: Path) -> None:
        now = t.grid.executed % (1 << type_bits(type_name))
        assign(t, view, d, np.full(LANES, now, np.uint64))

    return step


def _pack(form: Form, type_name: str, source: Vector) -> Step:
    """The first element goes to the lowest bits."""
    bits = type_bits(type_name) // len(source.elements)
    element = f"u{bits}"
    rows_in = [form.source(entry, element) for entry in source.elements]
    d, part, view = form.target(0, type_name), view_of(element), view_of(f"b{type_bits(type_name)}")
    return _joiner(rows_in, part, d, view, bits)


def _joiner(sources: list[int], part: int, d: int, view: int, bits: int) -> Step:
    def step(t: Path) -> None:
        rows = t.files[part]
        stacked = np.stack([rows[row] for row in sources], axis=1)
        target = t.files[view][d]
        if target.ndim == 2:
            target[t.mask] = stacked.view(np.uint64).reshape(LANES, 2)[t.mask]
        else:
            assign(t, view, d, stacked.view(target.dtype).reshape(LANES))

    return step


def _unpack(form: Form, type_name: str, target: Vector) -> Step:
    bits = type_bits(type_name) // len(target.elements)
    element = f"u{bits}"
    targets = [form.target(entry, element) for entry in target.elements]
    a, part, view = form.source(1, type_name), view_of(element), view_of(f"b{type_bits(type_name)}")

    def step(t: Path) -> None:
        whole = np.ascontiguousarray(t.files[view][a])
        parts = whole.view(t.files[part][targets[0]].dtype).reshape(LANES, len(targets))
        for k, row in enumerate(targets):
            assign(t, part, row, parts[:, k])

    return step
