"""A worker's scratch memory, the CPU's counterpart of shared memory."""

from ..conv.memory import CACHE_LINE, Writes
from ..conv.config import CPU_TILE
from .scheduler import Blocking


@fieldwise_init
struct Scratch(ImplicitlyCopyable, Movable):
    """Where one worker keeps its activation block and its partial sums."""

    var activation: Writes[DType.float32]
    var accumulators: Writes[DType.float32]


@fieldwise_init
struct ScratchPlan(ImplicitlyCopyable, Movable):
    """Scratch sizes, in float32 values, of every worker."""

    var activation: Int
    var accumulators: Int

    def __init__(
        out self, blocking: Blocking, slices: Int, gathers: Bool
    ):
        """What a cut of the problem needs.

        Args:
            blocking: The cut.
            slices: How often partial sums go through memory; one tile is
                enough for a single slice.
            gathers: Whether whole blocks are gathered, rather than the last
                tile of a block only.
        """
        var rows = blocking.rows if gathers else min(
            blocking.rows, CPU_TILE.rows
        )
        self.activation = (rows + 1) // 2 * 2 * blocking.row_stride()
        self.accumulators = CPU_TILE.elements() * (
            1 if slices == 1 else blocking.tiles()
        )

    def elements(self) -> Int:
        """Float32 values of one worker, in whole cache lines."""
        comptime line = CACHE_LINE // 4
        return (self.activation + self.accumulators + line - 1) // line * line

    def scratch(
        self, memory: Writes[DType.float32], worker: Int
    ) -> Scratch:
        """One worker's part of the memory.

        Args:
            memory: `elements()` values for each worker.
            worker: Which worker.

        Returns:
            Its part.
        """
        var mine = memory.unsafe_offset(worker * self.elements())
        return Scratch(mine, mine.unsafe_offset(self.activation))
