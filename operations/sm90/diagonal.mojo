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
from max.gpu.memory import external_memory
from max.gpu.primitives.grid_controls import (
    launch_dependent_grids,
    wait_on_dependent_grids,
)
from max.gpu.primitives.warp import vote
from std.math import ceildiv
from std.memory import bitcast
from std.utils import IndexList, StaticTuple
from std.utils.numerics import isnan

from ..conv.access import OutputTarget
from ..conv.epilogue import Epilogue
from ..conv.memory import Reads
from ..conv.problem import SPATIAL
from ..pipeline.barrier import (
    BARRIER_BYTES,
    Barrier,
    publish_barriers,
    sync_threads,
)
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
from .config import PATTERN_BYTES
from .diagonal_mma import (
    DiagonalFilter,
    Sums,
    load_matrices,
    multiply_one,
    multiply_two,
    store_matrices,
    unknown_quotient,
    unknown_sum,
)
from .diagonal_plan import (
    BARRIERS_BYTES,
    BUFFERS,
    WARPS,
    WARPS_LOG,
    MATRIX,
    MAX_STAGES,
    PIXEL_BYTES,
    SLAB,
    STAGE_ROWS,
    STEP_ROWS,
    THREADS,
    DiagonalConfig,
    DiagonalGeometry,
    DiagonalStep,
)
from .stem_staging import load_shared

comptime LOADER = UInt32(1)
"""The warp whose first thread loads input rows; that of the first warp stores
outputs."""

comptime RESIDUAL_LOADER = UInt32(2)
"""The warp whose first thread loads residuals."""

comptime CHUNK_BYTES = 16
"""Bytes of 8 channels: what the swizzle moves."""

comptime LOADED_ROWS = 4
"""Rows that one instruction loads 8 pixels of."""


@fieldwise_init
struct StagePosition(TrivialRegisterPassable):
    """A stage of the ring, and the parity of the round that it is in."""

    var stage: UInt32
    var parity: UInt32

    @always_inline
    def after(self, count: UInt32, stages: UInt32) -> StagePosition:
        """The position some stages on.

        Args:
            count: How many, up to `stages`.
            stages: Of the ring.
        """
        var stage = self.stage + count
        if stage >= stages:
            return StagePosition(stage - stages, self.parity ^ 1)
        return StagePosition(stage, self.parity)


@fieldwise_init
struct LoadCursor(TrivialRegisterPassable):
    """The next stage to load: of a run, `stages` have been."""

    var index: UInt32
    """The run's first step."""
    var stages: UInt32


@fieldwise_init
struct DiagonalStorage(TrivialRegisterPassable):
    """Where a block's shared memory is."""

    var barriers: SharedAddress
    var ring: SharedAddress
    var buffers: SharedAddress

    @always_inline
    def __init__(out self, geometry: DiagonalGeometry):
        """The block's dynamic shared memory.

        Args:
            geometry: The problem.
        """
        var base = external_memory[
            UInt8, address_space=AddressSpace.SHARED, alignment=PATTERN_BYTES
        ]()
        self.barriers = SharedAddress(Int(base))
        self.ring = self.barriers + UInt32(BARRIERS_BYTES)
        self.buffers = self.ring + geometry.stages * geometry.stage_bytes

    @always_inline
    def full(self, stage: UInt32) -> Barrier:
        """Completes when a stage has its rows.

        Args:
            stage: The stage.
        """
        return Barrier(self.barriers + stage * BARRIER_BYTES)

    @always_inline
    def residual(self, buffer: UInt32) -> Barrier:
        """Completes when a buffer has its residual.

        Args:
            buffer: The buffer.
        """
        return Barrier(
            self.barriers + (buffer + UInt32(MAX_STAGES)) * BARRIER_BYTES
        )

    @always_inline
    def buffer(
        self, geometry: DiagonalGeometry, index: UInt32
    ) -> SharedAddress:
        """Where a batch's outputs are.

        Args:
            geometry: The problem.
            index: The buffer.
        """
        return self.buffers + index * geometry.batch_bytes

    @always_inline
    def init(self, stages: UInt32):
        """Initializes the barriers; one thread.

        Args:
            stages: Of the ring.
        """
        for stage in range(stages):
            self.full(stage).init(1)
        for buffer in range(UInt32(BUFFERS)):
            self.residual(buffer).init(1)
        publish_barriers()


