"""Asynchronous copies (PTX ISA 9.0, 9.7.9.25, 9.7.9.27); TMA's rules are in ``ptxemu.tma``."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxemu.tma import (
    DataType,
    Im2colDescriptor,
    Swizzle,
    TiledDescriptor,
    packed_strides,
)

from .case import POISON, Array, Family, Map

FAMILY = Family("copies")

_RNG = np.random.default_rng(51)
_ROOM = 8192
_DATA = _RNG.integers(0, 1 << 32, 4096, np.uint64).astype(np.uint32)

_SETUP = (
    f".shared .align 1024 .b8 room[{_ROOM}]; .shared .align 8 .b64 bar; .reg .b64 %at, %to, %map; "
    ".reg .b32 %s, %v, %i, %x; .reg .pred %p, %q, %first; setp.eq.u32 %first, %t, 0; mov.u32 %s, room; "
)

#: Fills shared memory with the poison of outputs, then makes the barrier.
_POISONED = (
    f"mov.u32 %i, %t; POISON: mov.u32 %s, room; mad.lo.u32 %s, %i, 4, %s; "
    f"st.shared.b32 [%s], {POISON * 0x01010101:#x}; add.u32 %i, %i, 128; "
    f"setp.lt.u32 %p, %i, {_ROOM // 4}; @%p bra POISON; "
    "@%first mbarrier.init.shared::cta.b64 [bar], 1; fence.mbarrier_init.release.cluster; "
    "fence.proxy.async.shared::cta; bar.sync 0; "
)
#: Copies all of shared memory out.
_DUMP = (
    "mov.u32 %i, %t; DUMP: mov.u32 %s, room; mad.lo.u32 %s, %i, 4, %s; ld.shared.b32 %v, [%s]; "
    "mul.wide.u32 %at, %i, 4; add.u64 %at, %out, %at; st.global.b32 [%at], %v; add.u32 %i, %i, 128; "
    f"setp.lt.u32 %p, %i, {_ROOM // 4}; @%p bra DUMP; "
)
_WAIT = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %q, [bar], 0; @!%q bra WAIT; "


def _memory() -> Array:
    return np.full(_ROOM, POISON, np.uint8)


for _size in (4, 8, 16):
    for _valid in (_size, _size // 2 if _size > 4 else 0):
        _level = "cg" if _size == 16 else "ca"
        _room = _memory()
        for _k in range(128):
            _from = _DATA.view(np.uint8)[_k * _size : _k * _size + _valid]
            _room[_k * 32 : _k * 32 + _size] = np.pad(_from, (0, _size - _valid))
        FAMILY.kernel(
            f"cp_async_{_size}_{_valid}",
            _SETUP + _POISONED + f"mad.lo.u32 %s, %t, 32, %s; sub.u32 %s, %s, 0; mov.u32 %x, room; "
            f"mad.lo.u32 %s, %t, 32, %x; mul.wide.u32 %at, %t, {_size}; add.u64 %at, %in0, %at; "
            f"cp.async.{_level}.shared.global [%s], [%at], {_size}, {_valid}; cp.async.commit_group; "
            "cp.async.wait_group 0; bar.sync 0; " + _DUMP,
            _room.view(np.uint32),
            [_DATA],
            block=128,
        )

_room = _memory()
_room[:2048] = _DATA.view(np.uint8)[:2048]
FAMILY.kernel(
    "cp_async_mbarrier",
    # A thread's copies arrive for it: 128 arrivals, none of them by hand.
    _SETUP
    + _POISONED.replace("[bar], 1;", "[bar], 128;")
    + "mov.u32 %x, room; mad.lo.u32 %s, %t, 16, %x; "
    "mul.wide.u32 %at, %t, 16; add.u64 %at, %in0, %at; cp.async.cg.shared.global [%s], [%at], 16; "
    "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [bar]; " + _WAIT + _DUMP,
    _room.view(np.uint32),
    [_DATA],
    block=128,
)

_room = _memory()
_room[1024 : 1024 + 3072] = _DATA.view(np.uint8)[64 : 64 + 3072]
FAMILY.kernel(
    "bulk_load",
    _SETUP
    + _POISONED
    + "@!%first bra READY; mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 3072; "
    "mov.u32 %s, room; add.u32 %s, %s, 1024; add.u64 %at, %in0, 64; "
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%at], 3072, [bar]; READY: "
    + _WAIT
    + _DUMP,
    _room.view(np.uint32),
    [_DATA],
    block=128,
)

_FILL = (
    "mov.u32 %i, %t; FILL: mul.wide.u32 %at, %i, 4; add.u64 %at, %in0, %at; ld.global.b32 %v, [%at]; "
    "mov.u32 %s, room; mad.lo.u32 %s, %i, 4, %s; st.shared.b32 [%s], %v; add.u32 %i, %i, 128; "
    f"setp.lt.u32 %p, %i, {_ROOM // 4}; @%p bra FILL; fence.proxy.async.shared::cta; bar.sync 0; "
)
_target = np.full(_ROOM, POISON, np.uint8)
_target[128:640] = _DATA.view(np.uint8)[256:768]
FAMILY.kernel(
    "bulk_store",
    _SETUP
    + _FILL
    + "@!%first bra END; mov.u32 %s, room; add.u32 %s, %s, 256; add.u64 %at, %out, 128; "
    "cp.async.bulk.global.shared::cta.bulk_group [%at], [%s], 512; cp.async.bulk.commit_group; "
    "cp.async.bulk.wait_group 0; END:",
    _target.view(np.uint32),
    [_DATA],
    block=128,
)


def _swizzled(offset: Array, swizzle: Swizzle) -> Array:
    bits = {Swizzle.NONE: 0, Swizzle.B32: 1, Swizzle.B64: 3, Swizzle.B128: 7}[swizzle]
    found: Array = offset ^ ((offset >> 7 & bits) << 4)
    return found


def _in_rows(rows: Array, swizzle: Swizzle) -> Array:
    """Rows of bytes as a load writes them: at the pattern's pitch, chunks xored (5.5.7)."""
    memory = _memory()
    row, column = np.indices(rows.shape)
    pitch = swizzle.span or rows.shape[1]
    memory[_swizzled(row * pitch + column, swizzle)] = rows
    return memory


