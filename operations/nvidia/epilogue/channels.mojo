"""One value a filter: scales and biases as a thread's fragments need them."""

from std.collections import Optional
from std.sys.info import size_of

from ...conv.memory import Reads
from ..pipeline.chunks import CHUNK_BYTES
from .layout import KEPT_COLUMNS, KEPT_FILTERS, Fragments, VisitLayout
from .callbacks import Subtile, Visited

comptime ChannelState = SIMD[DType.float32, KEPT_FILTERS]
"""What a thread keeps of its filters, where it has few: those of each sub-tile
along the filters."""

comptime ColumnState = SIMD[DType.float32, KEPT_COLUMNS]
"""What it keeps of more filters, likewise (`VisitLayout.keeps_columns`)."""

comptime PAIR = 2
"""Filters of a sub-tile that a thread with few filters has, and values of each
filter that it has of a fragment otherwise."""

comptime GROUP_FILTERS = 4
"""Filters that a thread has of the smallest fragment, where it has many."""

comptime Pair = SIMD[DType.float32, PAIR]


def load_width[dtype: DType](layout: VisitLayout) -> Int:
    """Values that a thread with whole pixels loads at once: up to 16 bytes, and
    no more than the output's filters come in.

    Parameters:
        dtype: Of the values.

    Args:
        layout: How a consumer's values are cut up.
    """
    return CHUNK_BYTES // max(size_of[dtype](), layout.out_bytes())


