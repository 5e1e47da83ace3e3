"""A block of the diagonal kernel: its shared memory, and what of its steps a
thread computes."""

from max.gpu.memory import external_memory

from ..conv.epilogue import Epilogue
from ..pipeline.barrier import BARRIER_BYTES, Barrier, publish_barriers
from ..tma.copy import SharedAddress
from .config import PATTERN_BYTES
from .diagonal_mma import Sums
from .diagonal_plan import (
    BARRIERS_BYTES,
    BUFFERS,
    MATRIX,
    MAX_STAGES,
    PIXEL_BYTES,
    SLAB,
    STAGE_ROWS,
    WARPS,
    WARPS_LOG,
    DiagonalConfig,
    DiagonalGeometry,
    DiagonalStep,
)

comptime CHUNK_BYTES = 16
"""Bytes of 8 channels: what the swizzle moves."""


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
