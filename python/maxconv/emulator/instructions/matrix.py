"""Matrices of a warp: ldmatrix, stmatrix, mma.sync (PTX ISA 9.0, 9.7.14)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..paths import Path, Step
from ..registers import LANES, Array, view_of
from ..syntax import Operand, type_bits
from ..table import Form, instruction
from .convert import eight_values
from .floating import exact
from .memory import addresses, parts_of, scatter
from .synchronize import require_warp

__all__ = ["decode"]

_LANE = np.arange(LANES)
#: Rows and bytes of an 8x8 matrix of 16-bit elements.
_ROWS = 8
_ROW_BYTES = 16


def _shape(form: Form) -> tuple[int, bool]:
    """Takes the modifiers of a matrix move; returns how many, and whether transposed."""
    form.flag("sync")
    form.flag("aligned")
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
        require_warp(t)
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
        require_warp(t)
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


def decode(type_name: str) -> Callable[[Array], Array]:
    """Returns what turns bytes ``[rows, bytes]`` into float64 elements of a type.

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
    layouts = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15)}
    values = eight_values(*layouts[type_name])

    def look_up(raw: Array) -> Array:
        found: Array = values[raw]
        return found

    return look_up


@instruction("mma.sync")
def _multiply(form: Form) -> Step:
    """9.7.14.5.14: m16n8, products in float64, the sum rounded once to float32.

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
    if (
        sum_type != "f32"
        or c_type != "f32"
        or a_type not in ("bf16", "f16", "tf32", "e4m3", "e5m2")
    ):
        form.refuse("these types are not supported")
    depth = int(shape.split("k")[1])
    element = _element_bytes(a_type)
    targets = [form.target(entry, "f32") for entry in form.vector(0)]
    a_rows = [form.source(entry, "u32") for entry in form.vector(1)]
    b_rows = [form.source(entry, "u32") for entry in form.vector(2)]
    c_rows = [form.source(entry, "f32") for entry in form.vector(3)]
    if len(a_rows) * 4 != 16 * depth * element // LANES or len(b_rows) * 2 != len(a_rows):
        form.refuse("the number of registers does not fit the shape")
    a_values, b_values = decode(a_type), decode(b_type)
    per_word = 4 // element

    def gather(t: Path, rows: list[int], values: Callable[[Array], Array]) -> Array:
        words = np.stack([t.files[view_of("u32")][row] for row in rows], axis=1)
        return values(np.ascontiguousarray(words).view(np.uint8)).reshape(
            LANES, len(rows), per_word
        )

    def step(t: Path) -> None:
        require_warp(t)
        a, b = np.zeros((16, depth)), np.zeros((8, depth))
        a_part, b_part = gather(t, a_rows, a_values), gather(t, b_rows, b_values)
        for r in range(len(a_rows)):
            for e in range(per_word):
                column = per_word * (_LANE % 4) + e + 4 * per_word * (r // 2)
                a[_LANE // 4 + 8 * (r % 2), column] = a_part[:, r, e]
        for r in range(len(b_rows)):
            for e in range(per_word):
                b[_LANE // 4, per_word * (_LANE % 4) + e + 4 * per_word * r] = b_part[:, r, e]
        product = a @ b.T
        for r, (d, c) in enumerate(zip(targets, c_rows, strict=True)):
            part = product[_LANE // 4 + 8 * (r // 2), 2 * (_LANE % 4) + r % 2]
            rows = t.files[view_of("f32")]
            product_sum = part + rows[c]
            rows[d][t.mask] = product_sum.astype(np.float32)[t.mask]

    return step


def _element_bytes(type_name: str) -> int:
    """Bytes of an element in a register."""
    return 1 if type_name in ("e4m3", "e5m2") else type_bits(type_name) // 8
