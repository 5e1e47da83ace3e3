"""The host side of the grouped kernel: plan and launch."""

from std.collections import Optional
from std.math import ceildiv

from ...conv.fields import KERNEL_GROUPED, TILE_FILTERS
from ...conv.known import KnownFilter, KnownProblem
from ...conv.operands import Arguments, Device, Operands, OperandTypes
from ...conv.problem import ConvProblem
from ..inspect import GpuKernel, PtxWriter
from ..stream import LaunchGrid, Stream
from ..geometry import GpuGeometry, geometry_refusal
from .grouped import COLUMNS, PIXELS, VECTOR, GroupedKernel
from ..limits import MAX_BLOCKS
from .rows import THREADS, Rows


@fieldwise_init
struct GroupedPlan(ImplicitlyCopyable, Movable, Writable):
    """A launch of the grouped kernel."""

    var geometry: GpuGeometry
    var group_filters: Int
    var vector_loads: Bool
    """Whether a group's channels are a multiple of `VECTOR`, and the operands
    aligned to as many elements."""
    var blocks: Int

    def write_to(self, mut writer: Some[Writer]):
        """Writes the plan on one line."""
        writer.write(
            t"groups of {self.group_filters} filters: neighbouring threads"
            t" compute neighbouring filters"
        )


struct Grouped(GpuKernel):
    """Groups of few filters, on CUDA cores."""

    comptime code = KERNEL_GROUPED
    comptime Plan = GroupedPlan
    comptime Queue = Stream

    @staticmethod
    def type_refusal(types: OperandTypes) -> Optional[String]:
        """None: it takes every type."""
        return None

    @staticmethod
    def may_run(known: KnownProblem, types: OperandTypes) -> Bool:
        """Whether groups may have fewer filters than fill a tile."""
        return known.groups != 1 and known.filters < TILE_FILTERS

    @staticmethod
    def refusal(
        problem: ConvProblem, operands: Operands, device: Device
    ) -> Optional[String]:
        """Refuses sizes beyond 32 bits."""
        return geometry_refusal(problem)

    @staticmethod
    def suits(problem: ConvProblem, operands: Operands, device: Device) -> Bool:
        """Whether groups have fewer filters than fill a tile of the implicit
        GEMM."""
        return problem.groups > 1 and problem.group_filters() < TILE_FILTERS

    @staticmethod
    def plan(
        problem: ConvProblem, operands: Operands, device: Device
    ) raises -> GroupedPlan:
        """Tiles of pixels by neighbouring filters, whichever groups'."""
        var tiles = ceildiv(problem.gemm_m(), PIXELS) * ceildiv(
            problem.filters, COLUMNS
        )
        return GroupedPlan(
            GpuGeometry(problem),
            problem.group_filters(),
            operands.aligned() and problem.group_channels() % VECTOR == 0,
            min(tiles, MAX_BLOCKS),
        )

    @staticmethod
    def launch[
        known: KnownFilter, scaled: Bool
    ](
        plan: Self.Plan,
        problem: ConvProblem,
        arguments: Arguments,
        mut queue: Stream,
    ) raises:
        """Enqueues the kernel."""
        comptime Call = type_of(arguments)
        comptime for width in [1, VECTOR]:
            if plan.vector_loads == (width > 1):
                comptime kernel = GroupedKernel[
                    Call.Source,
                    Call.Output,
                    Call.bias_type,
                    Call.residual_type,
                    width,
                ].run
                queue.enqueue[kernel](
                    LaunchGrid(
                        plan.blocks,
                        THREADS,
                        shared_bytes=Rows[PIXELS].bytes(),
                    ),
                    arguments.activation,
                    arguments.filter_elements(),
                    arguments.epilogue,
                    arguments.output,
                    plan.geometry,
                )

    @staticmethod
    def inspect[dtype: DType](writer: PtxWriter[dtype]) raises:
        """Writes the kernel, with loads of elements and of vectors."""
        comptime W = type_of(writer)
        comptime for width in [1, VECTOR]:
            comptime kernel = GroupedKernel[
                W.Source, W.Output, W.out_type, W.out_type, width
            ].run
            writer.write[kernel](
                "grouped-vector" if width > 1 else "grouped",
                Rows[PIXELS].bytes(),
            )
