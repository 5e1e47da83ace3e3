"""Matrices of 8 pixels by 8 channels of a 16-bit type, and their products.

A matrix is one register of each thread of a warp: elements `2 * (lane % 4)` and
the next of row `lane / 4`. In shared memory its rows are 16 bytes each, at
addresses that the lanes pass.
"""

from std.memory import bitcast
from std.sys._assembly import inlined_assembly
from std.sys.intrinsics import _RegisterPackType
from std.utils import StaticTuple

from ....conv.memory import Reads
from ...tma.copy import SharedAddress
from .plan import MATRIX, MATRIX_LOG

comptime Sums = SIMD[DType.float32, 4]
"""A thread's sums of two matrices of pixels: two neighbouring channels of the
first, then of the second."""


@always_inline
def unknown_sum(first: UInt32, second: UInt32) -> UInt32:
    """The sum of two numbers, opaque to the compiler. It neither hoists the sum
    out of a loop nor keeps it for later, where each sum would take a
    register."""
    return inlined_assembly[
        "add.u32 $0, $1, $2;", UInt32, constraints="=r,r,r"
    ](first, second)


@always_inline
def thread_anew() -> UInt32:
    """The index of the thread in its block, read where it is used: it takes no
    register before."""
    return inlined_assembly["mov.u32 $0, %tid.x;", UInt32, constraints="=r"]()


@always_inline
def larger_or_unknown[dtype: DType](first: UInt32, second: UInt32) -> UInt32:
    """The larger of two numbers, NaN if one of them is, in both halves of a
    register (PTX ISA, "max").

    Parameters:
        dtype: Of the numbers: bfloat16 or float16.

    Args:
        first: Two numbers.
        second: Two more.
    """
    comptime assert dtype.is_half_float()
    comptime name = String(
        "max.NaN.",
        "bf16x2" if dtype == DType.bfloat16 else "f16x2",
        " $0, $1, $2;",
    )
    return inlined_assembly[
        name, UInt32, constraints="=r,r,r", has_side_effect=False
    ](first, second)


@always_inline
def keep_rolled():
    """Keeps the assembler from unrolling a loop, at the start of its body (PTX
    ISA, "Pragma Strings: nounroll")."""
    inlined_assembly['.pragma "nounroll";', NoneType, constraints="~{memory}"]()


@always_inline
def store_matrices(address: SharedAddress, first: UInt32, second: UInt32):
    """Stores two matrices (PTX ISA, "stmatrix").

    Args:
        address: Of row `lane % 8` of matrix `lane / 8`, of the first 16 lanes.
        first: A matrix.
        second: Another.
    """
    inlined_assembly[
        "stmatrix.sync.aligned.m8n8.x2.shared.b16 [$0], {$1, $2};",
        NoneType,
        constraints="r,r,r,~{memory}",
    ](address, first, second)


