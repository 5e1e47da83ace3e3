"""The Hopper implicit GEMM: persistent, warp-specialized.

    producer, one thread:            for each tile, for each step of its sum:
                                         fill a stage of activations, of filters
    consumers, a warpgroup each:     for each tile, for each step of its sum:
                                         multiply a stage, release it
                                     store the tile
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, thread_idx
from max.gpu.intrinsics import warpgroup_reg_alloc, warpgroup_reg_dealloc
from max.gpu.primitives.grid_controls import (
    launch_dependent_grids,
    wait_on_dependent_grids,
)
from std.utils import StaticTuple

from ..conv.memory import Writes
from ..pipeline.barrier import (
    arrive_threads,
    publish_barriers,
    sync_cluster,
    sync_threads,
)
from ..pipeline.ring import RingPosition
from ..tma.copy import SharedAddress, prefetch_map, wait_stores_read
from ..tma.descriptor import TensorMap
from .config import Sm90Config, WARPGROUP
from .epilogue import FIRST_NAME, store_accumulators
from .mma import Accumulators
from .scheduler import Tap, TileGeometry, TileScheduler
from .smem import SharedStorage
from .split import await_sums, sum_parts
from .tile_io import load_activation, load_filter
from .walk import ROW_BYTES

comptime PRODUCER = 0
"""The producer's warpgroup; consumers follow."""


