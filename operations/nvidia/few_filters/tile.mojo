"""The part of a tile that a warp computes, and how warps make a tile of them."""

from ..limits import WARP
from ..pipeline.chunks import CHUNK_BYTES

comptime MATRIX_ROWS = 16
"""Pixels of a multiply, neighbours along w."""

comptime MATRIX_FILTERS = 8
"""Filters of a multiply."""

comptime STEP_CHUNKS = 2
"""Chunks of a pixel that one multiply takes."""

comptime JOINED_TAPS = 3
"""Taps along h for which a window's row is read once for all of them."""

comptime REGISTERS = 64 * 1024
"""Of a multiprocessor (compute capability 8.0 to 12.0)."""

comptime PATCH_PIXELS = 64
"""Pixels by `MATRIX_FILTERS` filters, in sums, that a warp stores at once, or
one multiply's where that is more."""


@fieldwise_init
struct WarpTile(Equatable, ImplicitlyCopyable, Movable):
    """The sums of a warp, which are what is compiled; all else is geometry."""

    var filters: Int
    """All of the problem's, or more."""
    var rows: Int
    """Multiplies of `MATRIX_ROWS` pixels each."""
    var warps: Int
    """Of a block, at most."""
    var registers: Int
    """Of a thread, at most: a multiprocessor has `REGISTERS`."""

    def columns(self) -> Int:
        """Multiplies along the filters."""
        return self.filters // MATRIX_FILTERS

    def resident(self, warps: Int) -> Int:
        """Blocks whose registers a multiprocessor has.

        Args:
            warps: Of a block.
        """
        return REGISTERS // (warps * WARP * self.registers)

    def patch_rows(self) -> Int:
        """Multiplies along the pixels whose sums are stored at once."""
        return max(
            1,
            min(self.rows, PATCH_PIXELS // MATRIX_ROWS // self.columns()),
        )


comptime TILES = [
    WarpTile(filters=8, rows=4, warps=8, registers=128),
    WarpTile(filters=16, rows=4, warps=8, registers=128),
]
"""What is compiled: for each number of filters the first that holds them."""

comptime MAX_FILTERS = 16
"""Of the last tile."""


def tile_of(filters: Int) -> Int:
    """Which of `TILES` computes a problem.

    Args:
        filters: Its filters, up to `MAX_FILTERS`.
    """
    var tiles = materialize[TILES]()
    for index in range(len(tiles)):
        if filters <= tiles[index].filters:
            return index
    return len(tiles) - 1


@fieldwise_init
struct Tiling(ImplicitlyCopyable, Movable, Writable):
    """How a block's warps cut the image, and what of a pixel is loaded at once.
    """

    var warp_rows: Int
    """Warps along h."""
    var warp_columns: Int
    """Warps along w."""
    var parts: Int
    """Warps of the same pixels, each of which multiplies some of the channels.
    """
    var along_rows: Bool
    """Whether a warp's multiplies are neighbours along h, otherwise along w."""
    var chunks: Int
    """Of a pixel's slice of channels, a multiple of `STEP_CHUNKS`."""
    var stages: Int
    """Windows that are loaded or multiplied at the same time: 2 or 3."""

    def warps(self) -> Int:
        """Of a block."""
        return self.warp_rows * self.warp_columns * self.parts

    def write_to(self, mut writer: Some[Writer]):
        """Writes the tiling on one line."""
        writer.write(
            t"{self.warp_rows}x{self.warp_columns}x{self.parts} warps along"
            t" {'h' if self.along_rows else 'w'}, {self.chunks} chunks,"
            t" {self.stages} stages"
        )


def odd_chunks(chunks: Int) -> Int:
    """The bytes from one row of chunks to the next, so that 8 neighbouring rows
    of a load are in all banks: an odd number of chunks.

    Args:
        chunks: Of a row.
    """
    return (chunks | 1) * CHUNK_BYTES
