"""The matrix products of the Winograd kernel, one for each position: floats on the
register tile of the implicit GEMM, integers of 16 bits on that of `widening`."""

from std.math import ceildiv
from std.sys.info import size_of

from ...conv.fields import PANEL
from ...conv.memory import Reads, Writes
from ...conv.panels import chunk_products
from ..config import CPU_TILE
from ..dot.mma import ActivationTile, FilterTile, OutputLines, Sums
from ..dot.widening import Widening
from ..gemm.mma import (
    MAX_RUNS,
    FilterOperand,
    Run,
    StoredRows,
    TileOperand,
    multiply,
)
from ..gemm.scheduler import TileCursor, Tiling
from .scheduler import MAX_INTEGER_PRODUCTS, WinogradPlan
from .transforms import MIN_TAPS, POSITIONS, WORD_CHANNELS

comptime CHUNK_BYTES = size_of[DType.int16]() * chunk_products(DType.int8)
"""Of integers of 16 bits: as far apart as chunks of 8 bits are, made wide."""

comptime MAX_CHUNKS = ceildiv(
    MAX_INTEGER_PRODUCTS, MIN_TAPS**2 * chunk_products(DType.int8)
)
"""Chunks of the deepest sums of a position."""


def _chunks(depth: Int) -> Int:
    """Chunks of integers that a sum takes."""
    return ceildiv(depth, chunk_products(DType.int8))


def multiply_positions[
    transformed: DType
](
    plan: WinogradPlan,
    tiles: Int,
    filters: Int,
    input: Reads[transformed],
    filter: Reads[transformed],
    depth: Int,
    sums: Writes[DType.float32],
    accumulate: Bool,
):
    """Multiplies tiles by panels, for every position: its inputs come from L1
    for all panels but the first.

    Parameters:
        transformed: Of transformed inputs and filters.

    Args:
        plan: The cut.
        tiles: How many.
        filters: How many, of panels of which the last may have fewer than the
            others.
        input: The inputs of the first position, from the product on.
        filter: The filters of the first position.
        depth: Products of a sum.
        sums: Where the first position's go.
        accumulate: Whether to add to what is there, of floats.
    """
    var tiling = Tiling(1, tiles)
    var offsets = Array[Int32, MAX_CHUNKS](uninitialized=True)
    comptime if transformed == DType.int16:
        for i in range(_chunks(depth)):
            offsets[i] = Int32(i * CHUNK_BYTES)
    for position in range(POSITIONS):
        var inputs = input.unsafe_offset(position * plan.input.plane)
        for panel in range(0, ceildiv(filters, PANEL), CPU_TILE.panels):
            var weights = filter.unsafe_offset(
                panel * plan.filter.elements() + position * plan.filter.plane
            )
            var to = sums.unsafe_offset(
                panel // CPU_TILE.panels * plan.sums.elements()
                + position * plan.sums.plane
            )
            var at_once = min(CPU_TILE.columns(), filters - panel * PANEL)
            comptime if transformed == DType.float32:
                _multiply_floats(
                    plan,
                    tiling,
                    inputs.unsafe_bitcast[Float32](),
                    weights.unsafe_bitcast[Float32](),
                    filter.unsafe_bitcast[Float32](),
                    at_once,
                    depth,
                    to,
                    accumulate,
                )
            else:
                _multiply_pairs(
                    plan,
                    tiles,
                    inputs.unsafe_bitcast[Int8](),
                    weights.unsafe_bitcast[Int8](),
                    at_once,
                    depth,
                    Reads[DType.int32](
                        unsafe_from_address=Int(offsets.unsafe_ptr())
                    ),
                    to,
                )
    _ = offsets


@always_inline
def _multiply_floats(
    plan: WinogradPlan,
    tiling: Tiling,
    inputs: Reads[DType.float32],
    weights: Reads[DType.float32],
    ahead: Reads[DType.float32],
    filters: Int,
    depth: Int,
    to: Writes[DType.float32],
    accumulate: Bool,
):
    """Multiplies the tiles by the filters of a register tile, for a position.
    """
    var operand = TileOperand(
        Array[Run, MAX_RUNS](uninitialized=True), 1, plan.input.row, 0
    )
    var filter = FilterOperand[DType.float32](
        panels=weights,
        panel_stride=plan.filter.elements(),
        ahead=ahead,
        interval=0,
    )
    var cursor = TileCursor(tiling, 0)
    for _ in range(tiling.per_line):
        var rows = cursor.next()
        operand.runs[0] = Run(
            inputs.unsafe_offset(rows.row * plan.input.row), 0, depth
        )
        multiply(
            rows.rows,
            filters,
            operand,
            0,
            filter,
            to.unsafe_offset(rows.row * plan.sums.row),
            plan.sums.row,
            accumulate,
            StoredRows.none(),
        )


@always_inline
def _multiply_pairs(
    plan: WinogradPlan,
    tiles: Int,
    inputs: Reads[DType.int8],
    weights: Reads[DType.int8],
    filters: Int,
    depth: Int,
    offsets: Reads[DType.int32],
    to: Writes[DType.float32],
):
    """The same with integers of 16 bits, whose bytes are given."""
    comptime bytes = size_of[DType.int16]()
    comptime words = chunk_products(DType.int8) // WORD_CHANNELS
    var chunks = _chunks(depth)
    var last = depth // WORD_CHANNELS - (chunks - 1) * words
    var state = Widening.begin()
    Widening.multiply(
        state,
        ActivationTile[DType.int8](
            inputs,
            tiles,
            plan.input.row * bytes,
            offsets,
            chunks=chunks,
            row_chunks=chunks,
            last_words=last,
        ),
        FilterTile[DType.int8](
            weights, plan.filter.elements() * bytes, filters
        ),
        Sums(to, plan.sums.row),
        OutputLines[DType.int8].none(),
    )
