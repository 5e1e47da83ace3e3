"""The host side of the general implicit GEMM: plan and launch."""

from std.collections import Optional
from std.math import ceildiv

from ...conv.fields import KERNEL_IMPLICIT_GEMM
from ...conv.known import ANY_KERNEL, KnownFilter, KnownProblem
from ...conv.operands import Arguments, Device, Operands, OperandTypes
from ...conv.problem import ConvProblem
from ..inspect import GpuKernel, PtxWriter
from ..legality import may_fill_tiles, takes_mma_types
from ..stream import LaunchGrid, Stream
from ..geometry import GpuGeometry, geometry_refusal
from .implicit_gemm import NARROW, SMALL, VECTOR, WIDE, DirectKernel
from ..limits import MAX_BLOCKS
from .rows import THREADS, Rows

comptime TILES = [NARROW, SMALL, WIDE]
"""The tiles that are compiled."""

comptime TILE_NAMES: List[StaticString] = ["narrow", "small", "wide"]
"""What `maxconv inspect` calls them."""


@fieldwise_init
struct ImplicitGemmPlan(ImplicitlyCopyable, Movable, Writable):
    """A launch of the general implicit GEMM."""

    var geometry: GpuGeometry
    var tile: Int
    """Which of `TILES`."""
    var vector_loads: Bool
    """Whether a group's channels are a multiple of `VECTOR`, and the operands
    aligned to as many elements."""
    var vector_stores: Bool
    """The same of its filters, the output and the epilogue's operands."""
    var blocks: Int

    def write_to(self, mut writer: Some[Writer]):
        """Writes the plan on one line."""
        var tile = materialize[TILES]()[self.tile]
        writer.write(
            t"tile {tile.pixels} pixels x {tile.filters} filters, CUDA cores"
        )


struct ImplicitGemm(GpuKernel):
    """The implicit GEMM for any GPU and any problem, on CUDA cores."""

    comptime code = KERNEL_IMPLICIT_GEMM
    comptime Plan = ImplicitGemmPlan
    comptime Queue = Stream

    @staticmethod
    def type_refusal(types: OperandTypes) -> Optional[String]:
        """None: it takes every type."""
        return None

    @staticmethod
    def may_run(known: KnownProblem, types: OperandTypes) -> Bool:
        """Whether it is not certain that tensor cores take the problem, or that
        the grouped kernel runs."""
        if (
            types.input != DType.float32
            and takes_mma_types(types)
            and known.kernel != ANY_KERNEL
        ):
            return False
        return may_fill_tiles(known)

    @staticmethod
    def refusal(
        problem: ConvProblem, operands: Operands, device: Device
    ) -> Optional[String]:
        """Refuses sizes beyond 32 bits."""
        return geometry_refusal(problem)

    @staticmethod
    def plan(
        problem: ConvProblem, operands: Operands, device: Device
    ) raises -> ImplicitGemmPlan:
        """The tile for few filters, or a small tile where larger ones would
        leave multiprocessors idle."""
        var index = _choose_tile(problem, device.units)
        var tile = materialize[TILES]()[index]
        var tiles = (
            ceildiv(problem.gemm_m(), tile.pixels)
            * ceildiv(problem.gemm_n(), tile.filters)
            * problem.groups
        )
        return ImplicitGemmPlan(
            GpuGeometry(problem),
            index,
            operands.aligned() and problem.group_channels() % VECTOR == 0,
            operands.aligned() and problem.group_filters() % VECTOR == 0,
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
        """Enqueues the kernel with the plan's tile and loads; where tensor
        cores take nearly all such problems, with the one tile that is compiled.
        """
        comptime Call = type_of(arguments)
        comptime last = len(TILES) - 1
        comptime for index in range(last if known.tiled else 0, last + 1):
            comptime for width in [1, VECTOR]:
                if (known.tiled or plan.tile == index) and (
                    plan.vector_loads == (width > 1)
                ):
                    comptime tile = TILES[index]
                    comptime kernel = DirectKernel[
                        Call.Source,
                        Call.Output,
                        Call.bias_type,
                        Call.residual_type,
                        tile,
                        width,
                    ].run
                    queue.enqueue[kernel](
                        LaunchGrid(
                            plan.blocks,
                            THREADS,
                            shared_bytes=tile.staged_bytes()
                            + Rows[tile.pixels].bytes(),
                        ),
                        arguments.activation,
                        arguments.filter_elements(),
                        arguments.epilogue,
                        arguments.output,
                        plan.geometry,
                        Int32(1 if plan.vector_stores else 0),
                    )

    @staticmethod
    def inspect[dtype: DType](writer: PtxWriter[dtype]) raises:
        """Writes every tile, with loads of vectors and of elements."""
        comptime W = type_of(writer)
        comptime for index in range(len(TILES)):
            comptime tile = TILES[index]
            comptime for width in [VECTOR, 1]:
                comptime kernel = DirectKernel[
                    W.Source, W.Output, W.out_type, W.out_type, tile, width
                ].run
                comptime tile_name = TILE_NAMES[index]
                var name = String(t"implicit_gemm-{tile_name}")
                comptime if width > 1:
                    name += "-vector"
                writer.write[kernel](
                    name, tile.staged_bytes() + Rows[tile.pixels].bytes()
                )


def _choose_tile(problem: ConvProblem, multiprocessors: Int) -> Int:
    """Which of `TILES` suits a problem."""
    if problem.group_filters() <= NARROW.filters:
        return 0
    var blocks = (
        ceildiv(problem.gemm_m(), WIDE.pixels)
        * ceildiv(problem.gemm_n(), WIDE.filters)
        * problem.groups
    )
    return 1 if blocks < multiprocessors else 2
