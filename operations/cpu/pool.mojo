"""Threads: what the CPU kernels are launched on."""

from max.gpu.host.device_context import DeviceContextBase
from std.atomic import Atomic
from std.ffi import external_call
from std.memory.alloc import unsafe_alloc
from std.runtime import parallelism_level
from std.sys._assembly import inlined_assembly
from std.sys.info import CompilationTarget

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
    one launch after the other. The calling thread does not wait for it."""

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


comptime _Handle = Pointer[NoneType, MutUntrackedOrigin]
"""A launch, whose tasks' type MAX's runtime does not know."""

comptime _Entry = def(_Handle) thin abi("C") -> None
"""What MAX's runtime calls."""


struct _Launch[W: Work](Movable):
    """What the threads of a launch share. The last one that leaves frees it:
    threads that wake up late find no task, after the launch has returned.

    Parameters:
        W: The tasks' type.
    """

    var work: Self.W
    var tasks: Int
    var next: Atomic[Int64]
    """The next task."""
    var done: Atomic[Int64]
    """How many tasks are done."""
    var entered: Atomic[Int64]
    """How many threads have begun."""
    var holders: Atomic[Int64]
    """Threads that have yet to leave."""

    def __init__(out self, work: Self.W, tasks: Int, threads: Int):
        """Nothing has begun.

        Args:
            work: The tasks.
            tasks: How many there are.
            threads: How many threads will enter.
        """
        self.work = work
        self.tasks = tasks
        self.next = Atomic[Int64](0)
        self.done = Atomic[Int64](0)
        self.entered = Atomic[Int64](0)
        self.holders = Atomic[Int64](Int64(threads))


def _enter[W: Work](handle: _Handle) abi("C"):
    """Runs tasks until there are none."""
    ref launch = handle.unsafe_bitcast[_Launch[W]]()[]
    var worker = Int(launch.entered.fetch_add(1))
    while True:
        var task = Int(launch.next.fetch_add(1))
        if task >= launch.tasks:
            return
        launch.work.run(worker, task)
        _ = launch.done.fetch_add(1)


def _leave[W: Work](handle: _Handle) abi("C"):
    """Frees the launch behind the last thread."""
    var launch = handle.unsafe_bitcast[_Launch[W]]()
    if launch[].holders.fetch_sub(1) == 1:
        launch.unsafe_free()


@fieldwise_init
struct MaxPool(ImplicitlyCopyable, Movable, Pool):
    """The threads of MAX's runtime, and the calling one. A thread that sleeps
    takes tens of microseconds to wake up: the calling thread runs tasks
    meanwhile, and waits for none that never began.

    The runtime's function is the one that `DeviceContext.enqueue_cpu_range`
    calls. That keeps the caller's closure by its address, and so has to be
    waited for.
    """

    comptime wake_cycles = 20000.0

    var ctx: CpuContext

    def threads(self) -> Int:
        return parallelism_level()

    def for_each_task[W: Work](self, work: W, tasks: Int, workers: Int) raises:
        """See `Pool`."""
        # On the heap: see `OpenMpPool`.
        var launch = unsafe_alloc[_Launch[W]](1)
        launch.unsafe_write(_Launch[W](work, tasks, workers))
        var handle = launch.unsafe_bitcast[NoneType]()
        var handles = List[_Handle](length=workers - 1, fill=handle)
        var entry: _Entry = _enter[W]
        var exit: _Entry = _leave[W]
        var error = external_call[
            "AsyncRT_DeviceContext_enqueueHostFunctionRange", Int
        ](
            self.ctx._handle,
            entry,
            exit,
            handles.unsafe_ptr(),
            len(handles),
        )
        if error != 0:
            launch.unsafe_free()
            raise Error("MAX's runtime refuses to run tasks on its threads")
        _enter[W](handle)
        while Int(launch[].done.load()) < tasks:
            spin_pause()
        _leave[W](handle)


@always_inline
def spin_pause():
    """Tells the CPU that this thread waits for another one."""
    comptime if CompilationTarget.is_x86():
        inlined_assembly["pause", NoneType, constraints="~{memory}"]()
    else:
        inlined_assembly["yield", NoneType, constraints="~{memory}"]()
