"""The host side of the implicit GEMM on any GPU's tensor cores: plan and launch.
"""

from std.collections import Optional
from std.sys.info import size_of

from ...conv.fields import KERNEL_SM80, TILE_FILTERS
from ...conv.known import KnownFilter, KnownProblem
from ...conv.memory import element_bytes
from ...conv.operands import Arguments, Device, Operands, OperandTypes
from ...conv.problem import ConvProblem
from ...conv.kernel import kernel_name
from ..device import is_hopper
from ..inspect import GpuKernel, PtxWriter
from ..legality import may_fill_tiles, precision_refusal, takes_mma_types
from ..pipeline.chunks import CHUNK_BYTES
from ..stream import LaunchGrid, Stream
from .geometry import MmaGeometry, mma_geometry_refusal
from .kernel import MmaKernel
from .model import (
    COMPARED_SECONDS,
    fastest_tile,
    loads_chunks,
    loads_words,
)
from .tile import SMALL, SQUARE, TALL, TILES, MmaTile

comptime TILE_NAMES: List[StaticString] = ["large", "square", "tall", "small"]
"""What `maxconv inspect` calls them."""


@fieldwise_init
struct MmaPlan(ImplicitlyCopyable, Movable, Writable):
    """A launch of the implicit GEMM on any GPU's tensor cores."""

    var geometry: MmaGeometry
    var tile: Int
    """Which of `TILES`."""
    var whole: Bool
    """Whether a group's channels are whole chunks, and the operands aligned."""
    var vector_stores: Bool
    """The same of its filters, the output and the epilogue's operands."""
    var seconds: Float64
    """The model's, or 0 where it is not compared with another kernel's."""

    def write_to(self, mut writer: Some[Writer]):
        """Writes the plan on one line."""
        var tile = materialize[TILES]()[self.tile]
        writer.write(
            t"tile {tile.pixels} pixels x {tile.filters} filters,"
            t" {tile.stages} stages, tensor cores"
        )
        if not self.whole:
            writer.write(
                ", loads of words" if self.geometry.words
                != 0 else ", loads of single elements"
            )
        if self.seconds > 0:
            var microseconds = round(self.seconds * 1e7) / 10
            writer.write(t": {microseconds} us by the model")


