"""The CPU epilogue: a register tile, just written and still in L1, becomes
output."""

from extensibility import ManagedTensorSlice
from std.sys.info import size_of
from std.sys.intrinsics import PrefetchOptions, prefetch

from ..conv.memory import CACHE_LINE, Reads
from ..conv.epilogue import Epilogue, store_output
from ..conv.fields import PANEL
from ..conv.problem import ConvProblem
from .tile_io import Pixel


@always_inline
def _store_channels[
    width: Int, identity: Bool
](
    output: ManagedTensorSlice[mut=True, ...],
    epilogue: Epilogue,
    problem: ConvProblem,
    pixel: Pixel,
    row: Int,
    filter: Int,
    value: SIMD[DType.float32, width],
):
    """Applies the epilogue to neighbouring filters of one pixel and stores
    them."""
    var offset = row * problem.filters + filter
    var result = value
    comptime if not identity:
        result = epilogue.apply[width](value, filter, offset)
    store_output[width](
        output, pixel.index[output.rank](filter), offset, result
    )


@always_inline
def _store_row[
    identity: Bool
](
    output: ManagedTensorSlice[mut=True, ...],
    epilogue: Epilogue,
    problem: ConvProblem,
    pixel: Pixel,
    row: Int,
    filter: Int,
    columns: Int,
    values: Reads[DType.float32],
):
    """Stores one pixel's row of a tile."""
    var j = 0
    while j + PANEL <= columns:
        _store_channels[PANEL, identity](
            output,
            epilogue,
            problem,
            pixel,
            row,
            filter + j,
            values.unsafe_load[width=PANEL](j),
        )
        j += PANEL
    while j + 4 <= columns:
        _store_channels[4, identity](
            output,
            epilogue,
            problem,
            pixel,
            row,
            filter + j,
            values.unsafe_load[width=4](j),
        )
        j += 4
    while j < columns:
        _store_channels[1, identity](
            output,
            epilogue,
            problem,
            pixel,
            row,
            filter + j,
            values.unsafe_load(j),
        )
        j += 1


@always_inline
def _store_rows[
    identity: Bool
](
    output: ManagedTensorSlice[mut=True, ...],
    epilogue: Epilogue,
    problem: ConvProblem,
    row: Int,
    rows: Int,
    filter: Int,
    columns: Int,
    accumulators: Reads[DType.float32],
    row_stride: Int,
):
    """Stores a tile; with `identity` the epilogue does nothing and is not
    asked."""
    var pixel = Pixel(problem, row)
    for i in range(rows):
        _store_row[identity](
            output,
            epilogue,
            problem,
            pixel,
            row + i,
            filter,
            columns,
            accumulators.unsafe_offset(i * row_stride),
        )
        pixel.advance(problem)


@always_inline
def prefetch_tile(
    output: ManagedTensorSlice[mut=True, ...],
    epilogue: Epilogue,
    problem: ConvProblem,
    row: Int,
    rows: Int,
    filter: Int,
    columns: Int,
):
    """Asks for the memory that `store_tile` will read and write, so that it
    arrives while the tile is being multiplied: the rows of a tile lie too far
    apart for the hardware to guess.

    Args:
        output: The op's output.
        epilogue: The epilogue.
        problem: The convolution.
        row: The tile's first row of the implicit GEMM.
        rows: How many rows are output.
        filter: The tile's first filter, counted over all groups.
        columns: How many filters are output.
    """
    comptime to_write = PrefetchOptions().for_write().high_locality()
    comptime to_read = PrefetchOptions().for_read().high_locality()
    comptime line = CACHE_LINE // size_of[output.dtype]()
    for i in range(rows):
        var offset = (row + i) * problem.filters + filter
        for j in range(0, columns, line):
            comptime if not output._has_output_store_fusion:
                prefetch[params=to_write](
                    output.unsafe_ptr().unsafe_offset(offset + j)
                )
            if epilogue.has_residual:
                prefetch[params=to_read](
                    epilogue.residual.unsafe_offset(offset + j)
                )


@no_inline
def store_tile(
    output: ManagedTensorSlice[mut=True, ...],
    epilogue: Epilogue,
    problem: ConvProblem,
    row: Int,
    rows: Int,
    filter: Int,
    columns: Int,
    accumulators: Reads[DType.float32],
    row_stride: Int,
):
    """Applies the epilogue to a register tile in memory and stores it.

    Args:
        output: The op's output.
        epilogue: The epilogue.
        problem: The convolution.
        row: The tile's first row of the implicit GEMM.
        rows: How many rows are output.
        filter: The tile's first filter, counted over all groups.
        columns: How many filters are output.
        accumulators: The tile.
        row_stride: Elements between two rows of the tile.
    """
    if epilogue.is_identity():
        _store_rows[True](
            output,
            epilogue,
            problem,
            row,
            rows,
            filter,
            columns,
            accumulators,
            row_stride,
        )
    else:
        _store_rows[False](
            output,
            epilogue,
            problem,
            row,
            rows,
            filter,
            columns,
            accumulators,
            row_stride,
        )
