"""Where a thread's values of a tile lie: all that a generation tells visitors
about its accumulators.

What stores a part of a tile together is a consumer: a warpgroup. It goes
through its part sub-tile by sub-tile, and in a sub-tile fragment by fragment,
of which each thread has a vector of values.
"""

from ...conv.access import OutputTarget
from ...conv.memory import element_bytes
from ..im2col.tiles import OutputShape, TileGeometry
from ..tma.copy import SharedAddress

comptime KEPT_FILTERS = 8
"""Filters whose operands and sums a thread keeps for a whole tile, at most."""


@fieldwise_init
struct VisitLayout(ImplicitlyCopyable, Movable):
    """How a consumer's values are cut up, for a visitor to compile to."""

    var pixels: Int
    """Of a sub-tile."""
    var filters: Int
    """Of a sub-tile."""
    var filter_subtiles: Int
    """Sub-tiles along the filters of a consumer's part of a tile."""
    var threads: Int
    """Of a consumer."""
    var thread_filters: Int
    """Filters of a sub-tile that a thread has values of."""
    var out_type: DType
    """Of output and residual."""
    var delayed: Bool
    """Whether a sub-tile's `postreduce` may come after the next one's
    `reduce`."""

    def values(self) -> Int:
        """Values of a sub-tile that one thread holds."""
        return self.pixels * self.filters // self.threads

    def out_bytes(self) -> Int:
        """Bytes of an element of the output."""
        return element_bytes(self.out_type)

    def keeps_filters(self) -> Bool:
        """Whether a thread has so few filters in all sub-tiles that it keeps
        what belongs to them for a whole tile."""
        return self.thread_filters * self.filter_subtiles <= KEPT_FILTERS

    def whole_pixels(self) -> Bool:
        """Whether a thread has all of a sub-tile's filters of one pixel."""
        return self.thread_filters == self.filters

    def buffers(self) -> Int:
        """Sub-tiles that are on their way through a visitor's shared memory:
        two take turns, so that none is overwritten while it is read, and three
        where a barrier comes one sub-tile late."""
        return 3 if self.delayed else 2


trait ResidualTile(TrivialRegisterPassable):
    """A sub-tile's residual, where a generation's loads have brought it."""

    def is_present(self) -> Bool:
        """Whether there is one."""
        ...

    def read[size: Int](self, group: UInt32) -> SIMD[DType.float32, size]:
        """The residual of a fragment, if it is present.

        Parameters:
            size: Values of the fragment.

        Args:
            group: Which fragment of the sub-tile, as the generation counts
                them.
        """
        ...


trait Fragments(TrivialRegisterPassable):
    """The values of one thread of a consumer: of which pixels and filters they
    are, and how they reach shared memory."""

    comptime layout: VisitLayout
    """How a consumer's part is cut up."""

    comptime Residual: ResidualTile
    """Where its residual lies."""

    def thread(self) -> UInt32:
        """The thread's number in its consumer."""
        ...

    def filter(self) -> UInt32:
        """The filter of the thread's first value, in the sub-tile."""
        ...

    def pixel(self) -> UInt32:
        """The pixel of the thread's first value, in the sub-tile."""
        ...

    @staticmethod
    def thread_filter(index: Int) -> Int:
        """One of the thread's filters, counted from its first.

        Args:
            index: Below `VisitLayout.thread_filters`.
        """
        ...

    @staticmethod
    def filter_index(value: Int) -> Int:
        """Which of the thread's filters a value is of.

        Args:
            value: Its index in the sub-tile.
        """
        ...

    @staticmethod
    def pixel_of(value: Int) -> Int:
        """The pixel of a value, counted from the thread's first.

        Args:
            value: Its index in the sub-tile.
        """
        ...

    @staticmethod
    def group_pixels(group: UInt32) -> UInt32:
        """By how many pixels a fragment lies behind the sub-tile's first.

        Args:
            group: Which fragment of the sub-tile, as the generation counts
                them.
        """
        ...

    @staticmethod
    def group_filters(group: UInt32) -> UInt32:
        """By how many filters a fragment lies behind the sub-tile's first.

        Args:
            group: Which fragment of the sub-tile, as the generation counts
                them.
        """
        ...

    def write[
        dtype: DType, size: Int
    ](
        self,
        buffer: SharedAddress,
        group: UInt32,
        values: SIMD[DType.float32, size],
    ):
        """Rounds a fragment and writes it to a sub-tile's buffer; all threads
        of the warp together.

        Parameters:
            dtype: Of the buffer's elements.
            size: Values of the fragment.

        Args:
            buffer: Where to.
            group: Which fragment of the sub-tile, as the generation counts
                them.
            values: The values.
        """
        ...

    def store_rows[
        Output: OutputTarget
    ](
        self,
        output: Output,
        shape: OutputShape,
        geometry: TileGeometry,
        buffer: SharedAddress,
        pixel: UInt32,
        filter: UInt32,
        filters: UInt32,
    ):
        """Stores the thread's share of a buffer that all threads have written,
        neighbouring filters of one pixel at a time; what lies beyond the output
        is dropped.

        Parameters:
            Output: The tensor.

        Args:
            output: The tensor.
            shape: Its shape.
            geometry: The problem.
            buffer: The sub-tile.
            pixel: The sub-tile's first pixel, counted along the traversal.
            filter: Its first filter, counted over all groups.
            filters: One beyond the last filter to store.
        """
        ...
