"""Configurations of the Hopper kernel, and the only statement of what each
can take.

A configuration is a compile-time value; the geometry it is asked about is a
run-time one.
"""

from std.collections import Optional
from std.math import ceildiv
from std.utils import IndexList

from ....conv.memory import element_bytes
from ....conv.operands import OperandTypes
from ....conv.problem import ConvProblem
from ...epilogue.callbacks import EpilogueVisitor
from ...epilogue.layout import VisitLayout
from ...epilogue.params import visitor_refusal as refusal_of_visitor
from ...im2col.traversal import ROW_BYTES, Traversal
from ...limits import (
    MAX_BOX,
    MAX_INDEX,
    MAX_MMA_N,
    MAX_SHARED_BYTES,
    PATTERN_BYTES,
    WARPGROUP,
)
from ...pipeline.barrier import BARRIER_BYTES
from ...pipeline.chunks import CHUNK_BYTES
from ..wgmma import MMA_M
from .epilogue_config import (
    COLUMN_FILTERS,
    CONSUMER_THREADS,
    HALF_BYTES,
    ROW_FILTERS,
    SUBTILE_FILTERS,
    EpilogueConfig,
)

comptime BLOCK_REGISTERS = 64 * 1024
"""Registers of a multiprocessor, which one block has to itself."""

