"""The register tile of units whose lanes each add up the products of a word: the
words of several pixels, one at a time, by vectors of filters."""

from std.collections import Array
from std.math import ceildiv
from std.sys.info import size_of

from ...conv.fields import PANEL
from ...conv.memory import Reads, sum_type
from ...conv.panels import interleaved_products
from ..config import HALF_PANEL
from ..near_rows import NEAR_ROWS
from .mma import (
    CHUNK_WORDS,
    WORD,
    ActivationTile,
    FilterTile,
    OutputLines,
    Sums,
    TileOutput,
)
from .tap_edges import (
    FIRST_OUTSIDE,
    INSIDE,
    LAST_OUTSIDE,
    OUTSIDE,
    TapEdges,
)
from .register_store import store_outputs
from .vector_unit import VectorUnit, slices_of


@fieldwise_init
struct Slice(ImplicitlyCopyable, Movable):
    """Chunks of products that follow each other."""

    var first: Int
    var count: Int


def multiply_panels[
    U: VectorUnit, dtype: DType
](
    activation: ActivationTile[dtype],
    filter: FilterTile[dtype],
    sums: Sums,
    outputs: OutputLines[dtype],
):
    """Multiplies all pixels of a tile by panels, slice by slice of the products:
    each slice of the filter stays in a cache for all pixels.

    Parameters:
        U: The instructions.
        dtype: Of the operands.

    Args:
        activation: The activations, as wide as `U.spread` says.
        filter: The panels, as wide unless `widens` has them made so.
        sums: Where the sums go, whole panels of each pixel; with outputs, those
            of a slice that is not the last one.
        outputs: Where outputs go, if there are any: `U` stores them.
    """
    comptime spread = U.spread(dtype)
    comptime chunk = CHUNK_WORDS * WORD * PANEL // size_of[dtype]()
    var slices = slices_of[U](dtype, activation.chunks, filter.panels())
    var length = ceildiv(activation.chunks, slices)
    for first in range(0, activation.chunks, length):
        var count = min(length, activation.chunks - first)
        var here = filter
        here.elements = filter.elements.unsafe_offset(first * spread * chunk)
        comptime if spread > 1:
            if filter.widens:
                var wide = filter.wide
                here.elements = wide.as_imm()
                here.panel_stride = count * spread * chunk
                for panel in range(filter.panels()):
                    U.widen(
                        filter.elements.unsafe_offset(
                            panel * filter.panel_stride + first * chunk
                        ),
                        count * CHUNK_WORDS,
                        wide.unsafe_offset(panel * here.panel_stride),
                    )
        var is_last = first + count == activation.chunks
        for line in range(activation.lines):
            var output = outputs.line(line)
            if not is_last:
                output.filters = 0
            _multiply_slice[U, dtype](
                activation.line(line),
                here,
                sums.behind(line * activation.rows),
                output,
                Slice(first, count),
            )


