"""Loads of activation and filter by threads straight into the rings, for pixels
that TMA does not take but that are multiples of 8 bytes: half of a chunk, which
the swizzle keeps together.

A warpgroup fills a ring, a warp its share of each stage's rows, 16 lanes a row.
Nothing is shifted, and nothing written twice, as `gather.mojo` has to.
"""

from max.gpu.primitives.warp import shuffle_idx, vote
from std.sys.info import size_of
from std.utils import StaticTuple

from ....conv.memory import Reads
from ...im2col.tiles import Tap, TileGeometry
from ...im2col.traversal import ROW_BYTES
from ...limits import WARP
from ...pipeline.async_copy import (
    PIECE_BYTES,
    await_copies,
    close_copies,
    copy_piece,
)
from ...pipeline.barrier import sync_warp
from ...pipeline.chunks import CHUNK_BYTES, swizzled
from ...pipeline.ring import Ring, RingPosition
from ...tma.copy import SharedAddress, fence_async_proxy
from .config import HELD_STAGES, Sm90Config
from .gather import GatherGeometry, StageRows
from .producers import first_tap
from .scheduler import TileScheduler

comptime ROW_PIECES = ROW_BYTES // PIECE_BYTES
"""Pieces of a stage's row, a lane each."""

comptime ROWS_TOGETHER = WARP // ROW_PIECES
"""Rows that a warp copies at once."""


struct DirectGather[
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

    comptime FilledRing = Ring[Self.stages, Self.stage_bytes]
    comptime Position = RingPosition[Self.stages]
    comptime own_rows = Self.Rows.ROWS // Self.config.ring_producers()
    """Rows of a warp, of each stage."""
    comptime turns = Self.own_rows // ROWS_TOGETHER
    comptime Starts = StaticTuple[Int32, Self.turns]
    """Of the rows that the lane copies pieces of: where they are, in pieces."""
    comptime ahead = Self.stages - HELD_STAGES
    """Stages whose copies may be under way while a later one's are started."""

    var data: UInt64
    """The operand's address, a multiple of 16."""
    var rows: Self.Rows
    var ring: Self.FilledRing
    var channels: UInt32
    var warp: UInt32
    """Of the ring's."""
    var lane: UInt32

    @always_inline
    def __init__(
        out self,
        data: Reads[Self.dtype],
        rows: Self.Rows,
        ring: Self.FilledRing,
        gather: GatherGeometry,
        thread: UInt32,
    ):
        """Knows what to fill.

        Args:
            data: The operand.
            rows: Where its rows are.
            ring: What to fill.
            gather: The problem, for these loads.
            thread: Of the warpgroup.
        """
        self.data = UInt64(Int(data))
        self.rows = rows
        self.ring = ring
        self.channels = gather.channels
        self.warp, self.lane = divmod(thread, UInt32(WARP))

    @always_inline
    def fill(mut self, geometry: TileGeometry, *, keeps: Bool):
        """Fills the ring, tile after tile.

        Args:
            geometry: The problem.
            keeps: Whether the first tile's rows are all tiles'.
        """
        var scheduler = TileScheduler[Self.config](geometry)
        var position = Self.Position()
        var done = Self.Position()
        var under_way = UInt32(0)
        while scheduler.valid(geometry):
            var tile = scheduler.tile(geometry)
            var tap = first_tap[Self.config](geometry, tile)
            self.rows.enter(
                geometry,
                tile,
                self.warp * UInt32(Self.own_rows) + self.lane,
            )
            var starts = self._starts()
            for _ in range(tile.rounds):
                self.ring.await_empty(position)
                self._copy(
                    geometry, tap, starts, self.ring.address(position.stage)
                )
                close_copies()
                position.step()
                tap.step(0, geometry)
                if under_way < UInt32(Self.ahead):
                    under_way += 1
                else:
                    await_copies[Self.ahead]()
                    self._announce(done)
            if keeps:
                break
            scheduler.advance()
        await_copies[0]()
        for _ in range(under_way):
            self._announce(done)

    @always_inline
    def _announce(self, mut done: Self.Position):
        """Says that this thread's copies into a stage have ended."""
        fence_async_proxy()
        sync_warp()
        if self.lane == 0:
            self.ring.full(done.stage).arrive()
        done.step()

    @always_inline
    def _starts(self) -> Self.Starts:
        """Where the rows are that the lane copies pieces of: other lanes know.
        """
        comptime size = size_of[Self.dtype]()
        var own = Int32(self.rows.start() * size // PIECE_BYTES)
        var first = self.lane // UInt32(ROW_PIECES)
        var result = Self.Starts(fill=0)
        comptime for turn in range(Self.turns):
            result[turn] = shuffle_idx(
                own, first + UInt32(turn * ROWS_TOGETHER)
            )
        return result

    @always_inline
    def _copy(
        self,
        geometry: TileGeometry,
        tap: Tap,
        starts: Self.Starts,
        stage: SharedAddress,
    ):
        """Starts the copies of the warp's rows of a step."""
        comptime size = size_of[Self.dtype]()
        var row, piece = divmod(self.lane, UInt32(ROW_PIECES))
        var exist = vote[DType.uint32](self.rows.exists(geometry, tap)) >> row
        var left = self.channels - UInt32(tap.channel(geometry))
        left = min(left, geometry.slice_channels) * UInt32(size)
        if piece * UInt32(PIECE_BYTES) >= left:
            exist = 0
        var from_ = self.data + UInt64(
            self.rows.offset(geometry, tap) * size + Int(piece) * PIECE_BYTES
        )
        var first = self.warp * UInt32(Self.own_rows) + row
        var half = piece % 2 * PIECE_BYTES
        comptime for turn in range(Self.turns):
            comptime below = UInt32(turn * ROWS_TOGETHER)
            copy_piece(
                stage + swizzled[ROW_BYTES](first + below, piece // 2) + half,
                from_ + UInt64(Int64(starts[turn]) * PIECE_BYTES),
                exist & (UInt32(1) << below) != 0,
            )
