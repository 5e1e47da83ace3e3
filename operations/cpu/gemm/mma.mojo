"""The register tile: pixels by vectors of filters, one product deep a step.

The multiplication of both GEMM kernels, and the only loop in which their time
goes. Each step broadcasts `rows` activations against `vectors` of filters;
the accumulators never leave registers. (The outer-product form of Goto and van
de Geijn, "Anatomy of High-Performance Matrix Multiplication", ACM TOMS 2008.)
"""

from std.math import ceildiv, iota
from std.sys._assembly import inlined_assembly
from std.sys.info import CompilationTarget, size_of
from std.sys.intrinsics import PrefetchOptions, masked_store, prefetch

from ...conv.fields import PANEL
from ...conv.memory import CACHE_LINE, Reads, Writes
from ...conv.panels import chunk_products, interleaved_products
from ..config import (
    CPU_TILE,
    HALF_PANEL,
    HAS_HALF_PANELS,
    LANES,
    MOST_TILE_PANELS,
    tile_panels,
)
from ..near_rows import NEAR_ROWS, near_address
from ..panel import load_filters, load_pairs, widened
from ..register_output import REGISTER_FORMS, RegisterOutput
from ..unit import MultiplyUnit, opaque


comptime MIN_RUN = 8
"""Products of the shortest run worth a loop of its own: shorter ones are
gathered into one long run."""

comptime MAX_RUNS = 64
"""Runs that a tile's operand holds."""


@fieldwise_init
struct Run(ImplicitlyCopyable, Movable):
    """Products that lie side by side in memory, for every row of a tile."""

    var activation: Reads[DType.float32]
    """The first product's activation of the tile's first row."""
    var step: Int
    """The first product, counted from the filter panel's first step."""
    var length: Int
    """How many products."""


@fieldwise_init
struct TileOperand(Movable):
    """The activations of a register tile: runs of products, in which row i
    lies `i * row_stride` elements behind row 0."""

    var runs: Array[Run, MAX_RUNS]
    var count: Int
    var row_stride: Int
    var group_stride: Int
    """Elements between the activations of two groups."""

    @always_inline
    def clear(mut self, row_stride: Int, group_stride: Int = 0):
        """Leaves no runs.

        Args:
            row_stride: Elements between two rows.
            group_stride: Elements between two groups, of which there may be one.
        """
        self.count = 0
        self.row_stride = row_stride
        self.group_stride = group_stride

    @always_inline
    def append(mut self, run: Run):
        """Adds a run.

        Args:
            run: The run; at most `MAX_RUNS` fit.
        """
        self.runs[self.count] = run
        self.count += 1


@fieldwise_init
struct FilterOperand[dtype: DType](ImplicitlyCopyable, Movable):
    """The filter panels of a register tile, and what is multiplied after them.
    """

    var panels: Reads[Self.dtype]
    """The first panel's steps of `PANEL` values."""
    var panel_stride: Int
    """Elements between two panels."""
    var ahead: Reads[Self.dtype]
    """What to fetch meanwhile: the first panel's next line."""
    var interval: Int
    """Products that are multiplied for each of a panel's lines that is fetched;
    0 if none is."""


@fieldwise_init
struct StoredRows(ImplicitlyCopyable, Movable):
    """The outputs that a register tile stores itself."""

    var output: RegisterOutput[DType.float32]
    """Of the first row and filter."""
    var rows: Int
    """How many rows; 0: it stores none, and its sums go to memory."""
    var filters: Int
    """Of the tile: the last of its panels may have fewer than the others."""

    @staticmethod
    def none() -> Self:
        """No outputs."""
        return Self(RegisterOutput[DType.float32].nowhere(), 0, 0)

    @always_inline
    def at(self, row: Int) -> Self:
        """Those of a later tile.

        Args:
            row: How many rows lie in front.
        """
        return Self(self.output.at(row), self.rows, self.filters)


comptime UNROLLED = 4
"""Products of an iteration."""

comptime Vector = SIMD[DType.float32, LANES]

comptime _HAS_AVX512 = CompilationTarget.has_avx512f() and LANES == PANEL
"""Whether a panel is a register of AVX-512."""


@always_inline
def _multiply_add(a: Vector, b: Vector, sum: Vector) -> Vector:
    """`a * b + sum`. With AVX-512 the compiler keeps these in the order that the
    code has: free to load what later steps broadcast, it spills sums of the 31
    registers that a tile takes."""
    comptime if _HAS_AVX512:
        return inlined_assembly[
            "vfmadd231ps $2, $1, $0",
            Vector,
            constraints="=v,v,v,0",
            has_side_effect=True,
        ](a, b, sum)
    else:
        return a.fma(b, sum)


