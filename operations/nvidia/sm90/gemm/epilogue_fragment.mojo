"""A sub-tile's values between registers and shared memory.

A consumer's thread holds `EpilogueConfig.values` values of a sub-tile, in the
order of the multiply's registers (`Accumulators`). A buffer holds the sub-tile
as panels of 128-byte rows, a row a pixel, swizzled as TMA does: one
panel of 64 filters of a 16-bit type, or two of 32 filters of a 32-bit type.
"""

from std.memory import bitcast
from std.sys._assembly import inlined_assembly
from std.sys.info import size_of
from std.sys.intrinsics import _RegisterPackType

from ...limits import WARP
from ...pipeline.chunks import shared_pointer, swizzled
from ...tma.copy import SharedAddress
from .epilogue_config import ROW_BYTES, SUBTILE_FILTERS

comptime MATRIX_ROWS = 16
"""Rows and columns of the four 8x8 matrices that an instruction moves."""

comptime MATRIX_VALUES = 8
"""Values of a thread of four 8x8 matrices."""


def panel_filters[dtype: DType]() -> Int:
    """Filters of a panel.

    Parameters:
        dtype: Of the buffer's elements.
    """
    return ROW_BYTES // size_of[dtype]()


def panels[dtype: DType]() -> Int:
    """Panels of a buffer.

    Parameters:
        dtype: Of the buffer's elements.
    """
    return SUBTILE_FILTERS // panel_filters[dtype]()


