"""The Hopper stem kernel: persistent, warp-specialized, for few input channels.

    consumers, first:                pack the filter into shared memory
    producer, a warpgroup:           for each tile: stage its input pixels
    consumers, a warpgroup each:     for each tile, for 64 of its pixels in
                                     turn: gather their activations into
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
from max.gpu.intrinsics import warpgroup_reg_alloc, warpgroup_reg_dealloc
from std.utils import StaticTuple

from ....conv.access import OutputTarget
from ....conv.epilogue import Epilogue
from ....conv.memory import Reads
from ...limits import WARP, WARPGROUP
from ...overlap import wait_for_earlier_kernels
from ...pipeline.barrier import publish_barriers, sync_threads
from ...pipeline.ring import RingPosition
from ...tma.copy import fence_async_proxy
from .consumer import ANYWHERE, GROUPS, PLAIN, StemConsumer
from .filters import pack_filter, write_factors, write_table
from .geometry import (
    GROUP_FILTERS,
    STAGES,
    StemConfig,
    StemGeometry,
)
from .outputs import StemEpilogue
from .staging import visit_planes
from .storage import StemStorage

comptime REGISTERS = 64 * 1024
"""Of a multiprocessor."""


def producer_registers(config: StemConfig) -> Int:
    """Registers of a producer's thread once the roles are taken."""
    return 56 if config.resident == 1 else 48


def consumer_registers(config: StemConfig) -> Int:
    """Registers of a consumer's thread once the roles are taken: the rest of
    what the block began with."""
    var groups = 1 + config.consumers
    var begun = REGISTERS // (config.resident * config.threads()) // 8 * 8
    return (
        (begun * groups - producer_registers(config))
        // config.consumers
        // 8
        * 8
    )


comptime CONSUMER_NAME = 1
"""The named barrier of all consumers."""


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

    comptime FusedWork = Epilogue[Self.bias_type, Self.residual_type]
    comptime Consumer = StemConsumer[
        Self.in_type, Self.residual_type, Self.Output, Self.config
    ]

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
            Int32(Self.config.threads())
        ),
        `nvvm.minctasm`=SIMDLength(Self.config.resident),
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
        var storage = StemStorage.of[Self.config](geometry)
        var group, thread = divmod(UInt32(thread_idx.x), UInt32(WARPGROUP))
        var worker, filters = geometry.filter_blocks.split(UInt32(block_idx.x))
        var workers, _rest = geometry.filter_blocks.split(UInt32(grid_dim.x))
        if thread_idx.x == 0:
            for stage in range(STAGES):
                storage.full(UInt32(stage)).init(WARPGROUP)
                storage.empty(UInt32(stage)).init(
                    Self.config.consumer_threads() // WARP
                )
            publish_barriers()
        sync_threads[Self.config.threads()](0)
        if group == 0:
            warpgroup_reg_dealloc[producer_registers(Self.config)]()
            wait_for_earlier_kernels()
            Self._produce(
                activation, geometry, storage, worker, workers, thread
            )
            return
        warpgroup_reg_alloc[consumer_registers(Self.config)]()
        var consumer = Self.Consumer(
            output,
            geometry,
            storage,
            filters * geometry.tiles_n * UInt32(Self.config.tile_n),
            group - 1,
            thread,
        )
        Self._consume(filter, epilogue, consumer, worker, workers)

    @staticmethod
    @always_inline
    def _consume(
        filter: Reads[Self.in_type],
        epilogue: Self.FusedWork,
        consumer: Self.Consumer,
        worker: UInt32,
        workers: UInt32,
    ):
        """A consumer: packs the filter with the others, then multiplies."""
        var geometry = consumer.geometry
        var storage = consumer.storage
        var thread = UInt32(thread_idx.x) - UInt32(WARPGROUP)
        write_table[Self.config](geometry, storage.table, storage.zeros, thread)
        wait_for_earlier_kernels()
        pack_filter[Self.config](
            filter, geometry, storage.filter, consumer.first_filter, thread
        )
        fence_async_proxy()
        comptime Steps = StemEpilogue[Self.residual_type]
        if epilogue.is_identity() and geometry.filters % GROUP_FILTERS == 0:
            sync_threads[Self.config.consumer_threads()](CONSUMER_NAME)
            consumer.run[PLAIN](Steps.none(), worker, workers)
            return
        var steps = Steps.of(epilogue)
        write_factors[Self.config](
            epilogue,
            geometry,
            storage.factors,
            consumer.first_filter,
            steps.halves(),
            thread,
        )
        sync_threads[Self.config.consumer_threads()](CONSUMER_NAME)
        if geometry.filters % GROUP_FILTERS == 0:
            consumer.run[GROUPS](steps, worker, workers)
        else:
            consumer.run[ANYWHERE](steps, worker, workers)

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
        var position = RingPosition[STAGES]()
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
