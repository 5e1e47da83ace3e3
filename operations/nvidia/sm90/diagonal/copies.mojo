"""The copies of the diagonal kernel. In a warp of their own, one thread starts
TMA loads of input rows and residuals, and TMA stores of outputs.

    copying thread:     load the first stages; make every buffer ready
                        for each batch of steps:
                            wait until every warp has written it
                            load the next stages
                            store it
                            make the buffer of the batch before it ready
"""

from std.utils import IndexList

from ...tma.copy import (
    SharedAddress,
    commit_stores,
    load_tile,
    store_tile,
    wait_stores_read,
)
from ...tma.descriptor import TensorMap
from .block import DiagonalStorage, LoadCursor, StagePosition
from .geometry import (
    DiagonalSchedule,
    DiagonalGeometry,
    DiagonalStep,
)
from .mma import keep_rolled
from .plan import BUFFERS, DiagonalConfig


@always_inline
def load_residual(
    ref residual: TensorMap,
    geometry: DiagonalGeometry,
    storage: DiagonalStorage,
    schedule: DiagonalSchedule,
    first: UInt32,
    buffer: UInt32,
) -> UInt32:
    """Starts loading a batch's residual into a buffer. One thread calls it.

    Args:
        residual: The residual's descriptor.
        geometry: The problem.
        storage: The block's.
        schedule: The block's.
        first: The batch's first step.
        buffer: A released one.

    Returns:
        The first step of the next batch.
    """
    var step = schedule.step(geometry, first)
    var batch = min(min(step.run, geometry.batch), schedule.end - first)
    var barrier = storage.ready(buffer)
    barrier.arrive_expecting(Int(batch * geometry.step_bytes))
    var to = storage.buffer(geometry, buffer)
    for _ in range(batch):
        keep_rolled()
        load_tile[5](to, residual, barrier.address, _corner(step))
        step.row += step.next
        to += geometry.step_bytes
    return first + batch


@always_inline
def store_batch(
    ref output: TensorMap,
    geometry: DiagonalGeometry,
    data: SharedAddress,
    first: DiagonalStep,
    batch: UInt32,
):
    """Starts the TMA store of a batch's outputs, which every warp has written.
    One thread calls it.

    Args:
        output: The output's descriptor.
        geometry: The problem.
        data: The batch's buffer.
        first: Its first step.
        batch: Its steps.
    """
    var from_ = data
    var step = first
    for _ in range(batch):
        keep_rolled()
        store_tile[5](output, from_, _corner(step))
        step.row += step.next
        from_ += geometry.step_bytes
    commit_stores()


@always_inline
def _corner(step: DiagonalStep) -> IndexList[5]:
    """A step's first output, innermost dimension first."""
    return IndexList[5](
        Int(step.channel),
        Int(step.column),
        Int(step.row),
        Int(step.plane),
        Int(step.image),
    )


@fieldwise_init
struct DiagonalCopier[config: DiagonalConfig, stores_tiles: Bool](
    TrivialRegisterPassable
):
    """The copying thread of a block.

    Parameters:
        config: The configuration.
        stores_tiles: Whether TMA stores the output.
    """

    var cursor: LoadCursor
    var schedule: DiagonalSchedule
    """The block's."""

    @always_inline
    def __init__(
        out self, geometry: DiagonalGeometry, schedule: DiagonalSchedule
    ):
        """Starts before a block's first step.

        Args:
            geometry: The problem.
            schedule: The steps, one or more.
        """
        self.cursor = LoadCursor(schedule)
        self.cursor.begin(Self.config, geometry, schedule)
        self.schedule = schedule

    @always_inline
    def load(
        mut self,
        ref activation: TensorMap,
        geometry: DiagonalGeometry,
        storage: DiagonalStorage,
        count: UInt32,
    ):
        """Starts loading released stages.

        Args:
            activation: The activation's descriptor.
            geometry: The problem.
            storage: The block's.
            count: Stages.
        """
        self.cursor.load(
            Self.config, activation, geometry, storage, self.schedule, count
        )

    @always_inline
    def run(
        mut self,
        ref activation: TensorMap,
        ref output: TensorMap,
        ref residual: TensorMap,
        has_residual: Bool,
        geometry: DiagonalGeometry,
        storage: DiagonalStorage,
    ):
        """Loads what the block's steps read, except the first stages, and
        stores what they write.

        Args:
            activation: The activation's descriptor.
            output: The output's, if TMA stores it.
            residual: The residual's, if there is one.
            has_residual: Whether there is.
            geometry: The problem.
            storage: The block's.
        """
        # The first step whose buffer is not ready.
        var ahead = self.schedule.first
        for buffer in range(UInt32(BUFFERS)):
            keep_rolled()
            ahead = self._make_ready(
                residual, has_residual, geometry, storage, ahead, buffer
            )
        var index = self.schedule.first
        var buffer = StagePosition(0, 0)
        while index < self.schedule.end:
            var step = self.schedule.step(geometry, index)
            var left = min(step.run, self.schedule.end - index)
            while left > 0:
                var batch = min(left, geometry.batch)
                left -= batch
                var done = batch * UInt32(Self.config.step_stages())
                if left == 0:
                    done += UInt32(
                        Self.config.window_stages() - Self.config.step_stages()
                    )
                storage.written(buffer.stage).wait(buffer.parity)
                self.load(activation, geometry, storage, done)
                comptime if Self.stores_tiles:
                    store_batch(
                        output,
                        geometry,
                        storage.buffer(geometry, buffer.stage),
                        step,
                        batch,
                    )
                    # The store of the batch before has read its buffer.
                    wait_stores_read[1]()
                if index > self.schedule.first:
                    ahead = self._make_ready(
                        residual,
                        has_residual,
                        geometry,
                        storage,
                        ahead,
                        buffer.after(
                            UInt32(BUFFERS - 1), UInt32(BUFFERS)
                        ).stage,
                    )
                step.row += batch * step.next
                buffer = buffer.after(1, UInt32(BUFFERS))
                index += batch
        comptime if Self.stores_tiles:
            wait_stores_read[0]()

    @always_inline
    def _make_ready(
        self,
        ref residual: TensorMap,
        has_residual: Bool,
        geometry: DiagonalGeometry,
        storage: DiagonalStorage,
        ahead: UInt32,
        buffer: UInt32,
    ) -> UInt32:
        """Releases a buffer to the warps, after the load of its residual if
        there is one.

        Returns:
            The first step of the next batch.
        """
        if not has_residual:
            storage.ready(buffer).arrive()
        elif ahead < self.schedule.end:
            return load_residual(
                residual, geometry, storage, self.schedule, ahead, buffer
            )
        return ahead
