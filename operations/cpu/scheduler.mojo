"""How the tasks of a launch are spread over a pool's workers."""

from std.math import ceildiv
from std.sys.info import size_of

from ..conv.memory import CACHE_LINE, HostBuffer, Writes
from ..conv.problem import ConvProblem
from .pool import Pool, Work, run_tasks

comptime MIN_TASK_PRODUCTS = 1 << 17
"""Multiply-adds below which a task is not worth waking a thread for."""


trait Tasks(Deinitable, ImplicitlyCopyable):
    """What a launch is cut into, with what all tasks read."""

    def run(self, task: Int, scratch: Writes[DType.float32]):
        """Runs a task.

        Args:
            task: Which, from 0.
            scratch: The memory of the worker that runs it.
        """
        ...


@fieldwise_init
struct _ScratchWork[T: Tasks](Work):
    """Tasks, each with its worker's scratch memory.

    Parameters:
        T: Of the tasks.
    """

    var tasks: Self.T
    var scratch: Writes[DType.float32]
    var stride: Int
    """Values of a worker."""

    def run(self, worker: Int, task: Int):
        self.tasks.run(task, self.scratch.unsafe_offset(worker * self.stride))


struct Schedule(ImplicitlyCopyable, Movable):
    """The tasks of a launch, its workers, and the scratch memory of each."""

    var tasks: Int
    var workers: Int
    """As many as run at once: 1, which is the calling thread, to `tasks`."""
    var scratch: Int
    """Float32 values of a worker, in whole cache lines."""

    def __init__(
        out self,
        problem: ConvProblem,
        tasks: Int,
        threads: Int,
        scratch: Int,
        *,
        task_products: Int = MIN_TASK_PRODUCTS,
    ):
        """Takes no more workers than there is work for.

        Args:
            problem: The convolution.
            tasks: How many tasks it is cut into.
            threads: How many threads there are.
            scratch: Float32 values that a worker needs.
            task_products: Multiply-adds below which a task is not worth waking a
                thread for.
        """
        comptime line = CACHE_LINE // size_of[DType.float32]()
        var products = problem.gemm_m() * problem.filters * problem.gemm_k()
        self.tasks = tasks
        self.workers = max(1, min(threads, tasks, products // task_products))
        self.scratch = ceildiv(scratch, line) * line

    def some(self, tasks: Int) -> Self:
        """A schedule of some of the tasks, by as many workers at most.

        Args:
            tasks: How many, at least 1.
        """
        var part = self
        part.tasks = tasks
        part.workers = min(self.workers, tasks)
        return part

    @no_inline
    def run(self, tasks: Some[Tasks], pool: Some[Pool]) raises:
        """Runs every task.

        Args:
            tasks: The tasks.
            pool: The threads.

        Raises:
            If the threads refuse the work.
        """
        var memory = HostBuffer[DType.float32](self.workers * self.scratch)
        var work = _ScratchWork(tasks, memory.elements, self.scratch)
        run_tasks(pool, work, self.tasks, self.workers)
        _ = memory^
