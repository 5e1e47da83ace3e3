"""Pooling on the CPU: lanes are channels, registers are pixels, as in a
depthwise convolution."""

from std.sys.info import size_of

from ...conv.access import MemoryActivation, OutputTarget
from ...conv.epilogue import Epilogue
from ...conv.memory import Reads, Writes
from ...conv.operands import Arguments
from ...conv.pooling import PoolProblem, Reduction
from ..config import LANES
from ..epilogue import TileStore
from ..pages import ask_for_large_pages
from ..pool import Pool
from .image_row import (
    COLUMNS,
    MAX_SPAN_FILTERS,
    ColumnTile,
    ImageRow,
    InputRow,
    Span,
)
from .launch import RowPlan, RowTasks, SpanKernel, choose_rows

comptime WIDTHS = [LANES, 4, 1]
"""Channels that are treated at once: as many as are left."""


@fieldwise_init
struct PoolSpans[average: Bool](ImplicitlyCopyable, SpanKernel):
    """The kernel's arithmetic.

    Parameters:
        average: Whether it is the mean, not the largest element.
    """

    comptime Values = Reduction[DType.float32, Self.average]
    """Every type's elements are float32 here: that holds them all."""

    var pooling: PoolProblem
    var share: Float32
    """The pooling's `share`."""

    def filters_at_once(self, filters: Int) -> Int:
        return MAX_SPAN_FILTERS

    def compute[
        dtype: DType
    ](self, row: ImageRow[dtype], span: Span, to: Writes[DType.float32]):
        var channel = span.begin
        comptime for width in WIDTHS:
            while channel + width <= span.end:
                self._channels[dtype, width](row, span, channel, to)
                channel += width

    @no_inline
    def _channels[
        dtype: DType, width: Int
    ](
        self,
        row: ImageRow[dtype],
        span: Span,
        channel: Int,
        to: Writes[DType.float32],
    ):
        """Computes all columns of neighbouring channels."""
        # A copy: as far as the compiler knows, a store may change an argument.
        var local = row
        var stride = span.filters()
        var results = to.unsafe_offset(channel - span.begin)
        if span.q_end - span.q < COLUMNS:
            for q in range(span.q, span.q_end):
                self._tile[dtype, width, 1, True](
                    local,
                    q,
                    channel,
                    results.unsafe_offset((q - span.q) * stride),
                    stride,
                )
            return
        var tile = ColumnTile(span)
        while tile.next(local, span):
            var at = results.unsafe_offset((tile.q - span.q) * stride)
            if tile.inside:
                self._tile[dtype, width, COLUMNS, False](
                    local, tile.q, channel, at, stride
                )
            else:
                self._tile[dtype, width, COLUMNS, True](
                    local, tile.q, channel, at, stride
                )

    @always_inline
    def _tile[
        dtype: DType, width: Int, columns: Int, checked: Bool
    ](
        self,
        row: ImageRow[dtype],
        q: Int,
        channel: Int,
        to: Writes[DType.float32],
        column_stride: Int,
    ):
        """Computes neighbouring pixels of neighbouring channels."""
        ref window = row.problem
        var held = Array[SIMD[DType.float32, width], columns](
            fill=Self.Values.neutral[width]()
        )
        for t in range(row.depth.begin, row.depth.end):
            for r in range(row.height.begin, row.height.end):
                var pixels = row.input(q, t, r)
                for s in range(window.filter[2]):
                    comptime for i in range(columns):
                        held[i] = _with_pixel[Self.average, checked](
                            held[i],
                            pixels,
                            s * window.dilation[2] + i * window.stride[2],
                            channel,
                        )
        comptime if Self.average:
            self._divide[columns](row, q, held)
        comptime for i in range(columns):
            to.unsafe_store(i * column_stride, held[i])

    @always_inline
    def _divide[
        columns: Int, width: Int
    ](
        self,
        row: ImageRow,
        q: Int,
        mut held: Array[SIMD[DType.float32, width], columns],
    ):
        """Divides sums by the taps that count."""
        if self.share != 0:
            comptime for i in range(columns):
                held[i] *= self.share
            return
        var rows = self.pooling.counted(0, row.plane) * self.pooling.counted(
            1, row.line
        )
        comptime for i in range(columns):
            held[i] *= 1 / Float32(rows * self.pooling.counted(2, q + i))


@always_inline
def _with_pixel[
    dtype: DType, width: Int, //, average: Bool, checked: Bool
](
    held: SIMD[DType.float32, width],
    row: InputRow[dtype],
    column: Int,
    channel: Int,
) -> SIMD[DType.float32, width]:
    """What is held with another pixel, if that lies inside the image."""
    comptime if checked:
        if not row.contains(column):
            return held
    return Reduction[DType.float32, average].combine(
        held, row.load[width, False](column, channel)
    )


def pool[
    dtype: DType, Output: OutputTarget, P: Pool, //, average: Bool
](
    mut threads: P,
    pooling: PoolProblem,
    input: Reads[dtype],
    output: Output,
) raises:
    """Pools.

    Parameters:
        dtype: Of the input.
        Output: How the output is reached.
        P: The threads' type.
        average: Whether means are wanted, not the largest elements.

    Args:
        threads: Where to run.
        pooling: The geometry, valid.
        input: `[N, D, H, W, C]`.
        output: `[N, Z, P, Q, C]`.

    Raises:
        If the threads refuse the work.
    """
    if not pooling.window.has_outputs():
        return
    ask_for_large_pages(
        output.addresses(),
        pooling.window.gemm_m()
        * pooling.window.filters
        * size_of[Output.dtype](),
    )
    _launch[average](
        threads,
        pooling,
        Arguments(
            MemoryActivation[dtype](input),
            input,
            Epilogue[dtype, Output.dtype].identity(),
            output,
        ),
    )


def _launch[
    average: Bool
](mut threads: Some[Pool], pooling: PoolProblem, arguments: Arguments) raises:
    """Runs the tasks; they point to the arguments, which outlive them."""
    ref window = pooling.window
    var rows = RowPlan(
        window,
        choose_rows(window, threads.threads(), unit=LANES),
        threads.threads(),
    )
    rows.schedule.run(
        RowTasks(
            PoolSpans[average](pooling, pooling.share()),
            rows,
            window,
            arguments.activation.data(),
            0,
            TileStore(arguments),
        ),
        threads,
    )
