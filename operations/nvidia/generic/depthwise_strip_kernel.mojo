"""The GPU's strip kernel, for depthwise filters of the common sizes.

    every step:   wait for the step's input rows, load those of a later step
                  shared memory -> registers, multiply, epilogue, store
"""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_dim,
    block_idx,
    thread_idx,
)
from max.gpu.memory import external_memory
from max.gpu.sync import barrier
from std.sys.info import size_of
from std.utils import IndexList, StaticTuple

from ...conv.access import OutputTarget
from ...conv.epilogue import Epilogue
from ...conv.memory import Reads
from ...conv.problem import SPATIAL
from ...conv.quantization import filter_dtype
from ..overlap import wait_for_earlier_kernels
from ..pipeline.async_copy import await_copies, close_copies, copy_chunk
from ..pipeline.chunks import CHUNK_BYTES
from .depthwise_strips import (
    COLUMNS,
    LANES,
    MAX_THREADS,
    StripConfig,
    StripGeometry,
)
from .widen import widen

comptime SharedBytes = Pointer[
    UInt8, MutUntrackedOrigin, address_space=AddressSpace.SHARED
]
"""Bytes of a block's shared memory."""


@fieldwise_init
struct StripBlock(TrivialRegisterPassable):
    """The positions of a block and of one of its threads in the problem."""

    var image: UInt32
    var plane: UInt32
    var row: UInt32
    """The block's first output row."""
    var end: UInt32
    """One past its last."""
    var column: UInt32
    """The thread's first output column."""
    var channel: UInt32
    """The thread's first channel."""
    var block_channel: UInt32
    var d: Int32
    var h: Int32
    var w: Int32
    """The block's first input pixel."""
    var last_h: Int32
    """One past its last input row."""
    var active: Bool
    """Whether the thread has channels and columns."""
    var strip: UInt32
    var lane: UInt32

    @always_inline
    def __init__(out self, config: StripConfig, geometry: StripGeometry):
        """Finds them."""
        var rest, slab = geometry.slabs.split(UInt32(block_idx.x))
        var more, group = geometry.groups.split(rest)
        var down, segment = geometry.segments.split(more)
        self.image, self.plane = geometry.out_planes.split(down)
        var strip, lane = divmod(UInt32(thread_idx.x), UInt32(LANES))
        # Threads beyond the last strip read the last.
        self.strip = min(strip, geometry.strips - 1)
        self.lane = lane
        self.row = segment * geometry.rows
        self.end = min(self.row + geometry.rows, geometry.out_rows)
        var first = group * geometry.strips * UInt32(COLUMNS)
        self.column = first + self.strip * UInt32(COLUMNS)
        self.block_channel = slab * UInt32(LANES * config.width)
        self.channel = self.block_channel + self.lane * UInt32(config.width)
        self.d = Int32(self.plane) * geometry.step_d + geometry.start_d
        self.h = Int32(self.row) * Int32(config.stride) + geometry.start_h
        self.w = Int32(first) * Int32(config.stride) + geometry.start_w
        var steps = (self.end - self.row + UInt32(config.rows() - 1)) // UInt32(
            config.rows()
        )
        self.last_h = (
            self.h
            + Int32(steps) * Int32(config.step_rows())
            + Int32(config.window() - config.step_rows())
        )
        self.active = (
            strip < geometry.strips and self.channel < geometry.channels
        )
        if not self.active:
            self.channel = 0

    @always_inline
    def output_offset(self, geometry: StripGeometry) -> Int:
        """Elements before the thread's first output."""
        var plane = Int(self.image) * Int(geometry.out_planes.value) + Int(
            self.plane
        )
        var line = plane * Int(geometry.out_rows) + Int(self.row)
        return (line * Int(geometry.out_columns) + Int(self.column)) * Int(
            geometry.channels
        ) + Int(self.channel)


