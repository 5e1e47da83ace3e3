"""Few pixels times a matrix (GEMV), on the CUDA cores of any GPU: pointwise
convolutions such as those of squeeze and excitation.

Some lanes of a warp compute a filter, for every pixel. There is no shared
memory and no barrier, and a thread's loads depend on nothing but its index:

    wait for the kernel before
    filter, pixels, what the epilogue reads -> registers, many loads in flight
    products of the lane's channels -> sums
    sums -> shuffles -> sums of the filter, in each of its lanes
    lane m -> epilogue -> output of pixel m
"""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_dim,
    block_idx,
    thread_idx,
)
from max.gpu.primitives.grid_controls import (
    launch_dependent_grids,
    wait_on_dependent_grids,
)
from max.gpu.primitives.warp import shuffle_xor
from std.math import ceildiv
from std.sys.info import size_of
from std.utils import StaticTuple

from ...conv.access import ActivationSource, OutputTarget
from ...conv.device_value import DeviceValue
from ...conv.epilogue import Epilogue
from ...conv.memory import Reads
from ...conv.problem import ConvProblem
from ..divisor import Divisor
from ..limits import WARP
from .geometry import IMAGE, Position, spatial

comptime THREADS = 128
"""Threads of a block, at most."""

comptime LOAD_BYTES = 16
"""Bytes that a thread loads at once, at most."""

comptime LOADED_REGISTERS = 80
"""Registers of a thread for what is loaded and not yet multiplied: 8 loads of
`LOAD_BYTES` in flight for one pixel's filter."""

comptime MAX_LOADS = 8
"""Loads of a filter in flight, at most."""

comptime PARTIAL_SUMS = 4
"""Sums of a lane for each pixel, which do not wait for each other."""


struct GemvGeometry(DeviceValue, TrivialRegisterPassable):
    """A pointwise convolution of few pixels, for the kernel."""

    var pixels: Int32
    """Of all images."""
    var channels: Int32
    var filters: Int32
    var lane_bits: Int32
    """The logarithm of the lanes of a filter, of 1 to `WARP`."""
    var depth: Divisor
    """Extents of an image, which input and output share."""
    var height: Divisor
    var width: Divisor

    def __init__(out self, problem: ConvProblem, lane_bits: Int):
        """Converts a problem.

        Args:
            problem: The convolution, with at least one pixel.
            lane_bits: The logarithm of the lanes of a filter.
        """
        self.pixels = Int32(problem.gemm_m())
        self.channels = Int32(problem.channels)
        self.filters = Int32(problem.filters)
        self.lane_bits = Int32(lane_bits)
        self.depth = Divisor(problem.output[0])
        self.height = Divisor(problem.output[1])
        self.width = Divisor(problem.output[2])

    @always_inline
    def pixel(self, index: Int) -> Position:
        """A pixel's position, of input and output.

        Args:
            index: Counted over all images.
        """
        var zy, x = self.width.split(UInt32(index))
        var nz, y = self.height.split(zy)
        var n, z = self.depth.split(nz)
        return Position(Int32(z), Int32(y), Int32(x), Int32(n))


