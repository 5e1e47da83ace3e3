"""Filter layouts, and the packing of one into the kernels' own.

The CPU's kernels read packed filters: `[groups][panels]` of `PanelLayout`
(narrow groups share a panel, see `ConvProblem.panel_groups`), or
`[taps][channels]` where the convolution is depthwise. Nothing of it depends on
the machine, so that a packed filter may be stored and moved.
"""

from std.sys.info import size_of

from ..conv.fields import LAYOUT_KRSC, LAYOUT_RSCF, PANEL
from ..conv.memory import CACHE_LINE, Reads, Writes, bits_type
from ..conv.panels import PanelLayout
from ..conv.problem import ConvProblem
from .pool import Pool, Work, run_tasks
from .transpose import Matrices

comptime THREAD_ELEMENTS = 1 << 14
"""Elements of a filter for each thread that is woken to pack it."""


@fieldwise_init
struct FilterStrides(ImplicitlyCopyable, Movable):
    """Element strides of an unpacked filter by filter, tap and channel."""

    var filter: Int
    var tap: Int
    var channel: Int

    def __init__(out self, layout: Int, problem: ConvProblem):
        """The strides of a layout.

        Args:
            layout: `LAYOUT_KRSC`, `LAYOUT_RSCF` or `LAYOUT_FCRS`.
            problem: The convolution.
        """
        var channels = problem.group_channels()
        if layout == LAYOUT_KRSC:
            self.filter = problem.gemm_k()
            self.tap = channels
            self.channel = 1
        elif layout == LAYOUT_RSCF:
            self.filter = 1
            self.tap = channels * problem.filters
            self.channel = problem.filters
        else:
            self.filter = problem.gemm_k()
            self.tap = 1
            self.channel = problem.taps()


def pack_filter[
    dtype: DType
](
    pool: Some[Pool],
    problem: ConvProblem,
    layout: Int,
    source: Reads[dtype],
    packed: Writes[dtype],
) raises:
    """Packs a filter, on as many threads as it is worth waking.

    Parameters:
        dtype: The filter's type.

    Args:
        pool: The threads.
        problem: The convolution.
        layout: The layout of `source`.
        source: The filter, `problem.filter_length(layout, dtype)` elements.
        packed: Where to, `problem.packed_length(dtype)` elements.

    Raises:
        If the threads refuse the work.
    """
    var strides = FilterStrides(layout, problem)
    if problem.is_depthwise():
        for tap in range(problem.taps()):
            for c in range(problem.channels):
                packed[unsafe_offset=tap * problem.channels + c] = source[
                    unsafe_offset=c * strides.filter + tap * strides.tap
                ]
        return

    var work = _PanelWork(problem, strides, source, packed)
    var panels = problem.packed_groups() * problem.panels()
    var elements = problem.filters * problem.gemm_k()
    var workers = min(pool.threads(), panels, elements // THREAD_ELEMENTS)
    run_tasks(pool, work, panels, workers)


@fieldwise_init
struct _PanelWork[dtype: DType](Work):
    """The panels of a filter, a task each.

    Parameters:
        dtype: The filter's type.
    """

    var problem: ConvProblem
    var strides: FilterStrides
    var source: Reads[Self.dtype]
    var packed: Writes[Self.dtype]

    def run(self, worker: Int, task: Int):
        """See `Work`: packs a panel, counted over groups and their panels."""
        ref problem = self.problem
        var layout = problem.panel_layout(Self.dtype)
        var group, panel = divmod(task, problem.panels())
        var first = panel * PANEL
        var lanes = min(PANEL, problem.packed_filters() - first)
        var filter = group * problem.packed_filters() + first
        var source = self.source.unsafe_offset(filter * self.strides.filter)
        var to = self.packed.unsafe_offset(task * layout.elements())
        if lanes == PANEL and self._lies_as_words(layout):
            _transpose_words(layout, source, to)
        else:
            self._pack_products(layout, lanes, source, to)
        if layout.has_sums():
            _pack_sums(layout, to)

    def _lies_as_words(self, layout: PanelLayout) -> Bool:
        """Whether each filter's products lie in memory in the panel's order, in
        whole words of 4 bytes."""
        var in_order = self.strides.channel == 1 and (
            self.problem.taps() == 1
            or self.strides.tap == self.problem.group_channels()
        )
        return (
            in_order
            and layout.row_depth == layout.products
            and layout.interleaved * size_of[Self.dtype]()
            == size_of[DType.uint32]()
        )

    def _pack_products(
        self,
        layout: PanelLayout,
        lanes: Int,
        source: Reads[Self.dtype],
        to: Writes[Self.dtype],
    ):
        """Packs a panel of `lanes` filters product by product."""
        ref strides = self.strides
        var channels = self.problem.group_channels()
        var taps = self.problem.filter[2]
        for row in range(layout.rows):
            for s in range(taps):
                for c in range(channels):
                    var tap = (row * taps + s) * strides.tap
                    var step = row * layout.row_depth + s * channels + c
                    _pack_product(
                        layout,
                        strides,
                        lanes,
                        step,
                        source.unsafe_offset(tap + c * strides.channel),
                        to,
                    )
            for step in range(layout.products, layout.row_depth):
                _pack_product(
                    layout,
                    strides,
                    0,
                    row * layout.row_depth + step,
                    source,
                    to,
                )


def _transpose_words[
    dtype: DType
](layout: PanelLayout, source: Reads[dtype], panel: Writes[dtype]):
    """Packs a whole panel whose filters lie as words in its order: `[PANEL]
    [words]` becomes `[words][PANEL]`."""
    var words = layout.depth() // layout.interleaved
    var matrices = Matrices[DType.uint32](
        source.unsafe_bitcast[UInt32](),
        panel.unsafe_bitcast[UInt32](),
        batch=1,
        rows=PANEL,
        columns=words,
    )
    comptime line = CACHE_LINE // size_of[DType.uint32]()
    comptime assert line == PANEL
    for word in range(0, words, line):
        var columns = min(line, words - word)
        if columns == line:
            matrices.transpose_block[False](0, 0, word, line, line)
        else:
            matrices.transpose_block[True](0, 0, word, PANEL, columns)


def _pack_sums(layout: PanelLayout, panel: Writes):
    """Adds up each filter of a packed panel of 8 bits."""
    var elements = panel.unsafe_bitcast[Int8]()
    var sums = elements.unsafe_offset(layout.sums_offset())
    for lane in range(PANEL):
        var total = Int32(0)
        for step in range(layout.depth()):
            total += Int32(elements[unsafe_offset=layout.offset(step, lane)])
        sums.unsafe_bitcast[Int32]().unsafe_store[alignment=1](lane, total)


@always_inline
def _pack_product[
    dtype: DType
](
    layout: PanelLayout,
    strides: FilterStrides,
    lanes: Int,
    step: Int,
    source: Reads[dtype],
    panel: Writes[dtype],
):
    """Packs a product of `lanes` filters, and zeros for the others."""
    comptime Bits = Scalar[bits_type(dtype)]
    var elements = source.unsafe_bitcast[Bits]()
    var to = panel.unsafe_bitcast[Bits]().unsafe_offset(layout.offset(step, 0))
    if strides.filter == 1 and lanes == PANEL and layout.interleaved == 1:
        to.unsafe_store(elements.unsafe_load[width=PANEL]())
        return
    for lane in range(PANEL):
        to[unsafe_offset=lane * layout.interleaved] = elements[
            unsafe_offset=lane * strides.filter
        ] if lane < lanes else Bits(0)
