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

from std.collections import Optional
from ...conv.access import ActivationSource
from ...conv.fields import PANEL
from ...conv.memory import Reads, Writes, element_bytes
from ...conv.panels import PanelLayout
from ...conv.problem import ConvProblem
from ..accumulators import Accumulators, OutputTile
from ..epilogue import TileStore
from ..gemm.scheduler import RowTile, gathered_stride
from ..gemm.tile_io import Columns, gather_rows
from .edges import edges_of
from .few_filters import few_filters, unpack_filters
from ..output import PlainOutput
from .mma import (
    CHUNK_WORDS,
    ActivationTile,
    DotUnit,
    FilterTile,
    OutputLines,
    Sums,
)
from .scheduler import (
    ACCESS_IMAGE,
    ACCESS_MATRIX,
    Block,
    Blocking,
    Strips,
)
from .tile_io import (
    copy_rectangle,
    flip_signs,
    write_offsets,
    write_straight_offsets,
)
from .vector_tile import L1_SLICE_BYTES
from .widening import widen_panel, widen_words


comptime L1_FILTER_BYTES = 24 * 1024
"""Packed filter that stays in L1 beside a register tile's activations and
outputs."""


comptime SLICED_ROWS = 48
"""Pixels of a block by which a slice is multiplied long enough that making the
next one wide does not matter."""


@fieldwise_init
struct DotParams[Source: ActivationSource](ImplicitlyCopyable, Movable):
    """What all tasks of a launch read.

    Parameters:
        Source: How the activation is reached.
    """

    var activation: Self.Source
    var filter: Reads[Self.Source.dtype]
    """Packed."""
    var zero_point: Int32
    """Of the activation."""
    var panel: PanelLayout
    """The order of its panels' elements."""
    var output: TileStore
    var plain: Optional[PlainOutput[Self.Source.dtype]]
    """The output, if register tiles may store it themselves."""
    var problem: ConvProblem
    var blocking: Blocking
    var images_inside: Bool
    """The order of the tasks, see `Block`."""


@fieldwise_init
struct DotScratch[dtype: DType](ImplicitlyCopyable, Movable):
    """A worker's memory.

    Parameters:
        dtype: Of the activations.
    """

    var sums: Writes[DType.float32]
    var offsets: Writes[DType.int32]
    var block: Writes[Self.dtype]
    var filter: Writes[Self.dtype]
    """Panels that are widened."""


def stages[U: DotUnit]() -> Int:
    """Buffers of sums: where one register tile is stored at a time, it is while
    the next is multiplied.

    Parameters:
        U: The instructions.
    """
    return 2 if U.tiles == 1 else 1


def panels_together[
    U: DotUnit
](dtype: DType, panel: PanelLayout, panels: Int, tile_panels: Int) -> Int:
    """Panels of a block that a pixel is multiplied by before the next pixel is:
    all of them if they stay in L1, otherwise those of a register tile.

    Parameters:
        U: The instructions.

    Args:
        dtype: Of the activations.
        panel: The order of the panels' elements.
        panels: Of the largest block.
        tile_panels: Of a register tile.
    """
    var elements = U.spread(dtype) * panels * panel.sums_offset()
    if elements * element_bytes(dtype) <= L1_FILTER_BYTES:
        return panels
    return tile_panels


def widens_slices[
    U: DotUnit
](problem: ConvProblem, dtype: DType, blocking: Blocking) -> Bool:
    """Whether panels are made wide slice by slice: such as do not stay in L1,
    where the pixels of a block are stored together, and are not few.

    Parameters:
        U: The instructions.

    Args:
        problem: The convolution.
        dtype: Of the activations.
        blocking: The cut.
    """
    ref cut = blocking.cut
    if U.spread(dtype) == 1 or few_filters[U](problem, dtype) > 0:
        return False
    var panel = problem.panel_layout(dtype)
    if panels_together[U](dtype, panel, cut.panels, 0) > 0:
        return False
    var strips = Strips.of[U](blocking, cut.lines, cut.columns)
    var rows = strips.lines * strips.positions
    return strips.stores() == 1 and rows >= SLICED_ROWS


def widened_elements[
    U: DotUnit
](problem: ConvProblem, dtype: DType, blocking: Blocking) -> Int:
    """Elements of the panels that are wide at once; 0 if the unit multiplies
    them as they are.

    Parameters:
        U: The instructions.

    Args:
        problem: The convolution.
        dtype: Of the activations.
        blocking: The cut.
    """
    var spread = U.spread(dtype)
    var panel = problem.panel_layout(dtype)
    # Few filters are unpacked behind their panel, which is wide if it must be.
    var few = spread * panel.sums_offset()
    if few_filters[U](problem, dtype) == 0:
        few = 0
    if spread == 1:
        return few
    if widens_slices[U](problem, dtype, blocking):
        return U.panels * L1_SLICE_BYTES
    var panels = blocking.cut.panels
    var together = panels_together[U](dtype, panel, panels, U.panels)
    return spread * together * panel.sums_offset() + few


