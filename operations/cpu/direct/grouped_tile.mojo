"""The register tile of groups that share a panel: neighbouring pixels of an image
row by some of a panel's filters.

A step multiplies, in every lane, a word of the lane's group by the lane's filter:
a channel, or with AVX512-BF16 two of bfloat16, which `vdpbf16ps` adds up. Where a
group fills a register of 8 lanes its word is broadcast from memory, where the
image's lines are copied to with their padding; otherwise a shuffle puts the words
of all groups of a register into their lanes.
"""

from std.math import ceildiv
from std.utils import IndexList

from ...conv.fields import PANEL
from ...conv.memory import Reads, Writes
from ...conv.panels import shared_interleaved
from ...conv.problem import ConvProblem
from ..config import LANES, vector_registers
from ..dot.vectors import dot_bfloat16
from ..panel import load_filters, load_pairs
from ..unit import opaque_address
from .channels import Lanes
from .image_row import COLUMNS, ColumnTile, ImageRow, InputRow, Span
from .sums import SumTarget

comptime COPIED_COLUMNS = 7
"""Output pixels of a tile of copied lines, which divide those of most images."""

comptime WIDEST_GROUP = 8
"""Filters of the widest group that shares a panel."""


@fieldwise_init
struct GroupForm(Equatable, ImplicitlyCopyable, Movable):
    """How a tile multiplies."""

    var width: Int
    """Channels and filters of a group."""
    var dot: Bool
    """Whether a word is two channels of bfloat16."""
    var broadcasts: Bool
    """Whether words are broadcast from copied lines."""

    def word_channels(self) -> Int:
        """Channels of a word."""
        return 2 if self.dot else 1

    def words(self) -> Int:
        """Words of a group's pixel."""
        return self.width // self.word_channels()

    def word_type(self) -> DType:
        """What holds a word."""
        return DType.uint32 if self.dot else DType.float32

    def line_type(self) -> DType:
        """Of copied channels."""
        return DType.bfloat16 if self.dot else DType.float32

    def lanes(self) -> Int:
        """Filters of a register."""
        return WIDEST_GROUP if self.broadcasts else max(LANES, WIDEST_GROUP)

    def registers(self) -> Int:
        """Of a pixel's sums: two, where 16 are left for all else."""
        return 2 if self.broadcasts and vector_registers() >= 32 else 1

    def columns(self) -> Int:
        """Output pixels of a tile."""
        return COPIED_COLUMNS if self.broadcasts else COLUMNS

    def filters(self) -> Int:
        """Of a tile: a panel, or half of one."""
        return self.lanes() * self.registers()


def _lane_words[form: GroupForm](word: Int) -> IndexList[form.lanes()]:
    """The word, among those of the groups of a register, that each lane
    multiplies: the `word`th of its group."""
    var mask = IndexList[form.lanes()](fill=0)
    for lane in range(form.lanes()):
        mask[lane] = lane // form.width * form.words() + word
    return mask


@always_inline
def _weights[
    filter_type: DType, form: GroupForm
](panel: Reads[filter_type], word: Int, lane: Int) -> SIMD[
    form.word_type(), form.lanes()
]:
    """A word of each of a register's filters, from a lane of a panel on."""
    comptime lanes = form.lanes()
    comptime Words = SIMD[form.word_type(), lanes]
    comptime if form.dot:
        return rebind[Words](load_pairs[filter_type, lanes](panel, word, lane))
    else:
        comptime quads = shared_interleaved(filter_type, form.width) == 4
        return rebind[Words](
            load_filters[filter_type, lanes, quads](panel, word, lane)
        )