struct ChannelVector[dtype: DType](TrivialRegisterPassable):
    """One value a filter, in device memory.

    Parameters:
        dtype: Of the values.
    """

    var data: Reads[Self.dtype]

    @always_inline
    def __init__(out self, data: Reads[Self.dtype]):
        """Values in device memory.

        Args:
            data: The first filter's.
        """
        self.data = data

    def refusal(
        self, name: StaticString, layout: VisitLayout
    ) -> Optional[String]:
        """Why the values cannot be read, or None.

        Args:
            name: What they are.
            layout: How a consumer's values are cut up.
        """
        if layout.keeps_filters() or not layout.whole_pixels():
            return None
        var bytes = load_width[Self.dtype](layout) * size_of[Self.dtype]()
        if Int(self.data) % bytes == 0:
            return None
        return String(
            t"{name}: its address {Int(self.data)} is no multiple of"
            t" {bytes} bytes"
        )

    @always_inline
    def _load[*, many: Bool](self, filter: UInt32, filters: UInt32) -> Float32:
        """A filter's value, 0 beyond the last.

        Parameters:
            many: Whether the thread loads more than `KEPT_FILTERS`.
        """
        comptime if not many:
            if filter < filters:
                return self.data[unsafe_offset=Int(filter)].cast[
                    DType.float32
                ]()
            return 0
        # Many loads behind branches would wait for each other; without
        # branches few take a register more, and 192x128 spills.
        var exists = filter < filters
        var value = self.data[unsafe_offset=Int(filter) if exists else 0]
        return value.cast[DType.float32]() if exists else 0

    @always_inline
    def begin[Values: Fragments](self, at: Visited[Values]) -> ChannelState:
        """Loads ahead what the thread will need, if that is little.

        Parameters:
            Values: The generation's.

        Args:
            at: The thread and its tile.
        """
        comptime if Values.layout.keeps_filters():
            return self._load_all[KEPT_FILTERS](at)
        else:
            return ChannelState(0)

    @always_inline
    def begin_columns[
        Values: Fragments
    ](self, at: Visited[Values]) -> ColumnState:
        """As `begin`, where the thread `keeps_columns`.

        Parameters:
            Values: The generation's.

        Args:
            at: The thread and its tile.
        """
        comptime if Values.layout.keeps_columns():
            return self._load_all[KEPT_COLUMNS](at)
        else:
            return ColumnState(0)

    @always_inline
    def _load_all[
        Values: Fragments, //, size: Int
    ](self, at: Visited[Values]) -> SIMD[DType.float32, size]:
        """The values of all of the thread's filters, sub-tile by sub-tile."""
        var state = SIMD[DType.float32, size](0)
        comptime layout = Values.layout
        comptime for part in range(layout.filter_subtiles):
            comptime for i in range(layout.thread_filters):
                comptime offset = (
                    part * layout.filters + Values.thread_filter(i)
                )
                comptime index = layout.thread_filters * part + i
                state[index] = self._load[many=size > KEPT_FILTERS](
                    at.tile.filter + at.place.filter() + UInt32(offset),
                    at.filter_end(),
                )
        return state

    @always_inline
    def values[
        Values: Fragments, //, size: Int
    ](
        self,
        state: ChannelState,
        at: Visited[Values],
        subtile: Subtile,
        group: UInt32,
    ) -> SIMD[DType.float32, size]:
        """The values that belong to a fragment.

        Parameters:
            Values: The generation's.
            size: Values of the fragment.

        Args:
            state: What `begin` returned.
            at: The thread and its tile.
            subtile: The sub-tile.
            group: Which fragment of the sub-tile, as the generation counts
                them.
        """
        comptime layout = Values.layout
        comptime if layout.keeps_filters():
            return self._kept[size](state, at, subtile)
        elif layout.whole_pixels():
            return self._of_pixel[size](at, subtile, group)
        # Each filter has two values of a fragment.
        var loaded = SIMD[DType.float32, size // PAIR](0)
        var first = at.filter(subtile) + at.place.filter()
        first += Values.group_filters(group)
        comptime for index in range(size // PAIR):
            comptime offset = Values.thread_filter(index)
            loaded[index] = self._load[many=True](
                first + UInt32(offset), at.filter_end()
            )
        var result = SIMD[DType.float32, size](0)
        comptime for i in range(size):
            comptime index = Values.filter_index(i)
            comptime assert index < size // PAIR
            result[i] = loaded[index]
        return result

    @always_inline
    def column_values[
        Values: Fragments, //, size: Int
    ](
        self,
        state: ColumnState,
        at: Visited[Values],
        subtile: Subtile,
        group: UInt32,
    ) -> SIMD[DType.float32, size]:
        """`values`, of what `begin_columns` has loaded.

        Parameters:
            Values: The generation's.
            size: Values of the fragment.

        Args:
            state: What `begin_columns` returned.
            at: The thread and its tile.
            subtile: The sub-tile.
            group: Which fragment of the sub-tile.
        """
        comptime filters = Values.layout.thread_filters
        comptime own = size // PAIR
        comptime groups = filters // own
        # Fragments are counted in those of the smallest size.
        comptime step = UInt32(own // GROUP_FILTERS)
        var kept = SIMD[DType.float32, own](0)
        comptime for part in range(Values.layout.filter_subtiles):
            comptime for g in range(groups):
                if subtile.part == UInt32(part) and group == UInt32(g) * step:
                    comptime for i in range(own):
                        kept[i] = state[part * filters + g * own + i]
        var result = SIMD[DType.float32, size](0)
        comptime for i in range(size):
            comptime index = Values.filter_index(i)
            result[i] = kept[index]
        return result

    @always_inline
    def _kept[
        Values: Fragments, //, size: Int
    ](self, state: ChannelState, at: Visited[Values], subtile: Subtile) -> SIMD[
        DType.float32, size
    ]:
        """`values`, of what `begin` has loaded."""
        comptime assert Values.layout.thread_filters == PAIR
        var pair = Pair(state[0], state[1])
        comptime for part in range(1, Values.layout.filter_subtiles):
            if subtile.part == UInt32(part):
                pair = Pair(state[PAIR * part], state[PAIR * part + 1])
        var result = SIMD[DType.float32, size](0)
        comptime for i in range(size):
            comptime index = Values.filter_index(i)
            result[i] = pair[index]
        return result

    @always_inline
    def _of_pixel[
        Values: Fragments, //, size: Int
    ](self, at: Visited[Values], subtile: Subtile, group: UInt32) -> SIMD[
        DType.float32, size
    ]:
        """`values`, of neighbouring filters: some at a time, or each by itself
        at the end; 0 beyond it."""
        comptime width = load_width[Self.dtype](Values.layout)
        var result = SIMD[DType.float32, size](0)
        var begin = at.filter(subtile) + Values.group_filters(group)
        var filters = at.filter_end()
        comptime for chunk in range(size // width):
            var first = begin + UInt32(chunk * width)
            if first + UInt32(width) <= filters:
                var loaded = self.data.unsafe_load[
                    width=width, alignment=width * size_of[Self.dtype]()
                ](Int(first))
                comptime for i in range(width):
                    result[chunk * width + i] = loaded[i].cast[DType.float32]()
            else:
                comptime for i in range(width):
                    if first + UInt32(i) < filters:
                        result[chunk * width + i] = self.data[
                            unsafe_offset=Int(first) + i
                        ].cast[DType.float32]()
        return result