@fieldwise_init
struct ConvKernel[in_type: DType, out_type: DType, config: Sm90Config]:
    """The kernel of a configuration.

    Parameters:
        in_type: Of activation and filter: bfloat16 or float16.
        out_type: Of the output.
        config: The configuration.
    """

    comptime Storage = SharedStorage[Self.config]
    comptime ActivationPosition = RingPosition[Self.config.activation_stages]
    comptime FilterPosition = RingPosition[Self.config.filter_stages]
    comptime Scheduler = TileScheduler[Self.config]
    comptime Accumulated = Accumulators[
        Self.config.mma_rows(), Self.config.mma_columns()
    ]
    comptime TURN_NAME = FIRST_NAME + Self.config.consumers
    """The named barrier by which the first ping-pong consumer gets its turn to
    multiply; the second's follows."""

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
            Int32(Self.config.threads())
        ),
    )
    @__llvm_arg_metadata(activation, `nvvm.grid_constant`)
    @__llvm_arg_metadata(filter, `nvvm.grid_constant`)
    @__llvm_arg_metadata(output, `nvvm.grid_constant`)
    def run(
        activation: TensorMap,
        filter: TensorMap,
        output: TensorMap,
        output_data: Writes[Self.out_type],
        geometry: TileGeometry,
    ):
        """A block: its threads take their roles. The launch says how many
        blocks a cluster has: `cluster_size`, or one a part of a tile's sum.

        Args:
            activation: Descriptor of the activation, im2col.
            filter: Descriptor of the filter `[K, T*R*S, C/groups]`.
            output: Descriptor of the output `[groups, N*Z*P*Q, K/groups]`.
            output_data: The output itself.
            geometry: The problem.
        """
        var storage = Self.Storage()
        var group, thread = divmod(UInt32(thread_idx.x), UInt32(WARPGROUP))
        if thread_idx.x == 0:
            prefetch_map(activation)
            prefetch_map(filter)
            prefetch_map(output)
        Self._init_barriers(storage)
        # What came before may still run: nothing of its memory until here.
        launch_dependent_grids()
        wait_on_dependent_grids()
        if group == PRODUCER:
            comptime if Self.config.moves_registers():
                warpgroup_reg_dealloc[Self.config.producer_registers()]()
            if thread == 0:
                Self._produce(activation, filter, geometry, storage)
            comptime if Self.config.splits:
                await_sums(geometry)
        else:
            comptime if Self.config.moves_registers():
                warpgroup_reg_alloc[Self.config.consumer_registers()]()
            Self._consume(
                output,
                output_data,
                geometry,
                storage,
                group - 1,
                thread,
            )
        # No block may leave while another copies to it or arrives at it.
        comptime if Self.config.cluster_size() > 1:
            sync_cluster()

    @staticmethod
    @always_inline
    def _init_barriers(storage: Self.Storage):
        """Initializes both rings, for the whole cluster to see."""
        if thread_idx.x == 0:
            storage.activation.init(
                producers=1, releases=Self.config.activation_releases()
            )
            storage.filter.init(
                producers=1, releases=Self.config.filter_releases()
            )
            publish_barriers()
        comptime if Self.config.cluster_size() > 1:
            sync_cluster()
        else:
            sync_threads[Self.config.threads()](0)

    @staticmethod
    @always_inline
    def _produce(
        ref activation: TensorMap,
        ref filter: TensorMap,
        geometry: TileGeometry,
        storage: Self.Storage,
    ):
        """The producer: fills both rings, tile after tile."""
        var scheduler = Self.Scheduler()
        var activations = Self.ActivationPosition()
        var filters = Self.FilterPosition()
        var loads_filter = True
        comptime halo = Self.config.halo
        while scheduler.valid(geometry):
            var tile = scheduler.tile(geometry)
            comptime part = UInt32(
                Self.config.activation_stage_pixels() // Self.config.blocks_n
            )
            var first = geometry.load_start(
                geometry.pixel(tile.pixel + scheduler.rank_n * part), tile.group
            )
            var tap = Tap()
            comptime if Self.config.splits:
                tap.skip(halo, geometry, tile.first)
            for _ in range(tile.rounds):
                load_activation[Self.config, Self.in_type](
                    activation,
                    storage.activation.address(activations.stage),
                    storage.activation.acquire(activations),
                    geometry,
                    scheduler,
                    first,
                    tap,
                )
                activations.step()
                if loads_filter:
                    Self._load_filters(
                        filter,
                        storage,
                        geometry,
                        scheduler,
                        filters,
                        tile.filter,
                        tap,
                    )
                tap.step(halo, geometry)
            loads_filter = not Self.config.stationary
            scheduler.advance()

    @staticmethod
    @always_inline
    def _load_filters(
        ref filter: TensorMap,
        storage: Self.Storage,
        geometry: TileGeometry,
        ranks: Self.Scheduler,
        mut filters: Self.FilterPosition,
        first: UInt32,
        tap: Tap,
    ):
        """Loads the filter stages that meet an activation stage: one, or one a
        tap of the filter row if the stage has a halo."""
        var at = tap
        comptime if Self.config.halo > 0:
            for w in range(geometry.taps_w):
                at.w = w
                Self._load_filter(
                    filter, storage, geometry, ranks, filters, first, at
                )
        else:
            Self._load_filter(
                filter, storage, geometry, ranks, filters, first, at
            )

    @staticmethod
    @always_inline
    def _load_filter(
        ref filter: TensorMap,
        storage: Self.Storage,
        geometry: TileGeometry,
        ranks: Self.Scheduler,
        mut filters: Self.FilterPosition,
        first: UInt32,
        tap: Tap,
    ):
        """Loads the next filter stage."""
        load_filter[Self.config, Self.in_type](
            filter,
            storage.filter.address(filters.stage),
            storage.filter.acquire(filters),
            geometry,
            ranks,
            first,
            tap,
        )
        filters.step()

    @staticmethod
    @always_inline
    def _consume(
        ref output: TensorMap,
        output_data: Writes[Self.out_type],
        geometry: TileGeometry,
        storage: Self.Storage,
        consumer: UInt32,
        thread: UInt32,
    ):
        """A consumer: multiplies and stores its tiles."""
        comptime buffer_bytes = (
            Self.config.output_stages * Self.config.output_stage_bytes()
        )
        var buffers = storage.output + consumer * UInt32(buffer_bytes)
        var scheduler = Self.Scheduler()
        var activations = Self.ActivationPosition()
        var filters = Self.FilterPosition()
        var pixel = UInt32(0)
        var filter = UInt32(0)
        comptime if Self.config.cooperative:
            comptime if Self.config.splits_filters():
                filter = consumer * UInt32(Self.config.consumer_filters())
            else:
                pixel = consumer * UInt32(Self.config.consumer_pixels())
        else:
            if consumer == 1:
                scheduler.advance()
                Self._skip_tile(geometry, activations, filters)
                Self._give_turn(1)
        while scheduler.valid(geometry):
            var tile = scheduler.tile(geometry)
            tile.pixel += pixel
            tile.filter += filter
            var accumulators = Self.Accumulated()
            comptime if not Self.config.cooperative:
                Self._await_turn(consumer)
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
            var whole = True
            comptime if Self.config.splits:
                whole = sum_parts[Self.config](
                    accumulators,
                    storage.activation.data,
                    geometry,
                    tile,
                    consumer,
                    thread,
                )
            if whole:
                store_accumulators[Self.config, Self.out_type](
                    output,
                    output_data,
                    accumulators,
                    buffers,
                    geometry,
                    tile,
                    consumer,
                    thread,
                )
            comptime if Self.config.cooperative:
                scheduler.advance()
            else:
                scheduler.advance(2)
                Self._skip_tile(geometry, activations, filters)
        if thread == 0:
            wait_stores_read[0]()

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
        """Multiplies the `steps` filter stages of a tile, or of a part of one.
        One multiply is always in flight: a stage is released when the multiply
        after its own has been started. This consumer's part of the tile begins
        at `pixel` and `filter`."""
        var tap = UInt32(0)
        comptime if Self.config.stationary:
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
            accumulators.settle[1]()
            Self._release_filter(storage, ranks, done_filter, thread)
            if moved:
                Self._release_activation(
                    storage, ranks, done_activation, thread
                )
        comptime if not Self.config.cooperative:
            Self._give_turn(consumer)
        accumulators.settle[0]()
        Self._release_filter(storage, ranks, filters.stage, thread)
        Self._release_activation(storage, ranks, activations.stage, thread)
        filters.step()
        activations.step()

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
        comptime if Self.config.swapped:
            accumulators.multiply[Self.in_type, overwrite=overwrite](
                filters, pixels
            )
        else:
            accumulators.multiply[Self.in_type, overwrite=overwrite](
                pixels, filters
            )

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
        comptime if Self.config.blocks_n > 1:
            if thread < UInt32(Self.config.blocks_n):
                empty.arrive_at(
                    ranks.rank_m + thread * UInt32(Self.config.blocks_m)
                )
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
        """As `_release_activation`, of a filter stage."""
        comptime if Self.config.stationary:
            return
        var empty = storage.filter.empty(stage)
        comptime if Self.config.blocks_m > 1:
            if thread < UInt32(Self.config.blocks_m):
                empty.arrive_at(
                    ranks.rank_n * UInt32(Self.config.blocks_m) + thread
                )
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
