"""The Hopper implicit GEMM, for a tuner."""

from std.collections import Optional
from std.utils import IndexList

from .conv.fields import COPY_BYTES, KERNEL_SM90, KERNEL_UNALIGNED
from .conv.memory import element_bytes
from .conv.operands import Device, Operands
from .conv.problem import ConvProblem
from .conv.search import cheapest
from .nvidia.im2col.traversal import ROW_BYTES
from .nvidia.limits import (
    MAX_BOX,
    MAX_CLUSTER,
    MAX_MMA_N,
    MAX_SHARED_BYTES,
    PATTERN_BYTES,
    WARPGROUP,
)
from .nvidia.pipeline.async_copy import PIECE_BYTES
from .nvidia.pipeline.barrier import BARRIER_BYTES
from .nvidia.pipeline.chunks import CHUNK_BYTES
from .nvidia.sm90.gemm.config import (
    COPIED_BYTES,
    DIRECT,
    ENTRY_BYTES,
    GATHERED_ROWS,
    HELD_STAGES,
    MAX_COLUMNS,
    SPARE_REGISTERS,
    SPLIT_COUNTS,
    SUM_BYTES,
    Sm90Config,
)
from .nvidia.sm90.gemm.epilogue_config import (
    HALF_BYTES,
    MATRIX_ROWS,
    SUBTILE_FILTERS,
    EpilogueConfig,
)
from .nvidia.sm90.gemm.grid import Grid
from .nvidia.sm90.gemm.plan import GemmCandidates
from .nvidia.sm90.gemm.split_k import rounds_of
from .nvidia.sm90.wgmma import MMA_M
from .nvidia.split_k import MAX_SPLIT_K
from .tuning_space import Counts, Facts, TunedKernel, Values

comptime TunedSm90 = TunedGemm[unaligned=False]
"""For pixels that are multiples of `COPY_BYTES`."""

comptime TunedUnaligned = TunedGemm[unaligned=True]
"""For others."""

comptime HALOS = [8, 16, 24, 32]
"""Halos that a space may have, beside none."""


