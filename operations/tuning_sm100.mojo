"""The Blackwell implicit GEMM, for a tuner."""

from std.collections import Optional
from std.utils import IndexList

from .conv.fields import KERNEL_SM100
from .conv.memory import element_bytes
from .conv.operands import Device, Operands
from .conv.problem import ConvProblem
from .nvidia.im2col.traversal import ROW_BYTES
from .nvidia.limits import (
    MAX_CLUSTER,
    MAX_MMA_N,
    MAX_SHARED_BYTES,
    MMA_K_BYTES,
    PATTERN_BYTES,
)
from .nvidia.pipeline.barrier import BARRIER_BYTES
from .nvidia.sm100.config import (
    CLC_RESPONSE_BYTES,
    MAX_BANDS,
    MAX_GROUPS,
    SUM_BYTES,
    TMEM_COLUMNS,
    TMEM_LANES,
    Conv2dConfig,
    GemmTypes,
)
from .nvidia.sm100.model import predict
from .nvidia.sm100.plan import GemmCandidates
from .tuning_space import Counts, Facts, TunedKernel, Values


struct TunedSm100(TunedKernel):
    """The Blackwell implicit GEMM."""

    comptime code = KERNEL_SM100

    var table: GemmCandidates
    """Of which only the problem is used."""
    var types: GemmTypes

    @staticmethod
    def fields() -> List[StaticString]:
        return [
            "block_tile_shape.n",
            "mma_shape.m",
            "mma_shape.n",
            "output_tile_shape.n",
            "cluster_shape.m",
            "cluster_shape.n",
            "cluster_shape.k",
            "cta_group",
            "k_group_size",
            "num_pipeline_stages",
            "num_accum_pipeline_stages",
            "num_clc_pipeline_stages",
            "num_output_stages",
            "num_epi_load_stages",
            "block_swizzle_size",
        ]

    @staticmethod
    def counts() -> List[StaticString]:
        return [
            "seconds",
            "shared_bytes",
            "tiles",
            "waves",
            "occupancy",
            "steps",
            "products",
            "loaded_bytes",
            "multiply_cycles",
            "load_cycles",
            "store_cycles",
        ]

    def __init__(
        out self, problem: ConvProblem, operands: Operands, device: Device
    ):
        self.table = GemmCandidates(problem, operands, device)
        self.types = GemmTypes.of(operands.types)

    def problem_refusal(self) -> Optional[String]:
        var refusal = self.types.refusal()
        if refusal:
            return refusal
        var traversal = self._any().traversal(self.table.problem)
        var refused = traversal.output_refusal(element_bytes(self.types.out))
        return refused if refused else traversal.refusal(0)

    def facts(self, mut facts: Facts):
        var traversal = self._any().traversal(self.table.problem)
        facts.add("max_shared_bytes", MAX_SHARED_BYTES)
        facts.add("pattern_bytes", PATTERN_BYTES)
        facts.add("barrier_bytes", BARRIER_BYTES)
        facts.add("address_bytes", 4)
        facts.add("response_bytes", CLC_RESPONSE_BYTES)
        facts.add("row_bytes", ROW_BYTES)
        facts.add("sum_bytes", SUM_BYTES)
        facts.add("output_bytes", element_bytes(self.types.out))
        facts.add("max_cluster", MAX_CLUSTER)
        facts.add("max_mma_n", MAX_MMA_N)
        facts.add("max_groups", MAX_GROUPS)
        facts.add("max_bands", MAX_BANDS)
        facts.add("tmem_columns", TMEM_COLUMNS)
        facts.add("tmem_lanes", TMEM_LANES)
        facts.add("steps", traversal.steps())
        facts.add("pixels", traversal.pixels(0))
        facts.add("filters", traversal.filters)
        facts.add("groups", traversal.groups)
        facts.add("units", self.table.device.units)
        facts.add("residual", Int(self.table.residual))

    def refusal(self, values: Values) -> Optional[String]:
        return self.table.config_refusal(self._config(values))

    def count(self, values: Values, counts: Counts):
        var config = self._config(values)
        var units = self.table.device.units
        var found = predict(
            config, self.table.problem, units, self.table.residual
        )
        var traversal = config.traversal(self.table.problem)
        var blocks = config.blocks(traversal)
        var steps = Float64(traversal.steps()) / Float64(config.split_k())
        var loaded = (
            config.act_tile_dim0() + config.filter_tile_dim0()
        ) * ROW_BYTES
        var tile = config.block_tile_shape[0] * config.mma_shape[1]
        counts[unsafe_offset=0] = found.seconds
        counts[unsafe_offset=1] = Float64(config.shared_bytes())
        counts[unsafe_offset=2] = Float64(found.tiles)
        counts[unsafe_offset=3] = Float64(found.waves)
        counts[unsafe_offset=4] = Float64(blocks) / Float64(found.waves * units)
        counts[unsafe_offset=5] = steps
        counts[unsafe_offset=6] = (
            Float64(blocks * tile) * steps * Float64(traversal.row_channels())
        )
        counts[unsafe_offset=7] = Float64(blocks * loaded) * steps
        counts[unsafe_offset=8] = found.multiply
        counts[unsafe_offset=9] = found.load
        counts[unsafe_offset=10] = found.store

    def _any(self) -> Conv2dConfig:
        """A configuration of the types."""
        return Conv2dConfig.default_1sm(self.types)

    def _config(self, values: Values) -> Conv2dConfig:
        """The configuration of the `fields`' numbers; of the rest there is no
        choice."""
        var n = List[Int]()
        for i in range(len(Self.fields())):
            n.append(Int(values[unsafe_offset=i]))
        var bytes = element_bytes(self.types.act)
        return Conv2dConfig(
            types=self.types,
            block_tile_shape=IndexList[3](TMEM_LANES, n[0], ROW_BYTES // bytes),
            mma_shape=IndexList[3](n[1], n[2], MMA_K_BYTES // bytes),
            output_tile_shape=IndexList[2](TMEM_LANES, n[3]),
            cluster_shape=IndexList[3](n[4], n[5], n[6]),
            cta_group=n[7],
            k_group_size=n[8],
            num_pipeline_stages=n[9],
            num_accum_pipeline_stages=n[10],
            num_clc_pipeline_stages=n[11],
            num_output_stages=n[12],
            num_epi_load_stages=n[13],
            block_swizzle_size=n[14],
        )
