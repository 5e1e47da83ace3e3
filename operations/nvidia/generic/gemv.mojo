"""Few pixels times a matrix (GEMV), on the CUDA cores of any GPU: pointwise
convolutions such as those of squeeze and excitation.

Some lanes of a warp compute a filter, for up to `rows` pixels; other blocks
take further pixels. There is no shared memory and no barrier, and a thread's
loads depend on nothing but its index:

    wait for the kernel before
    filter, pixels, what the epilogue reads -> registers, many loads in flight
    products of the lane's channels -> sums
    sums -> shuffles -> sums of the filter, in each of its lanes
    lane m -> epilogue -> output of the block's pixel m
"""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_dim,
    block_idx,
    thread_idx,
)
from max.gpu.primitives.warp import shuffle_xor
from std.math import ceildiv
from std.memory import bitcast
from std.sys.info import size_of
from std.utils import StaticTuple

from ...conv.access import ActivationSource, OutputTarget
from ...conv.device_value import DeviceValue
from ...conv.epilogue import Epilogue
from ...conv.memory import Reads, sum_type
from ...conv.problem import ConvProblem
from ...conv.quantization import filter_dtype
from ...conv.divisor import Divisor
from ..limits import WARP
from ..overlap import wait_for_earlier_kernels
from ..geometry import IMAGE, Position, spatial

comptime THREADS = 128
"""Threads of a block, at most."""

comptime RESIDENT = 3
"""Blocks of a multiprocessor for which registers suffice where operands have 16
bits: their loads in flight are as many as memory needs."""

comptime LOAD_BYTES = 16
"""Bytes that a thread loads at once, at most."""

comptime LOADED_REGISTERS = 80
"""Registers of a thread for what is loaded and not yet multiplied."""

comptime MAX_LOAD_BITS = 3
"""The logarithm of a lane's loads of a filter in flight, at most."""

