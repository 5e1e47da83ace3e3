"""Loads, stores, atomics, addresses (PTX ISA 9.0, 9.7.9.8 to 9.7.9.20, 9.7.13.5, 9.7.13.6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..blocks import RANK_SHIFT
from ..errors import IllegalInstructionError, MemoryFaultError
from ..memory import Memory
from ..paths import Path, Step
from ..registers import Array, view_of
from ..syntax import type_bits
from ..table import Form, assign, instruction
from .synchronize import thread_numbers

if TYPE_CHECKING:
    from ..blocks import ThreadBlock

__all__ = ["addresses", "generic_memory", "parts_of", "shared_block"]

#: Generic addresses of a state space have its number in their top byte.
WINDOW_SHIFT = 56
_WINDOWS = {"global": 0, "const": 0, "shared": 1, "local": 2, "param": 3}
_SPACES = ("global", "shared", "local", "param", "const")
_SCOPES = ("cta", "cluster", "gpu", "sys")
_CACHE = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc")


@dataclass(frozen=True)
class Part:
    """Lanes of an access whose addresses lie in one memory.

    Attributes:
        memory: Which one.
        addresses: In it.
        lanes: Their positions among the active lanes; a slice if it is all.
        block: The block whose shared memory it is.
    """

    memory: Memory
    addresses: Array
    lanes: Any
    block: ThreadBlock | None


def addresses(t: Path, view: int, row: int, offset: int) -> Array:
    """The addresses of the active lanes, int64."""
    found: Array = t.active(t.files[view][row]).astype(np.int64)
    return found + offset if offset else found


def shared_block(t: Path, rank: int) -> ThreadBlock:
    """The block of the cluster that a shared address belongs to.

    Raises:
        MemoryFaultError: There is none, or its threads have exited.
    """
    blocks = t.block.cluster.blocks
    if not 0 <= rank < len(blocks):
        raise MemoryFaultError(f"shared memory of block {rank} of a cluster of {len(blocks)}")
    block = blocks[rank]
    if not block.live_threads:
        raise MemoryFaultError(f"shared memory of block {block}, which has ended")
    return block


def parts_of(t: Path, space: str, where: Array) -> Iterator[Part]:
    """Parts the addresses of the active lanes by the memory that they lie in."""
    if space == "shared":
        ranks = where >> RANK_SHIFT
        if (ranks == t.block.rank).all():
            yield Part(t.block.shared, where, slice(None), t.block)
            return
        for rank in np.unique(ranks):
            block = shared_block(t, int(rank))
            lanes = np.flatnonzero(ranks == rank)
            yield Part(block.shared, where[lanes], lanes, block)
    elif space in ("global", "const"):
        yield Part(t.launch.machine.memory, where, slice(None), None)
    elif space == "param":
        yield Part(t.launch.parameters, where, slice(None), None)
    elif space == "local":
        size = t.launch.local_bytes
        if len(where) and (int(where.max()) >= size or int(where.min()) < 0):
            raise MemoryFaultError(f"local memory at byte {int(where.max())} of {size}")
        yield Part(t.warp.local, where + np.flatnonzero(t.mask) * size, slice(None), None)
    else:
        yield from _generic_parts(t, where)


def _generic_parts(t: Path, where: Array) -> Iterator[Part]:
    windows = where >> WINDOW_SHIFT
    for window in np.unique(windows):
        space = ("global", "shared", "local", "param")[window & 3]
        lanes = np.flatnonzero(windows == window)
        inner = where[lanes] & ((1 << WINDOW_SHIFT) - 1)
        if space == "local" and len(lanes) != len(where):
            raise MemoryFaultError("lanes that access local memory and others by one instruction")
        for part in parts_of(t, space, inner):
            yield Part(part.memory, part.addresses, lanes[part.lanes], part.block)


def generic_memory(t: Path, address: int) -> tuple[Memory, int]:
    """The memory that a generic address outside of shared memory lies in, and its address there."""
    window = address >> WINDOW_SHIFT
    inner = address & ((1 << WINDOW_SHIFT) - 1)
    if window == _WINDOWS["param"]:
        return t.launch.parameters, inner
    if window == _WINDOWS["global"]:
        return t.launch.machine.memory, inner
    raise MemoryFaultError(f"generic address {address:#x} is not in global or parameter memory")


def _take_space(form: Form) -> str:
    """Takes the state space, without what follows ``::``; empty for generic addresses."""
    for modifier in form.modifiers:
        space = modifier.split("::")[0]
        if space in _SPACES:
            form.modifiers.remove(modifier)
            return space
    return ""


def _take_hints(form: Form) -> None:
    """Takes what changes neither addresses nor values: order, scope, caching."""
    for modifier in list(form.modifiers):
        if (
            modifier in _SCOPES
            or modifier in _CACHE
            or modifier[:4] in ("L1::", "L2::")
            or modifier in ("weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "mmio")
        ):
            form.modifiers.remove(modifier)


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
        values = _gather(t, space, where, size, count)
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


def _gather(t: Path, space: str, where: Array, size: int, count: int) -> Array:
    result: Array | None = None
    for part in parts_of(t, space, where):
        values = part.memory.read(part.addresses, size, count)
        if isinstance(part.lanes, slice):
            return values
        if result is None:
            result = np.zeros((len(where), *values.shape[1:]), values.dtype)
        result[part.lanes] = values
    assert result is not None
    return result


def _load_wide(form: Form, space: str) -> Step:
    view, row, offset = form.address_row(1)
    d = form.target(0, "b128")

    def step(t: Path) -> None:
        values = _gather(t, space, addresses(t, view, row, offset), 8, 2)
        t.files[view_of("b128")][d][t.mask] = values

    return step


@instruction("st")
def _store(form: Form) -> Step:
    """9.7.9.11."""
    space = _take_space(form)
    _take_hints(form)
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

    return step


def scatter(t: Path, space: str, where: Array, values: Array, size: int, count: int) -> None:
    """Writes the active lanes' values, and notes who wrote shared memory."""
    for part in parts_of(t, space, where):
        if part.memory is t.launch.parameters:
            raise MemoryFaultError("a write to parameter memory")
        part.memory.write(part.addresses, values[part.lanes], size, count)
        if part.block is not None:
            offsets = part.addresses - part.memory.base
            part.block.writes.note(offsets, size * count, thread_numbers(t)[part.lanes])


