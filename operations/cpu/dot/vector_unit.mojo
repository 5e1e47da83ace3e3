"""Units whose lanes each add up the products of a word, of whichever instructions:
what their register tile (vector_tile.mojo) asks of them."""

from std.collections import Array
from std.math import ceildiv
from std.sys.info import size_of

from ...conv.fields import PANEL, ROW_BYTES
from ...conv.memory import Reads, Writes, sum_type
from ..register_output import RegisterOutput
from ..unit import ONES, opaque
from .mma import CHUNK_WORDS, DotUnit

comptime L1_SLICE_BYTES = 16 * 1024
"""Packed filter that stays in L1 while all pixels of a tile are multiplied by it."""

comptime L2_SLICE_BYTES = 64 * 1024
"""Packed filter that stays in L2. A register tile of AVX-512 reads no more than 9
bytes of it a cycle, which L2 brings in time."""

comptime SUMS_BYTES = 6 * 1024
"""Of the sums that are stored together."""


@always_inline
def near_word[row: Int](pixel: Reads[DType.uint32], row_bytes: Int) -> UInt32:
    """A word of a pixel near another one.

    Parameters:
        row: Which, 0 for that one.

    Args:
        pixel: The word of that one.
        row_bytes: Between two pixels.
    """
    return (
        pixel.unsafe_bitcast[UInt8]()
        .unsafe_offset(row * row_bytes)
        .unsafe_bitcast[UInt32]()
        .unsafe_load[alignment=1]()
    )


def tiles_together(rows: Int, panels: Int) -> Int:
    """Register tiles whose sums stay in L1 until they are stored.

    Args:
        rows: Pixels of a register tile.
        panels: Its panels.
    """
    return max(
        1, SUMS_BYTES // (rows * panels * PANEL * size_of[DType.float32]())
    )


trait VectorUnit(DotUnit):
    """Dot products in vector registers."""

    comptime lanes: Int
    """Of a register, each of which holds the sum of a filter."""
    comptime slice_bytes: Int
    """Packed filter, as wide as it is multiplied, by which all pixels of a tile
    are multiplied before the next: their sums go to memory in between."""

    @staticmethod
    def add[
        dtype: DType
    ](
        sums: SIMD[sum_type(dtype), Self.lanes],
        pixel: SIMD[DType.uint32, Self.lanes],
        filters: SIMD[DType.uint32, Self.lanes],
    ) -> SIMD[sum_type(dtype), Self.lanes]:
        """Adds the products of a word of each filter.

        Parameters:
            dtype: Of the operands.

        Args:
            sums: What to add to.
            pixel: A word of a pixel in each lane, as wide as `spread` says.
            filters: Those of the filters, the same.
        """
        ...

    @always_inline
    @staticmethod
    def add_word[
        dtype: DType, row: Int
    ](
        sums: SIMD[sum_type(dtype), Self.lanes],
        pixel: Reads[DType.uint32],
        row_bytes: Int,
        filters: SIMD[DType.uint32, Self.lanes],
    ) -> SIMD[sum_type(dtype), Self.lanes]:
        """`add`, of a word of a pixel in memory, for a single register of filters.

        Parameters:
            dtype: Of the operands.
            row: Which pixel, 0 to `NEAR_ROWS - 1`.

        Args:
            sums: What to add to.
            pixel: The word of the first pixel, as wide as `spread` says, at any
                address.
            row_bytes: Between two pixels.
            filters: Those of the filters, the same.
        """
        return Self.add[dtype](
            sums, {near_word[row](pixel, row_bytes)}, filters
        )

    @staticmethod
    def round[
        dtype: DType, registers: Int
    ](
        output: RegisterOutput[dtype],
        values: Array[SIMD[DType.float32, Self.lanes], registers],
    ) -> SIMD[dtype, registers * Self.lanes]:
        """Outputs, rounded.

        Parameters:
            dtype: Theirs, for which `stores_outputs` is true.
            registers: How many make one of outputs.

        Args:
            output: What they are stored in.
            values: Their values.
        """
        var all = SIMD[dtype, registers * Self.lanes](0)
        comptime for i in range(registers):
            all = all.insert[offset=i * Self.lanes](output.stored(values[i]))
        return all

    @staticmethod
    def widen[dtype: DType](panel: Reads[dtype], words: Int, to: Writes[dtype]):
        """Makes words of a panel as wide as `spread` says.

        Parameters:
            dtype: Of the operands.

        Args:
            panel: The words, `[words][PANEL][WORD]`.
            words: How many of each filter.
            to: Where to.
        """
        ...

    @staticmethod
    def tile_rows(rows: Int) -> Int:
        """An even number, or half a tile, made odd, in front of what is odd. No
        others are instantiated."""
        comptime odd = Self.rows // 2 | 1
        if rows % 2 == 1 and rows >= odd:
            return odd
        return min(Self.rows, rows // 2 * 2) if rows > 1 else 1

    @staticmethod
    def begin() -> Int:
        return 0

    @staticmethod
    def end():
        pass

    @staticmethod
    def multiply_registers[
        dtype: DType
    ](chunks: Int, sums: Writes[DType.float32]):
        _multiply_registers[Self, dtype](chunks, sums)


def slices_of[U: VectorUnit](dtype: DType, chunks: Int, panels: Int) -> Int:
    """Slices that the products of a tile are cut into.

    Parameters:
        U: The instructions.

    Args:
        dtype: Of the operands.
        chunks: Of the products.
        panels: Of the tile.
    """
    var most = U.slice_bytes // (ROW_BYTES * PANEL * U.spread(dtype) * panels)
    return ceildiv(chunks, most)


@no_inline
def _multiply_registers[
    U: VectorUnit, dtype: DType
](chunks: Int, sums: Writes[DType.float32]):
    """`multiply_panels` of operands that stay in registers."""
    comptime sums_type = sum_type(dtype)
    comptime vectors = U.panels * PANEL // U.lanes
    comptime registers = U.rows * vectors
    comptime Words = SIMD[DType.uint32, U.lanes]
    var acc = Array[SIMD[sums_type, U.lanes], registers](fill=0)
    var a = Words(ONES)
    var b = Array[Words, vectors](fill=Words(0))
    comptime for v in range(vectors):
        a = opaque(a)
        b[v] = a
    for _ in range(U.spread(dtype) * chunks * CHUNK_WORDS):
        comptime for at in range(registers):
            a = opaque(a)
            acc[at] = U.add[dtype](acc[at], a, b[at % vectors])
    var to = sums.unsafe_bitcast[Scalar[sums_type]]()
    comptime for at in range(registers):
        to.unsafe_store(at * U.lanes, acc[at])
