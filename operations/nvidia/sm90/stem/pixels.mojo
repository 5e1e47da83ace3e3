"""The outputs of a thread of the Hopper stem kernel."""

from std.utils import IndexList

from ....conv.problem import SPATIAL
from ...limits import WARP
from .geometry import (
    GROUP_FILTERS,
    NO_QUAD,
    PART_FILTERS,
    StemGeometry,
    StemTile,
)


@fieldwise_init
struct StemFilters(TrivialRegisterPassable):
    """The filters of a thread's outputs: `GROUP_FILTERS` neighbours of every
    `PART_FILTERS`."""

    var tile: UInt32
    """The multiply's first."""
    var first: UInt32
    """The thread's first."""
    var filters: UInt32
    """Of the problem."""
    var together: Bool
    """Whether neighbours are stored at once."""

    @always_inline
    def __init__(
        out self, geometry: StemGeometry, tile_filter: UInt32, thread: UInt32
    ):
        """Finds the thread's filters.

        Args:
            geometry: The problem.
            tile_filter: The multiply's first filter.
            thread: Of the warpgroup.
        """
        self.tile = tile_filter
        self.first = tile_filter + (thread % 4) * GROUP_FILTERS
        self.filters = geometry.filters
        self.together = geometry.filters % GROUP_FILTERS == 0

    @always_inline
    def exists(self, further: Int) -> Bool:
        """Whether a filter is one of the problem.

        Args:
            further: Counted from the thread's first.
        """
        return self.first + UInt32(further) < self.filters

    @always_inline
    def safe(self, part: Int) -> Int:
        """A part's first filter, or filter 0 if there is no such part.

        Args:
            part: Which part.
        """
        var filter = self.first + UInt32(part * PART_FILTERS)
        return Int(filter) if filter < self.filters else 0


@fieldwise_init
struct StemPixel(TrivialRegisterPassable):
    """An output pixel of a tile, if it exists."""

    var row: UInt32
    var column: UInt32
    var exists: Bool
    var quad: UInt32
    """Bytes from the start of the stage to its first quad, or `NO_QUAD`."""
    var element: Int
    """From the tile's first output element to the pixel's."""

    @always_inline
    def __init__(
        out self,
        geometry: StemGeometry,
        tile: StemTile,
        index: UInt32,
    ):
        """Finds a pixel.

        Args:
            geometry: The problem.
            tile: Its tile.
            index: Of the tile; may be beyond its end.
        """
        self.row, self.column = geometry.tile_columns.split(index)
        self.exists = self.row < tile.rows and self.column < tile.columns
        self.quad = (
            self.row * geometry.row_bytes
            + self.column * geometry.column_bytes if self.exists else NO_QUAD
        )
        var pixels = self.row * geometry.out_columns + self.column
        self.element = Int(pixels) * Int(geometry.filters)

    @always_inline
    def position(self, tile: StemTile) -> IndexList[SPATIAL]:
        """The pixel's place in its image; the tile's first pixel's if it does
        not exist.

        Args:
            tile: Its tile.
        """
        return IndexList[SPATIAL](
            Int(tile.plane),
            Int(tile.row + (self.row if self.exists else 0)),
            Int(tile.column + (self.column if self.exists else 0)),
        )


struct StemRows(TrivialRegisterPassable):
    """The two pixels of a thread's accumulators, 8 rows of the multiply apart.
    """

    var tile: StemTile
    var first_output: Int
    """The element that the tile's outputs begin with."""
    var first: UInt32
    """The warp's first pixel, of the tile."""
    var low: StemPixel
    var high: StemPixel

    @always_inline
    def __init__(
        out self,
        geometry: StemGeometry,
        tile: StemTile,
        first_output: Int,
        first: UInt32,
        thread: UInt32,
    ):
        """Finds the thread's pixels.

        Args:
            geometry: The problem.
            tile: Their tile.
            first_output: The element that the tile's outputs begin with.
            first: The first pixel of the multiply.
            thread: Of the warpgroup.
        """
        var warp, lane = divmod(thread, UInt32(WARP))
        self.tile = tile
        self.first_output = first_output
        self.first = first + warp * 16
        var index = self.first + lane // 4
        self.low = StemPixel(geometry, tile, index)
        self.high = StemPixel(geometry, tile, index + 8)

    @always_inline
    def pixel[half: Int](self) -> StemPixel:
        """One of the pixels.

        Parameters:
            half: 0 for the low one, 1 for the high one.
        """
        comptime if half == 0:
            return self.low
        return self.high

    @always_inline
    def element[half: Int](self) -> Int:
        """The first output element of one of the pixels; the tile's first if it
        does not exist.

        Parameters:
            half: 0 for the low one, 1 for the high one.
        """
        var pixel = self.pixel[half]()
        return self.first_output + (pixel.element if pixel.exists else 0)
