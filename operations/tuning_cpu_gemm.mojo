"""The implicit GEMM of the CPU, for a tuner."""

from std.collections import Optional
from std.math import ceildiv
from std.sys.info import size_of

from .conv.fields import KERNEL_IMPLICIT_GEMM, PANEL
from .conv.operands import Device, Operands
from .conv.problem import ConvProblem
from .cpu.config import CPU_TILE
from .cpu.gemm.candidates import (
    MAX_BLOCK_ELEMENTS,
    blocking_cost,
    choose_blocking,
)
from .cpu.gemm.cut import NamedCut, access_refusal, line_tiling, longest_depth
from .cpu.gemm.launch import ImplicitGemm
from .cpu.gemm.scheduler import (
    ACCESS_GATHER,
    ACCESS_MATRIX,
    ACCESS_STRIPS,
    MAX_BLOCK_TILES,
    STORED_SUMS,
    gathered_stride,
)
from .cpu.gemm.strips import strip_elements
from .cpu.gemm.mma import tile_rows
from .cpu.openmp import OpenMpPool
from .tuning_cut import cut_of, kernel_refusal, write_task_counts
from .tuning_space import Counts, Facts, TunedKernel, Values


struct TunedCpuGemm(TunedKernel):
    """The implicit GEMM of the CPU."""

    comptime code = KERNEL_IMPLICIT_GEMM

    var problem: ConvProblem
    var operands: Operands
    var device: Device

    @staticmethod
    def fields() -> List[StaticString]:
        return NamedCut.fields()

    @staticmethod
    def counts() -> List[StaticString]:
        return [
            "multiply_adds",
            "tasks",
            "waves",
            "occupancy",
            "scratch_bytes",
            "sums",
            "slices",
            "products",
            "loaded_bytes",
        ]

    def __init__(
        out self, problem: ConvProblem, operands: Operands, device: Device
    ):
        self.problem = problem
        self.operands = operands
        self.device = device

    def problem_refusal(self) -> Optional[String]:
        return kernel_refusal[ImplicitGemm[OpenMpPool]](
            self.problem, self.operands, self.device
        )

    def facts(self, mut facts: Facts):
        ref problem = self.problem
        var types = self.operands.types
        facts.add("panel", PANEL)
        facts.add("unit_columns", CPU_TILE.columns())
        facts.add("max_sums", CPU_TILE.max_accumulators)
        facts.add("max_block_elements", MAX_BLOCK_ELEMENTS)
        facts.add("max_tiles", MAX_BLOCK_TILES)
        # What is stored together, where no sum outlives its tile.
        facts.add("stored_sums", STORED_SUMS)
        facts.add("strips", ACCESS_STRIPS)
        facts.add("units", ceildiv(problem.panels(), CPU_TILE.panels))
        facts.add("groups", problem.groups)
        facts.add("products", problem.panel_layout(types.input).depth())
        var access = List[Int]()
        for code in [ACCESS_GATHER, ACCESS_STRIPS, ACCESS_MATRIX]:
            if not access_refusal(problem, types, code):
                access.append(code)
        facts.add("access", access)
        var rows: List[Int] = [1]
        for count in range(2, CPU_TILE.rows + 1):
            if tile_rows(count) == count:
                rows.append(count)
        facts.add("tile_rows", rows)
        # Of each access and tile: how many tiles there are, 0 if none is so.
        for code in access:
            var tiles = List[Int]()
            for count in rows:
                var tiling = line_tiling(problem, code, count)
                tiles.append(tiling.tiles() if tiling.rows == count else 0)
            facts.add("tiles_of_rows", tiles)
            facts.add("longest_depth", longest_depth(problem, types, code))
        var panel = problem.panel_layout(types.input)
        var depths = self._depths(access)
        facts.add("depths", depths)
        var strides = List[Int]()
        for depth in depths:
            strides.append(gathered_stride(depth, size_of[DType.float32]()))
        facts.add("gathered_strides", strides)
        # Of each depth and tile, for one group.
        for depth in depths:
            var elements = List[Int]()
            for count in rows:
                elements.append(strip_elements(problem, panel, count, depth, 1))
            facts.add("strip_elements", elements)

    def _depths(self, access: List[Int]) -> List[Int]:
        """Depths of slices of about one length, the longest first."""
        var types = self.operands.types
        var products = self.problem.panel_layout(types.input).depth()
        var longest = 0
        for code in access:
            longest = max(longest, longest_depth(self.problem, types, code))
        var depths = List[Int]()
        for slices in range(1, ceildiv(products, PANEL) + 1):
            var depth = ceildiv(ceildiv(products, slices), PANEL) * PANEL
            if depth > longest:
                continue
            if len(depths) == 0 or depths[len(depths) - 1] != depth:
                depths.append(depth)
        return depths^

    def refusal(self, values: Values) -> Optional[String]:
        var cut = cut_of[NamedCut](values)
        return cut.refusal(self.problem, self.operands.types)

    def choice(self) -> List[Int]:
        var types = self.operands.types
        var blocking = choose_blocking(self.problem, types, self.device.units)
        return NamedCut.of(blocking).numbers()

    def count(self, values: Values, counts: Counts):
        ref problem = self.problem
        var blocking = cut_of[NamedCut](values).blocking(
            problem, self.operands.types
        )
        var threads = self.device.units
        var tasks = blocking.tasks()
        var scratch = blocking.activations() + blocking.sums()
        var rows = blocking.tiles * blocking.tiling.rows
        var columns = blocking.panels * PANEL
        var groups = blocking.group_count
        counts[unsafe_offset=0] = blocking_cost(blocking, threads)
        write_task_counts(counts.unsafe_offset(1), tasks, threads)
        counts[unsafe_offset=4] = Float64(scratch * size_of[DType.float32]())
        counts[unsafe_offset=5] = Float64(blocking.sums())
        counts[unsafe_offset=6] = Float64(
            ceildiv(blocking.products, blocking.depth)
        )
        counts[unsafe_offset=7] = (
            Float64(rows * columns * groups)
            * Float64(blocking.products)
            * Float64(tasks)
        )
        counts[unsafe_offset=8] = (
            Float64((rows + columns) * groups * size_of[DType.float32]())
            * Float64(blocking.products)
            * Float64(tasks)
        )
