"""The implicit GEMM for any GPU and any problem, on CUDA cores.

It takes any rank, groups, channels, type and fusion, and multiplies and sums in
`sum_type`. A block computes a tile of pixels by filters of one group:

    for each slice of the products:
        next slice: gathered, filters loaded, into registers
        this slice: multiplied from shared memory
        next slice: registers -> the other half of shared memory
    accumulators -> shared memory -> epilogue -> output, filters side by side
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
from std.sys.info import size_of
from std.utils import StaticTuple

from ...conv.access import ActivationSource, OutputTarget
from ...conv.epilogue import Epilogue
from ...conv.memory import Reads, sum_type
from ...conv.quantization import filter_dtype
from ..geometry import GpuGeometry, spatial
from ..overlap import wait_for_earlier_kernels
from .rows import THREADS, Rows, Shared

comptime VECTOR = 4
"""Elements that a thread loads or stores at once where they are aligned."""


@fieldwise_init
struct DirectTile(ImplicitlyCopyable, Movable):
    """The tile of a block, and the part of it that a thread holds."""

    var pixels: Int
    var filters: Int
    var depth: Int
    """Products of a slice."""
    var thread_pixels: Int
    var thread_filters: Int

    def pixel_stride(self) -> Int:
        """Elements from one product's pixels to the next's. The padding spreads
        a row's products over the banks."""
        return self.pixels + VECTOR

    def filter_stride(self) -> Int:
        """Elements from one product's filters to the next's, padded likewise,
        and of a row of the output tile."""
        return self.filters + VECTOR

    def slice_elements(self) -> Int:
        """Elements of a slice in shared memory."""
        return self.depth * (self.pixel_stride() + self.filter_stride())

    def staged_elements(self) -> Int:
        """Elements of two slices, or of the output tile in their place."""
        return max(
            2 * self.slice_elements(), self.pixels * self.filter_stride()
        )

    def staged_bytes(self) -> Int:
        """Shared memory of a block, beside the rows."""
        return self.staged_elements() * size_of[DType.float32]()


comptime WIDE = DirectTile(
    pixels=128, filters=64, depth=16, thread_pixels=8, thread_filters=4
)
"""For most problems."""

comptime NARROW = DirectTile(
    pixels=128, filters=16, depth=16, thread_pixels=4, thread_filters=2
)
"""For few filters a group."""

comptime SMALL = DirectTile(
    pixels=32, filters=32, depth=16, thread_pixels=2, thread_filters=2
)
"""For few pixels: more blocks."""