@instruction("cvta")
def _convert_address(form: Form) -> Step:
    """9.7.9.20: from a state space's window to generic addresses, or back (.to)."""
    back = form.flag("to")
    space = _take_space(form) or form.refuse("no state space")
    type_name = form.type()
    form.arity(2)
    base = _WINDOWS[space] << WINDOW_SHIFT
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
        assign(t, 0, p, t.files[view_of("u64")][a] >> np.uint64(WINDOW_SHIFT) == _WINDOWS[space])

    return step


@instruction("prefetch", "prefetchu")
def _prefetch(form: Form) -> Step:
    """9.7.9.15: only a tensor map's address is checked."""
    is_map = form.flag("tensormap")
    base = _WINDOWS["param"] << WINDOW_SHIFT if _take_space(form) == "param" else 0
    _take_hints(form)
    form.take("L1", "L2")
    view, row, offset = form.address_row(0)

    def step(t: Path) -> None:
        for address in addresses(t, view, row, offset) if is_map else ():
            t.launch.machine.tensor_map(*generic_memory(t, int(address) | base))

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
    _take_hints(form)
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
        t.launch.scheduler.random.shuffle(order)
        numbers = thread_numbers(t)
        for k in order:
            lane = int(lanes[k])
            values = [t.files[seen][source][lane] for source in sources]
            for part in parts_of_one(t, space, where[k : k + 1], lane):
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

    return step


def parts_of_one(t: Path, space: str, where: Array, lane: int) -> Iterator[Part]:
    """The memory of one lane's address; atomics have none in local memory."""
    if space == "local" or (not space and int(where[0]) >> WINDOW_SHIFT == _WINDOWS["local"]):
        raise IllegalInstructionError(f"an atomic of lane {lane} in local memory")
    yield from parts_of(t, space, where)
