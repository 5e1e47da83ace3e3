"""The diagonal kernel, for depthwise filters of the common sizes on Hopper:
persistent, on the tensor cores.

    every warp:     for each batch of steps:
                        for each step, for every 8 or 16 columns:
                            read the pixels, multiply, finish, write
                        meet the others
    three threads:      load the next input rows and residual, store the outputs

A diagonal matrix multiplies what is beside its diagonal by zero: a value that
is not finite would spread to the 8 channels of its warp. Sums that are not
numbers are therefore computed anew, channel by channel.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.primitives.grid_controls import (
    launch_dependent_grids,
    wait_on_dependent_grids,
)
from max.gpu.primitives.warp import vote
from std.memory import bitcast
from std.utils import IndexList, StaticTuple
from std.utils.numerics import isnan

from ..conv.access import OutputTarget
from ..conv.epilogue import Epilogue
from ..conv.memory import Reads
from ..conv.problem import SPATIAL
from ..pipeline.barrier import sync_threads
from ..tma.copy import (
    SharedAddress,
    commit_stores,
    load_tile,
    prefetch_map,
    publish_to_engine,
    store_tile,
    wait_stores_read,
)
from ..tma.descriptor import TensorMap
from .diagonal_block import (
    DiagonalFusion,
    DiagonalStorage,
    DiagonalWorker,
    LoadCursor,
    StagePosition,
    chunk,
)
from .diagonal_mma import load_matrices, store_matrices, unknown_sum
from .diagonal_plan import (
    BUFFERS,
    MATRIX,
    PIXEL_BYTES,
    STAGE_ROWS,
    STEP_ROWS,
    THREADS,
    WARPS,
    DiagonalConfig,
    DiagonalGeometry,
    DiagonalStep,
)
from .diagonal_sums import LOADED_ROWS, DiagonalSums
from .stem_staging import load_shared

comptime LOADER = UInt32(1)
"""The warp whose first thread loads input rows; that of the first warp stores
outputs."""

comptime RESIDUAL_LOADER = UInt32(2)
"""The warp whose first thread loads residuals."""


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
    comptime loads = Self.Summing.loads
    comptime together = Self.config.together()
    comptime Places = Self.Summing.Places
    comptime Taps = Self.Summing.Taps
    comptime Fusion = DiagonalFusion[Self.bias_type, Self.out_type]
    comptime FusedWork = Epilogue[Self.bias_type, Self.out_type]
    comptime stores_tiles = not (Self.Output.computes or Self.Output.stores)
    """Whether the copy engine stores the output."""

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
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
            output: Descriptor of the output `[N, Z, P, Q, C]`, a step a box,
                unless fused work stores.
            residual: As `output`, of the residual, if there is one.
            filter: `[C, 1, R, S, 1]`.
            epilogue: What happens before the store.
            target: The output.
            geometry: The problem.
        """
        var storage = DiagonalStorage(geometry)
        if thread_idx.x == 0:
            prefetch_map(activation)
            comptime if Self.stores_tiles:
                prefetch_map(output)
            if epilogue.has_residual:
                prefetch_map(residual)
            storage.init(geometry.stages)
        sync_threads[THREADS](0)
        # What came before may still run: nothing of its memory until here.
        launch_dependent_grids()
        wait_on_dependent_grids()
        var first = geometry.first_step(UInt32(block_idx.x))
        var end = geometry.first_step(UInt32(block_idx.x) + 1)
        Self._compute_steps(
            activation,
            output,
            residual,
            filter,
            epilogue,
            target,
            geometry,
            storage,
            first,
            end,
        )

    @staticmethod
    @always_inline
    def _load_stages(
        ref activation: TensorMap,
        geometry: DiagonalGeometry,
        storage: DiagonalStorage,
        mut cursor: LoadCursor,
        end: UInt32,
        from_: StagePosition,
        stages: UInt32,
    ):
        """Starts filling stages that no one reads any more, if there are steps
        left; one thread."""
        var position = from_
        var count = stages
        while count > 0 and cursor.index < end:
            var step = geometry.step(cursor.index)
            var run = min(step.run, end - cursor.index)
            var left = (
                (run - 1) * UInt32(Self.step_stages)
                + UInt32(Self.window_stages)
                - cursor.stages
            )
            var w = Int32(step.column) * Int32(Self.stride) + geometry.start_w
            var h = Int32(step.row) * Int32(Self.stride) + geometry.start_h
            h += Int32(cursor.stages) * STAGE_ROWS
            var d = Int32(step.plane) * geometry.step_d + geometry.start_d
            var now = min(count, left)
            for _ in range(now):
                var barrier = storage.full(position.stage)
                barrier.arrive_expecting(Int(geometry.load_bytes))
                load_tile[5](
                    storage.ring + position.stage * geometry.stage_bytes,
                    activation,
                    barrier.address,
                    IndexList[5](
                        Int(step.channel),
                        Int(w),
                        Int(h),
                        Int(d),
                        Int(step.image),
                    ),
                )
                h += STAGE_ROWS
                position = position.after(1, geometry.stages)
            count -= now
            cursor.stages += now
            if now == left:
                cursor = LoadCursor(cursor.index + run, 0)

    @staticmethod
    @always_inline
    def _load_residual(
        ref residual: TensorMap,
        geometry: DiagonalGeometry,
        storage: DiagonalStorage,
        first: UInt32,
        end: UInt32,
        buffer: UInt32,
    ) -> UInt32:
        """Starts filling a buffer with a batch's residual; one thread.

        Returns:
            The first step of the next batch.
        """
        var step = geometry.step(first)
        var batch = min(min(step.run, geometry.batch), end - first)
        var barrier = storage.residual(buffer)
        barrier.arrive_expecting(Int(batch * geometry.step_bytes))
        var to = storage.buffer(geometry, buffer)
        for _ in range(batch):
            load_tile[5](to, residual, barrier.address, Self._corner(step))
            step.row += STEP_ROWS
            to += geometry.step_bytes
        return first + batch

    @staticmethod
    @always_inline
    def _corner(step: DiagonalStep) -> IndexList[5]:
        """A step's first output, innermost dimension first."""
        return IndexList[5](
            Int(step.channel),
            Int(step.column),
            Int(step.row),
            Int(step.plane),
            Int(step.image),
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
        first: UInt32,
        end: UInt32,
    ):
        """Computes the block's steps, run by run and batch by batch."""
        var warp, lane = divmod(UInt32(thread_idx.x), UInt32(32))
        var loads_stages = warp == LOADER and lane == 0
        var loads_residual = (
            warp == RESIDUAL_LOADER and lane == 0 and epilogue.has_residual
        )
        var position = StagePosition(0, 0)
        var cursor = LoadCursor(first, 0)
        if loads_stages:
            Self._load_stages(
                activation,
                geometry,
                storage,
                cursor,
                end,
                position,
                geometry.stages,
            )
        # The first step whose residual is not on its way.
        var ahead = first
        if loads_residual:
            for buffer in range(UInt32(BUFFERS - 1)):
                if ahead < end:
                    ahead = Self._load_residual(
                        residual, geometry, storage, ahead, end, buffer
                    )
        var bare = epilogue.is_identity()
        var buffer = StagePosition(0, 0)
        var index = first
        while index < end:
            var worker = DiagonalWorker(
                Self.config, geometry, geometry.step(index), warp, lane
            )
            var taps = Self.Taps()
            var fused = Self.Fusion()
            if worker.active:
                taps = Self.Taps(filter, Int(worker.channel), lane)
                fused = Self.Fusion(epilogue, worker.channel + lane % 4 * 2)
            var slab_end = min(end, geometry.slab_end(index))
            while index < slab_end:
                var begins = True
                var left = worker.enter(
                    geometry, geometry.step(index), end - index
                )
                while left > 0:
                    var batch = min(left, geometry.batch)
                    left -= batch
                    if epilogue.has_residual:
                        storage.residual(buffer.stage).wait(buffer.parity)
                    var to = storage.buffer(geometry, buffer.stage)
                    var read = position
                    for _ in range(batch):
                        if worker.active:
                            Self._await_window(
                                geometry, storage, position, begins
                            )
                            if bare:
                                Self._compute[False](
                                    epilogue,
                                    geometry,
                                    storage,
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
                    var done = batch * UInt32(Self.step_stages)
                    if left == 0:
                        done += UInt32(Self.window_stages - Self.step_stages)
                        position = position.after(
                            UInt32(Self.window_stages - Self.step_stages),
                            geometry.stages,
                        )
                    comptime if Self.stores_tiles:
                        publish_to_engine()
                        if thread_idx.x == 0:
                            # The store before has left its buffer.
                            wait_stores_read[0]()
                    sync_threads[THREADS](0)
                    if loads_stages:
                        Self._load_stages(
                            activation,
                            geometry,
                            storage,
                            cursor,
                            end,
                            read,
                            done,
                        )
                    if loads_residual and ahead < end:
                        ahead = Self._load_residual(
                            residual,
                            geometry,
                            storage,
                            ahead,
                            end,
                            buffer.after(
                                UInt32(BUFFERS - 1), UInt32(BUFFERS)
                            ).stage,
                        )
                    Self._store_batch(
                        output,
                        target,
                        geometry,
                        storage.buffer(geometry, buffer.stage),
                        index,
                        batch,
                    )
                    buffer = buffer.after(1, UInt32(BUFFERS))
                    index += batch
        comptime if Self.stores_tiles:
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
        """Waits for the stages of a step that the step before it, if there is
        one, has not waited for."""
        comptime old = Self.window_stages - Self.step_stages
        comptime for i in range(Self.window_stages):
            if i >= old or begins:
                var at = position.after(UInt32(i), geometry.stages)
                storage.full(at.stage).wait(at.parity)

    @staticmethod
    @always_inline
    def _row_stage(
        geometry: DiagonalGeometry,
        storage: DiagonalStorage,
        position: StagePosition,
        row: UInt32,
    ) -> SharedAddress:
        """Where the stage is that holds a row of the window."""
        var at = position.after(row // STAGE_ROWS, geometry.stages)
        return storage.ring + at.stage * geometry.stage_bytes

    @staticmethod
    @always_inline
    def _compute[
        finishes: Bool
    ](
        epilogue: Self.FusedWork,
        geometry: DiagonalGeometry,
        storage: DiagonalStorage,
        position: StagePosition,
        to: SharedAddress,
        worker: DiagonalWorker,
        fused: Self.Fusion,
        taps: Self.Taps,
    ):
        """Writes the warp's outputs of a step.

        Parameters:
            finishes: Whether there is anything to do to the sums.
        """
        var rows = StaticTuple[SharedAddress, Self.loads]()
        comptime for i in range(Self.loads):
            rows[i] = Self._row_stage(
                geometry,
                storage,
                position,
                UInt32(LOADED_ROWS * i) + worker.row,
            )
        var own = to + worker.output_offset(geometry)
        for column in range(
            worker.first_column, worker.columns, worker.column_step
        ):
            var from_ = Self.Places(
                fill=column * UInt32(Self.stride * PIXEL_BYTES)
            )
            var outputs = Self.Places(fill=own + column * PIXEL_BYTES)
            comptime for i in range(1, Self.together):
                # Where there are no more, the first are computed twice.
                if column + UInt32(i * MATRIX) < worker.columns:
                    from_[i] += UInt32(i * MATRIX * Self.stride * PIXEL_BYTES)
                    outputs[i] += UInt32(i * MATRIX * PIXEL_BYTES)
            var old = StaticTuple[SIMD[Self.out_type, 4], Self.together](fill=0)
            comptime if finishes:
                if epilogue.has_residual:
                    comptime for i in range(Self.together):
                        old[i] = Self._load_old(outputs[i])
            var sums = Self.Summing.multiply[False](
                rows, worker, from_, taps, 0
            )
            var all = Float32(0)
            comptime for i in range(Self.together):
                all += sums[i].reduce_add()
            # One of them is not a number, or some are infinite.
            if vote[DType.uint32](isnan(all)) != 0:
                sums = Self.Summing.multiply_singly(rows, worker, from_, taps)
            comptime for i in range(Self.together):
                var finished = sums[i]
                comptime if finishes:
                    finished = fused.finish(epilogue, finished, old[i])
                var rounded = bitcast[DType.uint32, 2](
                    finished.cast[Self.out_type]()
                )
                store_matrices(outputs[i], rounded[0], rounded[1])

    @staticmethod
    @always_inline
    def _load_old(at: SharedAddress) -> SIMD[Self.out_type, 4]:
        """The residual of 8 columns, where the outputs will be."""
        var loaded = load_matrices[2](at)
        return bitcast[Self.out_type, 4](
            SIMD[DType.uint32, 2](loaded[0], loaded[1])
        )

    @staticmethod
    @always_inline
    def _store_batch(
        ref output: TensorMap,
        target: Self.Output,
        geometry: DiagonalGeometry,
        data: SharedAddress,
        first: UInt32,
        batch: UInt32,
    ):
        """Stores a batch's outputs, which every warp has written."""
        var from_ = data
        if not Self.stores_tiles or thread_idx.x == 0:
            # Computed here: nothing of it is kept from the batch's start.
            var step = geometry.step(unknown_sum(first, 0))
            for _ in range(batch):
                comptime if Self.stores_tiles:
                    store_tile[5](output, from_, Self._corner(step))
                else:
                    Self._store_fused(target, geometry, from_, step)
                step.row += STEP_ROWS
                from_ += geometry.step_bytes
            comptime if Self.stores_tiles:
                commit_stores()

    @staticmethod
    @always_inline
    def _store_fused(
        target: Self.Output,
        geometry: DiagonalGeometry,
        from_: SharedAddress,
        step: DiagonalStep,
    ):
        """Stores a step's outputs through what the graph compiler fused, 8
        channels at a time."""
        var first, group = divmod(UInt32(thread_idx.x), UInt32(WARPS))
        var channel = step.channel + group * MATRIX
        if channel >= geometry.channels:
            return
        var columns = min(geometry.columns, geometry.out_columns - step.column)
        var rows = min(UInt32(STEP_ROWS), geometry.out_rows - step.row)
        for row in range(rows):
            var p = step.row + row
            for column in range(first, columns, UInt32(32)):
                var q = step.column + column
                var values = load_shared[Self.out_type, MATRIX](
                    from_
                    + row * geometry.output_row_bytes
                    + chunk(column, group)
                )
                target.store[MATRIX](
                    Int(step.image),
                    IndexList[SPATIAL](Int(step.plane), Int(p), Int(q)),
                    Int(channel),
                    geometry.output_offset(step, p, q) + Int(channel),
                    values,
                )
