"""Matrices of a warp: ldmatrix, stmatrix, mma.sync (PTX ISA 9.0, 9.7.14)."""

from __future__ import annotations

import numpy as np

from .._hardware.registers import LANES, Array, view_of
from .._numbers import decode
from .._text.syntax import Operand, type_bits
from .._warps.addresses import addresses, parts_of, scatter
from .._warps.paths import Path, Step
from .._warps.table import Form, instruction

__all__ = ["a_fragment"]

_LANE = np.arange(LANES)
#: Rows of an 8x8 matrix of 16-bit elements, and of A.
_ROWS = 8
_A_ROWS = 16


def _shape(form: Form) -> tuple[int, bool]:
    """Takes the modifiers of a matrix move; returns how many, and whether transposed."""
    form.take_aligned()
    if not form.flag("m8n8"):
        form.refuse("only .m8n8 is supported")
    count = int((form.take("x1", "x2", "x4") or form.refuse("no count"))[1:])
    transposed = form.flag("trans")
    form.take("shared", "shared::cta")
    if form.type() != "b16":
        form.refuse("only .b16 is supported")
    return count, transposed


def _registers(form: Form, operand: int, count: int) -> tuple[Operand, ...]:
    """A vector of one register a matrix."""
    entries = form.vector(operand)
    if len(entries) != count:
        form.refuse(f"{len(entries)} registers for {count} matrices")
    return entries


def _row_addresses(t: Path, address: tuple[int, int, int], count: int) -> Array:
    """Addresses of the rows: of matrix i in lanes 8i to 8i+7."""
    return addresses(t, *address)[: _ROWS * count]


@instruction("ldmatrix")
def _load_matrix(form: Form) -> Step:
    """9.7.14.5.15: lane t gets row t/4, elements 2*(t%4) and the next."""
    count, transposed = _shape(form)
    form.arity(2)
    targets = [form.target(entry, "u32") for entry in _registers(form, 0, count)]
    address = form.address_row(1)

    def step(t: Path) -> None:
        t.require_warp()
        where = _row_addresses(t, address, count)
        parts = list(parts_of(t, "shared", where))
        rows = np.zeros((len(where), _ROWS), np.uint16)
        for part in parts:
            rows[part.lanes] = part.memory.read(part.addresses, 2, _ROWS)
        matrices = rows.reshape(count, _ROWS, _ROWS)
        if transposed:
            matrices = matrices.transpose(0, 2, 1)
        words = np.ascontiguousarray(matrices).view(np.uint32).reshape(count, LANES)
        for d, values in zip(targets, words, strict=True):
            t.files[view_of("u32")][d][t.mask] = values[t.mask]

    return step


@instruction("stmatrix")
def _store_matrix(form: Form) -> Step:
    """9.7.14.5.16."""
    count, transposed = _shape(form)
    form.arity(2)
    sources = [form.source(entry, "u32") for entry in _registers(form, 1, count)]
    address = form.address_row(0)

    def step(t: Path) -> None:
        t.require_warp()
        where = _row_addresses(t, address, count)
        words = np.stack([t.files[view_of("u32")][row] for row in sources])
        matrices = words.view(np.uint16).reshape(count, _ROWS, _ROWS)
        if transposed:
            matrices = matrices.transpose(0, 2, 1)
        rows = np.ascontiguousarray(matrices).reshape(len(where), _ROWS)
        saved = t.mask, t.where
        # Lanes whose addresses are used are those that write.
        t.mask = saved[0] & (len(where) > _LANE)
        t.where = True if t.mask.all() else t.mask
        try:
            scatter(t, "shared", where, rows, 2, _ROWS)
        finally:
            t.mask, t.where = saved

    return step


@instruction("mma.sync")
def _multiply(form: Form) -> Step:
    """9.7.14.5.14: m16n8, products in float64, the sum rounded once to float32.

    Sums of s8 are s32, which wraps.

    Fragments (9.7.14.5.8 and following), with e elements in a register: A's registers hold rows
    t/4 and t/4+8 alternately, columns e*(t%4) and on, every second pair e*4 further; B's hold
    column t/4, rows e*(t%4) and on, the next e*4 further; the sums rows t/4 and t/4+8, columns
    2*(t%4) and the next.
    """
    form.flag("aligned")
    shape = form.take("m16n8k4", "m16n8k8", "m16n8k16", "m16n8k32") or form.refuse("the shape")
    if not (form.flag("row") and form.flag("col")):
        form.refuse("only .row.col is supported")
    sum_type, a_type, b_type, c_type = (form.type() for _ in range(4))
    integers = a_type == "s8"
    wanted = "s32" if integers else "f32"
    if (
        (sum_type, c_type) != (wanted, wanted)
        or a_type not in ("bf16", "f16", "tf32", "e4m3", "e5m2", "s8")
        or (integers and b_type != "s8")
    ):
        form.refuse("these types are not supported")
    depth = int(shape.split("k")[1])
    element = _element_bytes(a_type)
    targets = [form.target(entry, wanted) for entry in form.vector(0)]
    a_rows = [form.source(entry, "u32") for entry in form.vector(1)]
    b_rows = [form.source(entry, "u32") for entry in form.vector(2)]
    c_rows = [form.source(entry, wanted) for entry in form.vector(3)]
    if len(a_rows) * 4 != 16 * depth * element // LANES or len(b_rows) * 2 != len(a_rows):
        form.refuse("the number of registers does not fit the shape")

    def step(t: Path) -> None:
        t.require_warp()
        product = a_fragment(t, a_rows, a_type) @ _b_fragment(t, b_rows, b_type).T
        for r, (d, c) in enumerate(zip(targets, c_rows, strict=True)):
            part = product[_LANE // 4 + 8 * (r // 2), 2 * (_LANE % 4) + r % 2]
            rows = t.files[view_of(wanted)]
            product_sum = part + rows[c]
            if integers:
                product_sum = product_sum.astype(np.int64)
            rows[d][t.mask] = product_sum.astype(rows[d].dtype)[t.mask]

    return step


def _elements(t: Path, rows: list[int], type_name: str) -> Array:
    """Elements that registers hold, ``[lanes, registers, elements of a register]``."""
    words = np.stack([t.files[view_of("u32")][row] for row in rows], axis=1)
    values = decode(type_name)(np.ascontiguousarray(words).view(np.uint8))
    return values.reshape(LANES, len(rows), -1)


def a_fragment(t: Path, rows: list[int], type_name: str) -> Array:
    """A from a warp's registers, ``[16, products]``.

    They hold rows t/4 and t/4+8 alternately, the second pair 16 bytes further (9.7.14.5.8).
    """
    found = _elements(t, rows, type_name)
    count = found.shape[2]
    result = np.zeros((_A_ROWS, 2 * len(rows) * count))
    for r in range(len(rows)):
        for e in range(count):
            column = count * (_LANE % 4) + e + 4 * count * (r // 2)
            result[_LANE // 4 + 8 * (r % 2), column] = found[:, r, e]
    return result


def _b_fragment(t: Path, rows: list[int], type_name: str) -> Array:
    """B from a warp's registers, ``[8, products]``: column t/4, each register 16 bytes further."""
    found = _elements(t, rows, type_name)
    count = found.shape[2]
    result = np.zeros((_ROWS, 4 * len(rows) * count))
    for r in range(len(rows)):
        for e in range(count):
            result[_LANE // 4, count * (_LANE % 4) + e + 4 * count * r] = found[:, r, e]
    return result


def _element_bytes(type_name: str) -> int:
    """Bytes of an element in a register."""
    return 1 if type_name in ("e4m3", "e5m2") else type_bits(type_name) // 8