comptime SPARE_REGISTERS = 72
"""Registers of a consumer's thread beside its accumulators."""


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
    var stationary: Bool
    """Whether it is known when compiling that the filter ring holds the whole
    filter, loaded once: for problems whose filters fit one tile. Others may
    keep their filters too, as `Grid` finds."""
    var epilogue: EpilogueConfig
    """How each consumer stores its part."""

    def splits(self) -> Bool:
        """Whether blocks of a cluster may share a tile's sum."""
        return self.cluster_shape[2] > 1

    def threads(self) -> Int:
        """Threads of a block: one warpgroup produces."""
        return (1 + self.consumers) * WARPGROUP

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

    def activation_releases(self) -> Int:
        """Arrivals that empty an activation stage: each consumer of each block
        that the stage was copied to."""
        return self.tile_consumers() * self.cluster_shape[1]

    def filter_releases(self) -> Int:
        """Arrivals that empty a filter stage."""
        return self.tile_consumers() * self.cluster_shape[0]

    def even_registers(self) -> Int:
        """Registers of a thread if all have the same, in multiples of 8."""
        return BLOCK_REGISTERS // self.threads() // 8 * 8

    def moves_registers(self) -> Bool:
        """Whether consumers need more than their even part, and get what the
        producer gives back."""
        return self.accumulators() + SPARE_REGISTERS > self.even_registers()

    def producer_registers(self) -> Int:
        """Registers of a producer's thread, if they are moved."""
        return 40

    def consumer_registers(self) -> Int:
        """Registers of a consumer's thread: what the producer leaves, in
        multiples of 8, if they are moved."""
        if not self.moves_registers():
            return self.even_registers()
        var left = BLOCK_REGISTERS // WARPGROUP - self.producer_registers()
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
        if not self.stores_any_filters():
            return 0
        var bytes = self.epilogue.output_tile_shape[0] * CHUNK_BYTES
        return (bytes + PATTERN_BYTES - 1) // PATTERN_BYTES * PATTERN_BYTES

    def epilogue_bytes(self) -> Int:
        """Bytes of one consumer's buffers, and of what lies beside them."""
        return self.buffers_bytes() + self.ends_bytes()

    def exchange_barriers(self) -> Int:
        """Barriers of `split_k.SplitExchange`: one of the block, and two of
        each consumer."""
        return 1 + 2 * self.consumers if self.splits() else 0

    def ring_barriers(self) -> Int:
        """Barriers of the rings: of activations, of filters, and of each
        consumer's residual."""
        return 2 * (
            self.num_act_pipeline_stages
            + self.num_filter_pipeline_stages
            + self.epilogue.num_epi_load_stages * self.consumers
        )

    def header_bytes(self) -> Int:
        """Bytes of the barriers, rounded up to where tiles may begin."""
        var barriers = self.ring_barriers() + self.exchange_barriers()
        var bytes = barriers * BARRIER_BYTES
        return (bytes + PATTERN_BYTES - 1) // PATTERN_BYTES * PATTERN_BYTES

    def shared_bytes(self) -> Int:
        """Shared memory of a block."""
        return (
            self.header_bytes()
            + self.num_act_pipeline_stages * self.act_stage_bytes()
            + self.num_filter_pipeline_stages * self.filter_tile_bytes()
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

    def stores_any_filters(self) -> Bool:
        """Whether pixels of plain outputs, and of residuals, may be no multiple
        of `COPY_BYTES`: where threads store, and blocks share no loads. Such
        kernels take a fifth longer to compile, and those with clusters are
        never the fastest for such filters."""
        return not self.epilogue.tma_store and self.cluster_size() == 1

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
        if self.mma_columns() % 8 != 0 or self.mma_columns() > MAX_MMA_N:
            return String(
                t"columns: {self.mma_columns()} of a consumer's multiply are no"
                t" multiple of 8 up to {MAX_MMA_N}"
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
        if (
            self.splits()
            and self.accumulators() % (4 * self.cluster_shape[2]) != 0
        ):
            return String(
                t"cluster_shape: {self.cluster_shape[2]} blocks along K cannot"
                t" each add up an equal share of"
                t" {self.accumulators()} accumulators"
            )
        return None

    def write_to(self, mut writer: Some[Writer]):
        """Writes the configuration on one line."""
        var schedule = "cooperative" if self.cooperative else "ping-pong"
        var order = " swapped" if self.swapped else ""
        writer.write(
            t"{self.block_tile_shape[0]}x{self.block_tile_shape[1]}{order} {schedule} {self.consumers},"
            t" cluster {self.cluster_shape[0]}x{self.cluster_shape[1]}, halo"
            t" {self.halo}, stages"
            t" {self.num_act_pipeline_stages}+{self.num_filter_pipeline_stages}{' stationary' if self.stationary else ''}{' split-K' if self.splits() else ''},"
            t" {self.epilogue}"
        )


def problem_refusal(
    config: Sm90Config,
    traversal: Traversal,
    out_type: DType,
    *,
    whole_pieces: Bool = True,
) -> Optional[String]:
    """Why the kernel cannot take a problem, or None.

    Args:
        config: The configuration.
        traversal: Of a problem that is valid (`ConvProblem.validate`).
        out_type: Of the output: float32, or a type of 16 bits.
        whole_pieces: Whether pixels of the output must be multiples of
            `COPY_BYTES`: a visitor reads tensors of the output's shape, and
            work fused behind takes whole pieces. Threads that load rows of
            residuals and store those of plain outputs do not need it.

    Returns:
        The reason, or None if the kernel can.
    """
    var refusal = config.refusal()
    if refusal:
        return refusal
    var bytes = element_bytes(out_type)
    if not config.swapped and bytes != HALF_BYTES:
        return String(
            t"the multiply's rows must be filters for {out_type} outputs"
        )
    if whole_pieces or not config.stores_any_filters():
        refusal = traversal.output_refusal(bytes)
    if not refusal:
        refusal = traversal.refusal(config.halo)
    if not refusal:
        refusal = _halo_refusal(config, traversal)
    if not refusal:
        refusal = _stationary_refusal(config, traversal)
    if not refusal:
        refusal = _end_refusal(config, traversal)
    if refusal:
        return refusal
    var pixels = traversal.pixels(config.halo)
    if pixels + config.cluster_pixels() >= MAX_INDEX:
        return String(t"{pixels} output pixels; coordinates have 31 bits")
    return None


def stores_any_filters(types: OperandTypes) -> Bool:
    """Whether threads may store pixels that are no multiple of `COPY_BYTES`.
    With wider outputs registers would spill; fused work takes whole pieces.

    Args:
        types: Of the operands.
    """
    return element_bytes(types.output) == HALF_BYTES and not types.fused_output


def layout_of(config: Sm90Config, out_type: DType) -> VisitLayout:
    """How a consumer's values are cut up, for visitors.

    Args:
        config: The configuration.
        out_type: Of output and residual.
    """
    return VisitLayout(
        pixels=config.epilogue.pixels(element_bytes(out_type)),
        filters=SUBTILE_FILTERS,
        filter_subtiles=config.filter_subtiles(),
        threads=CONSUMER_THREADS,
        thread_filters=ROW_FILTERS if config.swapped else COLUMN_FILTERS,
        out_type=out_type,
        delayed=config.epilogue.delay_store,
    )


def visitor_refusal[
    Visitor: EpilogueVisitor, //
](
    visitor: Visitor,
    config: Sm90Config,
    problem: ConvProblem,
    out_type: DType,
) -> Optional[String]:
    """Why a configuration cannot run with a visitor.

    Args:
        visitor: The visitor.
        config: The configuration, which does not refuse the problem.
        problem: The convolution.
        out_type: Of the output.

    Returns:
        The reason, or None if it can.
    """
    if config.ends_filters() and not Visitor.any_filters:
        return String(
            t"block_tile_shape: N {config.block_tile_shape[1]} is no multiple"
            t" of {SUBTILE_FILTERS}, which the visitor does not take"
        )
    return refusal_of_visitor(
        visitor,
        layout_of(config, out_type),
        problem,
        consumers=config.consumers,
        shared_bytes=config.shared_bytes(),
        epi_load_stages=config.epilogue.num_epi_load_stages,
    )


def _halo_refusal(config: Sm90Config, traversal: Traversal) -> Optional[String]:
    """Why a stage with a halo does not serve a filter row."""
    if config.halo == 0:
        return None
    if traversal.stride[2] != 1:
        return String(
            t"a halo needs stride 1 along w; here {traversal.stride[2]}"
        )
    if traversal.span(2) - 1 > config.halo:
        return String(
            t"a halo of {config.halo} pixels does not hold the filter's span of"
            t" {traversal.span(2)} along w"
        )
    return None


def _end_refusal(config: Sm90Config, traversal: Traversal) -> Optional[String]:
    """Why tiles do not end where sub-tiles do not."""
    if not config.ends_filters():
        return None
    var tile = config.block_tile_shape[1]
    if traversal.groups != 1 or traversal.filters % tile != 0:
        return String(
            t"a tile of {tile} filters takes multiples of as many, in one"
            t" group; here {traversal.filters} in each of {traversal.groups}"
        )
    return None


def _stationary_refusal(
    config: Sm90Config, traversal: Traversal
) -> Optional[String]:
    """Why the filter ring does not hold the whole filter."""
    if not config.stationary:
        return None
    if traversal.groups != 1:
        return String(
            t"a stationary filter has one group; here {traversal.groups}"
        )
    var steps = traversal.steps()
    if steps > config.num_filter_pipeline_stages:
        return String(
            t"a stationary filter has at most"
            t" {config.num_filter_pipeline_stages} stages; here {steps}"
        )
    if traversal.filters > config.cluster_filters():
        return String(
            t"a stationary filter has at most"
            t" {config.cluster_filters()} filters; here"
            t" {traversal.filters}"
        )
    return None
