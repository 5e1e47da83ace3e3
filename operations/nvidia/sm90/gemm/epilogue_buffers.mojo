"""The buffers that a consumer's residuals and outputs pass through in shared
memory, and who may write which of them when."""

from ...pipeline.barrier import sync_threads, sync_warp
from ...pipeline.ring import Ring, RingPosition
from ...tma.copy import SharedAddress, fence_async_proxy, wait_stores_read
from ...limits import WARPGROUP
from .epilogue_config import CONSUMER_WARPS, EpilogueConfig

comptime FIRST_NAME = 1
"""The named barrier of the first consumer's epilogue; the others follow."""


struct EpilogueBuffers[
    config: EpilogueConfig, *, tma_store: Bool, in_place: Bool, shares: Bool
](TrivialRegisterPassable):
    """One consumer's buffers, and where it is in them.

    Parameters:
        config: Of the epilogue.
        tma_store: Whether TMA stores the buffers.
        in_place: Whether outputs are written over residuals.
        shares: Whether threads read what others have written to shared memory
            for a sub-tile.
    """

    comptime stages = Self.config.output_buffers()
    comptime buffer_bytes = Self.config.buffer_bytes()
    comptime residual_stages = max(1, Self.config.num_epi_load_stages)
    comptime Residuals = Ring[Self.residual_stages, Self.buffer_bytes]

    var residuals: Self.Residuals
    var residual: RingPosition[Self.residual_stages]
    """The next residual's buffer."""
    var outputs: SharedAddress
    """The output buffers."""
    var output: RingPosition[Self.stages]
    """The next output's buffer."""
    var releasing: RingPosition[Self.residual_stages]
    """The oldest residual's buffer whose store is under way."""
    var consumer: UInt32
    var thread: UInt32
    var lane: UInt32

    @always_inline
    def __init__(
        out self,
        barriers: SharedAddress,
        buffers: SharedAddress,
        consumer: UInt32,
        thread: UInt32,
        lane: UInt32,
    ):
        """The buffers of a consumer.

        Args:
            barriers: Of the consumer's residual ring.
            buffers: The consumer's `EpilogueConfig.buffers`.
            consumer: Which.
            thread: Of the consumer's warpgroup; of the loader, its lane.
            lane: Of the thread's warp.
        """
        self.residuals = Self.Residuals(barriers, buffers)
        self.residual = RingPosition[Self.residual_stages]()
        self.releasing = RingPosition[Self.residual_stages]()
        comptime offset = 0 if Self.config.reuse_c else (
            Self.config.num_epi_load_stages * Self.buffer_bytes
        )
        self.outputs = buffers + UInt32(offset)
        self.output = RingPosition[Self.stages]()
        self.consumer = consumer
        self.thread = thread
        self.lane = lane

    @always_inline
    def ends(self) -> SharedAddress:
        """What lies behind the consumer's buffers (`Sm90Config.ends_bytes`)."""
        return self.residuals.data + UInt32(
            Self.config.buffers() * Self.buffer_bytes
        )

    @always_inline
    def sync(self):
        """Waits for the consumer's threads."""
        sync_threads[WARPGROUP](Int(self.consumer) + FIRST_NAME)

    @always_inline
    def await_residual(self, loads: Bool) -> SharedAddress:
        """Waits for a sub-tile's residual, if there is one.

        Args:
            loads: Whether there is.

        Returns:
            Where it lies.
        """
        if loads:
            self.residuals.wait(self.residual)
        return self.residuals.address(self.residual.stage)

    @always_inline
    def leave_residual(mut self, loads: Bool):
        """Turns to the next sub-tile's residual.

        Args:
            loads: Whether there are residuals.
        """
        if loads:
            comptime if not Self.in_place:
                self._release_read(self.residual.stage)
            self.residual.step()

    @always_inline
    def next(
        mut self, loads: Bool, source: SharedAddress, exchanges: Bool
    ) -> SharedAddress:
        """Where a visited sub-tile is written: over its residual, or into the
        next output buffer.

        Args:
            loads: Whether there is a residual.
            source: Where it lies.
            exchanges: As for `publish`.
        """
        comptime if Self.in_place:
            if loads:
                return source
        return self.next_output(exchanges)

    @always_inline
    def next_output(mut self, exchanges: Bool) -> SharedAddress:
        """The next output buffer, once it may be overwritten.

        Args:
            exchanges: As for `publish`.
        """
        self._await_output(exchanges)
        var buffer = self.outputs + self.output.stage * UInt32(
            Self.buffer_bytes
        )
        self.output.step()
        return buffer

    @always_inline
    def _await_output(self, exchanges: Bool):
        """Waits until the only output buffer may be overwritten. Of several,
        the next has been stored when `publish` has returned."""
        comptime if Self.stages == 1:
            comptime if Self.tma_store:
                if self.thread == 0:
                    wait_stores_read[0]()
                self.sync()
            else:
                self._sync_sharers(exchanges)
        elif Self.config.delay_store and not Self.tma_store:
            # A sub-tile is written before the one ahead of it is stored: of
            # two buffers the next may be what other warps still store.
            if Self.shares or exchanges:
                self.sync()

    @always_inline
    def _sync_sharers(self, exchanges: Bool):
        """Waits for those who read what this thread has written, or write what
        it has read: the consumer's threads, or the warp's."""
        if Self.shares or exchanges:
            self.sync()
        else:
            sync_warp()

    @always_inline
    def publish(self, exchanges: Bool):
        """Waits until the threads have written a buffer, and until the next
        one has been read: by TMA, or by the threads that store it, that
        come here with a buffer less to store.

        Args:
            exchanges: Whether threads store what other warps have written,
                though they share nothing else; the same for all buffers.
        """
        comptime if Self.tma_store:
            fence_async_proxy()
            comptime if Self.stages > 1:
                if self.thread == 0:
                    wait_stores_read[Self.stages - 2]()
        comptime if Self.tma_store:
            self.sync()
        else:
            self._sync_sharers(exchanges)

    @always_inline
    def release_stored(mut self, loads: Bool, index: UInt32):
        """Gives back the residual's buffer that a sub-tile was stored from, or
        the oldest that TMA has read.

        Args:
            loads: Whether there are residuals.
            index: Of the sub-tile among those that the block stores of a tile.
        """
        comptime if Self.in_place:
            if loads:
                comptime if Self.tma_store:
                    if index >= UInt32(Self.config.num_output_stages - 1):
                        self._release_oldest[Self.config.num_output_stages - 1](
                            1
                        )
                else:
                    fence_async_proxy()
                    self._release_read(self.releasing.stage)
                    self.releasing.step()

    @always_inline
    def release_all(mut self, loads: Bool, subtiles: UInt32):
        """Gives back what `release_stored` has not of a tile.

        Args:
            loads: Whether there are residuals.
            subtiles: That the block stores of the tile.
        """
        comptime if Self.in_place and Self.tma_store:
            if loads:
                self._release_oldest[0](
                    min(subtiles, UInt32(Self.config.num_output_stages - 1))
                )

    @always_inline
    def _release_read(self, stage: UInt32):
        """Gives a residual's buffer back that the warp has read."""
        sync_warp()
        if self.lane == 0:
            self.residuals.empty(stage).arrive()

    @always_inline
    def _release_oldest[pending: Int](mut self, count: UInt32):
        """Gives the oldest residual buffers back once TMA has read all
        but the latest `pending` stores."""
        if self.thread == 0:
            wait_stores_read[pending]()
        for _ in range(count):
            if self.thread == 0:
                self.residuals.empty(self.releasing.stage).arrive()
            self.releasing.step()

    @staticmethod
    def releases() -> Int:
        """Arrivals that empty a residual's buffer: of the thread that waits
        for TMA's stores, or of every warp that has read it."""
        return 1 if Self.in_place and Self.tma_store else CONSUMER_WARPS

    @always_inline
    def finish(self):
        """Waits until shared memory may go: the block ends."""
        comptime if Self.tma_store:
            if self.thread == 0:
                wait_stores_read[0]()
