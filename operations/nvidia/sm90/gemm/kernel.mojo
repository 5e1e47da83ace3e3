"""The Hopper implicit GEMM: persistent, warp-specialized.

    producers, one thread each,      for each tile, for each step of its sum:
    or, where TMA takes no such          fill a stage of their ring
    pixels, a warpgroup each:
    loaders, a thread or a warp      for each tile with a residual:
    a consumer:                          fill buffers with it
    consumers, a warpgroup each:     for each tile, for each step of its sum:
                                         multiply a stage, release it
                                     store the tile, or this block's part of it
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, thread_idx
from max.gpu.intrinsics import warpgroup_reg_alloc, warpgroup_reg_dealloc
from max.gpu.primitives.warp import broadcast
from std.sys.info import size_of
from std.utils import StaticTuple

from ....conv.access import OutputTarget
from ....conv.memory import Reads
from ....conv.quantization import filter_dtype
from ...epilogue.callbacks import EpilogueVisitor
from ...epilogue.params import EpilogueParams
from ...im2col.tiles import TileGeometry
from ...im2col.traversal import ROW_BYTES
from ...pipeline.barrier import (
    arrive_threads,
    publish_barriers,
    sync_cluster,
    sync_cluster_relaxed,
    sync_threads,
    wait_cluster,
)
from ...pipeline.ring import RingPosition
from ...tma.copy import SharedAddress, prefetch_map
from ...tma.descriptor import TensorMap
from ...limits import WARP, WARPGROUP
from ...overlap import wait_for_earlier_kernels
from ..wgmma import DESCRIPTOR_SHIFT
from .config import Sm90Config
from .epilogue import CollectiveEpilogue
from .epilogue_buffers import FIRST_NAME
from .gather import FilterRows, Gather, GatherGeometry, PixelRows
from .gather_direct import DirectGather
from .mma import Accumulators, sum_type_of
from .producers import (
    keeps_filters,
    produce_activations,
    produce_filters,
    row_bytes,
)
from .roles import (
    ACTIVATION_WARP,
    FILTER_WARP,
    LOADER_WARP,
    initializes_ring,
    sync_barriers,
)
from .scheduler import TileScheduler
from .smem import SharedStorage
from .split_k import SplitExchange, sum_splits

comptime PRODUCER = 0
"""The warpgroup of producers and loaders; consumers follow."""

comptime MOST_EARLY_STAGES = UInt32(2)
"""Activation stages of a tile beside which its residual may come at once: with so
few the epilogue would wait for it."""


@fieldwise_init
struct ConvKernel[
    in_type: DType,
    Output: OutputTarget,
    Visitor: EpilogueVisitor,
    config: Sm90Config,
]:
    """The kernel of a configuration.

    Parameters:
        in_type: Of activation and filter; see `tensor_core_refusal`.
        Output: The output, of bfloat16, float16 or float32, as is the
            residual, and what the graph compiler fused behind it; or of int32
            what takes sums.
        Visitor: What is made of the values before they are stored.
        config: The configuration.
    """

    comptime Storage = SharedStorage[Self.config]
    comptime act_stages = Self.config.num_act_pipeline_stages
    comptime ActivationPosition = RingPosition[Self.act_stages]
    comptime filter_stages = Self.config.num_filter_pipeline_stages
    comptime FilterPosition = RingPosition[Self.filter_stages]
    comptime Scheduler = TileScheduler[Self.config]
    comptime filter_type = filter_dtype(Self.in_type)
    comptime sum_type = sum_type_of(Self.in_type)
    comptime Accumulated = Accumulators[
        Self.config.mma_rows(), Self.config.mma_columns(), Self.sum_type
    ]
    comptime Epilogue = CollectiveEpilogue[
        Self.Output, Self.Visitor, Self.config, Self.sum_type
    ]
    comptime Params = EpilogueParams[Self.Output, Self.Visitor]
    comptime CLUSTER_M = Self.config.cluster_shape[0]
    comptime CLUSTER_N = Self.config.cluster_shape[1]
    comptime CLUSTER = Self.config.cluster_size()
    comptime act_consumer_arv_count = Self.config.activation_releases()
    comptime filter_consumer_arv_count = Self.config.filter_releases()
    comptime epilogue_bytes = Self.config.epilogue_bytes()
    comptime ROW_CHANNELS = ROW_BYTES // size_of[Self.in_type]()
    """Channels that a row of a stage holds."""
    comptime TURN_NAME = FIRST_NAME + Self.config.consumers
    """The named barrier by which the first ping-pong consumer gets its turn to
    multiply; the second's follows."""

    comptime visitor_bytes = (
        Self.config.consumers * Self.Epilogue.visitor_bytes()
    )
    """Shared memory of all consumers' visitors."""
    comptime exchange_bytes = Self.config.separate_exchange_bytes(
        Self.visitor_bytes
    )
    """Shared memory for what blocks exchange of a tile; 0: the rings'."""

    @staticmethod
    def shared_bytes() -> Int:
        """Shared memory of a block."""
        return (
            Self.config.shared_bytes()
            + Self.visitor_bytes
            + Self.exchange_bytes
        )

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
            Int32(Self.config.threads())
        ),
        # Told so, the assembler spills nothing beside 160 sums a thread.
        `nvvm.minctasm`=SIMDLength(1),
    )
    @__llvm_arg_metadata(activation, `nvvm.grid_constant`)
    @__llvm_arg_metadata(filter, `nvvm.grid_constant`)
    @__llvm_arg_metadata(output, `nvvm.grid_constant`)
    @__llvm_arg_metadata(residual, `nvvm.grid_constant`)
    def run(
        activation: TensorMap,
        filter: TensorMap,
        output: TensorMap,
        residual: TensorMap,
        params: Self.Params,
        geometry: TileGeometry,
    ):
        """A block: its threads take their roles. The launch says how many
        blocks a cluster has: `cluster_size`, or as many as share a tile.

        Args:
            activation: Descriptor of the activation, im2col.
            filter: Descriptor of the filter `[K, T*R*S, C/groups]`.
            output: Descriptor of the output `[groups, N*Z*P*Q, K/groups]`.
            residual: Descriptor of the residual, `[N*Z*P, Q, K]`, im2col, if
                there is one.
            params: The epilogue's.
            geometry: The problem.
        """
        comptime assert not Self.config.gathers(), "run_gathered"
        var storage = Self.Storage()
        var group, thread = Self._role()
        if thread_idx.x == Int(LOADER_WARP) * WARP:
            comptime if not Self.Visitor.discards:
                prefetch_map(output)
            if params.visitor.reads_residual():
                prefetch_map(residual)
        if geometry.slice_channels < UInt32(Self.ROW_CHANNELS):
            storage.clear_rows(UInt32(row_bytes[Self.in_type](geometry)))
            sync_threads[Self.config.threads()](0)
        Self._init_barriers(storage, geometry)
        wait_for_earlier_kernels()
        if group == PRODUCER:
            comptime if Self.config.moves_registers():
                warpgroup_reg_dealloc[Self.config.producer_registers()]()
            var warp, lane = divmod(thread, UInt32(WARP))
            if thread == 0:
                produce_activations[Self.in_type, Self.config](
                    activation, geometry, storage
                )
            elif lane == 0 and warp == FILTER_WARP:
                produce_filters[Self.in_type, Self.config](
                    filter, geometry, storage
                )
            comptime if Self.config.splits():
                # A thread that has arrived does not leave before the others.
                if geometry.split_k.count.value > 1 and initializes_ring[
                    Self.config
                ](warp):
                    wait_cluster()
            Self._load_residuals(residual, params, geometry, storage, thread)
        else:
            comptime if Self.config.moves_registers():
                warpgroup_reg_alloc[Self.config.consumer_registers()]()
            Self._consume(
                output,
                params,
                geometry,
                storage,
                group - 1,
                thread,
            )
        # No block may leave while another copies to it or arrives at it.
        comptime if Self.config.cluster_size() > 1:
            if not Self.config.joins_rings() and keeps_filters[Self.config](
                geometry
            ):
                # Nobody waits for these filters' releases: the barrier orders
                # them, and the outputs with them.
                sync_cluster()
            else:
                sync_cluster_relaxed()

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
            Int32(Self.config.threads())
        ),
        `nvvm.minctasm`=SIMDLength(1),
    )
    @__llvm_arg_metadata(residual, `nvvm.grid_constant`)
    def run_gathered(
        activation: Reads[Self.in_type],
        filter: Reads[Self.in_type],
        residual: TensorMap,
        params: Self.Params,
        geometry: TileGeometry,
        gather: GatherGeometry,
    ):
        """A block whose threads load activation and filter, of pixels that TMA
        does not take, and store the output.

        Args:
            activation: `[N, *input, C]`.
            filter: `[K, *filter, C]`.
            residual: Descriptor of the residual, as in `run`; not read where
                its pixels are no whole pieces.
            params: The epilogue's.
            geometry: The problem.
            gather: The same, for these loads.
        """
        comptime assert Self.config.gathers(), "run"
        comptime assert Self.config.moves_registers()
        comptime consumers = UInt32(Self.config.consumers)
        var storage = Self.Storage()
        var group, thread = Self._role()
        Self._init_barriers(storage, geometry)
        wait_for_earlier_kernels()
        if group == PRODUCER:
            warpgroup_reg_dealloc[Self.config.producer_registers()]()
            Self._load_residuals(residual, params, geometry, storage, thread)
        elif group <= consumers:
            warpgroup_reg_alloc[Self.config.consumer_registers()]()
            # Threads store: the output has no descriptor.
            Self._consume(
                residual, params, geometry, storage, group - 1, thread
            )
        else:
            warpgroup_reg_dealloc[Self.config.gatherer_registers()]()
            var pixels = PixelRows[Self.config](gather)
            var filters = FilterRows[Self.config](gather)
            if group == consumers + 1:
                comptime if Self.config.gathers_directly():
                    var ring = DirectGather[config=Self.config](
                        activation, pixels, storage.activation, gather, thread
                    )
                    ring.fill(geometry, keeps=False)
                else:
                    var ring = Gather[config=Self.config](
                        activation,
                        pixels,
                        storage.activation,
                        geometry,
                        gather,
                        storage.copied_pixels,
                        thread,
                    )
                    ring.fill(geometry, keeps=False)
            else:
                var keeps = keeps_filters[Self.config](geometry)
                comptime if Self.config.gathers_directly():
                    var ring = DirectGather[config=Self.config](
                        filter, filters, storage.filter, gather, thread
                    )
                    ring.fill(geometry, keeps=keeps)
                else:
                    var ring = Gather[config=Self.config](
                        filter,
                        filters,
                        storage.filter,
                        geometry,
                        gather,
                        storage.copied_filters,
                        thread,
                    )
                    ring.fill(geometry, keeps=keeps)

    @staticmethod
    @always_inline
    def _role() -> Tuple[UInt32, UInt32]:
        """The thread's warpgroup, and its number there."""
        var group, thread = divmod(UInt32(thread_idx.x), UInt32(WARPGROUP))
        # The assembler then keeps a warp's addresses in uniform registers.
        return broadcast(group), thread

    @staticmethod
    @always_inline
    def _init_barriers(storage: Self.Storage, geometry: TileGeometry):
        """Initializes all barriers, for the whole cluster to see."""
        if thread_idx.x == Int(ACTIVATION_WARP) * WARP:
            storage.activation.init(
                producers=Self.config.ring_producers(),
                releases=Self.act_consumer_arv_count,
            )
            comptime if Self.config.first_tile_barriers() > 0:
                storage.first_tile.init(1)
            publish_barriers()
        elif thread_idx.x == Int(FILTER_WARP) * WARP:
            comptime if not Self.config.joins_rings():
                storage.filter.init(
                    producers=Self.config.ring_producers(),
                    releases=Self.filter_consumer_arv_count,
                )
                publish_barriers()
        elif thread_idx.x == Int(LOADER_WARP) * WARP:
            comptime if Self.config.epilogue.num_epi_load_stages > 0:
                comptime for consumer in range(Self.config.consumers):
                    Self._epilogue(
                        storage, UInt32(consumer), 0
                    ).buffers.residuals.init(
                        producers=1, releases=Self.Epilogue.Buffers.releases()
                    )
            comptime if Self.config.splits():
                Self._exchange(storage).init(geometry)
            publish_barriers()
        sync_barriers[Self.config](geometry)

    @staticmethod
    @always_inline
    def _epilogue(
        storage: Self.Storage, consumer: UInt32, thread: UInt32
    ) -> Self.Epilogue:
        """The epilogue of a consumer."""
        comptime barrier_bytes = Self.Epilogue.Buffers.Residuals.barrier_bytes()
        return Self.Epilogue(
            storage.residual_barriers + consumer * UInt32(barrier_bytes),
            storage.buffers + consumer * UInt32(Self.epilogue_bytes),
            storage.buffers
            + UInt32(Self.config.consumers * Self.epilogue_bytes)
            + consumer * UInt32(Self.Epilogue.visitor_bytes()),
            consumer,
            thread,
        )

    @staticmethod
    @always_inline
    def _exchange(storage: Self.Storage) -> SplitExchange[Self.config]:
        """What blocks exchange sums by."""
        var result = storage.exchange
        comptime if Self.exchange_bytes > 0:
            result.memory = storage.buffers + UInt32(
                Self.config.consumers * Self.epilogue_bytes + Self.visitor_bytes
            )
        return result

    @staticmethod
    @always_inline
    def _start(consumer: UInt32) -> Tuple[UInt32, UInt32]:
        """The first pixel and filter of a consumer's part of a tile."""
        comptime if not Self.config.cooperative:
            return UInt32(0), UInt32(0)
        comptime if Self.config.splits_filters():
            comptime filters = Self.config.consumer_filters()
            return UInt32(0), consumer * UInt32(filters)
        comptime pixels = Self.config.consumer_pixels()
        return consumer * UInt32(pixels), UInt32(0)

    @staticmethod
    @always_inline
    def _load_residuals(
        ref residual: TensorMap,
        params: Self.Params,
        geometry: TileGeometry,
        storage: Self.Storage,
        thread: UInt32,
    ):
        """A thread of the warpgroup that has the loaders."""
        var warp, lane = divmod(thread, UInt32(WARP))
        if (
            warp >= LOADER_WARP
            and warp < LOADER_WARP + UInt32(Self.config.consumers)
            and (lane == 0 or Self.Epilogue.loads_with_warp(geometry))
            and params.visitor.reads_residual()
        ):
            Self._load_residual(
                residual,
                params,
                geometry,
                storage,
                warp - LOADER_WARP,
                lane,
            )

    @staticmethod
    @always_inline
    def _load_residual(
        ref residual: TensorMap,
        params: Self.Params,
        geometry: TileGeometry,
        storage: Self.Storage,
        consumer: UInt32,
        lane: UInt32,
    ):
        """The loader of a consumer: fills its residual buffers, tile after
        tile. Its first bytes come behind those that the first multiplies wait
        for, unless these are as few."""
        var epilogue = Self._epilogue(storage, consumer, lane)
        var pixel, filter = Self._start(consumer)
        var scheduler = Self.Scheduler(geometry)
        comptime if not Self.config.cooperative:
            scheduler.advance(consumer)
        comptime if Self.config.first_tile_barriers() > 0:
            if geometry.rounds(
                Self.config.halo
            ) > MOST_EARLY_STAGES and scheduler.valid(geometry):
                storage.first_tile.wait(0)
        while scheduler.valid(geometry):
            var tile = scheduler.tile(geometry)
            tile.pixel += pixel
            tile.filter += filter
            epilogue.load(residual, params, geometry, tile)
            scheduler.advance(UInt32(1 if Self.config.cooperative else 2))

    @staticmethod
    @always_inline
    def _consume(
        ref output: TensorMap,
        params: Self.Params,
        geometry: TileGeometry,
        storage: Self.Storage,
        consumer: UInt32,
        thread: UInt32,
    ):
        """A consumer: multiplies and stores its tiles."""
        var epilogue = Self._epilogue(storage, consumer, thread)
        var scheduler = Self.Scheduler(geometry)
        var activations = Self.ActivationPosition()
        var filters = Self.FilterPosition()
        var pixel, filter = Self._start(consumer)
        epilogue.start(params, geometry)
        comptime if not Self.config.cooperative:
            if consumer == 1:
                scheduler.advance()
                Self._skip_tile(geometry, activations, filters)
                Self._give_turn(1)
        while scheduler.valid(geometry):
            var tile = scheduler.tile(geometry)
            tile.pixel += pixel
            tile.filter += filter
            var ahead = epilogue.begin(params, geometry, tile)
            var accumulators = Self.Accumulated()
            comptime if not Self.config.cooperative:
                Self._await_turn(consumer)
            comptime if Self.config.joins_rings():
                Self._multiply_joined(
                    accumulators,
                    tile.rounds,
                    geometry,
                    storage,
                    activations,
                    filters,
                    pixel,
                    filter,
                    consumer,
                    thread,
                )
            else:
                Self._multiply_tile(
                    accumulators,
                    geometry.steps(Self.config.halo, tile.rounds),
                    geometry,
                    storage,
                    scheduler,
                    activations,
                    filters,
                    pixel,
                    filter,
                    consumer,
                    thread,
                )
            comptime if Self.config.splits():
                sum_splits[
                    Self.config,
                    Self.Epilogue.layout,
                    Self.Epilogue.subtiles,
                    in_rings=Self.exchange_bytes == 0,
                ](
                    accumulators,
                    Self._exchange(storage),
                    geometry,
                    tile,
                    consumer,
                    thread,
                )
            epilogue.store(output, params, ahead, accumulators, geometry, tile)
            comptime if Self.config.cooperative:
                scheduler.advance()
            else:
                scheduler.advance(2)
                Self._skip_tile(geometry, activations, filters)
        epilogue.buffers.finish()

    @staticmethod
    @always_inline
    def _multiply_tile(
        mut accumulators: Self.Accumulated,
        steps: UInt32,
        geometry: TileGeometry,
        storage: Self.Storage,
        ranks: Self.Scheduler,
        mut activations: Self.ActivationPosition,
        mut filters: Self.FilterPosition,
        pixel: UInt32,
        filter: UInt32,
        consumer: UInt32,
        thread: UInt32,
    ):
        """Multiplies the `steps` filter stages of a tile, or of the block's share.
        One multiply is always in flight: a stage is released when the multiply
        after its own has been started. This consumer's part of the tile begins
        at `pixel` and `filter`."""
        var tap = UInt32(0)
        if keeps_filters[Self.config](geometry):
            filters = Self.FilterPosition()
        storage.activation.wait(activations)
        storage.filter.wait(filters)
        Self._multiply_stage[overwrite=True](
            accumulators,
            storage.activation.address(activations.stage),
            storage.filter.address(filters.stage),
            pixel,
            filter,
        )
        for _ in range(UInt32(1), steps):
            var done_activation = activations.stage
            var done_filter = filters.stage
            var moved = True
            filters.step()
            comptime if Self.config.halo > 0:
                tap += 1
                moved = tap == geometry.taps_w
            if moved:
                tap = 0
                activations.step()
                storage.activation.wait(activations)
            storage.filter.wait(filters)
            var shift = UInt32(0)
            comptime if Self.config.halo > 0:
                shift = tap * geometry.dilation_w * ROW_BYTES
            Self._multiply_stage(
                accumulators,
                storage.activation.address(activations.stage) + shift,
                storage.filter.address(filters.stage),
                pixel,
                filter,
            )
            accumulators.wait[1]()
            Self._release_filter(storage, ranks, done_filter, thread)
            if moved:
                Self._release_activation(
                    storage, ranks, done_activation, thread
                )
        comptime if not Self.config.cooperative:
            Self._give_turn(consumer)
        accumulators.wait[0]()
        Self._release_filter(storage, ranks, filters.stage, thread)
        Self._release_activation(storage, ranks, activations.stage, thread)
        filters.step()
        activations.step()

    @staticmethod
    @always_inline
    def _multiply_joined(
        mut accumulators: Self.Accumulated,
        steps: UInt32,
        geometry: TileGeometry,
        storage: Self.Storage,
        mut activations: Self.ActivationPosition,
        mut filters: Self.FilterPosition,
        pixel: UInt32,
        filter: UInt32,
        consumer: UInt32,
        thread: UInt32,
    ):
        """The same where rings are joined. What the next multiply needs is ready
        before the wait for its stage: small tiles' multiplies would end before
        it was."""
        comptime pixel_step = UInt32(
            Self.config.act_stage_bytes() >> DESCRIPTOR_SHIFT
        )
        comptime filter_step = UInt32(
            Self.config.filter_tile_bytes() >> DESCRIPTOR_SHIFT
        )
        if keeps_filters[Self.config](geometry):
            filters = Self.FilterPosition()
        var first_pixels = (
            storage.activation.data + pixel * ROW_BYTES
        ) >> DESCRIPTOR_SHIFT
        var first_filters = (
            storage.filter.data + filter * ROW_BYTES
        ) >> DESCRIPTOR_SHIFT
        var pixel_chunk = first_pixels + activations.stage * pixel_step
        var filter_chunk = first_filters + filters.stage * filter_step
        storage.activation.wait(activations)
        Self._multiply_chunks[overwrite=True](
            accumulators, pixel_chunk, filter_chunk
        )
        for _ in range(UInt32(1), steps):
            var done = activations.stage
            activations.step()
            filters.step()
            pixel_chunk += pixel_step
            if activations.stage == 0:
                pixel_chunk = first_pixels
            filter_chunk += filter_step
            if filters.stage == 0:
                filter_chunk = first_filters
            storage.activation.wait(activations)
            Self._multiply_chunks(accumulators, pixel_chunk, filter_chunk)
            accumulators.wait[1]()
            Self._release_both(storage, done, thread)
        comptime if not Self.config.cooperative:
            Self._give_turn(consumer)
        accumulators.wait[0]()
        Self._release_both(storage, activations.stage, thread)
        filters.step()
        activations.step()

    @staticmethod
    @always_inline
    def _release_both(storage: Self.Storage, stage: UInt32, thread: UInt32):
        """Releases a stage of both rings in every block that copies into it."""
        var empty = storage.activation.empty(stage)
        comptime if Self.CLUSTER > 1:
            if thread < UInt32(Self.CLUSTER):
                empty.arrive_at(thread)
        else:
            if thread == 0:
                empty.arrive()

    @staticmethod
    @always_inline
    def _multiply_stage[
        *, overwrite: Bool = False
    ](
        mut accumulators: Self.Accumulated,
        activation: SharedAddress,
        filter: SharedAddress,
        first_pixel: UInt32,
        first_filter: UInt32,
    ):
        """Starts multiplying this consumer's part of a stage."""
        var pixels = activation + first_pixel * ROW_BYTES
        var filters = filter + first_filter * ROW_BYTES
        Self._multiply_chunks[overwrite=overwrite](
            accumulators,
            pixels >> DESCRIPTOR_SHIFT,
            filters >> DESCRIPTOR_SHIFT,
        )

    @staticmethod
    @always_inline
    def _multiply_chunks[
        *, overwrite: Bool = False
    ](mut accumulators: Self.Accumulated, pixels: UInt32, filters: UInt32):
        """Starts multiplying rows whose addresses are known as descriptors have
        them."""
        comptime if Self.config.swapped:
            accumulators.multiply[
                Self.filter_type, Self.in_type, overwrite=overwrite
            ](filters, pixels)
        else:
            accumulators.multiply[
                Self.in_type, Self.filter_type, overwrite=overwrite
            ](pixels, filters)

    @staticmethod
    @always_inline
    def _release_activation(
        storage: Self.Storage,
        ranks: Self.Scheduler,
        stage: UInt32,
        thread: UInt32,
    ):
        """Tells every block that copies into this stage that this consumer is
        done with it."""
        var empty = storage.activation.empty(stage)
        comptime if Self.CLUSTER_N > 1:
            if thread < UInt32(Self.CLUSTER_N):
                empty.arrive_at(ranks.rank_m + thread * UInt32(Self.CLUSTER_M))
        else:
            if thread == 0:
                empty.arrive()

    @staticmethod
    @always_inline
    def _release_filter(
        storage: Self.Storage,
        ranks: Self.Scheduler,
        stage: UInt32,
        thread: UInt32,
    ):
        """Releases a filter stage. That of a filter that is kept is released
        too: no one waits for it, and not to ask is faster."""
        comptime if Self.config.stationary:
            return
        var empty = storage.filter.empty(stage)
        comptime if Self.CLUSTER_M > 1:
            if thread < UInt32(Self.CLUSTER_M):
                empty.arrive_at(ranks.rank_n * UInt32(Self.CLUSTER_M) + thread)
        else:
            if thread == 0:
                empty.arrive()

    @staticmethod
    @always_inline
    def _skip_tile(
        geometry: TileGeometry,
        mut activations: Self.ActivationPosition,
        mut filters: Self.FilterPosition,
    ):
        """Moves past the stages of the other consumer's tile."""
        var rounds = geometry.rounds(Self.config.halo)
        filters.skip(geometry.steps(Self.config.halo, rounds))
        activations.skip(rounds)

    @staticmethod
    @always_inline
    def _await_turn(consumer: UInt32):
        """Waits until the other consumer has started its last multiply."""
        sync_threads[2 * WARPGROUP](Int(consumer) + Self.TURN_NAME)

    @staticmethod
    @always_inline
    def _give_turn(consumer: UInt32):
        """Lets the other consumer multiply."""
        arrive_threads[2 * WARPGROUP](Int(consumer ^ 1) + Self.TURN_NAME)
