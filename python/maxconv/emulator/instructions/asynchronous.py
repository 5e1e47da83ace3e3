"""Asynchronous copies (PTX ISA 9.0, 9.7.9.25 and 9.7.9.27).

A copy is noted when it is issued, with the bytes that it will read and write marked in their
memories' shadows, and happens at a time that the scheduler draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np

from ...tma import Descriptor, Move, TiledDescriptor, bring, plan
from ..blocks import ThreadBlock
from ..errors import FenceError, IllegalInstructionError, MemoryFaultError
from ..memory import CHUNK, INVALID, UNWRITTEN, WRITING, Memory
from ..paths import Path, Step, Wait
from ..registers import LANES, Array, view_of
from ..scheduler import Operation
from ..syntax import Address
from ..table import Form, instruction
from .mbarrier import find_mbarrier, locate
from .memory import addresses, generic_memory, parts_of
from .warp import REDUCTIONS

__all__ = ["Group"]

#: Bytes that a copy's addresses and sizes are multiples of (9.7.9.25.4.1).
_BULK_ALIGN = 16


@dataclass
class Group:
    """Copies that a thread waits for together.

    Attributes:
        copies: All of them.
        reading: Copies that have not read their source.
        running: Copies that are not done.
        awaited: Whether the thread waited until their sources were read.
    """

    copies: int = 0
    reading: int = 0
    running: int = 0
    awaited: bool = False
    waiters: list[Path] = field(default_factory=list)

    def wake(self) -> None:
        """Something is done."""
        waiters, self.waiters = self.waiters, []
        for path in waiters:
            path.launch.scheduler.wake(path)


def _groups(t: Path, kind: str, lane: int) -> list[Group]:
    """A thread's groups that it has not waited for; the last one is open."""
    found = t.warp.lane_state.setdefault(kind, {}).setdefault(lane, [Group()])
    return cast("list[Group]", found)


def _open_group(t: Path, kind: str, lane: int) -> Group:
    return _groups(t, kind, lane)[-1]


def _commit(kind: str) -> Step:
    def step(t: Path) -> None:
        for lane in t.lanes():
            _groups(t, kind, lane).append(Group())

    return step


def _wait(kind: str, allowed: int, reading: bool) -> Step:
    """Waits until all but the latest committed groups have been read, or are done."""

    def step(t: Path) -> Wait | None:
        for lane in t.lanes():
            groups = _groups(t, kind, lane)
            closed = groups[: max(0, len(groups) - 1 - allowed)]
            for group in closed:
                if group.reading or (group.running and not reading):
                    group.waiters.append(t)
                    what = "be read" if reading else "be done"
                    return Wait(f"a {kind} group of thread {t.warp.index * LANES + lane} to {what}")
            for group in closed:
                group.awaited = True
            groups[:] = [g for g in groups if g.running or not g.awaited or g is groups[-1]]
        return None

    return step


def _literal(form: Form, operand: int) -> int:
    value = getattr(form.operands[operand], "value", None)
    if not isinstance(value, int):
        form.refuse("the number of groups must be a literal")
    return value


@instruction("cp.async.commit_group")
def _commit_copies(form: Form) -> Step:
    """9.7.9.25.3.2."""
    return _commit("cp.async")


@instruction("cp.async.wait_group", "cp.async.wait_all")
def _wait_copies(form: Form) -> Step:
    """9.7.9.25.3.3; wait_all also commits."""
    if form.operands:
        return _wait("cp.async", _literal(form, 0), reading=False)
    commit, wait = _commit("cp.async"), _wait("cp.async", 0, reading=False)

    def step(t: Path) -> Wait | None:
        if t.ticket is None:
            commit(t)
            t.ticket = ("committed",)
        found = wait(t)
        if found is None:
            t.ticket = None
        return found

    return step


@instruction("cp.async.bulk.commit_group")
def _commit_bulk(form: Form) -> Step:
    """9.7.9.27.2.1."""
    return _commit("bulk")


@instruction("cp.async.bulk.wait_group")
def _wait_bulk(form: Form) -> Step:
    """9.7.9.27.2.2."""
    form.arity(1)
    return _wait("bulk", _literal(form, 0), form.flag("read"))


