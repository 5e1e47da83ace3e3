"""The GPU's strip kernel, for depthwise filters of the common sizes.

    every step:   wait for the step's input rows, ask for those of a later step
                  residual -> registers
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
from std.sys._assembly import inlined_assembly
from std.sys.info import size_of
from std.utils import IndexList, StaticTuple

from ..conv.access import OutputTarget
from ..conv.epilogue import Epilogue
from ..conv.memory import Reads
from ..conv.problem import SPATIAL
from .depthwise_strips import (
    CHUNK_BYTES,
    COLUMNS,
    LANES,
    LANE_BYTES,
    MAX_THREADS,
    MULTIPROCESSOR_REGISTERS,
    PIXEL_BYTES,
    StripConfig,
    StripGeometry,
    THREAD_REGISTERS,
)

comptime SharedBytes = Pointer[
    UInt8, MutUntrackedOrigin, address_space=AddressSpace.SHARED
]
"""Bytes of a block's shared memory."""

comptime PIXEL_CHUNKS = PIXEL_BYTES // CHUNK_BYTES


@always_inline
def _copy_chunk(to: SharedBytes, from_: Reads, exists: Bool):
    """Starts copying 16 bytes to shared memory; zeros if there are none (PTX
    ISA, "cp.async")."""
    inlined_assembly[
        "cp.async.cg.shared.global [$0], [$1], 16, $2;",
        NoneType,
        constraints="r,l,r,~{memory}",
    ](
        UInt32(Int(to)),
        UInt64(Int(from_)),
        UInt32(CHUNK_BYTES) if exists else UInt32(0),
    )


@always_inline
def _close_copies():
    """Closes the group of this thread's copies."""
    inlined_assembly[
        "cp.async.commit_group;", NoneType, constraints="~{memory}"
    ]()


@always_inline
def _await_copies[pending: Int]():
    """Waits for all but the latest groups of this thread's copies."""
    inlined_assembly[
        "cp.async.wait_group $0;", NoneType, constraints="n,~{memory}"
    ](pending)


