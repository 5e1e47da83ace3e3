"""A block of the diagonal kernel: its shared memory, and the part of its steps
that a thread computes."""

from max.gpu.memory import external_memory
from std.utils import IndexList, StaticTuple

from ...epilogue.activations import DeviceActivation
from ....conv.epilogue import Epilogue
from ....conv.fields import ACTIVATION_SILU
from ...pipeline.barrier import BARRIER_BYTES, Barrier, publish_barriers
from ...pipeline.chunks import CHUNK_BYTES
from ...tma.copy import SharedAddress, load_tile
from ...tma.descriptor import TensorMap
from ...limits import PATTERN_BYTES
from .geometry import (
    DiagonalSchedule,
    DiagonalGeometry,
    DiagonalStep,
)
from .mma import Sums, keep_rolled, unknown_sum
from .plan import (
    BUFFERS,
    MATRIX,
    MAX_STAGES,
    PIXEL_BYTES,
    SLAB,
    STAGE_ROWS,
    WARPS,
    WARPS_LOG,
    DiagonalConfig,
)

comptime INIT_STAGES = 8
"""Stages whose barriers are initialized together, whether the ring has them
all or not."""


@fieldwise_init
struct StagePosition(TrivialRegisterPassable):
    """A stage of the ring, and the parity of the round that it is in."""

    var stage: UInt32
    var parity: UInt32

    @always_inline
    def after(self, count: UInt32, stages: UInt32) -> StagePosition:
        """The position after some more stages.

        Args:
            count: How many, up to `stages`.
            stages: Of the ring.
        """
        var stage = self.stage + count
        if stage >= stages:
            return StagePosition(stage - stages, self.parity ^ 1)
        return StagePosition(stage, self.parity)


struct LoadCursor(TrivialRegisterPassable):
    """The next stage to load, and the rows of the activation that go there."""

    var stage: UInt32
    var index: UInt32
    """The first step of the next run."""
    var left: UInt32
    """Stages of this run that are not loaded yet."""
    var channel: UInt32
    var w: Int32
    var h: Int32
    var d: Int32
    var image: UInt32

    @always_inline
    def __init__(out self, schedule: DiagonalSchedule):
        """Starts before a block's first run.

        Args:
            schedule: The block's.
        """
        self.stage = 0
        self.index = schedule.first
        self.left = 0
        self.channel = 0
        self.w = 0
        self.h = 0
        self.d = 0
        self.image = 0

    @always_inline
    def load(
        mut self,
        config: DiagonalConfig,
        ref activation: TensorMap,
        geometry: DiagonalGeometry,
        storage: DiagonalStorage,
        schedule: DiagonalSchedule,
        count: UInt32,
    ):
        """Starts loading released stages, if there are steps left. One thread
        calls it.

        Args:
            config: The configuration.
            activation: The activation's descriptor.
            geometry: The problem.
            storage: The block's.
            schedule: The block's.
            count: Stages.
        """
        for _ in range(count):
            keep_rolled()
            if self.left == 0:
                if self.index >= schedule.end:
                    return
                self.begin(config, geometry, schedule)
            var barrier = storage.full(self.stage)
            barrier.arrive_expecting(Int(geometry.images * geometry.load_bytes))
            var to = storage.ring + self.stage * geometry.stage_bytes
            for i in range(geometry.images):
                keep_rolled()
                load_tile[5](
                    to,
                    activation,
                    barrier.address,
                    IndexList[5](
                        Int(self.channel),
                        Int(self.w),
                        Int(self.h),
                        Int(self.d),
                        Int(self.image + i),
                    ),
                )
                to += geometry.image_bytes
            self.h += Int32(-STAGE_ROWS if schedule.up else STAGE_ROWS)
            self.left -= 1
            self.stage += 1
            if self.stage == geometry.stages:
                self.stage = 0

    @always_inline
    def begin(
        mut self,
        config: DiagonalConfig,
        geometry: DiagonalGeometry,
        schedule: DiagonalSchedule,
    ):
        """Begins the next run, if `load` shall not: it finds the place, and
        touches no memory.

        Args:
            config: The configuration.
            geometry: The problem.
            schedule: The block's, with a run left.
        """
        # Opaque: otherwise `load` would compute it for every stage, in vain.
        var step = schedule.step(geometry, unknown_sum(self.index, 0))
        var run = min(step.run, schedule.end - self.index)
        self.index += run
        self.left = (run - 1) * UInt32(config.step_stages()) + UInt32(
            config.window_stages()
        )
        self.channel = step.channel
        self.w = Int32(step.column) * Int32(config.stride) + geometry.start_w
        self.h = Int32(step.row) * Int32(config.stride) + geometry.start_h
        if schedule.up:
            self.h += Int32((config.window_stages() - 1) * STAGE_ROWS)
        self.d = Int32(step.plane) * geometry.step_d + geometry.start_d
        self.image = step.image


