"""The register tile of units whose lanes each add up the products of a word: the
words of several pixels, one at a time, by vectors of filters."""

from std.collections import Array

from ...conv.fields import PANEL
from ...conv.memory import Writes, sum_type
from ...conv.panels import interleaved_products
from ..unit import ONES, opaque
from .mma import CHUNK_WORDS, ActivationTile, DotUnit, FilterTile, Sums


trait VectorUnit(DotUnit):
    """Dot products in vector registers."""

    comptime lanes: Int
    """Of a register, each of which holds the sum of a filter."""

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

    @staticmethod
    def begin() -> Int:
        return 0

    @staticmethod
    def end():
        pass

    @staticmethod
    def multiply[
        dtype: DType
    ](
        mut state: Int,
        activation: ActivationTile[dtype],
        filter: FilterTile[dtype],
        sums: Sums,
    ):
        # Odd numbers of rows are not instantiated: the last one goes alone.
        var rest = activation
        var to = sums
        while rest.rows > 0:
            var rows = 1 if rest.rows == 1 else rest.rows // 2 * 2
            comptime for panels in range(1, Self.panels + 1):
                comptime for half in range(Self.rows // 2 + 1):
                    comptime known = max(1, 2 * half)
                    if rows == known and filter.panels == panels:
                        _multiply_tile[Self, dtype, known, panels](
                            rest, filter, to
                        )
            rest = rest.behind(rows)
            to = to.behind(rows)

    @staticmethod
    def multiply_registers[
        dtype: DType
    ](chunks: Int, sums: Writes[DType.float32]):
        _multiply_registers[Self, dtype](chunks, sums)


@no_inline
def _multiply_tile[
    U: VectorUnit, dtype: DType, rows: Int, panels: Int
](activation: ActivationTile[dtype], filter: FilterTile[dtype], sums: Sums):
    """Multiplies `rows` pixels by `panels` panels, both as wide as `spread`
    says."""
    comptime sums_type = sum_type(dtype)
    comptime vectors = panels * PANEL // U.lanes
    comptime spread = U.spread(dtype)
    comptime word_elements = interleaved_products(dtype)
    comptime Words = SIMD[DType.uint32, U.lanes]
    var acc = Array[SIMD[sums_type, U.lanes], rows * vectors](fill=0)
    var weights = filter.elements.unsafe_bitcast[UInt32]()
    var row_stride = activation.row_stride
    var panel_stride = filter.panel_stride // word_elements
    for j in range(activation.chunks):
        var pixels = activation.elements.unsafe_offset(
            Int(activation.offsets[unsafe_offset=j])
        )
        for word in range(activation.words(j)):
            comptime for part in range(spread):
                var step = spread * word + part
                var b = Array[Words, vectors](fill=Words(0))
                comptime for v in range(vectors):
                    comptime panel = v * U.lanes // PANEL
                    comptime lane = v * U.lanes % PANEL
                    b[v] = weights.unsafe_load[width=U.lanes](
                        panel * panel_stride + step * PANEL + lane
                    )
                comptime for i in range(rows):
                    var a = Words(
                        pixels.unsafe_offset(
                            i * row_stride + word_elements * step
                        )
                        .unsafe_bitcast[UInt32]()
                        .unsafe_load[alignment=1]()
                    )
                    comptime for v in range(vectors):
                        acc[i * vectors + v] = U.add[dtype](
                            acc[i * vectors + v], a, b[v]
                        )
        weights = weights.unsafe_offset(spread * CHUNK_WORDS * PANEL)
    var to = sums.elements.unsafe_bitcast[Scalar[sums_type]]()
    comptime for i in range(rows):
        comptime for v in range(vectors):
            to.unsafe_store(i * sums.stride + v * U.lanes, acc[i * vectors + v])


@no_inline
def _multiply_registers[
    U: VectorUnit, dtype: DType
](chunks: Int, sums: Writes[DType.float32]):
    """`_multiply_tile` of operands that stay in registers."""
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
