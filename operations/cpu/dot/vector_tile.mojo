"""The register tile of units whose lanes each add up the products of a word: the
words of several pixels, one at a time, by vectors of filters."""

from std.collections import Array, Optional
from std.math import ceildiv
from std.sys.info import size_of
from std.sys.intrinsics import PrefetchOptions, prefetch

from ...conv.epilogue import clamped
from ...conv.fields import PANEL, ROW_BYTES
from ...conv.memory import Reads, Writes, sum_type
from ...conv.panels import interleaved_products
from ..near_rows import NEAR_ROWS
from ..output import PlainOutput
from ..rounding import rounded
from ..unit import ONES, opaque
from .mma import (
    CHUNK_WORDS,
    WORD,
    ActivationTile,
    DotUnit,
    FilterTile,
    OutputLines,
    Sums,
)


comptime L1_SLICE_BYTES = 16 * 1024
"""Packed filter that stays in L1 while all pixels of a tile are multiplied by it."""

comptime L2_SLICE_BYTES = 64 * 1024
"""Packed filter that stays in L2. A register tile of AVX-512 reads no more than 9
bytes of it a cycle, which L2 brings in time."""

comptime SUMS_BYTES = 6 * 1024
"""Of the sums that are stored together."""


@always_inline
def near_word[row: Int](pixel: Reads[DType.uint32], row_bytes: Int) -> UInt32:
    """A word of a pixel near another one.

    Parameters:
        row: Which, 0 for that one.

    Args:
        pixel: The word of that one.
        row_bytes: Between two pixels.
    """
    return (
        pixel.unsafe_bitcast[UInt8]()
        .unsafe_offset(row * row_bytes)
        .unsafe_bitcast[UInt32]()
        .unsafe_load[alignment=1]()
    )


def tiles_together(rows: Int, panels: Int) -> Int:
    """Register tiles whose sums stay in L1 until they are stored.

    Args:
        rows: Pixels of a register tile.
        panels: Its panels.
    """
    return max(
        1, SUMS_BYTES // (rows * panels * PANEL * size_of[DType.float32]())
    )


@fieldwise_init
struct Slice(ImplicitlyCopyable, Movable):
    """Chunks of products that follow each other."""

    var first: Int
    var count: Int


