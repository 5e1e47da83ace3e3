"""Which of a consumer's accumulators a thread's values of a sub-tile are."""

from std.bit import next_power_of_two

from ...epilogue.activations import keep_branch
from ...epilogue.layout import VisitLayout
from .epilogue_config import MATRIX_VALUES, ROW_FILTERS, SUBTILE_FILTERS
from .mma import Accumulators


@always_inline
def values_of[
    rows: Int,
    columns: Int,
    dtype: DType,
    //,
    layout: VisitLayout,
    subtile: Int,
    first: Int,
    size: Int,
    *,
    as_bits: Bool = False,
](sums: Accumulators[rows, columns, dtype]) -> SIMD[DType.float32, size]:
    """Some of a thread's values of a sub-tile, which are neighbours in the
    accumulators, rounded to float32.

    Parameters:
        rows: Of the multiply.
        columns: Of the multiply.
        dtype: Of the sums.
        layout: How the consumer's part is cut up.
        subtile: The sub-tile, in the order of visits.
        first: The first value.
        size: How many.
        as_bits: As for `Accumulators.value`.

    Args:
        sums: The consumer's values, waited for.
    """
    comptime row, begin = _place_of(layout, subtile)
    comptime column = begin + first
    var values = SIMD[DType.float32, size](0)
    # What lies behind the last one is stored by none.
    comptime held = Accumulators[rows, columns, dtype].width
    comptime for i in range(size):
        comptime if column + i < held:
            values[i] = sums.value[as_bits=as_bits](row, column + i)
    return values


@always_inline
def set_values[
    rows: Int,
    columns: Int,
    dtype: DType,
    //,
    layout: VisitLayout,
    subtile: Int,
    first: Int,
    size: Int,
](mut sums: Accumulators[rows, columns, dtype], values: SIMD[dtype, size]):
    """Replaces what `values_of` returns.

    Parameters:
        rows: Of the multiply.
        columns: Of the multiply.
        dtype: Of the sums.
        layout: How the consumer's part is cut up.
        subtile: The sub-tile, in the order of visits.
        first: The first value.
        size: How many.

    Args:
        sums: The consumer's values.
        values: The new ones.
    """
    comptime row, begin = _place_of(layout, subtile)
    comptime column = begin + first
    comptime held = Accumulators[rows, columns, dtype].width
    comptime for i in range(size):
        comptime if column + i < held:
            sums.replace(row, column + i, values[i])


def visited_values(layout: VisitLayout, subtile: Int, width: Int) -> Int:
    """How many of a thread's values of a sub-tile are visited: all, or, where a
    tile ends within the sub-tile, the power of two that holds those within, in
    whole matrices.

    Args:
        layout: How the consumer's part is cut up.
        subtile: The sub-tile, in the order of visits.
        width: `Accumulators.width`.
    """
    var first = _place_of(layout, subtile)[1]
    var held = max(width - first, MATRIX_VALUES)
    return min(layout.values(), next_power_of_two(held))


def _place_of(layout: VisitLayout, subtile: Int) -> Tuple[Int, Int]:
    """Block and register of a thread's first accumulator of a sub-tile.

    Args:
        layout: How the consumer's part is cut up.
        subtile: The sub-tile, in the order of visits.
    """
    var block, part = divmod(subtile, layout.filter_subtiles)
    if layout.thread_filters == ROW_FILTERS:
        return part, block * layout.values()
    return block * layout.pixels // SUBTILE_FILTERS, part * layout.values()


@always_inline
def select_values[
    rows: Int,
    columns: Int,
    dtype: DType,
    //,
    layout: VisitLayout,
    subtiles: Int,
    size: Int,
](sums: Accumulators[rows, columns, dtype], index: UInt32) -> SIMD[
    DType.float32, size
]:
    """A fragment of a thread's values, known at run time only.

    Parameters:
        rows: Of the multiply.
        columns: Of the multiply.
        dtype: Of the sums.
        layout: How the consumer's part is cut up.
        subtiles: Of a consumer's part.
        size: Values of a fragment.

    Args:
        sums: The consumer's values, waited for.
        index: The fragment, counted over all sub-tiles.
    """
    comptime count = layout.values() // size
    var values = SIMD[DType.float32, size](0)
    comptime for i in range(subtiles * count):
        if index == UInt32(i):
            keep_branch()
            values = values_of[layout, i // count, i % count * size, size](sums)
    return values
