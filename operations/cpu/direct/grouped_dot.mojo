"""The register tile of narrow groups of 8 bits, by AVX512-VNNI: neighbouring
pixels of an image row by a panel of filters.

A lane is a filter. `vpdpbusd` multiplies in each lane a word, 4 channels of the
lane's group, by the lane's 4 filter bytes, and adds up the products. Where several
groups share a panel, `vpermd` puts the words of a pixel's 16 channels into their
lanes; the words of groups of 16 channels are broadcast. Of common filter rows
(`SLIDING`) a pixel is read once, for all the outputs that it reaches.

Sums begin with what the activation's zero point adds to them, less. A tap beside
the image multiplies the zero point, and so adds nothing.
"""

from std.collections import Array
from std.math import iota
from std.sys.intrinsics import llvm_intrinsic

from ...conv.fields import PANEL
from ...conv.memory import Reads, sum_type
from ...conv.panels import PanelLayout
from ...conv.problem import ConvProblem
from ..dot.vectors import Avx512Vnni
from ..unit import opaque_address
from .channels import Lanes
from .depthwise_dot import names_dot_tile
from .depthwise_tile import reached
from .image_row import ImageRow, Span
from .sums import SumTarget

comptime DOT_GROUPS = [4, 8, 16]
"""Channels, and filters, of the groups that have such a tile."""

comptime WORD = 4
"""Channels of a word."""

comptime PIXEL_WORDS = PANEL // WORD
"""Words of a pixel's channels that a panel of shared groups reads."""

comptime WIDE_COLUMNS = 14
"""Output pixels of a tile, which divide those of most images."""

comptime NARROW_COLUMNS = 7
"""The same of a tile for what is left of a row."""

comptime FLIPPED = UInt32(0x80808080)
"""Turns bytes with a sign into such without, 128 above."""

comptime _Words = SIMD[DType.uint32, PANEL]

comptime _Sums = SIMD[DType.int32, PANEL]


def has_dot_tile(width: Int) -> Bool:
    """Whether groups of some channels and as many filters have a tile.

    Args:
        width: How many.
    """
    comptime for i in range(len(DOT_GROUPS)):
        comptime group = DOT_GROUPS[i]
        if width == group:
            return True
    return False


@fieldwise_init
struct Sliding(Equatable, ImplicitlyCopyable, Movable):
    """A filter row of which pixels are read once, for all the outputs that they
    reach."""

    var taps: Int
    """Its taps, 0 where a row is added tap by tap."""
    var stride: Int
    """Pixels between two columns."""
    var dilation: Int
    """Pixels between two taps."""

    def span(self) -> Int:
        """Pixels from the first tap to the last one."""
        return (self.taps - 1) * self.dilation

    def matches(self, problem: ConvProblem) -> Bool:
        """Whether a problem has such filter rows.

        Args:
            problem: The convolution.
        """
        return (
            problem.filter[2] == self.taps
            and problem.stride[2] == self.stride
            and problem.dilation[2] == self.dilation
        )


comptime SLIDING = [
    Sliding(3, 1, 1),
    Sliding(3, 2, 1),
    Sliding(3, 1, 2),
    Sliding(5, 1, 1),
]
"""Those that have a tile."""

comptime TAP_BY_TAP = Sliding(0, 0, 0)
"""Filter rows of any length, stride and dilation."""


@fieldwise_init
struct DotForm(Equatable, ImplicitlyCopyable, Movable):
    """What a tile computes, known to the compiler."""

    var width: Int
    """Channels and filters of a group."""
    var columns: Int
    """Output pixels."""
    var sliding: Sliding
    """The filter row."""

    def words(self) -> Int:
        """Words of a group's pixel."""
        return self.width // WORD

    def pixels(self) -> Int:
        """Pixels that a filter row meets, where it slides."""
        return (
            (self.columns - 1) * self.sliding.stride + self.sliding.span() + 1
        )

    def edge(self) -> Int:
        """Pixels at either end of those that may lie beside the image, where it
        is not known that others do: as many as are when outputs are as many as
        pixels."""
        return self.sliding.span() // 2

    def narrow(self) -> DotForm:
        """The same of `NARROW_COLUMNS`."""
        return DotForm(self.width, NARROW_COLUMNS, self.sliding)


