"""One value a filter: scales and biases as a thread's fragments need them."""

from std.collections import Optional
from std.sys.info import size_of

from max.gpu.primitives.warp import shuffle_idx

from ...conv.memory import Reads
from ..limits import WARP
from ..pipeline.chunks import CHUNK_BYTES
from .layout import KEPT_FILTERS, Fragments, VisitLayout
from .callbacks import Subtile, Visited

comptime ChannelState = SIMD[DType.float32, KEPT_FILTERS]
"""What a thread keeps of each sub-tile along the filters: of its own filters
where it has few, otherwise of every `WARP`th one from its lane's on."""

comptime PAIR = 2
"""Filters of a sub-tile that a thread keeps something of, and values of each
filter that a thread with many has of a fragment."""

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
            many: Whether the thread has many filters.
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
        var state = ChannelState(0)
        comptime layout = Values.layout
        comptime if not layout.whole_pixels():
            comptime few = layout.keeps_filters()
            var first = at.tile.filter
            first += at.place.filter() if few else at.place.thread() % WARP
            comptime for part in range(layout.filter_subtiles):
                comptime for i in range(PAIR):
                    comptime offset = Values.thread_filter(i) if few else (
                        i * WARP
                    )
                    state[PAIR * part + i] = self._load[many=not few](
                        first + UInt32(part * layout.filters + offset),
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
        comptime if layout.whole_pixels():
            return self._of_pixel[size](at, subtile, group)
        var pair = Pair(state[0], state[1])
        comptime for part in range(1, layout.filter_subtiles):
            if subtile.part == UInt32(part):
                pair = Pair(state[PAIR * part], state[PAIR * part + 1])
        comptime if layout.keeps_filters():
            comptime assert layout.thread_filters == PAIR
            return _spread[Values, PAIR, size](pair)
        else:
            return _spread[Values, size // PAIR, size](
                _of_lanes[size // PAIR](pair, at, group)
            )

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


@always_inline
def _spread[
    Values: Fragments, own: Int, size: Int
](filters: SIMD[DType.float32, own]) -> SIMD[DType.float32, size]:
    """The values of a fragment, from those of its filters that the thread has.

    Parameters:
        Values: The generation's.
        own: How many the thread has.
        size: Values of the fragment.

    Args:
        filters: Their values.
    """
    var result = SIMD[DType.float32, size](0)
    comptime for i in range(size):
        comptime index = Values.filter_index(i)
        comptime assert index < own
        result[i] = filters[index]
    return result


@always_inline
def _of_lanes[
    Values: Fragments, //, own: Int
](pair: Pair, at: Visited[Values], group: UInt32) -> SIMD[DType.float32, own]:
    """The values of a thread's filters of a fragment, of what the lanes of its
    warp keep of a sub-tile; all of them together. Loads of its own, two bytes
    each, would take longer than a short launch's multiplies.

    Parameters:
        Values: The generation's.
        own: The thread's filters of the fragment.

    Args:
        pair: What this lane keeps.
        at: The thread and its tile.
        group: Which fragment of the sub-tile.
    """
    comptime assert Values.layout.filters == PAIR * WARP
    var result = SIMD[DType.float32, own](0)
    comptime for index in range(own):
        comptime offset = UInt32(Values.thread_filter(index))
        # The lane's own offset does not lead into the other half.
        var filter = Values.group_filters(group) + offset
        result[index] = shuffle_idx(
            pair[1] if filter >= WARP else pair[0],
            (filter + at.place.filter()) % WARP,
        )
    return result
