"""The threads of an OpenMP runtime that the process has loaded already, such as
PyTorch's."""

from std.memory.alloc import unsafe_alloc

from .pool import Counter, Pool, Work

comptime Data = Pointer[NoneType, MutUntrackedOrigin]
"""What a region's function is given."""

comptime Region = def(Data) thin abi("C") -> None
"""What each thread of a region runs."""

comptime Parallel = def(Region, Data, UInt32, UInt32) thin abi("C") -> None
"""`GOMP_parallel(function, data, threads, flags)` of libgomp, which libomp
and libiomp5 have too: runs a function on each of so many threads, and returns
when all are done."""


struct _Shared[W: Work](Movable):
    """What the threads of a region share.

    Parameters:
        W: The tasks' type.
    """

    var work: Self.W
    var tasks: Int
    var next: Counter
    """The next task."""
    var workers: Counter
    """How many threads have begun."""

    def __init__(out self, work: Self.W, tasks: Int):
        """Nothing has begun.

        Args:
            work: The tasks.
            tasks: How many there are.
        """
        self.work = work
        self.tasks = tasks
        self.next = Counter()
        self.workers = Counter()


def _run_tasks[W: Work](data: Data) abi("C"):
    """Runs tasks until there are none: what each thread of a region does."""
    ref shared = data.unsafe_bitcast[_Shared[W]]()[]
    var worker = shared.workers.take()
    while True:
        var task = shared.next.take()
        if task >= shared.tasks:
            return
        shared.work.run(worker, task)


@fieldwise_init
struct OpenMpPool(ImplicitlyCopyable, Movable, Pool):
    """The threads of an OpenMP runtime."""

    comptime wake_cycles = 10000.0

    var parallel: Parallel
    """The runtime's function; not called for a single thread."""
    var count: Int

    def threads(self) -> Int:
        return self.count

    def for_each_task[W: Work](self, work: W, tasks: Int, workers: Int) raises:
        """See `Pool`."""
        # On the heap: a pointer to a local, passed to a function that is not
        # known, does not keep the stores to it in front of the call.
        var shared = unsafe_alloc[_Shared[W]](1)
        shared.unsafe_write(_Shared[W](work, tasks))
        self.parallel(
            _run_tasks[W],
            shared.unsafe_bitcast[NoneType](),
            UInt32(workers),
            0,
        )
        shared.unsafe_deinit_pointee()
        shared.unsafe_free()
