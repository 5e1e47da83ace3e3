"""Configurations of the Hopper kernel, and the only statement of what each
can take.

A configuration is a compile-time value; the geometry it is asked about is a
run-time one.
"""

from std.collections import Optional
from std.math import ceildiv
from std.utils import IndexList

from ....conv.memory import element_bytes
from ...im2col.traversal import ROW_BYTES
from ...limits import (
    MAX_BOX,
    MAX_CLUSTER,
    MAX_MMA_N,
    MAX_SHARED_BYTES,
    PATTERN_BYTES,
    WARP,
    WARPGROUP,
)
from ...pipeline.barrier import BARRIER_BYTES
from ...pipeline.chunks import CHUNK_BYTES
from ...split_k import MAX_SPLIT_K
from ..wgmma import MMA_M
from .epilogue_config import SUBTILE_FILTERS, EpilogueConfig

comptime COPIED_BYTES = ROW_BYTES + CHUNK_BYTES
"""Of a row that threads copy: the chunks of memory that a stage's row touches.
"""

comptime ENTRY_BYTES = 16
"""That say what it is."""

comptime DIRECT = 1
"""Of `num_gather_stages`: threads copy pieces of 8 bytes straight into the
rings, of pixels that are multiples of as many."""

comptime HELD_STAGES = 2
"""Stages of a ring that consumers may be reading while copies into the others are
under way."""

comptime GATHERED_ROWS = WARPGROUP // (ROW_BYTES // CHUNK_BYTES)
"""Rows that a warpgroup moves at once, a chunk a thread."""

comptime BLOCK_REGISTERS = 64 * 1024
"""Registers of a multiprocessor, which one block has to itself."""

comptime SUM_BYTES = 4
"""Of an accumulator."""

comptime MAX_COLUMNS = 2 * MAX_MMA_N
"""Columns of a consumer's two multiplies side by side."""

comptime SPARE_REGISTERS = 72
"""Registers of a consumer's thread beside its accumulators."""


comptime SPLIT_COUNTS = [1, 2, 3, 4, 5, 6, MAX_SPLIT_K]
"""How many blocks may share a tile; 1: none do. Seven would take as many
multiprocessors of a device as eight, which add up less each."""


