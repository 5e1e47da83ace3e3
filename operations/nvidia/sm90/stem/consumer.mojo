"""A consumer of the Hopper stem kernel: a warpgroup that multiplies 64 pixels of
its block in turn with the others, and stores them."""

from max.gpu.compute.mma import (
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.sync import syncwarp
from std.sys._assembly import inlined_assembly
from std.sys.info import size_of
from std.utils import StaticTuple

from ....conv.access import OutputTarget
from ...im2col.traversal import ROW_BYTES
from ...limits import WARP, WARPGROUP
from ...pipeline.ring import RingPosition
from ...tma.copy import SharedAddress
from ..wgmma import MMA_M, matrix_descriptor
from .geometry import (
    ATOM_STEPS,
    GROUP_FILTERS,
    STAGES,
    StemConfig,
    StemGeometry,
)
from .mma import Fragment, multiply_fragment
from .outputs import StemOutputs
from .pixels import StemFilters, StemRows
from .runs import StemRuns
from .staging import load_shared
from .storage import FACTOR_BYTES, StemStorage

comptime MMA_K = 16
"""Products that one instruction sums, of 16-bit elements."""

comptime KEPT_STEPS = 3
"""Multiplies whose activations registers hold behind them."""

comptime PLAIN = 0
comptime GROUPS = 1
comptime ANYWHERE = 2
"""Outputs that are sums, stored by groups of filters; outputs of any epilogue,
stored by groups; outputs of any epilogue whose pixels are not aligned to
groups. Each has a loop of its own, so that it holds nothing for the others."""


@fieldwise_init
struct StemConsumer[
    in_type: DType,
    residual_type: DType,
    Output: OutputTarget,
    config: StemConfig,
](TrivialRegisterPassable):
    """A thread of a consumer.

    Parameters:
        in_type: Of activation and filter.
        residual_type: Of the residual.
        Output: How the output is reached.
        config: The configuration.
    """

    comptime accumulators = MMA_M * Self.config.tile_n // WARPGROUP
    comptime Accumulated = SIMD[DType.float32, Self.accumulators]
    comptime Gathered = StaticTuple[Fragment, Self.config.steps]
    comptime Position = RingPosition[STAGES]
    comptime Outputs = StemOutputs[Self.residual_type, Self.Output, Self.config]

    var output: Self.Output
    var geometry: StemGeometry
    var storage: StemStorage
    var first_filter: UInt32
    """The block's."""
    var consumer: UInt32
    """Which of the block's."""
    var thread: UInt32
    """Of the warpgroup."""

    @always_inline
    def run[
        outputs: Int
    ](self, steps: Self.Outputs.Steps, worker: UInt32, workers: UInt32):
        """Multiplies and stores.

        Parameters:
            outputs: `PLAIN`, `GROUPS` or `ANYWHERE`.

        Args:
            steps: The epilogue.
            worker: The block's first tile.
            workers: From a tile of the block to the next.
        """
        var position = Self.Position()
        var multiplies = self.geometry.multiplies()
        var next = self.consumer
        for index in range(worker, self.geometry.tiles, workers):
            var tile = self.geometry.tile(index)
            var first_output = self.geometry.first_output(tile)
            var stage = self.storage.stage(position.stage)
            comptime if outputs == GROUPS:
                if steps.has_residual and next < multiplies:
                    self._prefetch_residual(
                        steps,
                        StemRows(
                            self.geometry,
                            tile,
                            first_output,
                            next * UInt32(MMA_M),
                            self.thread,
                        ),
                    )
            self.storage.full(position.stage).wait(position.parity)
            while next < multiplies:
                self._consume_rows[outputs](
                    steps,
                    stage,
                    StemRows(
                        self.geometry,
                        tile,
                        first_output,
                        next * UInt32(MMA_M),
                        self.thread,
                    ),
                )
                next += UInt32(Self.config.consumers)
            next -= multiplies
            syncwarp()
            if self.thread % UInt32(WARP) == 0:
                self.storage.empty(position.stage).arrive()
            position.step()

    @always_inline
    def _tile_filter(self, tile_n: UInt32) -> UInt32:
        """The first filter of one of the block's multiplies.

        Args:
            tile_n: Which one.
        """
        return self.first_filter + tile_n * UInt32(Self.config.tile_n)

    @always_inline
    def _prefetch_residual(self, steps: Self.Outputs.Steps, rows: StemRows):
        """Asks for the residual of the block's filters of 64 pixels in the L2,
        while their tile is staged."""
        for n in range(self.geometry.tiles_n):
            var filters = StemFilters(
                self.geometry, self._tile_filter(n), self.thread
            )
            Self.Outputs.prefetch_residual(steps, rows, filters)

    @always_inline
    def _consume_rows[
        outputs: Int
    ](self, steps: Self.Outputs.Steps, stage: SharedAddress, rows: StemRows):
        """The block's filters of 64 pixels.

        Parameters:
            outputs: As for `run`.
        """
        var activations = Self.Gathered(fill=Fragment(0))
        for n in range(self.geometry.tiles_n):
            var filters = StemFilters(
                self.geometry, self._tile_filter(n), self.thread
            )
            comptime if outputs == PLAIN:
                var sums = self._multiply(stage, rows, n, activations)
                Self.Outputs.store_plain(self.output, rows, filters, sums)
            elif outputs == GROUPS:
                var residual = Self.Outputs.load_groups(steps, rows, filters)
                var sums = self._multiply(stage, rows, n, activations)
                var values = Self.Outputs.finish(
                    steps, sums, self._factors(n), residual
                )
                Self.Outputs.store_groups(self.output, rows, filters, values)
            elif Self.Outputs.in_runs:
                var runs = self._runs(rows, filters)
                if steps.has_residual:
                    runs.copy_residual(self.geometry, steps.residual)
                var sums = self._multiply(stage, rows, n, activations)
                var residual = Self.Outputs.Residual(0)
                if steps.has_residual:
                    residual = Self.Outputs.words_of(
                        runs.load[Self.residual_type](self.geometry)
                    )
                var values = Self.Outputs.finish(
                    steps, sums, self._factors(n), residual
                )
                runs.store(self.geometry, self.output.data(), values)
            else:
                var residual = Self.Outputs.load_singly(steps, rows, filters)
                var sums = self._multiply(stage, rows, n, activations)
                var values = Self.Outputs.finish(
                    steps, sums, self._factors(n), residual
                )
                Self.Outputs.store_singly(self.output, rows, filters, values)

    @always_inline
    def _runs(
        self, rows: StemRows, filters: StemFilters
    ) -> StemRuns[Self.config]:
        """The runs of the warp's outputs of a multiply."""
        var warp, lane = divmod(self.thread, UInt32(WARP))
        var buffer = self.storage.run[Self.config](
            self.consumer * UInt32(WARPGROUP // WARP) + warp
        )
        return StemRuns[Self.config](self.geometry, rows, filters, buffer, lane)

    @always_inline
    def _factors(self, tile_n: UInt32) -> SharedAddress:
        """Where the factors of the thread's filters of a multiply begin."""
        comptime tile_bytes = UInt32(Self.config.tile_n * FACTOR_BYTES)
        comptime group_bytes = UInt32(GROUP_FILTERS * FACTOR_BYTES // 2)
        return (
            self.storage.factors
            + tile_n * tile_bytes
            + self.thread % 4 * group_bytes
        )

    @always_inline
    def _multiply(
        self,
        stage: SharedAddress,
        rows: StemRows,
        tile_n: UInt32,
        mut activations: Self.Gathered,
    ) -> Self.Accumulated:
        """The sums of 64 pixels by `tile_n` filters. Activations of one chunk
        stay in registers for the next tile of filters, if they are few."""
        comptime chunk_bytes = UInt32(Self.config.chunk_bytes())
        var chunks = self.geometry.chunks.value
        var sums = Self.Accumulated(0)
        var offsets = self.storage.table + (self.thread % 4) * (
            chunks * UInt32(Self.config.chunk_offsets() * 4)
        )
        var filters = self.storage.filter + tile_n * chunks * chunk_bytes
        # A loop of at least one turn, before which nothing is prepared twice.
        var left = chunks
        while True:
            if Self.config.steps > KEPT_STEPS or chunks > 1 or tile_n == 0:
                activations = self._gather(
                    stage + rows.low.quad, stage + rows.high.quad, offsets
                )
            wgmma_fence_aligned()
            comptime for k in range(Self.config.steps):
                comptime at = (
                    k // ATOM_STEPS * Self.config.tile_n * ROW_BYTES
                    + k % ATOM_STEPS * MMA_K * size_of[Self.in_type]()
                )
                sums = multiply_fragment[Self.in_type, Self.config.tile_n](
                    activations[k],
                    matrix_descriptor[Self.in_type, at](filters),
                    sums,
                )
            wgmma_commit_group_sync()
            wgmma_wait_group_sync[0]()
            # Keeps the compiler from reading a sum before the wait, whose
            # effect on registers it does not know.
            comptime for r in range(Self.accumulators):
                sums[r] = inlined_assembly[
                    "", Float32, constraints="=f,0,~{memory}"
                ](sums[r])
            filters += chunk_bytes
            offsets += UInt32(Self.config.chunk_offsets() * 4)
            left -= 1
            if left == 0:
                return sums

    @always_inline
    def _gather(
        self, low: SharedAddress, high: SharedAddress, offsets: SharedAddress
    ) -> Self.Gathered:
        """Loads a chunk of two pixels' quads, as the multiply takes them."""
        var zeros = self.storage.zeros
        var result = Self.Gathered(fill=Fragment(0))
        comptime for atom in range(Self.config.atoms()):
            var four = load_shared[DType.uint32, ATOM_STEPS](
                offsets + UInt32(atom * ATOM_STEPS * 4)
            )
            comptime for i in range(ATOM_STEPS):
                comptime k = atom * ATOM_STEPS + i
                comptime if k < Self.config.steps:
                    var a = load_shared[DType.uint32, 2](
                        min(low + four[i], zeros)
                    )
                    var b = load_shared[DType.uint32, 2](
                        min(high + four[i], zeros)
                    )
                    result[k] = Fragment(a[0], b[0], a[1], b[1])
        return result