def tile_sums[U: DotUnit]() -> Int:
    """Sums that are stored together.

    Parameters:
        U: The instructions.
    """
    return U.tiles * U.rows * max(U.panels, U.single_panels) * PANEL


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
            RowTile(block.column, block.columns),
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


@fieldwise_init
struct Place(ImplicitlyCopyable, Movable):
    """Where a register tile lies in its block."""

    var panel: Int
    """The first."""
    var panels: Int
    var line: Int
    """The first."""
    var lines: Int
    var first: Int
    """Position of each line."""
    var rows: Int
    """Positions of each line."""
    var stage: Int
    """The buffer of its sums."""


struct TilePipeline[U: DotUnit, Source: ActivationSource]:
    """The register tiles of a block, one after the other: with two stages, which
    are buffers of sums, one is stored while the next is being multiplied.

    Parameters:
        U: The instructions.
        Source: How the activation is reached.
    """

    var params: DotParams[Self.Source]
    var block: Block
    var activation: Reads[Self.Source.dtype]
    var scratch: DotScratch[Self.Source.dtype]
    var stage: Int
    """The buffer of the next tile."""
    var pending: Optional[Place]
    """The tile that is not stored yet."""
    var widened: Int
    """The first panel that is wide in the worker's memory."""
    var few: Int
    """Filters that are few, or 0."""
    var slices: Bool
    """See `widens_slices`."""
    var skips: Bool
    """Whether products with padding may be left out: where it is zeros."""

    def __init__(
        out self,
        params: DotParams[Self.Source],
        block: Block,
        activation: Reads[Self.Source.dtype],
        scratch: DotScratch[Self.Source.dtype],
    ):
        """Begins with nothing.

        Args:
            params: The launch.
            block: The block.
            activation: Its activations.
            scratch: The worker's memory.
        """
        self.params = params
        self.block = block
        self.activation = activation
        self.scratch = scratch
        self.stage = 0
        self.pending = None
        self.widened = 0
        comptime dtype = Self.Source.dtype
        self.few = few_filters[Self.U](params.problem, dtype)
        self.slices = widens_slices[Self.U](
            params.problem, dtype, params.blocking
        )
        self.skips = (
            Self.U.tiles > 1
            and self.few == 0
            and not Self.U.flips(dtype)
            and params.zero_point == 0
        )

    @always_inline
    def widen(mut self, panel: Int, end: Int):
        """Makes panels wide, for the tiles that follow.

        Args:
            panel: The first, of the block.
            end: Behind the last.
        """
        comptime spread = Self.U.spread(Self.Source.dtype)
        if self.slices:
            return
        self.widened = panel
        var words = self.params.blocking.chunks * CHUNK_WORDS
        var to = self.scratch.filter
        comptime if spread > 1:
            for i in range(panel, end):
                var packed = _filter_tile(self.params, self.block, i, 1)
                widen_panel(packed.elements, words, to)
                to = to.unsafe_offset(self._widened_stride())
        comptime if Self.U.takes_few(Self.Source.dtype):
            if self.few > 0:
                var whole = self.scratch.filter.as_imm()
                comptime if spread == 1:
                    whole = _filter_tile(
                        self.params, self.block, panel, 1
                    ).elements
                unpack_filters(whole, spread * words, self.few, to)

    @always_inline
    def _widened_stride(self) -> Int:
        """Elements between two panels that are wide."""
        return (
            Self.U.spread(Self.Source.dtype) * self.params.panel.sums_offset()
        )

    @always_inline
    def _filter(self, place: Place) -> FilterTile[Self.Source.dtype]:
        """The panels of a tile, as the unit multiplies them."""
        var packed = _filter_tile(
            self.params, self.block, place.panel, place.panels
        )
        comptime spread = Self.U.spread(Self.Source.dtype)
        if spread == 1 and self.few == 0:
            return packed
        if self.slices:
            packed.wide = self.scratch.filter
            return packed
        var stride = self._widened_stride()
        var panel = place.panel - self.widened
        if self.few > 0 and spread > 1:
            panel += 1
        return FilterTile[Self.Source.dtype](
            self.scratch.filter.unsafe_offset(panel * stride).as_imm(),
            stride,
            place.panels,
            self.few,
        )

    @always_inline
    def _sums(self, place: Place) -> Sums:
        """The buffer of a tile's sums."""
        return Sums(
            self.scratch.sums.unsafe_offset(place.stage * tile_sums[Self.U]()),
            place.panels * PANEL,
        )

    @always_inline
    def compute(
        mut self,
        mut state: Int,
        *,
        panel: Int,
        panels: Int,
        line: Int,
        lines: Int,
        first: Int,
        rows: Int,
    ):
        """Multiplies a tile, and stores it or the one before it.

        Args:
            state: Of the unit.
            panel: See `Place`, like the others.
            panels: The same.
            line: The same.
            lines: The same.
            first: The same.
            rows: The same.
        """
        var place = Place(panel, panels, line, lines, first, rows, self.stage)
        ref blocking = self.params.blocking
        comptime spread = Self.U.spread(Self.Source.dtype)
        var offset = (
            place.line * blocking.line_stride
            + place.first * blocking.row_stride
        )
        var tile = ActivationTile[Self.Source.dtype](
            self.activation.unsafe_offset(spread * offset),
            place.rows,
            spread * blocking.row_stride,
            self.scratch.offsets.as_imm(),
            chunks=blocking.chunks,
            row_chunks=blocking.row_chunks,
            last_words=blocking.last_words,
        )
        tile.lines = place.lines
        tile.line_stride = spread * blocking.line_stride
        if self.skips:
            tile.edges = edges_of(
                self.params.problem,
                blocking,
                self.block,
                place.line,
                place.first,
                place.rows,
            )
        var outputs = _outputs[Self.U](self.params, self.block, place)
        Self.U.multiply(
            state, tile, self._filter(place), self._sums(place), outputs
        )
        if outputs:
            return
        self.finish()
        self.pending = place
        comptime if stages[Self.U]() == 1:
            self.finish()
        else:
            self.stage = 1 - self.stage

    @always_inline
    def finish(mut self):
        """Stores the tile that is pending."""
        if self.pending:
            var place = self.pending.value()
            _store[Self.U](self.params, self.block, place, self._sums(place))
            self.pending = None


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
    # Sums of a panel that is not full go through memory.
    if _stores_block[U](params, block) and (
        params.problem.gemm_n() % PANEL == 0
    ):
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
                    _filter_tile(params, block, panel, panels),
                    sums,
                    None,
                )
                _store_tile[U](
                    params, block, panel, panels, line, first, rows, sums
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
def _stores_block[U: DotUnit](params: DotParams, block: Block) -> Bool:
    """Whether register tiles store outputs of a block themselves: its positions
    are outputs, and some of its panels are full."""
    comptime if U.stores_outputs(params.Source.dtype):
        ref blocking = params.blocking
        var has_gaps = blocking.flat and blocking.pitch != blocking.width
        return Bool(params.plain) and (block.lines == 1 or not has_gaps)
    return False


@always_inline
def _outputs[
    U: DotUnit
](params: DotParams, block: Block, place: Place) -> Optional[
    OutputLines[params.Source.dtype]
]:
    """Where a register tile stores its outputs itself, if it does."""
    var tile = _output_tile(
        params,
        block,
        place.panel,
        place.panels,
        place.line,
        place.first,
        place.rows,
    )
    if not _stores_block[U](params, block) or (
        tile.filters < place.panels * PANEL
    ):
        return None
    return OutputLines(
        params.plain.value().at(tile.row, tile.filter), params.blocking.width
    )


@always_inline
def _store[
    U: DotUnit
](params: DotParams, block: Block, place: Place, sums: Sums):
    """Stores the outputs among a register tile's positions."""
    ref blocking = params.blocking
    if not blocking.flat:
        # Whole lines of the image follow each other.
        var whole = place.rows == blocking.width
        for line in range(1 if whole else place.lines):
            _store_tile[U](
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
            _store_tile[U](
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
def _store_tile[
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
    comptime if dtype.is_integral():
        comptime flipped = Int32(128 if U.flips(dtype) else 0)
        var filter = _filter_tile(params, block, panel, panels)
        params.output.store_integers(
            params.problem,
            tile,
            Accumulators[DType.int32](
                sums.elements,
                sums.stride,
                filter.elements.unsafe_offset(
                    params.panel.sums_offset()
                ).unsafe_bitcast[Int32](),
                params.panel.elements() // size_of[DType.int32](),
                params.zero_point + flipped,
            ),
        )
    else:
        params.output.store(params.problem, tile, sums.elements, sums.stride)


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
