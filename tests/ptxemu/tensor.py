"""Kernels that use tensor memory, and where its words are in a warp's registers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from tests.ptxemu.warps import entry

from ptxemu import Machine

Words = npt.NDArray[np.uint32]
Image = npt.NDArray[np.uint8]

#: Threads of a block: one warpgroup, which reaches all lanes.
THREADS = 128

#: Everything before the tested instructions: an image comes to shared memory, an mbarrier is made,
#: columns are allocated. ``%w`` is the warp, ``%a`` the columns' address.
PROLOGUE = """
.shared .align 1024 .b8 tile[ROOM]; .shared .align 8 .b64 bar; .shared .align 4 .b32 where;
.reg .b32 %t, %w, %l, %a, %b, %i, %x, %rank, %m<4>, %r<RESULTS>; .reg .b64 %p, %in, %q, %ad, %bd;
.reg .pred %c, %d, %e, %f; .reg .b16 %h;
ld.param.u64 %in, [in]; mov.u32 %t, %tid.x; shr.u32 %w, %t, 5; and.b32 %l, %t, 31;
mov.u32 %rank, %cluster_ctarank; mad.wide.u32 %in, %rank, ROOM, %in;
mov.b32 %b, tile; setp.eq.u32 %c, %t, 0; setp.eq.u32 %d, %w, 0; setp.eq.u32 %f, %rank, 0;
and.pred %f, %f, %c; mov.b32 %i, %t;
COPY: setp.ge.u32 %e, %i, CHUNKS; @%e bra COPIED;
mad.wide.u32 %p, %i, 16, %in; ld.global.v4.b32 {%m0, %m1, %m2, %m3}, [%p];
shl.b32 %x, %i, 4; add.s32 %x, %x, %b; st.shared.v4.b32 [%x], {%m0, %m1, %m2, %m3};
add.s32 %i, %i, 128; bra COPY;
COPIED:
fence.proxy.async.shared::cta;
@%c mbarrier.init.shared::cta.b64 [bar], 1; @%c fence.mbarrier_init.release.cluster;
@!%d bra READY;
tcgen05.alloc.cta_group::GROUP.sync.aligned.shared::cta.b32 [where], COLUMNS;
READY: bar.sync 0; barrier.cluster.arrive; barrier.cluster.wait;
ld.shared.b32 %a, [where];
"""

#: Waits for the mbarrier's first phase.
WAIT = """
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %e, [bar], 0; @!%e bra WAIT;
"""

#: Everything after them: a thread's registers go to memory, the columns are freed.
EPILOGUE = """
ld.param.u64 %q, [out]; mad.lo.s32 %x, %rank, 128, %t; mad.wide.u32 %q, %x, STRIDE, %q;
STORES
bar.sync 0; barrier.cluster.arrive; barrier.cluster.wait;
@!%d bra END; tcgen05.dealloc.cta_group::GROUP.sync.aligned.b32 %a, COLUMNS; END: ret;
"""


@dataclass(frozen=True)
class Program:
    """A kernel.

    Attributes:
        body: The tested instructions. They leave results in ``%r0`` and following.
        results: Registers of a thread.
        columns: That are allocated.
        blocks: Of a pair: 1 or 2.
        room: Bytes of the image of each block.
    """

    body: str
    results: int
    columns: int = 128
    blocks: int = 1
    room: int = 1024
    text: str = field(init=False)

    def __post_init__(self) -> None:
        stores = [f"st.global.b32 [%q+{4 * r}], %r{r};" for r in range(self.results)]
        parts = PROLOGUE + self.body + EPILOGUE
        for name, value in (
            ("STORES", "\n".join(stores)),
            ("ROOM", self.room),
            ("CHUNKS", self.room // 16),
            ("RESULTS", max(1, self.results)),
            ("GROUP", self.blocks),
            ("COLUMNS", self.columns),
            ("STRIDE", 4 * self.results),
        ):
            parts = parts.replace(name, str(value))
        text = entry(parts, ["u64 in", "u64 out"], target="sm_100a")
        object.__setattr__(self, "text", text)

    def run(self, image: Image | None = None, seed: int = 0, text: str = "") -> Words:
        """Runs it, or a changed text of it; returns ``[blocks, 128, results]``."""
        machine = Machine("sm_100a", sms=self.blocks, seed=seed)
        given = np.zeros((self.blocks, self.room), np.uint8) if image is None else image
        assert given.size == self.blocks * self.room
        shape = self.blocks, THREADS, max(1, self.results)
        out = machine.alloc(np.full(shape, 0xDEADBEEF, np.uint32))
        machine.load(text or self.text).launch(
            grid=self.blocks,
            cluster=self.blocks,
            block=THREADS,
            args=[machine.alloc(given), out],
            budget=200_000,
        )
        found: Words = out.read()
        return found


def registers(count: int, first: int = 0) -> str:
    """A vector of registers."""
    return "{" + ", ".join(f"%r{first + r}" for r in range(count)) + "}"


#: Registers of a repetition (PTX ISA 9.0, Table 49 of 9.7.16.8.3).
TABLE_49 = {"16x64b": 1, "16x128b": 2, "16x256b": 4, "32x32b": 1, "16x32bx2": 1}


@lru_cache(maxsize=64)
def fragment(shape: str, count: int) -> tuple[Words, Words]:
    """Lane and column of each register, ``[32 threads, registers]``.

    The layouts of CUTLASS's ``copy_traits_sm100.hpp`` map thread and bit of its registers to the
    bit of a matrix whose rows are lanes; ``16x32bx2`` has its second half right behind the first.
    """
    n = count
    width, threads, bits = {
        "16x64b": (64, [(2, 512 * n), (2, 32), (8, 64 * n)], [(32, 1), (n, 64)]),
        "16x128b": (128, [(4, 32), (8, 128 * n)], [(32, 1), (2, 1024 * n), (n, 128)]),
        "16x256b": (256, [(4, 64), (8, 256 * n)], [(64, 1), (2, 2048 * n), (n, 256)]),
        "32x32b": (32, [(32, 32 * n)], [(32 * n, 1)]),
        "16x32bx2": (64, [(16, 64 * n), (2, 32 * n)], [(32 * n, 1)]),
    }[shape]
    values = np.arange(TABLE_49[shape] * n) * 32
    where = _offset(np.arange(32), threads)[:, None] + _offset(values, bits)[None, :]
    lanes, columns = where // (width * n), where % (width * n) // 32
    return lanes.astype(np.uint32), columns.astype(np.uint32)


def _offset(index: npt.NDArray[np.int64], modes: list[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """A layout's value: sizes and strides, the first one fastest."""
    total = np.zeros_like(index)
    for size, stride in modes:
        total, index = total + index % size * stride, index // size
    return total


def gathered(found: Words, shape: str, count: int, first_lane: int = 0) -> Words:
    """A block's registers ``[128, registers]`` as words ``[128 lanes, columns]``; 0 elsewhere."""
    lanes, columns = fragment(shape, count)
    words = np.zeros((THREADS, int(columns.max()) + 1), np.uint32)
    for warp in range(4):
        words[32 * warp + first_lane + lanes, columns] = found[32 * warp : 32 * warp + 32]
    return words
