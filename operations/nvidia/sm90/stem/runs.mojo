"""Outputs of the Hopper stem kernel whose pixels begin at any element of memory:
those of filters that are no multiple of `GROUP_FILTERS`.

A warp has a buffer in shared memory for its pixels' filters of a multiply. Each
element lies as far behind a multiple of 16 bytes there as in memory, so that
outputs leave in chunks of 16 bytes, and a residual comes in them; only at the
ends of a run elements are stored one by one. Pixels that follow one another in
memory, with all their filters, are one run; otherwise each pixel is one.
"""

from max.gpu.primitives.warp import vote
from std.bit import pop_count
from std.memory import bitcast

from ....conv.memory import Reads, Writes
from ...limits import WARP, WARPGROUP
from ...pipeline.async_copy import await_copies, close_copies, copy_part
from ...pipeline.barrier import sync_warp
from ...pipeline.chunks import CHUNK_BYTES, load_chunk, shared_pointer
from ...tma.copy import SharedAddress
from ..wgmma import MMA_M
from .geometry import (
    GROUP_FILTERS,
    PART_FILTERS,
    StemConfig,
    StemGeometry,
)
from .pixels import StemFilters, StemPixel, StemRows
from .staging import load_shared_element_if
from .storage import OUTPUT_BYTES, WARP_PIXELS, run_pitch

comptime CHUNK_ELEMENTS = CHUNK_BYTES // OUTPUT_BYTES

comptime PIXEL_LANES = 8
"""Lanes that move the run of one pixel."""


@fieldwise_init
struct StemRun(TrivialRegisterPassable):
    """Neighbouring elements of output and residual."""

    var first: Int
    """The element that the run's first chunk begins with."""
    var head: UInt32
    """Elements of that chunk before the run."""
    var end: UInt32
    """From that chunk's first element to behind the run's last; `head` if the
    run is empty."""
    var at: SharedAddress
    """The chunk's place in the buffer."""


