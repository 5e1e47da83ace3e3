"""Split-K: blocks of a cluster share a tile, and each sums some of its steps.

Each block adds up, and stores, some of the tile's sub-tiles. How it gets the
others' sums is a generation's (`sm90.gemm.split_k`, `sm100.split_k`).
"""

from ..conv.divisor import Divisor
from .limits import MAX_CLUSTER

comptime MAX_SPLIT_K = MAX_CLUSTER
"""Blocks that share a tile, at most."""


@always_inline
def even_part(
    least: UInt32, longer: UInt32, part: UInt32
) -> Tuple[UInt32, UInt32]:
    """One of several parts that are as equal as can be: the first ones have one
    more where there is a remainder.

    Args:
        least: What each has.
        longer: Parts that have one more.
        part: Which.

    Returns:
        What lies before it, and what it has.
    """
    var first = part * least + min(part, longer)
    return first, least + UInt32(part < longer)


@fieldwise_init
struct SplitK(TrivialRegisterPassable):
    """How the steps of a tile's sum are divided among the blocks that share it:
    by `even_part`."""

    var count: Divisor
    """Blocks that share a tile."""
    var rounds: UInt32
    """Activation stages of a block."""
    var longer: UInt32
    """Blocks, the first ones, that have one more."""

    def __init__(out self):
        """Every block has a tile of its own."""
        self.count = Divisor(1)
        self.rounds = 0
        self.longer = 0

    def __init__(out self, rounds: UInt32, count: Int):
        """Divides the sum.

        Args:
            rounds: Activation stages of a tile's sum, at least `count`.
            count: Blocks that share a tile.
        """
        self.count = Divisor(count)
        self.rounds, self.longer = divmod(rounds, UInt32(count))

    @always_inline
    def share(self, split: UInt32) -> Tuple[UInt32, UInt32]:
        """The part of a tile's sum that a block adds up.

        Args:
            split: Which of the tile's blocks.

        Returns:
            The activation stages before its own, and its own.
        """
        return even_part(self.rounds, self.longer, split)