@always_inline
def row_of(value: Int) -> Int:
    """The row of a thread's value, counted from the thread's first: the
    multiply's layout.

    Args:
        value: Its index in the sub-tile.
    """
    return 8 * (value // 2 % 2)


@always_inline
def column_of(value: Int) -> Int:
    """As `row_of`, the column.

    Args:
        value: Its index in the sub-tile.
    """
    return 8 * (value // 4) + value % 2


@fieldwise_init
struct Place[swapped: Bool](TrivialRegisterPassable):
    """Where in a sub-tile a thread's values lie.

    Parameters:
        swapped: Whether filters are the multiply's rows.
    """

    var warp: UInt32
    var lane: UInt32

    @always_inline
    def __init__(out self, thread: UInt32):
        """The place of a thread.

        Args:
            thread: Of the warpgroup.
        """
        self.warp, self.lane = divmod(thread, UInt32(WARP))

    @always_inline
    def filter(self) -> UInt32:
        """The filter of the thread's first value."""
        comptime if Self.swapped:
            return self.warp * 16 + self.lane // 4
        else:
            return self.lane % 4 * 2

    @always_inline
    def pixel(self) -> UInt32:
        """The pixel of the thread's first value."""
        comptime if Self.swapped:
            return self.lane % 4 * 2
        else:
            return self.warp * 16 + self.lane // 4

    @staticmethod
    def filter_of(value: Int) -> Int:
        """The filter of a thread's value, counted from its first.

        Args:
            value: Its index in the sub-tile.
        """
        return row_of(value) if Self.swapped else column_of(value)

    @staticmethod
    def pixel_of(value: Int) -> Int:
        """As `filter_of`, the pixel.

        Args:
            value: Its index in the sub-tile.
        """
        return column_of(value) if Self.swapped else row_of(value)

    @always_inline
    def matrices(self, group: UInt32) -> UInt32:
        """The offset in a buffer of the 16-byte row that this lane addresses
        in the instructions that move four 8x8 matrices.

        Args:
            group: Which four: `MATRIX_VALUES` values of the thread each.
        """
        comptime if Self.swapped:
            # A warp holds 16 filters, two chunks of every row.
            var row = (self.lane // 16) * 8 + self.lane % 8
            var chunk = self.warp * 2 + (self.lane // 8) % 2
            return swizzled[ROW_BYTES](row, chunk) + group * UInt32(
                MATRIX_ROWS * ROW_BYTES
            )
        else:
            # A warp holds 16 pixels; the swizzle moves pairs of chunks.
            var row = self.warp * 16 + self.lane % 16
            var chunk = self.lane // 16
            return swizzled[ROW_BYTES](row, chunk) ^ (group * 32)

    @always_inline
    def word[pixels: Int, value: Int](self, group: UInt32) -> UInt32:
        """The offset in a buffer of one of the thread's 32-bit values.

        Parameters:
            pixels: Of the buffer.
            value: The value's index in its group.

        Args:
            group: As in `matrices`.
        """
        var filter = self.filter() + UInt32(Self.filter_of(value))
        var row = self.pixel() + UInt32(Self.pixel_of(value))
        comptime if Self.swapped:
            row += group * MATRIX_ROWS
        else:
            filter += group * MATRIX_ROWS
        var panel, column = divmod(filter, UInt32(32))
        return (
            panel * UInt32(pixels * ROW_BYTES)
            + swizzled[ROW_BYTES](row, column // 4)
            + column % 4 * 4
        )


@always_inline
def _store_matrices[
    transpose: Bool
](address: SharedAddress, values: SIMD[DType.uint32, 4]):
    """Stores four 8x8 matrices of 16-bit elements; lane l gives the address of
    row (transposed: column) l % 8 of matrix l / 8."""
    comptime name = String(
        "stmatrix.sync.aligned.m8n8.x4",
        ".trans" if transpose else "",
        ".shared.b16 [$0], {$1, $2, $3, $4};",
    )
    inlined_assembly[name, NoneType, constraints="r,r,r,r,r,~{memory}"](
        address, values[0], values[1], values[2], values[3]
    )


@always_inline
def _load_matrices[
    transpose: Bool
](address: SharedAddress) -> SIMD[DType.uint32, 4]:
    """Loads what `_store_matrices` stores."""
    comptime name = String(
        "ldmatrix.sync.aligned.m8n8.x4",
        ".trans" if transpose else "",
        ".shared.b16 {$0, $1, $2, $3}, [$4];",
    )
    var values = inlined_assembly[
        name,
        _RegisterPackType[UInt32, UInt32, UInt32, UInt32],
        constraints="=r,=r,=r,=r,r,~{memory}",
    ](address)
    return SIMD[DType.uint32, 4](values[0], values[1], values[2], values[3])


@always_inline
def write_fragment[
    dtype: DType, pixels: Int, size: Int, swapped: Bool
](
    buffer: SharedAddress,
    place: Place[swapped],
    group: UInt32,
    values: SIMD[DType.float32, size],
):
    """Rounds some of a thread's values of a sub-tile and writes them to a
    buffer; all threads of the warp together.

    Parameters:
        dtype: Of the buffer's elements.
        pixels: Of the buffer.
        size: How many, a multiple of `MATRIX_VALUES`.
        swapped: As in `Place`.

    Args:
        buffer: Where to.
        place: The thread's.
        group: Of the first values, as in `Place.matrices`.
        values: The values.
    """
    comptime for g in range(size // MATRIX_VALUES):
        comptime first = g * MATRIX_VALUES
        var at = group + UInt32(g)
        comptime if size_of[dtype]() == 2:
            var packed = SIMD[DType.uint32, 4](0)
            comptime for i in range(4):
                var pair = SIMD[DType.float32, 2](
                    values[first + 2 * i], values[first + 2 * i + 1]
                )
                packed[i] = bitcast[DType.uint32, 1](pair.cast[dtype]())
            _store_matrices[swapped](buffer + place.matrices(at), packed)
        else:
            comptime assert dtype == DType.float32
            comptime for i in range(MATRIX_VALUES):
                shared_pointer[dtype](
                    buffer + place.word[pixels, i](at)
                ).unsafe_store(0, values[first + i].cast[dtype]())


@always_inline
def _halves[dtype: DType](packed: UInt32) -> SIMD[DType.float32, 2]:
    """The values of two 16-bit elements; of bfloat16 by their place in float32,
    an instruction each."""
    comptime if dtype == DType.bfloat16:
        return SIMD[DType.float32, 2](
            bitcast[DType.float32, 1](packed << 16),
            bitcast[DType.float32, 1](packed & 0xFFFF0000),
        )
    return bitcast[dtype, 2](packed).cast[DType.float32]()


@always_inline
def read_fragment[
    dtype: DType, pixels: Int, size: Int, swapped: Bool
](buffer: SharedAddress, place: Place[swapped], group: UInt32) -> SIMD[
    DType.float32, size
]:
    """Reads the elements of a buffer that belong to some of a thread's values:
    the mirror image of `write_fragment`, at the same addresses.

    Parameters:
        dtype: As in `write_fragment`.
        pixels: As in `write_fragment`.
        size: As in `write_fragment`.
        swapped: As in `Place`.

    Args:
        buffer: Where from.
        place: The thread's.
        group: As in `write_fragment`.
    """
    var values = SIMD[DType.float32, size](0)
    comptime for g in range(size // MATRIX_VALUES):
        comptime first = g * MATRIX_VALUES
        var at = group + UInt32(g)
        comptime if size_of[dtype]() == 2:
            var packed = _load_matrices[swapped](buffer + place.matrices(at))
            comptime for i in range(4):
                var pair = _halves[dtype](packed[i])
                values[first + 2 * i] = pair[0]
                values[first + 2 * i + 1] = pair[1]
        else:
            comptime assert dtype == DType.float32
            comptime for i in range(MATRIX_VALUES):
                values[first + i] = (
                    shared_pointer[dtype](buffer + place.word[pixels, i](at))
                    .unsafe_load(0)
                    .cast[DType.float32]()
                )
    return values