struct DiagonalFilter[dtype: DType, taps: Int, chunks: Int](
    TrivialRegisterPassable
):
    """The filters of 8 output channels: for each tap one or several matrices of
    8 input channels by 8 output channels. Groups of fewer channels are blocks
    on the diagonal; the rest is zero.

    Parameters:
        dtype: Of the elements: bfloat16 or float16.
        taps: Along each of two dimensions.
        chunks: Of 8 input channels, that the output channels take.
    """

    comptime count = Self.taps * Self.taps
    comptime Loaded = StaticTuple[UInt32, Self.count * Self.chunks]
    """The thread's elements of each matrix, or of the one beside it."""

    var bits: Self.Loaded

    @always_inline
    def __init__(out self):
        """Zeros."""
        self.bits = Self.Loaded(fill=0)

    @staticmethod
    @always_inline
    def load(
        filter: Reads[Self.dtype],
        channel: Int,
        group_log: UInt32,
        lane: UInt32,
    ) -> Self.Loaded:
        """Starts loading the filters.

        Args:
            filter: `[K, R, S, C / groups]`, at a multiple of 4 bytes.
            channel: The first output channel.
            group_log: The logarithm of a group's channels, to base 2.
            lane: Of this thread.
        """
        comptime if Self.chunks > 1:
            return Self._load[MATRIX * Self.chunks](filter, channel, lane)
        # Taps at compile-time offsets: each address would take two registers.
        comptime for log in range(MATRIX_LOG):
            if group_log == UInt32(log):
                return Self._load[1 << log](filter, channel, lane)
        return Self._load[MATRIX](filter, channel, lane)

    @staticmethod
    @always_inline
    def _load[
        width: Int
    ](filter: Reads[Self.dtype], channel: Int, lane: UInt32) -> Self.Loaded:
        """`load` for groups of `width` channels."""
        var data = filter.unsafe_offset(
            (channel + Int(lane // 4)) * Self.count * width
        )
        var loaded = Self.Loaded(fill=0)
        var first = channel + Int(lane % 4 * 2)
        comptime for i in range(Self.count):
            comptime for j in range(Self.chunks):
                comptime if width == 1:
                    var element = data[unsafe_offset=i]
                    loaded[i] = UInt32(bitcast[DType.uint16, 1](element)[0])
                else:
                    # The warp's own chunk, then those beside it.
                    var column = (first ^ (j * MATRIX)) & (width - 1)
                    loaded[i * Self.chunks + j] = bitcast[DType.uint32, 1](
                        data.unsafe_load[width=2, alignment=4](
                            i * width + column
                        )
                    )
        return loaded

    @always_inline
    def __init__(
        out self, loaded: Self.Loaded, group_log: UInt32, lane: UInt32
    ):
        """The matrices of what was loaded.

        Args:
            loaded: By `load`.
            group_log: The logarithm of a group's channels, to base 2.
            lane: Of this thread.
        """
        self.bits = loaded
        comptime if Self.chunks == 1:
            # A group of one channel is half of what a thread has.
            var row = lane // 4
            var log = max(group_log, 1)
            var holds = row >> log == lane % 4 * 2 >> log
            var high = group_log == 0 and row % 2 == 1
            comptime for i in range(Self.count):
                var word = loaded[i] if holds else 0
                self.bits[i] = word << 16 if high else word

    @always_inline
    def matrix[tap: Int, chunk: Int = 0](self) -> UInt32:
        """A tap's matrix, as a multiply takes it.

        Parameters:
            tap: Its index, `r * taps + s`.
            chunk: Of the input channels: the warp's own, then those beside it.
        """
        return self.bits[tap * Self.chunks + chunk]


@always_inline
def multiply_two[
    dtype: DType
](
    sums: Sums,
    first: StaticTuple[UInt32, 2],
    first_tap: UInt32,
    second: StaticTuple[UInt32, 2],
    second_tap: UInt32,
) -> Sums:
    """Adds two taps of 16 pixels, or one of twice the channels (PTX ISA,
    "mma.sync", m16n8k16).

    Parameters:
        dtype: Of the elements: bfloat16 or float16.

    Args:
        sums: The sums.
        first: The pixels that a tap sees.
        first_tap: The tap's matrix.
        second: The pixels that another tap sees, or other channels.
        second_tap: Its matrix.

    Returns:
        The new sums.
    """
    comptime assert dtype.is_half_float()
    comptime element = "bf16" if dtype == DType.bfloat16 else "f16"
    comptime name = String(
        "mma.sync.aligned.m16n8k16.row.col.f32.",
        element,
        ".",
        element,
        (
            ".f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11,"
            " $12, $13};"
        ),
    )
    var new = inlined_assembly[
        name,
        _RegisterPackType[Float32, Float32, Float32, Float32],
        constraints="=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        has_side_effect=False,
    ](
        first[0],
        first[1],
        second[0],
        second[1],
        first_tap,
        second_tap,
        sums[0],
        sums[1],
        sums[2],
        sums[3],
    )
    return Sums(new[0], new[1], new[2], new[3])


@always_inline
def multiply_one[
    dtype: DType
](sums: Sums, pixels: StaticTuple[UInt32, 2], tap: UInt32) -> Sums:
    """Adds one tap of 16 pixels (PTX ISA, "mma.sync", m16n8k8).

    Parameters:
        dtype: Of the elements: bfloat16 or float16.

    Args:
        sums: The sums.
        pixels: The pixels that the tap sees.
        tap: Its matrix.

    Returns:
        The new sums.
    """
    comptime assert dtype.is_half_float()
    comptime element = "bf16" if dtype == DType.bfloat16 else "f16"
    comptime name = String(
        "mma.sync.aligned.m16n8k8.row.col.f32.",
        element,
        ".",
        element,
        ".f32 {$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $8, $9, $10};",
    )
    var new = inlined_assembly[
        name,
        _RegisterPackType[Float32, Float32, Float32, Float32],
        constraints="=f,=f,=f,=f,r,r,r,f,f,f,f",
        has_side_effect=False,
    ](pixels[0], pixels[1], tap, sums[0], sums[1], sums[2], sums[3])
    return Sums(new[0], new[1], new[2], new[3])
