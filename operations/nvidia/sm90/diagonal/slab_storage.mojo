"""Where a block of the slab kernel has what in shared memory, and how the slab's
filters come there."""

from max.gpu import thread_idx
from max.gpu.memory import external_memory
from std.math import ceildiv
from std.utils import StaticTuple

from ....conv.memory import Reads
from ...limits import PATTERN_BYTES, WARP
from ...pipeline.barrier import BARRIER_BYTES, Barrier, publish_barriers
from ...pipeline.chunks import CHUNK_BYTES, Words, store_chunk, swizzled
from ...tma.copy import SharedAddress, fence_async_proxy
from .plan import MATRIX, SLAB
from .slabs import (
    CONSUMERS,
    MAX_SLAB_STAGES,
    MOST_BUFFERS,
    TEAM_THREADS,
    TILE_BYTES,
    SlabGeometry,
    SlabShape,
)

comptime TEAM_WARPS = TEAM_THREADS // WARP
"""Warps that release a window."""


@fieldwise_init
struct SlabStorage[shape: SlabShape](TrivialRegisterPassable):
    """The layout of a block's shared memory: barriers, outputs, filters,
    windows.

    Parameters:
        shape: The configuration's.
    """

    var base: SharedAddress

    @always_inline
    def __init__(out self):
        """The block's dynamic shared memory."""
        self.base = SharedAddress(
            Int(
                external_memory[
                    UInt8,
                    address_space=AddressSpace.SHARED,
                    alignment=PATTERN_BYTES,
                ]()
            )
        )

    @always_inline
    def full(self, stage: UInt32) -> Barrier:
        """The barrier that completes when a window has come.

        Args:
            stage: Its place.
        """
        return Barrier(self.base + stage * BARRIER_BYTES)

    @always_inline
    def empty(self, stage: UInt32) -> Barrier:
        """The barrier that completes when a window may be overwritten.

        Args:
            stage: Its place.
        """
        return Barrier(
            self.base + (stage + UInt32(MAX_SLAB_STAGES)) * BARRIER_BYTES
        )

    @always_inline
    def ready(self, buffer: UInt32) -> Barrier:
        """The barrier that completes when a buffer may be written and holds a
        tile's residual, if there is one.

        Args:
            buffer: The buffer.
        """
        return Barrier(
            self.base + (buffer + UInt32(2 * MAX_SLAB_STAGES)) * BARRIER_BYTES
        )

    @always_inline
    def written(self, buffer: UInt32) -> Barrier:
        """The barrier that completes when a team has written a buffer.

        Args:
            buffer: The buffer.
        """
        comptime before = UInt32(2 * MAX_SLAB_STAGES + MOST_BUFFERS)
        return Barrier(self.base + (buffer + before) * BARRIER_BYTES)

    @always_inline
    def buffer(self, buffer: UInt32) -> SharedAddress:
        """The address of a tile's outputs.

        Args:
            buffer: The buffer.
        """
        return (
            self.base
            + UInt32(Self.shape.buffers_offset())
            + buffer * UInt32(TILE_BYTES)
        )

    @always_inline
    def filters(self) -> SharedAddress:
        """The address of the filters, tap by tap."""
        return self.base + UInt32(PATTERN_BYTES)

    @always_inline
    def window(self, geometry: SlabGeometry, stage: UInt32) -> SharedAddress:
        """The address of a window.

        Args:
            geometry: The problem.
            stage: Its place.
        """
        return (
            self.base
            + geometry.ring_offset
            + stage * UInt32(Self.shape.stage_bytes())
        )

    @always_inline
    def init(self):
        """Initializes the barriers. One thread calls it."""
        # At known addresses: in a loop the assembler fences each.
        comptime for stage in range(MAX_SLAB_STAGES):
            self.full(UInt32(stage)).init(1)
            self.empty(UInt32(stage)).init(TEAM_WARPS)
        comptime for buffer in range(MOST_BUFFERS):
            self.ready(UInt32(buffer)).init(1)
            self.written(UInt32(buffer)).init(TEAM_WARPS)
        publish_barriers()

    @always_inline
    def copy_filters[
        dtype: DType
    ](self, filter: Reads[dtype], channel: UInt32, channels: UInt32):
        """Copies the slab's filters, tap by tap, each filter a swizzled row. All
        consumers call it; a barrier among them must follow.

        Parameters:
            dtype: Of an element, of 16 bits.

        Args:
            filter: `[K, 1, R, S, C / groups]`.
            channel: The slab's first.
            channels: Of the problem; beyond are zeros.
        """
        comptime row_chunks = Self.shape.row_bytes() // CHUNK_BYTES
        comptime filter_chunks = Self.shape.taps * Self.shape.taps * row_chunks
        comptime chunks = SLAB * filter_chunks
        comptime turns = ceildiv(chunks, CONSUMERS)
        var filters = min(channels - channel, UInt32(SLAB))
        var thread = UInt32(thread_idx.x)
        var data = filter.unsafe_offset(
            Int(channel) * filter_chunks * MATRIX
        ).unsafe_bitcast[UInt32]()
        # All loads are under way before the first store.
        var copied = StaticTuple[Words, turns](fill=Words(0))
        comptime for turn in range(turns):
            var chunk = thread + UInt32(turn * CONSUMERS)
            if chunk < filters * UInt32(filter_chunks):
                copied[turn] = data.unsafe_load[
                    width=Words.length, alignment=CHUNK_BYTES
                ](Int(chunk) * 4)
        comptime for turn in range(turns):
            var chunk = thread + UInt32(turn * CONSUMERS)
            if chunk < UInt32(chunks):
                var row, rest = divmod(chunk, UInt32(filter_chunks))
                var tap, column = divmod(rest, UInt32(row_chunks))
                store_chunk[DType.uint32](
                    self.filters()
                    + tap * UInt32(Self.shape.tap_bytes())
                    + swizzled[Self.shape.row_bytes()](row, column),
                    copied[turn],
                )
        fence_async_proxy()
