"""Groups that share a panel, multiplied as one group of all their channels: by a
block-diagonal panel, in which zeros stand where a filter meets the channels of
other groups.

It multiplies 16 / width times as much, but whole chunks, which the unit does faster
than vectors multiply the products alone.
"""

from std.collections import Optional
from std.math import iota

from ...conv.fields import PANEL
from ...conv.memory import Reads, Writes
from ...conv.panels import PanelLayout
from ...conv.problem import ConvProblem
from .mma import WORD, DotUnit, Sums

comptime _Words = SIMD[DType.uint32, PANEL]


@fieldwise_init
struct BlockDiagonal(ImplicitlyCopyable, Movable):
    """Packed panels that groups share, and what they are multiplied as."""

    var width: Int
    """Channels and filters of a group."""
    var packed: PanelLayout
    """Of the panels that groups share."""
    var panel: PanelLayout
    """Of block-diagonal ones."""

    @staticmethod
    def of[
        U: DotUnit
    ](problem: ConvProblem, dtype: DType) -> Optional[BlockDiagonal]:
        """The panels of a problem, or None where groups are multiplied one by
        one.

        Parameters:
            U: The instructions.

        Args:
            problem: The convolution.
            dtype: Of its activation and filter.
        """
        if not joins_groups[U](problem, dtype):
            return None
        return BlockDiagonal(
            problem.group_channels(),
            problem.panel_layout(dtype),
            multiplied_problem[U](problem, dtype).panel_layout(dtype),
        )

    @no_inline
    def write[dtype: DType](self, packed: Reads[dtype], to: Writes[dtype]):
        """Writes the block-diagonal panel of a packed one.

        Parameters:
            dtype: Of the filter.

        Args:
            packed: The panel, words of 4 bytes.
            to: Where to, `panel.elements()`.
        """
        var words = self.width // self.packed.interleaved
        var groups = PANEL // self.width
        var group = iota[DType.uint32, PANEL]() // UInt32(self.width)
        var taps = self.packed.products // self.width
        var source = packed.unsafe_bitcast[UInt32]()
        var row = to.unsafe_bitcast[UInt32]()
        var row_words = self.panel.row_depth // self.panel.interleaved
        for _ in range(self.panel.rows):
            var target = row
            for _ in range(taps):
                for word in range(words):
                    var filters = source.unsafe_load[width=PANEL, alignment=1]()
                    source = source.unsafe_offset(PANEL)
                    for g in range(groups):
                        target.unsafe_store[alignment=1](
                            (g * words + word) * PANEL,
                            group.eq(_Words(UInt32(g))).select(
                                filters, _Words(0)
                            ),
                        )
                target = target.unsafe_offset(groups * words * PANEL)
            for word in range(taps * groups * words, row_words):
                row.unsafe_store[alignment=1](word * PANEL, _Words(0))
            row = row.unsafe_offset(row_words * PANEL)

    def mask[
        dtype: DType
    ](self, rows: Reads[dtype], count: Int, group: Int, to: Writes[dtype]):
        """Copies rows of the implicit im2col matrix with zeros for the channels
        of other groups.

        Parameters:
            dtype: Of the activation.

        Args:
            rows: The rows, whole words of 16 channels.
            count: How many elements, of all rows.
            group: The group whose channels are copied.
            to: Where to.
        """
        for i in range(0, count, PANEL):
            for c in range(PANEL):
                to[unsafe_offset=i + c] = rows[
                    unsafe_offset=i + c
                ] if c // self.width == group else Scalar[dtype](0)

    def take(self, group: Int, rows: Int, of: Sums, to: Sums):
        """Copies the sums of a group's filters.

        Args:
            group: The group, of those that share the panel.
            rows: Pixels.
            of: Sums of all filters.
            to: Where to.
        """
        for i in range(rows):
            for lane in range(group * self.width, (group + 1) * self.width):
                to.elements[unsafe_offset=i * to.stride + lane] = of.elements[
                    unsafe_offset=i * of.stride + lane
                ]


def joins_groups[U: DotUnit](problem: ConvProblem, dtype: DType) -> Bool:
    """Whether groups that share a panel are multiplied as one.

    Parameters:
        U: The instructions.

    Args:
        problem: The convolution.
        dtype: Of its activation and filter.
    """
    return problem.panel_groups() > 1 and U.joins_groups(dtype)


def multiplied_problem[
    U: DotUnit
](problem: ConvProblem, dtype: DType) -> ConvProblem:
    """A problem as the unit multiplies it: groups that share a panel are one, if
    it joins them.

    Parameters:
        U: The instructions.

    Args:
        problem: The convolution.
        dtype: Of its activation and filter.
    """
    var multiplied = problem
    if joins_groups[U](problem, dtype):
        multiplied.groups = problem.packed_groups()
    return multiplied