def _load(
    name: str,
    entry: Map,
    data: Array,
    coordinates: str,
    expected: Array,
    bytes_: int,
    tail: str = "",
) -> None:
    rank = entry.descriptor.tensor_rank
    mode = ".im2col" if isinstance(entry.descriptor, Im2colDescriptor) else ".tile"
    FAMILY.kernel(
        name,
        _SETUP + _POISONED + "mov.u64 %map, map0; cvta.param.u64 %map, %map; @!%first bra READY; "
        f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {bytes_}; "
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global{mode}.mbarrier::complete_tx::bytes "
        f"[room], [%map, {{{coordinates}}}], [bar]{tail}; READY: " + _WAIT + _DUMP,
        expected.view(np.uint32),
        [data],
        block=128,
        maps=(entry,),
    )


def _tile(swizzle: Swizzle, x: int, y: int) -> None:
    """A box of 16 rows from a tensor of 24 rows of 80 elements; zeros outside."""
    tensor = _RNG.integers(1, 65536, (24, 80)).astype(np.uint16)
    columns = (swizzle.span or 128) // 2
    descriptor = TiledDescriptor(
        DataType.UINT16, 0, (80, 24), (160,), (columns, 16), (1, 1), swizzle=swizzle
    )
    box = np.zeros((16, columns), np.uint16)
    for i in range(16):
        for j in range(columns):
            if 0 <= y + i < 24 and 0 <= x + j < 80:
                box[i, j] = tensor[y + i, x + j]
    expected = _in_rows(box.view(np.uint8), swizzle)
    name = f"tile_{swizzle.name}_{x}_{y}".lower().replace("-", "m")
    _load(name, Map(0, descriptor), tensor, f"{x}, {y}", expected, box.nbytes)


for _swizzle in (Swizzle.NONE, Swizzle.B32, Swizzle.B64, Swizzle.B128):
    _tile(_swizzle, 8, 4)
    _tile(_swizzle, -8, 15)


