"""Clusters and their blocks: shared memory and the barriers of all kinds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from .._errors import BarrierError, IllegalInstructionError, MemoryFaultError, UnfinishedError
from .barriers import MBarrier, NamedBarrier
from .grid import Grid, Three
from .memory import BARRIER, CHUNK, INVALID, UNWRITTEN, Memory
from .pending import Accumulator, Arrivals, TensorOperation, Warpgroup
from .registers import LANES, Array
from .tensormemory import TensorMemory

__all__ = ["RANK_SHIFT", "SHARED_START", "Cluster", "ThreadBlock", "warps_of"]

#: A block's number in its cluster stands in a shared address from this bit on; a block's own
#: addresses have its own number. The ISA leaves it open; compiled code that clears bit 24 to reach
#: an even block's memory relies on it.
RANK_SHIFT = 24

#: The first byte of a block's variables; the system keeps what is below, as on sm_90.
SHARED_START = 1024

#: Named barriers of a block (PTX ISA 9.0, 9.7.13.1).
_NAMES = 16

#: Bytes and alignment of an mbarrier (9.7.13.15.1).
_MBARRIER = 8

#: The words of a chunk.
_WORDS = np.arange(0, CHUNK, 4)


class Cluster:
    """Blocks that run together.

    Args:
        grid: Theirs.
        ended: Is called when all threads have exited.

    Attributes:
        blocks: By rank.
        barrier: Of all their threads.
        accumulators: Where tcgen05 multiplies add to: by what names the place and its shape.
        tensor_copies: tcgen05 copies of a pair of blocks, by the even one's rank.
        requests: What blocks of a pair ask for together: by instruction and the even block's rank,
            then by block.
    """

    def __init__(self, grid: Grid, ended: Callable[[Cluster], None]) -> None:
        self.blocks: list[ThreadBlock] = []
        self.accumulators: dict[tuple[int, ...], Accumulator] = {}
        self.tensor_copies: dict[int, list[TensorOperation]] = {}
        self.requests: dict[tuple[str, int], dict[int, Any]] = defaultdict(dict)
        self.barrier = grid.barriers.cluster(self)
        self._ended = ended

    def threads(self) -> int:
        """Threads that have not exited."""
        return sum(block.live_threads for block in self.blocks)

    def lanes_left(self) -> None:
        """Some threads have exited."""
        self.barrier.complete()
        if not self.threads():
            self._ended(self)


class ThreadBlock:
    """A block: its threads' shared memory and barriers.

    Attributes:
        index: In the grid, x first.
        rank: In the cluster.
        shared: From address ``rank << RANK_SHIFT`` on.
        mbarriers: By offset in shared memory.
        warpgroups: Their wgmma multiplies, by number.
        arrivals: Theirs at mbarriers of other blocks. They come some time; a release of the
            cluster's scope by any thread waits for them: who synchronized with it is not followed.
        votes: What threads brought to a barrier that combines, by its number: true, and all.
        refused: Whether a thread saw that there is no further cluster to take.
    """

    def __init__(self, grid: Grid, cluster: Cluster, index: Three) -> None:
        self.grid = grid
        self.cluster = cluster
        self.index = index
        self.rank = len(cluster.blocks)
        self.live_threads = grid.threads
        name = f"shared memory of block {self}"
        base = self.rank << RANK_SHIFT
        self.shared = Memory(name, base, SHARED_START + grid.shared_bytes, UNWRITTEN)
        self.shared.state[:SHARED_START] = INVALID
        self.writes = grid.fences.track(self.shared.size)
        self.mbarriers: dict[int, MBarrier] = {}
        self.warpgroups: dict[int, Warpgroup] = defaultdict(Warpgroup)
        self.arrivals = Arrivals()
        self.votes: dict[int, list[tuple[int, int]]] = {}
        self.refused = False
        self._named: dict[int, NamedBarrier] = {}
        self._tensor: TensorMemory | None = None

    def __str__(self) -> str:
        return str(self.index)

    @property
    def tensor(self) -> TensorMemory:
        """Its tensor memory."""
        if self._tensor is None:
            self._tensor = TensorMemory(str(self))
        return self._tensor

    def require_running(self, what: str, line: int) -> None:
        """Raises if an asynchronous operation reaches the block after its end.

        Args:
            what: The operation, with its verb.
            line: Of the instruction that started it.

        Raises:
            MemoryFaultError: It does.
        """
        if not self.live_threads:
            raise MemoryFaultError(f"{what} block {self}, which has ended (line {line})")

    def named(self, number: int) -> NamedBarrier:
        """A named barrier.

        Raises:
            IllegalInstructionError: There is no such number.
        """
        if not 0 <= number < _NAMES:
            raise IllegalInstructionError(f"barrier {number}; 0 to {_NAMES - 1} are allowed")
        if number not in self._named:
            self._named[number] = self.grid.barriers.named(self, number)
        return self._named[number]

    def init_mbarrier(self, offset: int, count: int, thread: int) -> None:
        """Makes an mbarrier of eight bytes."""
        self.shared.state[offset : offset + _MBARRIER] = BARRIER
        self.mbarriers[offset] = self.grid.barriers.mbarrier(self, offset, count, thread)

    def end_mbarrier(self, offset: int) -> None:
        """Makes an mbarrier's bytes free for other use."""
        self.mbarrier(offset)
        del self.mbarriers[offset]
        self.shared.state[offset : offset + _MBARRIER] = UNWRITTEN

    def mbarrier(self, offset: int) -> MBarrier:
        """The mbarrier at an offset in shared memory.

        Raises:
            BarrierError: There is none.
        """
        found = self.mbarriers.get(offset)
        if found is None:
            raise BarrierError(f"no mbarrier is initialized at byte {offset} of {self.shared.name}")
        return found

    def begin_read(self, chunks: Array, issuer: int, what: str) -> None:
        """Checks and marks chunks of shared memory that an asynchronous operation will read.

        Args:
            chunks: By their number.
            issuer: The thread that starts the operation.
            what: The operation, in messages.

        Raises:
            FenceError: No proxy fence followed an ordinary store to them.
            MemoryFaultError: They are out of bounds.
            RaceError: Nothing wrote a byte, or something may be writing it.
        """
        last = int(chunks.max()) * CHUNK
        if last >= self.shared.size:
            raise MemoryFaultError(f"{what} reaches byte {last} of {self.shared.name}")
        self.writes.check(chunks[..., None] * CHUNK + _WORDS, issuer, what)
        self.shared.begin_read(chunks, f"{what} reads")

    def lanes_left(self, threads: int) -> None:
        """Some threads have exited."""
        self.live_threads -= threads
        for barrier in list(self._named.values()):
            barrier.complete()
        if not self.live_threads:
            self._check_end()
        self.cluster.lanes_left()

    def _check_end(self) -> None:
        if self._tensor is not None:
            self._tensor.check_end()
        for barrier in self.mbarriers.values():
            if barrier.transactions:
                raise UnfinishedError(
                    f"block {self} ended while {barrier} has a transaction count of "
                    f"{barrier.transactions} bytes"
                )


def warps_of(threads: int) -> int:
    """Warps of a block."""
    return -(-threads // LANES)
