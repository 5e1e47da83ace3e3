"""A problem, and its cut into steps, as the diagonal kernel sees them."""

from std.bit import log2_floor

from ....conv.device_value import DeviceValue
from ....conv.divisor import Divisor, SmallDivisor
from ....conv.problem import ConvProblem
from ...pipeline.chunks import CHUNK_BYTES
from ...limits import WARP
from .plan import (
    MATRIX,
    PIXEL_BYTES,
    STEP_ROWS,
    WARPS,
    DiagonalConfig,
    DiagonalTiling,
)


@fieldwise_init
struct DiagonalStep(TrivialRegisterPassable):
    """The position of a step, and how many follow it down its image."""

    var image: UInt32
    """The first image."""
    var plane: UInt32
    var row: UInt32
    """The first output row."""
    var column: UInt32
    """The first output column."""
    var channel: UInt32
    """The first channel of the slab."""
    var run: UInt32
    """Steps of the block's schedule from this one to the image's end."""
    var next: UInt32
    """Output rows from a step of the schedule to the next."""


@fieldwise_init
struct DiagonalSchedule(TrivialRegisterPassable):
    """The steps of a block, and their order: down its images, or up."""

    var first: UInt32
    """The first step, counted along the schedule."""
    var end: UInt32
    """One past the last."""
    var up: Bool
    """Whether up."""

    @always_inline
    def step(self, geometry: DiagonalGeometry, index: UInt32) -> DiagonalStep:
        """The position of a step.

        Args:
            geometry: The problem.
            index: Of the step, counted along the schedule.
        """
        var step = geometry.step(
            self.first + self.end - 1 - index if self.up else index
        )
        if self.up:
            step.run = geometry.row_steps.value - step.run + 1
            step.next = UInt32(0) - STEP_ROWS
        return step


