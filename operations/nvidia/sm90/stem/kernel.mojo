"""The Hopper stem kernel: persistent, warp-specialized, for few input channels.

    consumers, first:                pack the filter into shared memory
    producer, a warpgroup:           for each tile: stage its input pixels
    consumers, a warpgroup each:     for each tile, for every third 64 of its
                                     pixels: gather their activations into
                                     registers, multiply, store

The multiply reads activations from registers and filters from shared memory.
Filters are ordered so that a thread's accumulators are 8 neighbouring filters.
"""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.compute.mma import (
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.intrinsics import warpgroup_reg_alloc, warpgroup_reg_dealloc
from max.gpu.memory import external_memory
from max.gpu.sync import syncwarp
from std.sys._assembly import inlined_assembly
from std.sys.info import size_of
from std.utils import StaticTuple

from ....conv.access import OutputTarget
from ....conv.epilogue import Epilogue
from ....conv.memory import Reads
from ...pipeline.barrier import (
    BARRIER_BYTES,
    Barrier,
    publish_barriers,
    sync_threads,
)
from ...pipeline.ring import RingPosition
from ...tma.copy import SharedAddress, fence_async_proxy
from ...im2col.traversal import ROW_BYTES
from ...limits import PATTERN_BYTES, WARP, WARPGROUP
from ...overlap import wait_for_earlier_kernels
from ..wgmma import MMA_M, matrix_descriptor
from .geometry import (
    ATOM_STEPS,
    BARRIERS_BYTES,
    CONSUMERS,
    CONSUMER_THREADS,
    QUAD_BYTES,
    STAGES,
    STEP_QUADS,
    StemConfig,
    StemGeometry,
)
from .filters import pack_filter, write_table
from .mma import Fragment, multiply_fragment
from .pixels import GROUP_FILTERS, StemFilters, StemRows
from .outputs import StemOutputs
from .staging import load_shared, visit_planes

comptime THREADS = (1 + CONSUMERS) * WARPGROUP
"""Threads of a block: the producer's warpgroup comes first."""

comptime PRODUCER_REGISTERS = 56
comptime CONSUMER_REGISTERS = 152
"""Registers of a thread once the roles are taken; with the producer's they are
as many as a multiprocessor has."""

comptime MMA_K = 16
"""Products that one instruction sums, of 16-bit elements."""

comptime KEPT_STEPS = 3
"""Multiplies whose activations registers hold behind them."""

comptime CONSUMER_NAME = 1
"""The named barrier of all consumers."""


@fieldwise_init
struct StemStorage(TrivialRegisterPassable):
    """The layout of a block's shared memory: barriers, zeros, filters, table,
    stages."""

    var barriers: SharedAddress
    var filter: SharedAddress
    var table: SharedAddress
    """Offsets of quads: of thread t % 4 = 0, then of 1, 2 and 3."""
    var stages: SharedAddress
    var stage_bytes: UInt32
    var zeros: SharedAddress
    """A quad of zeros after everything else."""

    @always_inline
    def full(self, stage: UInt32) -> Barrier:
        """The barrier that completes when a stage has its pixels.

        Args:
            stage: The stage.
        """
        return Barrier(self.barriers + stage * BARRIER_BYTES)

    @always_inline
    def empty(self, stage: UInt32) -> Barrier:
        """The barrier that completes when a stage may be overwritten.

        Args:
            stage: The stage.
        """
        return Barrier(self.barriers + (stage + UInt32(STAGES)) * BARRIER_BYTES)

    @always_inline
    def stage(self, stage: UInt32) -> SharedAddress:
        """The address of a stage's pixels.

        Args:
            stage: The stage.
        """
        return self.stages + stage * self.stage_bytes


@fieldwise_init
struct StemKernel[
    in_type: DType,
    bias_type: DType,
    residual_type: DType,
    Output: OutputTarget,
    config: StemConfig,
]:
    """The kernel of a configuration.

    Parameters:
        in_type: Of activation and filter: bfloat16 or float16.
        bias_type: Of the bias.
        residual_type: Of the residual.
        Output: How the output is reached.
        config: The configuration.
    """

    comptime accumulators = MMA_M * Self.config.tile_n // WARPGROUP
    comptime Accumulated = SIMD[DType.float32, Self.accumulators]
    comptime Gathered = StaticTuple[Fragment, Self.config.steps]
    comptime Position = RingPosition[STAGES]
    comptime FusedWork = Epilogue[Self.bias_type, Self.residual_type]
    comptime Outputs = StemOutputs[
        Self.bias_type, Self.residual_type, Self.Output, Self.config
    ]

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
        `nvvm.minctasm`=SIMDLength(1),
    )
    def run(
        activation: Reads[Self.in_type],
        filter: Reads[Self.in_type],
        epilogue: Self.FusedWork,
        output: Self.Output,
        geometry: StemGeometry,
    ):
        """A block: its threads take their roles.

        Args:
            activation: `[N, D, H, W, C]`.
            filter: `[K, T, R, S, C]`.
            epilogue: What happens before the store.
            output: `[N, Z, P, Q, K]`.
            geometry: The problem.
        """
        var storage = Self._storage(geometry)
        var group, thread = divmod(UInt32(thread_idx.x), UInt32(WARPGROUP))
        var worker, filters = geometry.filter_blocks.split(UInt32(block_idx.x))
        var workers, _rest = geometry.filter_blocks.split(UInt32(grid_dim.x))
        if thread_idx.x == 0:
            for stage in range(STAGES):
                storage.full(UInt32(stage)).init(WARPGROUP)
                storage.empty(UInt32(stage)).init(CONSUMER_THREADS // WARP)
            publish_barriers()
        sync_threads[THREADS](0)
        if group == 0:
            warpgroup_reg_dealloc[PRODUCER_REGISTERS]()
            wait_for_earlier_kernels()
            Self._produce(
                activation, geometry, storage, worker, workers, thread
            )
        else:
            warpgroup_reg_alloc[CONSUMER_REGISTERS]()
            var first = filters * geometry.tiles_n * UInt32(Self.config.tile_n)
            var consumer_thread = UInt32(thread_idx.x) - UInt32(WARPGROUP)
            write_table[Self.config](
                geometry, storage.table, storage.zeros, consumer_thread
            )
            wait_for_earlier_kernels()
            pack_filter[Self.config](
                filter, geometry, storage.filter, first, consumer_thread
            )
            fence_async_proxy()
            sync_threads[CONSUMER_THREADS](CONSUMER_NAME)
            Self._consume(
                epilogue,
                output,
                geometry,
                storage,
                worker,
                workers,
                first,
                group - 1,
                thread,
            )

    @staticmethod
    @always_inline
    def _storage(geometry: StemGeometry) -> StemStorage:
        """Lays out the block's dynamic shared memory."""
        var base = external_memory[
            UInt8, address_space=AddressSpace.SHARED, alignment=PATTERN_BYTES
        ]()
        var barriers = SharedAddress(Int(base))
        var filter = barriers + UInt32(BARRIERS_BYTES)
        var table = filter + geometry.tiles_n * geometry.chunks.value * UInt32(
            Self.config.chunk_bytes()
        )
        var stages = table + geometry.chunks.value * UInt32(
            STEP_QUADS * Self.config.chunk_offsets() * 4
        )
        var stage_bytes = (
            geometry.stage_quads() * QUAD_BYTES + UInt32(15)
        ) & ~UInt32(15)
        return StemStorage(
            barriers,
            filter,
            table,
            stages,
            stage_bytes,
            stages + UInt32(STAGES) * stage_bytes,
        )

    @staticmethod
    @always_inline
    def _produce(
        activation: Reads[Self.in_type],
        geometry: StemGeometry,
        storage: StemStorage,
        worker: UInt32,
        workers: UInt32,
        thread: UInt32,
    ):
        """The producer: stages tile after tile, the next one on its way to the
        L2."""
        var position = Self.Position()
        for index in range(worker, geometry.tiles, workers):
            var stage = storage.stage(position.stage)
            if index + workers < geometry.tiles:
                visit_planes[staging=False](
                    activation,
                    geometry,
                    geometry.tile(index + workers),
                    stage,
                    thread,
                )
            storage.empty(position.stage).wait(position.parity ^ 1)
            visit_planes[staging=True](
                activation, geometry, geometry.tile(index), stage, thread
            )
            storage.full(position.stage).arrive()
            position.step()

    @staticmethod
    @always_inline
    def _consume(
        epilogue: Self.FusedWork,
        output: Self.Output,
        geometry: StemGeometry,
        storage: StemStorage,
        worker: UInt32,
        workers: UInt32,
        first_filter: UInt32,
        consumer: UInt32,
        thread: UInt32,
    ):
        """A consumer: every third multiply of the block, in any tile."""
        var position = Self.Position()
        var multiplies = geometry.multiplies()
        var plain = (
            epilogue.is_identity() and geometry.filters % GROUP_FILTERS == 0
        )
        var next = consumer
        for index in range(worker, geometry.tiles, workers):
            var tile = geometry.tile(index)
            var first_output = geometry.first_output(tile)
            var stage = storage.stage(position.stage)
            if epilogue.has_residual and next < multiplies:
                Self._prefetch_residual(
                    epilogue,
                    geometry,
                    StemRows(
                        geometry,
                        tile,
                        first_output,
                        next * UInt32(MMA_M),
                        thread,
                    ),
                    first_filter,
                    thread,
                )
            storage.full(position.stage).wait(position.parity)
            while next < multiplies:
                var rows = StemRows(
                    geometry, tile, first_output, next * UInt32(MMA_M), thread
                )
                # Apart, so that plain outputs wait for nothing of the others.
                if plain:
                    Self._consume_rows[True](
                        epilogue,
                        output,
                        geometry,
                        storage,
                        stage,
                        rows,
                        first_filter,
                        thread,
                    )
                else:
                    Self._consume_rows[False](
                        epilogue,
                        output,
                        geometry,
                        storage,
                        stage,
                        rows,
                        first_filter,
                        thread,
                    )
                next += UInt32(CONSUMERS)
            next -= multiplies
            syncwarp()
            if thread % UInt32(WARP) == 0:
                storage.empty(position.stage).arrive()
            position.step()

    @staticmethod
    @always_inline
    def _prefetch_residual(
        epilogue: Self.FusedWork,
        geometry: StemGeometry,
        rows: StemRows,
        first_filter: UInt32,
        thread: UInt32,
    ):
        """Asks for the residual of the block's filters of 64 pixels in the L2,
        while their tile is staged."""
        for n in range(geometry.tiles_n):
            var filters = StemFilters(
                geometry,
                first_filter + n * UInt32(Self.config.tile_n),
                thread,
            )
            Self.Outputs.prefetch_residual(epilogue, rows, filters)

    @staticmethod
    @always_inline
    def _consume_rows[
        plain: Bool
    ](
        epilogue: Self.FusedWork,
        output: Self.Output,
        geometry: StemGeometry,
        storage: StemStorage,
        stage: SharedAddress,
        rows: StemRows,
        first_filter: UInt32,
        thread: UInt32,
    ):
        """The block's filters of 64 pixels.

        Parameters:
            plain: Whether `store_plain` suffices.
        """
        var activations = Self.Gathered(fill=Fragment(0))
        for n in range(geometry.tiles_n):
            var filters = StemFilters(
                geometry,
                first_filter + n * UInt32(Self.config.tile_n),
                thread,
            )
            comptime if plain:
                var sums = Self._multiply(
                    geometry, storage, stage, rows, n, thread, activations
                )
                Self.Outputs.store_plain(output, rows, filters, sums)
            else:
                var ahead = Self.Outputs.load_ahead(epilogue, rows, filters)
                var sums = Self._multiply(
                    geometry, storage, stage, rows, n, thread, activations
                )
                Self.Outputs.store(epilogue, output, rows, filters, sums, ahead)

    @staticmethod
    @always_inline
    def _multiply(
        geometry: StemGeometry,
        storage: StemStorage,
        stage: SharedAddress,
        rows: StemRows,
        tile_n: UInt32,
        thread: UInt32,
        mut activations: Self.Gathered,
    ) -> Self.Accumulated:
        """The sums of 64 pixels by `tile_n` filters. Activations of one chunk
        stay in registers for the next tile of filters, if they are few."""
        comptime chunk_bytes = UInt32(Self.config.chunk_bytes())
        var chunks = geometry.chunks.value
        var sums = Self.Accumulated(0)
        var offsets = storage.table + (thread % 4) * (
            chunks * UInt32(Self.config.chunk_offsets() * 4)
        )
        var filters = storage.filter + tile_n * chunks * chunk_bytes
        for _ in range(chunks):
            if Self.config.steps > KEPT_STEPS or chunks > 1 or tile_n == 0:
                activations = Self._gather(
                    stage + rows.low.quad,
                    stage + rows.high.quad,
                    offsets,
                    storage.zeros,
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
        return sums

    @staticmethod
    @always_inline
    def _gather(
        low: SharedAddress,
        high: SharedAddress,
        offsets: SharedAddress,
        zeros: SharedAddress,
    ) -> Self.Gathered:
        """Loads a chunk of two pixels' quads, as the multiply takes them."""
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