@instruction("cp.async")
def _copy(form: Form) -> Step:
    """9.7.9.25.3.1: every lane copies 4, 8 or 16 bytes; what lies beyond the source size is 0."""
    form.take("ca", "cg")
    for _ in range(2):
        form.take("shared", "shared::cta", "shared::cluster", "global")
    for hint in [entry for entry in form.modifiers if entry.startswith("L2::")]:
        form.modifiers.remove(hint)
    form.arity(3, 4)
    target, source = form.address_row(0), form.address_row(1)
    size = _literal(form, 2)
    valid = form.source(3, "u32") if len(form.operands) > 3 else None
    operation = Operation("cp.async", f"{size} bytes a lane", form.instruction.line)
    if size not in (4, 8, 16):
        form.refuse(f"{size} bytes; 4, 8 and 16 are allowed")

    def step(t: Path) -> None:
        to, start = addresses(t, *target), addresses(t, *source)
        counts = np.full(len(to), size)
        if valid is not None:
            counts = np.minimum(t.active(t.files[view_of("u32")][valid]), size).astype(np.int64)
        if (start % size).any():
            bad = int(start[start % size != 0][0])
            raise MemoryFaultError(f"cp.async of {size} bytes from {bad:#x}")
        threads = t.warp.number * LANES + np.flatnonzero(t.mask)
        for part in parts_of(t, "shared", to):
            first = part.memory.index(part.addresses, size, 1, "cp.async") * size
            index = first[:, None] + np.arange(size)
            part.memory.begin_write(index, "cp.async")
            groups = [_open_group(t, "cp.async", lane) for lane in t.lanes()]
            moved = index, start, counts
            _start_copy(t, part.memory, moved, groups, part.block, threads, operation)

    return step


def _start_copy(
    t: Path,
    shared: Memory,
    moved: tuple[Array, Array, Array],
    groups: list[Group],
    block: ThreadBlock | None,
    threads: Array,
    operation: Operation,
) -> None:
    index, start, counts = moved
    for group in groups:
        group.running += 1
    memory = t.launch.machine.memory
    size = index.shape[1]
    places = (start - memory.base)[:, None] + np.arange(size)
    inside = np.arange(size) < counts[:, None]
    _check_global(memory, places[inside], "cp.async")

    def complete() -> None:
        values = np.where(inside, memory.data[np.where(inside, places, 0)], 0)
        shared.end_write(index, values.astype(np.uint8))
        assert block is not None
        block.writes.note(index[:, 0], size, threads)
        for group in groups:
            group.running -= 1
            group.wake()

    t.launch.scheduler.later(complete, operation)


def _check_global(memory: Memory, places: Array, what: str, reads: bool = True) -> None:
    """Raises unless bytes of global memory may be read, or written."""
    if not places.size:
        return
    if int(places.min()) < 0 or int(places.max()) >= memory.size:
        bad = int(places.min()) if int(places.min()) < 0 else int(places.max())
        raise MemoryFaultError(f"{what} at {memory.where(memory.base + bad)}: out of bounds")
    stops = INVALID | WRITING | (UNWRITTEN if reads else 0)
    memory.check_bytes(places, stops, what)


def _arrive_bytes(t: Path, address: int, count: int, what: str) -> Callable[[], None]:
    """Checks a copy's mbarrier; returns what completes its transaction."""
    barrier = find_mbarrier(t, address)
    if not barrier.published and t.launch.machine.barrier_fences:
        raise FenceError(
            f"{what} uses {barrier}, and no fence.mbarrier_init or fence.proxy.async followed its "
            "initialization (a kernel that relies on a barrier of the block runs on a machine "
            "without barrier_fences)"
        )
    return lambda: barrier.expect(-count)


@instruction("cp.async.mbarrier.arrive")
def _arrive_after_copies(form: Form) -> Step:
    """9.7.13.15.15: arrives once the thread's copies so far are done."""
    counted = form.flag("noinc")
    form.take("shared", "shared::cta")
    form.type()
    target = form.address_row(0)
    operation = Operation("cp.async", "arrive on an mbarrier", form.instruction.line)

    def step(t: Path) -> None:
        for lane, address in zip(t.lanes(), addresses(t, *target), strict=True):
            barrier = find_mbarrier(t, int(address))
            if not counted:
                barrier.pending += 1
            running = [g for g in _groups(t, "cp.async", lane) if g.running]

            def arrive(groups: list[Group] = running, barrier: Any = barrier) -> None:
                if any(group.running for group in groups):
                    t.launch.scheduler.later(arrive, operation)
                else:
                    barrier.arrive()

            arrive()

    return step


@instruction("cp.async.bulk.prefetch")
def _prefetch(form: Form) -> Step:
    """9.7.9.25.4.3, 9.7.9.27.1.4: into L2, which is not modelled."""
    form.modifiers.clear()
    return lambda t: None


