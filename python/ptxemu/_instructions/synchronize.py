"""Barriers of a block and fences (PTX ISA 9.0, 9.7.13.1, 9.7.13.4)."""

from __future__ import annotations

from .._hardware.registers import PRED, view_of
from .._hardware.scheduler import Wait
from .._warps.paths import Path, Step
from .._warps.table import Form, instruction


@instruction("bar", "barrier")
def _block_barrier(form: Form) -> Step:
    """9.7.13.1: counted in whole warps."""
    unaligned = form.instruction.base == "barrier" and "aligned" not in form.modifiers
    form.flag("aligned")
    form.flag("cta")
    mode = form.take("sync", "arrive", "red") or form.refuse("no .sync, .arrive or .red")
    if mode == "red":
        return _reducing_barrier(form)
    form.arity(1, 2)
    number = form.source(0, "u32")
    threads = form.source(1, "u32") if len(form.operands) > 1 else None

    def step(t: Path) -> Wait | None:
        barrier = t.block.named(t.uniform(number, "barriers"))
        if t.ticket is None:
            if not unaligned or (t.warp.live & ~t.mask).any():
                t.require_warp()
            count = None if threads is None else t.uniform(threads, "thread counts")
            generation = barrier.arrive(count)
            if mode == "arrive":
                return None
            t.ticket = (generation,)
        if t.ticket == (barrier.generation,):
            barrier.waiters.add(t)
            return Wait(barrier)
        t.ticket = None
        return None

    return step


def _reducing_barrier(form: Form) -> Step:
    """9.7.13.1: counts or combines a predicate of all threads."""
    mode = form.take("popc", "and", "or") or form.refuse("no operation")
    form.type()
    form.arity(3, 4)
    d = form.target(0, "u32" if mode == "popc" else "pred")
    number = form.source(1, "u32")
    threads = form.source(2, "u32") if len(form.operands) > 3 else None
    p, negated = form.predicate(len(form.operands) - 1)

    def step(t: Path) -> Wait | None:
        index = t.uniform(number, "barriers")
        barrier = t.block.named(index)
        votes = t.block.votes.setdefault(index, [])
        if t.ticket is None:
            t.require_warp()
            condition = t.files[PRED][p]
            cast = t.active(~condition if negated else condition)
            count = None if threads is None else t.uniform(threads, "thread counts")
            round_votes = votes
            round_votes.append((int(cast.sum()), len(cast)))
            generation = barrier.generation
            t.ticket = (generation, round_votes)
            barrier.arrive(count)
            if barrier.generation != generation:
                t.block.votes[index] = []
        assert isinstance(t.ticket, tuple)
        generation, round_votes = t.ticket
        if generation == barrier.generation:
            barrier.waiters.add(t)
            return Wait(barrier)
        t.ticket = None
        true = sum(entry[0] for entry in round_votes)
        total = sum(entry[1] for entry in round_votes)
        if mode == "popc":
            t.files[view_of("u32")][d][t.mask] = true
        else:
            t.files[PRED][d][t.mask] = true == total if mode == "and" else true > 0
        return None

    return step


@instruction("membar", "fence")
def _fence(form: Form) -> Step:
    """9.7.13.4: memory is consistent; arrivals in other blocks and proxies have to wait."""
    kind = form.take("proxy", "mbarrier_init")
    order = form.take("sc", "acq_rel", "acquire", "release", "relaxed")
    scope = form.take("cta", "cluster", "gpu", "sys", "gl")
    form.take("sync_restrict::shared::cta", "sync_restrict::shared::cluster")
    if not kind:
        releases = order != "acquire" and scope != "cta"
        return (lambda t: t.block.arrivals.complete()) if releases else (lambda t: None)
    if kind == "mbarrier_init":
        return _publish_barriers
    proxy = form.take("async", "async::generic", "alias", "tensormap::generic")
    if not proxy:
        form.refuse("unknown proxy")
    form.take("shared::cta", "shared::cluster", "global")
    if proxy != "async":
        return lambda t: None

    def step(t: Path) -> None:
        t.grid.fences.fence(t.thread_numbers())
        _publish_barriers(t)

    return step


def _publish_barriers(t: Path) -> None:
    """Copies may use the mbarriers that the path's threads initialized."""
    threads = set(t.thread_numbers().tolist())
    for barrier in t.block.mbarriers.values():
        if barrier.thread in threads:
            barrier.published = True