struct Mma(GpuKernel):
    """The implicit GEMM on any GPU's tensor cores."""

    comptime code = KERNEL_SM80
    comptime Plan = MmaPlan
    comptime Queue = Stream

    @staticmethod
    def type_refusal(types: OperandTypes) -> Optional[String]:
        """Refuses what the multiply does not take."""
        if takes_mma_types(types):
            return None
        return String(
            t"{kernel_name(Self.code)} takes float32, bfloat16, float16 and"
            t" int8, and gives float32, bfloat16 or float16; here"
            t" {types.input} and {types.output}"
        )

    @staticmethod
    def may_run(known: KnownProblem, types: OperandTypes) -> Bool:
        """Whether products may be rounded to tf32, and it is not certain that a
        kernel for groups of few filters runs."""
        return not (
            types.input == DType.float32 and known.exact
        ) and may_fill_tiles(known)

    @staticmethod
    def refusal(
        problem: ConvProblem, operands: Operands, device: Device
    ) -> Optional[String]:
        """Refuses exact float32, and sizes beyond 31 bits."""
        var refusal = precision_refusal(Self.code, operands)
        if refusal:
            return refusal
        return mma_geometry_refusal(problem)

    @staticmethod
    def suits(problem: ConvProblem, operands: Operands, device: Device) -> Bool:
        """Whether groups do not leave tiles nearly empty, and tensor cores keep
        the precision that was asked for."""
        if problem.groups > 1 and problem.group_filters() < TILE_FILTERS:
            return False
        return not (operands.types.input == DType.float32 and operands.exact)

    @staticmethod
    def predicted_seconds(
        problem: ConvProblem, operands: Operands, device: Device
    ) -> Optional[Float64]:
        """The model's time on the generation that it was fitted to, of the types
        and up to the time, unless loads of less than chunks take most of it."""
        if not is_hopper(device.capability):
            return None
        var seconds = fastest_tile(problem, operands, device.units).seconds
        if not loads_chunks(problem, operands) or (
            operands.types.input.is_half_float() and seconds < COMPARED_SECONDS
        ):
            return seconds
        return None

    @staticmethod
    def plan(
        problem: ConvProblem, operands: Operands, device: Device
    ) raises -> MmaPlan:
        """The tile that the model finds fastest."""
        var index = fastest_tile(problem, operands, device.units).tile
        var stored = CHUNK_BYTES // element_bytes(operands.types.output)
        return MmaPlan(
            MmaGeometry(
                problem,
                materialize[TILES]()[index],
                words=loads_words(problem, operands),
            ),
            index,
            loads_chunks(problem, operands),
            operands.aligned() and problem.group_filters() % stored == 0,
            Self.predicted_seconds(problem, operands, device).or_else(0),
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
        """Enqueues the kernel with the plan's tile and loads, or with the
        compiled tile that takes its place."""
        comptime Call = type_of(arguments)
        comptime width = CHUNK_BYTES // size_of[Call.Source.dtype]()
        var tile_index = plan.tile
        var geometry = plan.geometry
        comptime if known.tiled:
            tile_index = _in_place_of(plan.tile, plan.whole)
            if tile_index != plan.tile:
                geometry = MmaGeometry(
                    problem,
                    materialize[TILES]()[tile_index],
                    words=geometry.words != 0,
                )
        comptime for index in range(len(TILES)):
            comptime for whole in [False, True]:
                comptime compiled = (
                    not known.tiled or _takes_place(TILES[index], whole)
                ) and not (whole and known.group_channels % width != 0)
                comptime if not compiled:
                    continue
                if tile_index == index and plan.whole == whole:
                    comptime tile = TILES[index]
                    comptime kernel = MmaKernel[
                        Call.Source,
                        Call.Output,
                        Call.bias_type,
                        Call.residual_type,
                        tile,
                        whole,
                    ].run
                    comptime bytes = tile.shared_bytes()
                    queue.enqueue[kernel, max_shared_bytes=bytes](
                        LaunchGrid(
                            geometry.tiles(),
                            tile.threads(),
                            shared_bytes=bytes,
                        ),
                        arguments.activation,
                        arguments.filter,
                        arguments.epilogue,
                        arguments.output,
                        geometry,
                        Int32(1 if plan.vector_stores else 0),
                    )

    @staticmethod
    def inspect[dtype: DType](writer: PtxWriter[dtype]) raises:
        """Writes every tile, with copies of chunks and loads of elements."""
        comptime W = type_of(writer)
        comptime for index in range(len(TILES)):
            comptime tile = TILES[index]
            comptime for whole in [True, False]:
                comptime kernel = MmaKernel[
                    W.Source, W.Output, W.out_type, W.out_type, tile, whole
                ].run
                comptime tile_name = TILE_NAMES[index]
                var name = String(t"sm80-{tile_name}")
                comptime if not whole:
                    name += "-elements"
                writer.write[kernel](name, tile.shared_bytes())


def _takes_place(tile: MmaTile, whole: Bool) -> Bool:
    """Whether a tile is compiled where a kernel of the GPU's generation takes
    nearly all such problems: two for the small ones, that this kernel runs
    faster, and one for addresses, that the other refuses.

    Args:
        tile: The tile.
        whole: Whether a group's channels are whole chunks, and the operands
            aligned.
    """
    return (tile == TALL or tile == SMALL) if whole else tile == SQUARE


def _in_place_of(index: Int, whole: Bool) -> Int:
    """The tile that is compiled there, in place of another.

    Args:
        index: Of the other in `TILES`.
        whole: As in `_takes_place`.
    """
    var tiles = materialize[TILES]()
    if _takes_place(tiles[index], whole):
        return index
    for i in range(len(tiles)):
        if _takes_place(tiles[i], whole):
            return i
    return index
