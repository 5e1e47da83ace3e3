"""The transforms of Winograd's minimal filtering: F(2x2, 3x3), 2 x 2 outputs of
a 3 x 3 filter, and F(3x3, 2x2), 3 x 3 outputs of a 2 x 2 filter. Each takes 16
multiplications instead of 36.

    Y = A^T [ (G g G^T) * (B^T d B) ] A

Both read a patch `d` of 4 x 4 inputs and transform it in the same way:

    B^T = 1  0 -1  0
          0  1  1  0
          0 -1  1  0
          0  1  0 -1

A filter of 3 taps along an axis has

    G = 1    0    0      A^T = 1  1  1  0
        1/2  1/2  1/2          0  1 -1 -1
        1/2 -1/2  1/2
        0    0    1

and one of 2 taps has

    G = 1    0           A^T = 1  1  1  0
        1/2  1/2               0  1 -1  0
        1/2 -1/2               0  1  1 -1
        0    1

(Winograd, "Arithmetic Complexity of Computations", SIAM 1980; for 3 taps Lavin
and Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016,
section 4.1.) The rows of `G` and the columns of `A^T` evaluate polynomials at
the points 0, 1, -1 and infinity, up to a factor. `B^T` depends on the points
alone. All factors are powers of two, so that sums of small integers stay exact.

Integers of 8 bits take `2 G`: transformed filters are integers then, of 16 bits
like transformed inputs, and outputs come out 4 times as large, exactly.
"""

from std.math import iota
from std.memory import bitcast
from std.sys.intrinsics import masked_load

from ...conv.fields import PANEL
from ...conv.memory import Reads, Writes
from ...conv.panels import interleaved_products
from ...conv.problem import ConvProblem
from ..config import LANES
from ..panel import load_filters
from ..pixel import Pixel, load_channels

comptime PATCH = 4
"""Inputs along an axis that a tile reads."""

comptime MIN_TAPS = 2
"""Taps of the shortest filter along an axis."""

comptime MAX_TAPS = 3
"""Taps of the longest filter along an axis."""

comptime POSITIONS = PATCH * PATCH
"""Products of a tile, each the element of a matrix product of its own."""

comptime WORD_CHANNELS = interleaved_products(DType.int8)
"""Channels of integers that lie side by side in a filter panel."""

comptime INTEGER_SCALE_BITS = 2
"""Bits by which the sums of integers are larger than outputs."""


def transformed_type(dtype: DType) -> DType:
    """The type of transformed inputs and filters.

    Args:
        dtype: Of activation and filter.
    """
    return DType.int16 if dtype.is_integral() else DType.float32


def transformed_lanes(dtype: DType) -> Int:
    """Those of a register of transformed inputs.

    Args:
        dtype: Of activation and filter.
    """
    return 2 * LANES if dtype.is_integral() else LANES


@always_inline
def tile_extent(taps: Int) -> Int:
    """Outputs of a tile along an axis.

    Args:
        taps: Of the filter along the axis, from `MIN_TAPS` to `MAX_TAPS`.
    """
    return PATCH + 1 - taps


@always_inline
def _input_row[
    dtype: DType, lanes: SIMDLength, //, i: Int
](d: Array[SIMD[dtype, lanes], PATCH]) -> SIMD[dtype, lanes]:
    """Row `i` of `B^T d`."""
    comptime if i == 0:
        return d[0] - d[2]
    elif i == 1:
        return d[1] + d[2]
    elif i == 2:
        return d[2] - d[1]
    else:
        return d[1] - d[3]


@always_inline
def _filter_row[
    dtype: DType, lanes: SIMDLength, //, taps: Int, i: Int
](g: Array[SIMD[dtype, lanes], taps]) -> SIMD[dtype, lanes]:
    """Row `i` of `G g`, or of `2 G g` of integers."""
    comptime if i == 0 or i == PATCH - 1:
        var tap = g[0 if i == 0 else taps - 1]
        return tap + tap if dtype.is_integral() else tap
    else:
        # The taps that are multiplied by 1 at both points, 1 and -1.
        var even = g[0]
        comptime if taps == MAX_TAPS:
            even = g[0] + g[2]
        var sum = even + g[1] if i == 1 else even - g[1]
        comptime if dtype.is_integral():
            return sum
        else:
            return sum * 0.5


