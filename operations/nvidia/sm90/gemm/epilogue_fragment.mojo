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

from ....conv.access import OutputTarget
from ...epilogue.activations import keep_branch
from ...epilogue.layout import Fragments, ResidualTile, VisitLayout
from ...im2col.tiles import OutputShape, TileGeometry
from ...limits import WARP
from ...pipeline.chunks import (
    CHUNK_BYTES,
    shared_pointer,
    swizzled,
    swizzled_chunk,
)
from ...tma.copy import SharedAddress
from .epilogue_config import (
    MATRIX_ROWS,
    MATRIX_VALUES,
    ROW_BYTES,
    ROW_FILTERS,
)
from .epilogue_rows import RowStore


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
struct WarpgroupFragments[cut: VisitLayout](Fragments):
    """Where in a sub-tile a thread's values lie: as the warpgroup's multiply
    leaves them.

    Parameters:
        cut: How a consumer's values are cut up. Where filters are the
            multiply's rows, a thread has two of each sub-tile.
    """

    comptime layout = Self.cut
    comptime swapped = Self.cut.thread_filters == ROW_FILTERS
    """Whether filters are the multiply's rows."""
    comptime Residual = SharedResidual[Self.cut]

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
    def thread(self) -> UInt32:
        return self.warp * WARP + self.lane

    @always_inline
    def filter(self) -> UInt32:
        comptime if Self.swapped:
            return self.warp * 16 + self.lane // 4
        else:
            return self.lane % 4 * 2

    @always_inline
    def pixel(self) -> UInt32:
        comptime if Self.swapped:
            return self.lane % 4 * 2
        else:
            return self.warp * 16 + self.lane // 4

    @staticmethod
    def thread_filter(index: Int) -> Int:
        return 8 * index if Self.swapped else 8 * (index // 2) + index % 2

    @staticmethod
    def filter_index(value: Int) -> Int:
        return value // 2 % 2 if Self.swapped else 2 * (value // 4) + value % 2

    @staticmethod
    def filter_of(value: Int) -> Int:
        """The filter of a thread's value, counted from its first.

        Args:
            value: Its index in the sub-tile.
        """
        return row_of(value) if Self.swapped else column_of(value)

    @staticmethod
    def pixel_of(value: Int) -> Int:
        return column_of(value) if Self.swapped else row_of(value)

    @staticmethod
    @always_inline
    def group_filters(group: UInt32) -> UInt32:
        return 0 if Self.swapped else group * MATRIX_ROWS

    @staticmethod
    @always_inline
    def group_pixels(group: UInt32) -> UInt32:
        return group * MATRIX_ROWS if Self.swapped else 0

    @always_inline
    def write[
        dtype: DType, size: Int
    ](
        self,
        buffer: SharedAddress,
        group: UInt32,
        values: SIMD[DType.float32, size],
    ):
        write_fragment[dtype](buffer, self, group, values)

    @always_inline
    def store_rows[
        Output: OutputTarget
    ](
        self,
        output: Output,
        shape: OutputShape,
        geometry: TileGeometry,
        buffer: SharedAddress,
        pixel: UInt32,
        filter: UInt32,
        filters: UInt32,
    ):
        comptime Rows = RowStore[Output, Self.cut]
        var rows = Rows(self.warp, self.lane)
        comptime for panel in range(Rows.held):
            rows.store[panel](
                output,
                shape,
                geometry,
                rows.load[panel](buffer),
                pixel,
                filter,
                filters,
            )

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
    def word[value: Int](self, group: UInt32) -> UInt32:
        """The offset in a buffer of one of the thread's 32-bit values.

        Parameters:
            value: The value's index in its group.

        Args:
            group: Which four: `MATRIX_VALUES` values of the thread each.
        """
        var filter = self.filter() + UInt32(Self.filter_of(value))
        var row = self.pixel() + UInt32(Self.pixel_of(value))
        comptime if Self.swapped:
            row += group * MATRIX_ROWS
        else:
            filter += group * MATRIX_ROWS
        var panel, column = divmod(filter, UInt32(32))
        return (
            panel * UInt32(Self.cut.pixels * ROW_BYTES)
            + row * ROW_BYTES
            + swizzled_chunk[ROW_BYTES](row, column // 4) * CHUNK_BYTES
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
    layout: VisitLayout, //, dtype: DType, size: Int
](
    buffer: SharedAddress,
    place: WarpgroupFragments[layout],
    group: UInt32,
    values: SIMD[DType.float32, size],
):
    """Rounds some of a thread's values of a sub-tile and writes them to a
    buffer; all threads of the warp together.

    Parameters:
        layout: How a consumer's values are cut up.
        dtype: Of the buffer's elements.
        size: How many, a multiple of `MATRIX_VALUES`.

    Args:
        buffer: Where to.
        place: The thread's.
        group: Of the first values, as in `WarpgroupFragments.matrices`.
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
            _store_matrices[place.swapped](buffer + place.matrices(at), packed)
        else:
            # Of int32 values are the bits.
            comptime assert dtype == DType.float32 or dtype == DType.int32
            comptime for i in range(MATRIX_VALUES):
                shared_pointer[DType.float32](
                    buffer + place.word[i](at)
                ).unsafe_store(0, values[first + i])


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
    layout: VisitLayout, //, dtype: DType, size: Int
](
    buffer: SharedAddress, place: WarpgroupFragments[layout], group: UInt32
) -> SIMD[DType.float32, size]:
    """Reads the elements of a buffer that belong to some of a thread's values:
    the mirror image of `write_fragment`, at the same addresses.

    Parameters:
        layout: How a consumer's values are cut up.
        dtype: Of the buffer's elements.
        size: How many, a multiple of `MATRIX_VALUES`.

    Args:
        buffer: Where from.
        place: The thread's.
        group: Of the first values, as in `WarpgroupFragments.matrices`.
    """
    var values = SIMD[DType.float32, size](0)
    comptime for g in range(size // MATRIX_VALUES):
        comptime first = g * MATRIX_VALUES
        var at = group + UInt32(g)
        comptime if size_of[dtype]() == 2:
            var packed = _load_matrices[place.swapped](
                buffer + place.matrices(at)
            )
            comptime for i in range(4):
                var pair = _halves[dtype](packed[i])
                values[first + 2 * i] = pair[0]
                values[first + 2 * i + 1] = pair[1]
        else:
            comptime assert dtype == DType.float32
            comptime for i in range(MATRIX_VALUES):
                values[first + i] = (
                    shared_pointer[dtype](buffer + place.word[i](at))
                    .unsafe_load(0)
                    .cast[DType.float32]()
                )
    return values


@fieldwise_init
struct SharedResidual[cut: VisitLayout](ResidualTile):
    """A sub-tile's residual in shared memory.

    Parameters:
        cut: How a consumer's values are cut up.
    """

    var present: Bool
    """Whether there is one."""
    var buffer: SharedAddress
    var place: WarpgroupFragments[Self.cut]

    @always_inline
    def is_present(self) -> Bool:
        return self.present

    @always_inline
    def read[size: Int](self, group: UInt32) -> SIMD[DType.float32, size]:
        keep_branch()
        return read_fragment[Self.cut.out_type, size](
            self.buffer, self.place, group
        )