@fieldwise_init
struct Sm90Config(ImplicitlyCopyable, Movable, Writable):
    """How a block of the Hopper kernel is built.

    As an implicit GEMM, M are output pixels, N filters, K products. Cooperative
    consumers share a tile, each taking a part of its pixels or of its filters;
    otherwise (ping-pong) each has a tile of its own, and one multiplies while
    the other stores."""

    var block_tile_shape: IndexList[2]
    """M and N of a tile; its K is a row of `ROW_BYTES` of any type."""
    var cluster_shape: IndexList[3]
    """Blocks of a cluster along M, which share filters, along N, which share
    activations, and along K, at most, which share a tile: each adds up a part
    of its sum. The launch says how many along K there are."""
    var consumers: Int
    """Warpgroups that multiply."""
    var cooperative: Bool
    var swapped: Bool
    """Whether filters are the multiply's rows and pixels its columns, instead
    of the other way round."""
    var halo: Int
    """Pixels that an activation stage holds beyond the tile, so that all taps
    of a filter row read one stage; 0: a stage holds one tap's pixels."""
    var num_act_pipeline_stages: Int
    var num_filter_pipeline_stages: Int
    var num_gather_stages: Int
    """Stages of rows that threads have begun to copy, and shift into the rings,
    of pixels and filters of any bytes; `DIRECT`: nothing is shifted; 0: TMA
    loads."""
    var stationary: Bool
    """Whether it is known when compiling that the filter ring holds the whole
    filter, loaded once: for problems whose filters fit one tile. Others may
    keep their filters too, as `Grid` finds."""
    var unaligned: Bool
    """Whether it is for pixels of activation or output that are no multiples of
    `COPY_BYTES`: threads store, and load residuals. Such kernels take a fifth
    longer to compile."""
    var epilogue: EpilogueConfig
    """How each consumer stores its part."""

    def splits(self) -> Bool:
        """Whether blocks of a cluster may share a tile's sum."""
        return self.cluster_shape[2] > 1

    def gathers(self) -> Bool:
        """Whether threads load, and not TMA."""
        return self.num_gather_stages > 0

    def gathers_directly(self) -> Bool:
        """Whether threads copy straight into the rings."""
        return self.num_gather_stages == DIRECT

    def gatherers(self) -> Int:
        """Warpgroups that load: one fills the ring of activations, one that of
        filters."""
        return 2 if self.gathers() else 0

    def keeps_pace(self) -> Bool:
        """Whether its launches may run in relays, and hold loads back: TMA loads
        and stores for consumers in turns, as where memory bounds a launch, with
        tiles of the widths that are chosen there. Others would begin later for
        it."""
        return (
            not self.cooperative
            and self.swapped
            and self.halo == 0
            and self.cluster_size() == 1
            and self.epilogue.tma_store
            and 128 <= self.block_tile_shape[0] <= 160
        )

    def warpgroups(self) -> Int:
        """Warpgroups of a block: producers and loaders, consumers, gatherers.
        """
        return 1 + self.consumers + self.gatherers()

    def threads(self) -> Int:
        """Threads of a block."""
        return self.warpgroups() * WARPGROUP

    def ring_producers(self) -> Int:
        """Arrivals that fill a stage: a thread's, or those of a warpgroup's
        warps."""
        return WARPGROUP // WARP if self.gathers() else 1

    def splits_filters(self) -> Bool:
        """Whether cooperative consumers share a tile by its filters; otherwise
        by its pixels."""
        return (
            self.swapped
            and self.block_tile_shape[1] % (self.consumers * MMA_M) == 0
        )

    def consumer_pixels(self) -> Int:
        """Pixels of the accumulator that one consumer holds."""
        if not self.cooperative or self.splits_filters():
            return self.block_tile_shape[0]
        return self.block_tile_shape[0] // self.consumers

    def consumer_filters(self) -> Int:
        """Filters of the accumulator that one consumer holds."""
        if self.cooperative and self.splits_filters():
            return self.block_tile_shape[1] // self.consumers
        return self.block_tile_shape[1]

    def mma_rows(self) -> Int:
        """Rows of a consumer's multiply."""
        return (
            self.consumer_filters() if self.swapped else self.consumer_pixels()
        )

    def mma_columns(self) -> Int:
        """Columns of a consumer's multiply."""
        return (
            self.consumer_pixels() if self.swapped else self.consumer_filters()
        )

    def accumulators(self) -> Int:
        """Accumulator registers of a consumer's thread."""
        return self.mma_rows() * self.mma_columns() // WARPGROUP

    def cluster_size(self) -> Int:
        """Blocks of a cluster that share loads: all, but of a tile that blocks
        share."""
        return self.cluster_shape[0] * self.cluster_shape[1]

    def cluster_pixels(self) -> Int:
        """Pixels of the tiles of a whole cluster."""
        return self.cluster_shape[0] * self.block_tile_shape[0]

    def cluster_filters(self) -> Int:
        """Filters of the tiles of a whole cluster."""
        return self.cluster_shape[1] * self.block_tile_shape[1]

    def act_tile_dim0(self) -> Int:
        """Pixels that one load brings: blocks along N share a stage's."""
        return self.act_stage_pixels() // self.cluster_shape[1]

    def filter_tile_dim0(self) -> Int:
        """Filters that one load brings: blocks along M share a stage's."""
        return self.block_tile_shape[1] // self.cluster_shape[0]

    def tile_consumers(self) -> Int:
        """Consumers that read a stage: all of them, or the one whose tile it
        belongs to."""
        return self.consumers if self.cooperative else 1

    def joins_rings(self) -> Bool:
        """Whether stages of both rings are filled and released together, by one
        pair of barriers: consumers wait once a step, and release once. Without
        a halo, where each step takes a stage of both, and as many stages."""
        return (
            self.halo == 0
            and not self.gathers()
            and not self.stationary
            and self.num_act_pipeline_stages == self.num_filter_pipeline_stages
            and min(self.cluster_shape[0], self.cluster_shape[1]) == 1
        )

    def may_count_pixels_first(self) -> Bool:
        """Whether neighbours may be tiles along the pixels: of blocks that share
        no loads, and without a halo."""
        return (
            self.cluster_size() == 1 and self.halo == 0 and not self.gathers()
        )

    def activation_releases(self) -> Int:
        """Arrivals that empty an activation stage, or one of both rings: each
        consumer of each block that the stage was copied to."""
        if self.joins_rings():
            return self.tile_consumers() * self.cluster_size()
        return self.tile_consumers() * self.cluster_shape[1]

    def filter_releases(self) -> Int:
        """Arrivals that empty a filter stage of a ring of its own."""
        return self.tile_consumers() * self.cluster_shape[0]

    def even_registers(self) -> Int:
        """Registers of a thread if all have the same, in multiples of 8."""
        return BLOCK_REGISTERS // self.threads() // 8 * 8

    def moves_registers(self) -> Bool:
        """Whether consumers need more than their even part, and get what the
        others give back."""
        return (
            self.gathers()
            or self.accumulators() + SPARE_REGISTERS > self.even_registers()
        )

    def producer_registers(self) -> Int:
        """Registers of a producer's thread, if they are moved."""
        return 40

    def gatherer_registers(self) -> Int:
        """Registers of a gatherer's thread, if they are moved."""
        return 64

    def consumer_registers(self) -> Int:
        """Registers of a consumer's thread: what the others leave, in multiples
        of 8, if they are moved."""
        if not self.moves_registers():
            return self.even_registers()
        var left = self.even_registers() * self.warpgroups()
        left -= self.producer_registers()
        left -= self.gatherers() * self.gatherer_registers()
        return min(240, left // self.consumers // 8 * 8)

    def act_stage_pixels(self) -> Int:
        """Pixels of an activation stage."""
        return self.block_tile_shape[0] + self.halo

    def act_stage_bytes(self) -> Int:
        """Bytes of an activation stage."""
        return self.act_stage_pixels() * ROW_BYTES

    def filter_tile_bytes(self) -> Int:
        """Bytes of a filter stage."""
        return self.block_tile_shape[1] * ROW_BYTES

    def buffers_bytes(self) -> Int:
        """Bytes of one consumer's residual and output buffers."""
        return self.epilogue.buffers() * self.epilogue.buffer_bytes()

    def ends_bytes(self) -> Int:
        """Bytes behind one consumer's buffers where its loader keeps ends of
        residuals' rows: a chunk for each pixel of a sub-tile, rounded up to
        where the next consumer's buffers may begin."""
        if not self.unaligned:
            return 0
        var bytes = self.epilogue.output_tile_shape[0] * CHUNK_BYTES
        return (bytes + PATTERN_BYTES - 1) // PATTERN_BYTES * PATTERN_BYTES

    def epilogue_bytes(self) -> Int:
        """Bytes of one consumer's buffers, and of what lies beside them."""
        return self.buffers_bytes() + self.ends_bytes()

    def exchange_barriers(self) -> Int:
        """Barriers of `split_k.SplitExchange`: one of the block, and one of
        each consumer."""
        return 1 + self.consumers if self.splits() else 0

    def first_tile_barriers(self) -> Int:
        """Barriers by which loaders know that TMA has been asked for the first
        tile's activations: one, if there are loaders. Warps that load unaligned
        residuals take longer, and begin at once; consumers in turns with a halo
        gain nothing."""
        if self.unaligned or (self.halo > 0 and not self.cooperative):
            return 0
        return 1 if self.epilogue.num_epi_load_stages > 0 else 0

    def ring_barriers(self) -> Int:
        """Barriers of the rings: of activations, of filters, and of each
        consumer's residual."""
        return 2 * (
            self.num_act_pipeline_stages
            + self.num_filter_pipeline_stages
            + self.epilogue.num_epi_load_stages * self.consumers
        )

    def copied_bytes(self, rows: Int) -> Int:
        """Bytes of an operand's copied rows and of their entries.

        Args:
            rows: Of a stage.
        """
        if self.gathers_directly():
            return 0
        return self.num_gather_stages * rows * (COPIED_BYTES + ENTRY_BYTES)

    def gather_bytes(self) -> Int:
        """The same, of both operands, rounded up to where buffers may begin."""
        var bytes = self.copied_bytes(
            self.block_tile_shape[0] + self.block_tile_shape[1]
        )
        return (bytes + PATTERN_BYTES - 1) // PATTERN_BYTES * PATTERN_BYTES

    def header_bytes(self) -> Int:
        """Bytes of the barriers, rounded up to where tiles may begin."""
        var barriers = self.ring_barriers() + self.exchange_barriers()
        barriers += self.first_tile_barriers()
        var bytes = barriers * BARRIER_BYTES
        return (bytes + PATTERN_BYTES - 1) // PATTERN_BYTES * PATTERN_BYTES

    def loads_bytes(self) -> Int:
        """Bytes of the rings, and of the rows that threads copy for them."""
        return (
            self.num_act_pipeline_stages * self.act_stage_bytes()
            + self.num_filter_pipeline_stages * self.filter_tile_bytes()
            + self.gather_bytes()
        )

    def shared_bytes(self) -> Int:
        """Shared memory of a block."""
        return (
            self.header_bytes()
            + self.loads_bytes()
            + self.consumers * self.epilogue_bytes()
        )

    def ends_filters(self) -> Bool:
        """Whether a tile ends within a sub-tile of filters. Each tile is then
        cut like a group of its own, so that stores drop what lies behind."""
        return self.block_tile_shape[1] % SUBTILE_FILTERS != 0

    def group_filters(self, filters: Int) -> Int:
        """Filters at whose multiples stores end: a group's, or a tile's.

        Args:
            filters: Of a group.
        """
        return self.block_tile_shape[1] if self.ends_filters() else filters

    def filter_subtiles(self) -> Int:
        """Sub-tiles along the filters of one consumer's part."""
        return ceildiv(self.consumer_filters(), SUBTILE_FILTERS)

    def refusal(self) -> Optional[String]:
        """Why no kernel can be built so, or None."""
        var refused = self._refused_tile()
        if not refused:
            refused = self.epilogue.refusal()
        if not refused:
            refused = self._refused_loads()
        if refused:
            return refused
        if self.halo > 0 and self.epilogue.tma_store:
            return String("tma_store: TMA stores no tile with a halo")
        if self.unaligned and (
            self.epilogue.tma_store or self.cluster_size() > 1
        ):
            return String(
                "unaligned: threads store such pixels, and blocks share no"
                " loads"
            )
        if self.gathers() and not self.unaligned:
            return String(
                "unaligned: what threads load is in no multiples of 16 bytes"
            )
        if self.shared_bytes() > MAX_SHARED_BYTES:
            return String(
                t"shared memory: {self.shared_bytes()} bytes, but a block has"
                t" {MAX_SHARED_BYTES}"
            )
        return None

    def _refused_tile(self) -> Optional[String]:
        """Why consumers cannot share out such a tile, or None."""
        if self.consumers < 1 or self.consumers > 2:
            return String(t"consumers: {self.consumers} is not 1 or 2")
        if not self.cooperative and self.consumers != 2:
            return String(t"consumers: ping-pong takes 2, not {self.consumers}")
        if self.mma_rows() < MMA_M or self.mma_rows() % MMA_M != 0:
            return String(
                t"rows: {self.mma_rows()} of a consumer's multiply are no"
                t" multiple of {MMA_M}"
            )
        var columns = self.mma_columns()
        if columns % 8 != 0 or (columns > MAX_MMA_N and columns % 16 != 0):
            return String(
                t"columns: {columns} of a consumer's multiply are no multiple"
                t" of 8 up to {MAX_MMA_N}, or of 16 beyond"
            )
        if columns > MAX_COLUMNS:
            return String(
                t"columns: {columns} of a consumer's multiplies are more than"
                t" {MAX_COLUMNS}"
            )
        if self.consumer_pixels() % self.epilogue.output_tile_shape[0] != 0:
            return String(
                t"output_tile_shape: M {self.epilogue.output_tile_shape[0]} do"
                t" not divide a consumer's {self.consumer_pixels()} pixels"
            )
        if not self.swapped and self.epilogue.output_tile_shape[0] != MMA_M:
            return String(
                t"output_tile_shape: M {self.epilogue.output_tile_shape[0]} is"
                t" not {MMA_M}, the multiply's rows"
            )
        if self.ends_filters() and (self.swapped or self.cluster_shape[1] > 1):
            return String(
                t"block_tile_shape: N {self.block_tile_shape[1]} is no multiple"
                t" of {SUBTILE_FILTERS}, which takes pixels as the multiply's"
                t" rows, and no cluster along N"
            )
        if self.cooperative and (
            self.consumer_pixels() * self.consumer_filters() * self.consumers
            != self.block_tile_shape[0] * self.block_tile_shape[1]
        ):
            return String(
                t"block_tile_shape:"
                t" {self.block_tile_shape[0]}x{self.block_tile_shape[1]} cannot"
                t" be cut into {self.consumers} equal parts"
            )
        if self.accumulators() + SPARE_REGISTERS > self.consumer_registers():
            return String(
                t"block_tile_shape: {self.accumulators()} accumulators of a"
                t" thread leave under {SPARE_REGISTERS} of its"
                t" {self.consumer_registers()} registers"
            )
        return None

    def _refused_loads(self) -> Optional[String]:
        """Why a cluster cannot load, or split, the operands so, or None."""
        if self.halo % 8 != 0 or self.halo < 0:
            return String(t"halo: {self.halo} is no multiple of 8")
        if self.act_stage_pixels() % (8 * self.cluster_shape[1]) != 0:
            return String(
                t"cluster_shape: {self.cluster_shape[1]} blocks along N cannot"
                t" each load an equal multiple of 8 of"
                t" {self.act_stage_pixels()} pixels"
            )
        if self.block_tile_shape[1] % (8 * self.cluster_shape[0]) != 0:
            return String(
                t"cluster_shape: {self.cluster_shape[0]} blocks along M cannot"
                t" each load an equal multiple of 8 of"
                t" {self.block_tile_shape[1]} filters"
            )
        if self.cluster_size() > MAX_CLUSTER:
            return String(
                t"cluster_shape: {self.cluster_size()} blocks are more than"
                t" {MAX_CLUSTER}"
            )
        if self.block_tile_shape[1] // self.cluster_shape[0] > MAX_BOX:
            return String(
                t"block_tile_shape: a box holds at most {MAX_BOX} filters"
            )
        if (
            min(self.num_act_pipeline_stages, self.num_filter_pipeline_stages)
            < 2
        ):
            return String(
                "num_act_pipeline_stages, num_filter_pipeline_stages: a ring"
                " needs at least 2"
            )
        if self.stationary and self.cluster_shape[0] > 1:
            return String("stationary: blocks that share filters reload them")
        if self.splits() and (
            self.stationary or not self.cooperative or self.cluster_size() > 1
        ):
            return String(
                "cluster_shape: no blocks along K with a stationary filter,"
                " ping-pong or shared loads"
            )
        if self.gathers():
            return self._refused_gather()
        return self._refused_split()

    def _refused_gather(self) -> Optional[String]:
        """Why threads cannot load so, or None."""
        if self.cluster_size() > 1 or self.halo > 0 or self.stationary:
            return String(
                "num_gather_stages: threads load for one block, a tap at a"
                " time, without a stationary filter"
            )
        if self.gathers_directly() and (
            min(self.num_act_pipeline_stages, self.num_filter_pipeline_stages)
            <= HELD_STAGES
        ):
            return String(
                t"num_act_pipeline_stages, num_filter_pipeline_stages: copies"
                t" run ahead in more than {HELD_STAGES}"
            )
        for axis in range(2):
            var rows = self.block_tile_shape[axis]
            if rows > WARPGROUP or rows % GATHERED_ROWS != 0:
                return String(
                    t"num_gather_stages: {rows} rows of a stage are no multiple"
                    t" of {GATHERED_ROWS}, a chunk a thread, or more than a row"
                    t" a thread"
                )
        return self._refused_split()

    def exchange_bytes_of(self, split_k: Int) -> Int:
        """Bytes that a block is sent of a tile: of every consumer, the other
        blocks' sums of the sub-tiles that it stores. Outputs of 4 bytes are cut
        finer and take no more.

        Args:
            split_k: Blocks that share the tile.
        """
        var pixels = self.epilogue.output_tile_shape[0]
        var blocks = ceildiv(self.consumer_pixels() // pixels, split_k)
        var sums = blocks * (split_k - 1) * pixels * self.consumer_filters()
        return self.consumers * sums * SUM_BYTES

    def may_split(self, split_k: Int) -> Bool:
        """Whether the rings hold what so many blocks exchange.

        Args:
            split_k: Blocks that share a tile.
        """
        return self.exchange_bytes_of(split_k) <= self.loads_bytes()

    def exchange_bytes(self) -> Int:
        """Bytes for what any number of blocks exchange that `may_split`."""
        var bytes = 0
        comptime for count in SPLIT_COUNTS:
            if self.may_split(count):
                bytes = max(bytes, self.exchange_bytes_of(count))
        return bytes

    def separate_exchange_bytes(self, visitor_bytes: Int) -> Int:
        """Bytes that a block has for the exchange alone; 0: the rings serve, once
        every block has read its own.

        Args:
            visitor_bytes: Of the block, for visitors.
        """
        var bytes = self.exchange_bytes()
        var left = MAX_SHARED_BYTES - self.shared_bytes() - visitor_bytes
        return bytes if self.splits() and bytes <= left else 0

    def own_pixels(self, split_k: Int, out_type: DType) -> Int:
        """Pixels of a consumer's part of a tile that a block stores, at most.

        Args:
            split_k: Blocks that share the tile.
            out_type: Of the output.
        """
        var pixels = self.epilogue.pixels(element_bytes(out_type))
        return ceildiv(self.consumer_pixels() // pixels, split_k) * pixels

    def _refused_split(self) -> Optional[String]:
        """Why blocks cannot share a tile so, or None."""
        var k = self.cluster_shape[2]
        if k != 1 and k != MAX_SPLIT_K:
            return String(
                t"cluster_shape: {k} blocks along K are not 1 or {MAX_SPLIT_K}"
            )
        if self.splits() and not self.may_split(2):
            return String(
                t"cluster_shape: two blocks along K exchange"
                t" {self.exchange_bytes_of(2)} bytes, but the rings have"
                t" {self.loads_bytes()}"
            )
        return None

    def write_to(self, mut writer: Some[Writer]):
        """Writes the configuration on one line."""
        var schedule = "cooperative" if self.cooperative else "ping-pong"
        var order = " swapped" if self.swapped else ""
        var gathered = String("")
        if self.gathers_directly():
            gathered = " gathered directly"
        elif self.gathers():
            gathered = String(t" gathered {self.num_gather_stages}")
        writer.write(
            t"{self.block_tile_shape[0]}x{self.block_tile_shape[1]}{order} {schedule} {self.consumers},"
            t" cluster {self.cluster_shape[0]}x{self.cluster_shape[1]}, halo"
            t" {self.halo}, stages"
            t" {self.num_act_pipeline_stages}+{self.num_filter_pipeline_stages}{' stationary' if self.stationary else ''}{' split-K' if self.splits() else ''}{gathered},"
            t" {self.epilogue}"
        )