@fieldwise_init
struct StripKernel[
    dtype: DType,
    bias_type: DType,
    residual_type: DType,
    Output: OutputTarget,
    config: StripConfig,
]:
    """The kernel of a configuration.

    Parameters:
        dtype: Of activation and filter.
        bias_type: Of the bias.
        residual_type: Of the residual.
        Output: How the output is reached.
        config: The configuration.
    """

    comptime width = Self.config.width
    comptime rows = Self.config.rows()
    comptime taps = Self.config.taps
    comptime pixels = Self.rows * COLUMNS
    comptime lane_bytes = Self.config.lane_bytes
    comptime pixel_bytes = Self.config.pixel_bytes()
    """Of a pixel in shared memory."""
    comptime pixel_chunks = Self.pixel_bytes // CHUNK_BYTES
    comptime Vector = SIMD[DType.float32, Self.width]
    comptime Loaded = SIMD[Self.dtype, Self.width]
    comptime Line = StaticTuple[Self.Loaded, Self.config.input_columns()]
    comptime Sums = StaticTuple[Self.Vector, Self.pixels]
    comptime Residual = SIMD[Self.residual_type, COLUMNS * Self.width]
    comptime FusedWork = Epilogue[Self.bias_type, Self.residual_type]

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
            Int32(MAX_THREADS)
        ),
        `nvvm.minctasm`=SIMDLength(Self.config.resident()),
    )
    def run(
        activation: Reads[Self.dtype],
        filter: Reads[filter_dtype(Self.dtype)],
        epilogue: Self.FusedWork,
        output: Self.Output,
        geometry: StripGeometry,
    ):
        """A block: its rows, step by step.

        Args:
            activation: `[N, D, H, W, C]`.
            filter: `[K, 1, R, S, 1]`.
            epilogue: What happens before the store.
            output: `[N, Z, P, Q, K]`.
            geometry: The problem.
        """
        comptime ring = Self.config.ring()
        comptime window = Self.config.window()
        comptime step_rows = Self.config.step_rows()
        comptime ahead = Self.config.ahead()
        var shared = external_memory[
            UInt8, address_space=AddressSpace.SHARED, alignment=CHUNK_BYTES
        ]()
        var filters = SharedBytes(unsafe_from_address=Int(shared))
        var ring_data = filters.unsafe_offset(Self.config.filter_bytes())
        var block = StripBlock(Self.config, geometry)
        wait_for_earlier_kernels()
        Self._copy_rows[window](activation, geometry, block, ring_data, 0)
        comptime for i in range(ahead - 1):
            Self._copy_rows[step_rows](
                activation,
                geometry,
                block,
                ring_data,
                UInt32(window + i * step_rows),
            )
        Self._pack_filter(filter, geometry, block, filters)
        barrier()
        var bias = epilogue.load_bias[Self.width, Self.width](
            Int(block.channel)
        )
        var first = UInt32(0)
        var offset = block.output_offset(geometry)
        for row in range(block.row, block.end, UInt32(Self.rows)):
            await_copies[ahead - 1]()
            barrier()
            Self._copy_rows[step_rows](
                activation,
                geometry,
                block,
                ring_data,
                first + UInt32(window + (ahead - 1) * step_rows),
            )
            var sums = Self._convolve(
                geometry, block, ring_data, filters, first
            )
            var place = StripPlace(geometry, block, row, offset)
            Self._store(epilogue, output, place, sums, bias)
            first += UInt32(step_rows)
            offset += Self.rows * place.row_elements

    @staticmethod
    @always_inline
    def _copy_rows[
        count: Int
    ](
        activation: Reads[Self.dtype],
        geometry: StripGeometry,
        block: StripBlock,
        ring_data: SharedBytes,
        first: UInt32,
    ):
        """Starts copying `count` of the block's input rows, and commits the
        group."""
        comptime chunk = CHUNK_BYTES // size_of[Self.dtype]()
        var row_chunks = geometry.staged_columns.value * UInt32(
            Self.pixel_chunks
        )
        var from_rows = StaticTuple[Int, count]()
        var to_rows = StaticTuple[UInt32, count]()
        var exist = StaticTuple[Bool, count]()
        var image = Int(block.image) * Int(geometry.depth) + Int(block.d)
        var slot = first % UInt32(Self.config.ring())
        comptime for r in range(count):
            var h = block.h + Int32(first + UInt32(r))
            exist[r] = (
                h < block.last_h
                and UInt32(block.d) < UInt32(geometry.depth)
                and UInt32(h) < UInt32(geometry.height)
            )
            var pixel = (image * Int(geometry.height) + Int(h)) * Int(
                geometry.width
            ) + Int(block.w)
            from_rows[r] = pixel * Int(geometry.channels) + Int(
                block.block_channel
            )
            to_rows[r] = slot * Self._row_bytes(geometry)
            slot += 1
            if slot == UInt32(Self.config.ring()):
                slot = 0
        for i in range(UInt32(thread_idx.x), row_chunks, UInt32(block_dim.x)):
            var column, part = divmod(i, UInt32(Self.pixel_chunks))
            var c = part * UInt32(chunk)
            var inside = (
                UInt32(block.w + Int32(column)) < UInt32(geometry.width)
                and block.block_channel + c < geometry.channels
            )
            var from_ = column * geometry.channels + c
            comptime for r in range(count):
                var exists = inside and exist[r]
                copy_chunk(
                    UInt32(Int(ring_data)) + to_rows[r] + i * CHUNK_BYTES,
                    activation.unsafe_offset(
                        from_rows[r] + Int(from_) if exists else 0
                    ),
                    exists,
                )
        close_copies()

    @staticmethod
    @always_inline
    def _row_bytes(geometry: StripGeometry) -> UInt32:
        """Bytes of an input row in shared memory."""
        return geometry.staged_columns.value * UInt32(Self.pixel_bytes)

    @staticmethod
    @always_inline
    def _pack_filter(
        filter: Reads[filter_dtype(Self.dtype)],
        geometry: StripGeometry,
        block: StripBlock,
        to: SharedBytes,
    ):
        """Loads the block's filters into shared memory, `[taps][channels]`,
        float32."""
        comptime taps = UInt32(Self.taps * Self.taps)
        comptime channels = UInt32(LANES * Self.width)
        var data = to.unsafe_bitcast[Float32]()
        for i in range(
            UInt32(thread_idx.x), taps * channels, UInt32(block_dim.x)
        ):
            var c, tap = divmod(i, taps)
            var value = Float32(0)
            if block.block_channel + c < geometry.channels:
                var from_ = (block.block_channel + c) * taps + tap
                value = filter[unsafe_offset=Int(from_)].cast[DType.float32]()
            data.unsafe_store(Int(tap * channels + c), value)

    @staticmethod
    @always_inline
    def _weight(
        filters: SharedBytes, block: StripBlock, tap: Int
    ) -> Self.Vector:
        """The thread's filters at a tap."""
        return (
            filters.unsafe_bitcast[Float32]()
            .unsafe_offset(Int(block.lane) * Self.width)
            .unsafe_load[width=Self.width, alignment=Self.width * 4](
                tap * LANES * Self.width
            )
        )

    @staticmethod
    @always_inline
    def _convolve(
        geometry: StripGeometry,
        block: StripBlock,
        ring_data: SharedBytes,
        filters: SharedBytes,
        first: UInt32,
    ) -> Self.Sums:
        """A step's sums, row by row. The rows are a loop, because the loads
        that the compiler would hoist do not fit the registers."""
        comptime window = Self.config.window()
        var sums = Self.Sums(fill=Self.Vector(0))
        var pixel = block.strip * UInt32(COLUMNS * Self.config.stride)
        var thread = ring_data.unsafe_offset(
            Int(pixel) * Self.pixel_bytes + Int(block.lane) * Self.lane_bytes
        )
        var row_bytes = Self._row_bytes(geometry)
        var slot = first % UInt32(Self.config.ring())
        for i in range(Int32(window)):
            var line = Self._load_line(
                thread.unsafe_offset(Int(slot * row_bytes))
            )
            comptime for p in range(Self.rows):
                var r = i - Int32(p * Self.config.stride)
                if r >= 0 and r < Int32(Self.taps):
                    Self._add_row[p](line, filters, block, Int(r), sums)
            slot += 1
            if slot == UInt32(Self.config.ring()):
                slot = 0
        return sums

    @staticmethod
    @always_inline
    def _load_line(data: SharedBytes) -> Self.Line:
        """The thread's pixels of an input row."""
        var line = Self.Line(fill=Self.Loaded(0))
        comptime for j in range(Self.config.input_columns()):
            line[j] = (
                data.unsafe_offset(j * Self.pixel_bytes)
                .unsafe_bitcast[Scalar[Self.dtype]]()
                .unsafe_load[width=Self.width, alignment=Self.lane_bytes](0)
            )
        return line

    @staticmethod
    @always_inline
    def _add_row[
        p: Int
    ](
        line: Self.Line,
        filters: SharedBytes,
        block: StripBlock,
        r: Int,
        mut sums: Self.Sums,
    ):
        """Adds a row of taps, times an input row, to row `p` of the step."""
        comptime for s in range(Self.taps):
            var weight = Self._weight(filters, block, r * Self.taps + s)
            comptime for q in range(COLUMNS):
                comptime sum = p * COLUMNS + q
                var value = line[q * Self.config.stride + s]
                sums[sum] = widen(value).fma(weight, sums[sum])

    @staticmethod
    @always_inline
    def _load_residual[
        p: Int
    ](epilogue: Self.FusedWork, place: StripPlace) -> Self.Residual:
        """Loads the residual of a step's row."""
        var residual = Self.Residual(0)
        if epilogue.has_residual:
            comptime for q in range(COLUMNS):
                residual = residual.insert[offset=q * Self.width](
                    epilogue.load_residual[Self.width, Self.width](
                        place.safe_offset[p, q]()
                    )
                )
        return residual

    @staticmethod
    @always_inline
    def _store(
        epilogue: Self.FusedWork,
        output: Self.Output,
        place: StripPlace,
        sums: Self.Sums,
        bias: Self.Vector,
    ):
        """Finishes and stores a step's outputs, a row at a time."""
        comptime width = COLUMNS * Self.width
        comptime for p in range(Self.rows):
            var residual = Self._load_residual[p](epilogue, place)
            var rounded = SIMD[Self.Output.dtype, width](0)
            comptime for q in range(COLUMNS):
                comptime at = q * Self.width
                var value = epilogue.finish[Self.width](
                    epilogue.scaled[Self.width, Self.width](
                        sums[p * COLUMNS + q], place.channel
                    ),
                    bias,
                    residual.slice[Self.width, offset=at](),
                )
                rounded = rounded.insert[offset=at](
                    value.cast[Self.Output.dtype]()
                )
            comptime if not Self.Output.stores:
                # All fused work, then all stores, so that its loads overlap.
                comptime for q in range(COLUMNS):
                    comptime at = q * Self.width
                    rounded = rounded.insert[offset=at](
                        output.compute[Self.width](
                            place.image,
                            place.safe_position[p, q](),
                            place.channel,
                            rounded.slice[Self.width, offset=at](),
                        )
                    )
            comptime for q in range(COLUMNS):
                var value = rounded.slice[Self.width, offset=q * Self.width]()
                if place.exists[p, q]():
                    comptime if Self.Output.stores:
                        output.store[Self.width](
                            place.image,
                            place.safe_position[p, q](),
                            place.channel,
                            place.offset_of[p, q](),
                            value,
                        )
                    else:
                        comptime bytes = Self.width * size_of[
                            Self.Output.dtype
                        ]()
                        output.data().unsafe_store[alignment=bytes](
                            place.offset_of[p, q](), value
                        )


