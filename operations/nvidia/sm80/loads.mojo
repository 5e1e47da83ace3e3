"""How a thread brings its part of a slice to shared memory: the same chunk of
some pixels, and of some filters.

Products are counted through all taps, `tap * channels + channel`, so that a
slice may hold the ends and the beginnings of taps.
"""

from max.gpu import thread_idx
from std.sys.info import size_of
from std.utils import StaticTuple

from ...conv.access import ActivationSource
from ...conv.memory import Reads
from ..geometry import IMAGE, OUTSIDE, Position, spatial
from ..pipeline.async_copy import copy_chunk
from ..pipeline.chunks import CHUNK_BYTES, store_chunk, swizzled
from ..tma.copy import SharedAddress
from .geometry import WORD_BYTES, MmaGeometry
from .tile import ROW_BYTES, ROW_CHUNKS, MmaTile


struct SliceLoads[Source: ActivationSource, tile: MmaTile, whole: Bool](
    ImplicitlyCopyable, Movable
):
    """A thread's loads of a tile.

    Parameters:
        Source: The activation's type.
        tile: The tile.
        whole: Whether a group's channels are whole chunks, at addresses that
            are too.
    """

    comptime dtype = Self.Source.dtype
    comptime width = CHUNK_BYTES // size_of[Self.dtype]()
    """Elements of a chunk."""
    comptime slice = ROW_BYTES // size_of[Self.dtype]()
    """Products of a slice."""
    comptime lines = Self.tile.threads() // ROW_CHUNKS
    """Rows that all threads load at once."""
    comptime pixel_loads = Self.tile.pixels // Self.lines
    comptime filter_loads = Self.tile.filters // Self.lines
    comptime copies_pixels = Self.whole and not Self.Source.fused
    """Whether pixels are copied to shared memory, not loaded to registers."""
    comptime held = 0 if Self.copies_pixels else Self.pixel_loads
    comptime held_filters = 0 if Self.whole else Self.filter_loads
    comptime word = WORD_BYTES // size_of[Self.dtype]()
    """Elements of a word."""
    comptime has_words = (
        size_of[Self.dtype]() < WORD_BYTES
        and not Self.whole
        and not Self.Source.fused
    )
    """Whether it may load words where chunks are not whole."""
    comptime Chunk = SIMD[Self.dtype, Self.width]
    comptime Held = StaticTuple[Self.Chunk, Self.held + Self.held_filters]
    """Chunks in registers, on their way to shared memory."""

    var activation: Self.Source
    var filter: Reads[Self.dtype]
    """The tile's first."""
    var origins: StaticTuple[Position, Self.pixel_loads]
    """Of each pixel the position of the filter's first tap, or one from which
    no tap reaches the image."""
    var offsets: StaticTuple[Int, Self.pixel_loads]
    """Its elements in the activation, with the group's first channel."""
    var filters: Int32
    """Of the tile and behind it."""
    var channel: Int
    """The group's first."""

    @always_inline
    def __init__(
        out self,
        activation: Self.Source,
        filter: Reads[Self.dtype],
        geometry: MmaGeometry,
        *,
        pixel: Int,
        first: UInt32,
        group: UInt32,
    ):
        """Finds the thread's pixels.

        Args:
            activation: The activation.
            filter: All filters.
            geometry: The problem.
            pixel: The tile's first.
            first: The tile's first filter of its group.
            group: The tile's.
        """
        var general = geometry.general
        self.activation = activation
        var filters = general.group_filters.value
        self.filter = filter.unsafe_offset(
            Int(group * filters + first) * Int(general.depth)
        )
        self.filters = Int32(filters - first)
        self.channel = Int(group * general.group_channels.value)
        self.origins = StaticTuple[Position, Self.pixel_loads](
            fill=Position(OUTSIDE)
        )
        self.offsets = StaticTuple[Int, Self.pixel_loads](fill=0)
        var line = _own()[0]
        comptime for i in range(Self.pixel_loads):
            var at = pixel + Int(line) + i * Self.lines
            if at < general.pixels:
                comptime if not Self.Source.fused:
                    if geometry.in_place != 0:
                        # Any position inside: the offset is what counts.
                        self.origins[i] = Position(0)
                        self.offsets[i] = (
                            at * Int(general.channels) + self.channel
                        )
                        continue
                self.origins[i] = (
                    geometry.output(at) * general.stride - general.padding
                )
                self.offsets[i] = general.offset(self.origins[i]) + self.channel

    @always_inline
    def start(
        self, geometry: MmaGeometry, slice: Int32, stage: SharedAddress
    ) -> Self.Held:
        """Starts the copies of a slice, and loads what is not copied.

        Args:
            geometry: The problem.
            slice: Which.
            stage: Its shared memory.

        Returns:
            What `finish` writes to shared memory.
        """
        var general = geometry.general
        var line, chunk = _own()
        var k = UInt32(slice) * UInt32(Self.slice) + chunk * UInt32(Self.width)
        var exists = Int32(k) < general.depth
        var to = stage + swizzled[ROW_BYTES](line, chunk)
        comptime pitch = UInt32(Self.lines * ROW_BYTES)
        var held = Self.Held(fill=Self.Chunk(0))
        # Behind the last product there is no tap.
        var tap, c = general.group_channels.split(k if exists else 0)
        var shift = general.tap(tap)
        var delta = general.offset(shift) + Int(c)
        comptime for i in range(Self.pixel_loads):
            comptime if Self.whole:
                var at = self.origins[i] + shift
                var inside = exists and general.inside(at)
                comptime if Self.copies_pixels:
                    copy_chunk(
                        to + UInt32(i) * pitch,
                        self.activation.data().unsafe_offset(
                            self.offsets[i] + delta if inside else 0
                        ),
                        inside,
                    )
                else:
                    if inside:
                        held[i] = self.activation.load[Self.width](
                            Int(at[IMAGE]),
                            spatial(at),
                            self.channel + Int(c),
                            self.offsets[i] + delta,
                        )
            else:
                held[i] = self._gathered(geometry, i, k, c, shift, delta)
        var filters = to + UInt32(Self.tile.pixels * ROW_BYTES)
        comptime for i in range(Self.filter_loads):
            var row = line + UInt32(i * Self.lines)
            var there = exists and Int32(row) < self.filters
            var offset = Int(row) * Int(general.depth) + Int(k)
            comptime if Self.whole:
                copy_chunk(
                    filters + UInt32(i) * pitch,
                    self.filter.unsafe_offset(offset if there else 0),
                    there,
                )
            else:
                var left = general.depth - Int32(k) if there else Int32(0)
                comptime if Self.has_words:
                    if geometry.words != 0:
                        held[Self.held + i] = self._filter_words(offset, left)
                        continue
                comptime for j in range(Self.width):
                    if Int32(j) < left:
                        held[Self.held + i][j] = self.filter[
                            unsafe_offset=offset + j
                        ]
        return held

    @always_inline
    def _gathered(
        self,
        geometry: MmaGeometry,
        i: Int,
        k: UInt32,
        c: UInt32,
        shift: Position,
        delta: Int,
    ) -> Self.Chunk:
        """A chunk of a pixel, element by element, or word by word: of one tap,
        or of several."""
        var general = geometry.general
        comptime if Self.has_words:
            if geometry.words != 0:
                return self._gathered_words(geometry, i, k)
        var values = Self.Chunk(0)
        var channels = general.group_channels.value
        if c + UInt32(Self.width) <= channels:
            var at = self.origins[i] + shift
            if Int32(k) < general.depth and general.inside(at):
                comptime for j in range(Self.width):
                    values[j] = self._element(i, at, c + UInt32(j), delta + j)
            return values
        comptime for j in range(Self.width):
            if Int32(k) + Int32(j) < general.depth:
                var tap, channel = general.group_channels.split(k + UInt32(j))
                var there = general.tap(tap)
                var at = self.origins[i] + there
                if general.inside(at):
                    values[j] = self._element(
                        i, at, channel, general.offset(there) + Int(channel)
                    )
        return values

    @always_inline
    def _gathered_words(
        self, geometry: MmaGeometry, i: Int, k: UInt32
    ) -> Self.Chunk:
        """A chunk of a pixel whose words are each of one tap."""
        var general = geometry.general
        var values = Self.Chunk(0)
        comptime for j in range(0, Self.width, Self.word):
            if Int32(k) + Int32(j) < general.depth:
                var tap, c = general.group_channels.split(k + UInt32(j))
                var shift = general.tap(tap)
                var at = self.origins[i] + shift
                if general.inside(at):
                    values = values.insert[offset=j](
                        self.activation.data().unsafe_load[
                            width=Self.word, alignment=WORD_BYTES
                        ](self.offsets[i] + general.offset(shift) + Int(c))
                    )
        return values

    @always_inline
    def _filter_words(self, offset: Int, left: Int32) -> Self.Chunk:
        """A chunk of a filter, of which `left` elements exist: whole words."""
        var values = Self.Chunk(0)
        comptime for j in range(0, Self.width, Self.word):
            if Int32(j) < left:
                values = values.insert[offset=j](
                    self.filter.unsafe_load[
                        width=Self.word, alignment=WORD_BYTES
                    ](offset + j)
                )
        return values

    @always_inline
    def _element(
        self, i: Int, at: Position, channel: UInt32, delta: Int
    ) -> Scalar[Self.dtype]:
        """One element of a pixel."""
        return self.activation.load[1](
            Int(at[IMAGE]),
            spatial(at),
            self.channel + Int(channel),
            self.offsets[i] + delta,
        )[0]

    @always_inline
    def finish(self, held: Self.Held, stage: SharedAddress):
        """Writes to shared memory what was loaded to registers.

        Args:
            held: What `start` returned.
            stage: The slice's shared memory.
        """
        var line, chunk = _own()
        var to = stage + swizzled[ROW_BYTES](line, chunk)
        comptime pitch = UInt32(Self.lines * ROW_BYTES)
        comptime for i in range(Self.held):
            store_chunk[Self.dtype](to + UInt32(i) * pitch, held[i])
        var filters = to + UInt32(Self.tile.pixels * ROW_BYTES)
        comptime for i in range(Self.held_filters):
            store_chunk[Self.dtype](
                filters + UInt32(i) * pitch, held[Self.held + i]
            )


@always_inline
def _own() -> Tuple[UInt32, UInt32]:
    """The first row that a thread loads, and its chunk of every row."""
    return divmod(UInt32(thread_idx.x), UInt32(ROW_CHUNKS))