struct TunedGemm[*, unaligned: Bool](TunedKernel):
    """The Hopper implicit GEMM.

    Parameters:
        unaligned: Whether pixels of activation or output are no multiples of
            `COPY_BYTES`.
    """

    comptime code = KERNEL_UNALIGNED if Self.unaligned else KERNEL_SM90

    var table: GemmCandidates
    """Of which only the problem is used."""

    @staticmethod
    def fields() -> List[StaticString]:
        return [
            "block_tile_shape.m",
            "block_tile_shape.n",
            "cluster_shape.m",
            "cluster_shape.n",
            "cluster_shape.k",
            "consumers",
            "cooperative",
            "swapped",
            "halo",
            "num_act_pipeline_stages",
            "num_filter_pipeline_stages",
            "num_gather_stages",
            "stationary",
            "unaligned",
            "epilogue.output_tile_shape.m",
            "epilogue.num_epi_load_stages",
            "epilogue.num_output_stages",
            "epilogue.fragment_size",
            "epilogue.reuse_c",
            "epilogue.delay_store",
            "epilogue.tma_store",
            "epilogue.whole_rows",
            "split_k",
        ]

    @staticmethod
    def counts() -> List[StaticString]:
        return [
            "seconds",
            "shared_bytes",
            "threads",
            "accumulators",
            "consumer_registers",
            "tiles",
            "clusters",
            "waves",
            "occupancy",
            "steps",
            "products",
            "loaded_bytes",
        ]

    def __init__(
        out self, problem: ConvProblem, operands: Operands, device: Device
    ):
        self.table = GemmCandidates(
            problem, operands, device, unaligned=Self.unaligned
        )

    def problem_refusal(self) -> Optional[String]:
        comptime if Self.unaligned:
            return self.table.unaligned_refusal()
        var refusal = self.table.traversal.refusal(0)
        if refusal:
            return refusal
        return self.table.traversal.output_refusal(
            element_bytes(self.table.types.output)
        )

    def facts(self, mut facts: Facts):
        ref traversal = self.table.traversal
        facts.add("max_shared_bytes", MAX_SHARED_BYTES)
        facts.add("pattern_bytes", PATTERN_BYTES)
        facts.add("barrier_bytes", BARRIER_BYTES)
        facts.add("row_bytes", ROW_BYTES)
        facts.add("chunk_bytes", CHUNK_BYTES)
        facts.add("gathered_bytes", COPIED_BYTES + ENTRY_BYTES)
        facts.add("gathered_rows", GATHERED_ROWS)
        facts.add("direct", DIRECT)
        facts.add("held_stages", HELD_STAGES)
        facts.add("sum_bytes", SUM_BYTES)
        facts.add("warpgroup", WARPGROUP)
        facts.add("mma_m", MMA_M)
        facts.add("max_columns", MAX_COLUMNS)
        facts.add("max_box", MAX_BOX)
        facts.add("max_cluster", MAX_CLUSTER)
        facts.add("max_split_k", MAX_SPLIT_K)
        facts.add("splits", [count for count in materialize[SPLIT_COUNTS]()])
        facts.add("subtile_filters", SUBTILE_FILTERS)
        facts.add("matrix_rows", MATRIX_ROWS)
        facts.add("half_bytes", HALF_BYTES)
        facts.add("output_bytes", element_bytes(self.table.types.output))
        facts.add(
            "accumulators",
            [
                _most_accumulators(consumers, gathers)
                for gathers in range(2)
                for consumers in range(1, 3)
            ],
        )
        var bytes = element_bytes(self.table.types.input)
        facts.add("unaligned", Int(Self.unaligned))
        facts.add(
            "has_chunks",
            Int(self.table.problem.channels * bytes % COPY_BYTES == 0),
        )
        facts.add(
            "has_pieces",
            Int(self.table.problem.channels * bytes % PIECE_BYTES == 0),
        )
        facts.add("steps", traversal.steps())
        facts.add("taps_w", traversal.filter[2])
        facts.add("filters", traversal.filters)
        facts.add("groups", traversal.groups)
        facts.add("units", self.table.device.units)
        var halos: List[Int] = [0]
        var pixels: List[Int] = [traversal.pixels(0)]
        for halo in materialize[HALOS]():
            if (
                traversal.stride[2] == 1
                and traversal.filter[2] > 1
                and traversal.span(2) - 1 <= halo
                and not traversal.refusal(halo)
            ):
                halos.append(halo)
                pixels.append(traversal.pixels(halo))
        facts.add("halos", halos)
        facts.add("pixels", pixels)
        for i in range(len(self.table.rows)):
            var numbers: List[Int] = [self.table.rows[i]]
            numbers.extend(gemm_numbers(self.table.offered[i].config))
            facts.add("row", numbers)
        var tuned = self.table.tuned()
        var found = tuned.value().copy() if tuned else cheapest(self.table)
        if found.index >= 0:
            var choice: List[Int] = [
                self.table.row(found.index),
                self.table.split_k(found.index),
            ]
            facts.add("choice", choice)

    def refusal(self, values: Values) -> Optional[String]:
        var config = _config(values)
        if config.unaligned != Self.unaligned:
            return String("unaligned: the problem's pixels decide it")
        return self.table.config_refusal(config, _split_k(values))

    def count(self, values: Values, counts: Counts):
        var config = _config(values)
        var split_k = _split_k(values)
        ref traversal = self.table.traversal
        var grid = Grid.of(config, traversal, self.table.device.units, split_k)
        var waves = grid.waves()
        var steps = rounds_of(config, traversal)
        var filter_steps = traversal.steps()
        var tile = config.block_tile_shape[0] * config.block_tile_shape[1]
        var tiles = grid.tiles * config.cluster_size()
        var filters = filter_steps * config.filter_tile_dim0() * ROW_BYTES
        if grid.keeps_filters:
            filters = filters * grid.clusters // grid.tiles
        var loaded = (
            steps * config.act_tile_dim0() * ROW_BYTES + filters
        ) * tiles
        counts[unsafe_offset=0] = self.table.config_cost(config, split_k)
        counts[unsafe_offset=1] = Float64(config.shared_bytes())
        counts[unsafe_offset=2] = Float64(config.threads())
        counts[unsafe_offset=3] = Float64(config.accumulators())
        counts[unsafe_offset=4] = Float64(config.consumer_registers())
        counts[unsafe_offset=5] = Float64(grid.tiles)
        counts[unsafe_offset=6] = Float64(grid.clusters)
        counts[unsafe_offset=7] = Float64(waves)
        counts[unsafe_offset=8] = (
            Float64(grid.tiles)
            * Float64(split_k)
            / Float64(waves)
            * Float64(config.cluster_size())
            / Float64(self.table.device.units)
        )
        counts[unsafe_offset=9] = Float64(filter_steps) / Float64(split_k)
        counts[unsafe_offset=10] = (
            Float64(tiles * tile)
            * Float64(filter_steps)
            * Float64(traversal.row_channels())
        )
        counts[unsafe_offset=11] = Float64(loaded)


