"""The tile of a block of the dp4a kernel, which filters and pixels a block
computes, and what a thread holds of them."""

from std.sys.info import size_of

from ...conv.fields import INTERLEAVED
from ...conv.tile_maps import TileMap

comptime VECTOR = 4
"""Words of 4 channels that an access of 16 bytes has."""


@fieldwise_init
struct Dp4aTile(Equatable, ImplicitlyCopyable, Movable):
    """A tile of filters by pixels, whose grid is that of `TileMap`.

    Shared memory holds a step's filters column-major, `[words, filters]`, and
    behind them its pixels row-major, `[words, pixels]`, of words of 4 channels
    each.
    """

    var filters: Int
    """Of the tile: tile_M."""
    var pixels: Int
    """The same: tile_N."""
    var channels: Int
    """Of a step: tile_K."""
    var thread_filters: Int
    """Of a thread, `VECTOR` neighbours here and there."""
    var thread_pixels: Int
    """The same of its pixels."""

    @always_inline
    def map(self) -> TileMap:
        """The outputs of its blocks."""
        return TileMap(self.filters, self.pixels, self.channels)

    def grid(self, pixels: Int, filters: Int) -> Tuple[Int, Int]:
        """The blocks along x and y.

        Args:
            pixels: Of the output, `N * P * Q`.
            filters: Of the problem, K.
        """
        var grid = self.map().grid(pixels, filters)
        return grid[0], grid[1]

    @always_inline
    def first_pixel(self, x: Int) -> Int:
        """The first pixel of a block.

        Args:
            x: The block's index along x.
        """
        return self.map().first_column(x)

    @always_inline
    def first_filter(self, y: Int) -> Int:
        """The first filter of a block.

        Args:
            y: The block's index along y.
        """
        return self.map().first_filter(y)

    @always_inline
    def steps(self, channels: Int) -> Int:
        """Steps of a tap.

        Args:
            channels: Of the problem, C.
        """
        return self.map().steps(channels)

    @always_inline
    def shared_filter(self, word: Int, filter: Int) -> Int:
        """The words of a step in front of a filter's.

        Args:
            word: Of the filter.
            filter: In the tile.
        """
        return word * self.filters + filter

    @always_inline
    def shared_pixel(self, word: Int, pixel: Int) -> Int:
        """The words of a step in front of a pixel's.

        Args:
            word: Of the pixel.
            pixel: In the tile.
        """
        return self.words() * self.filters + word * self.pixels + pixel

    def words(self) -> Int:
        """Words of a step for each filter and pixel."""
        return self.channels // INTERLEAVED

    def columns(self) -> Int:
        """Threads along the filters."""
        return self.filters // self.thread_filters

    def rows(self) -> Int:
        """Threads along the pixels."""
        return self.pixels // self.thread_pixels

    def threads(self) -> Int:
        """Threads of a block."""
        return self.columns() * self.rows()

    def filter_vectors(self) -> Int:
        """Vectors of a thread's filters."""
        return self.thread_filters // VECTOR

    def pixel_vectors(self) -> Int:
        """Vectors of a thread's pixels."""
        return self.thread_pixels // VECTOR

    def step_words(self) -> Int:
        """Words of shared memory of a step: filters, then pixels."""
        return self.words() * (self.filters + self.pixels)

    def shared_bytes(self) -> Int:
        """Shared memory of a block: two steps, or the sums in their place."""
        return size_of[DType.int32]() * max(
            2 * self.step_words(), self.filters * self.pixels
        )

    def is_valid(self) -> Bool:
        """Whether threads divide the tile's parts and loads evenly."""
        var threads = self.threads()
        return (
            self.channels % INTERLEAVED == 0
            and self.thread_filters % VECTOR == 0
            and self.thread_pixels % VECTOR == 0
            and threads % self.filters == 0
            and threads % self.pixels == 0
            and self.words() * self.filters % (VECTOR * threads) == 0
            and self.words() * self.pixels % (VECTOR * threads) == 0
        )


comptime LARGE = Dp4aTile(
    filters=64, pixels=128, channels=32, thread_filters=8, thread_pixels=8
)
"""For many pixels and filters: a thread multiplies 64 pairs of 16 words."""

comptime SMALL = Dp4aTile(
    filters=32, pixels=32, channels=32, thread_filters=4, thread_pixels=4
)
"""For few: more blocks."""

comptime TILES = [LARGE, SMALL]
"""The tiles that are compiled."""


def tile_of(pixels: Int, filters: Int, multiprocessors: Int) -> Int:
    """Which of `TILES` suits a problem: the large one, unless half of it would
    be empty or its blocks leave multiprocessors idle.

    Args:
        pixels: Of the output.
        filters: Of the problem.
        multiprocessors: Of the device.
    """
    var blocks, rows = materialize[LARGE]().grid(pixels, filters)
    if filters > SMALL.filters and blocks * rows >= multiprocessors:
        return 0
    return 1
