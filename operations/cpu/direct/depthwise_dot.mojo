"""The register tile of depthwise filters of bfloat16 where the CPU has AVX512-BF16:
`vdpbf16ps` adds the products of two filter rows.

Words of two input lines are unpacked to pairs, a channel each; so are those of the
two filter rows that meet them. A last line alone is paired with zeros, never with
a line that the filter does not reach: zero times its infinities would be NaN.
"""

from std.collections import Array
from std.memory import bitcast
from std.sys.info import CompilationTarget

from ...conv.fields import PANEL
from ...conv.memory import Reads, sum_type
from ..dot.vectors import Avx512Bf16
from .channels import ORDER_UNPACKED, Lanes, unpacked_words
from .depthwise_tile import TileInput, reached
from .image_row import ImageRow, InputRow, Span
from .sums import SumTarget

comptime DOT_WIDTH = 2 * PANEL
"""Channels of a tile: words of 64 bytes."""

comptime DOT_LANES = Lanes(DOT_WIDTH, ORDER_UNPACKED)
"""Those channels as sums."""

comptime DOT_COLUMNS = 7
"""Output columns of a tile, which divide those of most images."""

comptime _Words = SIMD[DType.uint16, DOT_WIDTH]

comptime _Sums = SIMD[DType.float32, PANEL]


def names_dot_tile() -> Bool:
    """Whether this build names the registers of a tile."""
    comptime if CompilationTarget.is_x86():
        return CompilationTarget.has_avx512f()
    return False


@always_inline
def _unpacked[
    half: Int
](first: _Words, second: _Words) -> SIMD[DType.uint32, PANEL]:
    """Pairs of words: the first or the second half of each 8."""
    comptime mask = unpacked_words(half)
    return bitcast[DType.uint32, PANEL](first.shuffle[mask=mask](second))


@always_inline
def _add(
    sums: _Sums,
    pixel: SIMD[DType.uint32, PANEL],
    weights: SIMD[DType.uint32, PANEL],
) -> _Sums:
    """Adds both products of each pair."""
    comptime Sums = SIMD[sum_type(DType.bfloat16), PANEL]
    return rebind[_Sums](
        Avx512Bf16.add[DType.bfloat16](rebind[Sums](sums), pixel, weights)
    )


@always_inline
def _words[
    dtype: DType, checked: Bool
](line: InputRow[dtype], column: Int) -> _Words:
    """The channels of a pixel, zeros beside the image."""
    comptime if checked:
        if not line.contains(column):
            return _Words(0)
    return bitcast[DType.uint16, DOT_WIDTH](
        line.pixel(column).unsafe_load[width=DOT_WIDTH, alignment=1]()
    )


@always_inline
def _slide[
    dtype: DType,
    taps: Int,
    stride: Int,
    checked: Bool,
    columns: Int,
    pair: Bool,
](
    line: InputRow[dtype],
    next_line: Int,
    filter: Reads[dtype],
    filter_row: Int,
    mut acc: Array[_Sums, 2 * columns],
):
    """Adds an input line, and with `pair` the one `next_line` elements behind it,
    to the sums of all outputs that they reach."""
    var second = line
    second.start = line.start.unsafe_offset(next_line)
    comptime Pairs = SIMD[DType.uint32, PANEL]
    var weights = Array[Pairs, 2 * taps](fill=Pairs(0))
    comptime for s in range(taps):
        var at = filter.unsafe_offset(s * line.channels)
        var first_words = bitcast[DType.uint16, DOT_WIDTH](
            at.unsafe_load[width=DOT_WIDTH, alignment=1]()
        )
        var second_words = _Words(0)
        comptime if pair:
            second_words = bitcast[DType.uint16, DOT_WIDTH](
                at.unsafe_load[width=DOT_WIDTH, alignment=1](filter_row)
            )
        comptime for half in range(2):
            weights[2 * s + half] = _unpacked[half](first_words, second_words)
    comptime for j in range((columns - 1) * stride + taps):
        var first_words = _words[checked=checked](line, j)
        var second_words = _Words(0)
        comptime if pair:
            second_words = _words[checked=checked](second, j)
        comptime for half in range(2):
            var pixel = _unpacked[half](first_words, second_words)
            comptime for s in range(taps):
                comptime column = reached(j, s, stride, columns)
                comptime if column >= 0:
                    comptime at = 2 * column + half
                    acc[at] = _add(acc[at], pixel, weights[2 * s + half])


@no_inline
def _tile[
    dtype: DType,
    taps: Int,
    stride: Int,
    checked: Bool,
    columns: Int,
    Target: SumTarget,
](input: TileInput[dtype, dtype], q: Int, channel: Int, target: Target,):
    """Computes `columns` neighbouring pixels of a row by `DOT_LANES`."""
    var acc = Array[_Sums, 2 * columns](fill=_Sums(0))
    var line = input.row
    line.w += q * stride
    line.start = line.start.unsafe_offset(q * input.column_stride + channel)
    var weights = input.weights.unsafe_offset(channel)
    for _ in range(input.slices):
        var here = line
        var by = weights
        for _ in range(input.upper // 2):
            _slide[dtype, taps, stride, checked, columns, True](
                here, input.row_stride, by, input.filter_row, acc
            )
            here.start = here.start.unsafe_offset(2 * input.row_stride)
            by = by.unsafe_offset(2 * input.filter_row)
        if input.upper % 2 == 1:
            _slide[dtype, taps, stride, checked, columns, False](
                here, 0, by, 0, acc
            )
        line.start = line.start.unsafe_offset(input.slice_stride)
        weights = weights.unsafe_offset(input.filter_slice)
    var bias = target.bias[DOT_LANES](channel)
    comptime for i in range(columns):
        target.store[DOT_LANES](
            q + i,
            channel,
            rebind[SIMD[DType.float32, DOT_LANES.width]](
                acc[2 * i].join(acc[2 * i + 1])
            ),
            bias,
        )


@no_inline
def compute_span_of_dots[
    dtype: DType, taps: Int, stride: Int, columns: Int, Target: SumTarget
](row: ImageRow[dtype], filter: Reads[dtype], span: Span, target: Target,):
    """Computes a span; the last tile may overlap the one before.

    Parameters:
        dtype: Of activation and filter, bfloat16.
        taps: Of a filter row, without dilation.
        stride: Along w.
        columns: Of a tile.
        Target: Where sums go.

    Args:
        row: The image row.
        filter: `[taps][channels]`.
        span: At least `columns` columns and `DOT_WIDTH` channels.
        target: Where sums go.
    """
    var input = TileInput(row, filter, 1)
    var inside = row.inside(span)
    for at in range(span.q, span.q_end, columns):
        var q = min(at, span.q_end - columns)
        var is_inside = inside.begin <= q and q + columns <= inside.end
        for c in range(span.begin, span.end, DOT_WIDTH):
            var channel = min(c, span.end - DOT_WIDTH)
            if is_inside:
                _tile[dtype, taps, stride, False, columns](
                    input, q, channel, target
                )
            else:
                _tile[dtype, taps, stride, True, columns](
                    input, q, channel, target
                )
