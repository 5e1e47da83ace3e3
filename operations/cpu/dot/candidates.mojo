"""The cuts that the dot-product GEMM can run a problem with, and the model of how
long each takes."""

from std.collections import Optional
from std.math import ceildiv, gcd

from ...conv.fields import PANEL
from ...conv.memory import CACHE_LINE, element_bytes
from ...conv.panels import chunk_products, interleaved_products
from ...conv.operands import OperandTypes
from ...conv.problem import ConvProblem
from ...conv.search import Candidates, cheapest
from ..gemm.candidates import L1_WAY_BYTES, L1_WAYS
from ..gemm.scheduler import gathered_stride
from ..gemm.tile_io import copy_width
from .edges import inside_share
from .few_filters import few_filters
from .mma import CHUNK_WORDS, MAX_BLOCK_BYTES, DotUnit
from .pipeline import panels_together
from .scheduler import (
    ACCESS_GATHER,
    ACCESS_IMAGE,
    ACCESS_LINES,
    ACCESS_MATRIX,
    Blocking,
    Cut,
    Strips,
)

comptime L2_FILTER_BYTES = 512 * 1024
"""Packed filter that stays in L2 from task to task."""

comptime COPY_BYTES_PER_CYCLE = 16.0
"""Of what is copied, from L2 to L2."""

comptime WIDENED_BYTES_PER_CYCLE = 10.0
"""Of what is widened, before it is."""

comptime PIECE_CYCLES = 12.0
"""Of a copy's beginning: a filter row of a pixel, or a line of a rectangle."""

comptime FILTER_BYTES_PER_CYCLE = 8.0
"""Of what comes from behind L2."""

comptime STORE_CYCLES = 0.5
"""Of an output: epilogue, rounding and store."""

comptime TILE_CYCLES = 20.0
"""Of a register tile, whatever its depth: its sums go through L1."""

comptime REGISTER_STORE_CYCLES = 0.15
"""Of an output that a register tile stores itself."""

comptime INTEGER_STORE_CYCLES = 0.3
"""The same where outputs are integers, which are scaled and rounded."""

comptime CALL_CYCLES = 80.0
"""Of multiplying a run of tiles, however short."""

comptime STORED_CYCLES = 100.0
"""Of what is stored together, however little: what the epilogue does is asked."""

comptime CONFLICT_SHARE = 1.4
"""Of a register tile whose rows compete for sets of L1."""

comptime TASK_CYCLES = 2000.0
"""Of a task."""

comptime MAX_PARTS = 4
"""Parts that panels are cut into at most, for each thread."""

comptime SIZES = 24
"""Sizes of a block that are tried along an axis."""


@fieldwise_init
struct Extents(ImplicitlyCopyable, Movable):
    """What an access makes of the output: images of lines of pixels."""

    var images: Int
    var height: Int
    var width: Int

    @staticmethod
    def of(problem: ConvProblem, access: Int) -> Extents:
        """The extents.

        Args:
            problem: The convolution.
            access: An `ACCESS_*` code.
        """
        if access == ACCESS_LINES:
            return Extents(
                problem.gemm_m() // problem.output[2], 1, problem.output[2]
            )
        if access != ACCESS_IMAGE:
            return Extents(1, 1, problem.gemm_m())
        return Extents(
            problem.batch * problem.output[0],
            problem.output[1],
            problem.output[2],
        )


def access_refusal[
    U: DotUnit
](problem: ConvProblem, types: OperandTypes, access: Int) -> Optional[String]:
    """Why a block's activations cannot be reached in a way, or None.

    Parameters:
        U: The instructions.

    Args:
        problem: The convolution.
        types: Of the operands.
        access: An `ACCESS_*` code.
    """
    var unit = chunk_products(types.input)
    var step = U.step_words * interleaved_products(types.input)
    # Few filters are multiplied by whole registers of a pixel.
    if few_filters[U](problem, types.input) > 0:
        step = unit
    if access == ACCESS_MATRIX:
        if U.flips(types.input):
            return String("activations are copied, to flip their signs")
        if types.interleaved != 0:
            return String("a pixel's channels are not side by side")
        if (
            problem.groups > 1
            or types.fused_input
            or not problem.is_pointwise()
            or problem.channels % step != 0
        ):
            return String(
                t"the activation is not a matrix of rows of {step} products"
            )
    if access == ACCESS_IMAGE:
        if problem.dilation[2] != 1 and problem.group_channels() % unit != 0:
            return String("taps of a filter row are not side by side")
    if access == ACCESS_LINES:
        if U.tiles == 1 or few_filters[U](problem, types.input) > 0:
            return String("taps are not left out of register tiles")
        if problem.group_channels() % unit != 0:
            return String(t"a tap is not whole chunks of {unit} products")
        if problem.pad_before[1] == 0 and problem.pad_before[2] == 0:
            return String("no taps lie beside the image")
    return None


