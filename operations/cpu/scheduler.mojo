"""How a problem is cut into tasks, and how threads take them."""

from max.algorithm import sync_parallelize
from std.atomic import Atomic
from std.math import ceildiv

from ..conv.config import CPU_TILE, SOURCE_FLOAT32
from ..conv.fields import PANEL
from ..conv.problem import ConvProblem
from .tile_io import reads_in_place

comptime GATHER_COST = 8
"""Elements gathered in the time of one vector multiply-add: a model, good
enough to weigh gathering a row twice against an idle thread."""

comptime FILTER_BYTES_PER_CYCLE = 8
"""Packed filter that reaches L2 in the time of one vector multiply-add."""


@fieldwise_init
struct Blocking(ImplicitlyCopyable, Movable, Writable):
    """A cut of the implicit GEMM into tasks of `rows x panels` outputs, each
    accumulated over slices of `depth` products; `row_aligned` cuts tiles at
    the ends of image rows too, `row_tiles` is the most that a task has.
    `pointwise` says that the activation is the implicit GEMM's matrix as it
    lies in memory."""

    var rows: Int
    var panels: Int
    var depth: Int
    var row_blocks: Int
    var panel_blocks: Int
    var groups: Int
    var row_aligned: Bool
    var row_tiles: Int
    var pointwise: Bool

    def tasks(self) -> Int:
        """How many tasks there are."""
        return self.row_blocks * self.panel_blocks * self.groups

    def row_stride(self) -> Int:
        """Elements between two rows of the activation block: room for the
        gather's excess, and an odd number of cache lines, so that the rows of
        a tile do not compete for one cache set."""
        var lines = ceildiv(self.depth, PANEL) + 1
        return (lines | 1) * PANEL

    def tiles(self) -> Int:
        """Register tiles of a task, at most."""
        return self.row_tiles * ceildiv(self.panels, CPU_TILE.panels)

    def write_to(self, mut writer: Some[Writer]):
        """Writes the cut on one line.

        Args:
            writer: Where to.
        """
        writer.write(
            t"{self.tasks()} tasks of {self.rows} pixels x"
            t" {self.panels * PANEL} filters, {self.depth} products deep"
        )


def choose_blocking(
    problem: ConvProblem, threads: Int, source: Int
) -> Blocking:
    """The cut that a model of multiply-adds, gathers and filter traffic finds
    fastest on this many threads.

    Args:
        problem: The convolution, not depthwise.
        threads: How many threads there are.
        source: A `SOURCE_*` code.

    Returns:
        The cut.
    """
    var in_place = source == SOURCE_FLOAT32
    var pointwise = in_place and problem.is_pointwise()
    var products = problem.gemm_k()
    var slices = ceildiv(products, CPU_TILE.max_depth)
    var depth = ceildiv(ceildiv(products, slices), PANEL) * PANEL
    var panels = problem.panels()
    var units = ceildiv(panels, CPU_TILE.panels)
    var row_aligned = in_place and not pointwise and reads_in_place(problem)
    var best = Blocking(
        CPU_TILE.rows,
        CPU_TILE.panels,
        depth,
        1,
        1,
        problem.groups,
        False,
        1,
        pointwise,
    )
    var best_cost = Int.MAX
    var rows = CPU_TILE.max_rows
    while rows >= CPU_TILE.rows:
        var block_rows = min(rows, problem.gemm_m())
        for cut in range(1, units + 1):
            var unit_count = ceildiv(units, cut)
            if cut > 1 and unit_count == ceildiv(units, cut - 1):
                continue
            var candidate = Blocking(
                block_rows,
                min(unit_count * CPU_TILE.panels, panels),
                depth,
                ceildiv(problem.gemm_m(), block_rows),
                ceildiv(units, unit_count),
                problem.groups,
                row_aligned,
                _row_tiles(problem, block_rows, row_aligned),
                pointwise,
            )
            if (
                slices > 1
                and candidate.tiles() * CPU_TILE.elements()
                > CPU_TILE.max_accumulators
                and unit_count > 1
            ):
                continue
            var cost = _cost(candidate, products, threads)
            if cost < best_cost:
                best_cost = cost
                best = candidate
            if cut > 4 * threads:
                break
        rows -= CPU_TILE.rows
    return best


def _row_tiles(problem: ConvProblem, rows: Int, row_aligned: Bool) -> Int:
    """The most register tiles that `rows` neighbouring pixels are cut into."""
    if not row_aligned:
        return ceildiv(rows, CPU_TILE.rows)
    var ends = ceildiv(rows - 1, problem.output[2])
    return ceildiv(rows, CPU_TILE.rows) + ends


def _cost(blocking: Blocking, products: Int, threads: Int) -> Int:
    """The model's time of a cut, in vector multiply-adds."""
    var multiply = blocking.rows * blocking.panels * products
    var gather = blocking.rows * products // GATHER_COST
    var filter = (
        blocking.panels * PANEL * 4 * products // FILTER_BYTES_PER_CYCLE
    )
    var tasks = blocking.tasks()
    var rounds = ceildiv(tasks, threads)
    # Threads take tasks as they finish, so many small ones even out.
    var waste = rounds * threads - tasks
    return (
        (multiply + gather + filter)
        * (tasks * 64 + waste * 64)
        // (64 * threads)
    )


def for_each_task[
    Work: def(Int, Int) raises -> None
](work: Work, tasks: Int, workers: Int) raises:
    """Runs `work(worker, task)` for every task, each worker taking the next
    task as it finishes one.

    Args:
        work: What to do; must not touch another worker's memory.
        tasks: How many tasks there are.
        workers: How many of them may run at once, from 1.
    """
    if workers <= 1 or tasks <= 1:
        for task in range(tasks):
            work(0, task)
        return
    var next = Atomic[Int64](0)

    def worker_loop(worker: Int) raises {imm work, mut next, imm tasks}:
        while True:
            var task = Int(next.fetch_add(1))
            if task >= tasks:
                return
            work(worker, task)

    sync_parallelize(worker_loop, min(workers, tasks))
