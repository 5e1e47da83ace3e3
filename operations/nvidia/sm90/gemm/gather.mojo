"""Loads of activation and filter by threads, for pixels that TMA does not take:
those that are no whole chunks of 16 bytes.

A warpgroup fills the ring of activations, and one that of filters. A warp
fills its share of a stage's rows:

    a lane each row:        find the row in device memory
    8 lanes a row:          copy the chunks of device memory that the row touches,
                            one more than it has, to shared memory (cp.async)
    some stages later,
    8 lanes a row:          shift two neighbouring chunks to one of the row, and
                            write it where TMA's swizzle would

Copies end with the row's last channel, and zeros follow, so that nothing is read
beyond the operands. Rows outside the image, or behind the last pixel or filter,
are zeros.
"""

from std.sys.info import size_of
from std.utils import StaticTuple

from ....conv.device_value import DeviceValue
from ....conv.memory import Reads
from ...geometry import OUTSIDE
from ...im2col.tiles import Tap, Tile, TileGeometry
from ...im2col.traversal import ROW_BYTES, Traversal
from ...limits import WARP, WARPGROUP
from ...pipeline.async_copy import await_copies, close_copies, copy_part
from ...pipeline.barrier import sync_warp
from ...pipeline.chunks import (
    CHUNK_BYTES,
    Words,
    chunk_within,
    load_chunk,
    shared_pointer,
    store_chunk,
    swizzled,
)
from ...pipeline.ring import Ring, RingPosition
from ...tma.copy import SharedAddress, fence_async_proxy
from .config import COPIED_BYTES, ENTRY_BYTES, Sm90Config
from .producers import first_tap
from .scheduler import TileScheduler

comptime ROW_CHUNKS = ROW_BYTES // CHUNK_BYTES
"""Chunks of a stage's row, a lane each."""

comptime ROWS_TOGETHER = WARP // ROW_CHUNKS
"""Rows that a warp moves at once."""

comptime TURNS_TOGETHER = 2
"""Times that a warp moves rows, whose loads are under way together."""


@fieldwise_init
struct GatherGeometry(
    DeviceValue, ImplicitlyCopyable, Movable, TrivialRegisterPassable
):
    """What gathering needs to know beside `TileGeometry`."""

    var channels: UInt32
    """Of a pixel."""
    var width: UInt32
    """Input pixels of a row."""
    var height: UInt32
    """Input rows at one depth."""
    var depth: UInt32
    """Input depths of an image."""

    @staticmethod
    def of(traversal: Traversal) -> GatherGeometry:
        """Reads a traversal.

        Args:
            traversal: Of one group.
        """
        return GatherGeometry(
            UInt32(traversal.channels),
            UInt32(traversal.input[2]),
            UInt32(traversal.input[1]),
            UInt32(traversal.input[0]),
        )


@fieldwise_init
struct RowEntry(TrivialRegisterPassable):
    """What of device memory is copied for a row of a stage."""

    var address: UInt64
    """Of the chunk that holds the row's first byte."""
    var end: UInt32
    """Bytes from there to the row's end; 0 if the row is zeros."""
    var shift: UInt32
    """Bytes from there to the row's first."""

    @always_inline
    def __init__(out self, words: Words):
        """Reads an entry.

        Args:
            words: What `words` returned.
        """
        self.address = UInt64(words[1]) << 32 | UInt64(words[0])
        self.end = words[2]
        self.shift = words[3]

    @always_inline
    def words(self) -> Words:
        """The entry, for shared memory."""
        return Words(
            UInt32(self.address),
            UInt32(self.address >> 32),
            self.end,
            self.shift,
        )

    @staticmethod
    @always_inline
    def shift_at(entry: SharedAddress) -> UInt32:
        """The shift of an entry in shared memory.

        Args:
            entry: Its address.
        """
        return shared_pointer[DType.uint32](entry).unsafe_load[alignment=4](3)

    @always_inline
    def copy_chunk(self, row: SharedAddress, chunk: UInt32):
        """Starts the copy of a chunk, or of what the row has of it.

        Args:
            row: Where the copied row is.
            chunk: Counted from the one that holds the row's first byte.
        """
        var begin = chunk * CHUNK_BYTES
        var left = Int32(self.end) - Int32(begin)
        copy_part(
            row + begin,
            self.address + UInt64(begin),
            UInt32(min(max(left, 0), Int32(CHUNK_BYTES))),
        )