struct DotRow[dtype: DType](ImplicitlyCopyable, Movable):
    """What the tiles of an image row read: the lines of the image inside it, and
    the filter rows that meet them.

    Parameters:
        dtype: Of the activation.
    """

    var start: Reads[Self.dtype]
    """What tap 0 of column 0 reads in the first line, perhaps beside the image."""
    var w: Int
    """Where along w that lies."""
    var width: Int
    """Of the image."""
    var pixel_stride: Int
    """Elements between two pixels of the image."""
    var column_stride: Int
    """Pixels between two columns of the output."""
    var tap_stride: Int
    """Pixels between two taps."""
    var line_stride: Int
    """Elements between two lines that filter rows meet."""
    var slice_stride: Int
    """The same between two slices."""
    var lines: Int
    """Lines of a slice."""
    var slices: Int
    """How many."""
    var taps: Int
    """Of a filter row."""
    var first_row: Int
    """The filter row that meets the first line."""
    var slice_rows: Int
    """Filter rows of a slice."""
    var beside: Reads[Self.dtype]
    """The channels of a pixel beside the image: zero points."""

    def __init__(
        out self, row: ImageRow[Self.dtype], beside: Reads[Self.dtype]
    ):
        """Takes the lines of an image row.

        Args:
            row: The image row.
            beside: See the fields.
        """
        ref problem = row.problem
        self.start = row.start.unsafe_offset(
            row.depth.begin * row.slice_stride
            + row.height.begin * row.row_stride
        )
        self.w = row.w
        self.width = problem.input[2]
        self.pixel_stride = problem.channels
        self.column_stride = problem.stride[2]
        self.tap_stride = problem.dilation[2]
        self.line_stride = row.row_stride
        self.slice_stride = row.slice_stride
        self.lines = row.height.end - row.height.begin
        self.slices = row.slices()
        self.taps = problem.filter[2]
        self.slice_rows = problem.filter[1]
        self.first_row = row.depth.begin * problem.filter[1] + row.height.begin
        self.beside = beside


@fieldwise_init
struct DotPanel(ImplicitlyCopyable, Movable):
    """A filter panel."""

    var words: Reads[DType.uint32]
    """Of the first filter row that meets a line."""
    var row: Int
    """Words of a filter row, of all lanes."""
    var first: Int
    """The first filter, and the first channel of its group."""
    var sums: _Sums
    """What sums begin with."""


@always_inline
def _add(sums: _Sums, pixel: _Words, weights: _Words) -> _Sums:
    """Adds the products of a word of each lane."""
    comptime Sums = SIMD[sum_type(DType.uint8), PANEL]
    return rebind[_Sums](
        Avx512Vnni.add[DType.uint8](rebind[Sums](sums), pixel, weights)
    )


@always_inline
def _load_words[
    dtype: DType, form: DotForm
](pixel: Reads[dtype], word: Int, places: _Words) -> _Words:
    """A word of each lane's group, as bytes without a sign.

    Args:
        pixel: The channels of the panel's groups.
        word: Which word.
        places: Where among the pixel's words each lane finds it, where groups
            share a panel.
    """
    comptime flips = dtype == DType.int8
    var words = pixel.unsafe_bitcast[UInt32]()
    comptime if form.width == PANEL:
        var one = _Words(words.unsafe_load[width=1, alignment=1](word))
        return one ^ FLIPPED if flips else one
    else:
        var four = words.unsafe_load[width=PIXEL_WORDS, alignment=1]()
        comptime if flips:
            four ^= FLIPPED
        var eight = four.join(four)
        return llvm_intrinsic[
            "llvm.x86.avx512.permvar.si.512", _Words, has_side_effect=False
        ](rebind[_Words](eight.join(eight)), places)


@always_inline
def _places[form: DotForm]() -> _Words:
    """Where among a pixel's words each lane finds the first one of its group.
    """
    return (
        iota[DType.uint32, PANEL]() // UInt32(form.width) * UInt32(form.words())
    )


@always_inline
def _pixel[
    dtype: DType, checked: Bool
](row: DotRow[dtype], line: Reads[dtype], w: Int, column: Int) -> Reads[dtype]:
    """The channels of a pixel.

    Parameters:
        dtype: Of the activation.
        checked: Whether it may lie beside the image.

    Args:
        row: The image row.
        line: What the first pixel's channels are.
        w: Where along w that lies.
        column: The pixel, counted from that one.
    """
    comptime if checked:
        # As unsigned numbers, what lies left of the image is far right of it.
        if UInt(w + column) >= UInt(row.width):
            return row.beside
    return line.unsafe_offset(column * row.pixel_stride)


comptime _Tile[columns: Int] = Array[_Sums, columns]


