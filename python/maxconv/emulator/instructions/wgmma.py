"""Multiplies of a warpgroup: wgmma (PTX ISA 9.0, 9.7.15).

Each warp computes its own 16 of the 64 rows. A group completes for the four warps together, once
all have committed it: pipelines rely on that where one thread releases what a warpgroup read. Row
and column of a thread's registers are those of the ISA's figures. Products are summed in float64
and rounded to the accumulator's type once an instruction; the hardware keeps fewer bits, so that
results are compared with a tolerance.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from ...tma import Swizzle, swizzle_address
from ..errors import FenceError, IllegalInstructionError, MemoryFaultError
from ..memory import CHUNK
from ..paths import Path, Step, Wait, Warp
from ..registers import LANES, PRED, Array, group_of, view_of
from ..scheduler import Operation
from ..syntax import Constant, Vector
from ..table import Form, instruction
from .matrix import decode
from .synchronize import require_warp

#: Bytes of an operand's row that one instruction multiplies (9.7.15.2).
_DEPTH_BYTES = 32
#: Rows of a warp, and warps of a warpgroup.
_ROWS = 16
_WARPS = 4

_SWIZZLES = (Swizzle.NONE, Swizzle.B128, Swizzle.B64, Swizzle.B32)
_ELEMENT_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}


@dataclass
class _Group:
    """Multiplies that a warpgroup committed together: they complete as one.

    Attributes:
        acts: What computes them, in each warp's order.
        registers: What they may change or read, by warp.
        committed: Warps that have closed it.
    """

    acts: list[Callable[[], None]] = field(default_factory=list)
    registers: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    committed: int = 0
    done: bool = False


@dataclass
class _Warpgroup:
    """Four warps' multiplies.

    Attributes:
        groups: In order.
        opened: The group that a warp's multiplies go to, by warp.
        awaited: Groups that a warp has waited for, by warp.
        fenced: The 32-bit registers of a warp as they were at its latest fence, and as multiplies
            have left them since, ``[rows, 32]``.
    """

    groups: list[_Group] = field(default_factory=list)
    opened: dict[int, int] = field(default_factory=dict)
    awaited: dict[int, int] = field(default_factory=dict)
    fenced: dict[int, Array] = field(default_factory=dict)
    waiters: list[Path] = field(default_factory=list)
    started: int = 0
    busy: bool = False

    def open(self, warp: Warp) -> _Group:
        """The group that is open for a warp."""
        number = self.opened.setdefault(warp.index, 0)
        while len(self.groups) <= number:
            self.groups.append(_Group())
        return self.groups[number]

    def start(self, warp: Warp) -> None:
        """Lets the next group complete some time, if all four warps have committed it."""
        if self.busy or self.started == len(self.groups):
            return
        group = self.groups[self.started]
        if group.committed < _WARPS:
            return
        self.busy = True
        self.started += 1

        def complete() -> None:
            for act in group.acts:
                act()
            group.acts.clear()
            group.done, self.busy = True, False
            waiters, self.waiters = self.waiters, []
            for path in waiters:
                path.launch.scheduler.wake(path)
            self.start(warp)

        name = f"group of {len(group.acts)} warps' multiplies"
        warp.block.launch.scheduler.later(complete, Operation("wgmma", name))


def _warpgroup(warp: Warp) -> _Warpgroup:
    found = warp.block.warpgroups.setdefault(warp.index // _WARPS, _Warpgroup())
    return cast("_Warpgroup", found)


def _aligned(form: Form) -> None:
    form.flag("sync")
    form.flag("aligned")


@instruction("wgmma.fence")
def _fence(form: Form) -> Step:
    """9.7.15.7.1."""
    _aligned(form)

    def step(t: Path) -> None:
        require_warp(t)
        _warpgroup(t.warp).fenced[t.warp.index] = _words(t).copy()

    return step


@instruction("wgmma.commit_group")
def _commit(form: Form) -> Step:
    """9.7.15.7.2."""
    _aligned(form)

    def step(t: Path) -> None:
        require_warp(t)
        warpgroup = _warpgroup(t.warp)
        warpgroup.open(t.warp).committed += 1
        warpgroup.opened[t.warp.index] += 1
        warpgroup.start(t.warp)

    return step


@instruction("wgmma.wait_group")
def _wait(form: Form) -> Step:
    """9.7.15.7.3: until all but the latest groups are done."""
    _aligned(form)
    form.arity(1)
    literal = form.operands[0]
    if not isinstance(literal, Constant) or not isinstance(literal.value, int):
        form.refuse("the number of groups must be a literal")
    allowed = literal.value

    def step(t: Path) -> Wait | None:
        require_warp(t)
        warpgroup, warp = _warpgroup(t.warp), t.warp.index
        first = warpgroup.awaited.get(warp, 0)
        stop = warpgroup.opened.get(warp, 0) - allowed
        if not all(group.done for group in warpgroup.groups[first:stop]):
            warpgroup.waiters.append(t)
            return Wait("wgmma groups of its warpgroup to complete")
        for group in warpgroup.groups[first:stop]:
            for register in group.registers.pop(warp, ()):
                t.warp.pending[register] -= 1
                if not t.warp.pending[register]:
                    del t.warp.pending[register]
        warpgroup.awaited[warp] = max(first, stop)
        return None

    return step


@dataclass(frozen=True)
class _Tile:
    """How an operand lies in shared memory (9.7.15.5.1, matrix descriptor)."""

    start: int
    leading: int
    stride: int
    swizzle: Swizzle

    @classmethod
    def of(cls, bits: int) -> _Tile:
        """Decodes a descriptor.

        Raises:
            IllegalInstructionError: A base offset, which tiles at multiples of their pattern do
                not have.
        """
        if bits >> 49 & 7:
            raise IllegalInstructionError(f"descriptor {bits:#x}: a base offset is not supported")
        start, leading, stride = ((bits >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        return cls(start, leading, stride, _SWIZZLES[bits >> 62 & 3])

    def chunks(self, rows: Array, transposed: bool) -> Array:
        """Chunks of 16 bytes, ``[rows, 2]``.

        Transposed ("MN-major") a chunk is eight rows of one product, ``[16 products, rows / 8]``.
        The arrangement is that of CUTLASS's canonical layouts (``mma_sm90_desc.hpp``).
        """
        span = self.swizzle.span
        if transposed:
            depth = np.arange(_DEPTH_BYTES // 2)[:, None]
            columns = (rows[::8] // 8 * CHUNK)[None, :]
            if not span:
                where = columns // CHUNK * self.stride + depth // 8 * self.leading
                where = where + depth % 8 * CHUNK
            else:
                where = columns // span * self.leading + columns % span
                where = where + depth // 8 * self.stride + depth % 8 * span
        else:
            half = np.arange(_DEPTH_BYTES // CHUNK)[None, :]
            lines = rows[:, None]
            step, pitch = (CHUNK, span) if span else (self.leading, CHUNK)
            where = lines // 8 * self.stride + lines % 8 * pitch + half * step
        return swizzle_address(self.start + where, self.swizzle) // CHUNK


def _read(t: Path, tile: _Tile, rows: Array, transposed: bool, what: str) -> Array:
    """Marks and checks an operand's chunks; returns them."""
    memory = t.block.shared
    chunks = tile.chunks(rows, transposed)
    if int(chunks.max()) * CHUNK >= memory.size:
        raise MemoryFaultError(f"{what} reaches byte {int(chunks.max()) * CHUNK} of {memory.name}")
    issuer = t.warp.number * LANES
    words = chunks[..., None] * CHUNK + np.arange(0, CHUNK, 4)
    t.block.writes.check(words, issuer, what)
    memory.begin_read(chunks, f"{what} reads")
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
    _aligned(form)
    shape = next((m for m in map(_SHAPE.fullmatch, form.modifiers) if m), None)
    if shape is None:
        form.refuse("no shape")
    form.take(shape.group())
    columns, depth = int(shape.group(1)), int(shape.group(2))
    sum_type, a_type, b_type = form.type(), form.type(), form.type()
    if sum_type != "f32" or a_type not in _ELEMENT_BYTES or b_type not in _ELEMENT_BYTES:
        form.refuse("these types are not supported")
    if depth * _ELEMENT_BYTES[a_type] != _DEPTH_BYTES or columns % 8 or not 8 <= columns <= 256:
        form.refuse("no such shape")
    targets = [form.target(entry, "f32") for entry in form.vector(0)]
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
    b_lines = np.arange(columns)

    def step(t: Path) -> None:
        require_warp(t)
        warpgroup = _warpgroup(t.warp)
        condition = t.active(t.files[PRED][adds])
        keep = bool(condition[0]) != negated
        _check_fence(t, warpgroup, [*targets, *a_rows] if keep else a_rows)
        a_lines = _ROWS * (t.warp.index % _WARPS) + np.arange(_ROWS)
        a_chunks: Array | None = None
        a_fixed = np.zeros((0, 0))
        if a_descriptor is not None:
            tile = _Tile.of(int(t.files[view_of("u64")][a_descriptor][0]))
            a_chunks = _read(t, tile, a_lines, a_transposed, "wgmma's first operand")
        else:
            a_fixed = _fragment(t, a_rows, a_values, _ELEMENT_BYTES[a_type])
        tile = _Tile.of(int(t.files[view_of("u64")][b_descriptor][0]))
        b_chunks = _read(t, tile, b_lines, b_transposed, "wgmma's second operand")
        for register in registers:
            t.warp.pending[register] = t.warp.pending.get(register, 0) + 1
        group = warpgroup.open(t.warp)
        group.registers.setdefault(t.warp.index, []).extend(registers)
        files, words = t.files[view_of("f32")], _words(t)

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