@fieldwise_init
struct DiagonalStorage(TrivialRegisterPassable):
    """The layout of a block's shared memory."""

    var barriers: SharedAddress
    var ring: SharedAddress
    var buffers: SharedAddress

    @always_inline
    def __init__(out self, geometry: DiagonalGeometry):
        """The block's dynamic shared memory."""
        var base = external_memory[
            UInt8, address_space=AddressSpace.SHARED, alignment=PATTERN_BYTES
        ]()
        self.barriers = SharedAddress(Int(base))
        self.ring = self.barriers + geometry.ring_offset
        self.buffers = self.ring + geometry.stages * geometry.stage_bytes

    @always_inline
    def full(self, stage: UInt32) -> Barrier:
        """Completes when a stage has its rows.

        Args:
            stage: The stage.
        """
        return Barrier(self.barriers + stage * BARRIER_BYTES)

    @always_inline
    def ready(self, buffer: UInt32) -> Barrier:
        """Completes when a buffer may be written and holds its residual, if
        there is one.

        Args:
            buffer: The buffer.
        """
        return Barrier(
            self.barriers + (buffer + UInt32(MAX_STAGES)) * BARRIER_BYTES
        )

    @always_inline
    def written(self, buffer: UInt32) -> Barrier:
        """Completes when every warp has written a buffer, and read the stages
        for it.

        Args:
            buffer: The buffer.
        """
        return Barrier(
            self.barriers
            + (buffer + UInt32(MAX_STAGES + BUFFERS)) * BARRIER_BYTES
        )

    @always_inline
    def buffer(
        self, geometry: DiagonalGeometry, index: UInt32
    ) -> SharedAddress:
        """The address of a batch's outputs.

        Args:
            geometry: The problem.
            index: The buffer.
        """
        return self.buffers + index * geometry.batch_bytes

    @always_inline
    def init(self, geometry: DiagonalGeometry):
        """Initializes the barriers. One thread calls it.

        Args:
            geometry: The problem.
        """
        # At known addresses: in a loop the assembler fences each.
        comptime for first in range(0, MAX_STAGES, INIT_STAGES):
            if UInt32(first) < geometry.stages:
                comptime for i in range(INIT_STAGES):
                    self.full(UInt32(first + i)).init(1)
        comptime for buffer in range(BUFFERS):
            self.ready(UInt32(buffer)).init(1)
            self.written(UInt32(buffer)).init(Int(geometry.slab_warps.value))
        publish_barriers()


