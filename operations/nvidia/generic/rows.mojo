"""The pixels of a tile, in shared memory, for the general kernels."""

from max.gpu import thread_idx
from std.sys.info import size_of

from ..geometry import OUTSIDE, GpuGeometry, Position

comptime THREADS = 256
"""Threads of a block."""

comptime Shared[dtype: DType] = Pointer[
    Scalar[dtype], MutUntrackedOrigin, address_space=AddressSpace.SHARED
]
"""Elements in a block's shared memory."""


@fieldwise_init
struct Rows[count: Int](TrivialRegisterPassable):
    """The pixels of a block's tile: for each its position in the output, the
    input position of the filter's first tap, and that position's offset.

    Parameters:
        count: How many.
    """

    var base: Shared[DType.uint8]
    """Of `bytes` bytes, aligned to 16."""

    @staticmethod
    def bytes() -> Int:
        """Shared memory of the rows."""
        return Self.count * (2 * size_of[Position]() + size_of[DType.int64]())

    @always_inline
    def _position(self, table: Int, row: Int) -> Shared[DType.int32]:
        comptime bytes = size_of[Position]()
        return self.base.unsafe_offset(
            (table * Self.count + row) * bytes
        ).unsafe_bitcast[Int32]()

    @always_inline
    def _offset(self, row: Int) -> Shared[DType.int64]:
        comptime tables = 2 * Self.count * size_of[Position]()
        return self.base.unsafe_offset(
            tables + row * size_of[DType.int64]()
        ).unsafe_bitcast[Int64]()

    @always_inline
    def fill(self, geometry: GpuGeometry, first: Int):
        """Writes all rows, one a thread.

        Args:
            geometry: The problem.
            first: The output pixel of the first row; may be beyond the last.
        """
        if Int(thread_idx.x) < Self.count:
            self._fill_row(
                geometry, Int(thread_idx.x), first + Int(thread_idx.x)
            )

    @always_inline
    def _fill_row(self, geometry: GpuGeometry, row: Int, pixel: Int):
        """Writes a row."""
        var at = Position(0)
        var origin = Position(OUTSIDE)
        if pixel < geometry.pixels:
            at = geometry.pixel(pixel)
            origin = at * geometry.stride - geometry.padding
        self._position(0, row).unsafe_store[alignment=16](0, at)
        self._position(1, row).unsafe_store[alignment=16](0, origin)
        self._offset(row).unsafe_store(0, Int64(geometry.offset(origin)))

    @always_inline
    def output(self, row: Int) -> Position:
        """The output pixel of a row.

        Args:
            row: Of the tile; the problem has it.
        """
        return self._position(0, row).unsafe_load[width=4, alignment=16](0)

    @always_inline
    def origin(self, row: Int) -> Position:
        """The input position of the filter's first tap.

        Args:
            row: Of the tile.
        """
        return self._position(1, row).unsafe_load[width=4, alignment=16](0)

    @always_inline
    def offset(self, row: Int) -> Int:
        """The offset of `origin` in the activation.

        Args:
            row: Of the tile.
        """
        return Int(self._offset(row).unsafe_load(0))
