"""The diagonal kernel, for depthwise filters of the common sizes on Hopper:
persistent, warp-specialized, on the tensor cores.

    producer, one thread:     for each step: fill the stages that it adds
    consumers, 8 warps:       for each step, for every 8 columns:
                                  read the pixels, multiply, finish, write
                              release the stages, store the step's outputs

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
)
from .diagonal_plan import (
    BARRIERS_BYTES,
    BUFFERS,
    CONSUMERS,
    MATRIX,
    PIXEL_BYTES,
    STAGE_ROWS,
    STEP_ROWS,
    THREADS,
    DiagonalConfig,
    DiagonalGeometry,
    DiagonalStep,
)
from .stem_staging import load_shared

comptime CONSUMER_THREADS = 32 * CONSUMERS

comptime CONSUMER_NAME = 1
"""The named barrier of the consumers."""

comptime CHUNK_BYTES = 16
"""Bytes of 8 channels: what the swizzle moves."""

comptime LOADED_ROWS = 4
"""Rows that one instruction loads 8 pixels of."""

comptime MAX_STAGES = 16
"""Stages that there are barriers for."""


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
        self.buffers = self.ring + geometry.stages * geometry.stage_bytes()

    @always_inline
    def full(self, stage: UInt32) -> Barrier:
        """Completes when a stage has its rows.

        Args:
            stage: The stage.
        """
        return Barrier(self.barriers + stage * BARRIER_BYTES)

    @always_inline
    def empty(self, stage: UInt32) -> Barrier:
        """Completes when every consumer is done with a stage.

        Args:
            stage: The stage.
        """
        return Barrier(
            self.barriers + (stage + UInt32(MAX_STAGES)) * BARRIER_BYTES
        )

    @always_inline
    def residual(self, buffer: UInt32) -> Barrier:
        """Completes when a buffer has its residual.

        Args:
            buffer: The buffer.
        """
        return Barrier(
            self.barriers + (buffer + UInt32(2 * MAX_STAGES)) * BARRIER_BYTES
        )

    @always_inline
    def init(self, stages: UInt32):
        """Initializes the barriers; one thread.

        Args:
            stages: Of the ring.
        """
        for stage in range(stages):
            self.full(stage).init(1)
            self.empty(stage).init(CONSUMERS)
        for buffer in range(UInt32(BUFFERS)):
            self.residual(buffer).init(1)
        publish_barriers()


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
    comptime Taps = DiagonalFilter[Self.dtype, Self.taps]
    comptime Column = StaticTuple[UInt32, Self.window]
    """8 pixels of every row of a window."""
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
        var warp, lane = divmod(UInt32(thread_idx.x), UInt32(32))
        if warp == UInt32(CONSUMERS):
            if lane == 0:
                Self._produce(activation, geometry, storage, first, end)
        else:
            Self._consume(
                output,
                residual,
                filter,
                epilogue,
                target,
                geometry,
                storage,
                warp,
                lane,
                first,
                end,
            )

    @staticmethod
    @always_inline
    def _produce(
        ref activation: TensorMap,
        geometry: DiagonalGeometry,
        storage: DiagonalStorage,
        first: UInt32,
        end: UInt32,
    ):
        """Fills the ring, run after run."""
        var position = StagePosition(0, 0)
        var index = first
        while index < end:
            var step = geometry.step(index)
            var run = min(step.run, end - index)
            var count = (run - 1) * UInt32(Self.step_stages) + UInt32(
                Self.window_stages
            )
            var w = Int32(step.column) * Int32(Self.stride) + geometry.start_w
            var h = Int32(step.row) * Int32(Self.stride) + geometry.start_h
            var d = Int32(step.plane) * geometry.step_d + geometry.start_d
            for _ in range(count):
                storage.empty(position.stage).wait(position.parity ^ 1)
                var barrier = storage.full(position.stage)
                barrier.arrive_expecting(Int(geometry.stage_bytes()))
                load_tile[5](
                    storage.ring + position.stage * geometry.stage_bytes(),
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
            index += run

    @staticmethod
    @always_inline
    def _load_residual(
        ref residual: TensorMap,
        geometry: DiagonalGeometry,
        storage: DiagonalStorage,
        index: UInt32,
        buffer: UInt32,
    ):
        """Starts filling a buffer with a step's residual; one thread."""
        var step = geometry.step(index)
        var barrier = storage.residual(buffer)
        barrier.arrive_expecting(Int(geometry.buffer_bytes()))
        load_tile[5](
            storage.buffers + buffer * geometry.buffer_bytes(),
            residual,
            barrier.address,
            Self._corner(step),
        )

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
    def _consume(
        ref output: TensorMap,
        ref residual: TensorMap,
        filter: Reads[Self.dtype],
        epilogue: Self.FusedWork,
        target: Self.Output,
        geometry: DiagonalGeometry,
        storage: DiagonalStorage,
        warp: UInt32,
        lane: UInt32,
        first: UInt32,
        end: UInt32,
    ):
        """Computes the block's steps."""
        var is_first = warp == 0 and lane == 0
        if is_first and epilogue.has_residual:
            for ahead in range(min(UInt32(BUFFERS - 1), end - first)):
                Self._load_residual(
                    residual, geometry, storage, first + ahead, ahead
                )
        var position = StagePosition(0, 0)
        var buffer = StagePosition(0, 0)
        var index = first
        while index < end:
            var step = geometry.step(index)
            var run_end = min(index + step.run, end)
            var begins = True
            var channel = step.channel + warp * MATRIX
            var columns = min(
                geometry.columns, geometry.out_columns - step.column
            )
            var active = channel < geometry.channels
            var taps = Self.Taps()
            var bias = SIMD[DType.float32, 2](0)
            if active:
                taps = Self.Taps(filter, Int(channel), lane)
                bias = epilogue.load_bias[2, 2](Int(channel + lane % 4 * 2))
            while index < run_end:
                if active:
                    Self._await_window(geometry, storage, position, begins)
                    if epilogue.has_residual:
                        storage.residual(buffer.stage).wait(buffer.parity)
                    Self._compute_step(
                        filter,
                        epilogue,
                        geometry,
                        storage,
                        position,
                        buffer.stage,
                        channel,
                        columns,
                        taps,
                        bias,
                        warp,
                        lane,
                    )
                var done = UInt32(Self.step_stages)
                if index + 1 == run_end:
                    done = UInt32(Self.window_stages)
                Self._release(geometry, storage, position, done, lane)
                position = position.after(done, geometry.stages)
                Self._store_step(
                    output, target, geometry, storage, buffer.stage, index
                )
                index += 1
                begins = False
                if is_first:
                    comptime if Self.stores_tiles:
                        # The store before this one has left its buffer.
                        wait_stores_read[1]()
                    var ahead = index + UInt32(BUFFERS - 2)
                    if epilogue.has_residual and ahead < end:
                        Self._load_residual(
                            residual,
                            geometry,
                            storage,
                            ahead,
                            buffer.after(
                                UInt32(BUFFERS - 1), UInt32(BUFFERS)
                            ).stage,
                        )
                buffer = buffer.after(1, UInt32(BUFFERS))
        comptime if Self.stores_tiles:
            if is_first:
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
    def _release(
        geometry: DiagonalGeometry,
        storage: DiagonalStorage,
        position: StagePosition,
        count: UInt32,
        lane: UInt32,
    ):
        """Tells the producer that the warp is done with the first stages of
        the window."""
        # Every lane has its values: the loads were of the whole warp.
        if lane < count:
            var at = position.after(lane, geometry.stages)
            storage.empty(at.stage).arrive()

    @staticmethod
    @always_inline
    def _row_address(
        geometry: DiagonalGeometry,
        storage: DiagonalStorage,
        position: StagePosition,
        row: UInt32,
    ) -> SharedAddress:
        """Where a row of the window is."""
        var stage, rest = divmod(row, UInt32(STAGE_ROWS))
        var at = position.after(stage, geometry.stages)
        return (
            storage.ring
            + at.stage * geometry.stage_bytes()
            + rest * geometry.row_bytes()
        )

    @staticmethod
    @always_inline
    def _chunk(pixel: UInt32, warp: UInt32) -> UInt32:
        """The offset in a row of the warp's channels of a pixel."""
        return pixel * PIXEL_BYTES + (warp ^ (pixel % 8)) * CHUNK_BYTES

    @staticmethod
    @always_inline
    def _compute_step(
        filter: Reads[Self.dtype],
        epilogue: Self.FusedWork,
        geometry: DiagonalGeometry,
        storage: DiagonalStorage,
        position: StagePosition,
        buffer: UInt32,
        channel: UInt32,
        columns: UInt32,
        taps: Self.Taps,
        bias: SIMD[DType.float32, 2],
        warp: UInt32,
        lane: UInt32,
    ):
        """Writes the warp's outputs of a step to a buffer."""
        var rows = StaticTuple[SharedAddress, Self.loads]()
        comptime for i in range(Self.loads):
            var row = lane // 8
            comptime if Self.stride == 2:
                row = row % 2 * 2 + row // 2
            rows[i] = Self._row_address(
                geometry, storage, position, UInt32(LOADED_ROWS * i) + row
            )
        var shifts = StaticTuple[UInt32, Self.taps]()
        comptime for s in range(Self.taps):
            shifts[s] = Self._chunk(
                lane % 8 * UInt32(Self.stride) + UInt32(s), warp
            )
        var output_row = geometry.columns * PIXEL_BYTES
        var to = (
            storage.buffers
            + buffer * geometry.buffer_bytes()
            + lane // 8 % 2 * output_row
            + Self._chunk(lane % 8, warp)
        )
        var from_ = UInt32(0)
        for column in range(UInt32(0), columns, UInt32(MATRIX)):
            var sums = Self._multiply(rows, shifts, from_, taps)
            # One of them is not a number, or they are infinite.
            if vote[DType.uint32](isnan(sums.reduce_add())) != 0:
                sums = Self._sum_singly(
                    filter,
                    geometry,
                    storage,
                    position,
                    channel,
                    column,
                    warp,
                    lane,
                )
            var old = SIMD[DType.uint32, 2](0)
            if epilogue.has_residual:
                var loaded = load_matrices[2](to)
                old = SIMD[DType.uint32, 2](loaded[0], loaded[1])
            var finished = epilogue.finish[4](
                sums, bias.join(bias), bitcast[Self.out_type, 4](old)
            )
            var bits = bitcast[DType.uint32, 2](finished.cast[Self.out_type]())
            store_matrices(to, bits[0], bits[1])
            from_ += UInt32(MATRIX * Self.stride * PIXEL_BYTES)
            to += UInt32(MATRIX * PIXEL_BYTES)

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
    def _multiply(
        rows: StaticTuple[SharedAddress, Self.loads],
        shifts: StaticTuple[UInt32, Self.taps],
        from_: UInt32,
        filter: Self.Taps,
    ) -> Sums:
        """The sums of 8 columns: two chains, so that a multiply need not wait
        for the one before it."""
        comptime last = loose_row(Self.config)
        var chains = StaticTuple[Sums, 2](fill=Sums(0))
        var loose = StaticTuple[UInt32, STEP_ROWS](fill=0)
        comptime for s in range(Self.taps):
            var column = Self._load_column(rows, shifts[s] + from_)
            comptime for pair in range(Self.taps // 2):
                comptime first = pair_row(Self.config, pair)
                comptime second = first + pair_distance(Self.config)
                chains[(s + pair) % 2] = multiply_two[Self.dtype](
                    chains[(s + pair) % 2],
                    Self._pixels[first](column),
                    filter.matrix[first * Self.taps + s](),
                    Self._pixels[second](column),
                    filter.matrix[second * Self.taps + s](),
                )
            var pixels = Self._pixels[last](column)
            comptime if s % 2 == 1:
                chains[s // 2 % 2] = multiply_two[Self.dtype](
                    chains[s // 2 % 2],
                    loose,
                    filter.matrix[last * Self.taps + s - 1](),
                    pixels,
                    filter.matrix[last * Self.taps + s](),
                )
            elif s == Self.taps - 1:
                chains[s // 2 % 2] = multiply_one[Self.dtype](
                    chains[s // 2 % 2],
                    pixels,
                    filter.matrix[last * Self.taps + s](),
                )
            else:
                loose = pixels
        return chains[0] + chains[1]

    @staticmethod
    @always_inline
    def _sum_singly(
        filter: Reads[Self.dtype],
        geometry: DiagonalGeometry,
        storage: DiagonalStorage,
        position: StagePosition,
        channel: UInt32,
        column: UInt32,
        warp: UInt32,
        lane: UInt32,
    ) -> Sums:
        """The same sums, of each channel by itself."""
        var pair = lane % 4 * 2
        var weights = filter.unsafe_offset(Int(channel + pair) * Self.all_taps)
        var pixel = (column + lane // 4) * UInt32(Self.stride)
        var sums = Sums(0)
        for r in range(UInt32(Self.taps)):
            for s in range(UInt32(Self.taps)):
                var at = Self._chunk(pixel + s, warp) + pair * 2
                comptime for i in range(STEP_ROWS):
                    var row = Self._row_address(
                        geometry,
                        storage,
                        position,
                        r + UInt32(i * Self.stride),
                    )
                    var values = load_shared[Self.dtype, 2](row + at)
                    comptime for e in range(2):
                        var tap = Int(r) * Self.taps + Int(s)
                        var weight = weights[
                            unsafe_offset=tap + e * Self.all_taps
                        ]
                        sums[2 * i + e] = (
                            values[e]
                            .cast[DType.float32]()
                            .fma(weight.cast[DType.float32](), sums[2 * i + e])
                        )
        return sums

    @staticmethod
    @always_inline
    def _store_step(
        ref output: TensorMap,
        target: Self.Output,
        geometry: DiagonalGeometry,
        storage: DiagonalStorage,
        buffer: UInt32,
        index: UInt32,
    ):
        """Stores a step's outputs once every warp has written its own."""
        var from_ = storage.buffers + buffer * geometry.buffer_bytes()
        comptime if Self.stores_tiles:
            publish_to_engine()
        sync_threads[CONSUMER_THREADS](CONSUMER_NAME)
        comptime if Self.stores_tiles:
            if thread_idx.x == 0:
                store_tile[5](output, from_, Self._corner(geometry.step(index)))
                commit_stores()
        else:
            Self._store_fused(target, geometry, from_, geometry.step(index))

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
        var first, chunk = divmod(UInt32(thread_idx.x), UInt32(CONSUMERS))
        var channel = step.channel + chunk * MATRIX
        if channel >= geometry.channels:
            return
        var columns = min(geometry.columns, geometry.out_columns - step.column)
        var rows = min(UInt32(STEP_ROWS), geometry.out_rows - step.row)
        var plane = Int(step.image) * Int(geometry.planes.value) + Int(
            step.plane
        )
        for row in range(rows):
            var p = step.row + row
            var line = plane * Int(geometry.out_rows) + Int(p)
            for column in range(first, columns, UInt32(32)):
                var q = step.column + column
                var pixel = line * Int(geometry.out_columns) + Int(q)
                var values = load_shared[Self.out_type, MATRIX](
                    from_
                    + row * geometry.columns * PIXEL_BYTES
                    + Self._chunk(column, chunk)
                )
                target.store[MATRIX](
                    Int(step.image),
                    IndexList[SPATIAL](Int(step.plane), Int(p), Int(q)),
                    Int(channel),
                    pixel * Int(geometry.channels) + Int(channel),
                    values,
                )
