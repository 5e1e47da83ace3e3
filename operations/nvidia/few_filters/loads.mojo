"""How a block's threads bring the filters and the slices of windows to shared
memory: chunks of 16 bytes, zeros beside the image and behind the channels."""

from max.gpu import block_dim, thread_idx
from std.sys.info import size_of

from ...conv.access import ActivationSource
from ...conv.memory import Reads
from ..pipeline.async_copy import copy_chunk
from ..pipeline.chunks import CHUNK_BYTES
from ..tma.copy import SharedAddress
from .geometry import TilePlace, WindowGeometry


@always_inline
def load_filters[
    dtype: DType, //, count: Int
](filter: Reads[dtype], geometry: WindowGeometry, to: SharedAddress):
    """Starts the copies of all filters: `[taps][count][channels]`, zeros where
    there is no filter or channel.

    Parameters:
        dtype: Of an element.
        count: Filters of the tile.

    Args:
        filter: `[K, R, S, C]`.
        geometry: The problem.
        to: Where to.
    """
    comptime width = CHUNK_BYTES // size_of[dtype]()
    var general = geometry.general
    var taps = general.rows.value * general.columns.value
    var channels = general.group_channels.value
    var total = UInt32(count) * taps * geometry.filter_chunks.value
    for index in range(UInt32(thread_idx.x), total, UInt32(block_dim.x)):
        var rest, chunk = geometry.filter_chunks.split(index)
        var k, tap = divmod(rest, taps)
        var exists = (
            k < general.group_filters.value and chunk < geometry.pixel_chunks
        )
        var offset = (k * taps + tap) * channels + chunk * UInt32(width)
        copy_chunk(
            to
            + (tap * UInt32(count) + k) * geometry.filter_pitch
            + chunk * CHUNK_BYTES,
            filter.unsafe_offset(Int(offset) if exists else 0),
            exists,
        )


struct WindowLoads[Source: ActivationSource](ImplicitlyCopyable, Movable):
    """A thread's loads: the same chunk of some pixels of every window.

    Parameters:
        Source: The activation's type.
    """

    comptime width = CHUNK_BYTES // size_of[Self.Source.dtype]()
    """Elements of a chunk."""

    var activation: Reads[Self.Source.dtype]
    var chunk: UInt32
    """Of a slice."""
    var row: UInt32
    """The thread's first pixel of a window; beyond it if it has none."""
    var column: UInt32
    var next_rows: UInt32
    """From a pixel to the thread's next."""
    var next_columns: UInt32

    @always_inline
    def __init__(out self, activation: Self.Source, geometry: WindowGeometry):
        """Shares a window's chunks among the threads.

        Args:
            activation: The activation, in memory.
            geometry: The problem.
        """
        self.activation = activation.data()
        var lines = UInt32(block_dim.x) // geometry.chunks
        var line, chunk = divmod(UInt32(thread_idx.x), geometry.chunks)
        self.chunk = chunk
        self.row, self.column = divmod(line, geometry.window_columns)
        self.next_rows, self.next_columns = divmod(
            lines, geometry.window_columns
        )
        # Threads that are left over.
        if line >= lines:
            self.row = geometry.window_rows

    @always_inline
    def start(
        self,
        geometry: WindowGeometry,
        tile: Int32,
        slice: Int32,
        stage: SharedAddress,
    ):
        """Starts the copies of a slice of a tile's window.

        Args:
            geometry: The problem.
            tile: Which.
            slice: Of the channels.
            stage: Where to.
        """
        var place = TilePlace.of(geometry, tile)
        var top = place.row * geometry.row_stride - geometry.general.padding[1]
        var left = (
            place.column * geometry.column_stride - geometry.general.padding[2]
        )
        var channel = UInt32(slice) * geometry.chunks + self.chunk
        var exists = channel < geometry.pixel_chunks
        var channels = UInt64(UInt32(geometry.general.channels))
        var image = self.activation.unsafe_offset(
            Int(place.image)
            * Int(geometry.height)
            * Int(geometry.width)
            * Int(channels)
        )
        var first = UInt64(channel) * UInt64(Self.width)
        var to = stage + self.chunk * CHUNK_BYTES
        var row = self.row
        var column = self.column
        while row < geometry.window_rows:
            var y = top + Int32(row)
            var x = left + Int32(column)
            var inside = (
                exists
                and UInt32(y) < UInt32(geometry.height)
                and UInt32(x) < UInt32(geometry.width)
            )
            var pixel = UInt32(y * geometry.width + x)
            var offset = UInt64(pixel) * channels + first
            copy_chunk(
                to + row * geometry.row_bytes + geometry.column_bytes(column),
                image.unsafe_offset(Int(offset) if inside else 0),
                inside,
            )
            row += self.next_rows
            column += self.next_columns
            if column >= geometry.window_columns:
                column -= geometry.window_columns
                row += 1
