"""The GPU's strip kernel, for depthwise filters of the common sizes.

    every step:   wait for the step's input rows, ask for those of a later step
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
from std.memory import bitcast
from std.sys._assembly import inlined_assembly
from std.sys.info import size_of
from std.utils import StaticTuple

from ..conv.access import OutputTarget
from ..conv.epilogue import Epilogue
from ..conv.memory import Reads
from .depthwise_strip_block import StripBlock, StripPlace
from .depthwise_strips import (
    CHUNK_BYTES,
    COLUMNS,
    LANES,
    LANE_BYTES,
    MAX_THREADS,
    PIXEL_BYTES,
    StripConfig,
    StripGeometry,
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
def _widen[
    dtype: DType, width: SIMDLength
](value: SIMD[dtype, width]) -> SIMD[DType.float32, width]:
    """The values in float32; of a pair of bfloat16 with one instruction each.
    """
    comptime if dtype != DType.bfloat16 or Int(width) % 2 != 0:
        return value.cast[DType.float32]()
    else:
        comptime pairs = Int(width) // 2
        var bits = bitcast[DType.uint32, pairs](value)
        var result = SIMD[DType.uint32, width](0)
        comptime for i in range(pairs):
            result[2 * i] = bits[i] << 16
            result[2 * i + 1] = bits[i] & 0xFFFF0000
        return bitcast[DType.float32, width](result)


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
    comptime Vector = SIMD[DType.float32, Self.width]
    comptime roomy = Self.config.is_roomy()
    comptime kept = DType.float32 if Self.roomy and Self.taps < 7 else Self.dtype
    """Type of input pixels in registers."""
    comptime Kept = SIMD[Self.kept, Self.width]
    comptime Line = StaticTuple[Self.Kept, Self.config.input_columns()]
    comptime Sums = StaticTuple[Self.Vector, Self.pixels]
    comptime Residual = SIMD[Self.residual_type, Self.pixels * Self.width]
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
        var bias = epilogue.load_bias[Self.width, Self.width](
            Int(block.channel)
        )
        var first = UInt32(0)
        var offset = block.output_offset(geometry)
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
            var place = StripPlace(geometry, block, row, offset)
            var residual = Self.Residual(0)
            comptime if Self.roomy:
                residual = Self._load_residual(epilogue, place)
            var sums = Self._convolve(
                geometry, block, ring_data, filters, first
            )
            comptime if not Self.roomy:
                residual = Self._load_residual(epilogue, place)
            Self._store(epilogue, output, place, sums, bias, residual)
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
        """Starts copying `count` of the block's input rows, and closes the
        group."""
        comptime chunk = CHUNK_BYTES // size_of[Self.dtype]()
        var row_chunks = geometry.staged_columns.value * PIXEL_CHUNKS
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
            to_rows[r] = slot * geometry.staged_columns.value * PIXEL_BYTES
            slot += 1
            if slot == UInt32(Self.config.ring()):
                slot = 0
        for i in range(UInt32(thread_idx.x), row_chunks, UInt32(block_dim.x)):
            var column, part = divmod(i, UInt32(PIXEL_CHUNKS))
            var c = part * UInt32(chunk)
            var inside = (
                UInt32(block.w + Int32(column)) < UInt32(geometry.width)
                and block.block_channel + c < geometry.channels
            )
            var from_ = column * geometry.channels + c
            comptime for r in range(count):
                var exists = inside and exist[r]
                _copy_chunk(
                    ring_data.unsafe_offset(Int(to_rows[r] + i * CHUNK_BYTES)),
                    activation.unsafe_offset(
                        from_rows[r] + Int(from_) if exists else 0
                    ),
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
        """A step's sums, row by row: in a loop, as registers do not hold what the
        compiler would load ahead."""
        comptime window = Self.config.window()
        var sums = Self.Sums(fill=Self.Vector(0))
        var pixel = block.strip * UInt32(COLUMNS * Self.config.stride)
        var thread = ring_data.unsafe_offset(
            Int(pixel * PIXEL_BYTES + block.lane * LANE_BYTES)
        )
        var row_bytes = geometry.staged_columns.value * PIXEL_BYTES
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
        var line = Self.Line(fill=Self.Kept(0))
        comptime for j in range(Self.config.input_columns()):
            var value = (
                data.unsafe_offset(j * PIXEL_BYTES)
                .unsafe_bitcast[Scalar[Self.dtype]]()
                .unsafe_load[width=Self.width, alignment=LANE_BYTES](0)
            )
            comptime if Self.kept == DType.float32:
                line[j] = rebind[Self.Kept](_widen(value))
            else:
                line[j] = rebind[Self.Kept](value)
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
                sums[sum] = _widen(value).fma(weight, sums[sum])

    @staticmethod
    @always_inline
    def _load_residual(
        epilogue: Self.FusedWork, place: StripPlace
    ) -> Self.Residual:
        """Loads a step's residual."""
        var residual = Self.Residual(0)
        if epilogue.has_residual:
            comptime for i in range(Self.pixels):
                comptime p, q = divmod(i, COLUMNS)
                residual = residual.insert[offset=i * Self.width](
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
        residual: Self.Residual,
    ):
        """Finishes and stores a step's outputs, a row at a time."""
        comptime width = COLUMNS * Self.width
        comptime together = COLUMNS if Self.roomy and Self.taps < 7 else 1
        comptime for p in range(Self.rows):
            var rounded = SIMD[Self.Output.dtype, width](0)
            comptime for q in range(0, COLUMNS, together):
                var values = SIMD[DType.float32, together * Self.width](0)
                var biases = SIMD[DType.float32, together * Self.width](0)
                comptime for i in range(together):
                    comptime at = i * Self.width
                    values = values.insert[offset=at](sums[p * COLUMNS + q + i])
                    biases = biases.insert[offset=at](bias)
                comptime at = (p * COLUMNS + q) * Self.width
                var finished = epilogue.finish[together * Self.width](
                    values,
                    biases,
                    residual.slice[together * Self.width, offset=at](),
                )
                rounded = rounded.insert[offset=q * Self.width](
                    finished.cast[Self.Output.dtype]()
                )
            comptime if not Self.Output.stores:
                # All fused work, then all stores: what it loads comes together.
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
