"""A ring of shared-memory stages between a producer and consumers.

Each stage has a `full` barrier (its data has arrived) and an `empty` one (every
consumer has released it). Producer and consumers each advance through the ring
on their own, with a `RingPosition`.
"""

from .barrier import BARRIER_BYTES, Barrier
from ..tma.copy import SharedAddress


@fieldwise_init
struct RingPosition[stages: Int](TrivialRegisterPassable):
    """A stage of the ring, and the parity of the round that it is in.

    Parameters:
        stages: Of the ring.
    """

    var stage: UInt32
    var parity: UInt32

    @always_inline
    def __init__(out self):
        """The first stage of the first round."""
        self.stage = 0
        self.parity = 0

    @always_inline
    def step(mut self):
        """Moves to the next stage."""
        self.stage += 1
        if self.stage == UInt32(Self.stages):
            self.stage = 0
            self.parity ^= 1

    @always_inline
    def skip(mut self, count: UInt32):
        """Moves on by several stages.

        Args:
            count: How many.
        """
        var rounds, stage = divmod(self.stage + count, UInt32(Self.stages))
        self.stage = stage
        self.parity ^= rounds & 1


@fieldwise_init
struct Ring[stages: Int, stage_bytes: Int](TrivialRegisterPassable):
    """Barriers and data of a ring.

    Parameters:
        stages: How many stages.
        stage_bytes: Bytes of data in a stage.
    """

    var barriers: SharedAddress
    """`full` of every stage, then `empty` of every stage."""
    var data: SharedAddress
    """The stages, one after the other."""

    @staticmethod
    @always_inline
    def barrier_bytes() -> Int:
        """Bytes of the ring's barriers."""
        return 2 * Self.stages * BARRIER_BYTES

    @always_inline
    def full(self, stage: UInt32) -> Barrier:
        """The barrier that completes when a stage has its data.

        Args:
            stage: The stage.
        """
        return Barrier(self.barriers + stage * BARRIER_BYTES)

    @always_inline
    def empty(self, stage: UInt32) -> Barrier:
        """The barrier that completes when a stage may be overwritten.

        Args:
            stage: The stage.
        """
        return Barrier(
            self.barriers + (stage + UInt32(Self.stages)) * BARRIER_BYTES
        )

    @always_inline
    def address(self, stage: UInt32) -> SharedAddress:
        """The address of a stage's data.

        Args:
            stage: The stage.
        """
        return self.data + stage * UInt32(Self.stage_bytes)

    @always_inline
    def init(self, producers: Int, releases: Int):
        """Initializes the barriers; one thread, before any other use. The
        threads of a warp would take turns, as one instruction initializes one
        barrier.

        Args:
            producers: Arrivals that fill a stage (each producer arrives
                once, with the bytes that it expects).
            releases: Arrivals that empty a stage.
        """
        comptime for stage in range(Self.stages):
            self.full(UInt32(stage)).init(producers)
            self.empty(UInt32(stage)).init(releases)

    @always_inline
    def await_empty(self, at: RingPosition[Self.stages]):
        """Waits until a stage may be overwritten.

        Args:
            at: The producer's position.
        """
        self.empty(at.stage).wait(at.parity ^ 1)

    @always_inline
    def await_release(self, at: RingPosition[Self.stages]):
        """Waits until a stage has been released.

        Args:
            at: The position at which it was filled; parity 1 before the first
                round.
        """
        self.empty(at.stage).wait(at.parity)

    @always_inline
    def await_releases(self, at: RingPosition[Self.stages]):
        """Waits until every stage that was filled has been released: no arrival
        of another block is on its way to this one.

        Args:
            at: The producer's position, behind the last stage that it filled.
        """
        var position = at
        for _ in range(Self.stages):
            self.await_empty(position)
            position.step()

    @always_inline
    def acquire(
        self, at: RingPosition[Self.stages], bytes: Int = Self.stage_bytes
    ) -> Barrier:
        """Waits until a stage may be overwritten, and makes its `full` barrier
        expect bytes.

        Args:
            at: The producer's position.
            bytes: Of the copies.

        Returns:
            The barrier that the copies complete.
        """
        self.await_empty(at)
        return self.expect(at, bytes)

    @always_inline
    def expect(
        self, at: RingPosition[Self.stages], bytes: Int = Self.stage_bytes
    ) -> Barrier:
        """Makes the `full` barrier of a stage that may be overwritten expect
        bytes.

        Args:
            at: The producer's position.
            bytes: Of the copies.

        Returns:
            The barrier that the copies complete.
        """
        var barrier = self.full(at.stage)
        barrier.arrive_expecting(bytes)
        return barrier

    @always_inline
    def wait(self, at: RingPosition[Self.stages]):
        """Waits until a stage has its data.

        Args:
            at: The consumer's position.
        """
        self.full(at.stage).wait(at.parity)
