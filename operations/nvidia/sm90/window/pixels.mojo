"""What a thread of the Hopper window kernel has of a multiply: two pixels, and
some of their filters."""

from max.gpu.primitives.warp import shuffle_xor

from ...limits import WARP
from .geometry import TilePlace, WindowGeometry
from .registers import settled
from .tiling import neighbours


@always_inline
def _kept(number: UInt32, geometry: WindowGeometry) -> UInt32:
    """The same number, by way of an exchange with none: the assembler would
    compute it again for every tile."""
    return settled(shuffle_xor(number, 0), geometry.zero())


@fieldwise_init
struct WindowPixel(TrivialRegisterPassable):
    """An output pixel of a thread."""

    var filters: UInt32
    """From the thread's first one to the last one: 0 outside the image."""
    var index: UInt32
    """Counted over all images."""


@fieldwise_init
struct WindowPixels(TrivialRegisterPassable):
    """The two output pixels of a thread."""

    var upper: WindowPixel
    var lower: WindowPixel
    """8 rows of the multiply below."""

    @always_inline
    def of[half: Int](self) -> WindowPixel:
        """One of them.

        Parameters:
            half: 0 for the upper one, 1 for the lower one.
        """
        return self.upper if half == 0 else self.lower


struct WindowThread[columns: Int](TrivialRegisterPassable):
    """What a thread of a warpgroup has of each of its multiplies.

    Parameters:
        columns: Filters of a multiply.
    """

    var row: Int32
    """Of its upper pixel in the tile."""
    var column: Int32
    """The same along w."""
    var first: UInt32
    """Of its filters."""

    @always_inline
    def __init__(
        out self,
        geometry: WindowGeometry,
        row: Int32,
        column: Int32,
        thread: UInt32,
    ):
        """Finds it.

        Args:
            geometry: The problem.
            row: Of the warpgroup's first pixel in the tile.
            column: The same along w.
            thread: Of the warpgroup.
        """
        var warp, lane = divmod(Int32(thread), Int32(WARP))
        var own_row = row + warp * geometry.warp_rows
        var own_column = column + warp * geometry.warp_columns + lane // 4
        var run = UInt32(2)
        if geometry.together == 1:
            run = UInt32(neighbours(Self.columns))
        self.row = Int32(_kept(UInt32(own_row), geometry))
        self.column = Int32(_kept(UInt32(own_column), geometry))
        self.first = _kept(thread % 4 * run, geometry)

    @always_inline
    def pixels(
        self, geometry: WindowGeometry, place: TilePlace
    ) -> WindowPixels:
        """Its pixels of a tile.

        Args:
            geometry: The problem.
            place: Of the tile.
        """
        var row = place.row + self.row
        var column = place.column + self.column
        return WindowPixels(
            self._pixel(geometry, place.plane, row, column),
            self._pixel(
                geometry,
                place.plane,
                row + geometry.half_rows,
                column + geometry.half_columns,
            ),
        )

    @always_inline
    def _pixel(
        self,
        geometry: WindowGeometry,
        plane: Int32,
        row: Int32,
        column: Int32,
    ) -> WindowPixel:
        """A pixel, in the image or beside it."""
        var filters = geometry.filters.value
        var index = UInt32(
            (plane * geometry.rows + row) * geometry.columns + column
        )
        var exists = (
            row < geometry.rows
            and column < geometry.columns
            and self.first < filters
        )
        return WindowPixel(
            filters - self.first if exists else 0,
            index,
        )
