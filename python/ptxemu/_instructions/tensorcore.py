"""Multiplies and copies of the fifth generation's tensor cores (PTX ISA 9.0, 9.7.16).

One thread issues them; they happen some time, in the orders that 9.7.16.6.2 guarantees: multiplies
of one accumulator and shape as they were issued, a copy before the multiplies that follow it, and
a commit's arrival after everything that its thread issued before.

Products are summed in float64 and rounded to the accumulator's type, to nearest, once an
instruction. The hardware aligns products and accumulator to the largest exponent, keeps 25 bits and
rounds toward zero (measured by microsoft/MMA-Sim), so that a sum of n instructions may differ by n
units in the last place of the largest partial sum; sums of integers are exact in both as long as
they fit 24 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from .._errors import IllegalInstructionError, MemoryFaultError
from .._hardware.barriers import MBarrier
from .._hardware.blocks import ThreadBlock
from .._hardware.memory import CHUNK
from .._hardware.pending import Accumulator, TensorOperation
from .._hardware.registers import LANES, PRED, Array, view_of
from .._hardware.scheduler import Operation
from .._hardware.tensormemory import GROUP, TENSOR_LANES, Region
from .._numbers import decode
from .._text.syntax import Address, Constant, Vector
from .._warps.addresses import addresses, find_mbarrier
from .._warps.paths import Path, Step
from .._warps.table import Form, instruction
from ..tma import Swizzle
from .matrices import DEPTH_BYTES, KINDS, Kind, MultiplyDescriptor, SharedMatrix
from .tensormemory import pair_of, take_blocks


def _unfinished(found: dict[int, list[TensorOperation]], key: int) -> list[TensorOperation]:
    """Operations that are not done; the others are forgotten."""
    found[key] = [entry for entry in found.get(key, ()) if not entry.done]
    return found[key]


def _issued(t: Path, lane: int) -> list[TensorOperation]:
    """A thread's operations that are not done."""
    return _unfinished(t.warp.issued, lane)


def _copies(t: Path, pair: list[ThreadBlock]) -> list[TensorOperation]:
    """Copies to a pair's tensor memory that are not done."""
    return _unfinished(t.block.cluster.tensor_copies, pair[0].rank)


@dataclass(frozen=True)
class _Part:
    """A part of D in one block (9.7.16.10.5, layouts A, B, D and F).

    Attributes:
        lanes: Of tensor memory, one a row.
        columns: Of D, as a range of N.
    """

    lanes: tuple[int, ...]
    columns: tuple[int, int]