@fieldwise_init
struct GemvKernel[
    Source: ActivationSource,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
    rows: Int,
    width: Int,
]:
    """The kernel for some number of pixels.

    Parameters:
        Source: The activation's type.
        Output: The output's type.
        bias_type: Of the bias.
        residual_type: Of the residual.
        rows: Pixels, at most; not more than a filter has lanes.
        width: Channels of one load: 1, or a power of two that divides the
            channels.
    """

    comptime dtype = Self.Source.dtype
    comptime Loaded = SIMD[Self.dtype, Self.width]
    comptime bytes = Self.width * size_of[Self.dtype]()
    comptime loads = min(
        MAX_LOADS,
        LOADED_REGISTERS // ((1 + Self.rows) * ceildiv(Self.bytes, 4)),
    )
    """Loads of a filter in flight, with those of the pixels beside them."""
    comptime partial_sums = min(Self.width, PARTIAL_SUMS)
    comptime Partial = SIMD[DType.float32, Self.partial_sums]
    comptime Pixels = StaticTuple[Self.Loaded, Self.rows]

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS))
    )
    def run(
        activation: Self.Source,
        filter: Reads[Self.dtype],
        epilogue: Epilogue[Self.bias_type, Self.residual_type],
        output: Self.Output,
        geometry: GemvGeometry,
    ):
        """A block of whole warps: as many filters as its threads have lanes
        for.

        Args:
            activation: The activation.
            filter: `[K, 1, 1, 1, C]`.
            epilogue: The epilogue.
            output: The output.
            geometry: The problem.
        """
        var thread = Int(block_idx.x) * Int(block_dim.x) + Int(thread_idx.x)
        var lanes = 1 << Int(geometry.lane_bits)
        var k = thread >> Int(geometry.lane_bits)
        var lane = thread & (lanes - 1)
        var pixels = Int(geometry.pixels)
        var filters = Int(geometry.filters)
        # Lanes without a filter only take part in the shuffles.
        var channels = Int(geometry.channels) if k < filters else 0
        var stores = lane < pixels and k < filters
        var offset = lane * filters + k
        var weights = filter.unsafe_offset(k * channels)
        var scale = Float32(1)
        var bias = Float32(0)
        var residual = Scalar[Self.residual_type](0)
        var partial = StaticTuple[Self.Partial, Self.rows](fill=0)
        # What came before may still run: nothing of its memory until here.
        launch_dependent_grids()
        wait_on_dependent_grids()
        for first in range(
            0, Int(geometry.channels), lanes * Self.width * Self.loads
        ):
            var loaded = StaticTuple[Self.Loaded, Self.loads](fill=0)
            var rows = StaticTuple[Self.Pixels, Self.loads](
                fill=Self.Pixels(fill=0)
            )
            comptime for i in range(Self.loads):
                var c = first + (i * lanes + lane) * Self.width
                if c < channels:
                    loaded[i] = weights.unsafe_load[
                        width=Self.width, alignment=Self.bytes
                    ](c)
                    rows[i] = Self._load_pixels(activation, geometry, c)
            # In the shadow of the first loads.
            if first == 0 and stores:
                scale = epilogue.scaled[1](scale, k)
                bias = epilogue.load_bias[1](k)
                residual = epilogue.load_residual[1](offset)
            comptime for i in range(Self.loads):
                var b = loaded[i].cast[DType.float32]()
                comptime for m in range(Self.rows):
                    var a = rows[i][m].cast[DType.float32]()
                    comptime for j in range(0, Self.width, Self.partial_sums):
                        partial[m] = a.slice[Self.partial_sums, offset=j]().fma(
                            b.slice[Self.partial_sums, offset=j](), partial[m]
                        )
        var sum = Self._sum(partial, lane, lanes)
        if stores:
            var at = geometry.pixel(lane)
            var value = epilogue.finish[1](sum * scale, bias, residual)
            output.store[1](
                Int(at[IMAGE]),
                spatial(at),
                k,
                offset,
                value.cast[Self.Output.dtype](),
            )

    @staticmethod
    @always_inline
    def _load_pixels(
        activation: Self.Source, geometry: GemvGeometry, c: Int
    ) -> Self.Pixels:
        """Neighbouring channels of every pixel; zeros for those that are not
        there."""
        var pixels = Self.Pixels(fill=0)
        comptime for m in range(Self.rows):
            if m == 0 or m < Int(geometry.pixels):
                var at = geometry.pixel(m)
                pixels[m] = activation.load[Self.width](
                    Int(at[IMAGE]),
                    spatial(at),
                    c,
                    m * Int(geometry.channels) + c,
                )
        return pixels

    @staticmethod
    @always_inline
    def _sum(
        partial: StaticTuple[Self.Partial, Self.rows], lane: Int, lanes: Int
    ) -> Float32:
        """The sum of the pixel with the lane's number, over a filter's lanes.
        Every lane of the warp takes part."""
        var sums = StaticTuple[Float32, Self.rows](fill=0)
        comptime for m in range(Self.rows):
            sums[m] = partial[m].reduce_add()
        comptime for distance in [16, 8, 4, 2, 1]:
            if distance < lanes:
                comptime for m in range(Self.rows):
                    sums[m] += shuffle_xor(sums[m], UInt32(distance))
        var sum = sums[0]
        comptime for m in range(1, Self.rows):
            if lane == m:
                sum = sums[m]
        return sum