comptime LOADED_CHANNELS = 64
"""Channels that a lane has in flight, at most: 2048 a warp."""

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
    var steps: Int32
    """Loads of the filter that a lane makes."""
    var filter_blocks: Divisor
    """Blocks that share pixels: those of all filters."""
    var depth: Divisor
    """Extents of an image, which input and output share."""
    var height: Divisor
    var width: Divisor

    def __init__(
        out self,
        problem: ConvProblem,
        lane_bits: Int,
        width: Int,
        filter_blocks: Int,
    ):
        """Converts a problem.

        Args:
            problem: The convolution, with at least one pixel.
            lane_bits: The logarithm of the lanes of a filter.
            width: Channels of one load.
            filter_blocks: Blocks of all filters.
        """
        self.pixels = Int32(problem.gemm_m())
        self.channels = Int32(problem.channels)
        self.filters = Int32(problem.filters)
        self.lane_bits = Int32(lane_bits)
        self.steps = Int32(ceildiv(problem.channels, width << lane_bits))
        self.filter_blocks = Divisor(filter_blocks)
        self.depth = Divisor(problem.output[0])
        self.height = Divisor(problem.output[1])
        self.width = Divisor(problem.output[2])

    @always_inline
    def pixel(self, index: UInt32) -> Position:
        """A pixel's position, of input and output.

        Args:
            index: Counted over all images.
        """
        var zy, x = self.width.split(index)
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
    """The kernel for blocks of some number of pixels.

    Parameters:
        Source: The activation's type.
        Output: The output's type.
        bias_type: Of the bias.
        residual_type: Of the residual.
        rows: Pixels of a block, at most; not more than a filter has lanes.
        width: Channels of one load: 1, or a power of two that divides the
            channels.
    """

    comptime dtype = Self.Source.dtype
    comptime Loaded = SIMD[Self.dtype, Self.width]
    comptime bytes = Self.width * size_of[Self.dtype]()
    comptime loads = _loads(Self.rows, Self.width, Self.bytes)
    """Loads of a filter in flight, with those of the pixels beside them."""
    comptime partial_sums = min(Self.width, PARTIAL_SUMS)
    comptime sum_type = sum_type(Self.dtype)
    comptime Sum = Scalar[Self.sum_type]
    comptime Partial = SIMD[Self.sum_type, Self.partial_sums]
    comptime Sums = StaticTuple[Self.Partial, Self.rows]
    comptime Column = StaticTuple[Self.Loaded, 1 + Self.rows]
    """Neighbouring channels of the filter, then of each pixel."""

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
        for, and `rows` pixels.

        Args:
            activation: The activation.
            filter: `[K, 1, 1, 1, C]`.
            epilogue: The epilogue.
            output: The output.
            geometry: The problem.
        """
        var part, block = geometry.filter_blocks.split(UInt32(block_idx.x))
        var first = Int32(part) * Int32(Self.rows)
        var thread = Int(block) * Int(block_dim.x) + Int(thread_idx.x)
        var lanes = 1 << geometry.lane_bits
        var lane = Int32(thread) & (lanes - 1)
        var filters = Int(geometry.filters)
        var own = thread >> Int(geometry.lane_bits)
        # Lanes without a filter sum the last one again, and do not store it.
        var k = min(own, filters - 1)
        var pixels = min(Int32(Self.rows), geometry.pixels - first)
        var stores = own < filters and lane < pixels
        var offset = Int(first + lane) * filters + k
        var weights = filter.unsafe_offset(k * Int(geometry.channels))
        var c = lane * Int32(Self.width)
        var stride = lanes * Int32(Self.width)
        var sums = Self.Sums(fill=0)
        wait_for_earlier_kernels()
        var left = geometry.steps
        while left > Int32(Self.loads):
            var columns = Self._load[Self.loads, Self.loads](
                activation, weights, geometry, first, c, stride
            )
            Self._multiply[Self.loads, Self.loads](
                sums, columns, geometry, c, stride
            )
            c += stride * Int32(Self.loads)
            left -= Int32(Self.loads)
        var scale = Float32(1)
        var bias = Float32(0)
        var residual = Scalar[Self.residual_type](0)
        comptime for i in range(MAX_LOAD_BITS + 1):
            comptime count = 1 << i
            comptime whole = count // 2
            comptime if count <= Self.loads:
                if Int32(whole) < left and left <= Int32(count):
                    var columns = Self._load[count, whole](
                        activation, weights, geometry, first, c, stride
                    )
                    # While those are in flight.
                    if stores:
                        scale = epilogue.scaled[1](scale, k)
                        bias = epilogue.load_bias[1](k)
                        residual = epilogue.load_residual[1](offset)
                    Self._multiply[count, whole](
                        sums, columns, geometry, c, stride
                    )
        var sum = Self._sum(sums, lane, lanes)
        if stores:
            var at = geometry.pixel(UInt32(first + lane))
            comptime if Self.Output.dtype == DType.int32:
                output.store[1](
                    Int(at[IMAGE]),
                    spatial(at),
                    k,
                    offset,
                    sum.cast[Self.Output.dtype](),
                )
            else:
                var value = epilogue.finish[1](
                    sum.cast[DType.float32]() * scale, bias, residual
                )
                output.store[1](
                    Int(at[IMAGE]),
                    spatial(at),
                    k,
                    offset,
                    value.cast[Self.Output.dtype](),
                )

    @staticmethod
    @always_inline
    def _load[
        count: Int, whole: Int
    ](
        activation: Self.Source,
        weights: Reads[Self.dtype],
        geometry: GemvGeometry,
        row: Int32,
        first: Int32,
        stride: Int32,
    ) -> StaticTuple[Self.Column, count]:
        """Loads the lane's channels of `count` steps, of the pixels from `row`
        on. The first `whole` steps have channels for every lane. No load is
        behind a branch, where the next one would wait for it: what is not there
        is something else that is."""
        var columns = StaticTuple[Self.Column, count](fill=Self.Column(fill=0))
        comptime for i in range(count):
            var c = first + Int32(i) * stride
            comptime if i >= whole:
                c = min(c, geometry.channels - Int32(Self.width))
            columns[i][0] = weights.unsafe_load[
                width=Self.width, alignment=Self.bytes
            ](Int(c))
            comptime for m in range(Self.rows):
                var pixel = min(row + Int32(m), geometry.pixels - 1)
                var at = geometry.pixel(UInt32(pixel))
                columns[i][1 + m] = activation.load[Self.width](
                    Int(at[IMAGE]),
                    spatial(at),
                    Int(c),
                    Int(pixel) * Int(geometry.channels) + Int(c),
                )
        return columns

    @staticmethod
    @always_inline
    def _multiply[
        count: Int, whole: Int
    ](
        mut sums: Self.Sums,
        columns: StaticTuple[Self.Column, count],
        geometry: GemvGeometry,
        first: Int32,
        stride: Int32,
    ):
        """Adds the products of what `_load` loaded."""
        comptime for i in range(count):
            var valid = first + Int32(i) * stride < geometry.channels
            comptime for m in range(Self.rows):
                var b = columns[i][0]
                var a = columns[i][1 + m]
                comptime if i >= whole:
                    # Both: 0 times what is not finite is not 0.
                    b = b if valid else Self.Loaded(0)
                    a = a if valid else Self.Loaded(0)
                var x = a.cast[Self.sum_type]()
                var y = bitcast[filter_dtype(Self.dtype), Self.width](b).cast[
                    Self.sum_type
                ]()
                comptime for j in range(0, Self.width, Self.partial_sums):
                    sums[m] = x.slice[Self.partial_sums, offset=j]().fma(
                        y.slice[Self.partial_sums, offset=j](), sums[m]
                    )

    @staticmethod
    @always_inline
    def _sum(partial: Self.Sums, lane: Int32, lanes: Int32) -> Self.Sum:
        """The sum of the block's pixel with the lane's number, over a filter's
        lanes. Every lane of the warp takes part."""
        var sums = StaticTuple[Self.Sum, Self.rows](fill=0)
        comptime for m in range(Self.rows):
            sums[m] = partial[m].reduce_add()
        comptime for i in range(5):
            comptime distance = WARP >> (i + 1)
            if Int32(distance) < lanes:
                comptime for m in range(Self.rows):
                    sums[m] += shuffle_xor(sums[m], UInt32(distance))
        var sum = sums[0]
        comptime for m in range(1, Self.rows):
            if lane == Int32(m):
                sum = sums[m]
        return sum


def _loads(rows: Int, width: Int, bytes: Int) -> Int:
    """Loads of a filter in flight, each of `width` channels and `bytes`: a
    power of two that fits `LOADED_REGISTERS` and `LOADED_CHANNELS`."""
    var registers = (1 + rows) * ceildiv(bytes, 4)
    var bits = MAX_LOAD_BITS
    while bits > 0 and (
        registers << bits > LOADED_REGISTERS or width << bits > LOADED_CHANNELS
    ):
        bits -= 1
    return 1 << bits
