"""Activation tiles: rows of the implicit im2col matrix, gathered as float32.

A row is one output pixel's `T*R*S*C/groups` inputs in the order of the packed
filter. Only a block of rows ever exists, in a buffer that fits in L2; padding
becomes zeros here, so the multiplication never asks for it.
"""

from extensibility import ManagedTensorSlice
from std.math import ceildiv
from std.utils import IndexList

from ..conv.access import tensor_index
from ..conv.memory import Reads, Writes, operand
from ..conv.fields import PANEL
from ..conv.problem import SPATIAL, ConvProblem

comptime COPY = PANEL
"""Elements that the gather moves at once."""


@fieldwise_init
struct Pixel(ImplicitlyCopyable, Movable):
    """An output pixel `[n, z, p, q]`."""

    var n: Int
    var at: IndexList[SPATIAL]

    def __init__(out self, problem: ConvProblem, row: Int):
        """The pixel of a row of the implicit GEMM.

        Args:
            problem: The convolution.
            row: From 0 to `problem.gemm_m() - 1`.
        """
        var rest, q = divmod(row, problem.output[2])
        var zn, p = divmod(rest, problem.output[1])
        var n, z = divmod(zn, problem.output[0])
        self.n = n
        self.at = IndexList[SPATIAL](z, p, q)

    @always_inline
    def advance(mut self, problem: ConvProblem):
        """Moves to the next row's pixel.

        Args:
            problem: The convolution.
        """
        self.at[2] += 1
        if self.at[2] < problem.output[2]:
            return
        self.at[2] = 0
        self.at[1] += 1
        if self.at[1] < problem.output[1]:
            return
        self.at[1] = 0
        self.at[0] += 1
        if self.at[0] == problem.output[0]:
            self.at[0] = 0
            self.n += 1

    @always_inline
    def index[rank: Int](self, channel: Int) -> IndexList[rank]:
        """The index of a channel of this pixel in a tensor of this rank.

        Parameters:
            rank: Of the tensor: batch, spatial dimensions, channels.

        Args:
            channel: The channel.

        Returns:
            `[n, *at, channel]`, without the leading spatial ones.
        """
        return tensor_index[rank](self.n, self.at, channel)


@always_inline
def load_activation[
    width: Int
](
    x: ManagedTensorSlice,
    problem: ConvProblem,
    n: Int,
    at: IndexList[SPATIAL],
    channel: Int,
) -> SIMD[DType.float32, width]:
    """Neighbouring channels of one input pixel, through whatever the graph
    compiler fused in front of the op.

    Parameters:
        width: How many channels.

    Args:
        x: The activation, contiguous.
        problem: The convolution.
        n: The image.
        at: The input pixel, inside the image.
        channel: The first channel.

    Returns:
        The values.
    """
    comptime if x._has_input_fusion:
        return x._fused_load[width](tensor_index[x.rank](n, at, channel)).cast[
            DType.float32
        ]()
    else:
        return (
            x.unsafe_ptr()
            .unsafe_load[width=width](
                pixel_offset(problem, n, at) * problem.channels + channel
            )
            .cast[DType.float32]()
        )


@always_inline
def pixel_offset(problem: ConvProblem, n: Int, at: IndexList[SPATIAL]) -> Int:
    """The row-major offset, in pixels, of an input pixel.

    Args:
        problem: The convolution.
        n: The image.
        at: The pixel; may lie outside the image.

    Returns:
        The offset.
    """
    return (
        (n * problem.input[0] + at[0]) * problem.input[1] + at[1]
    ) * problem.input[2] + at[2]


@always_inline
def input_elements(problem: ConvProblem) -> Int:
    """Elements of the activation.

    Args:
        problem: The convolution.

    Returns:
        `N * D * H * W * C`.
    """
    return (
        problem.batch
        * problem.input[0]
        * problem.input[1]
        * problem.input[2]
        * problem.channels
    )


@always_inline
def zero(to: Writes[DType.float32], count: Int):
    """Zeroes at least `count` values, in whole `COPY`s: the excess is
    overwritten by the next run, or lies in the row's slack."""
    for i in range(0, count, COPY):
        to.unsafe_store(i, SIMD[DType.float32, COPY](0))


@always_inline
def copy_memory[
    dtype: DType
](
    x: Reads[dtype],
    begin: Int,
    length: Int,
    to: Writes[DType.float32],
    count: Int,
):
    """Converts `x[begin : begin+count]`, in whole `COPY`s where the tensor of
    `length` elements reaches that far; the excess is as in `zero`."""
    var whole = count
    if begin + ceildiv(count, COPY) * COPY > length:
        whole = count // COPY * COPY
    for i in range(0, whole, COPY):
        to.unsafe_store(
            i, x.unsafe_load[width=COPY](begin + i).cast[DType.float32]()
        )
    for i in range(whole, count):
        to[unsafe_offset=i] = x[unsafe_offset=begin + i].cast[DType.float32]()


@always_inline
def copy_fused(
    x: ManagedTensorSlice,
    problem: ConvProblem,
    n: Int,
    at: IndexList[SPATIAL],
    channel: Int,
    to: Writes[DType.float32],
    count: Int,
):
    """Loads `count` channels of one pixel through the fused producer."""
    var whole = count // COPY * COPY
    for i in range(0, whole, COPY):
        to.unsafe_store(
            i, load_activation[COPY](x, problem, n, at, channel + i)
        )
    for i in range(whole, count):
        to[unsafe_offset=i] = load_activation[1](
            x, problem, n, at, channel + i
        )[0]