@fieldwise_init
struct DiagonalGeometry(
    DeviceValue, ImplicitlyCopyable, Movable, TrivialRegisterPassable
):
    """A problem as the diagonal kernel sees it."""

    var channels: UInt32
    var slab_warps: SmallDivisor
    """Warps that compute, 8 channels of a slab each."""
    var pixel_bytes: UInt32
    """Of a slab in shared memory."""
    var swizzle: UInt32
    """Bits of a pixel's number that the swizzle XORs to its chunks' numbers."""
    var ring_offset: UInt32
    """Shared memory before the ring."""
    var group_log: UInt32
    """The logarithm of a group's channels, to base 2."""
    var step_d: Int32
    var start_d: Int32
    var start_h: Int32
    var start_w: Int32
    var planes: Divisor
    """Output planes."""
    var groups: Divisor
    var slab_steps: Divisor
    """Steps of a slab: of all images."""
    var row_steps: Divisor
    var batch_images: UInt32
    """Images of the problem."""
    var images: UInt32
    """Of a step."""
    var sets: UInt32
    """Of a step."""
    var whole_sets: UInt32
    """Those whose second half is not the first again."""
    var set_bytes: UInt32
    """From set to set, in a stage."""
    var half_bytes: UInt32
    """From a set's first half to its second, in a stage."""
    var turn_pixels: UInt32
    """From an image to the next in a stage, where a multiply has 4 pixels of
    one and 4 of the other; otherwise 0."""
    var set_output_bytes: UInt32
    """From set to set, in a step's outputs."""
    var half_output_bytes: UInt32
    """From a set's first half to its second, in a step's outputs."""
    var out_rows: UInt32
    var out_columns: UInt32
    var columns: UInt32
    """Output columns of a step."""
    var together: Divisor
    """Slabs that blocks next to each other have, or one."""
    var steps: UInt32
    """Steps of every block, rounded down."""
    var longer: UInt32
    """Blocks (of a slab, if several are together) that have a step more: the
    first ones."""
    var batch: UInt32
    """Steps whose outputs are stored together, at most."""
    var stages: UInt32
    var staged_columns: UInt32
    """Input pixels of a staged row."""
    var load_bytes: UInt32
    var image_bytes: UInt32
    """Bytes of an image in a stage."""
    var stage_bytes: UInt32
    var output_row_bytes: UInt32
    """Bytes of a row of a step's outputs."""
    var image_output_bytes: UInt32
    """Bytes of an image's outputs of a step."""
    var step_bytes: UInt32
    """Bytes of a step's outputs."""
    var batch_bytes: UInt32

    @staticmethod
    def of(
        config: DiagonalConfig, problem: ConvProblem, plan: DiagonalTiling
    ) -> DiagonalGeometry:
        """Builds the geometry from a problem and its cut."""
        # A set is of two images, or of two times 8 columns of one.
        var pairs = plan.images > 1 and plan.columns == MATRIX
        var half_bytes = MATRIX * config.stride * plan.pixel_bytes()
        var half_output_bytes = MATRIX * plan.pixel_bytes()
        var set_bytes = 2 * half_bytes
        var set_output_bytes = 2 * half_output_bytes
        if plan.images > 1:
            set_bytes = plan.image_bytes()
            set_output_bytes = plan.image_output_bytes()
        if pairs:
            half_bytes = set_bytes
            half_output_bytes = set_output_bytes
            set_bytes *= 2
            set_output_bytes *= 2
        var turn_pixels = 0
        if plan.takes_turns:
            # 4 columns of both images, and 4 more.
            half_bytes = MATRIX // 2 * config.stride * PIXEL_BYTES
            half_output_bytes = MATRIX // 2 * PIXEL_BYTES
            set_bytes = 2 * half_bytes
            set_output_bytes = 2 * half_output_bytes
            turn_pixels = plan.image_bytes() // PIXEL_BYTES
        var slab_blocks = plan.blocks // plan.together
        var slab_steps = plan.steps // plan.together
        return DiagonalGeometry(
            channels=UInt32(problem.channels),
            slab_warps=SmallDivisor(plan.slab_warps),
            pixel_bytes=UInt32(plan.pixel_bytes()),
            swizzle=UInt32(0 if plan.is_wide() else WARPS - 1),
            ring_offset=UInt32(plan.ring_offset()),
            group_log=UInt32(log2_floor(problem.group_channels())),
            step_d=Int32(problem.stride[0]),
            start_d=Int32(-problem.pad_before[0]),
            start_h=Int32(-problem.pad_before[1]),
            start_w=Int32(-problem.pad_before[2]),
            planes=Divisor(problem.output[0]),
            groups=Divisor(plan.groups),
            slab_steps=Divisor(plan.slab_steps()),
            row_steps=Divisor(plan.row_steps),
            batch_images=UInt32(problem.batch),
            images=UInt32(plan.images),
            sets=UInt32(plan.sets()),
            whole_sets=UInt32(plan.images * plan.columns // (2 * MATRIX)),
            set_bytes=UInt32(set_bytes),
            half_bytes=UInt32(half_bytes),
            turn_pixels=UInt32(turn_pixels),
            set_output_bytes=UInt32(set_output_bytes),
            half_output_bytes=UInt32(half_output_bytes),
            out_rows=UInt32(problem.output[1]),
            out_columns=UInt32(problem.output[2]),
            columns=UInt32(plan.columns),
            together=Divisor(plan.together),
            steps=UInt32(slab_steps // slab_blocks),
            longer=UInt32(slab_steps % slab_blocks),
            batch=UInt32(plan.batch),
            stages=UInt32(plan.stages),
            staged_columns=UInt32(plan.staged_columns),
            load_bytes=UInt32(plan.load_bytes()),
            image_bytes=UInt32(plan.image_bytes()),
            stage_bytes=UInt32(plan.stage_bytes()),
            output_row_bytes=UInt32(plan.columns * plan.pixel_bytes()),
            image_output_bytes=UInt32(plan.image_output_bytes()),
            step_bytes=UInt32(plan.step_bytes()),
            batch_bytes=UInt32(plan.batch * plan.step_bytes()),
        )

    @always_inline
    def computing_threads(self) -> UInt32:
        """Threads of a block that compute."""
        return self.slab_warps.value * UInt32(WARP)

    @always_inline
    def offset_in_slab(self, pixel: UInt32, chunk: UInt32) -> UInt32:
        """The offset of a pixel's 8 channels in shared memory.

        Args:
            pixel: Of a stage, or of a step's outputs.
            chunk: Which 8 of the slab.
        """
        return (
            pixel * self.pixel_bytes
            + (chunk ^ (pixel & self.swizzle)) * CHUNK_BYTES
        )

    @always_inline
    def schedule[flips: Bool](self, block: UInt32) -> DiagonalSchedule:
        """The steps of a block. Two neighbours both begin, or both end, at
        their common edge: the rows that both need are read from memory once.

        Parameters:
            flips: Whether every other block goes up; otherwise all go down.

        Args:
            block: The block.
        """
        var part, slab = self.together.split(block)
        var first = (
            slab * self.slab_steps.value
            + part * self.steps
            + min(part, self.longer)
        )
        return DiagonalSchedule(
            first,
            first + self.steps + UInt32(part < self.longer),
            flips and part % 2 == 1,
        )

    @always_inline
    def step(self, index: UInt32) -> DiagonalStep:
        """The position of a step."""
        # Slabs change the slowest: their filters stay in registers.
        var slab, within = self.slab_steps.split(index)
        var rest, down = self.row_steps.split(within)
        var across, group = self.groups.split(rest)
        var image, plane = self.planes.split(across)
        return DiagonalStep(
            image * self.images,
            plane,
            down * STEP_ROWS,
            group * self.columns,
            slab * self.slab_warps.value * MATRIX,
            self.row_steps.value - down,
            STEP_ROWS,
        )

    @always_inline
    def output_offset(
        self, image: UInt32, step: DiagonalStep, p: UInt32, q: UInt32
    ) -> Int:
        """Elements before an output pixel.

        Args:
            image: The image.
            step: A step of its plane.
            p: The row.
            q: The column.
        """
        var plane = Int(image) * Int(self.planes.value) + Int(step.plane)
        var line = plane * Int(self.out_rows) + Int(p)
        return (line * Int(self.out_columns) + Int(q)) * Int(self.channels)
