"""Copies that threads make and groups of copies (PTX ISA 9.0, 9.7.9.25.3).

A copy is noted when it is issued, with the bytes that it will read and write marked in their
memories' shadows, and happens at a time that the scheduler draws.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._errors import MemoryFaultError
from .._hardware.blocks import ThreadBlock
from .._hardware.memory import INVALID, UNWRITTEN, WRITING, Memory
from .._hardware.pending import CopyGroup
from .._hardware.registers import LANES, Array, view_of
from .._hardware.scheduler import Operation, Wait
from .._warps.addresses import addresses, find_mbarrier, parts_of
from .._warps.paths import Path, Step
from .._warps.table import Form, instruction

__all__ = ["GROUPS", "check_global", "commit", "groups_of", "wait_step"]


#: An operand, in messages.
GROUPS = "the number of groups"


def groups_of(t: Path, kind: str, lane: int) -> list[CopyGroup]:
    """A thread's groups of a kind that it has not waited for; the last one is open."""
    return t.warp.copy_groups[kind, lane]


def commit(kind: str) -> Step:
    """Closes the open group of each lane's copies of a kind."""

    def step(t: Path) -> None:
        for lane in t.lanes():
            groups_of(t, kind, lane).append(CopyGroup())

    return step


def wait_step(kind: str, allowed: int, reading: bool) -> Step:
    """Waits until all but the latest committed groups have been read, or are done."""

    def step(t: Path) -> Wait | None:
        for lane in t.lanes():
            groups = groups_of(t, kind, lane)
            closed = groups[: max(0, len(groups) - 1 - allowed)]
            for group in closed:
                if group.reading or (group.running and not reading):
                    group.waiters.add(t)
                    what = "be read" if reading else "be done"
                    return Wait(f"a {kind} group of thread {t.warp.index * LANES + lane} to {what}")
            for group in closed:
                group.awaited = True
            groups[:] = [g for g in groups if g.running or not g.awaited or g is groups[-1]]
        return None

    return step


@instruction("cp.async.commit_group")
def _commit_copies(form: Form) -> Step:
    """9.7.9.25.3.2."""
    return commit("cp.async")


@instruction("cp.async.wait_group", "cp.async.wait_all")
def _wait_copies(form: Form) -> Step:
    """9.7.9.25.3.3; wait_all also commits."""
    if form.operands:
        return wait_step("cp.async", form.literal(0, GROUPS), reading=False)
    close, wait = commit("cp.async"), wait_step("cp.async", 0, reading=False)

    def step(t: Path) -> Wait | None:
        if t.ticket is None:
            close(t)
            t.ticket = ("committed",)
        found = wait(t)
        if found is None:
            t.ticket = None
        return found

    return step


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
    size = form.literal(2, "the number of bytes")
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
            groups = [groups_of(t, "cp.async", lane)[-1] for lane in t.lanes()]
            moved = index, start, counts
            _start_copy(t, part.memory, moved, groups, part.block, threads, operation)

    return step


def _start_copy(
    t: Path,
    shared: Memory,
    moved: tuple[Array, Array, Array],
    groups: list[CopyGroup],
    block: ThreadBlock | None,
    threads: Array,
    operation: Operation,
) -> None:
    index, start, counts = moved
    for group in groups:
        group.running += 1
    memory = t.grid.device.memory
    size = index.shape[1]
    places = (start - memory.base)[:, None] + np.arange(size)
    inside = np.arange(size) < counts[:, None]
    check_global(memory, places[inside], "cp.async")

    def complete() -> None:
        values = np.where(inside, memory.data[np.where(inside, places, 0)], 0)
        shared.end_write(index, values.astype(np.uint8))
        assert block is not None
        block.writes.note(index[:, 0], size, threads)
        for group in groups:
            group.running -= 1
            group.waiters.wake()

    t.scheduler.later(complete, operation)


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
            running = [g for g in groups_of(t, "cp.async", lane) if g.running]

            def arrive(groups: list[CopyGroup] = running, barrier: Any = barrier) -> None:
                if any(group.running for group in groups):
                    t.scheduler.later(arrive, operation)
                else:
                    barrier.arrive()

            arrive()

    return step


def check_global(memory: Memory, places: Array, what: str, reads: bool = True) -> None:
    """Raises unless bytes of global memory may be read, or written."""
    if not places.size:
        return
    if int(places.min()) < 0 or int(places.max()) >= memory.size:
        bad = int(places.min()) if int(places.min()) < 0 else int(places.max())
        raise MemoryFaultError(f"{what} at {memory.where(memory.base + bad)}: out of bounds")
    stops = INVALID | WRITING | (UNWRITTEN if reads else 0)
    memory.check_bytes(places, stops, what)