@always_inline
def _add[
    form: GroupForm
](
    sums: SIMD[DType.float32, form.lanes()],
    pixel: SIMD[form.word_type(), form.lanes()],
    weights: SIMD[form.word_type(), form.lanes()],
) -> SIMD[DType.float32, form.lanes()]:
    """Adds the products of a word of each lane."""
    comptime if form.dot:
        comptime Words = SIMD[DType.uint32, form.lanes()]
        return dot_bfloat16(sums, rebind[Words](pixel), rebind[Words](weights))
    else:
        comptime Values = SIMD[DType.float32, form.lanes()]
        return rebind[Values](pixel).fma(rebind[Values](weights), sums)


@always_inline
def _load_words[
    dtype: DType, form: GroupForm, checked: Bool
](row: InputRow[dtype], column: Int, channel: Int) -> SIMD[
    form.word_type(), form.lanes()
]:
    """The words of a pixel for all groups of a register, from the first lane
    on."""
    comptime Words = SIMD[form.word_type(), form.lanes()]
    comptime if form.dot:
        comptime half = form.lanes() // 2
        comptime if checked:
            if not row.contains(column):
                return Words(0)
        var words = (
            row.pixel(column)
            .unsafe_offset(channel)
            .unsafe_bitcast[Scalar[form.word_type()]]()
            .unsafe_load[width=half, alignment=1]()
        )
        return rebind[Words](words.join(words))
    else:
        return rebind[Words](row.load[form.lanes(), checked](column, channel))


comptime Sums[form: GroupForm] = Array[
    SIMD[DType.float32, form.lanes()], form.registers() * form.columns()
]
"""Of a tile, register by register."""


@always_inline
def _add_shuffled_row[
    x_type: DType, filter_type: DType, form: GroupForm, checked: Bool
](
    row: InputRow[x_type],
    panel: Reads[filter_type],
    tap: Int,
    problem: ConvProblem,
    channel: Int,
    mut acc: Sums[form],
):
    """Adds one filter row, from a tap on, of groups whose words are shuffled.
    """
    comptime lanes = form.lanes()
    comptime Words = SIMD[form.word_type(), lanes]
    for s in range(problem.filter[2]):
        var values = Array[Words, COLUMNS](fill=Words(0))
        comptime for i in range(COLUMNS):
            values[i] = _load_words[x_type, form, checked](
                row, s * problem.dilation[2] + i * problem.stride[2], channel
            )
        comptime for word in range(form.words()):
            comptime mask = _lane_words[form](word)
            var weights = _weights[filter_type, form](
                panel, (tap + s) * form.words() + word, channel % PANEL
            )
            comptime for i in range(COLUMNS):
                var pixel = values[i].shuffle[mask=mask]()
                acc[i] = _add[form](acc[i], pixel, weights)


@always_inline
def _store[
    form: GroupForm, Target: SumTarget
](acc: Sums[form], q: Int, q_end: Int, first: Int, target: Target):
    """Stores the sums of a tile's pixels in front of `q_end`."""
    comptime lanes = Lanes.plain(form.lanes())
    comptime for part in range(form.registers()):
        var at = first + part * form.lanes()
        var bias = target.bias[lanes](at)
        comptime for i in range(form.columns()):
            if q + i < q_end:
                target.store[lanes](
                    q + i,
                    at,
                    rebind[SIMD[DType.float32, lanes.width]](
                        acc[part * form.columns() + i]
                    ),
                    bias,
                )


@always_inline
def _shuffled_tile[
    x_type: DType,
    filter_type: DType,
    form: GroupForm,
    checked: Bool,
    Target: SumTarget,
](
    row: ImageRow[x_type],
    panel: Reads[filter_type],
    q: Int,
    q_end: Int,
    first: Int,
    target: Target,
):
    """Computes `COLUMNS` neighbouring pixels, those in front of `q_end`, by the
    filters of a tile from `first` on, and by as many channels."""
    ref problem = row.problem
    var acc = Sums[form](fill=SIMD[DType.float32, form.lanes()](0))
    for t in range(row.depth.begin, row.depth.end):
        for r in range(row.height.begin, row.height.end):
            var tap = (t * problem.filter[1] + r) * problem.filter[2]
            _add_shuffled_row[x_type, filter_type, form, checked](
                row.input(q, t, r), panel, tap, problem, first, acc
            )
    _store[form](acc, q, q_end, first, target)


