"""The general kernel for groups of few filters: neighbouring threads compute
neighbouring filters, whatever their groups.

A tile of the implicit GEMM would hold one group's few filters and leave its
other columns empty. Here the threads of a warp read neighbouring groups'
channels, which are neighbours in memory. Each thread keeps the sums of a few
pixels, so that it loads a filter's element once for all of them. Of int8 an
instruction adds 4 products, dp4a.
"""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.memory import external_memory
from std.math import ceildiv
from std.memory import bitcast
from std.sys.info import size_of
from std.utils import StaticTuple

from ...conv.access import ActivationSource, OutputTarget
from ...conv.epilogue import Epilogue
from ...conv.memory import Reads, sum_type
from ...conv.quantization import filter_dtype
from ..geometry import GpuGeometry, spatial
from ..overlap import wait_for_earlier_kernels
from .dp4a import dot
from .rows import THREADS, Rows

comptime COLUMNS = 32
"""Filters of a block's tile: a warp's threads."""

comptime THREAD_PIXELS = 4
"""Pixels of a thread."""

comptime VECTOR = 4
"""Channels that a thread loads at once where groups have whole vectors."""

comptime LINES = THREADS // COLUMNS
"""Warps of a block."""

comptime PIXELS = LINES * THREAD_PIXELS
"""Pixels of a block's tile."""


@fieldwise_init
struct GroupedKernel[
    Source: ActivationSource,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
    width: Int,
]:
    """The kernel.

    Parameters:
        Source: The activation's type.
        Output: The output's type.
        bias_type: Of the bias.
        residual_type: Of the residual.
        width: Channels of one load: 1, or `VECTOR` where a group's are a
            multiple of it, and operands aligned to as many.
    """

    comptime dtype = Self.Source.dtype
    comptime filter_type = filter_dtype(Self.dtype)
    comptime sum_type = sum_type(Self.dtype)
    comptime Loaded = SIMD[Self.dtype, Self.width]
    comptime Weights = SIMD[Self.filter_type, Self.width]
    comptime Sums = StaticTuple[Scalar[Self.sum_type], THREAD_PIXELS]

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS))
    )
    def run(
        activation: Self.Source,
        filter: Reads[Self.filter_type],
        epilogue: Epilogue[Self.bias_type, Self.residual_type],
        output: Self.Output,
        geometry: GpuGeometry,
    ):
        """A block: tiles in turn, filters innermost.

        Args:
            activation: The activation.
            filter: `[K, T, R, S, C / groups]`.
            epilogue: The epilogue.
            output: The output.
            geometry: The problem.
        """
        var rows = Rows[PIXELS](
            external_memory[
                UInt8, address_space=AddressSpace.SHARED, alignment=16
            ]().unsafe_origin_cast[MutUntrackedOrigin]()
        )
        var line, column = divmod(Int(thread_idx.x), COLUMNS)
        var filter_tiles = ceildiv(Int(geometry.filters), COLUMNS)
        var tiles = ceildiv(geometry.pixels, PIXELS) * filter_tiles
        var index = Int(block_idx.x)
        # A block has a tile at least: none ends without waiting.
        while True:
            var pixel_tile, filter_tile = divmod(index, filter_tiles)
            var pixel = pixel_tile * PIXELS
            rows.fill(geometry, pixel)
            wait_for_earlier_kernels()
            barrier()
            var k = filter_tile * COLUMNS + column
            if k < Int(geometry.filters):
                var sums = Self._sum(
                    activation, filter, geometry, rows, line, k
                )
                Self._store(
                    sums, epilogue, output, geometry, rows, pixel, line, k
                )
            barrier()
            index += Int(grid_dim.x)
            if index >= tiles:
                break

    @staticmethod
    @always_inline
    def _sum(
        activation: Self.Source,
        filter: Reads[Self.filter_type],
        geometry: GpuGeometry,
        rows: Rows[PIXELS],
        line: Int,
        k: Int,
    ) -> Self.Sums:
        """The sums of one filter and every `LINES`-th pixel from `line` on."""
        var group, _ = geometry.group_filters.split(UInt32(k))
        var channels = Int(geometry.group_channels.value)
        var first = Int(group) * channels
        var weights = filter.unsafe_offset(k * Int(geometry.depth))
        var sums = Self.Sums(fill=0)
        for tap in range(Int(geometry.depth) // channels):
            var shift = geometry.tap(UInt32(tap))
            var delta = geometry.offset(shift) + first
            comptime for i in range(THREAD_PIXELS):
                var row = line + i * LINES
                var at = rows.origin(row) + shift
                if geometry.inside(at):
                    var offset = rows.offset(row) + delta
                    for c in range(0, channels, Self.width):
                        var a = activation.load[Self.width](
                            Int(at[3]), spatial(at), first + c, offset + c
                        )
                        var b = weights.unsafe_load[
                            width=Self.width,
                            alignment=Self.width * size_of[Self.dtype](),
                        ](tap * channels + c)
                        sums[i] = Self._add(a, b, sums[i])
        return sums

    @staticmethod
    @always_inline
    def _add(
        a: Self.Loaded, b: Self.Weights, sum: Scalar[Self.sum_type]
    ) -> Scalar[Self.sum_type]:
        """Adds the products of neighbouring channels to a sum."""
        comptime if Self.dtype.is_integral() and Self.width == VECTOR:
            return rebind[Scalar[Self.sum_type]](
                dot[Self.dtype](
                    bitcast[DType.int32, 1](a)[0],
                    bitcast[DType.int32, 1](b)[0],
                    rebind[Int32](sum),
                )
            )
        else:
            var total = sum
            comptime for j in range(Self.width):
                total = (
                    a[j]
                    .cast[Self.sum_type]()
                    .fma(b[j].cast[Self.sum_type](), total)
                )
            return total

    @staticmethod
    @always_inline
    def _store(
        sums: Self.Sums,
        epilogue: Epilogue[Self.bias_type, Self.residual_type],
        output: Self.Output,
        geometry: GpuGeometry,
        rows: Rows[PIXELS],
        pixel: Int,
        line: Int,
        k: Int,
    ):
        """Applies the epilogue to the thread's sums and stores them."""
        for i in range(THREAD_PIXELS):
            var row = line + i * LINES
            if pixel + row < geometry.pixels:
                var offset = (pixel + row) * Int(geometry.filters) + k
                var at = rows.output(row)
                var sum = sums[0]
                comptime for j in range(1, THREAD_PIXELS):
                    if i == j:
                        sum = sums[j]
                output.store[1](
                    Int(at[3]),
                    spatial(at),
                    k,
                    offset,
                    epilogue.stored[Self.Output.dtype, 1](sum, k, offset),
                )
