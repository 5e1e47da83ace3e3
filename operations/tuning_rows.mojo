"""The direct kernels of the CPU, for a tuner."""

from std.collections import Optional
from std.math import ceildiv

from .conv.operands import Device, Operands
from .conv.problem import ConvProblem
from .cpu.direct.cut import RowCut, image_rows
from .cpu.direct.image_row import COLUMNS
from .cpu.direct.launch import (
    MAX_TASK_ROWS,
    MIN_TASK_COLUMNS,
    RowKernel,
    RowPlan,
)
from .tuning_cut import (
    cut_of,
    equal_parts,
    kernel_refusal,
    write_task_counts,
)
from .tuning_space import Counts, Facts, TunedKernel, Values

comptime TASK_PRODUCTS = 1 << 12
"""Multiply-adds that a task's beginning takes the time of: a guess, as there is
no model of these kernels."""


struct TunedRows[Kernel: RowKernel](TunedKernel):
    """A direct kernel of the CPU.

    Parameters:
        Kernel: Which.
    """

    comptime code = Self.Kernel.code

    var problem: ConvProblem
    var operands: Operands
    var device: Device

    @staticmethod
    def fields() -> List[StaticString]:
        return RowCut.fields()

    @staticmethod
    def counts() -> List[StaticString]:
        return ["products", "tasks", "waves", "occupancy", "outputs"]

    def __init__(
        out self, problem: ConvProblem, operands: Operands, device: Device
    ):
        self.problem = problem
        self.operands = operands
        self.device = device

    def problem_refusal(self) -> Optional[String]:
        return kernel_refusal[Self.Kernel](
            self.problem, self.operands, self.device
        )

    def facts(self, mut facts: Facts):
        ref problem = self.problem
        var choices: List[Int] = [1]
        comptime unit = Self.Kernel.filter_unit
        comptime if unit > 0:
            choices = [0, 1]
        facts.add("cuts_columns", choices)
        var rows = equal_parts(image_rows(problem))
        for count in range(1, min(MAX_TASK_ROWS, image_rows(problem)) + 1):
            rows.append(count)
        facts.add("rows", rows)
        for cuts_columns in choices:
            var size = COLUMNS if cuts_columns == 1 else unit
            var extent = (
                problem.output[2] if cuts_columns == 1 else problem.filters
            )
            var blocks = List[Int]()
            for part in equal_parts(ceildiv(extent, size)):
                blocks.append(part * size)
            # As the kernel's own search has them.
            if cuts_columns == 1:
                for part in equal_parts(ceildiv(extent, MIN_TASK_COLUMNS)):
                    if part * MIN_TASK_COLUMNS < blocks[0]:
                        blocks.append(part * MIN_TASK_COLUMNS)
            facts.add("blocks", blocks)
            facts.add("block_unit", size)
            facts.add("most_block", blocks[0])

    def refusal(self, values: Values) -> Optional[String]:
        var cut = cut_of[RowCut](values)
        return cut.refusal(self.problem, Self.Kernel.filter_unit)

    def choice(self) -> List[Int]:
        return Self.Kernel.choice(self.problem, self.device.units).numbers()

    def count(self, values: Values, counts: Counts):
        ref problem = self.problem
        var threads = self.device.units
        var cut = cut_of[RowCut](values)
        var plan = RowPlan(problem, cut, threads)
        var tasks = plan.schedule.tasks
        var across = problem.filters if cut.cuts_columns == 1 else (
            problem.output[2]
        )
        var outputs = cut.rows * min(cut.block, plan.extent) * across
        var task = outputs * problem.gemm_k() + TASK_PRODUCTS
        counts[unsafe_offset=0] = Float64(ceildiv(tasks, threads) * task)
        write_task_counts(counts.unsafe_offset(1), tasks, threads)
        counts[unsafe_offset=4] = Float64(outputs)
