"""How a consumer of the Hopper kernel turns accumulators into output: the
stages of residual and output buffers, and when a copy starts."""

from std.collections import Optional
from std.sys.info import size_of
from std.utils import IndexList

from ...im2col.traversal import ROW_BYTES
from ...limits import WARP, WARPGROUP


comptime SUBTILE_FILTERS = 64
"""Filters of a sub-tile: the rows that one warpgroup's multiply takes."""

comptime ROW_FILTERS = 2
"""Filters of a thread in a sub-tile whose filters are the multiply's rows."""

comptime COLUMN_FILTERS = 16
"""Filters of a thread in a sub-tile whose filters are its columns."""

comptime HALF_BYTES = 2
"""Bytes of a 16-bit output, of which a sub-tile's pixel is one row."""

comptime CONSUMER_WARPS = WARPGROUP // WARP
"""Warps of a consumer."""

comptime CONSUMER_THREADS = WARPGROUP
"""Threads of a consumer."""


comptime MATRIX_ROWS = 16
"""Rows and columns of the four 8x8 matrices that an instruction moves."""

comptime MATRIX_VALUES = 8
"""Values of a thread of four 8x8 matrices."""


def panel_filters[dtype: DType]() -> Int:
    """Filters of a panel.

    Parameters:
        dtype: Of the buffer's elements.
    """
    return ROW_BYTES // size_of[dtype]()


def panels[dtype: DType]() -> Int:
    """Panels of a buffer.

    Parameters:
        dtype: Of the buffer's elements.
    """
    return SUBTILE_FILTERS // panel_filters[dtype]()


@fieldwise_init
struct EpilogueConfig(ImplicitlyCopyable, Movable, Writable):
    """How a consumer stores its part of a tile, one sub-tile after the other.

    A sub-tile's residual comes by
    TMA into one of `num_epi_load_stages` buffers, its output leaves through
    one of `num_output_stages`, or, with `reuse_c`, through the residual's own.
    """

    var output_tile_shape: IndexList[2]
    """M and N of a sub-tile of 16-bit outputs: pixels by `SUBTILE_FILTERS`
    filters. Wider outputs have fewer pixels, so that a buffer has the same
    bytes."""
    var num_epi_load_stages: Int
    """Buffers of residuals; 0: no residual can be added."""
    var num_output_stages: Int
    """Output stores that may be under way."""
    var fragment_size: Int
    """Values of a thread that are visited at a time."""
    var reuse_c: Bool
    """Whether the output overwrites the residual where it lies."""
    var delay_store: Bool
    """Whether a sub-tile's store starts only after the next sub-tile's values
    have been computed."""
    var tma_store: Bool
    """Whether TMA stores the buffers, or the consumer's threads
    do, row by row."""
    var whole_rows: Bool
    """Whether a row is stored by threads side by side, for which the
    consumer's threads wait for each other; otherwise a warp stores what it has
    written. Rows at no multiple of 16 bytes are always stored whole."""

    def pixels(self, element_bytes: Int) -> Int:
        """Pixels of a sub-tile.

        Args:
            element_bytes: Of the output's type: 2 or 4.
        """
        return self.output_tile_shape[0] * HALF_BYTES // element_bytes

    def values(self, element_bytes: Int) -> Int:
        """Values of a sub-tile that one thread holds.

        Args:
            element_bytes: Of the output's type: 2 or 4.
        """
        return self.pixels(element_bytes) * SUBTILE_FILTERS // CONSUMER_THREADS

    def buffer_bytes(self) -> Int:
        """Bytes of a buffer."""
        return self.output_tile_shape[0] * ROW_BYTES

    def output_buffers(self) -> Int:
        """Buffers that outputs pass through."""
        return (
            self.num_epi_load_stages if self.reuse_c else self.num_output_stages
        )

    def buffers(self) -> Int:
        """Buffers of a consumer: residuals', then outputs' unless they are the
        same."""
        return self.num_epi_load_stages + (
            0 if self.reuse_c else self.num_output_stages
        )

    def refusal(self) -> Optional[String]:
        """Why no epilogue can be built so, or None."""
        var pixels = self.output_tile_shape[0]
        if pixels != MATRIX_ROWS and pixels != 32 and pixels != 64:
            return String(
                t"output_tile_shape: M {pixels} is not {MATRIX_ROWS}, 32 or 64"
            )
        if self.output_tile_shape[1] != SUBTILE_FILTERS:
            return String(
                t"output_tile_shape: N {self.output_tile_shape[1]} is not"
                t" {SUBTILE_FILTERS}, the rows of a warpgroup's multiply"
            )
        if self.whole_rows and self.tma_store:
            return String("whole_rows: TMA stores, not threads")
        if self.num_epi_load_stages < 0:
            return String(
                t"num_epi_load_stages: {self.num_epi_load_stages} is negative"
            )
        if self.num_output_stages < 1:
            return String("num_output_stages: at least 1")
        if self.reuse_c and self.num_output_stages > self.num_epi_load_stages:
            return String(
                t"reuse_c: {self.num_output_stages} output stages do not fit"
                t" {self.num_epi_load_stages} residual stages"
            )
        if (
            self.delay_store
            and self.reuse_c
            and self.num_output_stages == self.num_epi_load_stages
        ):
            return String(
                t"delay_store: with reuse_c and"
                t" {self.num_epi_load_stages} stages of both kinds a residual"
                t" waits for a buffer whose store waits for that residual:"
                t" deadlock"
            )
        if self.delay_store and not self.reuse_c and self.num_output_stages < 2:
            return String("delay_store: needs at least 2 output stages")
        if (
            self.fragment_size < 8
            or self.values(HALF_BYTES) % self.fragment_size != 0
        ):
            return String(
                t"fragment_size: {self.fragment_size} is no divisor of the"
                t" {self.values(HALF_BYTES)} values of a sub-tile, or under 8"
            )
        return None

    def write_to(self, mut writer: Some[Writer]):
        """Writes the configuration on one line."""
        var kind = "whole-row" if self.whole_rows else "row"
        writer.write(
            t"{'TMA' if self.tma_store else kind} stores of"
            t" {self.output_tile_shape[0]} pixels, residual and output stages"
            t" {self.num_epi_load_stages}{'/' if self.reuse_c else '+'}{self.num_output_stages}"
            t"{', delayed' if self.delay_store else ''}"
        )
