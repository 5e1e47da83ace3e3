"""mbarriers (PTX ISA 9.0, 9.7.13.15)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .._errors import IllegalInstructionError, MemoryFaultError
from .._hardware.barriers import MBarrier
from .._hardware.blocks import ThreadBlock
from .._hardware.registers import LANES, PRED, view_of
from .._hardware.scheduler import Operation, Wait
from .._text.syntax import Address, Sink
from .._warps.addresses import addresses, find_mbarrier, locate
from .._warps.paths import Path, Step
from .._warps.table import Form, instruction

#: Of 100 waits that find their phase incomplete, how many return so.
_GIVES_UP = 50


def _take_common(form: Form) -> bool:
    """Takes order, scope, space and type: memory is consistent, addresses name their block.

    Returns whether it is a release of the cluster's scope.
    """
    releases = {"release", "cluster"}.issubset(form.modifiers)
    for _ in range(len(form.modifiers)):
        form.take(
            *("release", "acquire", "relaxed", "cta", "cluster", "b64"),
            *("shared", "shared::cta", "shared::cluster"),
        )
    return releases


def _numbers(t: Path, form_row: int | None, default: int) -> list[int]:
    """A 32-bit operand of the active lanes, or its default."""
    if form_row is None:
        return [default] * int(t.mask.sum())
    return [int(value) for value in t.active(t.files[view_of("u32")][form_row])]


@instruction("mbarrier.init")
def _init(form: Form) -> Step:
    """9.7.13.15.9."""
    _take_common(form)
    form.arity(2)
    view, row, offset = form.address_row(0)
    count = form.source(1, "u32")

    def step(t: Path) -> None:
        lanes = t.lanes()
        where, counts = addresses(t, view, row, offset), _numbers(t, count, 1)
        for lane, address, number in zip(lanes, where, counts, strict=True):
            block, start = locate(t, int(address), 8, "an mbarrier")
            if block is not t.block:
                raise MemoryFaultError("an mbarrier is initialized by its own block only")
            block.init_mbarrier(start, number, t.warp.number * LANES + lane)

    return step


@instruction("mbarrier.inval")
def _invalidate(form: Form) -> Step:
    """9.7.13.15.10."""
    _take_common(form)
    view, row, offset = form.address_row(0)

    def step(t: Path) -> None:
        for address in addresses(t, view, row, offset):
            block, start = locate(t, int(address), 8, "an mbarrier")
            block.end_mbarrier(start)

    return step


@instruction("mbarrier.arrive", "mbarrier.arrive_drop")
def _arrive(form: Form) -> Step:
    """9.7.13.15.13, 9.7.13.15.14: every active lane arrives; .expect_tx announces bytes first.

    An arrival in another block comes some time later. Who arrives while its loads from tensor
    memory run loses its turn, so that what the arrival allows to be overwritten is.
    """
    drop = "arrive_drop" in form.instruction.opcode
    expects = form.flag("expect_tx")
    form.flag("noComplete")
    releases = _take_common(form)
    has_state = not isinstance(form.operands[0], Address)
    first = 1 if has_state else 0
    state = None
    if has_state and not isinstance(form.operands[0], Sink):
        state = form.target(0, "u64")
    view, row, offset = form.address_row(first)
    number = form.source(first + 1, "u32") if len(form.operands) > first + 1 else None
    operation = Operation("cluster", "arrive on an mbarrier", form.instruction.line)

    def step(t: Path) -> Wait | None:
        if t.ticket is _ARRIVED:
            t.ticket = None
            return None
        if releases:
            t.block.arrivals.complete()
        where, numbers = addresses(t, view, row, offset), _numbers(t, number, 1)
        for lane, address, value in zip(t.lanes(), where, numbers, strict=True):
            block, start = locate(t, int(address), 8, "an mbarrier")
            arrive = partial(_count, block.mbarrier(start), value, expects, drop)
            if block is not t.block:
                if state is not None:
                    raise IllegalInstructionError("an arrival in another block returns no state")
                _send(t, block, arrive, operation)
                continue
            phase = arrive()
            if state is not None:
                t.files[view_of("u64")][state][lane] = phase
        if not t.warp.loading:
            return None
        t.ticket = _ARRIVED
        t.scheduler.later(t.wake)
        return Wait("its turn")

    return step


_ARRIVED = object()


def _count(barrier: MBarrier, value: int, expects: bool, drop: bool) -> int:
    """Arrives, or announces bytes and arrives once; returns the phase before."""
    if expects:
        barrier.expect(value)
    return barrier.arrive(1 if expects else value, drop)


def _send(t: Path, block: ThreadBlock, arrive: Callable[[], object], operation: Operation) -> None:
    """Lets an arrival come to another block some time."""

    def come() -> None:
        block.require_running("mbarrier.arrive comes to", operation.line)
        arrive()

    t.block.arrivals.send(block.rank, t.scheduler, come, operation)


@instruction("mbarrier.expect_tx", "mbarrier.complete_tx")
def _transactions(form: Form) -> Step:
    """9.7.13.15.11, 9.7.13.15.12."""
    sign = 1 if "expect_tx" in form.instruction.opcode else -1
    _take_common(form)
    form.arity(2)
    view, row, offset = form.address_row(0)
    number = form.source(1, "u32")

    def step(t: Path) -> None:
        where, numbers = addresses(t, view, row, offset), _numbers(t, number, 0)
        for address, value in zip(where, numbers, strict=True):
            find_mbarrier(t, int(address)).expect(sign * value)

    return step


@instruction("mbarrier.try_wait", "mbarrier.test_wait")
def _wait(form: Form) -> Step:
    """9.7.13.15.16: try_wait is resumed when a phase completes, or, drawn from the seed, at once.

    The time limit is ignored.
    """
    blocks = "try_wait" in form.instruction.opcode
    parity = form.flag("parity")
    _take_common(form)
    form.arity(3, 4)
    p = form.target(0, "pred")
    view, row, offset = form.address_row(1)
    phase_view = view_of("u32" if parity else "u64")
    phase = form.source(2, "u32" if parity else "u64")

    def step(t: Path) -> Wait | None:
        where = addresses(t, view, row, offset)
        phases = t.active(t.files[phase_view][phase])
        if (where == where[0]).all() and (phases == phases[0]).all():
            # All lanes ask the same: one of them is enough.
            where, phases = where[:1], phases[:1]
        barriers = [find_mbarrier(t, int(address)) for address in where]
        done = [
            barrier.completed(int(value) & 1) if parity else barrier.phase > int(value)
            for barrier, value in zip(barriers, phases, strict=True)
        ]
        if blocks and not any(done) and t.scheduler.random.randrange(100) >= _GIVES_UP:
            for barrier in barriers:
                barrier.waiters.add(t)
            return Wait(barriers[0], f" to complete the phase of parity {int(phases[0]) & 1}")
        t.files[PRED][p][t.mask] = done[0] if len(done) == 1 else done
        return None

    return step