@instruction("cp.async.bulk")
def _bulk(form: Form) -> Step:
    """9.7.9.25.4.1: bytes without a tensor map, from global to shared memory or back."""
    target = form.take("shared::cluster", "shared::cta", "global")
    source = form.take("global", "shared::cta")
    form.take("mbarrier::complete_tx::bytes", "bulk_group")
    if (target == "global") == (source == "global"):
        form.refuse("between shared memories is not supported")
    to, start = form.address_row(0), form.address_row(1)
    count = form.source(2, "u32")
    if target == "global":
        form.arity(3)
        return _bulk_store(to, start, count, form.instruction.line)
    form.arity(4)
    barrier = form.address_row(3)

    def step(t: Path) -> None:
        columns = [addresses(t, *entry) for entry in (to, start, barrier)]
        counts = t.active(t.files[view_of("u32")][count])
        for k, size in enumerate(counts):
            where, first, signal = (int(column[k]) for column in columns)
            _check_bulk(where, first, int(size))
            block, offset = locate(t, where, _BULK_ALIGN, "cp.async.bulk")
            memory = t.launch.machine.memory
            places = first - memory.base + np.arange(int(size))
            _check_global(memory, places, "cp.async.bulk")
            index = offset + np.arange(int(size))
            arrive = _arrive_bytes(t, signal, int(size), "cp.async.bulk")
            operation = Operation("TMA", f"load {size} bytes", form.instruction.line)
            _start_load(t, [(block, index, arrive)], partial(_get, memory, places), operation)

    return step


def _check_bulk(where: int, first: int, size: int) -> None:
    if where % _BULK_ALIGN or first % _BULK_ALIGN or size % _BULK_ALIGN:
        raise MemoryFaultError(
            f"cp.async.bulk of {size} bytes from {first:#x} to {where:#x}; multiples of "
            f"{_BULK_ALIGN} are allowed"
        )


Destination = tuple[ThreadBlock, Array, Callable[[], None]]


def _start_load(
    t: Path, destinations: list[Destination], read: Callable[[], Array], operation: Operation
) -> None:
    """Marks what a copy will write in each block, and lets it happen later."""
    for block, index, _ in destinations:
        if int(index.max()) >= block.shared.size:
            where = block.shared.where(block.shared.base + int(index.max()))
            raise MemoryFaultError(f"a copy writes {where}: out of bounds")
        block.shared.begin_write(index, "a copy writes")

    for block, index, arrive in destinations:

        def complete(
            block: ThreadBlock = block, index: Array = index, arrive: Callable[[], None] = arrive
        ) -> None:
            block.require_running("a copy writes shared memory of", operation.line)
            block.shared.end_write(index, read())
            block.writes.forget(index)
            arrive()

        t.launch.scheduler.later(complete, operation)


def _bulk_store(to: Any, start: Any, count: int, line: int) -> Step:
    def step(t: Path) -> None:
        targets, sources = addresses(t, *to), addresses(t, *start)
        counts = t.active(t.files[view_of("u32")][count])
        for lane, where, first, size in zip(t.lanes(), targets, sources, counts, strict=True):
            _check_bulk(int(where), int(first), int(size))
            block, offset = locate(t, int(first), _BULK_ALIGN, "cp.async.bulk")
            memory = t.launch.machine.memory
            places = int(where) - memory.base + np.arange(int(size))
            _check_global(memory, places, "cp.async.bulk", reads=False)
            index = offset + np.arange(int(size))
            _start_store(t, lane, block, index, partial(_put, memory, places), line)

    return step


def _get(memory: Memory, places: Array) -> Array:
    found: Array = memory.data[places]
    return found


def _put(memory: Memory, places: Array, values: Array) -> None:
    memory.data[places] = values
    memory.state[places] = 0


