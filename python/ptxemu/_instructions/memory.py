"""Loads, stores, atomics, addresses (PTX ISA 9.0, 9.7.9.8 to 9.7.9.20, 9.7.13.5, 9.7.13.6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .._errors import IllegalInstructionError, MemoryFaultError
from .._hardware.registers import Array, view_of
from .._hardware.scheduler import Wait
from .._text.syntax import type_bits
from .._warps.addresses import (
    WINDOW_SHIFT,
    WINDOWS,
    Part,
    addresses,
    gather,
    generic_memory,
    parts_of,
    scatter,
)
from .._warps.paths import Path, Step
from .._warps.table import Form, assign, instruction

_SPACES = ("global", "shared", "local", "param", "const")
_SCOPES = ("cta", "cluster", "gpu", "sys")
_CACHE = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc")


def _take_space(form: Form) -> str:
    """Takes the state space, without what follows ``::``; empty for generic addresses."""
    for modifier in form.modifiers:
        space = modifier.split("::")[0]
        if space in _SPACES:
            form.modifiers.remove(modifier)
            return space
    return ""


def _take_hints(form: Form) -> bool:
    """Takes what changes neither addresses nor values: order, scope, caching.

    Returns whether it is a release beyond the block.
    """
    releases = not {"release", "acq_rel"}.isdisjoint(form.modifiers)
    wide = not {"cluster", "gpu", "sys"}.isdisjoint(form.modifiers)
    for modifier in list(form.modifiers):
        if (
            modifier in _SCOPES
            or modifier in _CACHE
            or modifier[:4] in ("L1::", "L2::")
            or modifier in ("weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "mmio")
        ):
            form.modifiers.remove(modifier)
    return releases and wide


def _releasing(step: Step) -> Step:
    """The step of a release: the block's arrivals in others come first."""

    def release(t: Path) -> Wait | None:
        t.block.arrivals.complete()
        return step(t)

    return release


def _take_width(form: Form) -> tuple[str, int]:
    """Takes vector and type; returns the type and the elements of a lane."""
    count = int((form.take("v2", "v4", "v8") or "v1")[1:])
    return form.type(), count


@instruction("ld", "ldu")
def _load(form: Form) -> Step:
    """9.7.9.8, 9.7.9.9, 9.7.9.10: registers may be wider than the type (9.4.1)."""
    space = _take_space(form)
    _take_hints(form)
    type_name, count = _take_width(form)
    if type_name == "b128":
        return _load_wide(form, space)
    size = type_bits(type_name) // 8
    view, row, offset = form.address_row(1)
    wides = [form.wide_type(entry, type_name) for entry in form.vector(0)]
    targets = [
        (view_of(wide), form.target(entry, wide))
        for entry, wide in zip(form.vector(0), wides, strict=True)
    ]
    if len(targets) != count:
        form.refuse(f"{len(targets)} registers for {count} elements")
    signed: Any = np.dtype(f"i{size}") if type_name.startswith("s") else None

    def step(t: Path) -> None:
        where = addresses(t, view, row, offset)
        values = gather(t, space, where, size, count)
        if signed is not None:
            values = values.view(signed)
        for k, (into, d) in enumerate(targets):
            column = values if count == 1 else values[:, k]
            target = t.files[into][d]
            if t.where is True:
                target[:] = column
            else:
                target[t.mask] = column

    return step


def _load_wide(form: Form, space: str) -> Step:
    view, row, offset = form.address_row(1)
    d = form.target(0, "b128")

    def step(t: Path) -> None:
        values = gather(t, space, addresses(t, view, row, offset), 8, 2)
        t.files[view_of("b128")][d][t.mask] = values

    return step


@instruction("st")
def _store(form: Form) -> Step:
    """9.7.9.11."""
    space = _take_space(form)
    releases = _take_hints(form)
    type_name, count = _take_width(form)
    if type_name == "b128":
        form.refuse("of .b128 is not supported")
    size = type_bits(type_name) // 8
    view, row, offset = form.address_row(0)
    entries = form.vector(1)
    if len(entries) != count:
        form.refuse(f"{len(entries)} registers for {count} elements")
    # A literal is one of the type, a register may be wider.
    sources = []
    for entry in entries:
        wide = form.wide_type(entry, type_name)
        literal_type = type_name if type_bits(wide) == type_bits(type_name) else wide
        sources.append((view_of(wide), form.source(entry, literal_type)))
    kind: Any = np.dtype(f"u{size}")

    def step(t: Path) -> None:
        where = addresses(t, view, row, offset)
        columns = [t.active(t.files[v][a]).astype(kind) for v, a in sources]
        values = columns[0] if count == 1 else np.stack(columns, axis=1)
        scatter(t, space, where, values, size, count)

    return _releasing(step) if releases else step