def _most_accumulators(consumers: Int, gathers: Int) -> Int:
    """Accumulators that a consumer's thread can have.

    Args:
        consumers: Warpgroups that multiply.
        gathers: 1 if threads load, otherwise 0.
    """
    var config = _config_of_tile(
        IndexList[2](MAX_MMA_N, MAX_MMA_N), consumers, gathers
    )
    var most = config.consumer_registers()
    if not config.gathers():
        most = max(most, config.even_registers())
    return most - SPARE_REGISTERS


def _config_of_tile(
    tile: IndexList[2], consumers: Int, gather_stages: Int
) -> Sm90Config:
    """A configuration of a tile, of which the rest does not matter."""
    return Sm90Config(
        block_tile_shape=tile,
        cluster_shape=IndexList[3](1, 1, 1),
        consumers=consumers,
        cooperative=True,
        swapped=False,
        halo=0,
        num_act_pipeline_stages=2,
        num_filter_pipeline_stages=2,
        num_gather_stages=gather_stages,
        stationary=False,
        unaligned=False,
        epilogue=EpilogueConfig(
            output_tile_shape=IndexList[2](MMA_M, SUBTILE_FILTERS),
            num_epi_load_stages=1,
            num_output_stages=1,
            fragment_size=8,
            reuse_c=True,
            delay_store=False,
            tma_store=False,
            whole_rows=False,
        ),
    )


def _config(values: Values) -> Sm90Config:
    """The configuration of the `fields`' numbers."""
    var n = List[Int]()
    for i in range(len(TunedSm90.fields())):
        n.append(Int(values[unsafe_offset=i]))
    return gemm_config(n)


def gemm_numbers(config: Sm90Config) -> List[Int]:
    """The `fields`' numbers of a configuration, but for the last, the plan's.

    Args:
        config: The configuration.
    """
    ref epilogue = config.epilogue
    return [
        config.block_tile_shape[0],
        config.block_tile_shape[1],
        config.cluster_shape[0],
        config.cluster_shape[1],
        config.cluster_shape[2],
        config.consumers,
        Int(config.cooperative),
        Int(config.swapped),
        config.halo,
        config.num_act_pipeline_stages,
        config.num_filter_pipeline_stages,
        config.num_gather_stages,
        Int(config.stationary),
        Int(config.unaligned),
        epilogue.output_tile_shape[0],
        epilogue.num_epi_load_stages,
        epilogue.num_output_stages,
        epilogue.fragment_size,
        Int(epilogue.reuse_c),
        Int(epilogue.delay_store),
        Int(epilogue.tma_store),
        Int(epilogue.whole_rows),
    ]


def gemm_config(n: List[Int]) -> Sm90Config:
    """The configuration of the `fields`' numbers.

    Args:
        n: The numbers; the last, of the plan, may be left out.
    """
    return Sm90Config(
        block_tile_shape=IndexList[2](n[0], n[1]),
        cluster_shape=IndexList[3](n[2], n[3], n[4]),
        consumers=n[5],
        cooperative=n[6] != 0,
        swapped=n[7] != 0,
        halo=n[8],
        num_act_pipeline_stages=n[9],
        num_filter_pipeline_stages=n[10],
        num_gather_stages=n[11],
        stationary=n[12] != 0,
        unaligned=n[13] != 0,
        epilogue=EpilogueConfig(
            output_tile_shape=IndexList[2](n[14], SUBTILE_FILTERS),
            num_epi_load_stages=n[15],
            num_output_stages=n[16],
            fragment_size=n[17],
            reuse_c=n[18] != 0,
            delay_store=n[19] != 0,
            tma_store=n[20] != 0,
            whole_rows=n[21] != 0,
        ),
    )


def _split_k(values: Values) -> Int:
    """Blocks that share a tile, of the `fields`' numbers."""
    return Int(values[unsafe_offset=len(TunedSm90.fields()) - 1])
