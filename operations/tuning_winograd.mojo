"""The Winograd kernel of the CPU, for a tuner."""

from std.collections import Optional
from std.math import ceildiv
from std.sys.info import size_of

from .conv.fields import KERNEL_WINOGRAD, PANEL
from .conv.operands import Device, Operands
from .conv.problem import ConvProblem
from .cpu.config import CPU_TILE
from .cpu.gemm.scheduler import gathered_stride
from .cpu.openmp import OpenMpPool
from .cpu.winograd.candidates import (
    OWN_ELEMENTS,
    choose_cut,
    cut_cost,
    transformed_inputs,
)
from .cpu.winograd.cut import MOST_UNITS_AT_ONCE, WinogradCut, most_tiles
from .cpu.winograd.launch import Winograd
from .cpu.winograd.scheduler import (
    WinogradPlan,
    position_depth,
    transformed_bytes,
)
from .cpu.winograd.transforms import POSITIONS
from .tuning_cut import (
    cut_of,
    equal_parts,
    kernel_refusal,
    write_task_counts,
)
from .tuning_space import Counts, Facts, TunedKernel, Values


struct TunedWinograd(TunedKernel):
    """The Winograd kernel of the CPU."""

    comptime code = KERNEL_WINOGRAD

    var problem: ConvProblem
    var operands: Operands
    var device: Device

    @staticmethod
    def fields() -> List[StaticString]:
        return WinogradCut.fields()

    @staticmethod
    def counts() -> List[StaticString]:
        return [
            "steps",
            "tasks",
            "waves",
            "occupancy",
            "scratch_bytes",
            "input_bytes",
            "sums_bytes",
        ]

    def __init__(
        out self, problem: ConvProblem, operands: Operands, device: Device
    ):
        self.problem = problem
        self.operands = operands
        self.device = device

    def problem_refusal(self) -> Optional[String]:
        return kernel_refusal[Winograd[OpenMpPool]](
            self.problem, self.operands, self.device
        )

    def facts(self, mut facts: Facts):
        ref problem = self.problem
        var input = self.operands.types.input
        var depth = position_depth(problem)
        facts.add("panel", PANEL)
        facts.add("tile_panels", CPU_TILE.panels)
        facts.add("depth", depth)
        facts.add("units", ceildiv(problem.panels(), CPU_TILE.panels))
        facts.add("most_units_at_once", MOST_UNITS_AT_ONCE)
        var stride = gathered_stride(depth, transformed_bytes(input))
        facts.add("tile_inputs", POSITIONS * stride)
        facts.add("least_tiles", CPU_TILE.rows)
        facts.add("own_inputs", OWN_ELEMENTS)
        var tiles = List[Int]()
        for count in range(
            CPU_TILE.rows, most_tiles(problem) + 1, CPU_TILE.rows
        ):
            tiles.append(count)
        facts.add("tiles", tiles)
        var slices: List[Int] = [depth]
        for size in equal_parts(ceildiv(depth, PANEL)):
            if size * PANEL < depth:
                slices.append(size * PANEL)
        facts.add("slices", slices)
        # Whether inputs may be shared depends on the problem alone.
        var shares: List[Int] = [0]
        var shared = WinogradCut(1, CPU_TILE.rows, 1, 1, depth)
        if not shared.refusal(problem, input):
            shares.append(1)
        facts.add("shares_input", shares)

    def refusal(self, values: Values) -> Optional[String]:
        return cut_of[WinogradCut](values).refusal(
            self.problem, self.operands.types.input
        )

    def choice(self) -> List[Int]:
        var input = self.operands.types.input
        return WinogradCut.of(
            choose_cut(self.problem, input, self.device.units)
        ).numbers()

    def count(self, values: Values, counts: Counts):
        var input = self.operands.types.input
        var threads = self.device.units
        var cut = cut_of[WinogradCut](values).cut(self.problem)
        var plan = WinogradPlan(self.problem, input, cut, threads)
        ref schedule = plan.multiplication
        counts[unsafe_offset=0] = cut_cost(self.problem, input, threads, cut)
        write_task_counts(counts.unsafe_offset(1), schedule.tasks, threads)
        counts[unsafe_offset=4] = Float64(
            schedule.scratch * size_of[DType.float32]()
        )
        counts[unsafe_offset=5] = Float64(
            transformed_inputs(self.problem, input, cut)
            * transformed_bytes(input)
        )
        counts[unsafe_offset=6] = Float64(
            ceildiv(cut.panels_at_once, CPU_TILE.panels)
            * plan.sums.elements()
            * size_of[DType.float32]()
        )