def _start_store(
    t: Path,
    lane: int,
    block: ThreadBlock,
    index: Array,
    write: Callable[[Array], None],
    line: int,
) -> None:
    """Marks what a copy will read; it reads at one time and writes at a later one."""
    if int(index.max()) >= block.shared.size:
        where = block.shared.where(block.shared.base + int(index.max()))
        raise MemoryFaultError(f"a copy reads {where}: out of bounds")
    chunks = np.unique(index // CHUNK)
    block.writes.check(index, t.warp.number * LANES + lane, "a bulk copy")
    block.shared.begin_read(chunks, "a bulk copy reads")
    group = _open_group(t, "bulk", lane)
    group.copies += 1
    group.reading += 1
    group.running += 1

    def read() -> None:
        values = block.shared.data[index]
        block.shared.end_read(chunks)
        group.reading -= 1
        group.wake()

        def finish() -> None:
            write(values)
            group.running -= 1
            group.wake()

        t.launch.scheduler.later(finish, Operation("TMA", f"store: write {index.size} bytes", line))

    t.launch.scheduler.later(read, Operation("TMA", f"store: read {index.size} bytes", line))


@dataclass(frozen=True)
class _Tensor:
    """The operands of a tensor copy: rows of the map's address and of the coordinates."""

    address: tuple[int, int, int]
    coordinates: tuple[int, ...]

    @classmethod
    def of(cls, form: Form, operand: int) -> _Tensor:
        written = form.address(operand)
        rows = tuple(form.source(entry, "s32") for entry in written.coordinates)
        return cls(form.address_row(Address(written.base, written.offset)), rows)

    def descriptor(self, t: Path, k: int) -> Descriptor:
        """The map of the k-th active lane."""
        address = int(addresses(t, *self.address)[k])
        return t.launch.machine.tensor_map(*generic_memory(t, address)).descriptor

    def at(self, t: Path, k: int) -> list[int]:
        """Its coordinates."""
        return [int(t.active(t.files[view_of("s32")][row])[k]) for row in self.coordinates]


@instruction("cp.async.bulk.tensor")
def _tensor_copy(form: Form) -> Step:
    """9.7.9.27.1.2: boxes and pixels of a tensor; what moves is ``maxconv.tma``'s model."""
    rank = int((form.take("1d", "2d", "3d", "4d", "5d") or form.refuse("no rank"))[0])
    target = form.take("shared::cluster", "shared::cta", "global")
    form.take("global", "shared::cta")
    mode = form.take("tile", "im2col", "im2col_no_offs") or "tile"
    hint = form.flag("L2::cache_hint")
    if target == "global":
        form.take("bulk_group")
        form.arity(2 + hint)
        return _tensor_store(form, rank, None)
    form.take("mbarrier::complete_tx::bytes")
    multicast = form.flag("multicast::cluster")
    paired = form.take("cta_group::1", "cta_group::2") == "cta_group::2"
    form.arity(3 + (mode == "im2col") + multicast + hint)
    if len(form.address(1).coordinates) != rank:
        form.refuse(f"{len(form.address(1).coordinates)} coordinates")
    tensor = _Tensor.of(form, 1)
    to, barrier = form.address_row(0), form.address_row(2)
    offsets: tuple[int, ...] = ()
    if mode == "im2col":
        offsets = tuple(form.source(entry, "u16") for entry in form.vector(3))
    peers = form.source(len(form.operands) - 1 - hint, "u16") if multicast else None
    line = form.instruction.line

    def step(t: Path) -> None:
        columns = addresses(t, *to), addresses(t, *barrier)
        for k in range(len(columns[0])):
            taps = [int(t.active(t.files[view_of("u16")][row])[k]) for row in offsets]
            blocks = None
            if peers is not None:
                blocks = int(t.active(t.files[view_of("u16")][peers])[k])
            where, signal = int(columns[0][k]), int(columns[1][k])
            descriptor = tensor.descriptor(t, k)
            coordinates = tensor.at(t, k), taps
            _load_tensor(t, descriptor, coordinates, (where, signal), (blocks, paired), line)

    return step


def _plan(descriptor: Descriptor, at: Sequence[int], taps: Sequence[int], offset: int) -> Move:
    try:
        return plan(descriptor, at, taps, offset=offset)
    except ValueError as error:
        raise IllegalInstructionError(str(error)) from error


def _load_tensor(
    t: Path,
    descriptor: Descriptor,
    coordinates: tuple[Sequence[int], Sequence[int]],
    places: tuple[int, int],
    peers: tuple[int | None, bool],
    line: int,
) -> None:
    what = "cp.async.bulk.tensor"
    at, taps = coordinates
    block, offset = locate(t, places[0], 1, what)
    move = _plan(descriptor, at, taps, offset)
    signal_block, signal_offset = locate(t, places[1], 8, "an mbarrier")
    pairs = _signals(t, block, signal_block, *peers)
    memory = t.launch.machine.memory
    first = descriptor.global_address - memory.base
    _check_global(memory, first + move.tensor[move.inside], what)
    destinations: list[Destination] = []
    for to, owner in pairs:
        address = owner.shared.base + signal_offset
        arrive = _arrive_bytes(t, address, descriptor.transaction_bytes, what)
        destinations.append((to, move.shared, arrive))
    operation = Operation("TMA", f"load {list(at)}, {descriptor.transaction_bytes} bytes", line)
    source = memory.data[max(first, 0) :]
    _start_load(t, destinations, lambda: bring(descriptor, move, source), operation)


def _signals(
    t: Path, block: ThreadBlock, signal: ThreadBlock, peers: int | None, paired: bool
) -> list[tuple[ThreadBlock, ThreadBlock]]:
    """The blocks that a load writes to, each with the one whose mbarrier it tells.

    That is the same one; with ``.cta_group::2`` it may be the other of a pair, and is, in each
    pair that a multicast reaches, the one of the parity of the mbarrier's block. On sm_90a the
    block in an mbarrier's address counts for nothing: an H200 tells the one that it writes to
    (``tests/isa/probes.py``), and MAX's matmul leaves the block out.
    """
    blocks = t.block.cluster.blocks
    if peers is None and t.launch.machine.arch == "sm_90a":
        return [(block, block)]
    if peers is None:
        if signal is not block and not (paired and signal.rank == block.rank ^ 1):
            raise IllegalInstructionError(
                f"a load to block {block} with an mbarrier of block {signal}"
                + (", which is not its peer" if paired else " and no .cta_group::2")
            )
        return [(block, signal)]
    if peers >> len(blocks) or not peers:
        raise IllegalInstructionError(f"multicast to {peers:#x} in {len(blocks)} blocks")
    ranks = [rank for rank in range(len(blocks)) if peers >> rank & 1]
    if not paired:
        return [(blocks[rank], blocks[rank]) for rank in ranks]
    if len(blocks) % 2:
        raise IllegalInstructionError(f".cta_group::2 in a cluster of {len(blocks)} blocks")
    return [(blocks[rank], blocks[rank & ~1 | signal.rank & 1]) for rank in ranks]


def _tensor_store(form: Form, rank: int, reduction: str | None) -> Step:
    """A store, or with a reduction: what is there combined with what comes."""
    if len(form.address(0).coordinates) != rank:
        form.refuse(f"{len(form.address(0).coordinates)} coordinates")
    tensor, start = _Tensor.of(form, 0), form.address_row(1)

    def step(t: Path) -> None:
        sources = addresses(t, *start)
        for k, lane in enumerate(t.lanes()):
            descriptor, at = tensor.descriptor(t, k), tensor.at(t, k)
            if not isinstance(descriptor, TiledDescriptor):
                raise IllegalInstructionError("a store by an im2col map is not supported")
            if min(at) < 0:
                raise IllegalInstructionError(f"a store at negative coordinates {at}")
            block, offset = locate(t, int(sources[k]), 1, "cp.async.bulk.tensor")
            move = _plan(descriptor, at, (), offset)
            memory = t.launch.machine.memory
            places = descriptor.global_address - memory.base + move.tensor
            reads = reduction is not None
            _check_global(memory, places[move.inside], "cp.async.bulk.tensor", reads)
            write = _writer(memory, descriptor, move, places, reduction)
            _start_store(t, lane, block, move.shared, write, form.instruction.line)

    return step


def _writer(
    memory: Memory, descriptor: Descriptor, move: Move, places: Array, reduction: str | None
) -> Callable[[Array], None]:
    def write(values: Array) -> None:
        if reduction is not None:
            old = memory.data[np.where(move.inside, places, 0)]
            values = _reduce(reduction, descriptor, old, values)
        _put(memory, places[move.inside], values[move.inside])

    return write


_ELEMENTS = {
    "UINT32": "u4",
    "INT32": "i4",
    "UINT64": "u8",
    "INT64": "i8",
    "FLOAT16": "f2",
    "FLOAT32": "f4",
    "FLOAT64": "f8",
}


def _reduce(reduction: str, descriptor: Descriptor, old: Array, new: Array) -> Array:
    """9.7.9.27.1.3: rows of bytes of the map's elements, combined."""
    kind = _ELEMENTS.get(descriptor.data_type.name)
    if kind is None:
        raise IllegalInstructionError(
            f"a reduction of {descriptor.data_type.driver_name} is not supported"
        )
    combined = REDUCTIONS[reduction](
        np.ascontiguousarray(old).view(kind), np.ascontiguousarray(new).view(kind)
    )
    result: Array = combined.astype(kind).view(np.uint8)
    return result


@instruction("cp.reduce.async.bulk.tensor")
def _tensor_reduce(form: Form) -> Step:
    """9.7.9.27.1.3."""
    rank = int((form.take("1d", "2d", "3d", "4d", "5d") or form.refuse("no rank"))[0])
    form.take("global")
    form.take("shared::cta")
    reduction = form.take(*REDUCTIONS) or form.refuse("the operation is not supported")
    form.take("tile")
    form.take("bulk_group")
    form.arity(2)
    return _tensor_store(form, rank, reduction)
