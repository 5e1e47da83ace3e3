"""Tensor memory (PTX ISA 9.0, 9.7.16): allocation, loads and stores of registers, waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .._errors import IllegalInstructionError, MemoryFaultError
from .._hardware.blocks import ThreadBlock
from .._hardware.registers import LANES, Array, group_of, view_of
from .._hardware.scheduler import Operation, Wait
from .._hardware.tensormemory import GROUP, Region, TensorMemory
from .._warps.addresses import addresses, locate
from .._warps.paths import Path, Step
from .._warps.table import Form, instruction

__all__ = ["pair_of", "take_blocks"]

#: Warps of a warpgroup, each of which reaches a quarter of the lanes (9.7.16.8.1).
_WARPS = 4


def take_blocks(form: Form) -> int:
    """Takes ``.cta_group``: the blocks that an instruction is for."""
    return int((form.take("cta_group::1", "cta_group::2") or form.refuse("no .cta_group"))[-1])


def pair_of(t: Path, blocks: int) -> list[ThreadBlock]:
    """The blocks whose tensor memory an instruction uses, the even one first (9.7.16.5.1).

    Raises:
        IllegalInstructionError: There is no peer, or the kernel has used the other .cta_group.
    """
    grid = t.grid
    if grid.tensor_blocks not in (0, blocks):
        raise IllegalInstructionError(
            f".cta_group::{blocks} in a kernel that has used .cta_group::{grid.tensor_blocks}"
        )
    grid.tensor_blocks = blocks
    if blocks == 1:
        return [t.block]
    cluster = t.block.cluster.blocks
    first = t.block.rank & ~1
    if first + 1 >= len(cluster):
        raise IllegalInstructionError(
            f".cta_group::2 in block {t.block}: a cluster of {len(cluster)} has no peer for it"
        )
    return cluster[first : first + 2]


def _whole_warp(t: Path, what: str) -> None:
    """Raises unless all 32 threads are there."""
    t.require_warp()
    if not t.mask.all():
        raise IllegalInstructionError(f"{what} in a warp of which threads have exited")


@dataclass
class _Request:
    """What a warp asks for together with the peer's.

    Attributes:
        path: Its path.
        block: Its block.
        values: The operands, the same in both.
        target: Where the address goes to, in its block's shared memory.
    """

    path: Path
    block: ThreadBlock
    values: tuple[int, ...]
    target: int = 0


_DONE = object()


def _together(
    t: Path, blocks: int, key: str, request: _Request, act: Callable[[list[_Request]], Wait | None]
) -> Wait | None:
    """Runs what warps of a pair of blocks do together once both are there."""
    if t.ticket is _DONE:
        t.ticket = None
        return None
    pair = pair_of(t, blocks)
    if blocks == 1:
        return act([request])
    waiting: dict[int, _Request] = t.block.cluster.requests[key, pair[0].rank]
    waiting[t.block.rank] = request
    peer = pair[1 - (t.block.rank & 1)]
    if peer.rank not in waiting:
        return Wait(f"{key} by the peer, block {peer}")
    other = waiting[peer.rank]
    if other.values != request.values:
        raise IllegalInstructionError(
            f"{key} of {request.values} in block {t.block} and {other.values} in its peer"
        )
    requests = [waiting[block.rank] for block in pair]
    found = act(requests)
    if found is None:
        waiting.clear()
        other.path.ticket = _DONE
        other.path.wake()
    return found


@instruction("tcgen05.alloc")
def _allocate(form: Form) -> Step:
    """9.7.16.7.1: blocks until there are columns; two blocks get the same ones."""
    blocks = take_blocks(form)
    form.take_aligned()
    form.take("shared::cta")
    form.type()
    form.arity(2)
    target, number = form.address_row(0), form.source(1, "u32")

    def step(t: Path) -> Wait | None:
        _whole_warp(t, "tcgen05.alloc")
        count = t.uniform(number, "numbers of columns")
        block, offset = locate(t, int(addresses(t, *target)[0]), 4, "tcgen05.alloc's result")
        if block is not t.block:
            raise MemoryFaultError("tcgen05.alloc writes its own block's shared memory only")
        if t.ticket is None:
            t.block.tensor.check_request(count)
        request = _Request(t, t.block, (count,), offset)
        return _together(t, blocks, "tcgen05.alloc", request, _give_columns)

    return step


def _give_columns(requests: list[_Request]) -> Wait | None:
    """Allocates for one block or two; ISA and hardware leave open where, so that it is drawn."""
    count = requests[0].values[0]
    memories = [request.block.tensor for request in requests]
    places = set(memories[0].free_places(count))
    for memory in memories[1:]:
        places &= set(memory.free_places(count))
    if not places:
        for request, memory in zip(requests, memories, strict=True):
            memory.waiters.add(request.path)
        return Wait(f"{count} columns of tensor memory of block {requests[0].block}")
    ordered = sorted(places)
    first = ordered[requests[0].path.scheduler.random.randrange(len(ordered))]
    for request, memory in zip(requests, memories, strict=True):
        warp, shared = request.path.warp, request.block.shared
        memory.allocate(first, count, warp.index)
        address = np.array([shared.base + request.target])
        shared.write(address, np.array([first], np.uint32), 4)
        request.block.writes.note(address - shared.base, 4, np.array([warp.number * LANES]))
    return None


@instruction("tcgen05.dealloc")
def _free(form: Form) -> Step:
    """9.7.16.7.1: two blocks free together."""
    blocks = take_blocks(form)
    form.take_aligned()
    form.type()
    form.arity(2)
    address, number = form.source(0, "u32"), form.source(1, "u32")

    def step(t: Path) -> Wait | None:
        _whole_warp(t, "tcgen05.dealloc")
        values = t.uniform(address, "addresses"), t.uniform(number, "numbers of columns")
        return _together(t, blocks, "tcgen05.dealloc", _Request(t, t.block, values), _take_columns)

    return step


def _take_columns(requests: list[_Request]) -> Wait | None:
    for request in requests:
        address, count = request.values
        request.block.tensor.free(address & 0xFFFF, count)
    return None


@instruction("tcgen05.relinquish_alloc_permit")
def _relinquish(form: Form) -> Step:
    """9.7.16.7.1."""
    blocks = take_blocks(form)
    form.take_aligned()
    form.arity(0)

    def step(t: Path) -> None:
        _whole_warp(t, "tcgen05.relinquish_alloc_permit")
        pair_of(t, blocks)
        t.block.tensor.relinquished = True

    return step


@instruction("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def _fence(form: Form) -> Step:
    """9.7.16.11.1: nothing: kernels that are known to be right (MAX's) have none."""
    form.arity(0)
    return lambda t: None


@dataclass(frozen=True)
class _Shape:
    """What a warp moves between tensor memory and a number of registers a thread.

    Attributes:
        lanes: 16 or 32.
        rows: The lane of each register of each thread, ``[registers, 32]``.
        columns: Its column, likewise.
        spans: First column and number of columns of each access.
    """

    lanes: int
    rows: Array
    columns: Array
    spans: tuple[tuple[int, int], ...]


_THREAD = np.arange(LANES)

#: Columns of a shape's repetition, and registers (Table 49 of 9.7.16.8.3).
_WIDTHS = {"32x32b": (1, 1), "16x64b": (2, 1), "16x128b": (4, 2), "16x256b": (8, 4)}


@lru_cache(maxsize=256)
def _shape(name: str, count: int, packed: bool, half: int) -> _Shape:
    """The fragments of 9.7.16.2.3.1, as CUTLASS's ``copy_traits_sm100.hpp`` spells them out.

    Args:
        name: The shape.
        count: Repetitions.
        packed: Whether a register holds the low 16 bits of two columns (9.7.16.8.2).
        half: Columns from the first access of ``16x32bx2`` to the second.
    """
    t = _THREAD
    if name == "16x32bx2":
        register = np.arange(count)[:, None]
        rows, columns = np.broadcast_to(t % GROUP, (count, LANES)), register + 0 * t
        scale = 2 if packed else 1
        far = np.where(t < GROUP, 0, half)
        spans = (0, count * scale), (half, count * scale)
        return _Shape(GROUP, rows, columns * scale + far, spans)
    width, registers = _WIDTHS[name]
    register = np.arange(count * registers)[:, None]
    step = register // registers * width
    if name == "32x32b":
        rows, columns = t + 0 * register, register + 0 * t
    elif name == "16x64b":
        rows, columns = t // 4 + 8 * (t % 2) + 0 * register, step + t // 2 % 2
    elif name == "16x128b":
        rows, columns = t // 4 + 8 * (register % 2), step + t % 4
    else:
        rows = t // 4 + 8 * (register // 2 % 2)
        columns = step + 2 * (t % 4) + register % 2
    scale = 2 if packed else 1
    lanes = LANES if name == "32x32b" else GROUP
    return _Shape(lanes, rows, columns * scale, ((0, width * count * scale),))


def _take_shape(form: Form, packs: str, offset: int) -> tuple[_Shape, bool]:
    """Takes shape, repetitions and packing; the half's offset is an operand."""
    form.take_aligned()
    name = form.take(*_WIDTHS, "16x32bx2") or form.refuse("no shape")
    numbers = [f"x{1 << power}" for power in range(8)]
    count = int((form.take(*numbers) or form.refuse("no number of repetitions"))[1:])
    packed = form.flag(packs)
    form.type()
    half = 0
    if name == "16x32bx2":
        form.arity(3)
        half = form.literal(offset, "the offset of the second half")
    else:
        form.arity(2)
    if count * _WIDTHS.get(name, (1, 1))[1] > 128:
        form.refuse("more than 128 registers")
    return _shape(name, count, packed, half), packed


def _regions(t: Path, row: int, shift: int, shape: _Shape, what: str) -> tuple[int, list[Region]]:
    """The first column and the regions that a warp accesses.

    A warp reaches 32 lanes (9.7.16.8.1). Its address may name them, or those of the first warp:
    compiled kernels that run on hardware (MAX's) add nothing for the warp.
    """
    address = t.uniform(row, "addresses") + shift
    lane, column = address >> 16, address & 0xFFFF
    quarter = t.warp.index % _WARPS
    if lane // LANES not in (0, quarter):
        raise MemoryFaultError(
            f"{what} at lane {lane}; warp {t.warp.index} reaches lanes {LANES * quarter} to "
            f"{LANES * quarter + LANES - 1}"
        )
    inside = lane % LANES
    if inside % shape.lanes:
        raise MemoryFaultError(
            f"{what} at lane {lane}; a multiple of {shape.lanes} is allowed for this shape"
        )
    first = LANES * quarter + inside
    lanes = tuple(range(first, first + shape.lanes))
    return column, [Region(lanes, column + start, count) for start, count in shape.spans]


@instruction("tcgen05.ld")
def _load(form: Form) -> Step:
    """9.7.16.8.3: the registers hold the values after tcgen05.wait::ld."""
    shape, packed = _take_shape(form, "pack::16b", 2)
    targets = [form.target(entry, "u32") for entry in form.vector(0)]
    if len(targets) != len(shape.rows):
        form.refuse(f"{len(targets)} registers; the shape has {len(shape.rows)}")
    _, row, shift = form.address_row(1)
    registers = [(group_of(32), target) for target in targets]
    operation = Operation("tensor memory", "tcgen05.ld", form.instruction.line)

    def step(t: Path) -> None:
        _whole_warp(t, "tcgen05.ld")
        memory = t.block.tensor
        column, regions = _regions(t, row, shift, shape, "tcgen05.ld")
        for region in regions:
            memory.begin_read(region, "tcgen05.ld reads")
        files, loading = t.files[view_of("u32")], t.warp.loading
        where = regions[0].lanes[0] + shape.rows, column + shape.columns

        def act() -> None:
            values = memory.data[where]
            if packed:
                values = values & 0xFFFF | memory.data[where[0], where[1] + 1] << np.uint32(16)
            for region in regions:
                memory.end_read(region)
            for target, register, found in zip(targets, registers, values, strict=True):
                files[target][:] = found
                if loading.get(register) is transfer:
                    del loading[register]

        transfer = t.warp.transfers["tcgen05.ld"].start(t.scheduler, act, operation)
        loading.update(dict.fromkeys(registers, transfer))

    return step


@instruction("tcgen05.st")
def _store(form: Form) -> Step:
    """9.7.16.8.4: the registers are read at once, the words are there after tcgen05.wait::st."""
    shape, packed = _take_shape(form, "unpack::16b", 1)
    sources = [form.source(entry, "u32") for entry in form.vector(len(form.operands) - 1)]
    if len(sources) != len(shape.rows):
        form.refuse(f"{len(sources)} registers; the shape has {len(shape.rows)}")
    _, row, shift = form.address_row(0)
    operation = Operation("tensor memory", "tcgen05.st", form.instruction.line)

    def step(t: Path) -> None:
        _whole_warp(t, "tcgen05.st")
        memory = t.block.tensor
        column, regions = _regions(t, row, shift, shape, "tcgen05.st")
        number = t.grid.new_operation()
        for region in regions:
            memory.begin_write(region, "tcgen05.st writes", number)
        files = t.files[view_of("u32")]
        values = np.stack([files[source] for source in sources])
        where = shape.rows, shape.columns

        def act() -> None:
            _put(memory, regions, column, where, values, packed)

        t.warp.transfers["tcgen05.st"].start(t.scheduler, act, operation)

    return step


def _put(
    memory: TensorMemory,
    regions: list[Region],
    column: int,
    where: tuple[Array, Array],
    values: Array,
    packed: bool,
) -> None:
    """Writes a warp's registers."""
    rows, columns = where
    for region in regions:
        words = memory.values(region)
        inside = columns + column - region.first
        chosen = (inside >= 0) & (inside < region.count)
        if packed:
            words[rows[chosen], inside[chosen]] = values[chosen] & 0xFFFF
            words[rows[chosen], inside[chosen] + 1] = values[chosen] >> np.uint32(16)
        else:
            words[rows[chosen], inside[chosen]] = values[chosen]
        memory.end_write(region, words)


@instruction("tcgen05.wait::ld", "tcgen05.wait::st")
def _wait(form: Form) -> Step:
    """9.7.16.8.5: until the warp's loads, or stores, are done."""
    kind = "tcgen05." + form.instruction.opcode.split("::")[1][:2]
    form.take_aligned()
    form.arity(0)

    def step(t: Path) -> Wait | None:
        _whole_warp(t, f"{kind}'s wait")
        transfers = t.warp.transfers[kind]
        running = transfers.unfinished()
        if running:
            transfers.waiters.add(t)
            return Wait(f"{len(running)} {kind} of its warp to be done")
        return None

    return step
