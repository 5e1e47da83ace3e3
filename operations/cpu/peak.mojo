"""The peak of a CPU: how fast the unit that multiplies a type is, on a pool's
threads, where its operands stay in registers. For the benchmark."""

from ..conv.fields import PANEL
from ..conv.memory import HostBuffer, Writes
from ..conv.panels import chunk_products
from .pool import Pool, Work
from .registry import CpuKernels
from .unit import MultiplyUnit, UnitVisitor, tile_outputs

comptime Threads = Pool & ImplicitlyCopyable & Deinitable
"""A pool that names threads which it does not own."""

comptime TASKS = 16
"""Tasks for each thread: one that other programs hold up leaves its own to the
others."""


@fieldwise_init
struct _Tiles[U: MultiplyUnit, dtype: DType](Work):
    """Register tiles, multiplied by nothing that is loaded.

    Parameters:
        U: The unit.
        dtype: Of activation and filter.
    """

    var chunks: Int
    var sums: Writes[DType.float32]
    """A tile of each worker."""

    def run(self, worker: Int, task: Int):
        self.U.multiply_registers[Self.dtype](
            self.chunks,
            self.sums.unsafe_offset(worker * tile_outputs[Self.U]()),
        )


@fieldwise_init
struct _Name(UnitVisitor):
    """Asks for the instruction.

    Parameters:
        dtype: Of activation and filter.
    """

    var dtype: DType
    var name: String

    def visit[U: MultiplyUnit](mut self) raises:
        self.name = U.instruction(self.dtype)


@fieldwise_init
struct _Run[P: Threads, dtype: DType](UnitVisitor):
    """Multiplies.

    Parameters:
        P: The pool's type.
        dtype: Of activation and filter.
    """

    var pool: Self.P
    var chunks: Int
    var products: Int
    """How many were computed."""

    def visit[U: MultiplyUnit](mut self) raises:
        var threads = self.pool.threads()
        var tasks = threads * TASKS
        var memory = HostBuffer[DType.float32](threads * tile_outputs[U]())
        var tiles = _Tiles[U, Self.dtype](self.chunks, memory.elements)
        if threads == 1:
            for task in range(tasks):
                tiles.run(0, task)
        else:
            self.pool.for_each_task(tiles, tasks, threads)
        _ = memory^
        var deep = self.chunks * chunk_products(Self.dtype)
        self.products += tasks * tile_outputs[U]() * deep


def peak_unit[P: Threads, //, dtype: DType](pool: P) raises -> String:
    """What multiplies a type on this CPU, for people.

    Parameters:
        P: The pool's type.
        dtype: Of activation and filter.

    Args:
        pool: The threads.

    Raises:
        If no kernel takes the type.
    """
    var asked = _Name(dtype, String())
    CpuKernels[P].visit_unit[dtype](pool.threads(), asked)
    return asked.name


def run_peak[P: Threads, //, dtype: DType](pool: P, chunks: Int) raises -> Int:
    """Multiplies on every thread of a pool as fast as the unit of a type can.

    Parameters:
        P: The pool's type.
        dtype: Of activation and filter.

    Args:
        pool: The threads.
        chunks: Steps of each of a thread's `TASKS`.

    Returns:
        How many products were computed, and added up.

    Raises:
        If no kernel takes the type, or the threads refuse the work.
    """
    var run = _Run[P, dtype](pool, chunks, 0)
    CpuKernels[P].visit_unit[dtype](pool.threads(), run)
    return run.products