trait StageRows(TrivialRegisterPassable):
    """Where the rows of a ring's stages lie in device memory. A lane knows one
    row of the tile."""

    comptime ROWS: Int
    """Of a stage."""

    def enter(mut self, geometry: TileGeometry, tile: Tile, row: UInt32):
        """Comes to a tile.

        Args:
            geometry: The problem.
            tile: The tile.
            row: The lane's, counted in the tile.
        """
        ...

    def start(self) -> Int:
        """The element of the lane's row that a step's offset counts from."""
        ...

    def offset(self, geometry: TileGeometry, tap: Tap) -> Int:
        """From there to the first element of a step, the same for all rows.

        Args:
            geometry: The problem.
            tap: The step.
        """
        ...

    def exists(self, geometry: TileGeometry, tap: Tap) -> Bool:
        """Whether the lane's row at a step of the sum is no zeros.

        Args:
            geometry: The problem.
            tap: The step.
        """
        ...


struct PixelRows[config: Sm90Config](StageRows, TrivialRegisterPassable):
    """Rows of activations: a tile's pixels, moved by a tap."""

    comptime ROWS = Self.config.block_tile_shape[0]

    var gather: GatherGeometry
    var pixel: Int
    """The row's input pixel at the filter's first tap, counted over all
    images; not in the image, maybe."""
    var w: Int32
    """Its position; `OUTSIDE` if there is no such output."""
    var h: Int32
    var d: Int32

    def __init__(out self, gather: GatherGeometry):
        """Knows no row.

        Args:
            gather: The problem.
        """
        self.gather = gather
        self.pixel = 0
        self.w = OUTSIDE
        self.h = 0
        self.d = 0

    @always_inline
    def enter(mut self, geometry: TileGeometry, tile: Tile, row: UInt32):
        var output = geometry.pixel(tile.pixel + row)
        var start = geometry.load_start(output, 0)
        self.w = start.w if geometry.is_output(output) else OUTSIDE
        self.h = start.h
        self.d = start.d
        self.pixel = self._index(
            Int(start.image) * Int(self.gather.depth) + Int(start.d),
            Int(start.h),
            Int(start.w),
        )

    @always_inline
    def start(self) -> Int:
        return self.pixel * Int(self.gather.channels)

    @always_inline
    def offset(self, geometry: TileGeometry, tap: Tap) -> Int:
        var pixels = self._index(
            Int(tap.d * geometry.dilation_d),
            Int(tap.h * geometry.dilation_h),
            Int(tap.w * geometry.dilation_w),
        )
        return pixels * Int(self.gather.channels) + tap.channel(geometry)

    @always_inline
    def exists(self, geometry: TileGeometry, tap: Tap) -> Bool:
        var w = tap.w * geometry.dilation_w
        var h = tap.h * geometry.dilation_h
        var d = tap.d * geometry.dilation_d
        return (
            UInt32(self.w) + w < self.gather.width
            and UInt32(self.h) + h < self.gather.height
            and UInt32(self.d) + d < self.gather.depth
        )

    @always_inline
    def _index(self, plane: Int, h: Int, w: Int) -> Int:
        """A pixel's number, or the distance of two pixels in memory."""
        return (plane * Int(self.gather.height) + h) * Int(
            self.gather.width
        ) + w


struct FilterRows[config: Sm90Config](StageRows, TrivialRegisterPassable):
    """Rows of filters: a tile's, one tap."""

    comptime ROWS = Self.config.block_tile_shape[1]

    var channels: Int
    var first: Int
    """The first element of the row's filter; -1 if there is none."""

    def __init__(out self, gather: GatherGeometry):
        """Knows no row.

        Args:
            gather: The problem.
        """
        self.channels = Int(gather.channels)
        self.first = -1

    @always_inline
    def enter(mut self, geometry: TileGeometry, tile: Tile, row: UInt32):
        var filter = tile.filter + row
        var taps = geometry.taps_d * geometry.taps_h * geometry.taps_w
        self.first = -1
        if filter < tile.filter_end(geometry):
            self.first = Int(filter) * Int(taps) * self.channels

    @always_inline
    def start(self) -> Int:
        return self.first

    @always_inline
    def offset(self, geometry: TileGeometry, tap: Tap) -> Int:
        return Int(tap.position(geometry)) * self.channels + tap.channel(
            geometry
        )

    @always_inline
    def exists(self, geometry: TileGeometry, tap: Tap) -> Bool:
        return self.first >= 0