@always_inline
def _gather_span(
    x: ManagedTensorSlice,
    problem: ConvProblem,
    n: Int,
    at: IndexList[SPATIAL],
    begin: Int,
    end: Int,
    columns: Columns,
    to: Writes[DType.float32],
):
    """Gathers elements `[begin, end)` of one filter row's `S*C` inputs, which
    lie side by side in memory, zeroing those left and right of the image."""
    var channels = problem.channels
    var first = max(0, -at[2]) * channels
    var last = max(
        0, min(problem.filter[2], problem.input[2] - at[2]) * channels
    )
    var left = min(max(first, begin), end)
    var right = min(max(last, left), end)
    if left > begin:
        zero(to, left - begin)
    if right > left:
        copy_memory(
            operand(x),
            pixel_offset(problem, n, at) * channels + left,
            columns.elements,
            to.unsafe_offset(left - begin),
            right - left,
        )
    if end > right:
        zero(to.unsafe_offset(right - begin), end - right)


@always_inline
def _gather_taps(
    x: ManagedTensorSlice,
    problem: ConvProblem,
    group: Int,
    n: Int,
    at: IndexList[SPATIAL],
    begin: Int,
    end: Int,
    columns: Columns,
    to: Writes[DType.float32],
):
    """Gathers elements `[begin, end)` of one filter row's inputs tap by tap."""
    var channels = problem.group_channels()
    for s in range(begin // channels, ceildiv(end, channels)):
        var low = max(begin, s * channels)
        var high = min(end, (s + 1) * channels)
        var pixel = at
        pixel[2] += s * problem.dilation[2]
        var here = to.unsafe_offset(low - begin)
        if pixel[2] < 0 or pixel[2] >= problem.input[2]:
            zero(here, high - low)
            continue
        var channel = group * channels + low - s * channels
        comptime if x._has_input_fusion:
            copy_fused(x, problem, n, pixel, channel, here, high - low)
        else:
            copy_memory(
                operand(x),
                pixel_offset(problem, n, pixel) * problem.channels + channel,
                columns.elements,
                here,
                high - low,
            )


def is_adjacent(problem: ConvProblem) -> Bool:
    """Whether a filter row's taps lie side by side in memory.

    Args:
        problem: The convolution.

    Returns:
        Whether they do.
    """
    return problem.groups == 1 and (
        problem.dilation[2] == 1 or problem.filter[2] == 1
    )


@fieldwise_init
struct Columns(ImplicitlyCopyable, Movable):
    """Columns `[begin, end)` of the implicit im2col matrix, cut into segments:
    the inputs of one filter row, `S * C/groups` of them."""

    var begin: Int
    var end: Int
    var segment: Int
    var first_t: Int
    var first_r: Int
    var adjacent: Bool
    var elements: Int

    def __init__(out self, problem: ConvProblem, begin: Int, end: Int):
        """Finds the segment that `begin` lies in.

        Args:
            problem: The convolution.
            begin: The first column.
            end: The column behind the last.
        """
        self.begin = begin
        self.end = end
        self.segment = problem.filter[2] * problem.group_channels()
        self.first_t, self.first_r = divmod(
            begin // self.segment, problem.filter[1]
        )
        self.adjacent = is_adjacent(problem)
        self.elements = input_elements(problem)


@always_inline
def _gather_row(
    x: ManagedTensorSlice,
    problem: ConvProblem,
    group: Int,
    pixel: Pixel,
    columns: Columns,
    to: Writes[DType.float32],
):
    """Gathers the columns of one output pixel's row."""
    var origin = pixel.at * problem.stride - problem.pad_before
    var t = columns.first_t
    var r = columns.first_r
    var here = to
    # Column of the segment's first element, counted from `begin`.
    var start = (t * problem.filter[1] + r) * columns.segment - columns.begin
    var length = columns.end - columns.begin
    while start < length:
        var at = origin
        at[0] += t * problem.dilation[0]
        at[1] += r * problem.dilation[1]
        var low = max(0, -start)
        var high = min(columns.segment, length - start)
        if (
            at[0] < 0
            or at[0] >= problem.input[0]
            or at[1] < 0
            or at[1] >= problem.input[1]
        ):
            zero(here, high - low)
        else:
            comptime if x._has_input_fusion:
                _gather_taps(
                    x, problem, group, pixel.n, at, low, high, columns, here
                )
            else:
                if columns.adjacent:
                    _gather_span(
                        x, problem, pixel.n, at, low, high, columns, here
                    )
                else:
                    _gather_taps(
                        x, problem, group, pixel.n, at, low, high, columns, here
                    )
        here = here.unsafe_offset(high - low)
        start += columns.segment
        r += 1
        if r == problem.filter[1]:
            r = 0
            t += 1


def gather_rows(
    x: ManagedTensorSlice,
    problem: ConvProblem,
    group: Int,
    first: Int,
    rows: Int,
    columns: Columns,
    to: Writes[DType.float32],
    row_stride: Int,
):
    """Gathers a block of the implicit im2col matrix.

    Writes up to `COPY - 1` values behind each row, so rows need that slack.

    Args:
        x: The activation.
        problem: The convolution.
        group: The group.
        first: The first row, an output pixel.
        rows: How many rows.
        columns: Which columns.
        to: The block.
        row_stride: Elements between two rows of the block.
    """
    var pixel = Pixel(problem, first)
    for i in range(rows):
        _gather_row(
            x, problem, group, pixel, columns, to.unsafe_offset(i * row_stride)
        )
        pixel.advance(problem)