@always_inline
def _multiply_slice[
    U: VectorUnit, dtype: DType
](
    activation: ActivationTile[dtype],
    filter: FilterTile[dtype],
    sums: Sums,
    output: TileOutput[dtype],
    slice: Slice,
):
    """Adds the products of a slice to the sums of a line, register tile by
    register tile."""
    var rest = activation
    var to = sums
    var target = output
    while rest.rows > 0:
        var alike = rest.edges.alike(rest.rows)
        var rows = U.tile_rows(alike)
        var tiles = alike // rows if rows == U.rows else 1
        var vectors = filter.panels() * PANEL // U.lanes
        comptime half = HALF_PANEL // U.lanes if U.panels == 1 else 0
        if half > 0 and filter.filters <= HALF_PANEL and rows == U.rows:
            vectors = half
        comptime for wide in range(1, U.panels * PANEL // U.lanes + 1):
            comptime for known in range(1, U.rows + 1):
                comptime is_half = wide == half and known == U.rows
                comptime if U.tile_rows(known) == known and (
                    is_half or wide * U.lanes % PANEL == 0
                ):
                    if rows == known and vectors == wide:
                        _multiply_tiles[U, dtype, known, wide](
                            rest, filter, to, target, slice, tiles
                        )
        rest = rest.behind(tiles * rows)
        to = to.behind(tiles * rows)
        target = target.at(tiles * rows)


@always_inline
def _run_length[
    dtype: DType, //
](
    activation: ActivationTile[dtype], first: Int, limit: Int, spread: Int
) -> Int:
    """Chunks whose activations lie side by side.

    Parameters:
        dtype: Of the elements.

    Args:
        activation: The activations.
        first: The first of the chunks.
        limit: How many to look at.
        spread: Elements of memory of each activation.
    """
    var chunk = spread * CHUNK_WORDS * interleaved_products(dtype)
    var expected = Int(activation.offsets[unsafe_offset=first])
    for run in range(1, limit):
        expected += chunk
        if Int(activation.offsets[unsafe_offset=first + run]) != expected:
            return run
    return limit


@always_inline
def _add_words[
    U: VectorUnit,
    dtype: DType,
    rows: Int,
    vectors: Int,
    *,
    begin: Int,
    end: Int,
](
    mut acc: Array[SIMD[sum_type(dtype), U.lanes], rows * vectors],
    pixels: Reads[dtype],
    row_stride: Int,
    weights: Reads[DType.uint32],
    panel_stride: Int,
    words: Int,
):
    """Adds the products of words that lie side by side to the sums of the pixels
    from `begin` to `end`."""
    comptime spread = U.spread(dtype)
    comptime word_elements = interleaved_products(dtype)
    comptime Words = SIMD[DType.uint32, U.lanes]
    for word in range(words):
        comptime for part in range(spread):
            var step = spread * word + part
            var b = Array[Words, vectors](fill=Words(0))
            comptime for v in range(vectors):
                comptime panel = v * U.lanes // PANEL
                comptime lane = v * U.lanes % PANEL
                b[v] = weights.unsafe_load[width=U.lanes](
                    panel * panel_stride + step * PANEL + lane
                )
            comptime for i in range(begin, end):
                comptime near = i % NEAR_ROWS if vectors == 1 else 0
                var word = pixels.unsafe_offset(
                    (i - near) * row_stride + word_elements * step
                ).unsafe_bitcast[UInt32]()
                comptime if vectors == 1:
                    acc[i] = U.add_word[dtype, near](
                        acc[i], word, row_stride * size_of[dtype](), b[0]
                    )
                else:
                    var a = Words(word.unsafe_load[alignment=1]())
                    comptime for v in range(vectors):
                        acc[i * vectors + v] = U.add[dtype](
                            acc[i * vectors + v], a, b[v]
                        )


@fieldwise_init
struct Runs(ImplicitlyCopyable, Movable):
    """The chunks of a slice, run by run: of a filter row, and of a tap where some
    lie beside the image."""

    var chunk: Int
    """The first that is left."""
    var end: Int
    """Behind the last."""
    var at: Int
    """Of the filter row, the first that is left."""
    var inside: UInt64
    """A bit for each filter row that is left, see `Edges.inside`."""

    @always_inline
    def next(
        self, activation: ActivationTile, taps: TapEdges
    ) -> Tuple[Int, Int]:
        """The next run.

        Args:
            activation: The activations.
            taps: Those beside the image.

        Returns:
            Its length at most, and what it is: see `TapEdges.side`.
        """
        ref edges = activation.edges
        var count = min(activation.row_chunks - self.at, self.end - self.chunk)
        if self.inside & 1 == 0:
            return (count, OUTSIDE)
        if taps.all_inside:
            return (count, INSIDE)
        var tap = self.at // edges.tap_chunks
        return (
            min(count, (tap + 1) * edges.tap_chunks - self.at),
            taps.side(tap),
        )

    @always_inline
    def words(self, activation: ActivationTile, count: Int) -> Int:
        """Words of the next chunks that hold products.

        Args:
            activation: The activations.
            count: How many chunks, of a filter row.
        """
        var skipped = 0
        if self.at + count == activation.row_chunks:
            skipped = CHUNK_WORDS - activation.last_words
        return count * CHUNK_WORDS - skipped

    @always_inline
    def skip(mut self, activation: ActivationTile, count: Int):
        """Goes behind the next chunks.

        Args:
            activation: The activations.
            count: How many, of a filter row.
        """
        self.chunk += count
        self.at += count
        if self.at == activation.row_chunks:
            self.at = 0
            self.inside >>= 1


@always_inline
def _padding_sums[
    U: VectorUnit, dtype: DType, vectors: Int
](
    activation: ActivationTile[dtype],
    filter: FilterTile[dtype],
    slice: Runs,
    taps: TapEdges,
) -> Array[SIMD[sum_type(dtype), U.lanes], vectors]:
    """The sums of a slice's products with padding alone, which all pixels of a
    tile share."""
    comptime Register = SIMD[sum_type(dtype), U.lanes]
    # Two of each, as a sum waits for the one before.
    var acc = Array[Register, 2 * vectors](fill=0)
    var padding = SIMD[DType.uint32, U.lanes](activation.edges.padding)
    var weights = filter.elements.unsafe_bitcast[UInt32]()
    var panel_stride = filter.panel_stride // interleaved_products(dtype)
    var runs = slice
    while runs.chunk < runs.end:
        var count, side = runs.next(activation, taps)
        if side == OUTSIDE:
            # Behind the last words lie zeros.
            for word in range(0, count * CHUNK_WORDS, 2):
                comptime for at in range(2 * vectors):
                    comptime panel = at // 2 * U.lanes // PANEL
                    comptime lane = at // 2 * U.lanes % PANEL
                    var words = weights.unsafe_load[width=U.lanes](
                        panel * panel_stride + (word + at % 2) * PANEL + lane
                    )
                    acc[at] = U.add[dtype](acc[at], padding, words)
        weights = weights.unsafe_offset(count * CHUNK_WORDS * PANEL)
        runs.skip(activation, count)
    var sums = Array[Register, vectors](fill=0)
    comptime for v in range(vectors):
        sums[v] = acc[2 * v] + acc[2 * v + 1]
    return sums^


@no_inline
def _multiply_tiles[
    U: VectorUnit, dtype: DType, rows: Int, vectors: Int
](
    activation: ActivationTile[dtype],
    filter: FilterTile[dtype],
    sums: Sums,
    output: TileOutput[dtype],
    slice: Slice,
    tiles: Int,
):
    """Multiplies so many times `rows` pixels of a line by `vectors` registers of
    filters, both as wide as `spread` says. The first slice begins the sums."""
    comptime sums_type = sum_type(dtype)
    comptime spread = U.spread(dtype)
    comptime chunk_words = spread * CHUNK_WORDS * PANEL
    # Fewer pixels gain little by leaving one out.
    comptime has_edges = 2 * rows >= U.rows and not U.flips(dtype)
    var to = sums.elements.unsafe_bitcast[Scalar[sums_type]]()
    var elements = activation.elements
    var weights_of_slice = filter.elements.unsafe_bitcast[UInt32]()
    var row_stride = activation.row_stride
    var panel_stride = filter.panel_stride // interleaved_products(dtype)
    var first_row, chunks_before = divmod(slice.first, activation.row_chunks)
    ref edges = activation.edges
    var runs_of_slice = Runs(
        slice.first,
        slice.first + slice.count,
        chunks_before,
        edges.inside(0) >> UInt64(first_row),
    )
    var leaves_out_rows = edges.leaves_out_rows(
        runs_of_slice.inside,
        ceildiv(chunks_before + slice.count, activation.row_chunks),
    )
    for tile in range(tiles):
        comptime if U.stores_outputs(dtype):
            if output.filters > 0:
                output.output.prefetch[rows, 1](tile * rows)
        var acc = Array[SIMD[sums_type, U.lanes], rows * vectors](fill=0)
        if slice.first > 0:
            comptime for i in range(rows):
                comptime for v in range(vectors):
                    acc[i * vectors + v] = to.unsafe_load[width=U.lanes](
                        i * sums.stride + v * U.lanes
                    )
        var taps = edges.of_taps(tile * rows, rows)
        comptime if dtype.is_integral() and spread == 1:
            if edges.padding != 0 and (leaves_out_rows or taps.any_outside):
                var shared = _padding_sums[U, dtype, vectors](
                    activation, filter, runs_of_slice, taps
                )
                comptime for i in range(rows):
                    comptime for v in range(vectors):
                        acc[i * vectors + v] += shared[v]
        var weights = weights_of_slice
        var runs = runs_of_slice
        while runs.chunk < runs.end:
            var run, side = runs.next(activation, taps)
            if side != OUTSIDE:
                run = _run_length(activation, runs.chunk, run, spread)
                var words = runs.words(activation, run)
                var pixels = elements.unsafe_offset(
                    Int(activation.offsets[unsafe_offset=runs.chunk])
                )
                if not has_edges or edges.padding != 0:
                    side = INSIDE
                comptime for known in range(OUTSIDE if has_edges else 1):
                    comptime begin = 1 if known == FIRST_OUTSIDE else 0
                    comptime last = rows - (1 if known == LAST_OUTSIDE else 0)
                    if side == known:
                        _add_words[
                            U, dtype, rows, vectors, begin=begin, end=last
                        ](acc, pixels, row_stride, weights, panel_stride, words)
            weights = weights.unsafe_offset(run * chunk_words)
            runs.skip(activation, run)
        elements = elements.unsafe_offset(rows * row_stride)
        var here = to
        to = to.unsafe_offset(rows * sums.stride)
        comptime if U.stores_outputs(dtype):
            if output.filters > 0:
                store_outputs[U, dtype, rows, vectors](
                    acc, output.at(tile * rows)
                )
                continue
        comptime for i in range(rows):
            comptime for v in range(vectors):
                here.unsafe_store(
                    i * sums.stride + v * U.lanes, acc[i * vectors + v]
                )
