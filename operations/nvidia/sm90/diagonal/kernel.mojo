"""The diagonal kernel, for depthwise filters and groups of few channels, of the
common filter sizes, on Hopper: persistent, on the tensor cores.

    every warp:     for each batch of steps:
                        for each step, for every set of 2 x 16 pixels:
                            read the pixels, multiply, finish, write
                        tell the copying warp, or sync with the others
    a warp, or three threads of the others:
                    load the next input rows and residual, store the outputs

A matrix of blocks on its diagonal multiplies the channels of other groups by
zero. A value that is not finite would make NaN of all 8 channels of its warp.
Sums that are NaN are therefore computed again, group by group.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.primitives.warp import vote
from max.gpu.sync import barrier
from std.memory import bitcast
from std.utils import StaticTuple
from std.utils.numerics import isnan

from ....conv.access import OutputTarget
from ....conv.epilogue import Epilogue
from ....conv.memory import Reads
from ...limits import WARP
from ...overlap import wait_for_earlier_kernels
from ...pipeline.barrier import sync_some, sync_threads, sync_warp
from ...pipeline.matrices import load_matrices
from ...tma.copy import (
    SharedAddress,
    prefetch_map,
    fence_async_proxy,
    wait_stores_read,
)
from ...tma.descriptor import TensorMap
from .block import (
    DiagonalFusion,
    DiagonalStorage,
    LoadCursor,
    SetPlace,
    StagePosition,
)
from .copies import DiagonalCopier, load_residual, store_batch
from .mma import (
    Sums,
    larger_or_unknown,
    store_matrices,
    thread_anew,
)
from .geometry import DiagonalSchedule, DiagonalGeometry
from .outputs import store_fused_batch
from .plan import (
    BUFFERS,
    STEP_ROWS,
    THREADS,
    DiagonalConfig,
)
from .sums import DiagonalSums

comptime LOADER = UInt32(1)
"""The warp whose first thread loads input rows where no warp copies only; that
of the first warp stores outputs."""

comptime RESIDUAL_LOADER = UInt32(2)
"""The warp whose first thread loads residuals where no warp copies only."""

comptime COMPUTING = 1
"""The named barrier of the threads that compute."""


@fieldwise_init
struct DiagonalKernel[
    dtype: DType,
    bias_type: DType,
    Output: OutputTarget,
    config: DiagonalConfig,
]:
    """The kernel of a configuration.

    Parameters:
        dtype: Of activation and filter: bfloat16 or float16.
        bias_type: Of the bias.
        Output: How the output is reached; the residual has its type, bfloat16
            or float16.
        config: The configuration.
    """

    comptime out_type = Self.Output.dtype
    comptime stride = Self.config.stride
    comptime window_stages = Self.config.window_stages()
    comptime step_stages = Self.config.step_stages()
    comptime Summing = DiagonalSums[Self.dtype, Self.config]
    comptime RowSums = Self.Summing.RowSums
    comptime Stages = Self.Summing.Stages
    comptime Worker = Self.Summing.Worker
    comptime Taps = Self.Summing.Taps
    comptime Fusion = DiagonalFusion[Self.bias_type, Self.out_type]
    comptime FusedWork = Epilogue[Self.bias_type, Self.out_type]
    comptime Old = StaticTuple[SIMD[Self.out_type, 4], STEP_ROWS]
    """The residual of a set, laid out as its sums are."""
    comptime Rounded = StaticTuple[SIMD[DType.uint32, 2], STEP_ROWS]
    """A set's outputs: for each row, those of each half."""
    comptime apart = Self.config.copies_apart()
    """Whether a warp of its own copies."""
    comptime stores_tiles = not (Self.Output.computes or Self.Output.stores)
    """Whether TMA stores the output."""

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
            Int32(Self.config.max_threads())
        ),
        `nvvm.minctasm`=SIMDLength(Self.config.resident()),
    )
    @__llvm_arg_metadata(activation, `nvvm.grid_constant`)
    @__llvm_arg_metadata(output, `nvvm.grid_constant`)
    @__llvm_arg_metadata(residual, `nvvm.grid_constant`)
    def run(
        activation: TensorMap,
        output: TensorMap,
        residual: TensorMap,
        filter: Reads[Self.dtype],
        epilogue: Self.FusedWork,
        target: Self.Output,
        geometry: DiagonalGeometry,
    ):
        """A block: its threads take their roles.

        Args:
            activation: Descriptor of the activation `[N, D, H, W, C]`, a stage
                a box.
            output: Descriptor of the output `[N, Z, P, Q, C]`, a step a box;
                not used if fused work stores.
            residual: Descriptor of the residual, a step a box; not used if
                there is none.
            filter: `[K, 1, R, S, C / groups]`.
            epilogue: What happens before the store.
            target: The output.
            geometry: The problem.
        """
        var storage = DiagonalStorage(geometry)
        if thread_idx.x == 0:
            comptime if Self.stores_tiles:
                prefetch_map(output)
            if epilogue.has_residual:
                prefetch_map(residual)
        var schedule = geometry.schedule[Self.apart](UInt32(block_idx.x))
        comptime if Self.apart:
            if UInt32(thread_idx.x) >= geometry.computing_threads():
                Self._copy(
                    activation,
                    output,
                    residual,
                    epilogue.has_residual,
                    geometry,
                    storage,
                    schedule,
                )
                return
        else:
            if thread_idx.x == 0:
                prefetch_map(activation)
                storage.init(geometry)
            sync_threads[THREADS](0)
        Self._compute_steps(
            activation,
            output,
            residual,
            filter,
            epilogue,
            target,
            geometry,
            storage,
            schedule,
        )

    @staticmethod
    @always_inline
    def _copy(
        ref activation: TensorMap,
        ref output: TensorMap,
        ref residual: TensorMap,
        has_residual: Bool,
        geometry: DiagonalGeometry,
        storage: DiagonalStorage,
        schedule: DiagonalSchedule,
    ):
        """The copying warp. It starts to load the first stages before the block
        syncs."""
        var copies = UInt32(thread_idx.x) == geometry.computing_threads()
        var copier = DiagonalCopier[Self.config, Self.stores_tiles](
            geometry, schedule
        )
        if copies:
            prefetch_map(activation)
            storage.init(geometry)
        wait_for_earlier_kernels()
        if copies:
            copier.load(activation, geometry, storage, geometry.stages)
        barrier()
        if copies:
            copier.run(
                activation, output, residual, has_residual, geometry, storage
            )

    @staticmethod
    @always_inline
    def _compute_steps(
        ref activation: TensorMap,
        ref output: TensorMap,
        ref residual: TensorMap,
        filter: Reads[Self.dtype],
        epilogue: Self.FusedWork,
        target: Self.Output,
        geometry: DiagonalGeometry,
        storage: DiagonalStorage,
        schedule: DiagonalSchedule,
    ):
        """Waits for earlier kernels, and computes the block's steps, run by run
        and batch by batch."""
        var warp, lane = divmod(UInt32(thread_idx.x), UInt32(WARP))
        var loads_stages = False
        var loads_residual = False
        comptime if not Self.apart:
            loads_stages = warp == LOADER and lane == 0
            loads_residual = (
                warp == RESIDUAL_LOADER and lane == 0 and epilogue.has_residual
            )
        var index = schedule.first
        var worker = Self.Worker(
            geometry, schedule.step(geometry, index), warp, lane
        )
        var cursor = LoadCursor(schedule)
        if loads_stages:
            cursor.begin(Self.config, geometry, schedule)
        wait_for_earlier_kernels()
        # Loaded first: after the stages it would wait for them.
        var loaded = Self.Taps.load(
            filter, worker.channel(), geometry.group_log, lane
        )
        if loads_stages:
            cursor.load(
                Self.config,
                activation,
                geometry,
                storage,
                schedule,
                geometry.stages,
            )
        # The first step whose residual is not being loaded yet.
        var ahead = schedule.first
        if loads_residual:
            for buffer in range(UInt32(BUFFERS - 1)):
                if ahead < schedule.end:
                    ahead = load_residual(
                        residual, geometry, storage, schedule, ahead, buffer
                    )
        comptime if Self.apart:
            barrier()
        var bare = epilogue.is_identity()
        var position = StagePosition(0, 0)
        var buffer = StagePosition(0, 0)
        var taps = Self.Taps(loaded, geometry.group_log, lane)
        var fused = Self.Fusion(epilogue, worker, lane)
        while index < schedule.end:
            var step = schedule.step(geometry, index)
            if step.channel != worker.slab:
                # Computed again, so that no register keeps it.
                warp, lane = divmod(thread_anew(), UInt32(WARP))
                worker = Self.Worker(geometry, step, warp, lane)
                loaded = Self.Taps.load(
                    filter, worker.channel(), geometry.group_log, lane
                )
                taps = Self.Taps(loaded, geometry.group_log, lane)
                fused = Self.Fusion(epilogue, worker, lane)
            var begins = True
            var left = worker.enter(geometry, step, schedule.end - index)
            while left > 0:
                var batch = min(left, geometry.batch)
                left -= batch
                if Self.apart or epilogue.has_residual:
                    storage.ready(buffer.stage).wait(buffer.parity)
                var to = storage.buffer(geometry, buffer.stage)
                for _ in range(batch):
                    if worker.active:
                        Self._await_window(geometry, storage, position, begins)
                        if bare:
                            Self._compute[False](
                                epilogue,
                                geometry,
                                storage,
                                schedule.up,
                                position,
                                to,
                                worker,
                                fused,
                                taps,
                            )
                        else:
                            Self._compute[True](
                                epilogue,
                                geometry,
                                storage,
                                schedule.up,
                                position,
                                to,
                                worker,
                                fused,
                                taps,
                            )
                    begins = False
                    position = position.after(
                        UInt32(Self.step_stages), geometry.stages
                    )
                    to += geometry.step_bytes
                if left == 0:
                    position = position.after(
                        UInt32(Self.window_stages - Self.step_stages),
                        geometry.stages,
                    )
                var data = storage.buffer(geometry, buffer.stage)
                comptime if Self.apart:
                    comptime if not Self.stores_tiles:
                        sync_some(COMPUTING, geometry.computing_threads())
                        store_fused_batch(target, geometry, data, step, batch)
                    fence_async_proxy()
                    sync_warp()
                    if lane == 0:
                        storage.written(buffer.stage).arrive()
                else:
                    comptime if Self.stores_tiles:
                        fence_async_proxy()
                        if thread_idx.x == 0:
                            # The store before has read its buffer.
                            wait_stores_read[0]()
                    sync_threads[THREADS](0)
                    if loads_stages:
                        var done = batch * UInt32(Self.step_stages)
                        if left == 0:
                            done += UInt32(
                                Self.window_stages - Self.step_stages
                            )
                        cursor.load(
                            Self.config,
                            activation,
                            geometry,
                            storage,
                            schedule,
                            done,
                        )
                    if loads_residual and ahead < schedule.end:
                        ahead = load_residual(
                            residual,
                            geometry,
                            storage,
                            schedule,
                            ahead,
                            buffer.after(
                                UInt32(BUFFERS - 1), UInt32(BUFFERS)
                            ).stage,
                        )
                    comptime if not Self.stores_tiles:
                        store_fused_batch(target, geometry, data, step, batch)
                    else:
                        if thread_idx.x == 0:
                            store_batch(output, geometry, data, step, batch)
                step.row += batch * step.next
                buffer = buffer.after(1, UInt32(BUFFERS))
                index += batch
        comptime if Self.stores_tiles and not Self.apart:
            if thread_idx.x == 0:
                wait_stores_read[0]()

    @staticmethod
    @always_inline
    def _await_window(
        geometry: DiagonalGeometry,
        storage: DiagonalStorage,
        position: StagePosition,
        begins: Bool,
    ):
        """Waits for those stages of a step that the step before it has not
        waited for."""
        comptime old = Self.window_stages - Self.step_stages
        comptime for i in range(Self.window_stages):
            if i >= old or begins:
                var at = position.after(UInt32(i), geometry.stages)
                storage.full(at.stage).wait(at.parity)

    @staticmethod
    @always_inline
    def _compute[
        finishes: Bool
    ](
        epilogue: Self.FusedWork,
        geometry: DiagonalGeometry,
        storage: DiagonalStorage,
        up: Bool,
        position: StagePosition,
        to: SharedAddress,
        worker: Self.Worker,
        fused: Self.Fusion,
        taps: Self.Taps,
    ):
        """Writes the warp's outputs of a step.

        Parameters:
            finishes: Whether there is anything to do to the sums.
        """
        var stages = Self.Stages()
        comptime for i in range(Self.window_stages):
            var index = UInt32(Self.window_stages - 1 - i if up else i)
            var at = position.after(index, geometry.stages)
            stages[i] = storage.ring + at.stage * geometry.stage_bytes
        var own = to + worker.output
        # NaN if one of the outputs is.
        var largest = UInt32(0)
        comptime together = 1 if finishes else Self.config.together()
        var set = worker.first_set
        while set < worker.sets:
            var several = False
            comptime if together > 1:
                several = set + worker.set_step < worker.sets
            if several:
                Self._compute_sets[finishes, together](
                    epilogue,
                    geometry,
                    worker,
                    fused,
                    taps,
                    stages,
                    own,
                    set,
                    largest,
                )
            else:
                Self._compute_sets[finishes, 1](
                    epilogue,
                    geometry,
                    worker,
                    fused,
                    taps,
                    stages,
                    own,
                    set,
                    largest,
                )
        comptime if Self.Summing.mixes_groups and not finishes:
            # No one has read the outputs yet: they are replaced.
            var two = bitcast[Self.out_type, 2](largest)
            if vote[DType.uint32](isnan(two).reduce_or()) != 0:
                set = worker.first_set
                while set < worker.sets:
                    var at = SetPlace(geometry, worker, own, set)
                    _ = Self._write(
                        at,
                        Self.Summing.multiply_singly(
                            geometry, stages, worker, at.shift, taps
                        ),
                    )
                    set += worker.set_step

    @staticmethod
    @always_inline
    def _compute_sets[
        finishes: Bool, count: Int
    ](
        epilogue: Self.FusedWork,
        geometry: DiagonalGeometry,
        worker: Self.Worker,
        fused: Self.Fusion,
        taps: Self.Taps,
        stages: Self.Stages,
        outputs: SharedAddress,
        mut set: UInt32,
        mut largest: UInt32,
    ):
        """Writes the outputs of `count` sets, whose multiplies do not depend on
        each other."""
        var places = StaticTuple[SetPlace, count](
            fill=SetPlace(geometry, worker, outputs, set)
        )
        var sums = StaticTuple[Self.RowSums, count](
            fill=Self.RowSums(fill=Sums(0))
        )
        comptime for i in range(count):
            comptime if i > 0:
                places[i] = SetPlace(geometry, worker, outputs, set)
            sums[i] = Self.Summing.multiply(
                stages, worker, places[i].shift, taps
            )
            set += worker.set_step
        comptime if finishes:
            comptime if Self.Summing.mixes_groups:
                # NaN if a sum is NaN, or if some are infinite.
                var total = Float32(0)
                comptime for i in range(count):
                    total += (sums[i][0] + sums[i][1]).reduce_add()
                if vote[DType.uint32](isnan(total)) != 0:
                    comptime for i in range(count):
                        sums[i] = Self.Summing.multiply_singly(
                            geometry, stages, worker, places[i].shift, taps
                        )
            comptime for i in range(count):
                comptime for y in range(STEP_ROWS):
                    sums[i][y] = fused.activate(epilogue, sums[i][y])
                var old = Self.Old(fill=0)
                if epilogue.has_residual:
                    old = Self._load_old(places[i])
                comptime for y in range(STEP_ROWS):
                    sums[i][y] = epilogue.add_residual[4](sums[i][y], old[y])
        comptime for i in range(count):
            var rounded = Self._write(places[i], sums[i])
            comptime if Self.Summing.mixes_groups and not finishes:
                comptime for y in range(STEP_ROWS):
                    comptime for half in range(2):
                        largest = larger_or_unknown[Self.out_type](
                            largest, rounded[y][half]
                        )

    @staticmethod
    @always_inline
    def _write(at: SetPlace, sums: Self.RowSums) -> Self.Rounded:
        """Rounds and writes a set."""
        var rows = Self.Rounded(fill=0)
        comptime for y in range(STEP_ROWS):
            rows[y] = bitcast[DType.uint32, 2](sums[y].cast[Self.out_type]())
        store_matrices(at.first, rows[0][0], rows[1][0])
        store_matrices(at.second, rows[0][1], rows[1][1])
        return rows

    @staticmethod
    @always_inline
    def _load_old(at: SetPlace) -> Self.Old:
        """The residual of a set, where its outputs will be."""
        var first = load_matrices[2](at.first)
        var second = load_matrices[2](at.second)
        var old = Self.Old(fill=0)
        comptime for y in range(STEP_ROWS):
            old[y] = bitcast[Self.out_type, 4](
                SIMD[DType.uint32, 2](first[y], second[y])
            )
        return old
