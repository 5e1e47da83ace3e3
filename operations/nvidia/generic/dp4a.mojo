"""The implicit GEMM of int8 in the interleaved layouts, on the CUDA cores of any
GPU since compute capability 6.1: each dp4a adds the products of 4 channels.

A block computes a tile of filters by pixels (dp4a_tile.mojo):

    for each tap and step of channels:
        next step: words of filters and pixels, loaded into registers
        this step: multiplied from shared memory
        next step: registers -> the other half of shared memory
    sums -> shared memory -> epilogue -> output, pixels side by side

A word is 4 channels of one filter or one pixel, in memory as in shared memory.
"""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_idx,
    thread_idx,
)
from max.gpu.memory import external_memory
from std.sys.intrinsics import llvm_intrinsic
from std.utils import IndexList, StaticTuple

from ...conv.access import ActivationSource, OutputTarget
from ...conv.epilogue import Epilogue
from ...conv.fields import INTERLEAVED
from ...conv.memory import Reads
from ...conv.problem import SPATIAL
from ..geometry import IMAGE, OUTSIDE, Position
from ..overlap import wait_for_earlier_kernels
from .dp4a_geometry import Dp4aGeometry
from .dp4a_tile import VECTOR, Dp4aTile
from .rows import Shared

comptime Words = SIMD[DType.int32, VECTOR]
"""Four neighbouring words, or the sums of four neighbouring filters."""


@always_inline
def dot[dtype: DType](a: Int32, b: Int32, sum: Int32) -> Int32:
    """Adds the products of 4 bytes to a sum (PTX ISA, "dp4a").

    Parameters:
        dtype: Of the first ones: int8 or uint8.

    Args:
        a: Four of `dtype`.
        b: Four int8.
        sum: What they are added to; what is beyond 32 bits is lost.
    """
    comptime name = "llvm.nvvm.idp4a.u.s" if dtype == DType.uint8 else (
        "llvm.nvvm.idp4a.s.s"
    )
    return llvm_intrinsic[name, Int32](a, b, sum)


struct StepLoads[columns: Int, rows: Int, threads: Int, width: Int](
    ImplicitlyCopyable, Movable
):
    """A thread's words of one operand's part of a step: `rows` blocks of
    channels by `columns` filters or pixels.

    Parameters:
        columns: Of the tile.
        rows: Words of a step.
        threads: Of a block.
        width: Words of an access, neighbours along the columns.
    """

    comptime lanes = Self.columns // Self.width
    """Threads that load a row."""
    comptime lines = Self.threads // Self.lanes
    """Rows that all threads load at once."""
    comptime count = Self.rows // Self.lines
    """Accesses of a thread."""
    comptime Loaded = SIMD[DType.int32, Self.width]
    comptime Held = StaticTuple[Self.Loaded, Self.count]

    @staticmethod
    @always_inline
    def column() -> Int:
        """The first of the thread's columns."""
        return Int(thread_idx.x) % Self.lanes * Self.width

    @staticmethod
    @always_inline
    def line() -> Int:
        """The first of the thread's rows."""
        return Int(thread_idx.x) // Self.lanes

    @staticmethod
    @always_inline
    def load(words: Reads[DType.int32], stride: Int, left: Int) -> Self.Held:
        """Loads the thread's words; zeros beyond the problem.

        Args:
            words: The one of the thread's first row and column.
            stride: Words from one row to the next.
            left: Rows that the problem has from the step's first on, of the
                thread's column.
        """
        comptime assert Self.count * Self.lines == Self.rows
        var held = Self.Held(fill=Self.Loaded(0))
        comptime for i in range(Self.count):
            if Self.line() + i * Self.lines < left:
                held[i] = words.unsafe_load[
                    width=Self.width, alignment=4 * Self.width
                ](i * Self.lines * stride)
        return held

    @staticmethod
    @always_inline
    def stage(part: Shared[DType.int32], held: Self.Held):
        """Writes the words to shared memory.

        Args:
            part: The operand's part of a step.
            held: What `load` returned.
        """
        comptime for i in range(Self.count):
            var row = Self.line() + i * Self.lines
            part.unsafe_store[alignment=4 * Self.width](
                row * Self.columns + Self.column(), held[i]
            )