@instruction("cvta")
def _convert_address(form: Form) -> Step:
    """9.7.9.20: from a state space's window to generic addresses, or back (.to)."""
    back = form.flag("to")
    space = _take_space(form) or form.refuse("no state space")
    type_name = form.type()
    form.arity(2)
    base = WINDOWS[space] << WINDOW_SHIFT
    d, a, view = form.target(0, type_name), form.source(1, type_name), view_of(type_name)

    def step(t: Path) -> None:
        value = t.files[view][a]
        if not back:
            assign(t, view, d, value + np.uint64(base) if base else value)
            return
        inner = t.active(value)
        if (inner >> np.uint64(WINDOW_SHIFT) != base >> WINDOW_SHIFT).any():
            raise MemoryFaultError(f"a generic address outside of .{space}")
        assign(t, view, d, value - np.uint64(base))

    return step


@instruction("isspacep")
def _is_space(form: Form) -> Step:
    """9.7.9.19."""
    space = _take_space(form) or form.refuse("no state space")
    form.arity(2)
    p, a = form.target(0, "pred"), form.source(1, "u64")

    def step(t: Path) -> None:
        assign(t, 0, p, t.files[view_of("u64")][a] >> np.uint64(WINDOW_SHIFT) == WINDOWS[space])

    return step


@instruction("prefetch", "prefetchu")
def _prefetch(form: Form) -> Step:
    """9.7.9.15: only a tensor map's address is checked."""
    is_map = form.flag("tensormap")
    base = WINDOWS["param"] << WINDOW_SHIFT if _take_space(form) == "param" else 0
    _take_hints(form)
    form.take("L1", "L2")
    view, row, offset = form.address_row(0)

    def step(t: Path) -> None:
        for address in addresses(t, view, row, offset) if is_map else ():
            t.grid.device.tensor_maps.at(*generic_memory(t, int(address) | base))

    return step


_Combine = Callable[[Any, Any], Any]

_ATOMIC: dict[str, _Combine] = {
    "add": lambda old, b: old + b,
    "min": min,
    "max": max,
    "and": lambda old, b: old & b,
    "or": lambda old, b: old | b,
    "xor": lambda old, b: old ^ b,
    "exch": lambda old, b: b,
    "inc": lambda old, b: old.dtype.type(0) if old >= b else old + old.dtype.type(1),
    "dec": lambda old, b: b if old == 0 or old > b else old - old.dtype.type(1),
}


@instruction("atom", "red")
def _atomic(form: Form) -> Step:
    """9.7.13.5, 9.7.13.6: lanes one after the other, in an order drawn from the seed."""
    space = _take_space(form)
    releases = _take_hints(form)
    operation = form.take(*_ATOMIC, "cas") or form.refuse("no operation")
    form.flag("noftz")
    type_name = form.type()
    if type_name not in ("b32", "b64", "u32", "s32", "u64", "s64", "f32", "f64", "b16"):
        form.refuse(f"of .{type_name} is not supported")
    returns = form.instruction.base == "atom"
    first = 1 if returns else 0
    form.arity(first + (3 if operation == "cas" else 2))
    d = form.target(0, type_name) if returns else None
    view, row, offset = form.address_row(first)
    seen = view_of(type_name)
    sources = [form.source(i, type_name) for i in range(first + 1, len(form.operands))]
    size = type_bits(type_name) // 8

    def step(t: Path) -> None:
        where = addresses(t, view, row, offset)
        lanes = np.flatnonzero(t.mask)
        order = list(range(len(lanes)))
        t.scheduler.random.shuffle(order)
        numbers = t.thread_numbers()
        for k in order:
            lane = int(lanes[k])
            values = [t.files[seen][source][lane] for source in sources]
            for part in _atomic_parts(t, space, where[k : k + 1], lane):
                old = part.memory.read(part.addresses, size).view(values[0].dtype)[0]
                if operation == "cas":
                    new = values[1] if old == values[0] else old
                else:
                    new = _ATOMIC[operation](old, values[0])
                raw = np.array([new], values[0].dtype).view(f"u{size}")
                part.memory.write(part.addresses, raw, size)
                if part.block is not None:
                    offsets = part.addresses - part.memory.base
                    part.block.writes.note(offsets, size, numbers[k : k + 1])
            if d is not None:
                t.files[seen][d][lane] = old

    return _releasing(step) if releases else step


def _atomic_parts(t: Path, space: str, where: Array, lane: int) -> Iterator[Part]:
    """The memory of one lane's address; atomics have none in local memory."""
    if space == "local" or (not space and int(where[0]) >> WINDOW_SHIFT == WINDOWS["local"]):
        raise IllegalInstructionError(f"an atomic of lane {lane} in local memory")
    yield from parts_of(t, space, where)
