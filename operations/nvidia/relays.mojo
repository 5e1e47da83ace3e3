"""Relays: clusters that take over from others of the same launch.

A persistent cluster takes one tile in as many as clusters run at the same time.
Where memory bounds a launch, multiprocessors get unequal parts of it, and some end
a third earlier than others. So the clusters that run first leave some tiles to a
second relay, and that one to a third: the device starts them where a
multiprocessor becomes free.
"""

comptime LEFT_LOG = 2
"""The logarithm, to base 2, of the part of its tiles that a relay leaves to the
next ones: a quarter."""

comptime MOST_RELAYS = 4
"""Of a launch: the last one's tiles are a 64th."""


@fieldwise_init
struct Relays(TrivialRegisterPassable):
    """How the clusters of a launch share out its tiles: a relay is a row of the
    grid, whose clusters take tiles in turn."""

    var count: UInt32
    """Relays."""
    var rounds: UInt32
    """Tiles of a cluster, at most, if there were one relay."""

    def __init__(out self):
        """One relay."""
        self.count = 1
        self.rounds = 0

    def __init__(out self, rounds: Int, *, most: Int):
        """As many relays as have a tile for each cluster.

        Args:
            rounds: Tiles of a cluster, at most, if there were one relay.
            most: Relays, at most.
        """
        self.count = 1
        self.rounds = UInt32(rounds)
        while Int(self.count) < most and self._left(self.count) > 0:
            self.count += 1

    @always_inline
    def share(
        self, relay: UInt32, clusters: UInt32, tiles: UInt32
    ) -> Tuple[UInt32, UInt32]:
        """The tiles of a relay.

        Args:
            relay: Which.
            clusters: Of a relay.
            tiles: Of the launch.

        Returns:
            The first, and where they end.
        """
        var end = tiles
        if relay + 1 < self.count:
            end = (self.rounds - self._left(relay + 1)) * clusters
        return (self.rounds - self._left(relay)) * clusters, end

    @always_inline
    def _left(self, relay: UInt32) -> UInt32:
        """Rounds of a relay and of those behind it."""
        return self.rounds >> (relay * LEFT_LOG)