@always_inline
def chunk(pixel: UInt32, group: UInt32) -> UInt32:
    """The offset in a row of 8 channels of a pixel, as the swizzle has it.

    Args:
        pixel: The pixel.
        group: Which 8 channels of the slab.
    """
    return pixel * PIXEL_BYTES + (group ^ (pixel % 8)) * CHUNK_BYTES


struct DiagonalWorker(TrivialRegisterPassable):
    """What a thread computes of the steps of a slab."""

    var lane: UInt32
    """Of its warp."""
    var active: Bool
    """Whether the warp has channels."""
    var group: UInt32
    """Which 8 channels of the slab."""
    var channel: UInt32
    """The first of them."""
    var row: UInt32
    """Which of the rows of a load the thread gives the address of."""
    var pixel: UInt32
    """And which pixel of the stage that holds it, for the first column and
    tap."""
    var first_column: UInt32
    var column_step: UInt32
    """From columns of the thread to the next: where a slab has few channels,
    several warps share its columns."""
    var columns: UInt32
    """Of the steps."""

    @always_inline
    def __init__(
        out self,
        config: DiagonalConfig,
        geometry: DiagonalGeometry,
        step: DiagonalStep,
        warp: UInt32,
        lane: UInt32,
    ):
        """Divides a slab among the warps.

        Args:
            config: The configuration.
            geometry: The problem.
            step: The run's first step.
            warp: The thread's.
            lane: Of the warp.
        """
        var left = geometry.channels - step.channel
        # A power of two of channel groups, and the warps that share each.
        var shift = UInt32(0)
        comptime for i in range(1, WARPS_LOG + 1):
            if left <= UInt32(SLAB >> i):
                shift = UInt32(i)
        var groups = UInt32(WARPS) >> shift
        var together = UInt32(config.together() * MATRIX)
        self.lane = lane
        self.row = lane // 8
        if config.stride == 2:
            self.row = lane // 8 % 2 * 2 + lane // 16
        self.pixel = (
            self.row % STAGE_ROWS * geometry.staged_columns
            + lane % 8 * UInt32(config.stride)
        )
        self.group = warp & (groups - 1)
        self.first_column = (warp >> (UInt32(WARPS_LOG) - shift)) * together
        self.column_step = together << shift
        self.channel = step.channel + self.group * MATRIX
        self.active = self.channel < geometry.channels
        self.columns = 0

    @always_inline
    def enter(
        mut self, geometry: DiagonalGeometry, step: DiagonalStep, most: UInt32
    ) -> UInt32:
        """Begins a run.

        Args:
            geometry: The problem.
            step: Its first step.
            most: Steps that it may have.

        Returns:
            Its steps.
        """
        self.columns = min(geometry.columns, geometry.out_columns - step.column)
        return min(step.run, most)

    @always_inline
    def output_offset(self, geometry: DiagonalGeometry) -> UInt32:
        """Where in a step's outputs the matrix row is that the thread gives
        the address of, in the first 8 columns.

        Args:
            geometry: The problem.
        """
        var row = self.lane // 8 % 2 * (geometry.output_row_bytes)
        return row + chunk(self.lane % 8, self.group)