@always_inline
def _output_row[
    dtype: DType, lanes: SIMDLength, //, taps: Int, i: Int
](m: Array[SIMD[dtype, lanes], PATCH]) -> SIMD[dtype, lanes]:
    """Row `i` of `A^T m`."""
    comptime if i == 0:
        return (m[1] + m[2]) + m[0]
    elif i == 2:
        return (m[1] + m[2]) - m[3]
    elif taps == MAX_TAPS:
        return (m[1] - m[2]) - m[3]
    else:
        return m[1] - m[2]


@fieldwise_init
struct Patch[dtype: DType](ImplicitlyCopyable, Movable):
    """The input pixels that a tile of outputs reads of one image, or of one
    plane of it along d.

    Parameters:
        dtype: Of the activation.
    """

    var origin: Reads[Self.dtype]
    """A channel of the first pixel, perhaps outside the image."""
    var row: Int
    """Elements between two rows of the image."""
    var column: Int
    """Elements between two pixels."""
    var top: Int
    """The first row inside the image, from 0 to `PATCH`."""
    var bottom: Int
    """The first row behind it."""
    var left: Int
    """The first column inside the image."""
    var right: Int
    """The first column behind it."""
    var zero_point: Int32
    """Of the activation."""

    comptime Vector = SIMD[
        transformed_type(Self.dtype), transformed_lanes(Self.dtype)
    ]

    def __init__(
        out self,
        x: Reads[Self.dtype],
        problem: ConvProblem,
        pixel: Pixel,
        zero_point: Int32,
    ):
        """The patch whose first pixel is given.

        Args:
            x: A channel of the activation's first pixel.
            problem: The convolution.
            pixel: The pixel, inside the image along d.
            zero_point: Of the activation.
        """
        self.zero_point = zero_point
        self.column = problem.channels
        self.row = problem.input[2] * problem.channels
        self.origin = x.unsafe_offset(pixel.input_offset(problem))
        self.top = max(0, -pixel.at[1])
        self.bottom = min(PATCH, problem.input[1] - pixel.at[1])
        self.left = max(0, -pixel.at[2])
        self.right = min(PATCH, problem.input[2] - pixel.at[2])

    def is_inside(self) -> Bool:
        """Whether all pixels are inside the image."""
        return (
            self.top == 0
            and self.bottom == PATCH
            and self.left == 0
            and self.right == PATCH
        )

    @always_inline
    def load[
        inside: Bool, whole: Bool
    ](self, i: Int, j: Int, channel: Int, count: Int) -> Self.Vector:
        """Neighbouring channels of a pixel, or zeros.

        Parameters:
            inside: Whether all pixels are inside the image.
            whole: Whether all lanes are channels.

        Args:
            i: Row of the patch.
            j: Column of the patch.
            channel: The first channel.
            count: How many there are if not all lanes are.
        """
        comptime if not inside:
            if not (
                self.top <= i < self.bottom and self.left <= j < self.right
            ):
                return Self.Vector(0)
        var source = self.origin.unsafe_offset(
            i * self.row + j * self.column + channel
        )
        comptime lanes = transformed_lanes(Self.dtype)
        comptime if Self.dtype.is_integral():
            return rebind[Self.Vector](
                _load_bytes[Self.dtype, lanes, whole](source, count).cast[
                    DType.int16
                ]()
                - self.zero_point.cast[DType.int16]()
            )
        else:
            return rebind[Self.Vector](
                load_channels[Self.dtype, lanes, whole](source, count)
            )