def groups_together(problem: ConvProblem, types: OperandTypes) -> Int:
    """Groups of a task: as many as share a cache line of outputs.

    Args:
        problem: The convolution.
        types: Of the operands.
    """
    return min(
        problem.groups,
        ceildiv(CACHE_LINE, problem.gemm_n() * element_bytes(types.output)),
    )


def make_blocking[
    U: DotUnit
](problem: ConvProblem, types: OperandTypes, cut: Cut) -> Blocking:
    """What follows from a cut.

    Parameters:
        U: The instructions.

    Args:
        problem: The convolution.
        types: Of the operands.
        cut: The cut, whose access nothing refuses.
    """
    var panel = problem.panel_layout(types.input)
    var unit = chunk_products(types.input)
    var extents = Extents.of(problem, cut.access)
    var channels = problem.group_channels()
    var blocking = Blocking(
        cut=cut,
        groups=groups_together(problem, types),
        images=extents.images,
        height=extents.height,
        width=extents.width,
        pitch=cut.columns,
        flat=True,
        input_lines=1,
        input_columns=cut.columns,
        row_stride=problem.channels,
        line_stride=0,
        block_elements=0,
        chunks=panel.depth() // unit,
        depth=panel.depth(),
        row_chunks=panel.row_depth // unit,
        last_words=ceildiv(
            panel.products - (panel.row_depth - unit), panel.interleaved
        ),
    )
    if cut.access == ACCESS_MATRIX and U.spread(types.input) > 1:
        blocking.block_elements = cut.columns * problem.channels
    if cut.access == ACCESS_LINES:
        blocking.flat = False
    if cut.access == ACCESS_GATHER or cut.access == ACCESS_LINES:
        blocking.row_stride = gathered_stride(
            panel.depth(), element_bytes(types.input)
        )
        blocking.block_elements = cut.columns * blocking.row_stride
    if cut.access == ACCESS_IMAGE:
        blocking.input_lines = (cut.lines - 1) * problem.stride[
            1
        ] + problem.span(1)
        blocking.input_columns = (cut.columns - 1) * problem.stride[
            2
        ] + problem.span(2)
        blocking.row_stride = problem.stride[2] * channels
        blocking.line_stride = (
            problem.stride[1] * blocking.input_columns * channels
        )
        blocking.flat = False
        blocking.block_elements = (
            problem.filter[0]
            * blocking.input_lines
            * blocking.input_columns
            * channels
            + unit
            + copy_width(types.input)
        )
        if problem.stride[1] == 1 and problem.stride[2] == 1:
            var flat = blocking
            flat.flat = True
            flat.pitch = blocking.input_columns
            if U.tiles == 1 or _multiply_cycles[U](
                problem, types, flat
            ) < _multiply_cycles[U](problem, types, blocking):
                return flat
    return blocking


struct Cuts[U: DotUnit](Candidates):
    """Every cut of a problem.

    Parameters:
        U: The instructions.
    """

    var problem: ConvProblem
    var types: OperandTypes
    var threads: Int
    var table: List[Blocking]

    def __init__(
        out self, problem: ConvProblem, types: OperandTypes, threads: Int
    ):
        """Lists the cuts.

        Args:
            problem: The convolution.
            types: Of the operands.
            threads: How many threads there are.
        """
        self.problem = problem
        self.types = types
        self.threads = threads
        self.table = List[Blocking]()
        for access in [
            ACCESS_MATRIX,
            ACCESS_IMAGE,
            ACCESS_LINES,
            ACCESS_GATHER,
        ]:
            if not access_refusal[Self.U](problem, types, access):
                self._list(access)

    def _list(mut self, access: Int):
        """Adds the cuts of an access."""
        var extents = Extents.of(self.problem, access)
        var units = ceildiv(self.problem.panels(), Self.U.panels)
        var parts = min(units, MAX_PARTS * self.threads)
        var previous = 0
        for part in range(1, parts + 1):
            var panels = min(
                ceildiv(units, part) * Self.U.panels, self.problem.panels()
            )
            if panels == previous:
                continue
            previous = panels
            for columns in _sizes(extents.width, Self.U.rows):
                # Lines of which a part is in another block come whole first.
                if columns < extents.width:
                    self._append(Cut(access, 1, columns, panels))
                    continue
                for lines in _sizes(extents.height, 1):
                    self._append(Cut(access, lines, columns, panels))

    def _append(mut self, cut: Cut):
        """Adds a cut."""
        self.table.append(make_blocking[Self.U](self.problem, self.types, cut))

    def count(self) -> Int:
        return len(self.table)

    def refusal(self, index: Int) -> Optional[String]:
        """See `Candidates`: a block stays in L2, beside filters that do."""
        ref blocking = self.table[index]
        var dtype = self.types.input
        var panel = self.problem.panel_layout(dtype)
        var most = MAX_BLOCK_BYTES
        if panels_together[Self.U](dtype, panel, blocking.cut.panels, 0) > 0:
            most = Self.U.block_bytes
        return cache_refusal[Self.U](self.types, blocking, most)

    def cost(self, index: Int) -> Float64:
        """See `Candidates`: in cycles."""
        return blocking_cycles[Self.U](
            self.problem, self.types, self.table[index], self.threads
        )