struct DiagonalWorker[config: DiagonalConfig](TrivialRegisterPassable):
    """The part of a slab's steps that a thread computes."""

    comptime load_rows = 1 if Self.config.group_chunks == 1 else STAGE_ROWS
    """Loads for a stage and a column of taps."""

    var active: Bool
    """Whether the warp has channels."""
    var slab: UInt32
    """The first channel of the slab."""
    var group: UInt32
    """Which 8 channels of the slab."""
    var offsets: StaticTuple[UInt32, Self.load_rows * Self.config.taps]
    """Offset in a stage of the matrix row whose address the thread passes, in
    the first half of the first set: for each load and each column of taps."""
    var output: UInt32
    """Offset in a step's outputs of the matrix row whose address the thread
    passes, in the first half of the first set."""
    var half: UInt32
    """Bytes from there if the thread passes addresses of a set's other half."""
    var first_set: UInt32
    var set_step: UInt32
    """Sets from one of the thread's to its next: where a slab has few channels,
    several warps share its sets."""
    var sets: UInt32
    """Of the steps."""

    @always_inline
    def __init__(
        out self,
        geometry: DiagonalGeometry,
        step: DiagonalStep,
        warp: UInt32,
        lane: UInt32,
    ):
        """Divides a slab among the warps.

        Args:
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
        # The last warp of a wide slab takes no part in sharing.
        var shares = shift > 0
        self.group = warp & ((UInt32(WARPS) >> shift) - 1) if shares else warp
        # The last two matrices of a load are pixels of the stage's other row,
        # or, of the same row, the channels beside the warp's own.
        var row = lane % MATRIX
        var pixel = row * UInt32(Self.config.stride)
        var output_pixel = row
        comptime if Self.config.takes_turns():
            if geometry.turn_pixels > 0:
                var image, column = divmod(row, UInt32(MATRIX // 2))
                pixel = image * geometry.turn_pixels + column * UInt32(
                    Self.config.stride
                )
                output_pixel = (
                    image * (geometry.image_output_bytes // PIXEL_BYTES)
                    + column
                )
        var beside = UInt32(0)
        comptime if Self.load_rows == 1:
            pixel += lane // 16 * geometry.staged_columns
        else:
            beside = lane // 16
        self.offsets = type_of(self.offsets)(fill=0)
        comptime for row in range(Self.load_rows):
            comptime for s in range(Self.config.taps):
                self.offsets[
                    row * Self.config.taps + s
                ] = geometry.offset_in_slab(
                    pixel + UInt32(row) * geometry.staged_columns + UInt32(s),
                    self.group ^ beside,
                )
        self.half = lane // 8 % 2 * geometry.half_bytes
        self.first_set = warp >> (UInt32(WARPS_LOG) - shift) if shares else 0
        self.set_step = UInt32(1) << shift
        self.slab = step.channel
        self.active = step.channel + self.group * MATRIX < geometry.channels
        comptime if Self.config.takes_wide_slabs():
            self.active = self.active and not (shares and warp >= UInt32(WARPS))
        self.sets = 0
        self.output = (
            lane // 8 % 2 * geometry.output_row_bytes
            + geometry.offset_in_slab(output_pixel, self.group)
        )

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
        var columns = geometry.out_columns - step.column
        self.sets = min(geometry.sets, (columns - 1) // UInt32(2 * MATRIX) + 1)
        if geometry.images > 1:
            self.sets = geometry.sets
        return min(step.run, most)

    @always_inline
    def channel(self) -> Int:
        """The first channel of the warp. If the warp has none, any channel, so
        that operands are loaded without a branch."""
        return Int(self.slab + self.group * MATRIX) if self.active else 0

    @always_inline
    def offset[tap: Int, row: Int = 0](self) -> UInt32:
        """The offset in a stage of the matrix row whose address the thread
        passes, in the first half of the first set.

        Parameters:
            tap: The column of taps.
            row: Of the stage, where a load has only one.
        """
        return self.offsets[row * Self.config.taps + tap]


struct SetPlace(TrivialRegisterPassable):
    """The offsets of a set, for the addresses that a thread passes."""

    var shift: UInt32
    """In a stage, bytes from the thread's first pixel."""
    var first: SharedAddress
    """The outputs of its first half."""
    var second: SharedAddress
    """Those of its second half. Where there is none, the first half is
    computed twice."""

    @always_inline
    def __init__(
        out self,
        geometry: DiagonalGeometry,
        worker: DiagonalWorker[_],
        outputs: SharedAddress,
        set: UInt32,
    ):
        """Finds a set.

        Args:
            geometry: The problem.
            worker: What the thread computes.
            outputs: The first half of the step's first set.
            set: Which.
        """
        self.shift = set * geometry.set_bytes
        self.first = outputs + set * geometry.set_output_bytes
        self.second = self.first
        if set < geometry.whole_sets:
            self.shift += worker.half
            self.second += geometry.half_output_bytes
            comptime if worker.config.takes_turns():
                # 4 pixels on, the swizzle takes another chunk.
                if geometry.turn_pixels > 0:
                    self.second ^= MATRIX // 2 * CHUNK_BYTES


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
    def __init__(
        out self,
        epilogue: Epilogue[Self.bias_type, Self.out_type],
        worker: DiagonalWorker[_],
        lane: UInt32,
    ):
        """Loads them.

        Args:
            epilogue: The epilogue.
            worker: Whose channels.
            lane: Of the warp.
        """
        var channel = worker.channel() + Int(lane % 4 * 2)
        self.scale = epilogue.scaled[2, 2](1, channel)
        self.bias = epilogue.load_bias[2, 2](channel)

    @always_inline
    def activate(
        self, epilogue: Epilogue[Self.bias_type, Self.out_type], sums: Sums
    ) -> Sums:
        """The steps in front of `Epilogue.add_residual`, SiLU as outputs of 16
        bits need it.

        Args:
            epilogue: The epilogue.
            sums: Two channels of two pixels.
        """
        var biased = sums.fma(
            self.scale.join(self.scale), self.bias.join(self.bias)
        )
        if epilogue.activation.code == ACTIVATION_SILU:
            return DeviceActivation.of(epilogue.activation).evaluate[
                DeviceActivation.SILU, 4, exact=False
            ](biased)
        return epilogue.activation.apply[4](biased)
