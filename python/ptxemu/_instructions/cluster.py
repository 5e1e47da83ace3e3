"""Clusters (PTX ISA 9.0, 9.7.9.23, 9.7.9.24, 9.7.13.3) and registers (9.7.19.5)."""

from __future__ import annotations

import numpy as np

from .._errors import BarrierError, IllegalInstructionError
from .._hardware.blocks import RANK_SHIFT
from .._hardware.registers import view_of
from .._hardware.scheduler import Wait
from .._warps.paths import Path, Step
from .._warps.table import Form, assign, instruction


@instruction("mapa")
def _map(form: Form) -> Step:
    """9.7.9.23: the same offset in another block of the cluster."""
    form.take("shared::cluster")
    type_name = form.type()
    form.arity(3)
    d, a, rank = form.target(0, type_name), form.source(1, type_name), form.source(2, "u32")
    view = view_of(type_name)

    def step(t: Path) -> None:
        ranks, value = t.files[view_of("u32")][rank], t.files[view][a]
        size = t.grid.cluster_size
        if (t.active(ranks) >= size).any():
            raise IllegalInstructionError(f"block {int(t.active(ranks).max())} of {size}")
        kept = value & value.dtype.type(~(_OFFSET_RANK) & ((1 << (8 * value.dtype.itemsize)) - 1))
        assign(t, view, d, kept | ranks.astype(value.dtype) << value.dtype.type(RANK_SHIFT))

    return step


#: The bits of a shared address that name the block.
_OFFSET_RANK = 0xFF << RANK_SHIFT


@instruction("getctarank")
def _rank(form: Form) -> Step:
    """9.7.9.24."""
    form.take("shared::cluster")
    type_name = form.type()
    form.arity(2)
    d, a, view = form.target(0, "u32"), form.source(1, type_name), view_of(type_name)

    def step(t: Path) -> None:
        value = t.files[view][a].astype(np.uint64)
        assign(t, view_of("u32"), d, value >> np.uint64(RANK_SHIFT) & np.uint64(0xFF))

    return step


@instruction("barrier.cluster")
def _cluster_barrier(form: Form) -> Step:
    """9.7.13.3: a thread arrives once, then waits; by default the arrival is a release."""
    mode = form.take("arrive", "wait") or form.refuse("no .arrive or .wait")
    relaxed = form.take("release", "relaxed", "acquire") == "relaxed"
    form.flag("aligned")

    def arrive(t: Path) -> None:
        t.require_warp()
        if t.warp.cluster_arrival is not None:
            raise BarrierError("barrier.cluster.arrive twice without barrier.cluster.wait")
        if not relaxed:
            t.block.arrivals.complete()
        barrier = t.block.cluster.barrier
        # Noted before the arrival, which may complete the barrier.
        t.warp.cluster_arrival = barrier.generation
        barrier.arrive(int(t.mask.sum()))

    def wait(t: Path) -> Wait | None:
        t.require_warp()
        barrier = t.block.cluster.barrier
        if t.warp.cluster_arrival is None:
            raise BarrierError("barrier.cluster.wait without barrier.cluster.arrive")
        if t.warp.cluster_arrival == barrier.generation:
            barrier.waiters.add(t)
            return Wait(barrier)
        t.warp.cluster_arrival = None
        return None

    return arrive if mode == "arrive" else wait


@instruction("setmaxnreg")
def _registers(form: Form) -> Step:
    """9.7.19.5: a multiple of 8 from 24 to 256; what all warps have is not counted."""
    form.take("inc", "dec") or form.refuse("no .inc or .dec")
    form.take_aligned()
    form.type()
    form.arity(1)
    value = getattr(form.operands[0], "value", 0)
    if not isinstance(value, int) or not 24 <= value <= 256 or value % 8:
        form.refuse(f"{value} registers; multiples of 8 from 24 to 256 are allowed")

    def step(t: Path) -> None:
        t.require_warp()

    return step
