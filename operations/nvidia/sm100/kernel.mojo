"""The Blackwell implicit GEMM: persistent, warp-specialized.

    scheduler, one thread of a cluster:  until there is no work left:
                                             ask for a tile
    load, one thread:                    for each tile, for each group of steps
                                         of its sum: fill a stage of the ring
    MMA, one thread a block or pair:     for each tile: wait for an accumulator;
                                             for each group: multiply a stage
    epilogue load, one thread:           for each tile with a residual:
                                             fill buffers with it
    epilogue, four warps:                for each tile: store an accumulator

Of a tile that blocks share, each block's load and MMA threads do a part of the
sum; its epilogue sends that part to the others, adds theirs to the sub-tiles
that it stores, and stores them.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, thread_idx
from max.gpu.primitives.cluster import elect_one_sync
from std.collections import Optional
from std.utils import StaticTuple

from ...conv.access import OutputTarget
from ..epilogue.callbacks import EpilogueVisitor
from ..epilogue.fused_output import (
    ElementwiseComputeLambda,
    ElementwiseLambda,
    FusedOutput,
)
from ..epilogue.params import EpilogueParams
from ..im2col.tiles import LoadStart, Tap, TileGeometry
from ..pipeline.barrier import (
    sync_cluster_relaxed,
    publish_barriers,
    sync_cluster,
    sync_threads,
    sync_warp,
)
from ..pipeline.ring import RingPosition
from ..tma.copy import prefetch_map
from ..tma.descriptor import TensorMap
from ..limits import WARP
from ..overlap import wait_for_earlier_kernels
from .config import (
    EPILOGUE_THREADS,
    EPILOGUE_WARPS,
    TMEM_COLUMNS,
    Conv2dConfig,
)
from .epilogue import TileEpilogue
from .epilogue_load import load_residuals
from .layout import layout_of
from .mma import commit_multiplies, multiply_step
from .scheduler import ClusterPlace, WorkQueue, share_of, schedule, tile_of
from .smem import SharedStorage
from .tile_io import input_barrier, load_activation, load_filter
from .tmem import (
    allocate_tmem,
    free_tmem,
    order_after_barrier,
    tmem_address,
)

comptime SCHEDULER_WARP = UInt32(EPILOGUE_WARPS)
"""The warp whose one thread asks for work; the epilogue's are before it."""

comptime LOAD_WARP = SCHEDULER_WARP + 1
"""The warp whose one thread loads activations and filters."""

comptime MMA_WARP = LOAD_WARP + 1
"""The warp that allocates tensor memory, and whose one thread multiplies."""

comptime EPILOGUE_LOAD_WARP = MMA_WARP + 1
"""The warp whose one thread loads the residual."""

comptime NUM_WARPS = Int(EPILOGUE_LOAD_WARP) + 1
"""Of a block."""

comptime NUM_THREADS = NUM_WARPS * WARP
"""Of a block."""

comptime TMEM_NAME = 2
"""The named barrier by which the MMA warp hands the tensor memory's address to
the epilogue."""

comptime TMEM_THREADS = EPILOGUE_THREADS + WARP
"""Threads of that barrier."""


@fieldwise_init
struct TileLoads(TrivialRegisterPassable):
    """Where the loads of a tile's operands are."""

    var first: LoadStart
    """The first pixel of this block's part."""
    var filter: UInt32
    """The tile's first."""
    var tap: Tap
    """The next step."""