def _im2col(swizzle: Swizzle, tap: tuple[int, int], start: tuple[int, int, int]) -> None:
    """48 pixels of a padded 3x3 traversal with a stride of 2 over three images of 7x9 (5.5.4)."""
    n, h, w, c = 3, 7, 9, 32
    tensor = _RNG.integers(1, 65536, (n, h, w, c)).astype(np.uint16)
    dims = (c, w, h, n)
    descriptor = Im2colDescriptor(
        DataType.UINT16,
        0,
        dims,
        packed_strides(dims, DataType.UINT16),
        (-1, -1),
        (-1, -1),
        32,
        48,
        (1, 2, 2, 1),
        swizzle=swizzle,
    )
    rows = np.zeros((48, c), np.uint16)
    x, y, image = start
    for row in rows:
        i, j = y + tap[1], x + tap[0]
        if 0 <= i < h and 0 <= j < w and image < n:
            row[:] = tensor[image, i, j]
        x += 2
        if x >= w - 1:
            x, y = -1, y + 2
        if y >= h - 1:
            y, image = -1, image + 1
    expected = _in_rows(rows.view(np.uint8), swizzle)
    coordinates = f"0, {start[0]}, {start[1]}, {start[2]}"
    offsets = ", {%wo, %ho}"
    name = f"im2col_{swizzle.name}_{tap[0]}_{tap[1]}".lower()
    entry = Map(0, descriptor)
    FAMILY.kernel(
        name,
        ".reg .b16 %wo, %ho; "
        + f"mov.b16 %wo, {tap[0]}; mov.b16 %ho, {tap[1]}; "
        + _SETUP
        + _POISONED
        + "mov.u64 %map, map0; cvta.param.u64 %map, %map; @!%first bra READY; "
        f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {rows.nbytes}; "
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
        f"[room], [%map, {{{coordinates}}}], [bar]{offsets}; READY: " + _WAIT + _DUMP,
        expected.view(np.uint32),
        [tensor],
        block=128,
        maps=(entry,),
    )


_im2col(Swizzle.B64, (0, 0), (-1, -1, 0))
_im2col(Swizzle.B64, (2, 1), (1, 3, 1))
_im2col(Swizzle.NONE, (1, 2), (5, 1, 2))


def _store(name: str, kind: str, data_type: DataType, reduction: str, swizzle: Swizzle) -> None:
    """A box of shared memory written into, or combined with, a tensor of 20 rows of 40 elements.

    What lies outside the tensor is dropped. The tensor is the second input, and is copied out.
    """
    dtype: Any = np.dtype(kind)
    columns = 64 // dtype.itemsize
    high = 1000 if dtype.itemsize > 2 else 100
    tensor = _RNG.integers(0, high, (20, 40)).astype(dtype)
    box = _RNG.integers(0, high, (8, columns)).astype(dtype)
    memory = np.zeros(_ROOM, np.uint8)
    row, column = np.indices((8, 64))
    memory[_swizzled(row * (swizzle.span or 64) + column, swizzle)] = box.view(np.uint8)
    x, y = 40 - columns + 8, 15
    result = tensor.copy()
    combine: Any = {
        "": lambda old, new: new,
        "add": lambda old, new: old + new,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[reduction]
    inside = result[y:, x:]
    rows, width = min(8, inside.shape[0]), min(columns, inside.shape[1])
    inside[:rows, :width] = combine(inside[:rows, :width], box[:rows, :width]).astype(dtype)
    strides = (40 * dtype.itemsize,)
    descriptor = TiledDescriptor(
        data_type, 0, (40, 20), strides, (columns, 8), (1, 1), swizzle=swizzle
    )
    opcode = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
    if reduction:
        opcode = f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{reduction}.tile.bulk_group"
    words_out = tensor.nbytes // 4
    FAMILY.kernel(
        name,
        _SETUP + _FILL + "mov.u64 %map, map0; cvta.param.u64 %map, %map; @!%first bra STORED; "
        f"{opcode} [%map, {{{x}, {y}}}], [room]; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; "
        "fence.proxy.async; STORED: bar.sync 0; "
        "mov.u32 %i, %t; DUMP: mul.wide.u32 %to, %i, 4; add.u64 %at, %in1, %to; ld.global.b32 %v, [%at]; "
        "add.u64 %at, %out, %to; st.global.b32 [%at], %v; add.u32 %i, %i, 128; "
        f"setp.lt.u32 %p, %i, {words_out}; @%p bra DUMP; ",
        result.view(np.uint32).reshape(-1),
        [memory.view(np.uint32), tensor],
        block=128,
        maps=(Map(1, descriptor),),
    )


_store("store_none", "u2", DataType.UINT16, "", Swizzle.NONE)
_store("store_b64", "u2", DataType.UINT16, "", Swizzle.B64)
_store("store_f32", "f4", DataType.FLOAT32, "", Swizzle.B64)
for _reduction in ("add", "min", "max", "and", "or", "xor"):
    _store(f"reduce_{_reduction}_u32", "u4", DataType.UINT32, _reduction, Swizzle.NONE)
_store("reduce_add_f32", "f4", DataType.FLOAT32, "add", Swizzle.B64)
_store("reduce_add_f16", "f2", DataType.FLOAT16, "add", Swizzle.NONE)
_store("reduce_max_f16", "f2", DataType.FLOAT16, "max", Swizzle.B64)
_store("reduce_min_s32", "i4", DataType.INT32, "min", Swizzle.B64)
