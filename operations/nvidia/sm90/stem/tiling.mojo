"""How the Hopper stem kernel cuts a problem: its filters into blocks, its pixels
into tiles, as a model of the time finds fastest."""

from std.math import align_up, ceildiv

from ....conv.divisor import Divisor, SmallDivisor
from ....conv.memory import element_bytes
from ....conv.problem import ConvProblem
from ...limits import MAX_SHARED_BYTES, WARPGROUP
from ..wgmma import MMA_M
from .geometry import (
    PAIR_CHANNELS,
    PAIRS_TOGETHER,
    PARTS_TOGETHER,
    QUAD,
    QUAD_BYTES,
    QUADS_TOGETHER,
    STAGES,
    STEM_CANDIDATES,
    STEP_QUADS,
    STRIP_QUADS,
    STRIPS_TOGETHER,
    StemConfig,
    StemGeometry,
    quads_of,
    stem_candidate,
    tap_columns,
)
from .storage import BARRIERS_BYTES, FACTOR_BYTES, runs_bytes


@fieldwise_init
struct StemTiling(ImplicitlyCopyable, Movable, Writable):
    """How a problem is cut, and the shared memory that this takes."""

    var chunks: Int
    """Chunks of a filter's products."""
    var filter_blocks: Int
    """Blocks that share a tile's filters."""
    var tiles_n: Int
    """Multiplies' filters of a block."""
    var filter_bytes: Int
    var table_bytes: Int
    var factor_bytes: Int
    var runs_bytes: Int
    """Of the warps' buffers of outputs."""
    var tile_rows: Int
    var tile_columns: Int
    var tiles: Int
    var staged_rows: Int
    var staged_quads: Int
    """Quads of a staged row."""
    var row_quads: Int
    """From a staged row to the next."""
    var stage_quads: Int
    """Quads of a staged tile."""

    def __init__(out self, config: StemConfig, problem: ConvProblem):
        """Cuts the filters. `choose_pixels` cuts the pixels.

        Args:
            config: The configuration.
            problem: The convolution, with at least one filter.
        """
        self.chunks = chunks_of(config, problem)
        var all_n = ceildiv(problem.filters, config.tile_n)
        var tile_bytes = self.chunks * config.chunk_bytes()
        var most = max(1, MAX_FILTER_BYTES // tile_bytes)
        self.tiles_n = ceildiv(all_n, ceildiv(all_n, most))
        self.filter_blocks = ceildiv(all_n, self.tiles_n)
        self.filter_bytes = self.tiles_n * tile_bytes
        self.table_bytes = STEP_QUADS * self.chunks * config.chunk_offsets() * 4
        self.factor_bytes = self.tiles_n * config.tile_n * FACTOR_BYTES
        self.runs_bytes = runs_bytes(config, problem.filters)
        self.tile_rows = 0
        self.tile_columns = 0
        self.tiles = 0
        self.staged_rows = 0
        self.staged_quads = 0
        self.row_quads = 0
        self.stage_quads = 0
        self.cut_pixels(problem, 1, 1)

    def cut_pixels(mut self, problem: ConvProblem, rows: Int, columns: Int):
        """Cuts planes of the output into tiles.

        Args:
            problem: The convolution.
            rows: Of a tile.
            columns: Of a tile.
        """
        self.tile_rows = rows
        self.tile_columns = columns
        self.tiles = (
            problem.batch
            * problem.output[0]
            * ceildiv(problem.output[1], rows)
            * ceildiv(problem.output[2], columns)
        )
        self.staged_rows = (rows - 1) * problem.stride[1] + problem.span(1)
        self.staged_quads = (
            (columns - 1) * problem.stride[2]
            + problem.span(2)
            - (tap_columns(problem) - 1)
        ) * quads_of(problem)
        self._space_rows(
            problem,
            align_up(self.staged_quads + BANK_QUADS - 1, STRIP_QUADS),
        )

    def _space_rows(mut self, problem: ConvProblem, row_quads: Int):
        """Sets how far staged rows are apart.

        Args:
            problem: The convolution.
            row_quads: In quads.
        """
        self.row_quads = row_quads
        self.stage_quads = problem.filter[0] * self.staged_rows * row_quads

    def choose_pixels(
        mut self,
        config: StemConfig,
        problem: ConvProblem,
        out_type: DType,
        multiprocessors: Int,
    ):
        """Cuts the pixels as the model finds fastest.

        Args:
            config: The configuration.
            problem: The convolution, with at least one output.
            out_type: Of the output.
            multiprocessors: Of the device.
        """
        var workers = self._workers(config, multiprocessors)
        var most_bytes = resident_bytes(config)
        if self.shared_bytes() > most_bytes:
            # One block of a multiprocessor rather than none.
            most_bytes = MAX_SHARED_BYTES
        var multiply = max(
            multiply_cycles(config, problem),
            Float64(MMA_M * config.tile_n * element_bytes(out_type))
            / STORE_BYTES_PER_CYCLE,
        ) * Float64(self.tiles_n * config.resident)
        var best = self
        var least = Float64.MAX
        var least_multiplying = Float64.MAX
        for parts in range(1, min(MAX_ROW_CUTS, problem.output[2]) + 1):
            for rows in range(1, min(MAX_TILE_ROWS, problem.output[1]) + 1):
                self.cut_pixels(
                    problem, rows, ceildiv(problem.output[2], parts)
                )
                if self.shared_bytes() > most_bytes:
                    break
                var staging = staging_cycles(problem, self)
                var multiplying = TILE_CYCLES + multiply * Float64(
                    ceildiv(rows * self.tile_columns, MMA_M)
                )
                var cycles = staging + Float64(
                    ceildiv(self.tiles, workers)
                ) * max(staging, multiplying)
                # Staging decides where loads take longest; the last tile is
                # multiplied all the same.
                if cycles < least or (
                    cycles == least and multiplying < least_multiplying
                ):
                    least = cycles
                    least_multiplying = multiplying
                    best = self
            # Narrower tiles stage more: only as far as needed.
            if (
                least < Float64.MAX
                and parts >= ENOUGH_ROW_CUTS
                and best.tiles >= workers
            ):
                break
        self = best
        self._spread_rows(problem)
        self._share_filters(config, problem, multiprocessors)

    def _spread_rows(mut self, problem: ConvProblem):
        """Spaces staged rows so that consumers read them with the fewest bank
        conflicts, within the shared memory that they have.

        Args:
            problem: The convolution.
        """
        var most = self.row_quads
        var first = self.staged_quads
        var unit = 1
        if tap_columns(problem) > 1:
            # Strips are stored in units of 16 bytes.
            first = align_up(first, STRIP_QUADS)
            unit = 2
        var best = most
        var least = Int.MAX
        for quads in range(first, most + 1, unit):
            self._space_rows(problem, quads)
            var wavefronts = gather_wavefronts(problem, self)
            if wavefronts < least:
                least = wavefronts
                best = quads
        self._space_rows(problem, best)

    def _share_filters(
        mut self, config: StemConfig, problem: ConvProblem, multiprocessors: Int
    ):
        """Has more blocks share a tile's filters where there are
        multiprocessors without a tile: a consumer multiplies them one after
        the other.

        Args:
            config: The configuration.
            problem: The convolution.
            multiprocessors: Of the device.
        """
        var all_n = ceildiv(problem.filters, config.tile_n)
        var blocks = min(
            all_n, config.resident * multiprocessors // max(1, self.tiles)
        )
        if blocks <= self.filter_blocks:
            return
        self.tiles_n = ceildiv(all_n, blocks)
        self.filter_blocks = ceildiv(all_n, self.tiles_n)
        self.filter_bytes = self.tiles_n * self.chunks * config.chunk_bytes()
        self.factor_bytes = self.tiles_n * config.tile_n * FACTOR_BYTES

    def _workers(self, config: StemConfig, multiprocessors: Int) -> Int:
        """Blocks that share the tiles of the same filters, at most.

        Args:
            config: The configuration.
            multiprocessors: Of the device.
        """
        return max(1, config.resident * multiprocessors // self.filter_blocks)

    def blocks(self, config: StemConfig, multiprocessors: Int) -> Int:
        """Blocks of a launch.

        Args:
            config: The configuration.
            multiprocessors: Of the device.
        """
        var workers = self._workers(config, multiprocessors)
        return min(workers, self.tiles) * self.filter_blocks

    def stage_bytes(self) -> Int:
        """Shared memory of a staged tile."""
        return ceildiv(self.stage_quads * QUAD_BYTES, 16) * 16

    def shared_bytes(self) -> Int:
        """Shared memory of a block, as `StemStorage` lays it out."""
        return (
            BARRIERS_BYTES
            + self.filter_bytes
            + self.table_bytes
            + self.factor_bytes
            + self.runs_bytes
            + STAGES * self.stage_bytes()
            + QUAD_BYTES
        )

    def write_to(self, mut writer: Some[Writer]):
        """Writes the cut on one line."""
        writer.write(
            t"{self.tiles} tiles of {self.tile_rows}x{self.tile_columns}"
            t" pixels, {self.filter_blocks} blocks of {self.tiles_n} tiles of"
            t" filters, {self.chunks} chunks, {self.shared_bytes()} bytes of"
            t" shared memory"
        )


def resident_bytes(config: StemConfig) -> Int:
    """Shared memory of a block, at most, of which a multiprocessor has all
    that it should."""
    return (MAX_SHARED_BYTES + BLOCK_BYTES) // config.resident - BLOCK_BYTES


comptime BLOCK_BYTES = 1024
"""Shared memory that a block takes beside its own."""

comptime MAX_FILTER_BYTES = 112 * 1024
"""Shared memory that a block's filters take, unless one tile takes more."""

comptime MAX_TILE_ROWS = 24
comptime MAX_ROW_CUTS = 256
"""Rows of a tile, and pieces that a row of the output is cut into, at most."""

comptime BANK_QUADS = 16
"""Quads after which shared memory's banks repeat."""

comptime COUNTED_STEPS = 8
"""Steps whose bank conflicts are counted."""

comptime ENOUGH_ROW_CUTS = 6
"""Pieces that are tried where fewer would do: where multiprocessors have a tile
each."""

# The model's constants, in cycles of a multiprocessor.

comptime FULL_MULTIPLY_CYCLES = 32.0
"""Of 64 pixels by 64 filters by 16 products."""

comptime ROWS_CYCLES = 100.0
comptime STEP_CYCLES = 13.0
"""Of a consumer's instructions for 64 pixels, and for 16 of their products."""

comptime STORE_BYTES_PER_CYCLE = 18.0
"""Of device memory, a multiprocessor's share."""

comptime TILE_CYCLES = 200.0
"""Of a tile, for what producer and consumers do once."""

comptime BATCH_CYCLES = 500.0
"""From a producer's first load to its first value, once a batch."""

comptime PAIR_CYCLES = 130.0
comptime STRIP_CYCLES = 130.0
comptime QUAD_CYCLES = 75.0
comptime ELEMENTS_CYCLES = 125.0
"""Of what each producer's thread does: pairs of pixels, strips, quads that are
loaded at once, and quads whose elements are."""


def chunks_of(config: StemConfig, problem: ConvProblem) -> Int:
    """Chunks of a filter's products."""
    return ceildiv(
        problem.taps() // tap_columns(problem) * quads_of(problem),
        STEP_QUADS * config.steps,
    )


def multiply_cycles(config: StemConfig, problem: ConvProblem) -> Float64:
    """The model's time of 64 pixels by `tile_n` filters: of the multiplies, or
    of the instructions around them."""
    var steps = Float64(chunks_of(config, problem) * config.steps)
    return max(
        FULL_MULTIPLY_CYCLES * steps * Float64(config.tile_n) / 64.0,
        ROWS_CYCLES + steps * STEP_CYCLES + Float64(config.tile_n),
    )


def staging_cycles(problem: ConvProblem, tiling: StemTiling) -> Float64:
    """The model's time of staging a tile."""
    var units = tiling.staged_rows * tiling.staged_quads
    var together = QUADS_TOGETHER
    var each = QUAD_CYCLES
    if problem.channels % QUAD != 0:
        together = PARTS_TOGETHER
        each = ELEMENTS_CYCLES
    if problem.channels == PAIR_CHANNELS:
        units = tiling.staged_rows * pairs_of(tiling)
        together = PAIRS_TOGETHER
        each = PAIR_CYCLES
    if tap_columns(problem) > 1:
        units = tiling.staged_rows * units_of(problem, tiling)
        together = STRIPS_TOGETHER
        each = STRIP_CYCLES
    var batches = ceildiv(units, together * WARPGROUP)
    return TILE_CYCLES + Float64(problem.filter[0] * batches) * (
        BATCH_CYCLES + each * Float64(together)
    )


def gather_wavefronts(problem: ConvProblem, tiling: StemTiling) -> Int:
    """Turns of shared memory in which 16 threads, which are served together,
    read the quads of 4 neighbouring pixels: of the first steps' taps.

    Args:
        problem: The convolution.
        tiling: Its cut.
    """
    var taps_w = problem.filter[2] // tap_columns(problem)
    var dilation = problem.dilation[2] * tap_columns(problem)
    var parts = quads_of(problem)
    var quads = problem.filter[0] * problem.filter[1] * taps_w * parts
    var steps = min(ceildiv(quads, STEP_QUADS), COUNTED_STEPS)
    var total = 0
    for step in range(steps):
        var of_bank = Array[Int, BANK_QUADS](fill=0)
        var addresses = List[Int](capacity=BANK_QUADS)
        for t in range(min(STEP_QUADS, quads - step * STEP_QUADS)):
            var tap, part = divmod(step * STEP_QUADS + t, parts)
            var row, s = divmod(tap, taps_w)
            var plane, r = divmod(row, problem.filter[1])
            var staged = plane * tiling.staged_rows + r * problem.dilation[1]
            var first = staged * tiling.row_quads + s * dilation * parts + part
            for pixel in range(BANK_QUADS // STEP_QUADS):
                var address = first + pixel * problem.stride[2] * parts
                if address not in addresses:
                    addresses.append(address)
                    of_bank[address % BANK_QUADS] += 1
        var turns = 0
        for bank in range(BANK_QUADS):
            turns = max(turns, of_bank[bank])
        total += turns
    return total


def units_of(problem: ConvProblem, tiling: StemTiling) -> Int:
    """Pairs or strips that a staged row has parts of."""
    if tap_columns(problem) > 1:
        return ceildiv(tiling.staged_quads, STRIP_QUADS)
    return pairs_of(tiling)


def pairs_of(tiling: StemTiling) -> Int:
    """Pairs of pixels that a staged row has parts of, wherever it begins."""
    return tiling.staged_quads // 2 + 1


def choose_stem(problem: ConvProblem) -> Int:
    """The candidate whose multiplies take the least time. Of equal ones it is
    the last, which gathers the most at a time."""
    var best = 0
    var least = Float64.MAX
    for index in range(STEM_CANDIDATES):
        var config = stem_candidate(index)
        var cycles = multiply_cycles(config, problem) * Float64(
            ceildiv(problem.filters, config.tile_n)
        )
        if cycles <= least:
            best = index
            least = cycles
    return best


def stem_geometry(problem: ConvProblem, plan: StemTiling) -> StemGeometry:
    """Builds the geometry from a problem and its cut."""
    var columns = tap_columns(problem)
    return StemGeometry(
        channels=UInt32(problem.channels),
        tap_channels=UInt32(problem.channels * columns),
        quad_shift=UInt32(quads_of(problem) - 1),
        depth=Int32(problem.input[0]),
        height=Int32(problem.input[1]),
        width=Int32(problem.input[2]),
        step_d=Int32(problem.stride[0]),
        step_h=Int32(problem.stride[1]),
        step_w=Int32(problem.stride[2]),
        start_d=Int32(-problem.pad_before[0]),
        start_h=Int32(-problem.pad_before[1]),
        start_w=Int32(-problem.pad_before[2]),
        dilation_d=Int32(problem.dilation[0]),
        dilation_h=Int32(problem.dilation[1]),
        dilation_w=Int32(problem.dilation[2] * columns),
        taps_d=UInt32(problem.filter[0]),
        taps_h=Divisor(problem.filter[1]),
        taps_w=Divisor(problem.filter[2] // columns),
        out_planes=Divisor(problem.output[0]),
        out_rows=UInt32(problem.output[1]),
        out_columns=UInt32(problem.output[2]),
        filters=UInt32(problem.filters),
        tile_rows=UInt32(plan.tile_rows),
        tile_columns=SmallDivisor(plan.tile_columns),
        tiles_h=Divisor(ceildiv(problem.output[1], plan.tile_rows)),
        tiles_w=Divisor(ceildiv(problem.output[2], plan.tile_columns)),
        tiles=UInt32(plan.tiles),
        filter_blocks=Divisor(plan.filter_blocks),
        tiles_n=UInt32(plan.tiles_n),
        staged_rows=UInt32(plan.staged_rows),
        staged_quads=SmallDivisor(plan.staged_quads),
        row_quads=UInt32(plan.row_quads),
        staged_columns=UInt32(
            plan.staged_quads // quads_of(problem) + columns - 1
        ),
        staged_units=SmallDivisor(units_of(problem, plan)),
        row_bytes=UInt32(problem.stride[1] * plan.row_quads * QUAD_BYTES),
        column_bytes=UInt32(problem.stride[2] * quads_of(problem) * QUAD_BYTES),
        chunks=SmallDivisor(plan.chunks),
    )
