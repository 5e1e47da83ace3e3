"""The register tile of few filters: lanes are products, registers pixels by filters.

A panel would leave most of its lanes to filters that do not exist. Here a step
multiplies neighbouring products of each pixel by those of each filter, and each
tile ends with sums over lanes.
"""

from std.collections import Array

from ...conv.fields import PANEL
from ...conv.memory import Reads, Writes, sum_type
from ...conv.panels import interleaved_products
from ...conv.problem import ConvProblem
from ..config import vector_registers
from .mma import CHUNK_WORDS, ActivationTile, DotUnit, FilterTile, Sums
from .vector_unit import VectorUnit

comptime MAX_FEW_FILTERS = PANEL // 4
"""Filters of the widest register tile."""


def few_filters[U: DotUnit](problem: ConvProblem, dtype: DType) -> Int:
    """The filters of a problem that has few, as the unit takes them; otherwise
    0.

    Parameters:
        U: The instructions.

    Args:
        problem: The convolution.
        dtype: Of the activations.
    """
    var few = problem.groups == 1 and problem.filters <= MAX_FEW_FILTERS
    return problem.filters if few and U.takes_few(dtype) else 0


def few_filter_rows(filters: Int) -> Int:
    """Pixels of a register tile: as many as leave registers for the filters and
    one activation.

    Args:
        filters: Of the tile.
    """
    var rows = (vector_registers() - filters - 1) // filters
    return min(rows // 2 * 2, 6)


@no_inline
def unpack_filters[
    dtype: DType
](panel: Reads[dtype], words: Int, filters: Int, to: Writes[dtype]):
    """Writes the filters of a panel, which is wide if it must be, one behind the
    other.

    Parameters:
        dtype: Of the activations.

    Args:
        panel: The panel, `[words][PANEL]` of 4 bytes each.
        words: How many of each filter.
        filters: How many.
        to: Where to, `[filters][words]`.
    """
    var source = panel.unsafe_bitcast[UInt32]()
    var target = to.unsafe_bitcast[UInt32]()
    for filter in range(filters):
        for word in range(words):
            target[unsafe_offset=filter * words + word] = source[
                unsafe_offset=word * PANEL + filter
            ]


def multiply_few[
    U: VectorUnit, dtype: DType
](activation: ActivationTile[dtype], filter: FilterTile[dtype], sums: Sums):
    """Multiplies all pixels of a tile by few filters.

    Parameters:
        U: The instructions.
        dtype: Of the operands.

    Args:
        activation: The activations, as wide as `U.spread` says.
        filter: The filters that `unpack_filters` wrote.
        sums: Where the sums go, those of a pixel's filters side by side.
    """
    comptime for filters in range(1, MAX_FEW_FILTERS + 1):
        if filter.few == filters:
            comptime rows = few_filter_rows(filters)
            var whole = activation.rows // rows * rows
            for at in range(activation.lines):
                var line = activation.line(at)
                var to = sums.behind(at * line.rows)
                _multiply_tiles[U, dtype, rows, filters](
                    line, filter, to, whole // rows
                )
                _multiply_tiles[U, dtype, 1, filters](
                    line.behind(whole),
                    filter,
                    to.behind(whole),
                    line.rows - whole,
                )


@no_inline
def _multiply_tiles[
    U: VectorUnit, dtype: DType, rows: Int, filters: Int
](
    activation: ActivationTile[dtype],
    filter: FilterTile[dtype],
    sums: Sums,
    tiles: Int,
):
    """Multiplies so many times `rows` pixels."""
    comptime sums_type = sum_type(dtype)
    comptime spread = U.spread(dtype)
    comptime word_elements = interleaved_products(dtype)
    comptime step = U.lanes * word_elements
    var to = sums.elements.unsafe_bitcast[Scalar[sums_type]]()
    var elements = activation.elements
    var filter_stride = spread * activation.chunks * CHUNK_WORDS * word_elements
    for _ in range(tiles):
        var acc = Array[SIMD[sums_type, U.lanes], rows * filters](fill=0)
        var weights = filter.elements
        for j in range(activation.chunks):
            var pixels = elements.unsafe_offset(
                Int(activation.offsets[unsafe_offset=j])
            )
            var words = spread * activation.words(j)
            for at in range(0, words * word_elements, step):
                var b = Array[SIMD[DType.uint32, U.lanes], filters](fill=0)
                comptime for f in range(filters):
                    b[f] = (
                        weights.unsafe_offset(f * filter_stride + at)
                        .unsafe_bitcast[UInt32]()
                        .unsafe_load[width=U.lanes, alignment=1]()
                    )
                comptime for i in range(rows):
                    var a = (
                        pixels.unsafe_offset(i * activation.row_stride + at)
                        .unsafe_bitcast[UInt32]()
                        .unsafe_load[width=U.lanes, alignment=1]()
                    )
                    comptime for f in range(filters):
                        acc[i * filters + f] = U.add[dtype](
                            acc[i * filters + f], a, b[f]
                        )
            weights = weights.unsafe_offset(
                spread * CHUNK_WORDS * word_elements
            )
        comptime for i in range(rows):
            comptime for f in range(filters):
                to[unsafe_offset=i * sums.stride + f] = acc[
                    i * filters + f
                ].reduce_add()
        to = to.unsafe_offset(rows * sums.stride)
        elements = elements.unsafe_offset(rows * activation.row_stride)
