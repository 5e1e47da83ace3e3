"""Threads: what the CPU kernels are launched on."""

from max.gpu.host.device_context import DeviceContextBase
from std.atomic import Atomic
from std.runtime import parallelism_level
from std.sys.info import CompilationTarget

comptime CpuContext = DeviceContextBase[CompilationTarget()]
"""The device context of an op that runs on the CPU."""


trait Pool:
    """Threads that run the tasks of a launch."""

    def threads(self) -> Int:
        """How many tasks can run at once."""
        ...

    def for_each_task[
        Work: def(Int, Int) -> None
    ](self, work: Work, tasks: Int, workers: Int) raises:
        """Runs `work(worker, task)` for every task, each worker taking the next
        task as it finishes one. Returns when all are done.

        Parameters:
            Work: What to do.

        Args:
            work: What to do; must not touch another worker's memory.
            tasks: How many tasks there are.
            workers: How many of them may run at once, from 1.

        Raises:
            If the threads refuse the work.
        """
        ...


@fieldwise_init
struct MaxPool(ImplicitlyCopyable, Movable, Pool):
    """The threads of MAX's runtime."""

    var ctx: CpuContext

    def threads(self) -> Int:
        return parallelism_level()

    def for_each_task[
        Work: def(Int, Int) -> None
    ](self, work: Work, tasks: Int, workers: Int) raises:
        """See `Pool`. A single worker is the calling thread."""
        if workers <= 1 or tasks <= 1:
            for task in range(tasks):
                work(0, task)
            return
        var next = Atomic[Int64](0)

        def worker_loop(worker: Int) {imm work, mut next, imm tasks}:
            while True:
                var task = Int(next.fetch_add(1))
                if task >= tasks:
                    return
                work(worker, task)

        self.ctx.enqueue_cpu_range(worker_loop, min(workers, tasks))
        self.ctx.synchronize()