trait VectorUnit(DotUnit):
    """Dot products in vector registers."""

    comptime lanes: Int
    """Of a register, each of which holds the sum of a filter."""
    comptime slice_bytes: Int
    """Packed filter, as wide as it is multiplied, by which all pixels of a tile
    are multiplied before the next: their sums go to memory in between."""

    @staticmethod
    def add[
        dtype: DType
    ](
        sums: SIMD[sum_type(dtype), Self.lanes],
        pixel: SIMD[DType.uint32, Self.lanes],
        filters: SIMD[DType.uint32, Self.lanes],
    ) -> SIMD[sum_type(dtype), Self.lanes]:
        """Adds the products of a word of each filter.

        Parameters:
            dtype: Of the operands.

        Args:
            sums: What to add to.
            pixel: A word of a pixel in each lane, as wide as `spread` says.
            filters: Those of the filters, the same.
        """
        ...

    @always_inline
    @staticmethod
    def add_word[
        dtype: DType, row: Int
    ](
        sums: SIMD[sum_type(dtype), Self.lanes],
        pixel: Reads[DType.uint32],
        row_bytes: Int,
        filters: SIMD[DType.uint32, Self.lanes],
    ) -> SIMD[sum_type(dtype), Self.lanes]:
        """`add`, of a word of a pixel in memory, for a single register of filters.

        Parameters:
            dtype: Of the operands.
            row: Which pixel, 0 to `NEAR_ROWS - 1`.

        Args:
            sums: What to add to.
            pixel: The word of the first pixel, as wide as `spread` says, at any
                address.
            row_bytes: Between two pixels.
            filters: Those of the filters, the same.
        """
        return Self.add[dtype](
            sums, {near_word[row](pixel, row_bytes)}, filters
        )

    @staticmethod
    def round[
        dtype: DType
    ](
        low: SIMD[DType.float32, Self.lanes],
        high: SIMD[DType.float32, Self.lanes],
    ) -> SIMD[dtype, 2 * Self.lanes]:
        """Neighbouring outputs, rounded.

        Parameters:
            dtype: Theirs, for which `stores_outputs` is true.

        Args:
            low: The first register's.
            high: The second's.
        """
        return rebind[SIMD[dtype, 2 * Self.lanes]](
            rounded[dtype](low.join(high))
        )

    @staticmethod
    def widen[dtype: DType](panel: Reads[dtype], words: Int, to: Writes[dtype]):
        """Makes words of a panel as wide as `spread` says.

        Parameters:
            dtype: Of the operands.

        Args:
            panel: The words, `[words][PANEL][WORD]`.
            words: How many of each filter.
            to: Where to.
        """
        ...

    @staticmethod
    def tile_rows(rows: Int) -> Int:
        """An even number, or half a tile, made odd, in front of what is odd. No
        others are instantiated."""
        comptime odd = Self.rows // 2 | 1
        if rows % 2 == 1 and rows >= odd:
            return odd
        return min(Self.rows, rows // 2 * 2) if rows > 1 else 1

    @staticmethod
    def begin() -> Int:
        return 0

    @staticmethod
    def end():
        pass

    @staticmethod
    def multiply_registers[
        dtype: DType
    ](chunks: Int, sums: Writes[DType.float32]):
        _multiply_registers[Self, dtype](chunks, sums)


def slices_of[U: VectorUnit](dtype: DType, chunks: Int, panels: Int) -> Int:
    """Slices that the products of a tile are cut into.

    Parameters:
        U: The instructions.

    Args:
        dtype: Of the operands.
        chunks: Of the products.
        panels: Of the tile.
    """
    var most = U.slice_bytes // (ROW_BYTES * PANEL * U.spread(dtype) * panels)
    return ceildiv(chunks, most)


def multiply_panels[
    U: VectorUnit, dtype: DType
](
    activation: ActivationTile[dtype],
    filter: FilterTile[dtype],
    sums: Sums,
    outputs: Optional[OutputLines[dtype]],
):
    """Multiplies all pixels of a tile by panels, slice by slice of the products:
    each slice of the filter stays in a cache for all pixels.

    Parameters:
        U: The instructions.
        dtype: Of the operands.

    Args:
        activation: The activations, as wide as `U.spread` says.
        filter: The panels, as wide unless `wide` says where to make them so.
        sums: Where the sums go, whole panels of each pixel; with outputs, those
            of a slice that is not the last one.
        outputs: Where outputs go, if `U` stores them.
    """
    comptime spread = U.spread(dtype)
    comptime chunk = CHUNK_WORDS * WORD * PANEL // size_of[dtype]()
    var slices = slices_of[U](dtype, activation.chunks, filter.panels)
    var length = ceildiv(activation.chunks, slices)
    for first in range(0, activation.chunks, length):
        var count = min(length, activation.chunks - first)
        var here = filter
        here.elements = filter.elements.unsafe_offset(first * spread * chunk)
        comptime if spread > 1:
            if filter.wide:
                var wide = filter.wide.value()
                here.elements = wide.as_imm()
                here.panel_stride = count * spread * chunk
                for panel in range(filter.panels):
                    U.widen(
                        filter.elements.unsafe_offset(
                            panel * filter.panel_stride + first * chunk
                        ),
                        count * CHUNK_WORDS,
                        wide.unsafe_offset(panel * here.panel_stride),
                    )
        var is_last = first + count == activation.chunks
        for line in range(activation.lines):
            var output = Optional[PlainOutput[dtype]](None)
            if is_last and outputs:
                output = outputs.value().line(line)
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
    output: Optional[PlainOutput[dtype]],
    slice: Slice,
):
    """Adds the products of a slice to the sums of a line, register tile by
    register tile."""
    var rest = activation
    var to = sums
    var target = output
    while rest.rows > 0:
        var rows = U.tile_rows(rest.rows)
        var tiles = rest.rows // rows if rows == U.rows else 1
        comptime for panels in range(1, U.panels + 1):
            comptime for known in range(1, U.rows + 1):
                comptime if U.tile_rows(known) == known:
                    if rows == known and filter.panels == panels:
                        _multiply_tiles[U, dtype, known, panels](
                            rest, filter, to, target, slice, tiles
                        )
        rest = rest.behind(tiles * rows)
        rest.edges.left = 0
        to = to.behind(tiles * rows)
        if target:
            target = target.value().at(tiles * rows)


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
    panels: Int,
    *,
    begin: Int,
    end: Int,
](
    mut acc: Array[
        SIMD[sum_type(dtype), U.lanes], rows * (panels * PANEL // U.lanes)
    ],
    pixels: Reads[dtype],
    row_stride: Int,
    weights: Reads[DType.uint32],
    panel_stride: Int,
    words: Int,
):
    """Adds the products of words that lie side by side to the sums of the pixels
    from `begin` to `end`."""
    comptime vectors = panels * PANEL // U.lanes
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


@always_inline
def _prefetch_outputs[dtype: DType, rows: Int](output: PlainOutput[dtype]):
    """Asks for the memory that outputs go to, a cache line of each pixel, while
    they are being computed: the hardware does not guess where pixels lie."""
    comptime to_write = PrefetchOptions().for_write().high_locality()
    comptime for i in range(rows):
        prefetch[params=to_write](
            output.elements.unsafe_offset(i * output.filters)
        )


@always_inline
def _store_outputs[
    U: VectorUnit, dtype: DType, rows: Int, panels: Int
](
    acc: Array[
        SIMD[sum_type(dtype), U.lanes], rows * (panels * PANEL // U.lanes)
    ],
    output: PlainOutput[dtype],
):
    """Stores outputs of the sums of a register tile."""
    if output.has_bias:
        _store_limited[U, dtype, rows, panels, True](acc, output)
    else:
        _store_limited[U, dtype, rows, panels, False](acc, output)


@always_inline
def _store_limited[
    U: VectorUnit, dtype: DType, rows: Int, panels: Int, has_bias: Bool
](
    acc: Array[
        SIMD[sum_type(dtype), U.lanes], rows * (panels * PANEL // U.lanes)
    ],
    output: PlainOutput[dtype],
):
    """Stores them behind bias and limits, if there are any."""
    comptime vectors = panels * PANEL // U.lanes
    comptime Floats = SIMD[DType.float32, U.lanes]
    comptime for v in range(0, vectors, 2):
        comptime both = min(2, vectors - v)
        var bias = Array[Floats, both](fill=0)
        comptime if has_bias:
            comptime for k in range(both):
                bias[k] = output.bias.unsafe_load[width=U.lanes](
                    (v + k) * U.lanes
                ).cast[DType.float32]()
        comptime for i in range(rows):
            var values = Array[Floats, 2](fill=0)
            comptime for k in range(both):
                values[k] = rebind[Floats](acc[i * vectors + v + k])
                comptime if has_bias:
                    values[k] = clamped(
                        values[k] + bias[k],
                        output.limits.low,
                        output.limits.high,
                    )
            var rounded = U.round[dtype](values[0], values[1])
            output.elements.unsafe_store[alignment=1](
                i * output.filters + v * U.lanes,
                rounded.slice[both * U.lanes](),
            )


@no_inline
def _multiply_tiles[
    U: VectorUnit, dtype: DType, rows: Int, panels: Int
](
    activation: ActivationTile[dtype],
    filter: FilterTile[dtype],
    sums: Sums,
    output: Optional[PlainOutput[dtype]],
    slice: Slice,
    tiles: Int,
):
    """Multiplies so many times `rows` pixels of a line by `panels` panels, both
    as wide as `spread` says. The first slice begins the sums."""
    comptime sums_type = sum_type(dtype)
    comptime vectors = panels * PANEL // U.lanes
    comptime spread = U.spread(dtype)
    comptime chunk_words = spread * CHUNK_WORDS * PANEL
    # Fewer pixels gain little by leaving one out.
    comptime has_edges = 2 * rows >= U.rows and not U.flips(dtype)
    var to = sums.elements.unsafe_bitcast[Scalar[sums_type]]()
    var elements = activation.elements
    var weights_of_slice = filter.elements.unsafe_bitcast[UInt32]()
    var row_stride = activation.row_stride
    var panel_stride = filter.panel_stride // interleaved_products(dtype)
    var end = slice.first + slice.count
    var first_row, chunks_before = divmod(slice.first, activation.row_chunks)
    ref edges = activation.edges
    var inside_of_slice = edges.inside(0) >> UInt64(first_row)
    for tile in range(tiles):
        comptime if U.stores_outputs(dtype):
            if output:
                _prefetch_outputs[dtype, rows](output.value().at(tile * rows))
        var acc = Array[SIMD[sums_type, U.lanes], rows * vectors](fill=0)
        if slice.first > 0:
            comptime for i in range(rows):
                comptime for v in range(vectors):
                    acc[i * vectors + v] = to.unsafe_load[width=U.lanes](
                        i * sums.stride + v * U.lanes
                    )
        var left = edges.left if tile == 0 else 0
        var is_last = (tile + 1) * rows == activation.rows
        var right = edges.right if is_last else Int.MAX
        var weights = weights_of_slice
        var inside = inside_of_slice
        var at = chunks_before
        var j = slice.first
        while j < end:
            var rest = min(activation.row_chunks - at, end - j)
            var run = rest
            if inside & 1 != 0:
                # Which pixel the run is padding for: none, first or last.
                var padded = 0
                comptime if has_edges:
                    if edges.tap_chunks > 0:
                        var tap = at // edges.tap_chunks
                        run = min(run, (tap + 1) * edges.tap_chunks - at)
                        padded = 1 if tap < left else 2 if tap >= right else 0
                run = _run_length(activation, j, run, spread)
                var words = run * CHUNK_WORDS
                if at + run == activation.row_chunks:
                    words -= CHUNK_WORDS - activation.last_words
                var pixels = elements.unsafe_offset(
                    Int(activation.offsets[unsafe_offset=j])
                )
                comptime for side in range(3 if has_edges else 1):
                    comptime begin = 1 if side == 1 else 0
                    comptime last = rows - 1 if side == 2 else rows
                    if padded == side:
                        _add_words[
                            U, dtype, rows, panels, begin=begin, end=last
                        ](acc, pixels, row_stride, weights, panel_stride, words)
            weights = weights.unsafe_offset(run * chunk_words)
            j += run
            at += run
            if at == activation.row_chunks:
                at = 0
                inside >>= 1
        elements = elements.unsafe_offset(rows * row_stride)
        var here = to
        to = to.unsafe_offset(rows * sums.stride)
        comptime if U.stores_outputs(dtype):
            if output:
                _store_outputs[U, dtype, rows, panels](
                    acc, output.value().at(tile * rows)
                )
                continue
        comptime for i in range(rows):
            comptime for v in range(vectors):
                here.unsafe_store(
                    i * sums.stride + v * U.lanes, acc[i * vectors + v]
                )


@no_inline
def _multiply_registers[
    U: VectorUnit, dtype: DType
](chunks: Int, sums: Writes[DType.float32]):
    """`_multiply_tile` of operands that stay in registers."""
    comptime sums_type = sum_type(dtype)
    comptime vectors = U.panels * PANEL // U.lanes
    comptime registers = U.rows * vectors
    comptime Words = SIMD[DType.uint32, U.lanes]
    var acc = Array[SIMD[sums_type, U.lanes], registers](fill=0)
    var a = Words(ONES)
    var b = Array[Words, vectors](fill=Words(0))
    comptime for v in range(vectors):
        a = opaque(a)
        b[v] = a
    for _ in range(U.spread(dtype) * chunks * CHUNK_WORDS):
        comptime for at in range(registers):
            a = opaque(a)
            acc[at] = U.add[dtype](acc[at], a, b[at % vectors])
    var to = sums.unsafe_bitcast[Scalar[sums_type]]()
    comptime for at in range(registers):
        to.unsafe_store(at * U.lanes, acc[at])
