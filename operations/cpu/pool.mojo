"""Threads: what the CPU kernels are launched on."""

from max.gpu.host.device_context import DeviceContextBase
from std.atomic import Atomic
from std.runtime import parallelism_level
from std.sys.info import CompilationTarget, size_of

from ..conv.memory import CACHE_LINE, HostBuffer

comptime CpuContext = DeviceContextBase[CompilationTarget()]
"""The device context of an op that runs on the CPU."""


trait Work(Deinitable, ImplicitlyCopyable):
    """The tasks of a launch, as a pool's threads run them. What they share is a
    struct's fields: a function that captured them has no address that another
    runtime could call."""

    def run(self, worker: Int, task: Int):
        """Runs a task; touches no other worker's memory.

        Args:
            worker: Which of the workers that run at once this is, from 0.
            task: Which task, from 0.
        """
        ...


trait Pool:
    """Threads that run the tasks of a launch."""

    comptime wake_cycles: Float64
    """Cycles until another thread takes a task, while the threads are busy with
    one launch after the other."""

    def threads(self) -> Int:
        """How many tasks can run at once."""
        ...

    def for_each_task[W: Work](self, work: W, tasks: Int, workers: Int) raises:
        """Runs every task on several threads, each taking the next one as it
        finishes one. Returns when all are done.

        Parameters:
            W: The tasks' type.

        Args:
            work: The tasks.
            tasks: How many there are.
            workers: How many of them may run at once, from 2 to `tasks`.

        Raises:
            If the threads refuse the work.
        """
        ...


def run_tasks[
    W: Work
](pool: Some[Pool], work: W, tasks: Int, workers: Int) raises:
    """Runs every task, on the calling thread where there is no more than one
    worker.

    Parameters:
        W: The tasks' type.

    Args:
        pool: The threads.
        work: The tasks.
        tasks: How many there are.
        workers: How many of them may run at once, up to `tasks`.

    Raises:
        If the threads refuse the work.
    """
    if workers > 1:
        pool.for_each_task(work, tasks, workers)
        return
    for task in range(tasks):
        work.run(0, task)


struct Counter(Movable):
    """Counts what threads take, one after the other. Its cache line is no other
    variable's, since whoever takes something takes the line from all who read it,
    and neither is the neighbour, which a CPU fetches with it."""

    comptime PAIR = 2 * CACHE_LINE // size_of[DType.int64]()
    """Numbers of a pair of lines."""

    var memory: HostBuffer[DType.int64]
    """A pair of lines, the next number, and another pair."""

    def __init__(out self):
        """Nothing is taken."""
        self.memory = HostBuffer[DType.int64](2 * Self.PAIR + 1)
        self.memory.elements[unsafe_offset=Self.PAIR] = 0

    @always_inline
    def take(self) -> Int:
        """Takes the next number, from 0 on."""
        var next = self.memory.elements.unsafe_offset(Self.PAIR)
        return Int(Atomic.fetch_add(next, 1))


@fieldwise_init
struct MaxPool(ImplicitlyCopyable, Movable, Pool):
    """The threads of MAX's runtime. Where nothing was launched for 200 us, it
    takes as long again until they run."""

    comptime wake_cycles = 70000.0

    var ctx: CpuContext

    def threads(self) -> Int:
        return parallelism_level()

    def for_each_task[W: Work](self, work: W, tasks: Int, workers: Int) raises:
        """See `Pool`."""
        var next = Counter()

        def worker_loop(worker: Int) {imm work, imm next, imm tasks}:
            while True:
                var task = next.take()
                if task >= tasks:
                    return
                work.run(worker, task)

        self.ctx.enqueue_cpu_range(worker_loop, workers)
        self.ctx.synchronize()
        # The workers take from it to the end.
        _ = next^
