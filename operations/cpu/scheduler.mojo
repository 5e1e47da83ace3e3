"""How a problem is cut into tasks, and how threads take them."""

from max.gpu.host.device_context import DeviceContextBase
from std.atomic import Atomic
from std.math import ceildiv
from std.sys.info import CompilationTarget

from .config import CPU_TILE, SOURCE_FLOAT32
from ..conv.fields import PANEL
from ..conv.problem import ConvProblem
from .image import copies_pay, longest_slice, strip_elements
from .mma import tile_rows

comptime CpuContext = DeviceContextBase[CompilationTarget()]
"""The device context of an op that runs on the CPU."""

comptime BYTES_PER_STEP = 8
"""Bytes of activation or packed filter that reach L2 in the time of one vector
multiply-add: a model, good enough to weigh reading them twice against an idle
thread."""

comptime GATHERED_PER_STEP = 4
"""Elements gathered in the time of one vector multiply-add."""

comptime MAX_BLOCK_TILES = 8
"""Register tiles of pixels of the largest task."""

comptime MAX_BLOCK_ELEMENTS = 1 << 17
"""Activations of the largest task's slice: half of a common L2 cache."""

comptime L1_FILTER_ELEMENTS = 1 << 13
"""Packed filter that may take most of L1."""

comptime STREAMED_ELEMENTS = 1 << 20
"""Packed filter beyond which panels arrive from memory, or nearly so."""

comptime ACCESS_GATHER = 0
"""Rows of the implicit im2col matrix are gathered: always possible."""

comptime ACCESS_IMAGE = 1
"""Tiles keep to rows of the output image and read rows of the input image:
where they lie, or copied with their padding."""

comptime ACCESS_MATRIX = 2
"""The activation is the implicit GEMM's matrix as it lies in memory."""


comptime MIN_IMAGE_ROWS = 5
"""Pixels of a register tile, in the mean, whose accumulators still hide the
latency of a multiply-add."""


@fieldwise_init
struct RowTile(ImplicitlyCopyable, Movable):
    """Rows `[row, row + rows)` of the implicit GEMM, a register tile's."""

    var row: Int
    var rows: Int


