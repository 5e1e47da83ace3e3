"""Stores of register tiles: the sums in a vector unit's registers, or those that
another unit left in L1, become outputs without a branch for each vector."""

from std.collections import Array
from std.math import iota
from std.memory import bitcast
from std.sys.info import size_of
from std.sys.intrinsics import masked_store

from ...conv.fields import PANEL
from ...conv.memory import bits_type, sum_type
from ..form import FORM_IDENTITY, FORM_RESIDUAL
from ..register_output import REGISTER_FORMS, RegisterOutput
from .mma import Sums, TileOutput
from .vector_unit import VectorUnit

comptime BLOCK_ROWS = [8, 2, 1]
"""Pixels whose sums are read from memory together: as many as are left."""


@no_inline
def store_from_memory[
    U: VectorUnit, dtype: DType
](sums: Sums, rows: Int, tile: TileOutput[dtype]):
    """Stores outputs of sums in memory, two panels of a pixel at once.

    Parameters:
        U: What rounds; a register holds a panel.
        dtype: Of the operands and the outputs.

    Args:
        sums: The sums.
        rows: Pixels.
        tile: The outputs.
    """
    comptime assert U.lanes == PANEL
    for first in range(0, tile.filters, 2 * PANEL):
        var part = TileOutput(
            tile.output.at(0, first),
            tile.sums.behind(first // PANEL),
            min(2 * PANEL, tile.filters - first),
        )
        var from_here = Sums(sums.elements.unsafe_offset(first), sums.stride)
        if part.filters > PANEL:
            _store_panels[U, dtype, 2](from_here, rows, part)
        else:
            _store_panels[U, dtype, 1](from_here, rows, part)


@always_inline
def _store_panels[
    U: VectorUnit, dtype: DType, panels: Int
](sums: Sums, rows: Int, tile: TileOutput[dtype]):
    """`store_from_memory` of one or two panels."""
    comptime Register = SIMD[sum_type(dtype), U.lanes]
    var elements = sums.elements.unsafe_bitcast[Scalar[sum_type(dtype)]]()
    var row = 0
    comptime for count in BLOCK_ROWS:
        while row + count <= rows:
            var acc = Array[Register, count * panels](fill=0)
            comptime for i in range(count):
                comptime for panel in range(panels):
                    acc[i * panels + panel] = elements.unsafe_load[
                        width=U.lanes
                    ]((row + i) * sums.stride + panel * PANEL)
            store_outputs[U, dtype, count, panels](acc, tile.at(row))
            row += count


@always_inline
def store_outputs[
    U: VectorUnit, dtype: DType, rows: Int, vectors: Int
](
    acc: Array[SIMD[sum_type(dtype), U.lanes], rows * vectors],
    tile: TileOutput[dtype],
):
    """Stores outputs of the sums of a register tile.

    Parameters:
        U: The instructions.
        dtype: Of the operands and the outputs.
        rows: Pixels.
        vectors: Registers of filters.

    Args:
        acc: The sums, those of a pixel one after the other.
        tile: The outputs.
    """
    comptime for i in range(len(REGISTER_FORMS)):
        comptime form = REGISTER_FORMS[i]
        comptime if form != FORM_IDENTITY or not dtype.is_integral():
            if tile.output.form == form:
                if tile.filters == vectors * U.lanes:
                    _store_form[U, dtype, rows, vectors, form, False](acc, tile)
                else:
                    _store_form[U, dtype, rows, vectors, form, True](acc, tile)


@always_inline
def _store_form[
    U: VectorUnit,
    dtype: DType,
    rows: Int,
    vectors: Int,
    form: Int,
    partial: Bool,
](
    acc: Array[SIMD[sum_type(dtype), U.lanes], rows * vectors],
    tile: TileOutput[dtype],
):
    """Stores them behind an epilogue of a form, as many registers at once as make
    one of outputs: as a rule those of a cache line of each pixel. With `partial`
    the last register of a pixel has lanes that are no filters."""
    comptime together = size_of[DType.float32]() // size_of[dtype]()
    comptime Floats = SIMD[DType.float32, U.lanes]
    ref output = tile.output
    var mask = iota[DType.int32, U.lanes]().lt(
        Int32(tile.filters - (vectors - 1) * U.lanes)
    )
    comptime for v in range(0, vectors, 2):
        comptime both = min(2, vectors - v)
        var bias = Array[Floats, both](fill=0)
        var scale = Array[Floats, both](fill=1)
        var excess = Array[SIMD[sum_type(dtype), U.lanes], both](fill=0)
        comptime for k in range(both):
            comptime at = (v + k) * U.lanes
            comptime cut = partial and v + k == vectors - 1
            bias[k] = output.load_bias[form, U.lanes, cut](at, mask)
            comptime if dtype.is_integral():
                scale[k] = output.load_scale[U.lanes, cut](at, mask)
                excess[k] = tile.sums.excess[sum_type(dtype), U.lanes](at)
        comptime count = together // both
        comptime for first in range(0, rows, count):
            var values = Array[Floats, together](fill=0)
            comptime for piece in range(together):
                comptime i = first + piece // both
                comptime k = piece % both
                comptime cut = partial and v + k == vectors - 1
                comptime if i < rows and piece < count * both:
                    var sum = acc[i * vectors + v + k]
                    comptime if dtype.is_integral():
                        sum -= excess[k]
                    values[piece] = output.finished[form, U.lanes, cut](
                        sum.cast[DType.float32](),
                        scale[k],
                        bias[k],
                        i * output.filters + (v + k) * U.lanes,
                        mask,
                    )
            comptime bits = bits_type(dtype)
            var rounded = bitcast[bits, together * U.lanes](
                U.round[dtype, together](output, values)
            )
            comptime for i in range(first, min(rows, first + count)):
                comptime at = (i - first) * both * U.lanes
                var to = output.elements.unsafe_bitcast[
                    Scalar[bits]
                ]().unsafe_offset(i * output.filters + v * U.lanes)
                comptime whole = both - (
                    1 if partial and v + both == vectors else 0
                )
                comptime if whole > 0:
                    to.unsafe_store[alignment=1](
                        rounded.slice[whole * U.lanes, offset=at]()
                    )
                comptime if whole < both:
                    masked_store(
                        rounded.slice[U.lanes, offset=at + whole * U.lanes](),
                        to.unsafe_offset(whole * U.lanes),
                        mask,
                    )