@fieldwise_init
struct StripBlock(TrivialRegisterPassable):
    """Where a block and a thread of it are in the problem."""

    var image: UInt32
    var plane: UInt32
    var row: UInt32
    """The block's first output row."""
    var end: UInt32
    """Behind its last."""
    var column: UInt32
    """The thread's first output column."""
    var channel: UInt32
    """The thread's first channel."""
    var block_channel: UInt32
    var d: Int32
    var h: Int32
    var w: Int32
    """The block's first input pixel."""
    var strip: UInt32
    var lane: UInt32

    @always_inline
    def __init__(out self, config: StripConfig, geometry: StripGeometry):
        """Finds them.

        Args:
            config: The configuration.
            geometry: The problem.
        """
        var rest, slab = geometry.slabs.split(UInt32(block_idx.x))
        var more, group = geometry.groups.split(rest)
        var down, segment = geometry.segments.split(more)
        self.image, self.plane = geometry.out_planes.split(down)
        self.strip, self.lane = divmod(UInt32(thread_idx.x), UInt32(LANES))
        self.row = segment * geometry.rows
        self.end = min(self.row + geometry.rows, geometry.out_rows)
        var first = group * geometry.strips * UInt32(COLUMNS)
        self.column = first + self.strip * UInt32(COLUMNS)
        self.block_channel = slab * UInt32(LANES * config.width)
        self.channel = self.block_channel + self.lane * UInt32(config.width)
        self.d = Int32(self.plane) * geometry.step_d + geometry.start_d
        self.h = Int32(self.row) * Int32(config.stride) + geometry.start_h
        self.w = Int32(first) * Int32(config.stride) + geometry.start_w


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
    comptime outputs = Self.pixels * Self.width
    comptime Vector = SIMD[DType.float32, Self.width]
    comptime Sums = StaticTuple[Self.Vector, Self.pixels]
    comptime Residual = SIMD[Self.residual_type, Self.outputs]
    comptime FusedWork = Epilogue[Self.bias_type, Self.residual_type]

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
            Int32(MAX_THREADS)
        ),
        `nvvm.minctasm`=SIMDLength(
            MULTIPROCESSOR_REGISTERS // (THREAD_REGISTERS * MAX_THREADS)
        ),
    )
    def run(
        activation: Reads[Self.dtype],
        filter: Reads[Self.dtype],
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
        var bias = Self.Vector(0)
        if block.channel < geometry.channels:
            bias = epilogue.load_bias[Self.width, Self.width](
                Int(block.channel)
            )
        var first = UInt32(0)
        for row in range(block.row, block.end, UInt32(Self.rows)):
            _await_copies[ahead - 1]()
            barrier()
            Self._copy_rows[step_rows](
                activation,
                geometry,
                block,
                ring_data,
                first + UInt32(window + (ahead - 1) * step_rows),
            )
            var residual = Self._load_residual(epilogue, geometry, block, row)
            var sums = Self._convolve(
                geometry, block, ring_data, filters, first
            )
            Self._store(
                epilogue, output, geometry, block, row, sums, bias, residual
            )
            first += UInt32(step_rows)

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
        """Starts copying `count` of the block's input rows, and closes the
        group."""
        comptime chunk = CHUNK_BYTES // size_of[Self.dtype]()
        var row_chunks = geometry.staged_columns.value * PIXEL_CHUNKS
        var image = Int(block.image) * Int(geometry.depth) + Int(block.d)
        var needed = (block.end - block.row + UInt32(Self.rows - 1)) // UInt32(
            Self.rows
        ) * UInt32(Self.config.step_rows()) + UInt32(
            Self.config.window() - Self.config.step_rows()
        )
        for i in range(
            UInt32(thread_idx.x),
            UInt32(count) * row_chunks,
            UInt32(block_dim.x),
        ):
            var pixel, part = divmod(i, UInt32(PIXEL_CHUNKS))
            var row, column = geometry.staged_columns.split(pixel)
            var h = block.h + Int32(first + row)
            var w = block.w + Int32(column)
            var c = block.block_channel + part * UInt32(chunk)
            var exists = (
                first + row < needed
                and UInt32(block.d) < UInt32(geometry.depth)
                and UInt32(h) < UInt32(geometry.height)
                and UInt32(w) < UInt32(geometry.width)
                and c < geometry.channels
            )
            var from_ = (
                (image * Int(geometry.height) + Int(h)) * Int(geometry.width)
                + Int(w)
            ) * Int(geometry.channels) + Int(c)
            var slot = (first + row) % UInt32(Self.config.ring())
            var to = (
                slot * geometry.staged_columns.value + column
            ) * PIXEL_BYTES + part * CHUNK_BYTES
            _copy_chunk(
                ring_data.unsafe_offset(Int(to)),
                activation.unsafe_offset(from_ if exists else 0),
                exists,
            )
        _close_copies()

    @staticmethod
    @always_inline
    def _pack_filter(
        filter: Reads[Self.dtype],
        geometry: StripGeometry,
        block: StripBlock,
        to: SharedBytes,
    ):
        """Brings the block's filters to shared memory, `[taps][channels]`,
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
        """A step's sums, row by row."""
        comptime window = Self.config.window()
        var sums = Self.Sums(fill=Self.Vector(0))
        var pixel = block.strip * UInt32(COLUMNS * Self.config.stride)
        var thread = ring_data.unsafe_offset(
            Int(pixel * PIXEL_BYTES + block.lane * LANE_BYTES)
        )
        var row_bytes = geometry.staged_columns.value * PIXEL_BYTES
        var slot = first % UInt32(Self.config.ring())
        for i in range(Int32(window)):
            var line = thread.unsafe_offset(Int(slot * row_bytes))
            comptime for p in range(Self.rows):
                var r = i - Int32(p * Self.config.stride)
                if r >= 0 and r < Int32(Self.taps):
                    var row = filters.unsafe_offset(
                        Int(r) * Self.taps * LANES * Self.width * 4
                    )
                    comptime for s in range(Self.taps):
                        Self._add[p, s](line, Self._weight(row, block, s), sums)
            slot += 1
            if slot == UInt32(Self.config.ring()):
                slot = 0
        return sums

    @staticmethod
    @always_inline
    def _add[
        p: Int, s: Int
    ](line: SharedBytes, weight: Self.Vector, mut sums: Self.Sums):
        """Adds a tap, times an input row, to row `p` of the step."""
        comptime for q in range(COLUMNS):
            comptime at = (q * Self.config.stride + s) * PIXEL_BYTES
            var value = (
                line.unsafe_offset(at)
                .unsafe_bitcast[Scalar[Self.dtype]]()
                .unsafe_load[width=Self.width, alignment=LANE_BYTES](0)
            )
            sums[p * COLUMNS + q] = value.cast[DType.float32]().fma(
                weight, sums[p * COLUMNS + q]
            )

    @staticmethod
    @always_inline
    def _pixel(
        geometry: StripGeometry, block: StripBlock, row: UInt32, index: Int
    ) -> StripPixel:
        """One of the thread's pixels; the first of the plane if there is no
        such pixel."""
        var p = row + UInt32(index // COLUMNS)
        var q = block.column + UInt32(index % COLUMNS)
        var exists = (
            p < block.end
            and q < geometry.out_columns
            and block.strip < geometry.strips
            and block.channel < geometry.channels
        )
        var channel = block.channel
        if not exists:
            p = 0
            q = 0
            channel = 0
        var plane = Int(block.image) * Int(geometry.out_planes.value) + Int(
            block.plane
        )
        var line = plane * Int(geometry.out_rows) + Int(p)
        var offset = (line * Int(geometry.out_columns) + Int(q)) * Int(
            geometry.channels
        ) + Int(channel)
        return StripPixel(
            Int(block.image),
            IndexList[SPATIAL](Int(block.plane), Int(p), Int(q)),
            Int(channel),
            offset,
            exists,
        )

    @staticmethod
    @always_inline
    def _load_residual(
        epilogue: Self.FusedWork,
        geometry: StripGeometry,
        block: StripBlock,
        row: UInt32,
    ) -> Self.Residual:
        """Loads a step's residual, ahead of its sums."""
        var residual = Self.Residual(0)
        if epilogue.has_residual:
            comptime for i in range(Self.pixels):
                var pixel = Self._pixel(geometry, block, row, i)
                residual = residual.insert[offset=i * Self.width](
                    epilogue.load_residual[Self.width, Self.width](pixel.offset)
                )
        return residual

    @staticmethod
    @always_inline
    def _store(
        epilogue: Self.FusedWork,
        output: Self.Output,
        geometry: StripGeometry,
        block: StripBlock,
        row: UInt32,
        sums: Self.Sums,
        bias: Self.Vector,
        residual: Self.Residual,
    ):
        """Finishes and stores a step's outputs, a row at a time."""
        comptime width = COLUMNS * Self.width
        comptime for p in range(Self.rows):
            var values = SIMD[DType.float32, width](0)
            var biases = SIMD[DType.float32, width](0)
            comptime for q in range(COLUMNS):
                comptime at = q * Self.width
                values = values.insert[offset=at](sums[p * COLUMNS + q])
                biases = biases.insert[offset=at](bias)
            var rounded = epilogue.finish[width](
                values, biases, residual.slice[width, offset=p * width]()
            ).cast[Self.Output.dtype]()
            comptime if not Self.Output.stores:
                # All fused work, then all stores: what it loads comes together.
                comptime for q in range(COLUMNS):
                    comptime at = q * Self.width
                    var pixel = Self._pixel(
                        geometry, block, row, p * COLUMNS + q
                    )
                    rounded = rounded.insert[offset=at](
                        output.compute[Self.width](
                            pixel.image,
                            pixel.at,
                            pixel.channel,
                            rounded.slice[Self.width, offset=at](),
                        )
                    )
            comptime for q in range(COLUMNS):
                var pixel = Self._pixel(geometry, block, row, p * COLUMNS + q)
                var value = rounded.slice[Self.width, offset=q * Self.width]()
                if pixel.exists:
                    comptime if Self.Output.stores:
                        output.store[Self.width](
                            pixel.image,
                            pixel.at,
                            pixel.channel,
                            pixel.offset,
                            value,
                        )
                    else:
                        comptime bytes = Self.width * size_of[
                            Self.Output.dtype
                        ]()
                        output.data().unsafe_store[alignment=bytes](
                            pixel.offset, value
                        )


@fieldwise_init
struct StripPixel(TrivialRegisterPassable):
    """An output pixel of a thread."""

    var image: Int
    var at: IndexList[SPATIAL]
    var channel: Int
    var offset: Int
    """Of the thread's first channel."""
    var exists: Bool