@fieldwise_init
struct Conv2dFpropKernel[
    Output: OutputTarget,
    Visitor: EpilogueVisitor,
    config: Conv2dConfig,
    *,
    elementwise_lambda_fn: Optional[ElementwiseLambda] = None,
    elementwise_compute_lambda_fn: Optional[ElementwiseComputeLambda] = None,
    register_based_epilogue: Bool = True,
]:
    """The kernel of a configuration.

    Parameters:
        Output: The output, of the configuration's type, and what the graph
            compiler fused behind it.
        Visitor: What is made of the values before they are rounded.
        config: The configuration.
        elementwise_lambda_fn: Stores values, instead of the kernel; with a
            function here or below, `Output` has nothing fused behind it.
        elementwise_compute_lambda_fn: Changes values before they are stored,
            by the kernel or by `elementwise_lambda_fn`.
        register_based_epilogue: Whether what is fused behind is computed in
            registers, or after shared memory.
    """

    comptime cta_group = Self.config.cta_group
    comptime CLUSTER_M = Self.config.cluster_shape[0]
    comptime CLUSTER_N = Self.config.cluster_shape[1]
    comptime SPLIT_K = Self.config.split_k()
    comptime CLUSTER_SIZE = Self.config.cluster_size()
    comptime num_group_pipeline_stages = Self.config.num_group_pipeline_stages()
    comptime stage_stride_cols = (
        TMEM_COLUMNS // Self.config.num_accum_pipeline_stages
    )

    comptime input_producer_arv_count = 1
    comptime input_consumer_arv_count = (
        Self.CLUSTER_M // Self.cta_group + Self.CLUSTER_N - 1
    )
    """Of the multiplying threads whose tiles this block loads a part of: its
    own, and those along M and N."""
    comptime accum_pipeline_producer_arv_count = 1
    comptime accum_pipeline_consumer_arv_count = Self.cta_group * EPILOGUE_WARPS
    comptime clc_producer_arv_count = 1
    comptime clc_throttle_producer_arv_count = 1
    comptime clc_throttle_consumer_arv_count = 1
    comptime epi_load_producer_arv_count = 1
    comptime epi_load_consumer_arv_count = EPILOGUE_WARPS
    comptime exchange_producer_arv_count = (Self.SPLIT_K - 1) * EPILOGUE_WARPS
    comptime exchange_consumer_arv_count = (Self.SPLIT_K - 1) * EPILOGUE_WARPS
    """Of the warps of the blocks that share this block's tiles."""
    comptime tmem_dealloc_arv_count = Self.cta_group * EPILOGUE_WARPS

    comptime Storage = SharedStorage[Self.config]
    comptime Place = ClusterPlace[Self.config]
    comptime Queue = WorkQueue[Self.config]
    comptime Params = EpilogueParams[Self.Output, Self.Visitor]
    comptime Work = FusedOutput[
        Self.Output,
        Self.elementwise_lambda_fn,
        Self.elementwise_compute_lambda_fn,
    ]
    comptime InputPosition = RingPosition[Self.num_group_pipeline_stages]
    comptime AccumPosition = RingPosition[Self.config.num_accum_pipeline_stages]

    @staticmethod
    def shared_bytes() -> Int:
        """Shared memory of a block."""
        return Self.config.shared_bytes() + Self.Visitor.shared_bytes(
            layout_of(Self.config)
        )

    @staticmethod
    def clc_consumer_arv_count[has_residual: Bool]() -> Int:
        """Arrivals that release an answer of the scheduler: its own, and of
        each block of the cluster one a role that runs through the tiles, and
        one a warp of the epilogue.

        Parameters:
            has_residual: Whether the epilogue load warp has work.
        """
        comptime load = 1
        comptime mma = 1
        comptime epilogue_load = 1 if has_residual else 0
        return 1 + Self.CLUSTER_SIZE * (
            load + mma + epilogue_load + EPILOGUE_WARPS
        )

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
            Int32(NUM_THREADS)
        ),
    )
    @__llvm_arg_metadata(activation, `nvvm.grid_constant`)
    @__llvm_arg_metadata(filter, `nvvm.grid_constant`)
    @__llvm_arg_metadata(output, `nvvm.grid_constant`)
    def run(
        activation: TensorMap,
        filter: TensorMap,
        output: TensorMap,
        params: Self.Params,
        geometry: TileGeometry,
    ):
        """A block without a residual: its threads take their roles. The launch
        has as many blocks as `Conv2dConfig.blocks` says, in clusters of
        `CLUSTER_SIZE` along x.

        Args:
            activation: Descriptor of the activation, im2col.
            filter: Descriptor of the filter `[K, T*R*S, C/groups]`.
            output: Descriptor of the output `[groups, N*Z*P*Q, K/groups]`.
            params: The epilogue's.
            geometry: The problem.
        """
        Self._run[False](activation, filter, output, output, params, geometry)

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
            Int32(NUM_THREADS)
        ),
    )
    @__llvm_arg_metadata(activation, `nvvm.grid_constant`)
    @__llvm_arg_metadata(filter, `nvvm.grid_constant`)
    @__llvm_arg_metadata(output, `nvvm.grid_constant`)
    @__llvm_arg_metadata(source, `nvvm.grid_constant`)
    def run_with_residual(
        activation: TensorMap,
        filter: TensorMap,
        output: TensorMap,
        source: TensorMap,
        params: Self.Params,
        geometry: TileGeometry,
    ):
        """`run`, for a visitor that reads the residual.

        Args:
            activation: Descriptor of the activation, im2col.
            filter: Descriptor of the filter `[K, T*R*S, C/groups]`.
            output: Descriptor of the output `[groups, N*Z*P*Q, K/groups]`.
            source: Descriptor of the residual, as the output's.
            params: The epilogue's.
            geometry: The problem.
        """
        Self._run[True](activation, filter, output, source, params, geometry)

    @staticmethod
    @always_inline
    def _run[
        has_residual: Bool
    ](
        ref activation: TensorMap,
        ref filter: TensorMap,
        ref output: TensorMap,
        ref source: TensorMap,
        params: Self.Params,
        geometry: TileGeometry,
    ):
        """A block."""
        comptime refusal = Self.config.refusal()
        comptime assert not refusal, refusal
        comptime assert Self.config.types.out == Self.Output.dtype
        comptime overfull = Self.Work.refusal()
        comptime assert not overfull, overfull
        var storage = Self.Storage()
        var place = Self.Place()
        var warp = UInt32(thread_idx.x) // WARP
        if thread_idx.x == 0:
            prefetch_map(activation)
            prefetch_map(filter)
            comptime if not (Self.Work.stores or Self.Visitor.discards):
                prefetch_map(output)
            comptime if has_residual:
                prefetch_map(source)
        Self.init_barriers[has_residual](storage)
        wait_for_earlier_kernels()
        if warp < SCHEDULER_WARP:
            Self._epilogue[has_residual](
                output, params, geometry, storage, place
            )
        elif warp == SCHEDULER_WARP:
            if place.rank == 0 and elect_one_sync():
                schedule(storage)
        elif warp == LOAD_WARP:
            if elect_one_sync():
                Self._load(activation, filter, geometry, storage, place)
        elif warp == MMA_WARP:
            Self._multiply_warp(geometry, storage, place)
        else:
            comptime if has_residual:
                if elect_one_sync():
                    load_residuals(source, geometry, storage, place)
        # No block may leave while another arrives at its barriers.
        comptime if Self.CLUSTER_SIZE > 1:
            sync_cluster()

    @staticmethod
    @always_inline
    def init_barriers[has_residual: Bool](storage: Self.Storage):
        """Initializes all barriers, for the whole cluster to see.

        Parameters:
            has_residual: Whether there is a residual.
        """
        if thread_idx.x == 0:
            storage.inputs().init(
                producers=Self.input_producer_arv_count,
                releases=Self.input_consumer_arv_count,
            )
            storage.accumulators().init(
                producers=Self.accum_pipeline_producer_arv_count,
                releases=Self.accum_pipeline_consumer_arv_count,
            )
            storage.answers().init(
                producers=Self.clc_producer_arv_count,
                releases=Self.clc_consumer_arv_count[has_residual](),
            )
            storage.throttle().init(
                producers=Self.clc_throttle_producer_arv_count,
                releases=Self.clc_throttle_consumer_arv_count,
            )
            comptime if has_residual:
                storage.residuals().init(
                    producers=Self.epi_load_producer_arv_count,
                    releases=Self.epi_load_consumer_arv_count,
                )
            comptime if Self.SPLIT_K > 1:
                storage.exchange().init(
                    producers=Self.exchange_producer_arv_count,
                    releases=Self.exchange_consumer_arv_count,
                )
            storage.dealloc().init(Self.tmem_dealloc_arv_count)
            publish_barriers()
        comptime if Self.CLUSTER_SIZE > 1:
            sync_cluster_relaxed()
        else:
            sync_threads[NUM_THREADS](0)

    @staticmethod
    @always_inline
    def _load(
        ref activation: TensorMap,
        ref filter: TensorMap,
        geometry: TileGeometry,
        storage: Self.Storage,
        place: Self.Place,
    ):
        """The load thread: fills the input ring, tile after tile."""
        var queue = Self.Queue(storage)
        var position = Self.InputPosition()
        var begun = RingPosition[Self.config.num_clc_pipeline_stages]()
        var throttle = storage.throttle()
        comptime part = UInt32(Self.config.act_tile_dim0())
        while queue.work.valid:
            if place.rank == 0:
                throttle.empty(begun.stage).wait(begun.parity ^ 1)
                throttle.full(begun.stage).arrive()
                begun.step()
            var tile = tile_of(geometry, place, queue.work.index)
            var first = geometry.load_start(
                geometry.pixel(tile.pixel + place.n * part), tile.group
            )
            var loads = TileLoads(first, tile.filter, Tap())
            comptime if Self.SPLIT_K > 1:
                loads.tap.skip(0, geometry, tile.first)
            var left = tile.rounds
            while left > 0:
                var steps = min(left, UInt32(Self.config.k_group_size))
                Self.load_input_tiles(
                    activation,
                    filter,
                    geometry,
                    storage,
                    place,
                    position,
                    loads,
                    steps,
                )
                position.step()
                left -= steps
            queue.advance()
        # The blocks that multiply arrive here for every stage: not before all
        # have is this shared memory free.
        for _ in range(Self.num_group_pipeline_stages):
            storage.inputs().empty(position.stage).wait(position.parity ^ 1)
            position.step()

    @staticmethod
    @always_inline
    def load_input_tiles(
        ref activation: TensorMap,
        ref filter: TensorMap,
        geometry: TileGeometry,
        storage: Self.Storage,
        place: Self.Place,
        position: Self.InputPosition,
        mut loads: TileLoads,
        steps: UInt32,
    ):
        """Fills a stage of the input ring: activations by im2col, filters by
        tiles.

        Args:
            activation: The activation's descriptor.
            filter: The filter's.
            geometry: The problem.
            storage: The block's shared memory.
            place: The block's.
            position: Of the stage.
            loads: At the stage's first step; moved behind its last.
            steps: Steps of the stage: `k_group_size`, or what is left.
        """
        var ring = storage.inputs()
        ring.empty(position.stage).wait(position.parity ^ 1)
        var full = ring.full(position.stage)
        if place.leads():
            full.arrive_expecting(
                Int(steps) * Self.config.input_expected_bytes()
            )
        var barrier = input_barrier(full.address, place)
        var tile = ring.address(position.stage)
        comptime for step in range(Self.config.k_group_size):
            if UInt32(step) < steps:
                load_activation(
                    activation,
                    tile,
                    barrier,
                    geometry,
                    place,
                    loads.first,
                    loads.tap,
                )
                load_filter(
                    filter,
                    tile + UInt32(Self.config.act_tile_bytes()),
                    barrier,
                    geometry,
                    place,
                    loads.filter,
                    loads.tap,
                )
                loads.tap.step(0, geometry)
                tile += UInt32(Self.config.step_bytes())

    @staticmethod
    @always_inline
    def _multiply_warp(
        geometry: TileGeometry, storage: Self.Storage, place: Self.Place
    ):
        """The MMA warp: allocates the tensor memory, multiplies, and frees it
        when both blocks of a pair have read it."""
        allocate_tmem[Self.cta_group](storage.tmem_address())
        sync_threads[TMEM_THREADS](TMEM_NAME)
        var tmem = tmem_address(storage.tmem_address())
        if elect_one_sync():
            Self._multiply(geometry, storage, place, tmem)
        sync_warp()
        storage.dealloc().wait(0)
        free_tmem[Self.cta_group](tmem)

    @staticmethod
    @always_inline
    def _multiply(
        geometry: TileGeometry,
        storage: Self.Storage,
        place: Self.Place,
        tmem: UInt32,
    ):
        """The MMA thread: sums tile after tile; of a pair's second block, it
        only reads the scheduler's answers."""
        var queue = Self.Queue(storage)
        var inputs = Self.InputPosition()
        var sums = Self.AccumPosition()
        var accumulators = storage.accumulators()
        var _first, rounds = share_of(geometry, place)
        while queue.work.valid:
            if place.leads():
                accumulators.empty(sums.stage).wait(sums.parity ^ 1)
                order_after_barrier()
                var accumulator = tmem + sums.stage * UInt32(
                    Self.stage_stride_cols
                )
                var left = rounds
                var accumulate = False
                while left > 0:
                    var steps = min(left, UInt32(Self.config.k_group_size))
                    Self.mma(
                        storage, place, inputs, accumulator, accumulate, steps
                    )
                    accumulate = True
                    inputs.step()
                    left -= steps
                commit_multiplies[Self.cta_group, Self.cta_group == 2](
                    accumulators.full(sums.stage).address, place.pair_mask()
                )
                sums.step()
            queue.advance()

    @staticmethod
    @always_inline
    def mma(
        storage: Self.Storage,
        place: Self.Place,
        position: Self.InputPosition,
        accumulator: UInt32,
        accumulate: Bool,
        steps: UInt32,
    ):
        """Multiplies a stage of the input ring, and has it released to the
        blocks that load into it.

        Args:
            storage: The block's shared memory.
            place: The block's.
            position: Of the stage.
            accumulator: Its address in tensor memory.
            accumulate: Whether the accumulator holds a part of the sum.
            steps: Steps of the stage.
        """
        var ring = storage.inputs()
        ring.wait(position)
        order_after_barrier()
        var tile = ring.address(position.stage)
        comptime for step in range(Self.config.k_group_size):
            if UInt32(step) < steps:
                multiply_step[Self.config](
                    accumulator,
                    tile,
                    tile + UInt32(Self.config.act_tile_bytes()),
                    accumulate or step > 0,
                )
                tile += UInt32(Self.config.step_bytes())
        commit_multiplies[Self.cta_group, Self.config.sharers() > 1](
            ring.empty(position.stage).address, place.loaders_mask()
        )

    @staticmethod
    @always_inline
    def _epilogue[
        has_residual: Bool
    ](
        ref output: TensorMap,
        params: Self.Params,
        geometry: TileGeometry,
        storage: Self.Storage,
        place: Self.Place,
    ):
        """A thread of the epilogue: stores tile after tile."""
        sync_threads[TMEM_THREADS](TMEM_NAME)
        var epilogue = TileEpilogue[
            Output=Self.Output,
            Visitor=Self.Visitor,
            config=Self.config,
            has_residual=has_residual,
            register_based=Self.register_based_epilogue,
            elementwise_lambda_fn=Self.elementwise_lambda_fn,
            elementwise_compute_lambda_fn=Self.elementwise_compute_lambda_fn,
        ](
            storage,
            place,
            UInt32(thread_idx.x),
            tmem_address(storage.tmem_address()),
        )
        epilogue.start(params, geometry)
        var queue = Self.Queue(storage)
        while queue.work.valid:
            epilogue.store(
                output,
                params,
                geometry,
                tile_of(geometry, place, queue.work.index),
            )
            queue.advance[whole_warp=True]()
        epilogue.finish()
