"""Multiplies of a warpgroup: wgmma (PTX ISA 9.0, 9.7.15).

Each warp computes its own 16 of the 64 rows. A group completes for the four warps together, once
all have committed it: pipelines rely on that where one thread releases what a warpgroup read. Row
and column of a thread's registers are those of the ISA's figures. Products are summed in float64
and rounded to the accumulator's type once an instruction; the hardware keeps fewer bits, so that
results are compared with a tolerance. Integers are exact, and wrap around.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .._errors import FenceError
from .._hardware.memory import CHUNK
from .._hardware.pending import Warpgroup
from .._hardware.registers import LANES, PRED, Array, group_of, view_of
from .._hardware.scheduler import Wait
from .._numbers import decode
from .._text.syntax import Constant, Vector
from .._warps.paths import Path, Step
from .._warps.table import Form, instruction
from .matrices import DEPTH_BYTES, SharedMatrix
from .matrix import a_fragment

#: Rows of a warp, and warps of a warpgroup.
_ROWS = 16
_WARPS = 4

_ELEMENT_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}
_INTEGERS = {"s8": 1, "u8": 1}


def _warpgroup(t: Path) -> Warpgroup:
    return t.block.warpgroups[t.warp.index // _WARPS]


@instruction("wgmma.fence")
def _fence(form: Form) -> Step:
    """9.7.15.7.1."""
    form.take_aligned()

    def step(t: Path) -> None:
        t.require_warp()
        _warpgroup(t).fenced[t.warp.index] = _words(t).copy()

    return step


@instruction("wgmma.commit_group")
def _commit(form: Form) -> Step:
    """9.7.15.7.2."""
    form.take_aligned()

    def step(t: Path) -> None:
        t.require_warp()
        _warpgroup(t).commit(t.warp.index, t.scheduler)

    return step


@instruction("wgmma.wait_group")
def _wait(form: Form) -> Step:
    """9.7.15.7.3: until all but the latest groups are done."""
    form.take_aligned()
    form.arity(1)
    allowed = form.literal(0, "the number of groups")

    def step(t: Path) -> Wait | None:
        t.require_warp()
        warpgroup, warp = _warpgroup(t), t.warp.index
        first = warpgroup.awaited.get(warp, 0)
        stop = warpgroup.opened.get(warp, 0) - allowed
        if not all(group.done for group in warpgroup.groups[first:stop]):
            warpgroup.waiters.add(t)
            return Wait("wgmma groups of its warpgroup to complete")
        for group in warpgroup.groups[first:stop]:
            for register in group.registers.pop(warp, ()):
                t.warp.pending[register] -= 1
                if not t.warp.pending[register]:
                    del t.warp.pending[register]
        warpgroup.awaited[warp] = max(first, stop)
        return None

    return step


def _read(t: Path, descriptor: int, rows: tuple[int, int], transposed: bool, what: str) -> Array:
    """Checks and marks the chunks of a range of an operand's rows; returns them.

    They are ``[rows, 2]``; transposed ``[16 products, rows / 8]``.
    """
    first, stop = rows
    matrix = SharedMatrix.of_wgmma(int(t.files[view_of("u64")][descriptor][0]))
    if transposed:
        chunks = matrix.chunks(stop // 8, DEPTH_BYTES // 2, True)[:, first // 8 :]
    else:
        chunks = matrix.chunks(stop, DEPTH_BYTES // CHUNK, False)[first:]
    t.block.begin_read(chunks, t.warp.number * LANES, what)
    return chunks


def _elements(t: Path, chunks: Array, values: Callable[[Array], Array], transposed: bool) -> Array:
    """An operand ``[rows, products]``."""
    raw = t.block.shared.chunks[chunks]
    elements = values(np.ascontiguousarray(raw.reshape(len(chunks), -1)))
    t.block.shared.end_read(chunks)
    return elements.T if transposed else elements


_SHAPE = re.compile(r"m64n(\d+)k(\d+)")


@instruction("wgmma.mma_async")
def _multiply(form: Form) -> Step:
    """9.7.15.5.2: D = A*B + D, or A*B; A from shared memory or registers, B from shared memory."""
    form.take_aligned()
    shape = next((m for m in map(_SHAPE.fullmatch, form.modifiers) if m), None)
    if shape is None:
        form.refuse("no shape")
    form.take(shape.group())
    columns, depth = int(shape.group(1)), int(shape.group(2))
    sum_type, a_type, b_type = form.type(), form.type(), form.type()
    sizes = {"f32": _ELEMENT_BYTES, "s32": _INTEGERS}.get(sum_type, {})
    if a_type not in sizes or b_type not in sizes:
        form.refuse("these types are not supported")
    # 9.7.15.2: integers have fewer shapes.
    unit = 16 if sum_type == "s32" and columns > 32 else 8
    if depth * sizes[a_type] != DEPTH_BYTES or columns % unit or not 8 <= columns <= 256:
        form.refuse("no such shape")
    targets = [form.target(entry, sum_type) for entry in form.vector(0)]
    if len(targets) != columns // 2:
        form.refuse(f"{len(targets)} registers for {columns} columns")
    fragment = isinstance(form.operands[1], Vector)
    a_rows = [form.source(entry, "u32") for entry in form.vector(1)] if fragment else []
    a_descriptor = None if fragment else form.source(1, "u64")
    b_descriptor = form.source(2, "u64")
    adds, negated = form.predicate(3)
    scales, a_transposed, b_transposed = _immediates(form, fragment)
    # Asynchronous instructions may share accumulators; only others must wait for them.
    form.used = {entry for entry in form.used if entry[0] != group_of(32)}
    registers = [(group_of(32), row) for row in (*targets, *a_rows)]
    a_values, b_values = decode(a_type), decode(b_type)

    def step(t: Path) -> None:
        t.require_warp()
        warpgroup = _warpgroup(t)
        condition = t.active(t.files[PRED][adds])
        keep = bool(condition[0]) != negated
        _check_fence(t, warpgroup, [*targets, *a_rows] if keep else a_rows)
        first = _ROWS * (t.warp.index % _WARPS)
        a_chunks: Array | None = None
        a_fixed = np.zeros((0, 0))
        if a_descriptor is not None:
            rows = first, first + _ROWS
            a_chunks = _read(t, a_descriptor, rows, a_transposed, "wgmma's first operand")
        else:
            a_fixed = a_fragment(t, a_rows, a_type)
        b_chunks = _read(t, b_descriptor, (0, columns), b_transposed, "wgmma's second operand")
        for register in registers:
            t.warp.pending[register] = t.warp.pending.get(register, 0) + 1
        group = warpgroup.open(t.warp.index)
        group.registers.setdefault(t.warp.index, []).extend(registers)
        files, words = t.files[view_of(sum_type)], _words(t)

        def act() -> None:
            a = a_fixed
            if a_chunks is not None:
                a = _elements(t, a_chunks, a_values, a_transposed)
            b = _elements(t, b_chunks, b_values, b_transposed)
            with np.errstate(all="ignore"):
                product = (a * scales[0]) @ (b * scales[1]).T
            _accumulate(files, targets, product, keep)
            warpgroup.fenced[t.warp.index][targets] = words[targets]

        group.acts.append(act)

    return step


def _words(t: Path) -> Array:
    """A warp's 32-bit registers, ``[rows, 32]``."""
    base: Array | None = t.files[view_of("u32")][0].base
    assert base is not None
    return base