@always_inline
def _multiply_add_word[
    row: Int
](
    first: Reads[DType.float32], row_stride: Int, filters: Vector, sum: Vector
) -> Vector:
    """Adds the products of a number and filters. As an operand of the instruction
    the number is broadcast for nothing, where a load that does takes longer than
    the multiplication.

    Parameters:
        row: The number's, 0 to `NEAR_ROWS - 1`.

    Args:
        first: The number of row 0.
        row_stride: Elements between two rows.
        filters: The filters.
        sum: What to add to.
    """
    return inlined_assembly[
        "vfmadd231ps " + near_address[row]() + "{1to16}, $1, $0",
        Vector,
        constraints="=v,v,r,0,r,~{memory}",
    ](filters, first, sum, row_stride * size_of[DType.float32]())


@always_inline
def _step[
    filter_type: DType, rows: Int, vectors: Int
](
    activation: Reads[DType.float32],
    row_stride: Int,
    filter: FilterOperand[filter_type],
    step: Int,
    mut acc: Array[Vector, rows * vectors],
):
    """Adds one product of each output."""
    comptime in_panel = PANEL // LANES
    var b = Array[Vector, vectors](fill=Vector(0))
    comptime for j in range(vectors):
        b[j] = load_filters[filter_type, LANES](
            filter.panels.unsafe_offset(j // in_panel * filter.panel_stride),
            step,
            j % in_panel * LANES,
        )
    comptime for i in range(rows):
        comptime if vectors == 1 and _HAS_AVX512:
            comptime near = i % NEAR_ROWS
            acc[i] = _multiply_add_word[near](
                activation.unsafe_offset((i - near) * row_stride),
                row_stride,
                b[0],
                acc[i],
            )
        else:
            var a = Vector(activation.unsafe_load(i * row_stride))
            comptime for j in range(vectors):
                acc[i * vectors + j] = _multiply_add(
                    a, b[j], acc[i * vectors + j]
                )


@always_inline
def _steps[
    filter_type: DType, rows: Int, vectors: Int
](
    activation: Reads[DType.float32],
    row_stride: Int,
    filter: FilterOperand[filter_type],
    step: Int,
    mut acc: Array[Vector, rows * vectors],
):
    """Adds `UNROLLED` products of each output; `step` is a multiple of those
    that lie side by side."""
    comptime in_panel = PANEL // LANES
    comptime interleaved = interleaved_products(filter_type)
    comptime if interleaved == 1:
        comptime for u in range(UNROLLED):
            _step[filter_type, rows, vectors](
                activation.unsafe_offset(u), row_stride, filter, step + u, acc
            )
        return
    comptime for u in range(0, UNROLLED, interleaved):
        var pairs = Array[SIMD[DType.uint32, LANES], vectors](fill=0)
        comptime for j in range(vectors):
            pairs[j] = load_pairs[filter_type, LANES](
                filter.panels.unsafe_offset(
                    j // in_panel * filter.panel_stride
                ),
                (step + u) // interleaved,
                j % in_panel * LANES,
            )
        comptime for place in range(interleaved):
            var b = Array[Vector, vectors](fill=Vector(0))
            comptime for j in range(vectors):
                b[j] = widened[filter_type](pairs[j] >> UInt32(16 * place))
            comptime for i in range(rows):
                var a = Vector(
                    activation.unsafe_load(i * row_stride + u + place)
                )
                comptime for j in range(vectors):
                    acc[i * vectors + j] = _multiply_add(
                        a, b[j], acc[i * vectors + j]
                    )


@no_inline
def multiply_tile[
    filter_type: DType, rows: Int, vectors: Int, fetches: Bool
](
    operand: TileOperand,
    channel: Int,
    filter: FilterOperand[filter_type],
    accumulators: Writes[DType.float32],
    accumulators_stride: Int,
    accumulate: Bool,
    stored: StoredRows,
    tiles: Int,
):
    """Multiplies a tile, or some that follow each other.

    Parameters:
        filter_type: The packed filter's type.
        rows: Output pixels.
        vectors: Registers of filters: whole panels, or half a one.
        fetches: Whether to fetch what lies ahead.

    Args:
        operand: The activations.
        channel: Elements by which they lie further on.
        filter: The filter panels.
        accumulators: The tile in memory.
        accumulators_stride: Elements between two of its rows.
        accumulate: Whether to add to the tile instead of overwriting it.
        stored: The outputs that are stored instead of the tile.
        tiles: How many; more than one are stored.
    """
    for tile in range(tiles):
        if tile + 1 < tiles:
            stored.output.prefetch[rows, vectors * LANES]((tile + 1) * rows)
        _multiply_one[filter_type, rows, vectors, fetches](
            operand,
            channel + tile * rows * operand.row_stride,
            filter,
            accumulators,
            accumulators_stride,
            accumulate,
            stored.at(tile * rows),
        )


@always_inline
def _multiply_one[
    filter_type: DType, rows: Int, vectors: Int, fetches: Bool
](
    operand: TileOperand,
    channel: Int,
    filter: FilterOperand[filter_type],
    accumulators: Writes[DType.float32],
    accumulators_stride: Int,
    accumulate: Bool,
    stored: StoredRows,
):
    """Multiplies a tile."""
    comptime panels = ceildiv(vectors * LANES, PANEL)
    comptime interleaved = interleaved_products(filter_type)

    var acc = Array[Vector, rows * vectors](fill=Vector(0))
    if accumulate:
        comptime for i in range(rows):
            comptime for j in range(vectors):
                acc[i * vectors + j] = accumulators.unsafe_load[width=LANES](
                    i * accumulators_stride + j * LANES
                )
    var row_stride = operand.row_stride
    comptime to_l2 = PrefetchOptions().for_read().medium_locality()
    comptime line = CACHE_LINE // size_of[filter_type]()
    var next = filter.ahead
    for index in range(operand.count):
        var run = operand.runs[index]
        var activation = run.activation.unsafe_offset(channel)
        var begin = 0
        while begin < run.length:
            var end = run.length
            comptime if fetches:
                end = min(end, begin + filter.interval)
                comptime for p in range(panels):
                    prefetch[params=to_l2](
                        next.unsafe_offset(p * filter.panel_stride)
                    )
                next = next.unsafe_offset(line)
            var k = begin
            comptime if interleaved > 1:
                while k < end and (run.step + k) % interleaved != 0:
                    _step[filter_type, rows, vectors](
                        activation.unsafe_offset(k),
                        row_stride,
                        filter,
                        run.step + k,
                        acc,
                    )
                    k += 1
            while k + UNROLLED <= end:
                _steps[filter_type, rows, vectors](
                    activation.unsafe_offset(k),
                    row_stride,
                    filter,
                    run.step + k,
                    acc,
                )
                k += UNROLLED
            while k < end:
                _step[filter_type, rows, vectors](
                    activation.unsafe_offset(k),
                    row_stride,
                    filter,
                    run.step + k,
                    acc,
                )
                k += 1
            begin = end
    if stored.rows > 0:
        comptime for i in range(len(REGISTER_FORMS)):
            comptime form = REGISTER_FORMS[i]
            if stored.output.form == form:
                if stored.filters == vectors * LANES:
                    _store_outputs[rows, vectors, form, False](acc, stored)
                else:
                    _store_outputs[rows, vectors, form, True](acc, stored)
        return
    comptime for i in range(rows):
        comptime for j in range(vectors):
            accumulators.unsafe_store(
                i * accumulators_stride + j * LANES, acc[i * vectors + j]
            )


@always_inline
def _store_outputs[
    rows: Int, vectors: Int, form: Int, partial: Bool
](acc: Array[Vector, rows * vectors], stored: StoredRows):
    """Stores the outputs of a tile's sums, behind an epilogue of a form. With
    `partial` the last panel has lanes that are no filters."""
    comptime whole = (vectors * LANES - 1) // PANEL * PANEL
    ref output = stored.output
    comptime for j in range(vectors):
        comptime cut = partial and j * LANES >= whole
        var mask = iota[DType.int32, LANES]().lt(
            Int32(stored.filters - j * LANES)
        )
        var bias = output.load_bias[form, LANES, cut](j * LANES, mask)
        comptime for i in range(rows):
            # A tile of an odd number of rows has one row too many.
            if i + 1 < rows or stored.rows == rows:
                var at = i * output.filters + j * LANES
                var value = output.finished[form, LANES, cut](
                    acc[i * vectors + j], 1, bias, at, mask
                )
                comptime if cut:
                    masked_store(value, output.elements.unsafe_offset(at), mask)
                else:
                    output.elements.unsafe_store[alignment=1](at, value)


@always_inline
def tile_rows(rows: Int) -> Int:
    """The register tile that serves `rows` output pixels: the next even count,
    or 1, as odd ones are not instantiated.

    Args:
        rows: Output pixels, from 1 to `CPU_TILE.rows`.

    Returns:
        Rows of the tile, at least `rows`.
    """
    return 1 if rows == 1 else (rows + 1) // 2 * 2


def _is_largest(rows: Int, panels: Int) -> Bool:
    """Whether no register tile of as many panels has more rows, and none of as
    many rows more panels: such tiles fetch what lies ahead."""
    return tile_panels(rows) == panels and (
        rows == CPU_TILE.rows or tile_panels(rows + 2) < panels
    )


@always_inline
def _multiply_half[
    filter_type: DType
](
    operand: TileOperand,
    channel: Int,
    filter: FilterOperand[filter_type],
    accumulators: Writes[DType.float32],
    accumulators_stride: Int,
    accumulate: Bool,
    stored: StoredRows,
    tiles: Int,
):
    """Multiplies tiles of `CPU_TILE.rows` by half a panel: two at a time, where
    there are, as one has too few sums to hide the latency of an addition."""
    comptime rows = CPU_TILE.rows
    comptime vectors = HALF_PANEL // LANES
    var pairs = tiles // 2
    if pairs > 0:
        multiply_tile[filter_type, 2 * rows, vectors, False](
            operand,
            channel,
            filter,
            accumulators,
            accumulators_stride,
            accumulate,
            StoredRows(stored.output, 2 * rows, stored.filters),
            pairs,
        )
    if tiles % 2 == 1:
        var done = 2 * pairs * rows
        multiply_tile[filter_type, rows, vectors, False](
            operand,
            channel + done * operand.row_stride,
            filter,
            accumulators,
            accumulators_stride,
            accumulate,
            stored.at(done),
            1,
        )


def multiply[
    filter_type: DType
](
    rows: Int,
    filters: Int,
    operand: TileOperand,
    channel: Int,
    filter: FilterOperand[filter_type],
    accumulators: Writes[DType.float32],
    accumulators_stride: Int,
    accumulate: Bool,
    stored: StoredRows,
    tiles: Int = 1,
):
    """Multiplies a tile whose size is known at run time, or some that follow each
    other.

    Parameters:
        filter_type: The packed filter's type.

    Args:
        rows: Output pixels, from 1 to `CPU_TILE.rows`.
        filters: From 1 to `tile_panels(rows)` panels; the sums of others in the
            last one may be written or not.
        operand: The activations, of which `tile_rows(rows)` rows may be read.
        channel: Elements by which they lie further on.
        filter: The filter panels.
        accumulators: The tile in memory, `tile_rows(rows)` rows.
        accumulators_stride: Elements between two of them.
        accumulate: Whether to add to the tile instead of overwriting it.
        stored: The outputs that are stored instead of the tile.
        tiles: How many; more than one are whole, and stored.
    """
    var wanted = tile_rows(rows)
    comptime if HAS_HALF_PANELS:
        if filters <= HALF_PANEL and wanted == CPU_TILE.rows:
            _multiply_half(
                operand,
                channel,
                filter,
                accumulators,
                accumulators_stride,
                accumulate,
                stored,
                tiles,
            )
            return
    var panels = ceildiv(filters, PANEL)
    comptime for p in range(1, MOST_TILE_PANELS + 1):
        comptime vectors = p * PANEL // LANES
        if panels == p:
            comptime for half in range(CPU_TILE.rows // 2 + 1):
                comptime tile = max(1, 2 * half)
                comptime if tile_panels(tile) >= p:
                    comptime if _is_largest(tile, p):
                        if wanted == tile and filter.interval > 0:
                            multiply_tile[filter_type, tile, vectors, True](
                                operand,
                                channel,
                                filter,
                                accumulators,
                                accumulators_stride,
                                accumulate,
                                stored,
                                tiles,
                            )
                            return
                    if wanted == tile:
                        multiply_tile[filter_type, tile, vectors, False](
                            operand,
                            channel,
                            filter,
                            accumulators,
                            accumulators_stride,
                            accumulate,
                            stored,
                            tiles,
                        )
                        return


struct Fma(MultiplyUnit):
    """Multiply-adds of float32, into which these kernels widen other types."""

    comptime rows = CPU_TILE.rows
    comptime panels = CPU_TILE.panels

    @staticmethod
    def instruction(dtype: DType) -> String:
        """See `MultiplyUnit`: of any type the same."""
        comptime bits = LANES * 8 * size_of[DType.float32]()
        return String(t"float32 FMA, {bits} bits")

    @staticmethod
    @no_inline
    def multiply_registers[
        dtype: DType
    ](chunks: Int, sums: Writes[DType.float32]):
        comptime vectors = Self.panels * PANEL // LANES
        var acc = Array[Vector, Self.rows * vectors](fill=0)
        var a = Vector(1)
        var b = Array[Vector, vectors](fill=0)
        comptime for j in range(vectors):
            a = opaque(a)
            b[j] = a
        for _ in range(chunks * chunk_products(dtype)):
            comptime for i in range(Self.rows):
                a = opaque(a)
                comptime for j in range(vectors):
                    comptime at = i * vectors + j
                    acc[at] = a.fma(b[j], acc[at])
        comptime for at in range(Self.rows * vectors):
            sums.unsafe_store(at * LANES, acc[at])
