"""The dot-product GEMM: a task's loops over filter panels and pixels.

    copy the block's activations, or find them where they lie
    for each register tile's panels:
        for each register tile of pixels:
            multiply, all products deep
            for each line that it meets: epilogue, store
"""

from ...conv.access import ActivationSource
from ...conv.fields import PANEL
from ...conv.memory import Reads, Writes
from ...conv.panels import PanelLayout
from ...conv.problem import ConvProblem
from ..epilogue import OutputTile, TileStore
from ..gemm.scheduler import RowTile, row_stride
from ..gemm.tile_io import Columns, gather_rows
from .mma import ActivationTile, DotUnit, FilterTile, Sums
from .scheduler import ACCESS_IMAGE, ACCESS_MATRIX, Block, Blocking, Strips
from .tile_io import copy_rectangle, write_offsets, write_straight_offsets


@fieldwise_init
struct DotParams[Source: ActivationSource](ImplicitlyCopyable, Movable):
    """What all tasks of a launch read.

    Parameters:
        Source: How the activation is reached.
    """

    var activation: Self.Source
    var filter: Reads[Self.Source.dtype]
    """Packed."""
    var panel: PanelLayout
    """The order of its panels' elements."""
    var output: TileStore
    var problem: ConvProblem
    var blocking: Blocking


@fieldwise_init
struct DotScratch[dtype: DType](ImplicitlyCopyable, Movable):
    """A worker's memory.

    Parameters:
        dtype: Of the activations.
    """

    var sums: Writes[DType.float32]
    var offsets: Writes[DType.int32]
    var block: Writes[Self.dtype]


def sums_elements[U: DotUnit]() -> Int:
    """Sums of a register tile.

    Parameters:
        U: The instructions.
    """
    return U.rows * max(U.panels, U.single_panels) * PANEL


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
    var columns = Columns(problem, params.panel, 0, blocking.depth)
    var activation = scratch.block.as_imm()
    write_offsets(problem, blocking, scratch.offsets)
    var state = U.begin()
    if blocking.cut.access == ACCESS_IMAGE:
        if not copy_rectangle(
            params.activation, problem, blocking, columns, block, scratch.block
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
            RowTile(block.column, block.columns),
            scratch.block,
            blocking.row_stride,
        )
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
    ref blocking = params.blocking
    var strips = Strips.of[U](blocking, block.lines, block.columns)
    for panel in range(0, block.panels, strips.panels):
        var panels = min(strips.panels, block.panels - panel)
        var filter = _filter_tile(params, block, panel, panels)
        for line in range(strips.count):
            var start = activation.unsafe_offset(line * blocking.line_stride)
            for first in range(0, strips.positions, strips.rows):
                var tile = ActivationTile[params.Source.dtype](
                    start.unsafe_offset(first * blocking.row_stride),
                    min(strips.rows, strips.positions - first),
                    blocking.row_stride,
                    scratch.offsets.as_imm(),
                    blocking.chunks,
                )
                var sums = Sums(scratch.sums, panels * PANEL)
                U.multiply(state, tile, filter, sums)
                _store(
                    params, block, panel, panels, line, first, tile.rows, sums
                )


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
    var stride = row_stride(blocking.depth)
    for line in range(block.lines):
        for first in range(0, block.columns, U.rows):
            var rows = min(U.rows, block.columns - first)
            var output = _output_row(params, block, line, first)
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
                blocking.chunks,
            )
            for panel in range(0, block.panels, U.panels):
                var panels = min(U.panels, block.panels - panel)
                var sums = Sums(scratch.sums, panels * PANEL)
                U.multiply(
                    state,
                    tile,
                    _filter_tile(params, block, panel, panels),
                    sums,
                )
                params.output.store(
                    problem,
                    _output_tile(
                        params, block, panel, panels, line, first, rows
                    ),
                    sums.elements,
                    sums.stride,
                )


@always_inline
def _filter_tile(
    params: DotParams, block: Block, panel: Int, panels: Int
) -> FilterTile[params.Source.dtype]:
    """Some panels of a block, from its `panel`th on."""
    var elements = params.panel.elements()
    var first = block.group * params.problem.panels() + block.panel + panel
    return FilterTile[params.Source.dtype](
        params.filter.unsafe_offset(first * elements), elements, panels
    )


@always_inline
def _store(
    params: DotParams,
    block: Block,
    panel: Int,
    panels: Int,
    line: Int,
    first: Int,
    rows: Int,
    sums: Sums,
):
    """Stores the outputs among the positions from `first` on, counted from the
    beginning of a line."""
    ref blocking = params.blocking
    var below, column = divmod(first, blocking.pitch)
    var at = line + below
    var done = 0
    while done < rows:
        var valid = min(block.columns - column, rows - done)
        if valid > 0:
            var tile = _output_tile(
                params, block, panel, panels, at, column, valid
            )
            var here = sums.behind(done)
            params.output.store(
                params.problem, tile, here.elements, here.stride
            )
        done += blocking.pitch - column
        column = 0
        at += 1


@always_inline
def _output_row(params: DotParams, block: Block, line: Int, column: Int) -> Int:
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
    var filter = (block.panel + panel) * PANEL
    return OutputTile(
        _output_row(params, block, line, column),
        rows,
        block.group * problem.gemm_n() + filter,
        min(panels * PANEL, problem.gemm_n() - filter),
    )