struct DiagonalFusion[bias_type: DType, out_type: DType](
    TrivialRegisterPassable
):
    """The epilogue's operands of a thread's two channels.

    Parameters:
        bias_type: Of the bias.
        out_type: Of the residual.
    """

    var scale: SIMD[DType.float32, 2]
    var bias: SIMD[DType.float32, 2]

    @always_inline
    def __init__(out self):
        """Operands that change nothing."""
        self.scale = 1
        self.bias = 0

    @always_inline
    def __init__(
        out self,
        epilogue: Epilogue[Self.bias_type, Self.out_type],
        channel: UInt32,
    ):
        """Loads them.

        Args:
            epilogue: The epilogue.
            channel: The first of the two.
        """
        self.scale = epilogue.scaled[2, 2](1, Int(channel))
        self.bias = epilogue.load_bias[2, 2](Int(channel))

    @always_inline
    def finish(
        self,
        epilogue: Epilogue[Self.bias_type, Self.out_type],
        sums: Sums,
        residual: SIMD[Self.out_type, 4],
    ) -> Sums:
        """The epilogue of two pixels.

        Args:
            epilogue: The epilogue.
            sums: Two channels of each.
            residual: Likewise.
        """
        return epilogue.finish[4](
            sums * self.scale.join(self.scale),
            self.bias.join(self.bias),
            residual,
        )


def loaded_row(config: DiagonalConfig, matrix: Int) -> Int:
    """The row of the window that a matrix of the loads holds: in an order in
    which a load's registers are those of a multiply of two taps.

    Args:
        config: The configuration.
        matrix: Of all loads, `LOADED_ROWS` each.
    """
    if config.stride == 1:
        return matrix
    var load, place = divmod(matrix, LOADED_ROWS)
    return load * LOADED_ROWS + place % 2 * 2 + place // 2


def pair_distance(config: DiagonalConfig) -> Int:
    """Rows between two taps of a column that are multiplied together.

    Args:
        config: The configuration.
    """
    return 2 if config.stride == 1 else 1


def pair_row(config: DiagonalConfig, pair: Int) -> Int:
    """The row of the first of two taps that are multiplied together.

    Args:
        config: The configuration.
        pair: Of a column of taps.
    """
    if config.stride == 1:
        return pair // 2 * 4 + pair % 2
    return 2 * pair


