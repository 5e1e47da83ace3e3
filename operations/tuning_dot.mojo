"""The dot-product GEMM of the CPU, for a tuner."""

from std.collections import Optional
from std.math import ceildiv

from .conv.fields import PANEL
from .conv.memory import element_bytes
from .conv.operands import Device, Operands
from .conv.panels import chunk_products
from .conv.problem import ConvProblem
from .cpu.dot.block_diagonal import multiplied_problem
from .cpu.dot.candidates import (
    Extents,
    access_refusal,
    block_bytes,
    blocking_cycles,
    choose_blocking,
    groups_together,
)
from .cpu.dot.cut import DotCut
from .cpu.dot.launch import DotProduct
from .cpu.dot.mma import MAX_BLOCK_BYTES, DotUnit
from .cpu.dot.scheduler import (
    ACCESS_GATHER,
    ACCESS_IMAGE,
    ACCESS_LINES,
    ACCESS_MATRIX,
)
from .cpu.gemm.scheduler import gathered_stride
from .cpu.gemm.tile_io import copy_width
from .cpu.openmp import OpenMpPool
from .tuning_cut import (
    cut_of,
    equal_parts,
    kernel_refusal,
    write_task_counts,
)
from .tuning_space import Counts, Facts, TunedKernel, Values


struct TunedDot[U: DotUnit](TunedKernel):
    """The dot-product GEMM of the CPU.

    Parameters:
        U: The instructions.
    """

    comptime code = Self.U.kernel
    comptime is_built = not Self.U.build_refusal()

    var problem: ConvProblem
    """As the caller states it."""
    var multiplied: ConvProblem
    """As the unit multiplies it."""
    var operands: Operands
    var device: Device

    @staticmethod
    def fields() -> List[StaticString]:
        return DotCut.fields()

    @staticmethod
    def counts() -> List[StaticString]:
        return [
            "cycles",
            "tasks",
            "waves",
            "occupancy",
            "block_bytes",
            "positions",
            "filter_bytes",
        ]

    def __init__(
        out self, problem: ConvProblem, operands: Operands, device: Device
    ):
        self.problem = problem
        self.multiplied = multiplied_problem[Self.U](
            problem, operands.types.input
        )
        self.operands = operands
        self.device = device

    def problem_refusal(self) -> Optional[String]:
        return kernel_refusal[DotProduct[OpenMpPool, Self.U]](
            self.problem, self.operands, self.device
        )

    def facts(self, mut facts: Facts):
        ref problem = self.multiplied
        var types = self.operands.types
        facts.add("rows", Self.U.rows)
        facts.add("panels", Self.U.panels)
        facts.add("units", ceildiv(problem.panels(), Self.U.panels))
        facts.add("threads", self.device.units)
        facts.add("max_block_bytes", MAX_BLOCK_BYTES)
        facts.add("image", ACCESS_IMAGE)
        var access = List[Int]()
        for code in [ACCESS_GATHER, ACCESS_IMAGE, ACCESS_MATRIX, ACCESS_LINES]:
            if not access_refusal[Self.U](problem, types, code):
                access.append(code)
        facts.add("access", access)
        # Of each access: what a block may have, and its bytes beside those that
        # grow with its columns.
        for code in access:
            var extents = Extents.of(problem, code)
            facts.add("most_lines", extents.height)
            facts.add("most_columns", extents.width)
        var image = Extents.of(problem, ACCESS_IMAGE)
        facts.add("lines", equal_parts(image.height))
        var columns = equal_parts(problem.gemm_m())
        if ACCESS_IMAGE in access or ACCESS_LINES in access:
            columns += equal_parts(image.width)
        facts.add("columns", columns)
        self._bytes(facts, access)

    def _bytes(self, mut facts: Facts, access: List[Int]):
        """Adds what a block's bytes are counted by: of an image's rectangle by
        its input pixels, otherwise by its columns."""
        ref problem = self.multiplied
        var types = self.operands.types
        var element = Self.U.spread(types.input) * element_bytes(types.input)
        # Rectangles of a task's groups are copied together.
        var groups = groups_together(problem, types)
        for code in access:
            var bytes = element * problem.channels
            if code == ACCESS_GATHER or code == ACCESS_LINES:
                var depth = problem.panel_layout(types.input).depth()
                bytes = element * gathered_stride(
                    depth, element_bytes(types.input)
                )
            if code == ACCESS_IMAGE:
                bytes = element * problem.filter[0] * problem.group_channels()
                bytes *= groups
            facts.add("pixel_bytes", bytes)
        facts.add(
            "rectangle_rest",
            groups
            * element
            * (chunk_products(types.input) + copy_width(types.input)),
        )
        facts.add("line_stride", problem.stride[1])
        facts.add("line_span", problem.span(1))
        facts.add("column_stride", problem.stride[2])
        facts.add("column_span", problem.span(2))

    def refusal(self, values: Values) -> Optional[String]:
        return cut_of[DotCut](values).refusal[Self.U](
            self.multiplied, self.operands.types, self.device.units
        )

    def choice(self) -> List[Int]:
        var chosen = choose_blocking[Self.U](
            self.multiplied,
            self.operands.types,
            self.device.units,
            OpenMpPool.wake_cycles,
        )
        return DotCut.of[Self.U](chosen.blocking, chosen.threads).numbers()

    def count(self, values: Values, counts: Counts):
        ref problem = self.multiplied
        var types = self.operands.types
        var named = cut_of[DotCut](values)
        var blocking = named.blocking[Self.U](problem, types)
        var cycles = blocking_cycles[Self.U](
            problem, types, blocking, named.threads
        )
        if named.threads > 1:
            cycles += OpenMpPool.wake_cycles
        counts[unsafe_offset=0] = cycles
        write_task_counts(
            counts.unsafe_offset(1), blocking.tasks(problem), named.threads
        )
        ref cut = blocking.cut
        counts[unsafe_offset=4] = Float64(
            block_bytes(
                blocking,
                Self.U.spread(types.input) * element_bytes(types.input),
            )
        )
        counts[unsafe_offset=5] = Float64(
            blocking.positions(cut.lines, cut.columns)
        )
        counts[unsafe_offset=6] = Float64(
            cut.panels * PANEL * blocking.depth * element_bytes(types.input)
        )
