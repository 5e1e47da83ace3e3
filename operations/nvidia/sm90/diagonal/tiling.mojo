"""How the diagonal kernel cuts a problem into steps, and steps among blocks."""

from std.math import ceildiv

from ....conv.problem import ConvProblem
from ...limits import MAX_BOX, MAX_SHARED_BYTES, PATTERN_BYTES
from ...pipeline.chunks import CHUNK_BYTES
from .plan import (
    BARRIERS_BYTES,
    BLOCK_BYTES,
    BUFFERS,
    BUFFER_BYTES,
    MATRIX,
    MAX_IMAGES,
    MAX_STAGES,
    PIXEL_BYTES,
    STAGE_ROWS,
    STEP_ROWS,
    STEP_SETS,
    STEP_WARPS,
    WARPS,
    WIDE_ALIGNMENT,
    DiagonalConfig,
)


@fieldwise_init
struct DiagonalTiling(ImplicitlyCopyable, Movable, Writable):
    """How a problem is cut."""

    var columns: Int
    """Output columns of a step."""
    var groups: Int
    """Steps along the columns."""
    var images: Int
    """Of a step."""
    var takes_turns: Bool
    """Whether a multiply has pixels of two images (`DiagonalConfig`)."""
    var slab_warps: Int
    """Warps that compute, 8 channels of a slab each."""
    var slabs: Int
    var together: Int
    """Slabs of neighbouring blocks: all, all but the last, or one where a block
    goes on from slab to slab."""
    var row_steps: Int
    """Steps down an image."""
    var steps: Int
    """Of the problem."""
    var batch: Int
    """Steps whose outputs are stored together, at most."""
    var staged_columns: Int
    """Input pixels of a staged row."""
    var stages: Int
    """Of the ring."""
    var resident: Int
    """Blocks of a multiprocessor."""
    var blocks: Int
    var last_blocks: Int
    """Those of the last slab alone, the last ones; 0 where it shares blocks
    with the others, or has as many as each of them."""

    def __init__(
        out self,
        config: DiagonalConfig,
        problem: ConvProblem,
        multiprocessors: Int,
    ):
        """Cuts a problem. Steps are the widest that leave a multiprocessor
        shared memory for two blocks, or narrower where each block has one all
        the same; they have as many images as save time. The ring has as many
        stages as cost no block, and none that a block does not fill.

        Args:
            config: A configuration that does not refuse the problem.
            problem: The convolution, with at least one output.
            multiprocessors: Of the device.
        """
        var width = problem.output[2]
        self.slab_warps = config.slab_warps(problem.channels)
        self.slabs = ceildiv(problem.channels, self.slab_warps * MATRIX)
        self.row_steps = ceildiv(problem.output[1], STEP_ROWS)
        self.groups = 0
        self.columns = 0
        self.takes_turns = config.takes_turns() and problem.batch > 1
        self.images = 2 if self.takes_turns else 1
        self.together = 1
        self.batch = 1
        self.staged_columns = 0
        self.stages = 0
        self.steps = 0
        self.resident = 1
        self.blocks = 0
        self.last_blocks = 0
        var fits = False
        while not fits:
            self.groups += 1
            self.columns = ceildiv(ceildiv(width, self.groups), MATRIX) * MATRIX
            self.staged_columns = config.staged_columns(self.columns)
            self.stages = config.stages(self.batch)
            fits = self.columns == MATRIX or (
                self.staged_columns <= MAX_BOX
                and self._resident() >= config.resident()
            )
        self.groups = ceildiv(width, self.columns)
        self.resident = min(config.resident(), self._resident())
        self._take_images(problem, multiprocessors)
        self._narrow(config, problem, multiprocessors)
        # Larger batches, then more stages, as long as they cost no block.
        var most = min(self.row_steps, BUFFER_BYTES // self.step_bytes())
        while self.batch < most and config.stages(self.batch + 1) < MAX_STAGES:
            self.batch += 1
            self.stages = config.stages(self.batch)
            if self._resident() < self.resident:
                self.batch -= 1
                self.stages = config.stages(self.batch)
                break
        most = self.stages + 2 * self.batch * config.step_stages()
        while self.stages < min(most, MAX_STAGES):
            self.stages += 1
            if self._resident() < self.resident:
                self.stages -= 1
                break
        self.steps = self._steps(problem)
        self.blocks = min(self.steps, multiprocessors * self.resident)
        var most_steps = self._share_blocks(problem)
        self.batch = min(self.batch, most_steps)
        self.stages = min(self.stages, most_steps * config.window_stages())

    def _share_blocks(mut self, problem: ConvProblem) -> Int:
        """Divides the blocks among the slabs: all together, if that takes no
        longer than one after the other, and fewer for a last slab of few
        channels, whose steps take less time.

        Returns:
            Steps of a block, at most.
        """
        var blocks = self.blocks
        var most_steps = ceildiv(self.steps, blocks)
        var share = blocks // self.slabs
        if share > 0 and ceildiv(self.slab_steps(), share) <= most_steps:
            self.together = self.slabs
            self.blocks = share * self.slabs
        var warps = ceildiv(problem.channels, MATRIX)
        var last_warps = warps - (self.slabs - 1) * self.slab_warps
        var whole = STEP_WARPS + self.slab_warps
        var least = most_steps * whole
        var may_differ = self.slabs > 1 and last_warps < self.slab_warps
        for last in range(1, share + 1 if may_differ else 0):
            var others = (blocks - last) // (self.slabs - 1)
            var steps = ceildiv(self.slab_steps(), others)
            var last_steps = ceildiv(self.slab_steps(), last)
            var time = max(
                steps * whole, last_steps * (STEP_WARPS + last_warps)
            )
            # What hardly saves time leaves the slabs side by side.
            if time * 8 <= min(least * 8, most_steps * whole * 7):
                least = time
                self.together = self.slabs - 1
                self.last_blocks = last
                self.blocks = others * self.together + last
        if self.last_blocks > 0:
            return ceildiv(self.slab_steps(), self.last_blocks)
        return most_steps

    def _take_images(mut self, problem: ConvProblem, multiprocessors: Int):
        """Finds how many images a step has: several only where an image is at
        most a set wide."""
        if self.columns > 2 * MATRIX or self.groups > 1 or self.takes_turns:
            return
        var best = self.images
        var least = self._time(problem, multiprocessors)
        while 2 * self.images <= MAX_IMAGES:
            self.images *= 2
            var time = self._time(problem, multiprocessors)
            if (
                self._resident() < self.resident
                or self.step_bytes() > BUFFER_BYTES
            ):
                break
            if time < least:
                least = time
                best = self.images
        self.images = best

    def _narrow(
        mut self,
        config: DiagonalConfig,
        problem: ConvProblem,
        multiprocessors: Int,
    ):
        """Makes steps narrower where there are no more of them than blocks at a
        time. A block then ends sooner, whose warps compute one set after the
        other."""
        if self.images > 1:
            return
        var width = problem.output[2]
        var rows = self._steps(problem) // self.groups
        for sets in range(1, self.sets()):
            var groups = ceildiv(width, sets * 2 * MATRIX)
            if groups * rows <= multiprocessors * self.resident:
                self.columns = ceildiv(ceildiv(width, groups), MATRIX) * MATRIX
                self.groups = ceildiv(width, self.columns)
                self.staged_columns = config.staged_columns(self.columns)
                return

    def _time(self, problem: ConvProblem, multiprocessors: Int) -> Int:
        """The time of a block, in the time of sets."""
        var steps = self._steps(problem)
        var rounds = ceildiv(steps, multiprocessors * self.resident)
        return rounds * (STEP_SETS + self.sets())

    def _steps(self, problem: ConvProblem) -> Int:
        """Steps of a problem."""
        return (
            ceildiv(problem.batch, self.images)
            * problem.output[0]
            * self.groups
            * self.slabs
            * self.row_steps
        )

    def _resident(self) -> Int:
        """Blocks of a multiprocessor that shared memory allows."""
        comptime available = MAX_SHARED_BYTES + BLOCK_BYTES
        return available // (self.shared_bytes() + BLOCK_BYTES)

    def slab_steps(self) -> Int:
        """Steps of a slab."""
        return self.steps // self.slabs

    def sets(self) -> Int:
        """Sets of a step."""
        return ceildiv(self.images * self.columns, 2 * MATRIX)

    def is_wide(self) -> Bool:
        """Whether slabs are wide."""
        return self.slab_warps > WARPS

    def pixel_bytes(self) -> Int:
        """Bytes of a pixel in shared memory."""
        return self.slab_warps * CHUNK_BYTES if self.is_wide() else PIXEL_BYTES

    def alignment(self) -> Int:
        """Bytes of which the ring's addresses, and a stage's, are multiples:
        whole patterns of the swizzle."""
        return WIDE_ALIGNMENT if self.is_wide() else PATTERN_BYTES

    def ring_offset(self) -> Int:
        """Shared memory before the ring."""
        return ceildiv(BARRIERS_BYTES, self.alignment()) * self.alignment()

    def load_bytes(self) -> Int:
        """Bytes that a load brings: of one image."""
        return STAGE_ROWS * self.staged_columns * self.pixel_bytes()

    def image_bytes(self) -> Int:
        """Bytes of an image in a stage: whole patterns of the swizzle, and a
        pixel where two images take turns."""
        return ceildiv(
            self.load_bytes(), self.alignment()
        ) * self.alignment() + PIXEL_BYTES * Int(self.takes_turns)

    def stage_bytes(self) -> Int:
        """Bytes of a stage: whole patterns."""
        return (
            ceildiv(self.images * self.image_bytes(), self.alignment())
            * self.alignment()
        )

    def image_output_bytes(self) -> Int:
        """Bytes of an image's outputs of a step."""
        return STEP_ROWS * self.columns * self.pixel_bytes()

    def step_bytes(self) -> Int:
        """Bytes of a step's outputs."""
        return self.images * self.image_output_bytes()

    def shared_bytes(self) -> Int:
        """Shared memory of a block."""
        return (
            self.ring_offset()
            + self.stages * self.stage_bytes()
            + BUFFERS * self.batch * self.step_bytes()
        )

    def write_to(self, mut writer: Some[Writer]):
        """Writes the cut on one line."""
        writer.write(
            t"{self.steps} steps of {self.columns} columns and"
            t" {self.slab_warps * MATRIX} channels, images a step"
            t" {self.images}, {self.batch} steps a batch, {self.blocks} blocks"
            t" of {self.stages} stages, {self.shared_bytes()} bytes of shared"
            t" memory"
        )
        if self.last_blocks > 0:
            writer.write(
                t", {self.last_blocks} of the blocks for the last slab"
            )