def loose_row(config: DiagonalConfig) -> Int:
    """The row of the tap that is left: multiplied with the next column's.

    Args:
        config: The configuration.
    """
    var paired_last = config.stride == 1 and config.taps % 4 == 3
    return config.taps - 2 if paired_last else config.taps - 1


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
    comptime taps = Self.config.taps
    comptime stride = Self.config.stride
    comptime window = Self.config.window()
    comptime window_stages = Self.config.window_stages()
    comptime step_stages = Self.config.step_stages()
    comptime all_taps = Self.taps * Self.taps
    comptime loads = ceildiv(Self.window, LOADED_ROWS)
    """Instructions that load the window's rows, moved by a tap."""
    comptime together = Self.config.together()
    comptime Places = StaticTuple[UInt32, Self.together]
    """Where 8 columns begin: bytes."""
    comptime AllSums = StaticTuple[Sums, Self.together]
    comptime Taps = DiagonalFilter[Self.dtype, Self.taps]
    comptime Column = StaticTuple[UInt32, Self.window]
    """8 pixels of every row of a window."""
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
            var sums = Self._multiply[False](rows, worker, from_, taps, 0)
            var all = Float32(0)
            comptime for i in range(Self.together):
                all += sums[i].reduce_add()
            # One of them is not a number, or some are infinite.
            if vote[DType.uint32](isnan(all)) != 0:
                sums = Self._multiply_singly(rows, worker, from_, taps)
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
    def _load_column(
        rows: StaticTuple[SharedAddress, Self.loads], shift: UInt32
    ) -> Self.Column:
        """Loads the pixels that 8 columns see with a column of taps."""
        var column = Self.Column(fill=0)
        comptime for i in range(Self.loads):
            comptime left = Self.window - LOADED_ROWS * i
            comptime count = left if left < 3 else LOADED_ROWS
            var loaded = load_matrices[count](rows[i] + shift)
            comptime for j in range(count):
                comptime row = loaded_row(Self.config, LOADED_ROWS * i + j)
                comptime if row < Self.window:
                    column[row] = loaded[j]
        return column

    @staticmethod
    @always_inline
    def _pixels[r: Int](column: Self.Column) -> StaticTuple[UInt32, STEP_ROWS]:
        """What a row of taps sees: of the step's first row and its second."""
        return StaticTuple[UInt32, STEP_ROWS](
            column[r], column[r + Self.stride]
        )

    @staticmethod
    @always_inline
    def _multiply[
        masks: Bool
    ](
        rows: StaticTuple[SharedAddress, Self.loads],
        worker: DiagonalWorker,
        from_: Self.Places,
        filter: Self.Taps,
        mask: UInt32,
    ) -> Self.AllSums:
        """The sums of `together` times 8 columns: two chains each, so that a
        multiply need not wait for the one before it. With `masks`, only the
        bits of `mask` are taken of every pair of channels."""
        comptime last = loose_row(Self.config)
        var places = StaticTuple[
            StaticTuple[SharedAddress, Self.loads], Self.together
        ](fill=rows)
        comptime for i in range(Self.together):
            comptime for load in range(Self.loads):
                places[i][load] = unknown_sum(rows[load], from_[i])
        var even = Self.AllSums(fill=Sums(0))
        var odd = Self.AllSums(fill=Sums(0))
        var loose = StaticTuple[StaticTuple[UInt32, STEP_ROWS], Self.together](
            fill=StaticTuple[UInt32, STEP_ROWS](fill=0)
        )
        comptime for s in range(Self.taps):
            var columns = StaticTuple[Self.Column, Self.together](
                fill=Self.Column(fill=0)
            )
            var shift = chunk(worker.pixel + UInt32(s), worker.group)
            comptime for i in range(Self.together):
                columns[i] = Self._load_column(places[i], shift)
                comptime if masks:
                    comptime for row in range(Self.window):
                        columns[i][row] = columns[i][row] & mask
            comptime for pair in range(Self.taps // 2):
                comptime first = pair_row(Self.config, pair)
                comptime second = first + pair_distance(Self.config)
                var first_tap = filter.matrix[first * Self.taps + s]()
                var second_tap = filter.matrix[second * Self.taps + s]()
                comptime for i in range(Self.together):
                    ref chain = even if (s + pair) % 2 == 0 else odd
                    chain[i] = multiply_two[Self.dtype](
                        chain[i],
                        Self._pixels[first](columns[i]),
                        first_tap,
                        Self._pixels[second](columns[i]),
                        second_tap,
                    )
            comptime if s % 2 == 1:
                var first_tap = filter.matrix[last * Self.taps + s - 1]()
                var second_tap = filter.matrix[last * Self.taps + s]()
                comptime for i in range(Self.together):
                    odd[i] = multiply_two[Self.dtype](
                        odd[i],
                        loose[i],
                        first_tap,
                        Self._pixels[last](columns[i]),
                        second_tap,
                    )
            elif s == Self.taps - 1:
                var tap = filter.matrix[last * Self.taps + s]()
                comptime for i in range(Self.together):
                    odd[i] = multiply_one[Self.dtype](
                        odd[i], Self._pixels[last](columns[i]), tap
                    )
            else:
                comptime for i in range(Self.together):
                    loose[i] = Self._pixels[last](columns[i])
        comptime for i in range(Self.together):
            even[i] += odd[i]
        return even

    @staticmethod
    @always_inline
    def _multiply_singly(
        rows: StaticTuple[SharedAddress, Self.loads],
        worker: DiagonalWorker,
        from_: Self.Places,
        filter: Self.Taps,
    ) -> Self.AllSums:
        """As `_multiply`, each channel by itself, the others taken for zeros.
        """
        var result = Self.AllSums(fill=Sums(0))
        for channel in range(UInt32(MATRIX)):
            var pair, element = divmod(channel, UInt32(2))
            var own = worker.lane % 4 == pair
            var mask = UInt32(0xFFFF) << (element * 16) if own else UInt32(0)
            # Addresses of their own, for the same reason.
            var again = from_
            comptime for i in range(Self.together):
                again[i] = unknown_sum(from_[i], unknown_quotient(channel))
            var sums = Self._multiply[True](rows, worker, again, filter, mask)
            comptime for i in range(Self.together):
                comptime for j in range(4):
                    if own and element == UInt32(j % 2):
                        result[i][j] = sums[i][j]
        return result

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
