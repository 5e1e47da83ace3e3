"""The register tiles of a dot-product block, one after the other."""

from std.collections import Optional

from ...conv.access import ActivationSource
from ...conv.fields import PANEL
from ...conv.memory import Reads, element_bytes
from ...conv.panels import PanelLayout
from ...conv.problem import ConvProblem
from .block_diagonal import joins_groups, multiplied_problem
from .edges import edges_of
from .few_filters import few_filters, unpack_filters
from .mma import CHUNK_WORDS, ActivationTile, DotUnit, FilterTile, Sums
from .outputs import register_outputs, store_sums
from .params import DotParams, DotScratch, Place, filter_tile
from .scheduler import Block, Blocking, Strips
from .vector_unit import L1_SLICE_BYTES
from .widening import widen_panel


comptime SLICED_ROWS = 48
"""Pixels of a block by which a slice is multiplied long enough that making the
next one wide does not matter."""


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
    all of them if they stay near enough, otherwise those of a register tile.

    Parameters:
        U: The instructions.

    Args:
        dtype: Of the activations.
        panel: The order of the panels' elements.
        panels: Of the largest block.
        tile_panels: Of a register tile.
    """
    var elements = U.spread(dtype) * panels * panel.sums_offset()
    if elements * element_bytes(dtype) <= U.together_bytes:
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
    """Elements of the panels that are wide at once, or block-diagonal; 0 if the
    unit multiplies them as they are.

    Parameters:
        U: The instructions.

    Args:
        problem: The convolution.
        dtype: Of the activations.
        blocking: The cut.
    """
    if joins_groups[U](problem, dtype):
        var joined = multiplied_problem[U](problem, dtype)
        return joined.panel_layout(dtype).elements()
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


def _padding[U: DotUnit](dtype: DType, zero_point: Int32) -> UInt32:
    """A word of padding, as the unit multiplies it."""
    if not dtype.is_integral():
        return 0
    var byte = UInt32(zero_point + Int32(128 if U.flips(dtype) else 0)) & 0xFF
    return byte * 0x01010101


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
    """Whether products with padding may be left out."""

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
        # Sums of padding that is no zeros are as wide as it.
        self.skips = (
            Self.U.tiles > 1
            and self.few == 0
            and (Self.U.spread(dtype) == 1 or params.zero_point == 0)
        )

    @always_inline
    def widen(mut self, panel: Int, end: Int):
        """Makes panels wide and unpacks few filters, for the tiles that follow.

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
                var packed = filter_tile(self.params, self.block, i, 1)
                widen_panel(packed.elements, words, to)
                to = to.unsafe_offset(self._widened_stride())
        comptime if Self.U.takes_few(Self.Source.dtype):
            if self.few > 0:
                var whole = self.scratch.filter.as_imm()
                comptime if spread == 1:
                    whole = filter_tile(
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
        var packed = filter_tile(
            self.params, self.block, place.panel, place.panels
        )
        comptime if Self.U.joins_groups(Self.Source.dtype):
            if self.params.diagonal:
                packed.elements = self.scratch.filter.as_imm()
                return packed
        comptime spread = Self.U.spread(Self.Source.dtype)
        if spread == 1 and self.few == 0:
            return packed
        if self.slices:
            packed.widens = True
            packed.wide = self.scratch.filter
            return packed
        var stride = self._widened_stride()
        var panel = place.panel - self.widened
        if self.few > 0 and spread > 1:
            panel += 1
        return FilterTile[Self.Source.dtype](
            self.scratch.filter.unsafe_offset(panel * stride).as_imm(),
            stride,
            packed.filters,
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
                _padding[Self.U](Self.Source.dtype, self.params.zero_point),
            )
        var outputs = register_outputs[Self.U](self.params, self.block, place)
        Self.U.multiply(
            state, tile, self._filter(place), self._sums(place), outputs
        )
        if outputs.are_stored():
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
            store_sums[Self.U](
                self.params, self.block, place, self._sums(place)
            )
            self.pending = None
