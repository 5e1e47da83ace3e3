"""What the lanes of a warp do together (PTX ISA 9.0, 9.7.9.6, 9.7.13.9 to 9.7.13.12, 9.7.13.14)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .._errors import IllegalInstructionError
from .._hardware.registers import LANES, PRED, Array, view_of
from .._hardware.scheduler import Wait
from .._numbers import REDUCTIONS
from .._warps.paths import Path, Step, collective
from .._warps.table import Form, instruction

_LANES = np.arange(LANES)


def _members(t: Path, row: int) -> Array:
    """The lanes that a member mask names; all lanes of a path must name the same ones."""
    masks = t.active(t.files[view_of("u32")][row])
    if (masks != masks[0]).any():
        raise IllegalInstructionError("the lanes name different member masks")
    members = (int(masks[0]) >> _LANES & 1).astype(np.bool_)
    if (t.mask & ~members).any():
        lanes = [int(lane) for lane in np.flatnonzero(t.mask & ~members)]
        raise IllegalInstructionError(f"lanes {lanes} execute it and are not in its member mask")
    return members


def _together(form: Form, members: int, act: Callable[[Path, Array], None]) -> Step:
    """A step that runs once all members are there."""
    key = object()

    def step(t: Path) -> Wait | None:
        return collective(t, key, _members(t, members), lambda mask: act(t, mask))

    return step


@instruction("shfl.sync")
def _shuffle(form: Form) -> Step:
    """9.7.9.6: c holds the clamp in bits 0-4 and the segment mask in bits 8-12."""
    mode = form.take("up", "down", "bfly", "idx") or form.refuse("no mode")
    form.type()
    form.arity(5)
    d, p = form.targets(0, "u32")
    a, b, c = (form.source(i, "u32") for i in (1, 2, 3))
    view = view_of("u32")

    def act(t: Path, mask: Array) -> None:
        rows = t.files[view]
        clamp, segment = rows[c].astype(np.int64) & 31, rows[c].astype(np.int64) >> 8 & 31
        distance = rows[b].astype(np.int64) & 31
        low = _LANES & segment
        limit = low | (clamp & ~segment)
        if mode == "up":
            source = _LANES - distance
            inside = source >= limit
        elif mode == "down":
            source = _LANES + distance
            inside = source <= limit
        elif mode == "bfly":
            source = _LANES ^ distance
            inside = source <= limit
        else:
            source = low | (distance & ~segment)
            inside = source <= limit
        source = np.where(inside, source, _LANES)
        if not mask[source[mask]].all():
            bad = int(source[mask][~mask[source[mask]]][0])
            raise IllegalInstructionError(f"it reads lane {bad}, which does not execute it")
        np.copyto(rows[d], rows[a][source], where=mask)
        if p is not None:
            np.copyto(t.files[PRED][p], inside, where=mask)

    return _together(form, form.source(4, "u32"), act)


@instruction("vote.sync")
def _vote(form: Form) -> Step:
    """9.7.13.9."""
    mode = form.take("all", "any", "uni", "ballot") or form.refuse("no mode")
    form.type()
    form.arity(3)
    d = form.target(0, "u32" if mode == "ballot" else "pred")
    a, negated = form.predicate(1)

    def act(t: Path, mask: Array) -> None:
        condition = t.files[PRED][a]
        votes = (~condition if negated else condition) & mask
        if mode == "ballot":
            t.files[view_of("u32")][d][mask] = int((votes.astype(np.uint64) << _LANES_64).sum())
            return
        count, total = int(votes.sum()), int(mask.sum())
        result = {"all": count == total, "any": count > 0, "uni": count in (0, total)}[mode]
        t.files[PRED][d][mask] = result

    return _together(form, form.source(2, "u32"), act)


_LANES_64 = _LANES.astype(np.uint64)


@instruction("activemask")
def _active_mask(form: Form) -> Step:
    """9.7.13.11."""
    form.type()
    d = form.target(0, "u32")

    def step(t: Path) -> None:
        lanes = int((t.mask.astype(np.uint64) << _LANES_64).sum())
        t.files[view_of("u32")][d][t.mask] = lanes

    return step


@instruction("match.any.sync", "match.all.sync")
def _match(form: Form) -> Step:
    """9.7.13.10."""
    mode = form.instruction.opcode.split(".")[1]
    type_name = form.type()
    form.arity(3)
    d, p = form.targets(0, "u32")
    a, view = form.source(1, type_name), view_of("u" + type_name[1:])

    def act(t: Path, mask: Array) -> None:
        values, result = t.files[view][a], t.files[view_of("u32")][d]
        same = (values[:, None] == values[None, :]) & mask
        sets = (same.astype(np.uint64) << _LANES_64).sum(axis=1).astype(np.uint32)
        if mode == "any":
            result[mask] = sets[mask]
            return
        equal = bool(same[mask][:, mask].all())
        result[mask] = sets[mask] if equal else 0
        if p is not None:
            t.files[PRED][p][mask] = equal

    return _together(form, form.source(2, "u32"), act)


@instruction("redux.sync")
def _reduce(form: Form) -> Step:
    """9.7.13.12, of integers."""
    operation = REDUCTIONS[form.take(*REDUCTIONS) or form.refuse("no operation")]
    type_name = form.type()
    if type_name == "f32":
        form.refuse("of .f32 is not supported")
    form.arity(3)
    d, a = form.target(0, type_name), form.source(1, type_name)
    view = view_of(type_name)

    def act(t: Path, mask: Array) -> None:
        rows = t.files[view]
        rows[d][mask] = operation.reduce(rows[a][mask], dtype=rows[a].dtype)

    return _together(form, form.source(2, "u32"), act)


@instruction("elect.sync")
def _elect(form: Form) -> Step:
    """9.7.13.14: one lane, always the same: the lowest."""
    form.arity(2)
    d, p = form.targets(0, "u32")

    def act(t: Path, mask: Array) -> None:
        chosen = int(np.flatnonzero(mask)[0])
        t.files[view_of("u32")][d][mask] = chosen
        if p is not None:
            t.files[PRED][p][mask] = _LANES[mask] == chosen

    return _together(form, form.source(1, "u32"), act)


@instruction("bar.warp.sync")
def _warp_barrier(form: Form) -> Step:
    """9.7.13.2: lanes may come from different instructions."""
    form.arity(1)
    members = form.source(0, "u32")
    return lambda t: collective(t, "bar.warp.sync", _members(t, members), lambda mask: None)
