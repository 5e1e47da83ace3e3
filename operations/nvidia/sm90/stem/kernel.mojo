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
from std.memory import bitcast
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
from ...pipeline.chunks import CHUNK_BYTES, swizzled_chunk
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
    NO_QUAD,
    QUAD,
    QUAD_BYTES,
    STAGES,
    STEP_QUADS,
    StemConfig,
    StemGeometry,
    StemTile,
)
from .mma import Fragment, multiply_fragment
from .pixels import StemFilters, StemRows
from .outputs import StemOutputs
from .staging import (
    load_element_if,
    load_quad_if,
    load_shared,
    store_shared,
)

comptime THREADS = (1 + CONSUMERS) * WARPGROUP
"""Threads of a block: the producer's warpgroup comes first."""

comptime CONSUMER_THREADS = CONSUMERS * WARPGROUP

comptime PRODUCER_REGISTERS = 56
comptime CONSUMER_REGISTERS = 152
"""Registers of a thread once the roles are taken; with the producer's they are
as many as a multiprocessor has."""

comptime MMA_K = 16
"""Products that one instruction sums, of 16-bit elements."""

comptime STAGED_TOGETHER = 8
"""Quads that a producer's thread loads before it stores the first."""

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
            Self._write_table(geometry, storage, consumer_thread)
            wait_for_earlier_kernels()
            Self._pack_filter(filter, geometry, storage, first, consumer_thread)
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
        var table = filter + geometry.tiles_n * geometry.chunks * UInt32(
            Self.config.chunk_bytes()
        )
        var stages = table + geometry.chunks * UInt32(
            STEP_QUADS * Self.config.chunk_offsets() * 4
        )
        var stage_bytes = (
            geometry.stage_quads * QUAD_BYTES + UInt32(15)
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
    def _write_table(
        geometry: StemGeometry, storage: StemStorage, thread: UInt32
    ):
        """Writes the zeros and the offsets of all quads: for each of the four
        threads that share a row, chunk by chunk."""
        comptime entries = UInt32(Self.config.chunk_offsets())
        if thread == 0:
            store_shared(storage.zeros, SIMD[DType.uint32, 2](0))
        var count = geometry.chunks * entries
        for i in range(thread, count * STEP_QUADS, UInt32(CONSUMER_THREADS)):
            var part, entry = divmod(i, count)
            var chunk, step = divmod(entry, entries)
            var offset = NO_QUAD
            if step < UInt32(Self.config.steps):
                var quad = (
                    chunk * UInt32(Self.config.steps) + step
                ) * STEP_QUADS + part
                offset = geometry.tap_offset(quad)
            store_shared(storage.table + i * 4, SIMD[DType.uint32, 1](offset))

    @staticmethod
    @always_inline
    def _pack_filter(
        filter: Reads[Self.in_type],
        geometry: StemGeometry,
        storage: StemStorage,
        first: UInt32,
        thread: UInt32,
    ):
        """Writes the block's filters: rows of 128 bytes, 4 steps, swizzled.

        Column `8*j + 2*t + e` of the multiply is filter `32*(j/4) + 8*t +
        2*(j%4) + e` of the tile, and quad t of a step has the products 2*t,
        2*t+1, 2*t+8, 2*t+9, as a thread holds them."""
        comptime row_quads = UInt32(ATOM_STEPS * STEP_QUADS)
        comptime rows = UInt32(Self.config.tile_n)
        comptime atoms = UInt32(Self.config.atoms())
        var tap_quads = geometry.tap_quads()
        var taps = tap_quads >> geometry.quad_shift
        var count = (
            geometry.tiles_n * geometry.chunks * atoms * rows * row_quads
        )
        for i in range(thread, count, UInt32(CONSUMER_THREADS)):
            var row_index, at = divmod(i, row_quads)
            var atom_index, column = divmod(row_index, rows)
            var chunk_index, atom = divmod(atom_index, atoms)
            var tile, chunk = divmod(chunk_index, geometry.chunks)
            var step = atom * ATOM_STEPS + at // STEP_QUADS
            var part = at % STEP_QUADS
            var quad = (
                chunk * UInt32(Self.config.steps) + step
            ) * STEP_QUADS + part
            var j = column // 8
            var k = (
                first
                + tile * rows
                + (j // 4) * 32
                + (column % 8) // 2 * 8
                + (j % 4) * 2
                + column % 2
            )
            var values = SIMD[Self.in_type, QUAD](0)
            if (
                step < UInt32(Self.config.steps)
                and quad < tap_quads
                and k < geometry.filters
            ):
                var tap = quad >> geometry.quad_shift
                var c = (quad - (tap << geometry.quad_shift)) * QUAD
                var from_ = (Int(k) * Int(taps) + Int(tap)) * Int(
                    geometry.channels
                ) + Int(c)
                comptime for e in range(QUAD):
                    if c + UInt32(e) < geometry.channels:
                        values[e] = filter[unsafe_offset=from_ + e]
            var pairs = bitcast[DType.uint32, 2](values)
            var row = storage.filter + row_index * ROW_BYTES
            # Rows begin at multiples of 8: a column's swizzle is its row's.
            var first = (at // STEP_QUADS) * 2
            comptime for i in range(2):
                var moved = swizzled_chunk[ROW_BYTES](column, first + UInt32(i))
                store_shared(
                    row + moved * CHUNK_BYTES + part * 4,
                    SIMD[DType.uint32, 1](pairs[i]),
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
        """The producer: stages tile after tile."""
        var position = Self.Position()
        for index in range(worker, geometry.tiles, workers):
            storage.empty(position.stage).wait(position.parity ^ 1)
            Self._stage_tile(
                activation,
                geometry,
                geometry.tile(index),
                storage.stage(position.stage),
                thread,
            )
            storage.full(position.stage).arrive()
            position.step()

    @staticmethod
    @always_inline
    def _stage_tile(
        activation: Reads[Self.in_type],
        geometry: StemGeometry,
        tile: StemTile,
        stage: SharedAddress,
        thread: UInt32,
    ):
        """Stages the input pixels of a tile, with zeros outside the image."""
        var d = Int32(tile.plane) * geometry.step_d + geometry.start_d
        var h = Int32(tile.row) * geometry.step_h + geometry.start_h
        var w = Int32(tile.column) * geometry.step_w + geometry.start_w
        var pixels = (
            Int(geometry.depth) * Int(geometry.height) * Int(geometry.width)
        )
        var image = activation.unsafe_offset(
            Int(tile.image) * pixels * Int(geometry.channels)
        )
        if geometry.channels % QUAD == 0:
            Self._stage_quads[True](image, geometry, d, h, w, stage, thread)
        else:
            Self._stage_quads[False](image, geometry, d, h, w, stage, thread)

    @staticmethod
    @always_inline
    def _stage_quads[
        whole: Bool
    ](
        image: Reads[Self.in_type],
        geometry: StemGeometry,
        d: Int32,
        h: Int32,
        w: Int32,
        stage: SharedAddress,
        thread: UInt32,
    ):
        """Stages the quads of a tile whose first input pixel is (d, h, w)."""
        comptime batch = UInt32(STAGED_TOGETHER * WARPGROUP)
        for first in range(UInt32(0), geometry.stage_quads, batch):
            var values = StaticTuple[SIMD[Self.in_type, QUAD], STAGED_TOGETHER](
                fill=SIMD[Self.in_type, QUAD](0)
            )
            comptime for i in range(STAGED_TOGETHER):
                var at = first + UInt32(i * WARPGROUP) + thread
                values[i] = Self._load_quad[whole](image, geometry, d, h, w, at)
            comptime for i in range(STAGED_TOGETHER):
                var at = first + UInt32(i * WARPGROUP) + thread
                if at < geometry.stage_quads:
                    store_shared(
                        stage + at * QUAD_BYTES,
                        bitcast[DType.uint32, 2](values[i]),
                    )

    @staticmethod
    @always_inline
    def _load_quad[
        whole: Bool
    ](
        image: Reads[Self.in_type],
        geometry: StemGeometry,
        d: Int32,
        h: Int32,
        w: Int32,
        at: UInt32,
    ) -> SIMD[Self.in_type, QUAD]:
        """Loads a quad of a tile whose first input pixel is (d, h, w): at once
        if channels come in whole quads. Loads have a predicate rather than a
        branch, so that many are in flight."""
        var staged, column = geometry.staged_quads.split(at)
        var plane, row = geometry.staged_rows.split(staged)
        var pixel = column >> geometry.quad_shift
        var c = (column - (pixel << geometry.quad_shift)) * QUAD
        var z = d + Int32(plane) * geometry.dilation_d
        var y = h + Int32(row)
        var x = w + Int32(pixel)
        var inside = (
            at < geometry.stage_quads
            and UInt32(z) < UInt32(geometry.depth)
            and UInt32(y) < UInt32(geometry.height)
            and UInt32(x) < UInt32(geometry.width)
        )
        var offset = (
            UInt32((z * geometry.height + y) * geometry.width + x)
            * geometry.channels
            + c
        )
        var from_ = image.unsafe_offset(Int(offset))
        comptime if whole:
            return bitcast[Self.in_type, QUAD](load_quad_if(inside, from_))
        else:
            var values = SIMD[DType.uint16, QUAD](0)
            comptime for e in range(QUAD):
                values[e] = load_element_if(
                    inside and c + UInt32(e) < geometry.channels,
                    from_.unsafe_offset(e),
                )
            return bitcast[Self.in_type, QUAD](values)

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
        var next = consumer
        for index in range(worker, geometry.tiles, workers):
            var tile = geometry.tile(index)
            var stage = storage.stage(position.stage)
            storage.full(position.stage).wait(position.parity)
            while next < multiplies:
                var rows = StemRows(
                    geometry, tile, next * UInt32(MMA_M), thread
                )
                for n in range(geometry.tiles_n):
                    var filters = StemFilters(
                        geometry,
                        first_filter + n * UInt32(Self.config.tile_n),
                        thread,
                    )
                    var residual = Self.Outputs.load_residual(
                        epilogue, geometry, rows, filters
                    )
                    var sums = Self._multiply(
                        geometry, storage, stage, rows, n, thread
                    )
                    Self.Outputs.store(
                        epilogue,
                        output,
                        geometry,
                        rows,
                        filters,
                        sums,
                        residual,
                    )
                next += UInt32(CONSUMERS)
            next -= multiplies
            syncwarp()
            if thread % UInt32(WARP) == 0:
                storage.empty(position.stage).arrive()
            position.step()

    @staticmethod
    @always_inline
    def _multiply(
        geometry: StemGeometry,
        storage: StemStorage,
        stage: SharedAddress,
        rows: StemRows,
        tile_n: UInt32,
        thread: UInt32,
    ) -> Self.Accumulated:
        """The sums of 64 pixels by `tile_n` filters."""
        comptime chunk_bytes = UInt32(Self.config.chunk_bytes())
        var sums = Self.Accumulated(0)
        var offsets = storage.table + (thread % 4) * (
            geometry.chunks * UInt32(Self.config.chunk_offsets() * 4)
        )
        var filters = storage.filter + tile_n * geometry.chunks * chunk_bytes
        for _ in range(geometry.chunks):
            var activations = Self._gather(
                stage + rows.low_quad,
                stage + rows.high_quad,
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
                    matrix_descriptor[Self.in_type](filters + UInt32(at)),
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