@fieldwise_init
struct Tiling(ImplicitlyCopyable, Movable):
    """A cut of the output pixels into register tiles: `lines` of `length`
    pixels, each in `per_line` tiles of at most `rows`."""

    var lines: Int
    var length: Int
    var per_line: Int
    var rows: Int

    def __init__(out self, lines: Int, length: Int):
        """Cuts lines evenly, since short tiles multiply less in a load, and at
        even pixels, since tiles of an odd number of rows waste one.

        Args:
            lines: How many.
            length: Pixels of each.
        """
        self.lines = lines
        self.length = length
        self.per_line = ceildiv(length, CPU_TILE.rows)
        self.rows = tile_rows(
            min(length, 2 * ceildiv(ceildiv(length, 2), self.per_line))
        )

    def computed(self) -> Int:
        """Pixels of a line that are computed, the excess ones included."""
        return self.length if self.length == 1 else ceildiv(self.length, 2) * 2

    def tiles(self) -> Int:
        """How many tiles there are."""
        return self.lines * self.per_line

    def tile(self, index: Int) -> RowTile:
        """A tile.

        Args:
            index: From 0 to `tiles() - 1`.

        Returns:
            Its rows.
        """
        var line, place = divmod(index, self.per_line)
        var pairs = ceildiv(self.length, 2)
        var first = place * pairs // self.per_line * 2
        var end = min((place + 1) * pairs // self.per_line * 2, self.length)
        return RowTile(line * self.length + first, end - first)


@fieldwise_init
struct Blocking(ImplicitlyCopyable, Movable, Writable):
    """A cut of the implicit GEMM into tasks of `tiles x panels` register
    tiles of `group_count` groups, each accumulated over slices of `depth`
    products."""

    var access: Int
    """An `ACCESS_*` code."""
    var tiling: Tiling
    var tiles: Int
    var panels: Int
    var group_count: Int
    var depth: Int
    var row_blocks: Int
    var panel_blocks: Int
    var group_blocks: Int
    var tile_elements: Int
    """Float32 values of scratch that a tile's activations take."""
    var streams: Bool
    """Whether panels are fetched ahead: the filter is too large for caches."""

    @staticmethod
    def nothing() -> Blocking:
        """What stands where a kernel is not an implicit GEMM."""
        return Blocking(
            ACCESS_GATHER, Tiling(0, 1), 0, 0, 0, PANEL, 0, 0, 0, 0, False
        )

    def tasks(self) -> Int:
        """How many tasks there are."""
        return self.row_blocks * self.panel_blocks * self.group_blocks

    def gathered_stride(self) -> Int:
        """Elements between two gathered rows."""
        return row_stride(self.depth)

    def units(self) -> Int:
        """Register tiles side by side over a group's panels of a task."""
        return ceildiv(self.panels, CPU_TILE.panels)

    def sums(self, products: Int) -> Int:
        """Register tiles whose partial sums a task keeps: all, or one where no
        sum outlives its tile.

        Args:
            products: Of an output.

        Returns:
            How many.
        """
        if self.depth >= products:
            return 1
        return self.tiles * self.group_count * self.units()

    def cached_panels(self) -> Int:
        """Panels that are multiplied by one tile after the other: as many as
        stay in L1, so that a tile's output is written in long pieces."""
        var unit = self.depth * CPU_TILE.columns()
        return max(1, L1_FILTER_ELEMENTS // unit) * CPU_TILE.panels

    def write_to(self, mut writer: Some[Writer]):
        """Writes the cut on one line.

        Args:
            writer: Where to.
        """
        writer.write(
            t"{self.tasks()} tasks of {self.tiles * self.tiling.rows} pixels x"
            t" {self.panels * self.group_count * PANEL} filters,"
            t" {self.depth} products deep"
        )


def row_stride(depth: Int) -> Int:
    """Elements between two gathered rows: room for the gather's excess, and an
    odd number of cache lines, so that the rows of a tile do not compete for
    one cache set.

    Args:
        depth: Products of a row.

    Returns:
        The stride.
    """
    return ((ceildiv(depth, PANEL) + 1) | 1) * PANEL


def choose_access(problem: ConvProblem, source: Int) -> Int:
    """How the tiles of a problem read the activation.

    Args:
        problem: The convolution, not depthwise.
        source: A `SOURCE_*` code.

    Returns:
        An `ACCESS_*` code.
    """
    if (
        source == SOURCE_FLOAT32
        and problem.groups == 1
        and problem.is_pointwise()
    ):
        return ACCESS_MATRIX
    var width = problem.output[2]
    var tiling = Tiling(1, width)
    # Tiles that keep to image rows must not be much worse than others.
    if tiling.computed() * 9 > width * 10:
        return ACCESS_GATHER
    if tiling.computed() * 4 < tiling.per_line * CPU_TILE.rows * 3:
        return ACCESS_GATHER
    # Gathered rows of several groups would be gathered group by group.
    if (
        problem.groups == 1
        and tiling.computed() < tiling.per_line * MIN_IMAGE_ROWS
    ):
        return ACCESS_GATHER
    if longest_slice(problem) < PANEL:
        return ACCESS_GATHER
    if not copies_pay(
        problem, tiling.rows, tiling.per_line, source == SOURCE_FLOAT32
    ):
        return ACCESS_GATHER
    return ACCESS_IMAGE


def _slice_depth(problem: ConvProblem, access: Int) -> Int:
    """Products of a slice: slices of about one length, in whole `PANEL`s."""
    var products = problem.gemm_k()
    var longest = CPU_TILE.max_depth
    if access == ACCESS_IMAGE:
        longest = min(longest, longest_slice(problem) // PANEL * PANEL)
    var slices = ceildiv(products, longest)
    return ceildiv(ceildiv(products, slices), PANEL) * PANEL


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
    var access = choose_access(problem, source)
    var tiling = Tiling(1, problem.gemm_m())
    if access == ACCESS_IMAGE:
        tiling = Tiling(
            problem.gemm_m() // problem.output[2], problem.output[2]
        )
    var depth = _slice_depth(problem, access)
    var units = ceildiv(problem.panels(), CPU_TILE.panels)
    # Only strips of the image serve several groups at once.
    var fewest = 1 if access == ACCESS_IMAGE else problem.groups
    var most = max(fewest, min(problem.groups * units, 4 * threads))
    var best = Blocking(
        access,
        tiling,
        1,
        0,
        0,
        depth,
        tiling.tiles(),
        0,
        0,
        tiling.rows * row_stride(depth),
        problem.packed_length() > STREAMED_ELEMENTS,
    )
    var best_cost = Int.MAX
    for tiles in range(min(MAX_BLOCK_TILES, tiling.tiles()), 0, -1):
        var candidate = best
        candidate.tiles = tiles
        candidate.row_blocks = ceildiv(tiling.tiles(), tiles)
        for cut in range(fewest, most + 1):
            var group_count = candidate.group_count
            var panels = candidate.panels
            _cut_filters(candidate, problem, cut)
            if (
                cut > fewest
                and candidate.group_count == group_count
                and candidate.panels == panels
            ):
                continue
            var read = tiling.rows * depth * candidate.group_count
            var block = tiles * max(read, candidate.tile_elements)
            if tiles > 1 and block > MAX_BLOCK_ELEMENTS:
                continue
            if (
                candidate.sums(problem.gemm_k()) * CPU_TILE.elements()
                > CPU_TILE.max_accumulators
                and cut < most
            ):
                continue
            var cost = _cost(candidate, problem, threads)
            if cost < best_cost:
                best_cost = cost
                best = candidate
    return best


def _cut_filters(mut blocking: Blocking, problem: ConvProblem, parts: Int):
    """Cuts the filters into about so many parts: groups first, then the panels
    of each."""
    var panels = problem.panels()
    var units = ceildiv(panels, CPU_TILE.panels)
    var group_count = ceildiv(problem.groups, parts)
    var unit_count = ceildiv(units, ceildiv(parts, problem.groups))
    blocking.group_count = group_count
    blocking.group_blocks = ceildiv(problem.groups, group_count)
    blocking.panels = min(unit_count * CPU_TILE.panels, panels)
    blocking.panel_blocks = ceildiv(units, unit_count)
    if blocking.access == ACCESS_IMAGE:
        blocking.tile_elements = strip_elements(
            problem, blocking.tiling.rows, blocking.depth, group_count
        )


def _cost(blocking: Blocking, problem: ConvProblem, threads: Int) -> Int:
    """The model's time of a cut, in vector multiply-adds."""
    var products = problem.gemm_k()
    var rows = blocking.tiles * blocking.tiling.rows
    var columns = blocking.panels * PANEL
    var multiply = rows * blocking.panels * products
    var read = (rows + columns) * products * 4 // BYTES_PER_STEP
    if blocking.access == ACCESS_GATHER:
        read += rows * products // GATHERED_PER_STEP
    var rounds = ceildiv(blocking.tasks(), threads)
    return (multiply + read) * blocking.group_count * rounds


def for_each_task[
    Work: def(Int, Int) -> None
](work: Work, tasks: Int, workers: Int, ctx: CpuContext) raises:
    """Runs `work(worker, task)` for every task, each worker taking the next
    task as it finishes one.

    Args:
        work: What to do; must not touch another worker's memory.
        tasks: How many tasks there are.
        workers: How many of them may run at once, from 1.
        ctx: The CPU, whose threads help.

    Raises:
        If the CPU's queue refuses the work.
    """
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

    ctx.enqueue_cpu_range(worker_loop, min(workers, tasks))
    ctx.synchronize()
