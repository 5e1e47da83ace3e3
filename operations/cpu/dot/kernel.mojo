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
from ...conv.memory import Reads
from ..gemm.scheduler import RowTile, gathered_stride
from ..gemm.tile_io import Columns, gather_rows
from .mma import ActivationTile, DotUnit, OutputLines, Sums
from .outputs import output_row, store_tile, stores_block
from .params import DotParams, DotScratch, filter_tile
from .pipeline import TilePipeline, panels_together
from .scheduler import ACCESS_IMAGE, ACCESS_MATRIX, Block, Strips
from .tile_io import (
    copy_rectangle,
    flip_signs,
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
    var columns = Columns(
        problem, params.panel, 0, blocking.depth, params.zero_point
    )
    comptime dtype = params.Source.dtype
    comptime spread = U.spread(dtype)
    var activation = scratch.block.as_imm()
    # What is copied ends where its widened words will end.
    var copied = scratch.block.unsafe_offset(
        (spread - 1) * blocking.block_elements
    )
    write_offsets(problem, blocking, scratch.offsets, spread)
    var state = U.begin()
    if blocking.cut.access == ACCESS_IMAGE:
        if not copy_rectangle(
            params.activation, problem, blocking, columns, block, copied
        ):
            _run_exactly[U](params, columns, block, scratch, state)
            U.end()
            return
    elif blocking.cut.access == ACCESS_MATRIX:
        comptime if not params.Source.fused:
            activation = params.activation.data().unsafe_offset(
                block.column * blocking.row_stride
            )
    else:
        gather_rows(
            params.activation,
            problem,
            columns,
            block.group,
            RowTile(output_row(params, block, 0, 0), block.columns),
            copied,
            blocking.row_stride,
        )
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
    U.end()


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
                scratch.block,
                stride,
            )
            var tile = ActivationTile[params.Source.dtype](
                scratch.block.as_imm(),
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
                U.multiply(
                    state,
                    tile,
                    filter_tile(params, block, panel, panels),
                    sums,
                    OutputLines[params.Source.dtype].none(),
                )
                store_tile[U](
                    params, block, panel, panels, line, first, rows, sums
                )