@fieldwise_init
struct DirectKernel[
    Source: ActivationSource,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
    tile: DirectTile,
    width: Int,
]:
    """The kernel of a tile.

    Parameters:
        Source: The activation's type.
        Output: The output's type.
        bias_type: Of the bias.
        residual_type: Of the residual.
        tile: The tile.
        width: Elements of one load: 1, or `VECTOR` where a group's channels
            are a multiple of it.
    """

    comptime FusedWork = Epilogue[Self.bias_type, Self.residual_type]
    comptime filter_type = filter_dtype(Self.Source.dtype)
    comptime sum_type = sum_type(Self.Source.dtype)
    """Of what is staged too."""
    comptime Loaded = SIMD[Self.sum_type, Self.width]
    comptime lanes = Self.tile.depth // Self.width
    """Threads that load one pixel's, or one filter's, part of a slice."""
    comptime lines = THREADS // Self.lanes
    """Pixels, or filters, that all threads load at once."""
    comptime pixel_loads = ceildiv(Self.tile.pixels, Self.lines)
    comptime filter_loads = ceildiv(Self.tile.filters, Self.lines)
    comptime columns = Self.tile.filters // Self.tile.thread_filters
    """Threads along the filters of a tile."""
    comptime Sums = StaticTuple[
        SIMD[Self.sum_type, Self.tile.thread_filters], Self.tile.thread_pixels
    ]

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS))
    )
    def run(
        activation: Self.Source,
        filter: Reads[Self.filter_type],
        epilogue: Self.FusedWork,
        output: Self.Output,
        geometry: GpuGeometry,
        aligned: Int32,
    ):
        """A block: tiles in turn, filters innermost.

        Args:
            activation: The activation.
            filter: `[K, T, R, S, C / groups]`.
            epilogue: The epilogue.
            output: The output.
            geometry: The problem.
            aligned: Not 0 if outputs, bias and residual may be accessed
                `VECTOR` filters at a time.
        """
        comptime assert (
            Self.columns * (Self.tile.pixels // Self.tile.thread_pixels)
            == THREADS
        ), "a thread has its part of the tile"
        var staged = external_memory[
            Scalar[Self.sum_type],
            address_space=AddressSpace.SHARED,
            alignment=16,
        ]().unsafe_origin_cast[MutUntrackedOrigin]()
        var rows = Rows[Self.tile.pixels](
            staged.unsafe_offset(Self.tile.staged_elements()).unsafe_bitcast[
                UInt8
            ]()
        )
        var group_filters = Int(geometry.group_filters.value)
        var filter_tiles = ceildiv(group_filters, Self.tile.filters)
        var pixel_tiles = ceildiv(geometry.pixels, Self.tile.pixels)
        var tiles = pixel_tiles * filter_tiles * geometry.groups
        var index = Int(block_idx.x)
        # A block has a tile at least: none ends without waiting.
        while True:
            var rest, filter_tile = divmod(index, filter_tiles)
            var group, pixel_tile = divmod(rest, pixel_tiles)
            var pixel = pixel_tile * Self.tile.pixels
            rows.fill(geometry, pixel)
            wait_for_earlier_kernels()
            barrier()
            var first = filter_tile * Self.tile.filters
            var sums = Self._multiply(
                activation,
                filter.unsafe_offset(
                    (group * group_filters + first) * Int(geometry.depth)
                ),
                geometry,
                staged,
                rows,
                group * Int(geometry.group_channels.value),
                group_filters - first,
            )
            Self._write_sums(staged, sums)
            barrier()
            var k = group * group_filters + first
            var left = group_filters - first
            if aligned != 0:
                Self._store[VECTOR](
                    epilogue, output, geometry, staged, rows, pixel, k, left
                )
            else:
                Self._store[1](
                    epilogue, output, geometry, staged, rows, pixel, k, left
                )
            barrier()
            index += Int(grid_dim.x)
            if index >= tiles:
                break

    @staticmethod
    @always_inline
    def _multiply(
        activation: Self.Source,
        filter: Reads[Self.filter_type],
        geometry: GpuGeometry,
        staged: Shared[Self.sum_type],
        rows: Rows[Self.tile.pixels],
        channel: Int,
        filters: Int,
    ) -> Self.Sums:
        """The sums of the thread's part of a tile; shared memory is free
        again when every thread has returned."""
        var line, lane = divmod(Int(thread_idx.x), Self.lanes)
        var k = lane * Self.width
        var depth = Int(geometry.depth)
        var sums = Self.Sums(
            fill=SIMD[Self.sum_type, Self.tile.thread_filters](0)
        )
        var pixels = StaticTuple[Self.Loaded, Self.pixel_loads](
            fill=Self.Loaded(0)
        )
        var weights = StaticTuple[Self.Loaded, Self.filter_loads](
            fill=Self.Loaded(0)
        )
        Self._load(
            pixels,
            weights,
            activation,
            filter,
            geometry,
            rows,
            channel,
            filters,
            line,
            k,
        )
        var half = 0
        Self._stage(staged, pixels, weights, line, k)
        barrier()
        for begin in range(0, depth, Self.tile.depth):
            var next = begin + Self.tile.depth
            if next < depth:
                Self._load(
                    pixels,
                    weights,
                    activation,
                    filter,
                    geometry,
                    rows,
                    channel,
                    filters,
                    line,
                    next + k,
                )
            Self._multiply_slice(
                sums, staged.unsafe_offset(half * Self.tile.slice_elements())
            )
            half = 1 - half
            if next < depth:
                Self._stage(
                    staged.unsafe_offset(half * Self.tile.slice_elements()),
                    pixels,
                    weights,
                    line,
                    k,
                )
            barrier()
        return sums

    @staticmethod
    @always_inline
    def _load(
        mut pixels: StaticTuple[Self.Loaded, Self.pixel_loads],
        mut weights: StaticTuple[Self.Loaded, Self.filter_loads],
        activation: Self.Source,
        filter: Reads[Self.filter_type],
        geometry: GpuGeometry,
        rows: Rows[Self.tile.pixels],
        channel: Int,
        filters: Int,
        line: Int,
        k: Int,
    ):
        """Loads the thread's elements of a slice: products from `k` on, of
        every `lines`-th pixel and filter; zeros beyond the problem."""
        var depth = Int(geometry.depth)
        var valid = k < depth
        # After the last product there is no tap.
        var tap, c = geometry.group_channels.split(UInt32(k if valid else 0))
        var shift = geometry.tap(tap)
        var delta = geometry.offset(shift) + channel + Int(c)
        comptime for i in range(Self.pixel_loads):
            var row = line + i * Self.lines
            pixels[i] = Self.Loaded(0)
            if valid and row < Self.tile.pixels:
                var at = rows.origin(row) + shift
                if geometry.inside(at):
                    pixels[i] = activation.load[Self.width](
                        Int(at[3]),
                        spatial(at),
                        channel + Int(c),
                        rows.offset(row) + delta,
                    ).cast[Self.sum_type]()
        comptime alignment = Self.width * size_of[Self.Source.dtype]()
        comptime for i in range(Self.filter_loads):
            var row = line + i * Self.lines
            weights[i] = Self.Loaded(0)
            if valid and row < min(Self.tile.filters, filters):
                weights[i] = filter.unsafe_load[
                    width=Self.width, alignment=alignment
                ](row * depth + k).cast[Self.sum_type]()

    @staticmethod
    @always_inline
    def _stage(
        slice: Shared[Self.sum_type],
        pixels: StaticTuple[Self.Loaded, Self.pixel_loads],
        weights: StaticTuple[Self.Loaded, Self.filter_loads],
        line: Int,
        k: Int,
    ):
        """Writes the thread's elements to a slice, products apart."""
        comptime pixel_stride = Self.tile.pixel_stride()
        comptime filter_stride = Self.tile.filter_stride()
        comptime for i in range(Self.pixel_loads):
            var row = line + i * Self.lines
            if row < Self.tile.pixels:
                comptime for j in range(Self.width):
                    slice[unsafe_offset=(k + j) * pixel_stride + row] = pixels[
                        i
                    ][j]
        var filters = slice.unsafe_offset(Self.tile.depth * pixel_stride)
        comptime for i in range(Self.filter_loads):
            var row = line + i * Self.lines
            if row < Self.tile.filters:
                comptime for j in range(Self.width):
                    filters[
                        unsafe_offset=(k + j) * filter_stride + row
                    ] = weights[i][j]

    @staticmethod
    @always_inline
    def _multiply_slice(mut sums: Self.Sums, slice: Shared[Self.sum_type]):
        """Adds a slice's products to the thread's sums."""
        var row, column = divmod(Int(thread_idx.x), Self.columns)
        comptime height = Self.tile.thread_pixels
        comptime breadth = Self.tile.thread_filters
        var pixels = slice.unsafe_offset(row * height)
        var filters = slice.unsafe_offset(
            Self.tile.depth * Self.tile.pixel_stride() + column * breadth
        )
        comptime for k in range(Self.tile.depth):
            var a = pixels.unsafe_load[
                width=height, alignment=min(height, VECTOR) * 4
            ](k * Self.tile.pixel_stride())
            var b = filters.unsafe_load[width=breadth, alignment=breadth * 4](
                k * Self.tile.filter_stride()
            )
            comptime for i in range(height):
                sums[i] = b.fma(SIMD[Self.sum_type, breadth](a[i]), sums[i])

    @staticmethod
    @always_inline
    def _write_sums(staged: Shared[Self.sum_type], sums: Self.Sums):
        """Writes the thread's sums to the tile, a row a pixel."""
        var row, column = divmod(Int(thread_idx.x), Self.columns)
        comptime height = Self.tile.thread_pixels
        comptime breadth = Self.tile.thread_filters
        comptime for i in range(height):
            staged.unsafe_store[alignment=breadth * 4](
                (row * height + i) * Self.tile.filter_stride()
                + column * breadth,
                sums[i],
            )

    @staticmethod
    @always_inline
    def _store[
        store_width: Int
    ](
        epilogue: Self.FusedWork,
        output: Self.Output,
        geometry: GpuGeometry,
        staged: Shared[Self.sum_type],
        rows: Rows[Self.tile.pixels],
        pixel: Int,
        filter: Int,
        filters: Int,
    ):
        """Applies the epilogue to the tile and stores it, `store_width`
        neighbouring filters at a time."""
        comptime parts = Self.tile.filters // store_width
        comptime steps = Self.tile.pixels * parts
        for index in range(Int(thread_idx.x), steps, THREADS):
            var row, part = divmod(index, parts)
            var column = part * store_width
            if pixel + row >= geometry.pixels or column >= filters:
                continue
            var sums = staged.unsafe_load[
                width=store_width, alignment=store_width * 4
            ](row * Self.tile.filter_stride() + column)
            var k = filter + column
            var offset = (pixel + row) * Int(geometry.filters) + k
            var at = rows.output(row)
            output.store[store_width](
                Int(at[3]),
                spatial(at),
                k,
                offset,
                epilogue.stored[Self.Output.dtype, store_width, store_width](
                    sums, k, offset
                ),
            )