@always_inline
def _slide[
    dtype: DType, form: DotForm, checked: Bool
](
    row: DotRow[dtype],
    line: Reads[dtype],
    w: Int,
    filter: Reads[DType.uint32],
    mut acc: _Tile[form.columns],
):
    """Adds a filter row of a known form: each pixel is read once, for all the
    outputs that it reaches."""
    comptime taps = form.sliding.taps
    comptime pixels = form.pixels()
    var places = _places[form]()
    for word in range(form.words()):
        var weights = Array[_Words, taps](fill=_Words(0))
        comptime for s in range(taps):
            weights[s] = filter.unsafe_load[width=PANEL, alignment=1](
                (s * form.words() + word) * PANEL
            )
        comptime for j in range(pixels):
            comptime edge = form.edge()
            comptime asked = checked or not edge <= j < pixels - edge
            var pixel = _load_words[dtype, form](
                _pixel[dtype, asked](row, line, w, j), word, places
            )
            comptime for s in range(taps):
                comptime column = reached(
                    j,
                    s * form.sliding.dilation,
                    form.sliding.stride,
                    form.columns,
                )
                comptime if column >= 0:
                    acc[column] = _add(acc[column], pixel, weights[s])
        places += 1


@always_inline
def _add_tap[
    dtype: DType, form: DotForm, checked: Bool
](
    row: DotRow[dtype],
    line: Reads[dtype],
    w: Int,
    filter: Reads[DType.uint32],
    mut acc: _Tile[form.columns],
):
    """Adds a tap of a filter row."""
    var places = _places[form]()
    for word in range(form.words()):
        var by = filter.unsafe_load[width=PANEL, alignment=1](word * PANEL)
        comptime for i in range(form.columns):
            var pixel = _load_words[dtype, form](
                _pixel[dtype, checked](row, line, w, i * row.column_stride),
                word,
                places,
            )
            acc[i] = _add(acc[i], pixel, by)
        places += 1


@always_inline
def _step[
    dtype: DType, form: DotForm
](
    row: DotRow[dtype],
    line: Reads[dtype],
    w: Int,
    filter: Reads[DType.uint32],
    mut acc: _Tile[form.columns],
):
    """Adds a filter row of any length, stride and dilation, tap by tap."""
    var pixels = line
    var weights = filter
    var at = w
    var last = (form.columns - 1) * row.column_stride
    for _ in range(row.taps):
        if at >= 0 and at + last < row.width:
            _add_tap[dtype, form, False](row, pixels, at, weights, acc)
        else:
            _add_tap[dtype, form, True](row, pixels, at, weights, acc)
        pixels = pixels.unsafe_offset(row.tap_stride * row.pixel_stride)
        weights = weights.unsafe_offset(form.words() * PANEL)
        at += row.tap_stride


# A call would push some 40 words: a tenth of a tile's time.
@always_inline
def _tile[
    dtype: DType, form: DotForm, checked: Bool, Target: SumTarget
](row: DotRow[dtype], panel: DotPanel, q: Int, q_end: Int, target: Target):
    """Computes neighbouring pixels by a panel, of a narrow tile those in front of
    `q_end`."""
    # The compiler would not keep in registers what a loop has filled.
    var acc = _Tile[form.columns](uninitialized=True)
    comptime for i in range(form.columns):
        acc[i] = panel.sums
    var w = row.w + q * row.column_stride
    var slice = row.start.unsafe_offset(
        q * row.column_stride * row.pixel_stride + panel.first
    )
    var filter_slice = panel.words
    for _ in range(row.slices):
        var line = slice
        var filter = filter_slice
        for _ in range(row.lines):
            comptime if form.sliding == TAP_BY_TAP:
                _step[dtype, form](row, line, w, filter, acc)
            else:
                _slide[dtype, form, checked](row, line, w, filter, acc)
            line = line.unsafe_offset(row.line_stride)
            filter = filter.unsafe_offset(panel.row)
        slice = slice.unsafe_offset(row.slice_stride)
        filter_slice = filter_slice.unsafe_offset(panel.row * row.slice_rows)
    comptime lanes = Lanes.plain(PANEL)
    var bias = target.bias[lanes](panel.first)
    comptime for i in range(form.columns):
        if form.columns > NARROW_COLUMNS or q + i < q_end:
            target.store[lanes](
                q + i,
                panel.first,
                rebind[SIMD[DType.float32, lanes.width]](
                    acc[i].cast[DType.float32]()
                ),
                bias,
            )