def _check_fence(t: Path, warpgroup: _Warpgroup, rows: list[int]) -> None:
    """9.7.15.7.1: raises if registers of a multiply have been written since the latest fence.

    Those of multiplies in flight need none. What is written with the value that it has goes
    unnoticed, and so do reads.
    """
    before = warpgroup.fenced.get(t.warp.index)
    if before is None:
        raise FenceError("wgmma.mma_async before any wgmma.fence")
    group, words = group_of(32), _words(t)
    if not t.launch.machine.register_fences:
        return
    settled = [row for row in rows if (group, row) not in t.warp.pending]
    if settled and not np.array_equal(before[settled], words[settled]):
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


_LANE = np.arange(LANES)


def _fragment(t: Path, rows: list[int], values: Callable[[Array], Array], size: int) -> Array:
    """A from registers: rows t/4 and t/4+8 alternately, the second pair 16 bytes further."""
    per_word = 4 // size
    words = np.stack([t.files[view_of("u32")][row] for row in rows], axis=1)
    part = values(np.ascontiguousarray(words).view(np.uint8)).reshape(LANES, len(rows), per_word)
    result = np.zeros((_ROWS, _DEPTH_BYTES // size))
    for r in range(len(rows)):
        for e in range(per_word):
            column = per_word * (_LANE % 4) + e + 4 * per_word * (r // 2)
            result[_LANE // 4 + 8 * (r % 2), column] = part[:, r, e]
    return result


def _accumulate(files: list[Array], targets: list[int], product: Array, keep: bool) -> None:
    """Register r of lane t holds row t/4 + 8*((r/2)%2), column 8*(r/4) + 2*(t%4) + r%2."""
    # [half, lane row, column group, lane column, odd] to [group, half, odd, lane].
    parts = product.reshape(2, 8, -1, 4, 2).transpose(2, 0, 4, 1, 3).reshape(len(targets), LANES)
    for row, values in zip(targets, parts, strict=True):
        target = files[row]
        target[:] = values + target if keep else values