def _check_fence(t: Path, warpgroup: Warpgroup, rows: list[int]) -> None:
    """9.7.15.7.1: raises if registers of a multiply have been written since the latest fence.

    Those of multiplies in flight need none. What is written with the value that it has goes
    unnoticed, and so do reads.
    """
    before = warpgroup.fenced.get(t.warp.index)
    if before is None:
        raise FenceError("wgmma.mma_async before any wgmma.fence")
    group, words = group_of(32), _words(t)
    if not t.grid.device.rules.register_fences:
        return
    idle = [row for row in rows if (group, row) not in t.warp.pending]
    if idle and not np.array_equal(before[idle], words[idle]):
        raise FenceError(
            "wgmma.mma_async uses registers that were written after the latest wgmma.fence (what "
            "relies on ptxas to order them runs on a machine without register_fences)"
        )


def _immediates(form: Form, fragment: bool) -> tuple[tuple[float, float], bool, bool]:
    """The literals at the end: signs of A and B, then what is transposed."""
    values = []
    for operand in form.operands[4:]:
        if not isinstance(operand, Constant):
            form.refuse("scales and transpositions must be literals")
        values.append(int(operand.value))
    signs = (float(values[0]), float(values[1])) if len(values) > 1 else (1.0, 1.0)
    rest = values[2:]
    if fragment:
        return signs, False, bool(rest and rest[0])
    return signs, bool(rest and rest[0]), bool(len(rest) > 1 and rest[1])


def _accumulate(files: list[Array], targets: list[int], product: Array, keep: bool) -> None:
    """Register r of lane t holds row t/4 + 8*((r/2)%2), column 8*(r/4) + 2*(t%4) + r%2."""
    # [half, lane row, column group, lane column, odd] to [group, half, odd, lane].
    parts = product.reshape(2, 8, -1, 4, 2).transpose(2, 0, 4, 1, 3).reshape(len(targets), LANES)
    for row, values in zip(targets, parts, strict=True):
        target = files[row]
        total = values + target if keep else values
        # Exact in float64; integers wrap around.
        target[:] = total.astype(np.int64) if target.dtype == np.int32 else total
