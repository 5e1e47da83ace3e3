"""Filter layouts, and the packing of one into the kernels' own.

The CPU's kernels read packed filters: `[groups][panels]` of `PanelLayout`
(narrow groups share a panel, see `ConvProblem.panel_groups`), or
`[taps][channels]` where the convolution is depthwise. Nothing of it depends on
the machine, so that a packed filter may be stored and moved.
"""

from max.algorithm import sync_parallelize

from .memory import Reads, Writes
from .fields import LAYOUT_KRSC, LAYOUT_RSCF, PANEL
from .panels import PanelLayout
from .problem import ConvProblem


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
    problem: ConvProblem,
    layout: Int,
    source: Reads[dtype],
    packed: Writes[dtype],
) raises:
    """Packs a filter, on all threads.

    Parameters:
        dtype: The filter's type.

    Args:
        problem: The convolution.
        layout: The layout of `source`.
        source: The filter, `problem.filter_length(layout, dtype)` elements.
        packed: Where to, `problem.packed_length(dtype)` elements.
    """
    var strides = FilterStrides(layout, problem)
    if problem.is_depthwise():
        for tap in range(problem.taps()):
            for c in range(problem.channels):
                packed[unsafe_offset=tap * problem.channels + c] = source[
                    unsafe_offset=c * strides.filter + tap * strides.tap
                ]
        return

    def pack_panel(index: Int) raises {imm}:
        _pack_panel(problem, strides, index, source, packed)

    sync_parallelize(pack_panel, problem.packed_groups() * problem.panels())


def _pack_panel[
    dtype: DType
](
    problem: ConvProblem,
    strides: FilterStrides,
    index: Int,
    source: Reads[dtype],
    packed: Writes[dtype],
):
    """Packs panel `index`, counted over groups and their panels."""
    var layout = problem.panel_layout(dtype)
    var group, panel = divmod(index, problem.panels())
    var first = panel * PANEL
    var lanes = min(PANEL, problem.packed_filters() - first)
    var channels = problem.group_channels()
    var taps = problem.filter[2]
    var base = (group * problem.packed_filters() + first) * strides.filter
    var to = packed.unsafe_offset(index * layout.elements())
    for row in range(layout.rows):
        for s in range(taps):
            for c in range(channels):
                var from_here = source.unsafe_offset(
                    base + (row * taps + s) * strides.tap + c * strides.channel
                )
                var step = row * layout.row_depth + s * channels + c
                _pack_product(layout, strides, lanes, step, from_here, to)
        for step in range(layout.products, layout.row_depth):
            _pack_product(
                layout, strides, 0, row * layout.row_depth + step, source, to
            )
    if layout.has_sums():
        _pack_sums(layout, to)


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
    var to = panel.unsafe_offset(layout.offset(step, 0))
    if strides.filter == 1 and lanes == PANEL and layout.interleaved == 1:
        to.unsafe_store(source.unsafe_load[width=PANEL]())
        return
    for lane in range(PANEL):
        to[unsafe_offset=lane * layout.interleaved] = source[
            unsafe_offset=lane * strides.filter
        ] if lane < lanes else Scalar[dtype](0)