struct StemRuns[config: StemConfig](TrivialRegisterPassable):
    """A warp's outputs of a multiply, and its buffer.

    Parameters:
        config: The configuration.
    """

    comptime parts = Self.config.tile_n // PART_FILTERS
    comptime elements = MMA_M * Self.config.tile_n // WARPGROUP
    """That a thread has: by pixels, then by filters."""

    var rows: StemRows
    var filter: UInt32
    """The multiply's first."""
    var count: UInt32
    """Its filters that there are."""
    var together: Bool
    """Whether all pixels are one run."""
    var pixels: UInt32
    """Pixels of the warp that exist, which come first if they are one run."""
    var lane: UInt32
    var buffer: SharedAddress

    @always_inline
    def __init__(
        out self,
        geometry: StemGeometry,
        rows: StemRows,
        filters: StemFilters,
        buffer: SharedAddress,
        lane: UInt32,
    ):
        """Finds a warp's runs.

        Args:
            geometry: The problem.
            rows: The thread's pixels.
            filters: The thread's filters.
            buffer: The warp's.
            lane: Of the warp.
        """
        self.rows = rows
        self.filter = filters.tile
        self.count = min(
            max(geometry.filters, filters.tile) - filters.tile,
            UInt32(Self.config.tile_n),
        )
        var columns = geometry.tile_columns
        var row, _column = columns.split(rows.first)
        var last, _last = columns.split(rows.first + UInt32(WARP_PIXELS - 1))
        self.together = self.count == geometry.filters and (
            row == last or columns.value == geometry.out_columns
        )
        var exist = pop_count(vote[DType.uint32](rows.low.exists)) + pop_count(
            vote[DType.uint32](rows.high.exists)
        )
        # Four lanes share a pixel.
        self.pixels = exist // 4
        self.lane = lane
        self.buffer = buffer

    @always_inline
    def lanes(self) -> UInt32:
        """Lanes that move a run."""
        return UInt32(WARP if self.together else PIXEL_LANES)

    @always_inline
    def steps(self) -> UInt32:
        """Runs that a lane moves a part of."""
        return UInt32(1 if self.together else WARP_PIXELS * PIXEL_LANES // WARP)

    @always_inline
    def run(self, geometry: StemGeometry, step: UInt32) -> StemRun:
        """A run that the lane moves a part of.

        Args:
            geometry: The problem.
            step: Which one.
        """
        var index = UInt32(0)
        if not self.together:
            index = step * UInt32(WARP // PIXEL_LANES) + self.lane // UInt32(
                PIXEL_LANES
            )
        var pixel = StemPixel(geometry, self.rows.tile, self.rows.first + index)
        var pixels = self.pixels if self.together else UInt32(pixel.exists)
        var element = self.rows.first_output + pixel.element + Int(self.filter)
        var head = UInt32(element) % UInt32(CHUNK_ELEMENTS)
        return StemRun(
            element - Int(head),
            head,
            head + pixels * self.count,
            self.buffer + index * UInt32(run_pitch(Self.config)),
        )

    @always_inline
    def copy_residual(self, geometry: StemGeometry, residual: Reads):
        """Starts copying the residual to the buffer, once all lanes have read
        what was there.

        Args:
            geometry: The problem.
            residual: The residual.
        """
        sync_warp()
        var lanes = self.lanes()
        for step in range(self.steps()):
            var run = self.run(geometry, step)
            if run.end == run.head:
                continue
            var from_ = UInt64(Int(residual.unsafe_offset(run.first)))
            for chunk in range(
                self.lane % lanes * UInt32(CHUNK_ELEMENTS),
                run.end,
                lanes * UInt32(CHUNK_ELEMENTS),
            ):
                var left = min(run.end - chunk, UInt32(CHUNK_ELEMENTS))
                copy_part(
                    run.at + chunk * OUTPUT_BYTES,
                    from_ + UInt64(chunk * OUTPUT_BYTES),
                    left * OUTPUT_BYTES,
                )
        close_copies()

    @always_inline
    def _place[half: Int](self, geometry: StemGeometry) -> SharedAddress:
        """Where in the buffer a pixel's first filter of the thread is.

        Parameters:
            half: Which of the thread's pixels.
        """
        var index = self.lane // 4 + UInt32(half * WARP_PIXELS // 2)
        var start = UInt32(
            self.rows.first_output
            + self.rows.pixel[half]().element
            + Int(self.filter)
        )
        var offset = index * UInt32(run_pitch(Self.config) // OUTPUT_BYTES)
        if self.together:
            offset = index * self.count
            start -= offset
        offset += start % UInt32(CHUNK_ELEMENTS)
        offset += self.lane % 4 * UInt32(GROUP_FILTERS)
        return self.buffer + offset * OUTPUT_BYTES

    @always_inline
    def _filters[half: Int](self) -> UInt32:
        """How many filters of a pixel there are from the thread's first on.

        Parameters:
            half: Which of the thread's pixels.
        """
        var first = self.lane % 4 * UInt32(GROUP_FILTERS)
        var left = max(self.count, first) - first
        return left if self.rows.pixel[half]().exists else 0

    @always_inline
    def load[
        dtype: DType
    ](self, geometry: StemGeometry) -> SIMD[dtype, Self.elements]:
        """The thread's residual, which `copy_residual` copied; zeros for what
        there is not.

        Parameters:
            dtype: Of the residual.

        Args:
            geometry: The problem.
        """
        await_copies[0]()
        sync_warp()
        var values = SIMD[DType.uint16, Self.elements](0)
        comptime for half in range(2):
            var from_ = self._place[half](geometry)
            var filters = self._filters[half]()
            comptime for part in range(Self.parts):
                comptime for i in range(GROUP_FILTERS):
                    comptime filter = part * PART_FILTERS + i
                    comptime at = (half * Self.parts + part) * GROUP_FILTERS + i
                    values[at] = load_shared_element_if(
                        UInt32(filter) < filters,
                        from_ + UInt32(filter * OUTPUT_BYTES),
                    )
        return bitcast[dtype, Self.elements](values)

    @always_inline
    def store[
        dtype: DType
    ](
        self,
        geometry: StemGeometry,
        output: Writes[dtype],
        values: SIMD[dtype, Self.elements],
    ):
        """Stores the warp's outputs.

        Parameters:
            dtype: Of the output.

        Args:
            geometry: The problem.
            output: The output.
            values: The thread's.
        """
        # What the warp stored before has been read.
        sync_warp()
        comptime for half in range(2):
            var to = shared_pointer[dtype](self._place[half](geometry))
            var filters = self._filters[half]()
            comptime for part in range(Self.parts):
                comptime for i in range(GROUP_FILTERS):
                    comptime filter = part * PART_FILTERS + i
                    comptime at = (half * Self.parts + part) * GROUP_FILTERS + i
                    if UInt32(filter) < filters:
                        to.unsafe_store(filter, values[at])
        sync_warp()
        var lanes = self.lanes()
        for step in range(self.steps()):
            var run = self.run(geometry, step)
            for chunk in range(
                self.lane % lanes * UInt32(CHUNK_ELEMENTS),
                run.end,
                lanes * UInt32(CHUNK_ELEMENTS),
            ):
                _store_chunk(
                    output.unsafe_offset(run.first + Int(chunk)), chunk, run
                )


@always_inline
def _store_chunk[dtype: DType](to: Writes[dtype], chunk: UInt32, run: StemRun):
    """Stores those elements of a chunk that are of a run.

    Args:
        to: Where to, a multiple of a chunk.
        chunk: The first element, counted from the run's first chunk.
        run: The run.
    """
    var from_ = run.at + chunk * OUTPUT_BYTES
    if chunk >= run.head and chunk + UInt32(CHUNK_ELEMENTS) <= run.end:
        to.unsafe_store[alignment=CHUNK_BYTES](0, load_chunk[dtype](from_))
        return
    comptime for i in range(CHUNK_ELEMENTS):
        var element = chunk + UInt32(i)
        if element >= run.head and element < run.end:
            to.unsafe_store(i, shared_pointer[dtype](from_).unsafe_load(i))
