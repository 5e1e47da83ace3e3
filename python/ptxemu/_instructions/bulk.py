"""Copies without a tensor map by TMA, and stores that an mbarrier counts.

PTX ISA 9.0, 9.7.9.25.4 and 9.7.9.27.2; 9.7.9.12.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .._errors import FenceError, MemoryFaultError
from .._hardware.blocks import ThreadBlock
from .._hardware.memory import CHUNK, Memory
from .._hardware.registers import LANES, Array, view_of
from .._hardware.scheduler import Operation
from .._text.syntax import type_bits
from .._warps.addresses import addresses, find_mbarrier, locate
from .._warps.paths import Path, Step
from .._warps.table import Form, instruction
from .copies import GROUPS, check_global, commit, groups_of, wait_step

__all__ = ["Destination", "arrive_bytes", "put", "start_load", "start_store"]


#: Bytes that a copy's addresses and sizes are multiples of (9.7.9.25.4.1).
_BULK_ALIGN = 16


@instruction("cp.async.bulk.commit_group")
def _commit_bulk(form: Form) -> Step:
    """9.7.9.27.2.1."""
    return commit("bulk")


@instruction("cp.async.bulk.wait_group")
def _wait_bulk(form: Form) -> Step:
    """9.7.9.27.2.2."""
    form.arity(1)
    return wait_step("bulk", form.literal(0, GROUPS), form.flag("read"))


def arrive_bytes(t: Path, address: int, count: int, what: str) -> Callable[[], None]:
    """Checks a copy's mbarrier; returns what completes its transaction."""
    barrier = find_mbarrier(t, address)
    if not barrier.published and t.grid.device.rules.barrier_fences:
        raise FenceError(
            f"{what} uses {barrier}, and no fence.mbarrier_init or fence.proxy.async followed its "
            "initialization (a kernel that relies on a barrier of the block runs on a machine "
            "without barrier_fences)"
        )
    return lambda: barrier.expect(-count)


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
            memory = t.grid.device.memory
            places = first - memory.base + np.arange(int(size))
            check_global(memory, places, "cp.async.bulk")
            index = offset + np.arange(int(size))
            arrive = arrive_bytes(t, signal, int(size), "cp.async.bulk")
            operation = Operation("TMA", f"load {size} bytes", form.instruction.line)
            start_load(t, [(block, index, arrive)], partial(_get, memory, places), operation)

    return step


def _check_bulk(where: int, first: int, size: int) -> None:
    if where % _BULK_ALIGN or first % _BULK_ALIGN or size % _BULK_ALIGN:
        raise MemoryFaultError(
            f"cp.async.bulk of {size} bytes from {first:#x} to {where:#x}; multiples of "
            f"{_BULK_ALIGN} are allowed"
        )


Destination = tuple[ThreadBlock, Array, Callable[[], None]]


def start_load(
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

        t.scheduler.later(complete, operation)


@instruction("st.async")
def _store_async(form: Form) -> Step:
    """9.7.9.12: registers to shared memory of the cluster; the mbarrier lies in the same block."""
    form.take("weak")
    form.take("shared::cluster")
    form.take("mbarrier::complete_tx::bytes") or form.refuse("without an mbarrier")
    count = int((form.take("v2", "v4") or "v1")[1:])
    type_name = form.type()
    form.arity(3)
    to, barrier = form.address_row(0), form.address_row(2)
    entries = form.vector(1)
    if len(entries) != count:
        form.refuse(f"{len(entries)} registers for {count} elements")
    sources = [form.source(entry, type_name) for entry in entries]
    bits = type_bits(type_name)
    if bits not in (32, 64):
        form.refuse(f"of .{type_name}; elements of 32 and 64 bits are allowed")
    size = bits // 8 * count

    def step(t: Path) -> None:
        where, signals = addresses(t, *to), addresses(t, *barrier)
        columns = [t.active(t.files[view_of(type_name)][row]) for row in sources]
        values = np.ascontiguousarray(np.stack(columns, axis=1)).view(np.uint8)
        operation = Operation("st.async", f"{size} bytes a thread", form.instruction.line)
        for signal in np.unique(signals):
            lanes = np.flatnonzero(signals == signal)
            block, _ = locate(t, int(signal), 8, "an mbarrier")
            places = [locate(t, int(where[lane]), size, "st.async") for lane in lanes]
            if any(place[0] is not block for place in places):
                raise MemoryFaultError("st.async to one block, with an mbarrier of another")
            index = np.concatenate([first + np.arange(size) for _, first in places])
            arrive = arrive_bytes(t, int(signal), len(index), "st.async")
            written = values[lanes].reshape(-1)
            start_load(t, [(block, index, arrive)], partial(np.copy, written), operation)

    return step


def _bulk_store(to: Any, start: Any, count: int, line: int) -> Step:
    def step(t: Path) -> None:
        targets, sources = addresses(t, *to), addresses(t, *start)
        counts = t.active(t.files[view_of("u32")][count])
        for lane, where, first, size in zip(t.lanes(), targets, sources, counts, strict=True):
            _check_bulk(int(where), int(first), int(size))
            block, offset = locate(t, int(first), _BULK_ALIGN, "cp.async.bulk")
            memory = t.grid.device.memory
            places = int(where) - memory.base + np.arange(int(size))
            check_global(memory, places, "cp.async.bulk", reads=False)
            index = offset + np.arange(int(size))
            start_store(t, lane, block, index, partial(put, memory, places), line)

    return step


def _get(memory: Memory, places: Array) -> Array:
    found: Array = memory.data[places]
    return found


def put(memory: Memory, places: Array, values: Array) -> None:
    memory.data[places] = values
    memory.state[places] = 0


def start_store(
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
    group = groups_of(t, "bulk", lane)[-1]
    group.copies += 1
    group.reading += 1
    group.running += 1

    def read() -> None:
        values = block.shared.data[index]
        block.shared.end_read(chunks)
        group.reading -= 1
        group.waiters.wake()

        def finish() -> None:
            write(values)
            group.running -= 1
            group.waiters.wake()

        t.scheduler.later(finish, Operation("TMA", f"store: write {index.size} bytes", line))

    t.scheduler.later(read, Operation("TMA", f"store: read {index.size} bytes", line))
