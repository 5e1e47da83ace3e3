"""Where the sums of a dot-product register tile become outputs: in memory, behind
the epilogue, or in its registers, where the epilogue's form allows it."""

from std.sys.info import size_of

from ...conv.fields import PANEL
from ..accumulators import Accumulators, FilterSums, OutputTile
from .few_filters import few_filters
from .mma import DotUnit, OutputLines, Sums, TileOutput
from .params import DotParams, Place, filter_tile
from .scheduler import Block


@always_inline
def stores_block[U: DotUnit](params: DotParams, block: Block) -> Bool:
    """Whether register tiles store outputs of a block themselves: its positions
    are outputs, and its filters are not few."""
    comptime if U.stores_outputs(params.Source.dtype):
        return (
            Bool(params.stored)
            and params.blocking.are_outputs(block.lines)
            and few_filters[U](params.problem, params.Source.dtype) == 0
        )
    return False


@always_inline
def register_outputs[
    U: DotUnit
](params: DotParams, block: Block, place: Place) -> OutputLines[
    params.Source.dtype
]:
    """Where a register tile stores its outputs itself, if it does."""
    if not stores_block[U](params, block):
        return OutputLines[params.Source.dtype].none()
    var tile = _output_tile(
        params,
        block,
        place.panel,
        place.panels,
        place.line,
        place.first,
        place.rows,
    )
    return OutputLines(
        TileOutput(
            params.stored.value().at(tile.row, tile.filter),
            _filter_sums[U](params, block, place.panel, place.panels),
            tile.filters,
        ),
        params.blocking.width,
    )


@always_inline
def store_sums[
    U: DotUnit
](params: DotParams, block: Block, place: Place, sums: Sums):
    """Stores the outputs among a register tile's positions."""
    ref blocking = params.blocking
    if not blocking.flat:
        # Whole lines of the image follow each other.
        var whole = place.rows == blocking.width
        for line in range(1 if whole else place.lines):
            store_tile[U](
                params,
                block,
                place.panel,
                place.panels,
                place.line + line,
                place.first,
                place.rows * (place.lines if whole else 1),
                sums.behind(line * place.rows),
            )
        return
    var below, column = divmod(place.first, blocking.pitch)
    var done = 0
    while done < place.rows:
        var valid = min(block.columns - column, place.rows - done)
        if valid > 0:
            store_tile[U](
                params,
                block,
                place.panel,
                place.panels,
                below,
                column,
                valid,
                sums.behind(done),
            )
        done += blocking.pitch - column
        column = 0
        below += 1


@always_inline
def store_tile[
    U: DotUnit
](
    params: DotParams,
    block: Block,
    panel: Int,
    panels: Int,
    line: Int,
    column: Int,
    rows: Int,
    sums: Sums,
):
    """Stores neighbouring pixels of one of a block's lines by some of its
    panels."""
    comptime dtype = params.Source.dtype
    var tile = _output_tile(params, block, panel, panels, line, column, rows)
    comptime if Bool(U.sum_store_feature(dtype)):
        if params.stored:
            U.store_sums[dtype](
                sums,
                rows,
                TileOutput(
                    params.stored.value().at(tile.row, tile.filter),
                    _filter_sums[U](params, block, panel, panels),
                    tile.filters,
                ),
            )
            return
    comptime if dtype.is_integral():
        params.output.store_integers(
            params.problem,
            tile,
            Accumulators[DType.int32](
                sums.elements,
                sums.stride,
                _filter_sums[U](params, block, panel, panels),
            ),
        )
    else:
        params.output.store(params.problem, tile, sums.elements, sums.stride)


@always_inline
def _filter_sums[
    U: DotUnit
](params: DotParams, block: Block, panel: Int, panels: Int) -> FilterSums:
    """What the sums of some of a block's panels have too much; nothing unless
    they are of integers."""
    comptime dtype = params.Source.dtype
    comptime if dtype.is_integral():
        comptime flipped = Int32(128 if U.flips(dtype) else 0)
        var filter = filter_tile(params, block, panel, panels)
        return FilterSums(
            filter.elements.unsafe_offset(
                params.panel.sums_offset()
            ).unsafe_bitcast[Int32](),
            params.panel.elements() // size_of[DType.int32](),
            params.zero_point + flipped,
        )
    else:
        return FilterSums.none()


@always_inline
def output_row(params: DotParams, block: Block, line: Int, column: Int) -> Int:
    """The row of the implicit GEMM of a pixel of one of a block's lines."""
    ref blocking = params.blocking
    var above = block.image * blocking.height + block.line + line
    return above * blocking.width + block.column + column


@always_inline
def _output_tile(
    params: DotParams,
    block: Block,
    panel: Int,
    panels: Int,
    line: Int,
    column: Int,
    rows: Int,
) -> OutputTile:
    """Neighbouring pixels of one of a block's lines by some of its panels."""
    ref problem = params.problem
    var first = block.panel + panel
    return OutputTile(
        output_row(params, block, line, column),
        rows,
        block.group * problem.gemm_n() + first * PANEL,
        problem.panel_filters(first, panels),
    )
