"""Which tiles a block computes: the scheduler of the Blackwell kernel.

The grid has a cluster for every tile. A cluster that runs asks for the work of
one that has not started (cluster launch control: PTX ISA,
"clusterlaunchcontrol"), computes that too, and asks again, until there is none
left. One thread of the cluster asks; each role of each block reads the answer
from a ring, at its own pace.
"""

from max.gpu import block_idx, thread_idx
from std.sys import _RegisterPackType
from std.sys._assembly import inlined_assembly

from ..im2col.tiles import Tile, TileGeometry
from ..pipeline.barrier import sync_warp
from ..pipeline.ring import RingPosition
from ..tma.copy import SharedAddress, fence_async_proxy
from ..limits import WARP
from .config import CLC_RESPONSE_BYTES, Conv2dConfig
from .smem import SharedStorage


@fieldwise_init
struct ClusterPlace[
    config: Conv2dConfig,
](TrivialRegisterPassable):
    """A block's place in its cluster: ranks count along M first, so that the
    blocks of a pair have ranks that differ in the last bit, then along N, then
    the blocks that share a tile."""

    comptime blocks_m = Self.config.cluster_shape[0]
    comptime blocks_n = Self.config.cluster_shape[1]
    comptime group = Self.config.cta_group

    var rank: UInt32
    var m: UInt32
    var n: UInt32
    var split: UInt32
    """Which of the blocks that share a tile."""

    @always_inline
    def __init__(out self):
        """This block's."""
        var rank = UInt32(block_idx.x) % UInt32(Self.config.cluster_size())
        self = Self.of(rank)

    @staticmethod
    @always_inline
    def of(rank: UInt32) -> Self:
        """A block's.

        Args:
            rank: The block's in its cluster.
        """
        var split, shared = divmod(rank, UInt32(Self.config.sharers()))
        var n, m = divmod(shared, UInt32(Self.blocks_m))
        return Self(rank, m, n, split)

    @always_inline
    def first(self) -> UInt32:
        """The rank of the first block that adds up the same share."""
        comptime if Self.config.split_k() == 1:
            return 0
        return self.split * UInt32(Self.config.sharers())

    @always_inline
    def behind(self, count: UInt32) -> UInt32:
        """The rank of the block that has, of the same tile, the share of the
        sum `count` behind this block's, counted around.

        Args:
            count: From 0 to `split_k`.
        """
        comptime size = UInt32(Self.config.cluster_size())
        return (self.rank + count * UInt32(Self.config.sharers())) % size

    @always_inline
    def half(self) -> UInt32:
        """Which block of its pair it is: 0 or 1; 0 if there are no pairs."""
        return self.m % UInt32(Self.group)

    @always_inline
    def leader(self) -> UInt32:
        """The rank of the block that multiplies for the pair, or its own."""
        return self.rank - self.half()

    @always_inline
    def leads(self) -> Bool:
        """Whether it multiplies."""
        return self.half() == 0

    @always_inline
    def pair_mask(self) -> UInt16:
        """A bit for each block of the pair."""
        return UInt16((1 << Self.group) - 1) << UInt16(self.leader())

    @always_inline
    def activation_mask(self) -> UInt16:
        """A bit for each block that has the same pixels."""
        comptime row = _strided_bits(Self.blocks_n, Self.blocks_m)
        return UInt16(row) << UInt16(self.first() + self.m)

    @always_inline
    def filter_mask(self) -> UInt16:
        """A bit for each block that has the same filters."""
        comptime column = _strided_bits(Self.blocks_m // Self.group, Self.group)
        return UInt16(column) << UInt16(
            self.first() + self.n * UInt32(Self.blocks_m) + self.half()
        )

    @always_inline
    def loaders_mask(self) -> UInt16:
        """A bit for each block that loads into this block's, or its pair's,
        shared memory."""
        comptime rows = _strided_bits(Self.blocks_n, Self.blocks_m) * (
            (1 << Self.group) - 1
        )
        comptime column = (1 << Self.blocks_m) - 1
        return (
            UInt16(rows) << UInt16(self.m - self.half())
            | UInt16(column) << UInt16(self.n * UInt32(Self.blocks_m))
        ) << UInt16(self.first())


def _strided_bits(count: Int, step: Int) -> Int:
    """`count` bits that are `step` apart, from bit 0 on."""
    var bits = 0
    for i in range(count):
        bits |= 1 << (i * step)
    return bits


@always_inline
def tile_of[
    config: Conv2dConfig,
](geometry: TileGeometry, place: ClusterPlace[config], index: UInt32) -> Tile:
    """A block's part of the tiles of a cluster. Filters are innermost, so that
    clusters that run at the same time read the same activations; within
    bands of `block_swizzle_size` clusters along M, M is.

    Args:
        geometry: The problem.
        place: The block's.
        index: Which cluster's work.

    Returns:
        The tile; of a pair, each block's own pixels of it.
    """
    var m: UInt32
    var n: UInt32
    comptime band = UInt32(config.block_swizzle_size)
    comptime if band == 1:
        m, n = geometry.clusters_n.split(index)
    else:
        var first, rest = divmod(index, band * geometry.clusters_n.value)
        first *= band
        var width = min(band, geometry.clusters_m - first)
        n, m = divmod(rest, width)
        m += first
    var group, n_of_group = geometry.group_clusters.split(n)
    var first, rounds = share_of(geometry, place)
    return Tile(
        pixel=(m * UInt32(config.cluster_shape[0]) + place.m)
        * UInt32(config.block_tile_shape[0]),
        filter=group * geometry.group_filters
        + (n_of_group * UInt32(config.cluster_shape[1]) + place.n)
        * UInt32(config.mma_shape[1]),
        group=group,
        split=place.split,
        first=first,
        rounds=rounds,
    )


@always_inline
def share_of[
    config: Conv2dConfig,
](geometry: TileGeometry, place: ClusterPlace[config]) -> Tuple[UInt32, UInt32]:
    """What of every tile's sum a block adds up: the steps in front of its own,
    and its own."""
    comptime if config.split_k() == 1:
        return UInt32(0), geometry.rounds(0)
    return geometry.split_k.share(place.split)


@fieldwise_init
struct Work(TrivialRegisterPassable):
    """The scheduler's answer."""

    var index: UInt32
    """Which cluster's work, if `valid`."""
    var valid: Bool
    """Whether there was work left."""


@always_inline
def ask_for_work[
    multicast: Bool
](answer: SharedAddress, barrier: SharedAddress):
    """Asks for the work of a cluster that has not started. One thread.

    Parameters:
        multicast: Whether every block of the cluster gets the answer, each at
            its own `answer` and `barrier`.

    Args:
        answer: Where the answer goes, 16 bytes.
        barrier: The barrier that counts its bytes.
    """
    comptime name = String(
        (
            "clusterlaunchcontrol.try_cancel.async.shared::cta"
            ".mbarrier::complete_tx::bytes"
        ),
        ".multicast::cluster::all" if multicast else "",
        ".b128 [$0], [$1];",
    )
    inlined_assembly[name, NoneType, constraints="r,r,~{memory}"](
        answer, barrier
    )


@always_inline
def read_answer[cluster_size: Int](answer: SharedAddress) -> Work:
    """Decodes an answer.

    Parameters:
        cluster_size: Blocks of a cluster.

    Args:
        answer: Where it lies.
    """
    var decoded = inlined_assembly[
        """{
        .reg .b128 answer;
        .reg .pred canceled;
        ld.shared.b128 answer, [$2];
        clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 canceled, answer;
        selp.u32 $0, 1, 0, canceled;
        mov.u32 $1, 0;
        @canceled clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 $1, answer;
        }""",
        _RegisterPackType[UInt32, UInt32],
        constraints="=&r,=&r,r,~{memory}",
    ](answer)
    return Work(decoded[1] // UInt32(cluster_size), decoded[0] != 0)


struct WorkQueue[
    config: Conv2dConfig,
](TrivialRegisterPassable):
    """One role's way through the scheduler's answers."""

    comptime Storage = SharedStorage[Self.config]
    comptime Position = RingPosition[Self.config.num_clc_pipeline_stages]

    var storage: Self.Storage
    var work: Work
    """The present one."""
    var position: Self.Position
    """Of the next answer."""

    @always_inline
    def __init__(out self, storage: Self.Storage):
        """Starts with the cluster's own work."""
        comptime size = UInt32(Self.config.cluster_size())
        self.storage = storage
        self.work = Work(UInt32(block_idx.x) // size, True)
        self.position = Self.Position()

    @always_inline
    def advance[*, whole_warp: Bool = False](mut self):
        """Waits for the next answer, and releases it once it is read.

        Parameters:
            whole_warp: Whether all threads of the warp call this, instead of
                one.
        """
        var ring = self.storage.answers()
        var stage = self.position.stage
        ring.full(stage).wait(self.position.parity)
        comptime size = Self.config.cluster_size()
        self.work = read_answer[size](
            self.storage.base + stage * CLC_RESPONSE_BYTES
        )
        # The next answer's bytes come by TMA's proxy.
        fence_async_proxy()
        comptime if whole_warp:
            sync_warp()
            if thread_idx.x % WARP == 0:
                self._release(stage)
        else:
            self._release(stage)
        self.position.step()

    @always_inline
    def _release(self, stage: UInt32):
        """Tells the thread that asks that an answer has been read."""
        var empty = self.storage.answers().empty(stage)
        comptime if Self.config.cluster_size() > 1:
            empty.arrive_at(0)
        else:
            empty.arrive()


@always_inline
def schedule[
    config: Conv2dConfig,
](storage: SharedStorage[config]):
    """Asks for work until there is none: one thread of the cluster's first
    block. It asks only once the present work's loads have begun, so that no
    cluster takes work that another could begin sooner."""
    comptime blocks = config.cluster_size()
    var answers = storage.answers()
    var throttle = storage.throttle()
    var begun = RingPosition[config.num_clc_pipeline_stages]()
    var asked = RingPosition[config.num_clc_pipeline_stages]()
    var queue = WorkQueue[config](storage)
    while queue.work.valid:
        throttle.wait(begun)
        throttle.empty(begun.stage).arrive()
        begun.step()
        answers.empty(asked.stage).wait(asked.parity ^ 1)
        var full = answers.full(asked.stage)
        full.arrive_expecting(CLC_RESPONSE_BYTES)
        comptime for block in range(1, blocks):
            full.arrive_expecting_at(UInt32(block), CLC_RESPONSE_BYTES)
        ask_for_work[multicast=blocks > 1](
            storage.base + asked.stage * CLC_RESPONSE_BYTES, full.address
        )
        asked.step()
        queue.advance()