def _first_sums(
    row: ImageRow,
    layout: PanelLayout,
    filter: Reads[DType.int8],
    words: Int,
    zero: UInt32,
) -> _Sums:
    """What a panel's sums begin with: less the zero point times each filter, but
    for the filter rows above and below the image, which no line meets.

    Args:
        row: The image row.
        layout: Of the panel.
        filter: The panel.
        words: Words of a filter row.
        zero: The zero point, as a byte without a sign.
    """
    if zero == 0:
        return _Sums(0)
    ref size = row.problem.filter
    var sums = (
        filter.unsafe_offset(layout.sums_offset())
        .unsafe_bitcast[Int32]()
        .unsafe_load[width=PANEL, alignment=1]()
    )
    sums *= -zero.cast[DType.int32]()
    var zeros = _Words(zero * 0x01010101)
    for t in range(size[0]):
        for r in range(size[1]):
            if (
                row.depth.begin <= t < row.depth.end
                and row.height.begin <= r < row.height.end
            ):
                continue
            var by = filter.unsafe_bitcast[UInt32]().unsafe_offset(
                (t * size[1] + r) * (layout.row_depth // WORD) * PANEL
            )
            for word in range(words):
                sums = _add(
                    sums,
                    zeros,
                    by.unsafe_load[width=PANEL, alignment=1](word * PANEL),
                )
    return sums


@always_inline
def _compute_tile[
    dtype: DType, form: DotForm, Target: SumTarget
](row: DotRow[dtype], panel: DotPanel, q: Int, q_end: Int, target: Target):
    """Computes a tile, and asks of as few pixels as may be whether they lie inside
    the image."""
    comptime if form.sliding != TAP_BY_TAP:
        comptime edge = form.edge()
        var first = row.w + q * row.column_stride
        if first >= -edge and first + form.pixels() <= row.width + edge:
            _tile[dtype, form, False](row, panel, q, q_end, target)
            return
    _tile[dtype, form, True](row, panel, q, q_end, target)


@no_inline
def _compute_panels[
    dtype: DType, form: DotForm, Target: SumTarget
](row: ImageRow[dtype], filter: Reads[DType.int8], span: Span, target: Target,):
    """Computes a span, panel by panel."""
    ref problem = row.problem
    var zero = UInt32(Int(row.zero) + (128 if dtype == DType.int8 else 0))
    var near = Array[UInt32, PIXEL_WORDS](
        fill=UInt32(Int(row.zero) & 0xFF) * 0x01010101
    )
    var beside = Reads[dtype](
        unsafe_from_address=opaque_address(Int(Pointer(to=near)))
    )
    var lines = DotRow(row, beside)
    var layout = problem.panel_layout(DType.int8)
    var filter_row = layout.row_depth // WORD * PANEL
    for first in range(span.begin, span.end, PANEL):
        var by = filter.unsafe_offset(first // PANEL * layout.elements())
        var panel = DotPanel(
            by.unsafe_bitcast[UInt32]().unsafe_offset(
                lines.first_row * filter_row
            ),
            filter_row,
            first,
            _first_sums(row, layout, by, layout.products // WORD, zero),
        )
        var q = span.q
        while q < span.q_end:
            var left = span.q_end - q
            # Tiles overlap the one before rather than be narrower, where the
            # span is long enough.
            if left > NARROW_COLUMNS and span.q_end - span.q >= WIDE_COLUMNS:
                var at = min(q, span.q_end - WIDE_COLUMNS)
                _compute_tile[dtype, form](lines, panel, at, span.q_end, target)
                q = at + WIDE_COLUMNS
            else:
                var at = max(span.q, min(q, span.q_end - NARROW_COLUMNS))
                _compute_tile[dtype, form.narrow()](
                    lines, panel, at, span.q_end, target
                )
                q = at + NARROW_COLUMNS
    _ = near^


def compute_span_by_vnni[
    dtype: DType, width: Int, Target: SumTarget
](row: ImageRow[dtype], filter: Reads[DType.int8], span: Span, target: Target,):
    """Computes a span by AVX512-VNNI.

    Parameters:
        dtype: Of the activation, of 8 bits.
        width: Channels and filters of a group: one of `DOT_GROUPS`.
        Target: Where sums go.

    Args:
        row: The image row.
        filter: In panels: of one group, or that groups share.
        span: Whole panels.
        target: Where sums go.
    """
    comptime if names_dot_tile():
        comptime for i in range(len(SLIDING)):
            comptime sliding = SLIDING[i]
            if sliding.matches(row.problem):
                comptime form = DotForm(width, WIDE_COLUMNS, sliding)
                _compute_panels[dtype, form](row, filter, span, target)
                return
        comptime form = DotForm(width, WIDE_COLUMNS, TAP_BY_TAP)
        _compute_panels[dtype, form](row, filter, span, target)
