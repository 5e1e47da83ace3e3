"""The dot-product GEMM: a task's loops over filter panels and pixels.

    copy the block's activations, or find them where they lie
    for each register tile's panels:
        for each register tile of pixels:
            multiply, all products deep
            for each line that it meets: epilogue, store

Where a block's panels stay in L1 the loops are the other way round: then the
outputs of a pixel are.
"""

from std.sys.info import size_of

from ...conv.fields import PANEL
from ...conv.memory import Reads, Writes
from ..gemm.scheduler import RowTile, gathered_stride
from ..gemm.tile_io import Columns, gather_rows
from .mma import ActivationTile, DotUnit, OutputLines, Sums
from .outputs import output_row, store_tile, stores_block
from .params import DotParams, DotScratch, filter_tile
from .pipeline import TilePipeline, panels_together, tile_sums
from .scheduler import ACCESS_IMAGE, ACCESS_MATRIX, Block, Strips
from .tile_io import (
    copy_rectangles,
    flip_signs,
    meets_zeros,
    rectangle_is_finite,
    rows_are_finite,
    write_offsets,
    write_straight_offsets,
)
from .widening import widen_words


def run_task[
    U: DotUnit
](params: DotParams, block: Block, scratch: DotScratch[params.Source.dtype]):
    """Computes a task.

    Parameters:
        U: The instructions.

    Args:
        params: The launch.
        block: The task.
        scratch: The worker's own memory.
    """
    ref problem = params.problem
    ref blocking = params.blocking
    comptime dtype = params.Source.dtype
    comptime spread = U.spread(dtype)
    var columns = Columns(
        problem, params.panel, 0, blocking.depth, params.zero_point
    )
    var copies = blocking.cut.access == ACCESS_IMAGE
    if copies:
        copy_rectangles(
            params.activation,
            problem,
            blocking,
            columns,
            block,
            _copied[U](params, scratch),
            spread,
            meets_zeros(columns, Bool(params.diagonal)),
        )
    var state = U.begin()
    var group = block
    var memory = scratch
    for _ in range(block.groups):
        _run_group[U](params, columns, group, memory, state)
        group.group += 1
        if copies:
            memory.block = memory.block.unsafe_offset(
                spread * blocking.block_elements
            )
    U.end()


@always_inline
def _copied[
    U: DotUnit
](params: DotParams, scratch: DotScratch[params.Source.dtype]) -> Writes[
    params.Source.dtype
]:
    """Where a group's activations are copied to: what is widened ends where its
    words will end."""
    comptime spread = U.spread(params.Source.dtype)
    return scratch.block.unsafe_offset(
        (spread - 1) * params.blocking.block_elements
    )


@always_inline
def _run_group[
    U: DotUnit
](
    params: DotParams,
    columns: Columns,
    block: Block,
    scratch: DotScratch[params.Source.dtype],
    mut state: Int,
):
    """Computes a group of a task, whose rectangle is copied already if it is one.
    """
    ref problem = params.problem
    ref blocking = params.blocking
    comptime dtype = params.Source.dtype
    comptime spread = U.spread(dtype)
    var activation = scratch.block.as_imm()
    var copied = _copied[U](params, scratch)
    # A group before this one may have run on rows.
    write_offsets(problem, blocking, scratch.offsets, spread)
    comptime if U.joins_groups(dtype):
        if params.diagonal:
            params.diagonal.value().write(
                filter_tile(params, block, 0, 1).elements, scratch.filter
            )
    if blocking.cut.access == ACCESS_MATRIX:
        comptime if not params.Source.fused:
            activation = params.activation.data().unsafe_offset(
                block.column * blocking.row_stride
            )
    elif blocking.cut.access != ACCESS_IMAGE:
        gather_rows(
            params.activation,
            problem,
            columns,
            block.group,
            RowTile(output_row(params, block, 0, 0), block.columns),
            copied,
            blocking.row_stride,
        )
    comptime if not dtype.is_integral():
        if not _is_exact[U](params, columns, block, activation):
            _run_exactly[U](params, columns, block, scratch, state)
            return
    comptime if U.flips(dtype):
        flip_signs(scratch.block, blocking.block_elements)
    comptime if spread > 1:
        if blocking.cut.access == ACCESS_MATRIX:
            widen_words(
                activation, block.columns * blocking.row_stride, scratch.block
            )
            activation = scratch.block.as_imm()
        else:
            widen_words(copied.as_imm(), blocking.block_elements, scratch.block)
    _multiply_block[U](params, block, activation, scratch, state)


