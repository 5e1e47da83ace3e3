"""Clusters and their blocks: shared memory and the barriers of all kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import BarrierError, IllegalInstructionError, MemoryFaultError, UnfinishedError
from .memory import BARRIER, INVALID, UNWRITTEN, Memory
from .registers import LANES
from .tensormemory import TensorMemory

if TYPE_CHECKING:
    from .barriers import MBarrier, NamedBarrier
    from .launch import Launch
    from .paths import Warp

__all__ = ["RANK_SHIFT", "SHARED_START", "Cluster", "ThreadBlock"]

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


class Cluster:
    """Blocks that run together.

    Attributes:
        blocks: By rank.
        barrier: Of all their threads.
        state: What instructions keep for the cluster.
    """

    def __init__(self, launch: Launch, size: int) -> None:
        self.launch = launch
        self.size = size
        self.blocks: list[ThreadBlock] = []
        self.state: dict[object, object] = {}
        self.barrier = launch.barriers.cluster(self)

    def threads(self) -> int:
        """Threads that have not exited."""
        return sum(block.live_threads for block in self.blocks)

    def lanes_left(self) -> None:
        """Some threads have exited."""
        self.barrier.settle()
        if not self.threads():
            self.launch.cluster_ended(self)


class ThreadBlock:
    """A block: its threads' shared memory and barriers.

    Attributes:
        index: In the grid, x first.
        rank: In the cluster.
        shared: From address ``rank << RANK_SHIFT`` on.
        mbarriers: By offset in shared memory.
        warpgroups: What wgmma keeps for four warps.
        votes: What threads brought to a barrier that combines, by its number: true, and all.
        refused: Whether a thread saw that there is no further cluster to take.
    """

    def __init__(
        self, launch: Launch, cluster: Cluster, index: tuple[int, int, int], shared_bytes: int
    ) -> None:
        self.launch = launch
        self.cluster = cluster
        self.index = index
        self.rank = len(cluster.blocks)
        self.threads: int = launch.threads
        self.live_threads = self.threads
        self.warps: list[Warp] = []
        name = f"shared memory of block {self}"
        base = self.rank << RANK_SHIFT
        self.shared = Memory(name, base, SHARED_START + shared_bytes, UNWRITTEN)
        self.shared.state[:SHARED_START] = INVALID
        self.writes = launch.fences.track(self.shared.size)
        self.mbarriers: dict[int, MBarrier] = {}
        self.warpgroups: dict[int, object] = {}
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
            self._tensor = TensorMemory(self)
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
            self._named[number] = self.launch.barriers.named(self, number)
        return self._named[number]

    def init_mbarrier(self, offset: int, count: int, thread: int) -> None:
        """Makes an mbarrier of eight bytes."""
        self.shared.state[offset : offset + _MBARRIER] = BARRIER
        self.mbarriers[offset] = self.launch.barriers.mbarrier(self, offset, count, thread)

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

    def lanes_left(self, threads: int, warp_ended: bool) -> None:
        """Some threads have exited."""
        self.live_threads -= threads
        for barrier in list(self._named.values()):
            barrier.settle()
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