struct Gather[
    dtype: DType,
    Rows: StageRows,
    stages: Int,
    stage_bytes: Int,
    //,
    config: Sm90Config,
](TrivialRegisterPassable):
    """A warp that fills its share of a ring's stages.

    Parameters:
        dtype: Of the operand.
        Rows: Where its rows are.
        stages: Of the ring.
        stage_bytes: Of the ring.
        config: The configuration.
    """

    comptime RowsRing = Ring[Self.stages, Self.stage_bytes]
    comptime Scheduler = TileScheduler[Self.config]
    comptime own_rows = Self.Rows.ROWS // Self.config.ring_producers()
    """Rows of a warp, of each stage."""
    comptime turns = Self.own_rows // ROWS_TOGETHER
    comptime ahead = Self.config.num_gather_stages
    """Stages of copied rows."""
    comptime copied_bytes = Self.Rows.ROWS * COPIED_BYTES
    comptime entries_bytes = Self.Rows.ROWS * ENTRY_BYTES

    var data: UInt64
    """The operand's address, a multiple of 16."""
    var rows: Self.Rows
    var ring: Self.RowsRing
    var channels: UInt32
    var memory: SharedAddress
    """Copied rows, stage after stage, then their entries."""
    var warp: UInt32
    """Of the ring's."""
    var lane: UInt32

    # What copies are started for:
    var scheduler: Self.Scheduler
    var tile: Tile
    var tap: Tap
    var left: UInt32
    """Steps of the tile, with the present one."""
    var steps: UInt32
    """Of all tiles so far."""
    var stage: UInt32
    """Of the copied ones."""

    @always_inline
    def __init__(
        out self,
        data: Reads[Self.dtype],
        rows: Self.Rows,
        ring: Self.RowsRing,
        geometry: TileGeometry,
        gather: GatherGeometry,
        memory: SharedAddress,
        thread: UInt32,
    ):
        """Begins at the block's first tile.

        Args:
            data: The operand.
            rows: Where its rows are.
            ring: What to fill.
            geometry: The problem.
            gather: The same, for these loads.
            memory: `Sm90Config.copied_bytes` of this operand's rows.
            thread: Of the warpgroup.
        """
        self.data = UInt64(Int(data))
        self.rows = rows
        self.ring = ring
        self.channels = gather.channels
        self.memory = memory
        self.warp, self.lane = divmod(thread, UInt32(WARP))
        self.scheduler = Self.Scheduler(geometry)
        self.tile = Tile()
        self.tap = Tap()
        self.left = 0
        self.steps = 0
        self.stage = 0

    @always_inline
    def fill(mut self, geometry: TileGeometry, *, keeps: Bool):
        """Fills the ring, tile after tile.

        Args:
            geometry: The problem.
            keeps: Whether the first tile's rows are all tiles'.
        """
        self._enter_tile(geometry)
        var position = RingPosition[Self.stages]()
        var stage = UInt32(0)
        var copied = UInt32(0)
        var written = UInt32(0)
        while True:
            self._copy_next(geometry, keeps)
            # Copies run ahead by all stages but the one that is written.
            copied += 1
            if copied < UInt32(Self.ahead):
                continue
            if written == self.steps:
                return
            await_copies[Self.ahead - 1]()
            sync_warp()
            self.ring.await_empty(position)
            self._write(stage, self.ring.address(position.stage))
            fence_async_proxy()
            sync_warp()
            if self.lane == 0:
                self.ring.full(position.stage).arrive()
            position.step()
            stage = Self._after(stage)
            written += 1

    @staticmethod
    @always_inline
    def _after(stage: UInt32) -> UInt32:
        """The stage of copied rows behind another."""
        var next = stage + 1
        return UInt32(0) if next == UInt32(Self.ahead) else next

    @always_inline
    def _enter_tile(mut self, geometry: TileGeometry):
        """Comes to the scheduler's tile; `left` is 0 if there is none."""
        if self.scheduler.valid(geometry):
            self.tile = self.scheduler.tile(geometry)
            self.left = self.tile.rounds
            self.steps += self.left
            self.tap = first_tap[Self.config](geometry, self.tile)
            var row = self.warp * UInt32(Self.own_rows) + self.lane
            self.rows.enter(geometry, self.tile, row)

    @always_inline
    def _copy_next(mut self, geometry: TileGeometry, keeps: Bool):
        """Starts the copies of a step, if there is one, and moves on."""
        if self.left > 0:
            self._copy(geometry)
            self.stage = Self._after(self.stage)
            self.left -= 1
            self.tap.step(0, geometry)
            if self.left == 0 and not keeps:
                self.scheduler.advance()
                self._enter_tile(geometry)
        close_copies()

    @always_inline
    def _copied(self, stage: UInt32, row: UInt32) -> SharedAddress:
        """The address of a copied row.

        Args:
            stage: Of the copied ones.
            row: Of the warp's.
        """
        return (
            self.memory
            + stage * UInt32(Self.copied_bytes)
            + (self.warp * UInt32(Self.own_rows) + row) * COPIED_BYTES
        )

    @always_inline
    def _entry(self, stage: UInt32, row: UInt32) -> SharedAddress:
        """The address of a copied row's entry.

        Args:
            stage: Of the copied ones.
            row: Of the warp's.
        """
        return (
            self.memory
            + UInt32(Self.ahead * Self.copied_bytes)
            + stage * UInt32(Self.entries_bytes)
            + (self.warp * UInt32(Self.own_rows) + row) * ENTRY_BYTES
        )

    @always_inline
    def _copy(self, geometry: TileGeometry):
        """Starts the copies of the warp's rows of a step."""
        comptime idle = Self.own_rows < WARP
        if not idle or self.lane < UInt32(Self.own_rows):
            var entry = self._row_entry(geometry)
            store_chunk[DType.uint32](
                self._entry(self.stage, self.lane), entry.words()
            )
            # The chunk behind the row's last, of each lane's own row.
            entry.copy_chunk(
                self._copied(self.stage, self.lane), UInt32(ROW_CHUNKS)
            )
        sync_warp()
        var row, chunk = divmod(self.lane, UInt32(ROW_CHUNKS))
        # All loads first: none is moved in front of a copy.
        var entries = StaticTuple[Words, Self.turns](fill=0)
        comptime for turn in range(Self.turns):
            var at = row + UInt32(turn * ROWS_TOGETHER)
            entries[turn] = load_chunk[DType.uint32](
                self._entry(self.stage, at)
            )
        comptime for turn in range(Self.turns):
            var at = row + UInt32(turn * ROWS_TOGETHER)
            RowEntry(entries[turn]).copy_chunk(
                self._copied(self.stage, at), chunk
            )

    @always_inline
    def _row_entry(self, geometry: TileGeometry) -> RowEntry:
        """What to copy for the lane's row of a step."""
        comptime size = UInt32(size_of[Self.dtype]())
        if not self.rows.exists(geometry, self.tap):
            return RowEntry(self.data, 0, 0)
        var element = self.rows.start() + self.rows.offset(geometry, self.tap)
        var first = UInt32(self.tap.channel(geometry))
        var channels = min(self.channels - first, geometry.slice_channels)
        var address = self.data + UInt64(element) * UInt64(size)
        var shift = UInt32(address) % CHUNK_BYTES
        return RowEntry(address - UInt64(shift), shift + channels * size, shift)

    @always_inline
    def _write(self, stage: UInt32, to: SharedAddress):
        """Writes the warp's rows of a stage, in order.

        Args:
            stage: Of the copied ones.
            to: The ring's stage.
        """
        var row, chunk = divmod(self.lane, UInt32(ROW_CHUNKS))
        var first = self.warp * UInt32(Self.own_rows)
        comptime together = min(Self.turns, TURNS_TOGETHER)
        comptime for turn in range(0, Self.turns, together):
            # All loads first: none is moved in front of a store.
            var lows = StaticTuple[Words, together](fill=0)
            var highs = StaticTuple[Words, together](fill=0)
            var shifts = StaticTuple[UInt32, together](fill=0)
            comptime for i in range(together):
                var at = row + UInt32((turn + i) * ROWS_TOGETHER)
                var copied = self._copied(stage, at) + chunk * CHUNK_BYTES
                lows[i] = load_chunk[DType.uint32](copied)
                highs[i] = load_chunk[DType.uint32](copied + CHUNK_BYTES)
                shifts[i] = RowEntry.shift_at(self._entry(stage, at))
            comptime for i in range(together):
                var at = row + UInt32((turn + i) * ROWS_TOGETHER)
                store_chunk[DType.uint32](
                    to + swizzled[ROW_BYTES](first + at, chunk),
                    chunk_within(lows[i], highs[i], shifts[i]),
                )