@fieldwise_init
struct Dp4aKernel[
    Source: ActivationSource,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
    tile: Dp4aTile,
    filter_width: Int,
    pixel_width: Int,
]:
    """The kernel of a tile.

    Parameters:
        Source: The activation's type, in memory and interleaved.
        Output: The output's type, a tensor `[N, K / 4, P, Q, 4]`.
        bias_type: Of the bias.
        residual_type: Of the residual.
        tile: The tile.
        filter_width: Words that an access of filters has: 1, or `VECTOR` where
            operands are aligned to as many; then outputs and the epilogue's
            operands are accessed by four too.
        pixel_width: The same of pixels, where `reads_vectors`.
    """

    comptime FusedWork = Epilogue[Self.bias_type, Self.residual_type]
    comptime words = Self.tile.words()
    comptime threads = Self.tile.threads()
    comptime Filters = StepLoads[
        Self.tile.filters, Self.words, Self.threads, Self.filter_width
    ]
    comptime Pixels = StepLoads[
        Self.tile.pixels, Self.words, Self.threads, Self.pixel_width
    ]
    comptime quads = Self.tile.filter_vectors()
    comptime Sums = StaticTuple[Words, Self.tile.thread_pixels * Self.quads]

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
            Int32(Self.tile.threads())
        )
    )
    def run(
        activation: Self.Source,
        filter: Reads[Self.Source.dtype],
        epilogue: Self.FusedWork,
        output: Self.Output,
        geometry: Dp4aGeometry,
    ):
        """A block: one tile.

        Args:
            activation: `[N, C / 4, H, W, 4]`.
            filter: `[C / 4, R, S, K, 4]`.
            epilogue: The epilogue; its residual is interleaved as the output.
            output: The output.
            geometry: The problem.
        """
        comptime assert Self.tile.is_valid(), "threads divide the tile evenly"
        comptime assert Self.Source.interleaved == INTERLEAVED
        comptime assert not Self.Source.fused, "words are read from memory"
        var staged = external_memory[
            Int32, address_space=AddressSpace.SHARED, alignment=16
        ]().unsafe_origin_cast[MutUntrackedOrigin]()
        var pixel = Self.tile.first_pixel(Int(block_idx.x))
        var first = Self.tile.first_filter(Int(block_idx.y))
        var sums = Self._multiply(
            activation.data().unsafe_bitcast[Int32](),
            filter.unsafe_bitcast[Int32](),
            geometry,
            staged,
            pixel,
            first,
        )
        Self._write_sums(staged, sums)
        barrier()
        Self._store(epilogue, output, geometry, staged, pixel, first)

    @staticmethod
    @always_inline
    def _multiply(
        activation: Reads[DType.int32],
        filter: Reads[DType.int32],
        geometry: Dp4aGeometry,
        staged: Shared[DType.int32],
        pixel: Int,
        first: Int,
    ) -> Self.Sums:
        """The thread's sums; shared memory is free again when every thread has
        returned."""
        var general = geometry.general
        var pieces = Int(general.channels) // INTERLEAVED
        var own = pixel + Self.Pixels.column()
        var origin = Position(OUTSIDE)
        if own < general.pixels:
            origin = geometry.pixel(own) * general.stride - general.padding
        var k = first + Self.Filters.column()
        var has_filter = k < Int(general.filters)
        # The thread's first words, of the first tap.
        var filters_from = filter.unsafe_offset(
            geometry.filter.block(0, Self.Filters.line(), 0, k)
        )
        var pixels_from = activation.unsafe_offset(
            geometry.activation.block(
                Int(origin[IMAGE]),
                Self.Pixels.line(),
                Int(origin[1]),
                Int(origin[2]),
            )
        )
        var sums = Self.Sums(fill=Words(0))
        var tap = UInt32(0)
        var piece = 0
        var loaded = 0
        var half = 0
        var steps = Self.tile.steps(Int(general.channels)) * Int(geometry.taps)
        wait_for_earlier_kernels()
        # The first turn only loads, the last one only multiplies.
        for step in range(steps + 1):
            var filters = Self.Filters.Held(fill=Self.Filters.Loaded(0))
            var pixels = Self.Pixels.Held(fill=Self.Pixels.Loaded(0))
            var left = pieces - piece
            if step < steps:
                var shift = general.tap(tap)
                filters = Self.Filters.load(
                    filters_from.unsafe_offset(
                        geometry.filter.block(0, piece, Int(tap), 0)
                    ),
                    geometry.filter.plane,
                    left if has_filter else 0,
                )
                pixels = Self.Pixels.load(
                    pixels_from.unsafe_offset(
                        geometry.activation.block(
                            0, piece, Int(shift[1]), Int(shift[2])
                        )
                    ),
                    geometry.activation.plane,
                    left if general.inside(origin + shift) else 0,
                )
            Self._multiply_step(sums, Self._half(staged, 1 - half), loaded)
            if step < steps:
                var part = Self._half(staged, half)
                Self.Filters.stage(part, filters)
                Self.Pixels.stage(
                    part.unsafe_offset(Self.words * Self.tile.filters), pixels
                )
            barrier()
            loaded = min(left, Self.words)
            half = 1 - half
            piece += Self.words
            if piece >= pieces:
                piece = 0
                tap += 1
        return sums

    @staticmethod
    @always_inline
    def _half(staged: Shared[DType.int32], half: Int) -> Shared[DType.int32]:
        """The shared memory of every other step."""
        return staged.unsafe_offset(half * Self.tile.step_words())

    @staticmethod
    @always_inline
    def _multiply_step(
        mut sums: Self.Sums, part: Shared[DType.int32], words: Int
    ):
        """Adds the products of a step's first words."""
        var row, column = divmod(Int(thread_idx.x), Self.tile.columns())
        var filters = part.unsafe_offset(
            Self.tile.shared_filter(0, column * VECTOR)
        )
        var pixels = part.unsafe_offset(Self.tile.shared_pixel(0, row * VECTOR))
        comptime height = Self.tile.pixel_vectors()
        for word in range(words):
            var b = StaticTuple[Words, Self.quads]()
            comptime for j in range(Self.quads):
                b[j] = filters.unsafe_load[width=VECTOR, alignment=16](
                    word * Self.tile.filters + j * Self.tile.columns() * VECTOR
                )
            comptime for i in range(height):
                var a = pixels.unsafe_load[width=VECTOR, alignment=16](
                    word * Self.tile.pixels + i * Self.tile.rows() * VECTOR
                )
                comptime for e in range(VECTOR):
                    comptime for j in range(Self.quads):
                        comptime at = (i * VECTOR + e) * Self.quads + j
                        var total = sums[at]
                        comptime for f in range(VECTOR):
                            total[f] = dot[Self.Source.dtype](
                                a[e], b[j][f], total[f]
                            )
                        sums[at] = total

    @staticmethod
    @always_inline
    def _write_sums(staged: Shared[DType.int32], sums: Self.Sums):
        """Writes the thread's sums as `[filters / 4, pixels, 4]`."""
        var row, column = divmod(Int(thread_idx.x), Self.tile.columns())
        comptime for i in range(Self.tile.pixel_vectors()):
            comptime for e in range(VECTOR):
                var pixel = (i * Self.tile.rows() + row) * VECTOR + e
                comptime for j in range(Self.quads):
                    var quad = j * Self.tile.columns() + column
                    staged.unsafe_store[alignment=16](
                        (quad * Self.tile.pixels + pixel) * VECTOR,
                        sums[(i * VECTOR + e) * Self.quads + j],
                    )

    @staticmethod
    @always_inline
    def _store(
        epilogue: Self.FusedWork,
        output: Self.Output,
        geometry: Dp4aGeometry,
        staged: Shared[DType.int32],
        pixel: Int,
        first: Int,
    ):
        """Applies the epilogue and stores: four filters of a pixel a thread,
        neighbouring pixels in neighbouring threads."""
        comptime pixels = UInt32(Self.tile.pixels)
        comptime steps = UInt32(Self.tile.filters // VECTOR) * pixels
        for index in range(UInt32(thread_idx.x), steps, UInt32(Self.threads)):
            var quad, column = divmod(index, pixels)
            var k = first + Int(quad) * VECTOR
            var own = pixel + Int(column)
            if own >= geometry.general.pixels or k >= Int(
                geometry.general.filters
            ):
                continue
            var total = staged.unsafe_load[width=VECTOR, alignment=16](
                Int(index) * VECTOR
            )
            var at = geometry.pixel(own)
            var n, p, q = Int(at[IMAGE]), Int(at[1]), Int(at[2])
            var offset = geometry.output.offset(n, k, p, q)
            # As a tensor the output has K / 4 planes of 4 channels.
            output.store[VECTOR, Self.filter_width](
                n,
                IndexList[SPATIAL](k // VECTOR, p, q),
                0,
                offset,
                epilogue.stored[Self.Output.dtype, VECTOR, Self.filter_width](
                    total, k, offset
                ),
            )
