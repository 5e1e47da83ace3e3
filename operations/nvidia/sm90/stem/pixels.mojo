"""The outputs of a thread of the Hopper stem kernel."""

from std.utils import IndexList

from ....conv.problem import SPATIAL
from ...limits import WARP
from .geometry import StemGeometry, StemTile

comptime GROUP_FILTERS = 8
"""Neighbouring filters of a pixel that a thread stores."""

comptime PART_FILTERS = 4 * GROUP_FILTERS
"""Neighbouring filters of a pixel that four threads store."""


@fieldwise_init
struct StemFilters(TrivialRegisterPassable):
    """The filters of a thread's outputs: `GROUP_FILTERS` neighbours of every
    `PART_FILTERS`."""

    var first: UInt32
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
        self.first = tile_filter + (thread % 4) * GROUP_FILTERS
        self.filters = geometry.filters
        self.together = geometry.filters % GROUP_FILTERS == 0

    @always_inline
    def exist(self, part: Int) -> Bool:
        """Whether a part's filters are filters of the problem.

        Args:
            part: Which part.
        """
        return self.first + UInt32(part * PART_FILTERS) < self.filters

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
    """An output pixel; the tile's first if it does not exist."""

    var image: UInt32
    var plane: UInt32
    var row: UInt32
    var column: UInt32
    var exists: Bool

    @always_inline
    def position(self) -> IndexList[SPATIAL]:
        """The pixel's place in its image."""
        return IndexList[SPATIAL](
            Int(self.plane), Int(self.row), Int(self.column)
        )

    @always_inline
    def element(self, geometry: StemGeometry) -> Int:
        """The pixel's first element in the output."""
        var plane = Int(self.image) * Int(geometry.out_planes.value) + Int(
            self.plane
        )
        var line = plane * Int(geometry.out_rows) + Int(self.row)
        return (line * Int(geometry.out_columns) + Int(self.column)) * Int(
            geometry.filters
        )


struct StemRows(TrivialRegisterPassable):
    """The two pixels of a thread's accumulators, 8 rows of the multiply apart.
    """

    var low_quad: UInt32
    var high_quad: UInt32
    """Bytes from the start of the stage to the pixels' first quads."""
    var low: StemPixel
    var high: StemPixel

    @always_inline
    def __init__(
        out self,
        geometry: StemGeometry,
        tile: StemTile,
        first: UInt32,
        thread: UInt32,
    ):
        """Finds the thread's pixels.

        Args:
            geometry: The problem.
            tile: Their tile.
            first: The first pixel of the multiply.
            thread: Of the warpgroup.
        """
        var warp, lane = divmod(thread, UInt32(WARP))
        var index = first + warp * 16 + lane // 4
        self.low_quad, self.low = _pixel(geometry, tile, index)
        self.high_quad, self.high = _pixel(geometry, tile, index + 8)

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
def _pixel(
    geometry: StemGeometry, tile: StemTile, index: UInt32
) -> Tuple[UInt32, StemPixel]:
    """A tile's pixel: its first quad in the stage, and its place in the output.
    Beyond the tile's end it is the first pixel."""
    var row, column = geometry.tile_columns.split(index)
    var exists = (
        row < geometry.tile_rows
        and tile.row + row < geometry.out_rows
        and tile.column + column < geometry.out_columns
    )
    if not exists:
        row = 0
        column = 0
    var pixel = StemPixel(
        tile.image, tile.plane, tile.row + row, tile.column + column, exists
    )
    return geometry.pixel_offset(row, column), pixel
