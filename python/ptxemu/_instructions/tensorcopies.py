"""Copies of boxes and pixels of a tensor by TMA (PTX ISA 9.0, 9.7.9.27.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .._errors import IllegalInstructionError
from .._hardware.blocks import ThreadBlock
from .._hardware.memory import Memory
from .._hardware.registers import Array, view_of
from .._hardware.scheduler import Operation
from .._numbers import REDUCTIONS
from .._text.syntax import Address
from .._warps.addresses import addresses, generic_memory, locate
from .._warps.paths import Path, Step
from .._warps.table import Form, instruction
from ..tma import Descriptor, Move, TiledDescriptor, bring, plan
from .bulk import Destination, arrive_bytes, put, start_load, start_store
from .copies import check_global


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
        return t.grid.device.tensor_maps.at(*generic_memory(t, address)).descriptor

    def at(self, t: Path, k: int) -> list[int]:
        """Its coordinates."""
        return [int(t.active(t.files[view_of("s32")][row])[k]) for row in self.coordinates]


@instruction("cp.async.bulk.tensor")
def _tensor_copy(form: Form) -> Step:
    """9.7.9.27.1.2: boxes and pixels of a tensor; what moves is ``ptxemu.tma``'s model."""
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
    memory = t.grid.device.memory
    first = descriptor.global_address - memory.base
    check_global(memory, first + move.tensor[move.inside], what)
    destinations: list[Destination] = []
    for to, owner in pairs:
        address = owner.shared.base + signal_offset
        arrive = arrive_bytes(t, address, descriptor.transaction_bytes, what)
        destinations.append((to, move.shared, arrive))
    operation = Operation("TMA", f"load {list(at)}, {descriptor.transaction_bytes} bytes", line)
    source = memory.data[max(first, 0) :]
    start_load(t, destinations, lambda: bring(descriptor, move, source), operation)


def _signals(
    t: Path, block: ThreadBlock, signal: ThreadBlock, peers: int | None, paired: bool
) -> list[tuple[ThreadBlock, ThreadBlock]]:
    """The blocks that a load writes to, each with the one whose mbarrier it tells.

    That is the same one; with ``.cta_group::2`` it may be the other of a pair, and is, in each
    pair that a multicast reaches, the one of the parity of the mbarrier's block. On sm_90a the
    block in an mbarrier's address counts for nothing: an H200 tells the one that it writes to
    (``tests/ptxemu/isa/probes.py``), and MAX's matmul leaves the block out.
    """
    blocks = t.block.cluster.blocks
    if peers is None and t.grid.device.arch == "sm_90a":
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
            memory = t.grid.device.memory
            places = descriptor.global_address - memory.base + move.tensor
            reads = reduction is not None
            check_global(memory, places[move.inside], "cp.async.bulk.tensor", reads)
            write = _writer(memory, descriptor, move, places, reduction)
            start_store(t, lane, block, move.shared, write, form.instruction.line)

    return step


def _writer(
    memory: Memory, descriptor: Descriptor, move: Move, places: Array, reduction: str | None
) -> Callable[[Array], None]:
    def write(values: Array) -> None:
        if reduction is not None:
            old = memory.data[np.where(move.inside, places, 0)]
            values = _reduce(reduction, descriptor, old, values)
        put(memory, places[move.inside], values[move.inside])

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