struct StripPlace(TrivialRegisterPassable):
    """The addresses of a thread's outputs of a step."""

    var image: Int
    var plane: UInt32
    var row: UInt32
    var column: UInt32
    var channel: Int
    var offset: Int
    """Of the first output."""
    var row_elements: Int
    """From a row to the next."""
    var channels: UInt32
    var rows_left: UInt32
    """Rows of the block from here on; none if the thread has no outputs."""
    var columns_left: UInt32

    @always_inline
    def __init__(
        out self,
        geometry: StripGeometry,
        block: StripBlock,
        row: UInt32,
        offset: Int,
    ):
        """Finds them.

        Args:
            geometry: The problem.
            block: The block.
            row: The step's first row.
            offset: The first output's offset.
        """
        self.image = Int(block.image)
        self.plane = block.plane
        self.row = row
        self.column = block.column
        self.channel = Int(block.channel)
        self.offset = offset
        self.row_elements = Int(geometry.out_columns) * Int(geometry.channels)
        self.channels = geometry.channels
        self.rows_left = block.end - row if block.active else 0
        self.columns_left = geometry.out_columns - min(
            block.column, geometry.out_columns
        )

    @always_inline
    def exists[p: Int, q: Int](self) -> Bool:
        """Whether there is an output.

        Parameters:
            p: Its row of the step.
            q: Its column of the thread.
        """
        return UInt32(p) < self.rows_left and UInt32(q) < self.columns_left

    @always_inline
    def offset_of[p: Int, q: Int](self) -> Int:
        """An output's offset.

        Parameters:
            p: Its row of the step.
            q: Its column of the thread.
        """
        return (
            self.offset + p * self.row_elements + Int(UInt32(q) * self.channels)
        )

    @always_inline
    def safe_offset[p: Int, q: Int](self) -> Int:
        """An output's offset, 0 if there is none.

        Parameters:
            p: Its row of the step.
            q: Its column of the thread.
        """
        return self.offset_of[p, q]() if self.exists[p, q]() else 0

    @always_inline
    def safe_position[p: Int, q: Int](self) -> IndexList[SPATIAL]:
        """An output's pixel, the first of the plane if there is none.

        Parameters:
            p: Its row of the step.
            q: Its column of the thread.
        """
        var there = self.exists[p, q]()
        return IndexList[SPATIAL](
            Int(self.plane),
            Int(self.row) + p if there else 0,
            Int(self.column) + q if there else 0,
        )