@always_inline
def _is_exact[
    U: DotUnit
](
    params: DotParams,
    columns: Columns,
    block: Block,
    activation: Reads[params.Source.dtype],
) -> Bool:
    """Whether a block of floats may be multiplied by the zeros of its filter.
    """
    comptime dtype = params.Source.dtype
    ref blocking = params.blocking
    if blocking.cut.access == ACCESS_IMAGE:
        return not meets_zeros(
            columns, Bool(params.diagonal)
        ) or rectangle_is_finite[dtype](activation, params.problem, blocking)
    comptime if U.joins_groups(dtype):
        # Beside the zeros that fill up a gathered row stand zeros.
        return not params.diagonal or rows_are_finite[dtype](
            activation, block.columns, blocking.row_stride, blocking.depth
        )
    return True


@always_inline
def _multiply_block[
    U: DotUnit
](
    params: DotParams,
    block: Block,
    activation: Reads[params.Source.dtype],
    scratch: DotScratch[params.Source.dtype],
    mut state: Int,
):
    """Multiplies a block whose activations lie as the cut says."""
    var at_once = U.tiles
    if stores_block[U](params, block):
        at_once = U.tiles_at_once(params.Source.dtype, params.blocking.chunks)
    var strips = Strips.of[U](
        params.blocking, block.lines, block.columns, at_once
    )
    var tiles = TilePipeline[U](params, block, activation, scratch)
    var together = panels_together[U](
        params.Source.dtype,
        params.panel,
        params.blocking.cut.panels,
        strips.panels,
    )
    for group in range(0, block.panels, together):
        var end = min(group + together, block.panels)
        tiles.widen(group, end)
        for line in range(0, strips.lines, strips.stored_lines):
            var lines = min(strips.stored_lines, strips.lines - line)
            for first in range(0, strips.positions, strips.stored):
                var rows = min(strips.stored, strips.positions - first)
                for panel in range(group, end, strips.panels):
                    tiles.compute(
                        state,
                        panel=panel,
                        panels=min(strips.panels, end - panel),
                        line=line,
                        lines=lines,
                        first=first,
                        rows=rows,
                    )
    tiles.finish()


@no_inline
def _run_exactly[
    U: DotUnit
](
    params: DotParams,
    columns: Columns,
    block: Block,
    scratch: DotScratch[params.Source.dtype],
    mut state: Int,
):
    """Computes a block of an image, register tile by register tile of rows of
    the implicit im2col matrix: beside the zeros that fill up a filter row stand
    zeros there."""
    ref problem = params.problem
    ref blocking = params.blocking
    write_straight_offsets(blocking, scratch.offsets)
    comptime element = size_of[params.Source.dtype]()
    var stride = gathered_stride(blocking.depth, element)
    for line in range(block.lines):
        for first in range(0, block.columns, U.rows):
            var rows = min(U.rows, block.columns - first)
            var output = output_row(params, block, line, first)
            gather_rows(
                params.activation,
                problem,
                columns,
                block.group,
                RowTile(output, rows),
                scratch.rows,
                stride,
            )
            var tile = ActivationTile[params.Source.dtype](
                scratch.rows.as_imm(),
                rows,
                stride,
                scratch.offsets.as_imm(),
                chunks=blocking.chunks,
                row_chunks=blocking.row_chunks,
                last_words=blocking.last_words,
            )
            for panel in range(0, block.panels, U.panels):
                var panels = min(U.panels, block.panels - panel)
                var sums = Sums(scratch.sums, panels * PANEL)
                _multiply_exactly[U](
                    params, block, scratch, state, tile, panel, panels, sums
                )
                store_tile[U](
                    params, block, panel, panels, line, first, rows, sums
                )


@always_inline
def _multiply_exactly[
    U: DotUnit
](
    params: DotParams,
    block: Block,
    scratch: DotScratch[params.Source.dtype],
    mut state: Int,
    tile: ActivationTile[params.Source.dtype],
    panel: Int,
    panels: Int,
    sums: Sums,
):
    """Multiplies gathered rows by some panels; groups that share one, group by
    group, with zeros for the channels of the others."""
    comptime dtype = params.Source.dtype
    var filter = filter_tile(params, block, panel, panels)
    comptime if U.joins_groups(dtype):
        if params.diagonal:
            var diagonal = params.diagonal.value()
            var stride = tile.row_stride
            filter.elements = scratch.filter.as_imm()
            var masked = scratch.rows.unsafe_offset(U.rows * stride)
            var group_tile = tile
            group_tile.elements = masked.as_imm()
            var group_sums = Sums(
                scratch.sums.unsafe_offset(tile_sums[U]()), sums.stride
            )
            for group in range(PANEL // diagonal.width):
                diagonal.mask[dtype](
                    tile.elements, tile.rows * stride, group, masked
                )
                U.multiply(
                    state,
                    group_tile,
                    filter,
                    group_sums,
                    OutputLines[dtype].none(),
                )
                diagonal.take(group, tile.rows, group_sums, sums)
            return
    U.multiply(state, tile, filter, sums, OutputLines[dtype].none())