@always_inline
def _shuffled_tiles[
    x_type: DType, filter_type: DType, form: GroupForm, Target: SumTarget
](
    row: ImageRow[x_type],
    panel: Reads[filter_type],
    span: Span,
    first: Int,
    target: Target,
):
    """Computes the tiles of a span by the filters of a tile from `first` on."""
    var tile = ColumnTile(span)
    while tile.next(row, span):
        if tile.inside:
            _shuffled_tile[x_type, filter_type, form, False](
                row, panel, tile.q, span.q_end, first, target
            )
        else:
            _shuffled_tile[x_type, filter_type, form, True](
                row, panel, tile.q, span.q_end, first, target
            )


comptime LINE_PIXELS = 256
"""Pixels of all lines that are copied at once: 16 KiB of float32, which stay in L1
beside the filter."""


def _line_columns(row: ImageRow) -> Int:
    """Output columns whose input is copied at once; 0 if there is no room for
    those of a tile."""
    ref problem = row.problem
    var lines = row.slices() * (row.height.end - row.height.begin)
    var pixels = LINE_PIXELS // max(1, lines) - problem.span(2)
    if pixels < 0:
        return 0
    return (pixels // problem.stride[2] + 1) // COPIED_COLUMNS * COPIED_COLUMNS


@always_inline
def _copy_lines[
    x_type: DType, form: GroupForm
](
    row: ImageRow[x_type],
    q: Int,
    pixels: Int,
    channel: Int,
    to: Writes[form.line_type()],
):
    """Copies what the output columns from `q` on read, line by line, with zeros
    for what lies beside the image."""
    comptime filters = form.filters()
    var at = to
    for t in range(row.depth.begin, row.depth.end):
        for r in range(row.height.begin, row.height.end):
            var line = row.input(q, t, r)
            for pixel in range(pixels):
                comptime if form.dot:
                    comptime bits = DType.uint16
                    var values = SIMD[bits, filters](0)
                    if line.contains(pixel):
                        values = (
                            line.pixel(pixel)
                            .unsafe_offset(channel)
                            .unsafe_bitcast[Scalar[bits]]()
                            .unsafe_load[width=filters, alignment=1]()
                        )
                    at.unsafe_bitcast[Scalar[bits]]().unsafe_store(values)
                else:
                    at.unsafe_store(
                        rebind[SIMD[form.line_type(), filters]](
                            line.load[filters, True](pixel, channel)
                        )
                    )
                at = at.unsafe_offset(filters)


@always_inline
def _add_tap[
    filter_type: DType, form: GroupForm
](
    pixels: Reads[form.line_type()],
    stride: Int,
    panel: Reads[filter_type],
    tap: Int,
    lane: Int,
    mut acc: Sums[form],
):
    """Adds one tap of copied pixels, between which lie `stride` elements."""
    comptime lanes = form.lanes()
    comptime Word = Scalar[form.word_type()]
    comptime for word in range(form.words()):
        comptime for part in range(form.registers()):
            var weights = _weights[filter_type, form](
                panel, tap * form.words() + word, lane + part * lanes
            )
            comptime for i in range(COPIED_COLUMNS):
                comptime at = part * COPIED_COLUMNS + i
                var group = pixels.unsafe_offset(i * stride + part * lanes)
                var pixel = group.unsafe_bitcast[Word]().unsafe_load(word)
                acc[at] = _add[form](acc[at], pixel, weights)


@always_inline
def _copied_tile[
    filter_type: DType, form: GroupForm, Target: SumTarget
](
    row: ImageRow,
    lines: Reads[form.line_type()],
    pitch: Int,
    panel: Reads[filter_type],
    q: Int,
    q_end: Int,
    first: Int,
    target: Target,
):
    """Computes `COPIED_COLUMNS` neighbouring pixels, those in front of `q_end`, by the
    filters of a tile from `first` on; `pitch` elements lie between two lines.
    """
    ref problem = row.problem
    comptime filters = form.filters()
    var acc = Sums[form](fill=SIMD[DType.float32, form.lanes()](0))
    var line = lines
    for t in range(row.depth.begin, row.depth.end):
        for r in range(row.height.begin, row.height.end):
            var tap = (t * problem.filter[1] + r) * problem.filter[2]
            for s in range(problem.filter[2]):
                _add_tap[filter_type, form](
                    line.unsafe_offset(s * problem.dilation[2] * filters),
                    problem.stride[2] * filters,
                    panel,
                    tap + s,
                    first % PANEL,
                    acc,
                )
            line = line.unsafe_offset(pitch)
    _store[form](acc, q, q_end, first, target)


@always_inline
def _copied_tiles[
    x_type: DType, filter_type: DType, form: GroupForm, Target: SumTarget
](
    row: ImageRow[x_type],
    panel: Reads[filter_type],
    span: Span,
    first: Int,
    columns: Int,
    target: Target,
):
    """Computes the tiles of a span by the filters of a tile from `first` on,
    `columns` columns of each copied line."""
    ref problem = row.problem
    comptime filters = form.filters()
    var lines = Array[SIMD[form.line_type(), filters], LINE_PIXELS](
        uninitialized=True
    )
    var to = Writes[form.line_type()](
        unsafe_from_address=opaque_address(Int(Pointer(to=lines)))
    )
    for begin in range(span.q, span.q_end, columns):
        # Whole tiles: what their excess columns read is copied as well.
        var end = min(begin + columns, span.q_end)
        var tiles = ceildiv(end - begin, COPIED_COLUMNS)
        var computed = max(end - begin, COPIED_COLUMNS)
        var pixels = (computed - 1) * problem.stride[2] + problem.span(2)
        _copy_lines[x_type, form](row, begin, pixels, first, to)
        for tile in range(tiles):
            var q = max(
                begin, min(begin + tile * COPIED_COLUMNS, end - COPIED_COLUMNS)
            )
            var skipped = (q - begin) * problem.stride[2] * filters
            _copied_tile[filter_type, form](
                row,
                to.unsafe_offset(skipped).as_imm(),
                pixels * filters,
                panel,
                q,
                end,
                first,
                target,
            )
    _ = lines^


@no_inline
def compute_span_of_groups[
    x_type: DType, filter_type: DType, width: Int, dot: Bool, Target: SumTarget
](
    row: ImageRow[x_type],
    filter: Reads[filter_type],
    span: Span,
    target: Target,
):
    """Computes a span.

    Parameters:
        x_type: Of the activation.
        filter_type: Of the filter.
        width: Channels and filters of a group: 2, 4 or 8.
        dot: Whether to multiply by `vdpbf16ps`.
        Target: Where sums go.

    Args:
        row: The image row.
        filter: In panels that groups share.
        span: Whole panels.
        target: Where sums go.
    """
    # A copy: as far as the compiler knows, a sum's store may change an argument.
    var local = row
    var elements = row.problem.panel_layout(filter_type).elements()
    comptime if width == WIDEST_GROUP:
        comptime form = GroupForm(width, dot, True)
        var columns = _line_columns(local)
        if columns > 0:
            for first in range(span.begin, span.end, form.filters()):
                var by = filter.unsafe_offset(first // PANEL * elements)
                _copied_tiles[x_type, filter_type, form](
                    local, by, span, first, columns, target
                )
            return
    comptime form = GroupForm(width, dot, False)
    for first in range(span.begin, span.end, form.filters()):
        var by = filter.unsafe_offset(first // PANEL * elements)
        _shuffled_tiles[x_type, filter_type, form](
            local, by, span, first, target
        )
