"""A thread's values of a sub-tile, which are all filters of one pixel, between
registers and shared memory.

A buffer holds a row of filters a pixel, swizzled over the row's length.
"""

from std.sys.info import size_of

from ...conv.access import OutputTarget
from ..epilogue.layout import Fragments, ResidualTile, VisitLayout
from ..im2col.tiles import OutputShape, TileGeometry
from ..pipeline.barrier import Barrier
from ..pipeline.chunks import CHUNK_BYTES, load_chunk, store_chunk, swizzled
from ..tma.copy import SharedAddress


@fieldwise_init
struct PixelFragments[cut: VisitLayout](Fragments):
    """A thread of the epilogue: it has one pixel, as the lanes of tensor memory
    have it.

    Parameters:
        cut: How the epilogue's values are cut up.
    """

    comptime layout = Self.cut
    comptime Residual = BufferedResidual[Self.cut]

    var index: UInt32
    """Of the epilogue's threads, and of the pixel in the sub-tile."""

    @always_inline
    def thread(self) -> UInt32:
        return self.index

    @always_inline
    def filter(self) -> UInt32:
        return 0

    @always_inline
    def pixel(self) -> UInt32:
        return self.index

    @staticmethod
    def thread_filter(index: Int) -> Int:
        return index

    @staticmethod
    def filter_index(value: Int) -> Int:
        return value

    @staticmethod
    def pixel_of(value: Int) -> Int:
        return 0

    @staticmethod
    @always_inline
    def group_filters(group: UInt32) -> UInt32:
        """See `Fragments`; a sub-tile is one fragment."""
        return 0

    @staticmethod
    @always_inline
    def group_pixels(group: UInt32) -> UInt32:
        """See `Fragments`; a sub-tile is one fragment."""
        return 0

    @always_inline
    def chunk[
        dtype: DType
    ](self, buffer: SharedAddress, chunk: Int) -> SharedAddress:
        """Where 16 bytes of the thread's pixel lie.

        Parameters:
            dtype: Of the buffer's elements.

        Args:
            buffer: The sub-tile.
            chunk: Which.
        """
        comptime row_bytes = Self.cut.filters * size_of[dtype]()
        return buffer + swizzled[row_bytes](self.index, UInt32(chunk))

    @always_inline
    def write[
        dtype: DType, size: Int
    ](
        self,
        buffer: SharedAddress,
        group: UInt32,
        values: SIMD[DType.float32, size],
    ):
        comptime width = CHUNK_BYTES // size_of[dtype]()
        comptime for chunk in range(size // width):
            store_chunk(
                self.chunk[dtype](buffer, chunk),
                rounded_chunk[dtype, chunk](values),
            )

    @always_inline
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
        """See `Fragments`; neighbouring threads store neighbouring filters."""
        comptime width = CHUNK_BYTES // size_of[Output.dtype]()
        comptime chunks = Self.cut.filters // width
        comptime row_bytes = Self.cut.filters * size_of[Output.dtype]()
        for step in range(chunks):
            var index = UInt32(step * Self.cut.threads) + self.index
            var line, chunk = divmod(index, UInt32(chunks))
            var row = pixel + line
            var first = filter + chunk * UInt32(width)
            if row < geometry.pixels() and first < filters:
                var n, at = shape.index(row)
                output.store[width](
                    n,
                    at,
                    Int(first),
                    Int(row) * Int(geometry.filters) + Int(first),
                    rebind[SIMD[Output.dtype, width]](
                        load_chunk[Output.dtype](
                            buffer + swizzled[row_bytes](line, chunk)
                        )
                    ),
                )


@always_inline
def rounded_chunk[
    dtype: DType, chunk: Int, size: Int
](values: SIMD[DType.float32, size]) -> SIMD[
    dtype, CHUNK_BYTES // size_of[dtype]()
]:
    """16 bytes of rounded values.

    Parameters:
        dtype: To round to.
        chunk: Which 16 bytes.
        size: How many values there are.

    Args:
        values: All of them.
    """
    comptime width = CHUNK_BYTES // size_of[dtype]()
    var result = SIMD[DType.float32, width](0)
    comptime for i in range(width):
        result[i] = values[chunk * width + i]
    return result.cast[dtype]()


@fieldwise_init
struct BufferedResidual[cut: VisitLayout](ResidualTile):
    """A sub-tile's residual in its buffer, waited for when it is read.

    Parameters:
        cut: How the epilogue's values are cut up.
    """

    var present: Bool
    """Whether there is one."""
    var full: Barrier
    """That completes when it has come."""
    var parity: UInt32
    """Of the barrier's phase."""
    var buffer: SharedAddress
    var place: PixelFragments[Self.cut]

    @always_inline
    def is_present(self) -> Bool:
        return self.present

    @always_inline
    def read[size: Int](self, group: UInt32) -> SIMD[DType.float32, size]:
        comptime dtype = Self.cut.out_type
        comptime width = CHUNK_BYTES // size_of[dtype]()
        self.full.wait(self.parity)
        var result = SIMD[DType.float32, size](0)
        comptime for chunk in range(size // width):
            var c = load_chunk[dtype](
                self.place.chunk[dtype](self.buffer, chunk)
            ).cast[DType.float32]()
            comptime for i in range(width):
                result[chunk * width + i] = c[i]
        return result
