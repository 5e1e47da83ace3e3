"""The host side of the dp4a kernel: plan and launch."""

from std.collections import Optional

from ...conv.access import MemoryActivation
from ...conv.fields import INTERLEAVED, KERNEL_DP4A
from ...conv.known import KnownFilter, KnownProblem
from ...conv.operands import Arguments, Device, Operands, OperandTypes
from ...conv.problem import ConvProblem
from ...conv.kernel import kernel_name
from ..inspect import GpuKernel, PtxWriter
from ..legality import gives_sums, is_output_type, memory_refusal
from ..stream import LaunchGrid, Stream
from .dp4a import Dp4aKernel
from .dp4a_geometry import Dp4aGeometry, dp4a_refusal, reads_vectors
from .dp4a_tile import TILES, VECTOR, tile_of

comptime TILE_NAMES: List[StaticString] = ["large", "small"]
"""What `maxconv inspect` calls them."""

comptime LEAST_CAPABILITY = 61
"""The compute capability, times ten, of the first GPUs with dp4a."""


@fieldwise_init
struct Accesses(Equatable, ImplicitlyCopyable, Movable):
    """Words that a thread loads at once."""

    var filters: Int
    var pixels: Int


comptime ACCESSES = [
    Accesses(1, 1),
    Accesses(VECTOR, 1),
    Accesses(VECTOR, VECTOR),
]
"""For which kernels are compiled: operands at multiples of 4 bytes; of 16; and
where neighbouring pixels are neighbouring words too."""


@fieldwise_init
struct Dp4aPlan(ImplicitlyCopyable, Movable, Writable):
    """A launch of the dp4a kernel."""

    var geometry: Dp4aGeometry
    var tile: Int
    """Which of `TILES`."""
    var accesses: Int
    """Which of `ACCESSES`."""

    def write_to(self, mut writer: Some[Writer]):
        """Writes the plan on one line."""
        var tile = materialize[TILES]()[self.tile]
        var accesses = materialize[ACCESSES]()[self.accesses]
        writer.write(
            t"tile {tile.filters} filters x {tile.pixels} pixels, dp4a on CUDA"
            t" cores, filters loaded by {accesses.filters}, pixels by"
            t" {accesses.pixels}"
        )

    def grid(self) -> Tuple[Int, Int]:
        """The blocks along x and y."""
        return materialize[TILES]()[self.tile].grid(
            self.geometry.general.pixels, Int(self.geometry.general.filters)
        )


struct Dp4a(GpuKernel):
    """The implicit GEMM of int8 in the interleaved layouts."""

    comptime code = KERNEL_DP4A
    comptime Plan = Dp4aPlan
    comptime Queue = Stream
    comptime interleaved = INTERLEAVED

    @staticmethod
    def device_refusal(capability: Int) -> Optional[String]:
        """Refuses GPUs without the instruction."""
        if capability >= LEAST_CAPABILITY:
            return None
        return String(
            t"{kernel_name(Self.code)} takes a GPU of compute capability 6.1 or"
            t" more"
        )

    @staticmethod
    def type_refusal(types: OperandTypes) -> Optional[String]:
        """Refuses what are not integers, and work fused in front."""
        if not types.input.is_integral() or not (
            is_output_type(types.output) or gives_sums(types)
        ):
            return String(
                t"{kernel_name(Self.code)} takes int8 and uint8, and gives"
                t" float32, bfloat16, float16 or sums; here {types.input} and"
                t" {types.output}"
            )
        return memory_refusal(Self.code, types)

    @staticmethod
    def may_run(known: KnownProblem, types: OperandTypes) -> Bool:
        """No other kernel takes the layout."""
        return True

    @staticmethod
    def refusal(
        problem: ConvProblem, operands: Operands, device: Device
    ) -> Optional[String]:
        """Refuses other ranks, groups, channels, addresses and sizes."""
        return dp4a_refusal(problem, operands)

    @staticmethod
    def plan(
        problem: ConvProblem, operands: Operands, device: Device
    ) raises -> Dp4aPlan:
        """The large tile, where its blocks keep the device busy."""
        var accesses = 0
        if operands.aligned():
            accesses = 2 if reads_vectors(problem, operands) else 1
        return Dp4aPlan(
            Dp4aGeometry(problem),
            tile_of(problem.gemm_m(), problem.filters, device.units),
            accesses,
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
        """Enqueues the kernel with the plan's tile and accesses."""
        comptime Call = type_of(arguments)
        var blocks, rows = plan.grid()
        comptime for index in range(len(TILES)):
            comptime for i in range(len(ACCESSES)):
                if plan.tile == index and plan.accesses == i:
                    comptime tile = TILES[index]
                    comptime accesses = ACCESSES[i]
                    comptime kernel = Dp4aKernel[
                        Call.Source,
                        Call.Output,
                        Call.bias_type,
                        Call.residual_type,
                        tile,
                        accesses.filters,
                        accesses.pixels,
                    ].run
                    queue.enqueue[kernel](
                        LaunchGrid(
                            blocks,
                            tile.threads(),
                            shared_bytes=tile.shared_bytes(),
                            rows=rows,
                        ),
                        arguments.activation,
                        arguments.filter,
                        arguments.epilogue,
                        arguments.output,
                        plan.geometry,
                    )

    @staticmethod
    def inspect[dtype: DType](writer: PtxWriter[dtype]) raises:
        """Writes every tile with every kind of access."""
        comptime W = type_of(writer)
        comptime for index in range(len(TILES)):
            comptime tile = TILES[index]
            comptime for i in range(len(ACCESSES)):
                comptime accesses = ACCESSES[i]
                comptime kernel = Dp4aKernel[
                    MemoryActivation[dtype, INTERLEAVED],
                    W.Output,
                    W.out_type,
                    W.out_type,
                    tile,
                    accesses.filters,
                    accesses.pixels,
                ].run
                comptime tile_name = TILE_NAMES[index]
                writer.write[kernel](
                    String(
                        t"dp4a-{tile_name}-{accesses.filters}-{accesses.pixels}"
                    ),
                    tile.shared_bytes(),
                )