def cache_refusal[
    U: DotUnit
](
    types: OperandTypes, blocking: Blocking, most: Int = MAX_BLOCK_BYTES
) -> Optional[String]:
    """Why a block does not stay in L2, or None: a line of a register tile's
    pixels is what it is.

    Parameters:
        U: The instructions.

    Args:
        types: Of the operands.
        blocking: The cut.
        most: Bytes of activations that a block may have.
    """
    var element = element_bytes(types.input)
    var bytes = block_bytes(blocking, U.spread(types.input) * element)
    ref cut = blocking.cut
    var is_smallest = cut.lines == 1 and cut.columns <= U.rows
    if bytes > most and not is_smallest:
        return String(
            t"a block has {bytes} bytes of activations; at most {most} stay in"
            t" L2"
        )
    return None


def blocking_cycles[
    U: DotUnit
](
    problem: ConvProblem, types: OperandTypes, blocking: Blocking, threads: Int
) -> Float64:
    """The model's time of a cut, in cycles.

    Parameters:
        U: The instructions.

    Args:
        problem: The convolution.
        types: Of the operands.
        blocking: The cut.
        threads: That run it.
    """
    ref cut = blocking.cut
    var task = _copy_cycles[U](problem, types, blocking)
    task += _multiply_cycles[U](problem, types, blocking)
    var product = PANEL * element_bytes(types.input)
    var filter = cut.panels * product * blocking.depth
    var whole = problem.panels() * product * blocking.depth
    if U.spread(types.input) > 1:
        task += Float64(filter) / WIDENED_BYTES_PER_CYCLE
    # Where it does not stay in L2 it comes again for each block.
    if whole * problem.groups > max(L2_FILTER_BYTES, U.together_bytes):
        task += Float64(filter) / FILTER_BYTES_PER_CYCLE
    task *= Float64(blocking.groups)
    task += TASK_CYCLES
    var rounds = ceildiv(blocking.tasks(problem), threads)
    return Float64(rounds) * task


