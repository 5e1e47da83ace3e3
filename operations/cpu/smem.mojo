"""A worker's scratch memory, the CPU's counterpart of shared memory."""

from ..conv.memory import CACHE_LINE, Writes
from .config import CPU_TILE, LANES
from ..conv.problem import ConvProblem
from .few_filters import UnpackedFilter
from .image_row import SPAN_SUMS
from .scheduler import ACCESS_MATRIX, Blocking


@fieldwise_init
struct Scratch(ImplicitlyCopyable, Movable):
    """Where one worker keeps its activation block and its partial sums, and
    what all workers read."""

    var shared: Writes[DType.float32]
    var activation: Writes[DType.float32]
    var accumulators: Writes[DType.float32]


@fieldwise_init
struct ScratchPlan(ImplicitlyCopyable, Movable):
    """Scratch sizes, in float32 values, of every worker, and of what they
    share."""

    var shared: Int
    var activation: Int
    var accumulators: Int

    @staticmethod
    def for_blocks(problem: ConvProblem, blocking: Blocking) -> ScratchPlan:
        """What a cut of the implicit GEMM needs: the activations of a task's
        tiles, or of one where only the last is gathered; and its partial sums,
        or one tile of them where no sum outlives its tile.

        Args:
            problem: The convolution.
            blocking: The cut.

        Returns:
            The plan.
        """
        var tiles = blocking.tiles
        var sums = blocking.sums(problem.gemm_k())
        if blocking.access == ACCESS_MATRIX:
            tiles = 1
        return ScratchPlan(
            shared=0,
            activation=tiles * blocking.tile_elements,
            accumulators=sums * CPU_TILE.elements(),
        )

    @staticmethod
    def for_rows() -> ScratchPlan:
        """What the direct kernels need: the sums of a span.

        Returns:
            The plan.
        """
        return ScratchPlan(shared=0, activation=0, accumulators=SPAN_SUMS)

    @staticmethod
    def for_few_filters(problem: ConvProblem) -> ScratchPlan:
        """What the kernel for few filters needs: the unpacked filter, and the
        sums of a span, stored in whole vectors.

        Args:
            problem: The convolution.

        Returns:
            The plan.
        """
        return ScratchPlan(
            shared=UnpackedFilter.length(problem),
            activation=0,
            accumulators=SPAN_SUMS + LANES,
        )

    def worker_elements(self) -> Int:
        """Float32 values of one worker, in whole cache lines."""
        comptime line = CACHE_LINE // 4
        return (self.activation + self.accumulators + line - 1) // line * line

    def elements(self, workers: Int) -> Int:
        """Float32 values of so many workers and of what they share."""
        return self.shared + self.worker_elements() * workers

    def scratch(self, memory: Writes[DType.float32], worker: Int) -> Scratch:
        """One worker's part of the memory.

        Args:
            memory: `elements(workers)` values.
            worker: Which worker.

        Returns:
            Its part.
        """
        var mine = memory.unsafe_offset(
            self.shared + worker * self.worker_elements()
        )
        return Scratch(memory, mine, mine.unsafe_offset(self.activation))