@always_inline
def _load_bytes[
    dtype: DType, lanes: Int, whole: Bool
](source: Reads[dtype], count: Int) -> SIMD[dtype, lanes]:
    """Neighbouring values of 8 bits, of which there are `count` if not `whole`,
    a multiple of `WORD_CHANNELS`; the other lanes are zeros."""
    comptime if whole:
        return source.unsafe_load[width=lanes]()
    else:
        comptime words = lanes // WORD_CHANNELS
        return bitcast[dtype, lanes](
            masked_load[words](
                source.unsafe_bitcast[UInt32](),
                iota[DType.int32, words]().lt(Int32(count // WORD_CHANNELS)),
                SIMD[DType.uint32, words](0),
            )
        )


@always_inline
def _input_vector[
    dtype: DType, inside: Bool, whole: Bool
](
    patch: Patch[dtype],
    channel: Int,
    count: Int,
    to: Writes[transformed_type(dtype)],
    plane: Int,
):
    """Transforms a vector of channels of a patch."""
    comptime Vector = Patch[dtype].Vector
    comptime for i in range(PATCH):
        var columns = Array[Vector, PATCH](fill=Vector(0))
        comptime for j in range(PATCH):
            var d = Array[Vector, PATCH](fill=Vector(0))
            comptime for r in range(PATCH):
                d[r] = patch.load[inside, whole](r, j, channel, count)
            columns[j] = _input_row[i](d)
        comptime for j in range(PATCH):
            to.unsafe_store(
                (i * PATCH + j) * plane + channel, _input_row[j](columns)
            )


@no_inline
def transform_patch[
    dtype: DType, inside: Bool
](
    patch: Patch[dtype],
    channels: Int,
    to: Writes[transformed_type(dtype)],
    plane: Int,
):
    """Writes `B^T d B` of each channel; lanes are channels.

    Parameters:
        dtype: Of the activation.
        inside: Whether all pixels are inside the image.

    Args:
        patch: The pixels.
        channels: How many.
        to: Where the first position's channels go; all but one value of a
            register may be written behind them.
        plane: Elements between two positions.
    """
    comptime lanes = transformed_lanes(dtype)
    var whole = channels // lanes * lanes
    for channel in range(0, whole, lanes):
        _input_vector[dtype, inside, True](patch, channel, lanes, to, plane)
    if whole < channels:
        _input_vector[dtype, inside, False](
            patch, whole, channels - whole, to, plane
        )


@no_inline
def transform_panel[
    dtype: DType, taps: Int
](
    panel: Reads[dtype],
    step: Int,
    row: Int,
    tap: Int,
    channels: Int,
    to: Writes[DType.float32],
    plane: Int,
):
    """Writes `G g G^T` of each channel of a filter panel; lanes are filters.

    Parameters:
        dtype: Of the filter.
        taps: Of the filter along an axis.

    Args:
        panel: The panel.
        step: The first channel's product of the first tap.
        row: Products between two taps along h.
        tap: Products between two taps along w.
        channels: How many.
        to: Where the first position's `[channels][PANEL]` go.
        plane: Elements between two positions.
    """
    for at in range(0, channels * PANEL, LANES):
        var channel, lane = divmod(at, PANEL)
        var g = Array[SIMD[DType.float32, LANES], taps * taps](fill=0)
        comptime for r in range(taps):
            comptime for s in range(taps):
                g[r * taps + s] = load_filters[dtype, LANES](
                    panel, step + r * row + s * tap + channel, lane
                )
        _transform_filters[taps](g, to.unsafe_offset(at), plane)


@no_inline
def transform_integer_panel[
    taps: Int
](
    panel: Reads[DType.int8],
    step: Int,
    row: Int,
    tap: Int,
    channels: Int,
    to: Writes[DType.int16],
    plane: Int,
):
    """Writes `4 G g G^T` of each channel of a filter panel of integers; lanes are
    filters, two channels of each.

    Parameters:
        taps: Of the filter along an axis.

    Args:
        panel: The panel.
        step: The first channel's product of the first tap, like the next three
            a multiple of `WORD_CHANNELS`.
        row: Products between two taps along h.
        tap: Products between two taps along w.
        channels: How many.
        to: Where the first position's `[channels / 2][PANEL][2]` go.
        plane: Elements between two positions.
    """
    comptime Vector = SIMD[DType.int16, 2 * LANES]
    comptime pairs = WORD_CHANNELS // 2
    for word in range(channels // WORD_CHANNELS):
        comptime for lane in range(0, PANEL, LANES):
            comptime for pair in range(pairs):
                var g = Array[Vector, taps * taps](fill=0)
                comptime for r in range(taps):
                    comptime for s in range(taps):
                        var at = (step + r * row + s * tap) // WORD_CHANNELS
                        var words = panel.unsafe_load[
                            width=WORD_CHANNELS * LANES
                        ](((at + word) * PANEL + lane) * WORD_CHANNELS)
                        g[r * taps + s] = bitcast[DType.int16, 2 * LANES](
                            bitcast[DType.uint32, 2 * LANES](
                                words.cast[DType.int16]()
                            ).deinterleave()[pair]
                        )
                _transform_filters[taps](
                    g,
                    to.unsafe_offset(
                        ((word * pairs + pair) * PANEL + lane) * 2
                    ),
                    plane,
                )


@always_inline
def _transform_filters[
    dtype: DType, lanes: SIMDLength, //, taps: Int
](g: Array[SIMD[dtype, lanes], taps * taps], to: Writes[dtype], plane: Int,):
    """Writes a vector of filters, transformed: `g` row by row."""
    comptime Vector = SIMD[dtype, lanes]
    var columns = Array[Vector, PATCH * taps](fill=Vector(0))
    comptime for s in range(taps):
        var column = Array[Vector, taps](fill=Vector(0))
        comptime for r in range(taps):
            column[r] = g[r * taps + s]
        comptime for i in range(PATCH):
            columns[i * taps + s] = _filter_row[taps, i](column)
    comptime for i in range(PATCH):
        var row = Array[Vector, taps](fill=Vector(0))
        comptime for s in range(taps):
            row[s] = columns[i * taps + s]
        comptime for j in range(PATCH):
            to.unsafe_store((i * PATCH + j) * plane, _filter_row[taps, j](row))


@always_inline
def transform_sums[
    dtype: DType, //, taps: Int
](
    sums: Reads[dtype],
    plane: Int,
    filters: Int,
    to: Writes[dtype],
    row: Int,
    column: Int,
):
    """Writes `A^T m A` of a tile's sums, or a fourth of it of integers; lanes are
    filters.

    Parameters:
        dtype: Of the sums.
        taps: Of the filter along an axis.

    Args:
        sums: Those of the first position.
        plane: Elements between two positions.
        filters: How many, a multiple of `LANES`.
        to: Where the tile's first output goes.
        row: Elements between two rows of outputs.
        column: Elements between two outputs.
    """
    comptime extent = tile_extent(taps)
    comptime Vector = SIMD[dtype, LANES]
    for filter in range(0, filters, LANES):
        var rows = Array[Vector, extent * PATCH](fill=Vector(0))
        comptime for j in range(PATCH):
            var m = Array[Vector, PATCH](fill=Vector(0))
            comptime for i in range(PATCH):
                m[i] = sums.unsafe_load[width=LANES](
                    (i * PATCH + j) * plane + filter
                )
            comptime for i in range(extent):
                rows[i * PATCH + j] = _output_row[taps, i](m)
        comptime for i in range(extent):
            var m = Array[Vector, PATCH](fill=Vector(0))
            comptime for j in range(PATCH):
                m[j] = rows[i * PATCH + j]
            comptime for j in range(extent):
                var outputs = _output_row[taps, j](m)
                comptime if dtype.is_integral():
                    outputs = outputs >> INTEGER_SCALE_BITS
                to.unsafe_store(i * row + j * column + filter, outputs)