@lru_cache(maxsize=64)
def _parts(rows: int, columns: int, blocks: int, first: int) -> tuple[_Part, ...]:
    """Where D lies; the figures show it, CUTLASS's ``tmem_frg`` spells it out."""
    own = rows // blocks
    if own == TENSOR_LANES:
        return (_Part(tuple(range(own)), (0, columns)),)
    if blocks == 1:
        lanes = tuple(32 * (row // GROUP) + row % GROUP + first for row in range(own))
        return (_Part(lanes, (0, columns)),)
    half = columns // 2
    low, high = tuple(range(own)), tuple(range(own, 2 * own))
    return _Part(low, (0, half)), _Part(high, (half, columns))


def _to_words(values: Array, type_name: str, saturates: bool) -> Array:
    """Elements of D as words; 16 bits lie in the lower half (9.7.16.10.4.1)."""
    if type_name == "f32":
        return values.astype(np.float32).view(np.uint32)
    if type_name == "f16":
        return values.astype(np.float16).view(np.uint16).astype(np.uint32)
    if saturates:
        values = np.clip(values, -(2.0**31), 2.0**31 - 1)
    return values.astype(np.int64).astype(np.uint32)


def _from_words(words: Array, type_name: str) -> Array:
    words = np.ascontiguousarray(words)
    if type_name == "f32":
        return words.view(np.float32).astype(np.float64)
    if type_name == "f16":
        return words.astype(np.uint16).view(np.float16).astype(np.float64)
    return words.view(np.int32).astype(np.float64)


@dataclass(frozen=True)
class _SharedOperand:
    """A or B in one block's shared memory."""

    block: ThreadBlock
    chunks: Array
    transposed: bool

    def elements(self, values: Callable[[Array], Array]) -> Array:
        """Its elements ``[rows, products]``; it is no longer read afterwards."""
        raw = self.block.shared.chunks[self.chunks]
        self.block.shared.end_read(self.chunks)
        found = values(raw.reshape(len(raw), -1))
        return found.T if self.transposed else found


@dataclass(frozen=True)
class _TensorOperand:
    """A in one block's tensor memory: 32 bytes of each row, in eight columns.

    Attributes:
        block: Whose.
        region: The columns, in all lanes.
        used: Those lanes of it that hold rows.
    """

    block: ThreadBlock
    region: Region
    used: Region

    def elements(self, values: Callable[[Array], Array]) -> Array:
        """Its elements ``[lanes, products]``; it is no longer read afterwards."""
        words = np.ascontiguousarray(self.block.tensor.values(self.region))
        self.block.tensor.end_read(self.used)
        return values(words.view(np.uint8))


#: Products that numpy's library computes in one thread: more of them it shares with others, which
#: have other things to do.
_ALONE = 64 * 64 * 64

_Operand = _SharedOperand | _TensorOperand


@dataclass(frozen=True)
class _Product:
    """A multiply under way.

    Attributes:
        pair: The blocks whose tensor memory it adds to.
        shape: What its descriptor says.
        a: Each block's rows of A.
        b: Each block's part of B's columns.
        parts: Where D lies, with its region in each block.
        keep: Whether it adds to what is there.
        scale: It adds that times two to the power of minus this.
        enabled: Which lanes are written, by block; None if all are.
    """

    pair: list[ThreadBlock]
    shape: MultiplyDescriptor
    a: Sequence[_Operand]
    b: Sequence[_SharedOperand]
    parts: list[tuple[_Part, Region]]
    keep: bool
    scale: int
    enabled: Array | None

    def begin(self, number: int) -> None:
        """Checks D and marks that it will be written."""
        for block in self.pair:
            for _, region in self.parts:
                if self.keep:
                    block.tensor.check(region, "tcgen05.mma adds to")
                    block.tensor.require_written(region, "tcgen05.mma adds to")
                fresh = not self.keep and self.enabled is None
                block.tensor.begin_write(region, "tcgen05.mma writes", number, fresh, True)

    def act(self) -> None:
        """Multiplies."""
        b_values = decode(self.shape.b_type)
        b = np.concatenate([operand.elements(b_values) for operand in self.b])
        a_values = decode(self.shape.a_type)
        for k, (block, operand) in enumerate(zip(self.pair, self.a, strict=True)):
            a = operand.elements(a_values)
            for part, region in self.parts:
                rows = a[list(part.lanes)] if isinstance(operand, _TensorOperand) else a
                words = self._sum(block.tensor.values(region), rows, b[slice(*part.columns)])
                lanes = None if self.enabled is None else self.enabled[k, list(part.lanes)]
                block.tensor.end_write(region, words, lanes, unread=self.enabled is None)

    def _sum(self, old: Array, a: Array, b: Array) -> Array:
        """D's words, of rows of A and columns of B."""
        step = max(1, _ALONE // a.size)
        with np.errstate(all="ignore"):
            pieces = [a @ b[first : first + step].T for first in range(0, len(b), step)]
            total = np.concatenate(pieces, axis=1)
            if self.shape.sign < 0:
                total = -total
            if self.keep:
                before = _from_words(old, self.shape.sum_type)
                total += before * 2.0**-self.scale if self.scale else before
            return _to_words(total, self.shape.sum_type, self.shape.saturates)


@dataclass(frozen=True)
class _Multiply:
    """An instruction, as it is written: rows of its operands."""

    kind: Kind
    blocks: int
    line: int
    d: tuple[int, int, int]
    a: tuple[int, int, int] | int
    b: int
    descriptor: int
    disabled: tuple[int, ...]
    adds: tuple[int, bool]
    scale: int

    def issue(self, t: Path, lane: int) -> None:
        """Starts the multiply of one thread."""
        pair = pair_of(t, self.blocks)
        bits = int(t.files[view_of("u32")][self.descriptor][lane])
        shape = MultiplyDescriptor.of(bits, self.kind, self.blocks)
        address = _address(t, self.d, lane)
        parts = [
            (part, Region(part.lanes, address & 0xFFFF, part.columns[1] - part.columns[0]))
            for part in self._layout(shape, address >> 16)
        ]
        product = _Product(
            pair,
            shape,
            self._rows_of_a(t, lane, pair, shape, parts),
            self._shared(t, lane, pair, self.b, (shape.columns, shape.b_transposed), "B"),
            parts,
            bool(t.files[PRED][self.adds[0]][lane]) != self.adds[1],
            self.scale,
            self._enabled(t, lane),
        )
        key = pair[0].rank, address, shape.rows, shape.columns
        accumulators = t.block.cluster.accumulators
        if key not in accumulators:
            accumulators[key] = Accumulator(t.grid.new_operation())
        accumulator = accumulators[key]
        product.begin(accumulator.number)
        operation = TensorOperation(product.act, list(_copies(t, pair)), accumulator.queue)
        accumulator.queue.append(operation)
        _issued(t, lane).append(operation)
        name = f"tcgen05.mma {shape.rows}x{shape.columns} {shape.a_type}"
        t.scheduler.later(operation.complete, Operation("tensor core", name, self.line))

    def _layout(self, shape: MultiplyDescriptor, first: int) -> tuple[_Part, ...]:
        half = shape.rows == 64 and self.blocks == 1
        if first not in ((0, GROUP) if half else (0,)):
            raise MemoryFaultError(
                f"tcgen05.mma with D at lane {first}; {'0 and 16 are' if half else '0 is'} allowed "
                f"with {shape.rows} rows"
            )
        return _parts(shape.rows, shape.columns, self.blocks, first)

    def _enabled(self, t: Path, lane: int) -> Array | None:
        """Which lanes are written, by block; None if all are."""
        words = [int(t.files[view_of("u32")][row][lane]) for row in self.disabled]
        if not any(words):
            return None
        bits = np.array(words, np.uint32).view(np.uint8)
        disabled = np.unpackbits(bits, bitorder="little").reshape(self.blocks, TENSOR_LANES)
        enabled: Array = disabled == 0
        return enabled

    def _shared(
        self,
        t: Path,
        lane: int,
        pair: list[ThreadBlock],
        descriptor: int,
        size: tuple[int, bool],
        name: str,
    ) -> list[_SharedOperand]:
        """An operand of so many rows, transposed or not: each block has its part of them.

        The descriptor's offset is the same in both blocks' shared memory (9.7.16.4.1).
        """
        matrix = SharedMatrix.of_tcgen05(int(t.files[view_of("u64")][descriptor][lane]))
        rows, transposed = size
        chunks = self._chunks(matrix, rows // self.blocks, transposed, name)
        for block in pair:
            block.begin_read(chunks, t.warp.number * LANES + lane, f"tcgen05.mma's {name}")
        return [_SharedOperand(block, chunks, transposed) for block in pair]

    def _chunks(self, matrix: SharedMatrix, rows: int, transposed: bool, name: str) -> Array:
        """An operand's chunks, if 9.7.16.10.3 allows its arrangement."""
        size = self.kind.size
        if (matrix.swizzle is Swizzle.B128_ATOM_32B) != (transposed and size == 4):
            raise IllegalInstructionError(
                f"tcgen05.mma's {name}, {'MN' if transposed else 'K'}-major elements of {size} "
                f"bytes, with the swizzle {matrix.swizzle.name}"
            )
        if transposed:
            return matrix.chunks(rows * size // CHUNK, DEPTH_BYTES // size, True)
        return matrix.chunks(rows, DEPTH_BYTES // CHUNK, False)

    def _rows_of_a(
        self,
        t: Path,
        lane: int,
        pair: list[ThreadBlock],
        shape: MultiplyDescriptor,
        parts: list[tuple[_Part, Region]],
    ) -> Sequence[_Operand]:
        """A, from shared or tensor memory."""
        if isinstance(self.a, int):
            return self._shared(t, lane, pair, self.a, (shape.rows, shape.a_transposed), "A")
        address = _address(t, self.a, lane)
        lanes = tuple(sorted({entry for part, _ in parts for entry in part.lanes}))
        if shape.a_transposed or address >> 16 != lanes[0]:
            raise IllegalInstructionError(
                f"tcgen05.mma with A in tensor memory at lane {address >> 16}, "
                + ("transposed" if shape.a_transposed else f"and D at lane {lanes[0]}")
            )
        region = Region(tuple(range(TENSOR_LANES)), address & 0xFFFF, DEPTH_BYTES // 4)
        used = Region(lanes, region.first, region.count)
        for block in pair:
            block.tensor.begin_read(used, "tcgen05.mma's A reads", after_copies=True)
        return [_TensorOperand(block, region, used) for block in pair]


def _address(t: Path, operand: tuple[int, int, int], lane: int) -> int:
    """A thread's address in tensor memory: the lane above 16 bits of the column."""
    view, row, offset = operand
    return (int(t.files[view][row][lane]) + offset) & 0xFFFFFFFF


def _ignore_collector(form: Form) -> None:
    """Takes what lets the hardware keep A for the next multiply (9.7.16.10)."""
    form.take(*(f"collector::a::{op}" for op in ("fill", "use", "lastuse", "discard")))


@instruction("tcgen05.mma")
def _multiply(form: Form) -> Step:
    """9.7.16.10.9.1: D = A*B + D, or A*B."""
    blocks = take_blocks(form)
    name = form.take(*(f"kind::{kind}" for kind in KINDS)) or form.refuse("the kind")
    kind = KINDS[name.partition("::")[2]]
    _ignore_collector(form)
    form.arity(5, 6, 7)
    operands = form.operands
    disabled: tuple[int, ...] = ()
    if isinstance(operands[4], Vector):
        disabled = tuple(form.source(entry, "u32") for entry in operands[4].elements)
        if len(disabled) != 4 * blocks:
            form.refuse(f"{len(disabled)} words of lanes for {blocks} blocks")
    last = 5 if disabled else 4
    scale = 0
    if len(operands) > last + 1:
        literal = operands[last + 1]
        if not isinstance(literal, Constant) or literal.value not in range(16):
            form.refuse("the scale of D must be a literal from 0 to 15")
        if kind.name not in ("f16", "tf32"):
            form.refuse("the scale of D is for .kind::f16 and .kind::tf32")
        scale = int(literal.value)
    in_tensor_memory = isinstance(operands[1], Address)
    multiply = _Multiply(
        kind,
        blocks,
        form.instruction.line,
        form.address_row(0),
        form.address_row(1) if in_tensor_memory else form.source(1, "u64"),
        form.source(2, "u64"),
        form.source(3, "u32"),
        disabled,
        form.predicate(last),
        scale,
    )

    def step(t: Path) -> None:
        for lane in t.lanes():
            multiply.issue(t, lane)

    return step


@instruction("tcgen05.commit")
def _commit(form: Form) -> Step:
    """9.7.16.12.1: one arrival in each block that the mask names."""
    blocks = take_blocks(form)
    form.flag("mbarrier::arrive::one") or form.refuse("no .mbarrier::arrive::one")
    form.take("shared::cluster")
    multicast = form.flag("multicast::cluster")
    form.type()
    form.arity(1 + multicast)
    target = form.address_row(0)
    peers = form.source(1, "u16") if multicast else None
    operation = Operation("tensor core", "tcgen05.commit", form.instruction.line)

    def step(t: Path) -> None:
        pair_of(t, blocks)
        for lane, address in zip(t.lanes(), addresses(t, *target), strict=True):
            found = find_mbarrier(t, int(address))
            cluster = t.block.cluster.blocks
            ranks = [found.block.rank]
            if peers is not None:
                mask = int(t.files[view_of("u16")][peers][lane])
                if not mask or mask >> len(cluster):
                    raise IllegalInstructionError(
                        f"tcgen05.commit to {mask:#x} in a cluster of {len(cluster)}"
                    )
                ranks = [rank for rank in range(len(cluster)) if mask >> rank & 1]
            barriers = [(cluster[rank], cluster[rank].mbarrier(found.offset)) for rank in ranks]
            tracked = list(_issued(t, lane))
            t.scheduler.later(partial(_arrive, tracked, barriers, operation.line), operation)

    return step


def _arrive(
    tracked: list[TensorOperation], barriers: list[tuple[ThreadBlock, MBarrier]], line: int
) -> None:
    """A commit's arrivals, after what it tracks."""
    for entry in tracked:
        entry.complete()
    for block, barrier in barriers:
        block.require_running("tcgen05.commit arrives in", line)
        barrier.arrive()


#: Rows of a copy, chunks of a row, and the lane of each row in each of its copies
#: (9.7.16.2.3, 9.7.16.9.2; CUTLASS's ``SM100_UTCCP`` traits spell them out).
_ROW = np.arange(TENSOR_LANES)
_COPIES: dict[tuple[str, str], tuple[int, Array]] = {
    ("128x256b", ""): (2, _ROW[None]),
    ("128x128b", ""): (1, _ROW[None]),
    ("4x256b", ""): (2, 32 * _ROW[None, :4]),
    ("64x128b", "warpx2::02_13"): (1, np.stack([_ROW[:64], _ROW[:64] + 64])),
    ("64x128b", "warpx2::01_23"): (
        1,
        np.stack([_ROW[:64] % 32 + 64 * (_ROW[:64] // 32) + 32 * k for k in range(2)]),
    ),
    ("32x128b", "warpx4"): (1, np.stack([_ROW[:32] + 32 * k for k in range(4)])),
}


@instruction("tcgen05.cp")
def _copy(form: Form) -> Step:
    """9.7.16.9.2: rows of 16 or 32 bytes of shared memory to lanes, each block from its own."""
    blocks = take_blocks(form)
    shapes = {name for name, _ in _COPIES}
    name = form.take(*shapes) or form.refuse("the shape")
    spread = form.take("warpx2::02_13", "warpx2::01_23", "warpx4")
    if (name, spread) not in _COPIES:
        form.refuse(f"the shape with .{spread}" if spread else "the shape needs a multicast")
    depth, lanes = _COPIES[name, spread]
    form.arity(2)
    target, source = form.address_row(0), form.source(1, "u64")
    operation = Operation("tensor core", f"tcgen05.cp {name}", form.instruction.line)

    def step(t: Path) -> None:
        pair = pair_of(t, blocks)
        for lane in t.lanes():
            matrix = SharedMatrix.of_tcgen05(int(t.files[view_of("u64")][source][lane]))
            address = _address(t, target, lane)
            chunks = matrix.chunks(lanes.shape[1], depth, False)
            number = -t.grid.new_operation()
            starts = _copy_regions(address, lanes, depth)
            for block in pair:
                block.begin_read(chunks, t.warp.number * LANES + lane, "tcgen05.cp")
                for region in starts:
                    block.tensor.begin_write(region, "tcgen05.cp writes", number)
            copy = TensorOperation(partial(_bring, pair, chunks, starts))
            _issued(t, lane).append(copy)
            _copies(t, pair).append(copy)
            t.scheduler.later(copy.complete, operation)

    return step


def _copy_regions(address: int, lanes: Array, depth: int) -> list[Region]:
    """Where each copy of the rows goes to."""
    first = address >> 16
    if first + int(lanes.max()) >= TENSOR_LANES:
        raise MemoryFaultError(
            f"tcgen05.cp at lane {first} reaches lane {first + int(lanes.max())}"
        )
    columns = depth * CHUNK // 4
    return [
        Region(tuple(int(entry) + first for entry in row), address & 0xFFFF, columns)
        for row in lanes
    ]


def _bring(pair: list[ThreadBlock], chunks: Array, regions: list[Region]) -> None:
    for block in pair:
        raw = block.shared.chunks[chunks]
        block.shared.end_read(chunks)
        for region in regions:
            block.tensor.end_write(region, raw.reshape(len(raw), -1).view(np.uint32))
