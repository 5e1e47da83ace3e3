"""How the tasks of a launch are spread over a pool's workers."""

from std.math import ceildiv
from std.sys.info import size_of

from ..conv.memory import CACHE_LINE, HostBuffer, Writes
from ..conv.problem import ConvProblem
from .pool import Pool

comptime MIN_TASK_PRODUCTS = 1 << 17
"""Multiply-adds below which a task is not worth waking a thread for."""


@fieldwise_init
struct Schedule(ImplicitlyCopyable, Movable):
    """The tasks of a launch, its workers, and the scratch memory of each."""

    var tasks: Int
    var workers: Int
    var scratch: Int
    """Float32 values of a worker, in whole cache lines."""

    def __init__(
        out self, problem: ConvProblem, tasks: Int, threads: Int, scratch: Int
    ):
        """Takes no more workers than there is work for.

        Args:
            problem: The convolution.
            tasks: How many tasks it is cut into.
            threads: How many threads there are.
            scratch: Float32 values that a worker needs.
        """
        comptime line = CACHE_LINE // size_of[DType.float32]()
        var products = problem.gemm_m() * problem.filters * problem.gemm_k()
        self.tasks = tasks
        self.workers = max(
            1, min(threads, tasks, products // MIN_TASK_PRODUCTS)
        )
        self.scratch = ceildiv(scratch, line) * line

    def run[
        P: Pool, //, Work: def(Int, Writes[DType.float32]) -> None
    ](self, work: Work, pool: P) raises:
        """Runs `work(task, scratch)` for every task.

        Parameters:
            P: The pool's type.
            Work: What to do.

        Args:
            work: What to do, with its worker's scratch memory.
            pool: The threads.

        Raises:
            If the threads refuse the work.
        """
        var memory = HostBuffer[DType.float32](self.workers * self.scratch)
        var base = memory.elements
        var scratch = self.scratch

        def run_task(worker: Int, task: Int) {imm work, imm base, imm scratch}:
            work(task, base.unsafe_offset(worker * scratch))

        pool.for_each_task(run_task, self.tasks, self.workers)
        _ = memory^