def _sizes(extent: Int, least: Int) -> List[Int]:
    """Sizes of equal parts of an extent: all of it, halves, thirds and so on,
    then ever smaller ones, down to about `least`."""
    var sizes = List[Int]()
    var parts = 1
    while len(sizes) < SIZES:
        var size = ceildiv(extent, parts)
        if len(sizes) == 0 or size != sizes[len(sizes) - 1]:
            sizes.append(size)
        if size <= least:
            break
        parts = parts + max(1, parts // 3)
    # The smallest block is always listed.
    if sizes[len(sizes) - 1] > least:
        sizes.append(least)
    return sizes^


def block_bytes(blocking: Blocking, element: Int) -> Int:
    """Activations of a block, copied or not."""
    if blocking.cut.access == ACCESS_MATRIX:
        return blocking.cut.columns * blocking.row_stride * element
    return blocking.copied_elements() * element


def _copy_cycles[
    U: DotUnit
](problem: ConvProblem, types: OperandTypes, blocking: Blocking) -> Float64:
    """Of copying a block."""
    ref cut = blocking.cut
    var bytes = Float64(blocking.block_elements * element_bytes(types.input))
    var pieces = 0
    if cut.access == ACCESS_GATHER or cut.access == ACCESS_LINES:
        # A tap is a piece of its own where another one does not follow it.
        var taps = problem.taps()
        if problem.groups == 1 and problem.dilation[2] == 1:
            taps //= problem.filter[2]
        pieces = cut.columns * taps
    if cut.access == ACCESS_IMAGE:
        pieces = problem.filter[0] * blocking.input_lines
        if problem.groups > 1 or types.fused_input:
            pieces *= blocking.input_columns
    var cycles = Float64(pieces) * PIECE_CYCLES
    if cut.access != ACCESS_MATRIX:
        cycles += bytes / COPY_BYTES_PER_CYCLE
    if U.spread(types.input) > 1:
        cycles += bytes / WIDENED_BYTES_PER_CYCLE
    return cycles


def _multiply_cycles[
    U: DotUnit
](problem: ConvProblem, types: OperandTypes, blocking: Blocking) -> Float64:
    """Of multiplying and storing a block."""
    ref cut = blocking.cut
    var at_once = U.tiles
    # Outputs are as a rule such as a tile stores itself.
    if U.stores_outputs(types.output):
        at_once = U.tiles_at_once(types.input, blocking.chunks)
    var strips = Strips.of[U](blocking, cut.lines, cut.columns, at_once)
    var step = min(cut.panels, strips.panels)
    var chunks = Float64(blocking.chunks)
    comptime if U.step_words < CHUNK_WORDS:
        chunks = Float64(blocking.words()) / Float64(CHUNK_WORDS)
    if not blocking.flat and U.tiles > 1:
        chunks *= inside_share(problem, blocking)
    # Gathered rows do not compete; those of a copied rectangle are in L2.
    var apart = L1_WAY_BYTES // gcd(
        blocking.row_stride * element_bytes(types.input), L1_WAY_BYTES
    )
    var rows = min(strips.rows, strips.positions)
    var ways = U.matrix_ways if cut.access == ACCESS_MATRIX else L1_WAYS
    if ceildiv(rows, apart) > ways:
        chunks *= CONFLICT_SHARE
    var panels = Float64(strips.lines) * _line_cycles[U](strips, step, chunks)
    panels += Float64(strips.stores()) * STORED_CYCLES
    # A run of whole tiles is a call, and so is what is left of a line.
    var runs = ceildiv(strips.positions, strips.stored)
    if strips.positions % strips.rows != 0:
        runs += 1
    panels += Float64(strips.lines * runs) * CALL_CYCLES
    var outputs = cut.lines * cut.columns * cut.panels * PANEL
    var stored = STORE_CYCLES
    var direct = U.stores_outputs(types.output) and blocking.are_outputs(
        cut.lines
    )
    if direct or Bool(U.sum_store_feature(types.output)):
        stored = REGISTER_STORE_CYCLES
        if types.output.is_integral():
            stored = INTEGER_STORE_CYCLES
    return (
        Float64(ceildiv(cut.panels, step)) * panels + Float64(outputs) * stored
    )


def _line_cycles[
    U: DotUnit
](strips: Strips, panels: Int, chunks: Float64) -> Float64:
    """Of multiplying a line by the panels of a tile."""
    var cycles: Float64 = 0
    var left = strips.positions
    while left > 0:
        var rows = U.tile_rows(min(left, strips.rows))
        # All whole tiles at once, unless a smaller one goes in front.
        var tiles = left // rows if rows == strips.rows else 1
        var tile = U.chunk_cycles(rows, panels) * chunks + TILE_CYCLES
        cycles += Float64(tiles) * tile
        left -= tiles * rows
    return cycles


@fieldwise_init
struct Chosen(ImplicitlyCopyable, Movable):
    """A cut, and the threads that run it."""

    var blocking: Blocking
    var threads: Int
    var cycles: Float64
    """By the model."""


def choose_blocking[
    U: DotUnit
](
    problem: ConvProblem,
    types: OperandTypes,
    threads: Int,
    wake_cycles: Float64,
) -> Chosen:
    """The cut that the model finds fastest, on all threads or on the calling
    one.

    Parameters:
        U: The instructions.

    Args:
        problem: The convolution, not depthwise, with at least one output.
        types: Of the operands.
        threads: How many threads there are.
        wake_cycles: Until other threads begin.
    """
    var alone = _chosen[U](problem, types, 1)
    if threads == 1:
        return alone
    var together = _chosen[U](problem, types, threads)
    together.cycles += wake_cycles
    return together if together.cycles < alone.cycles else alone


def _chosen[
    U: DotUnit
](problem: ConvProblem, types: OperandTypes, threads: Int) -> Chosen:
    """The cut that is fastest on so many threads."""
    var cuts = Cuts[U](problem, types, threads)
    var found = cheapest(cuts)
    return Chosen(cuts.table[found.index], threads, found.cost)
