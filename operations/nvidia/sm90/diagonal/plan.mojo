"""Depthwise filters, and groups of few channels, on Hopper's tensor cores:
which of them the diagonal kernel takes, and how it cuts a problem.

A tap of 8 channels is a diagonal matrix, or one with blocks on its diagonal
where groups have several channels. It adds to the sums the product of that
matrix and of the pixels at the tap. Where groups have more than 8 channels, a
tap has several such matrices. A warp has 8 channels of the output, a block has
`SLAB`, or a few more. A step is `STEP_ROWS` rows of some columns of the output, of several
images where these are narrow. A warp computes a step set by set. A set is 8
pixels of both rows and 8 more: the neighbours to the right, or the same pixels
of the next image.

A block takes steps one after the other, down an image and then down the next,
and stores the outputs of several steps together. TMA loads input rows into a
ring of shared memory, with zeros outside the image, and stores the outputs.
Blocks of the same pixels and neighbouring slabs run at the same time where that
costs nothing, because slabs are neighbours in memory.
"""

from std.bit import log2_floor
from std.collections import Optional
from std.math import ceildiv
from std.utils import IndexList

from ....conv.fields import DIAGONAL_CHANNELS, DIAGONAL_TAPS
from ....conv.known import UNKNOWN, KnownFilter
from ....conv.problem import SPATIAL, ConvProblem
from ...pipeline.chunks import CHUNK_BYTES
from ...limits import MAX_BOX, MAX_INDEX, MAX_SHARED_BYTES, PATTERN_BYTES, WARP

comptime SLAB = 64
"""Channels of a block, unless it is a wide one."""

comptime PIXEL_BYTES = 128
"""Bytes of a pixel in shared memory: one row of the swizzle. A pixel of a wide
slab has as many as its channels, an odd number of chunks: neighbouring pixels
are in different banks as they are."""

comptime WIDE_WARPS = 9
"""Warps of a wide slab, which compute 8 channels each as others do."""

comptime NARROW_REST = 2
"""Warps' channels that a last slab has, at most, where wide slabs are fewer: it
would take nearly the time of a whole one."""

comptime MOST_WIDE_CHUNKS = 2 * WIDE_WARPS
"""Of all channels, at most, where slabs are wide: more slabs take longer so."""

comptime WIDE_ALIGNMENT = 128
"""Bytes of which the addresses of boxes without a swizzle are multiples."""

comptime MATRIX = 8
"""Pixels and channels of the matrices that the multiply is made of."""

comptime MATRIX_LOG = 3
"""The logarithm of `MATRIX`, to base 2."""

comptime STEP_ROWS = 2
"""Output rows of a step."""

comptime STAGE_ROWS = 2
"""Input rows of a stage of the ring: those of a load from it."""

comptime MAX_IMAGES = 8
"""Images of a step, at most."""

comptime STEP_SETS = 3
"""The overhead of a step, in the time of sets."""

comptime WARPS = SLAB // MATRIX
"""Of a block: one for 8 channels each."""

comptime WARPS_LOG = 3
"""The logarithm of `WARPS`, to base 2."""

comptime THREADS = WARP * WARPS
"""Threads of a block that compute, unless its slab is wide."""

comptime BUFFERS = 3
"""Batches of outputs in shared memory: one is written, while the others are
stored or their residuals loaded."""

comptime BUFFER_BYTES = 16 * 1024
"""Bytes of a batch of several steps, at most."""

comptime MAX_STAGES = 24
"""Stages of the ring, at most."""

comptime BARRIERS_BYTES = 256
"""Shared memory of the barriers, before the ring."""

comptime BLOCK_BYTES = 1024
"""Shared memory that the system takes for each block."""


@fieldwise_init
struct DiagonalConfig(ImplicitlyCopyable, Movable, Writable):
    """How the diagonal kernel is built."""

    var taps: Int
    """Of the filter, along h and w."""
    var stride: Int
    """Along h and w."""
    var group_chunks: Int
    """Chunks of 8 input channels that are multiplied for 8 output channels: one
    for groups of up to 8 channels, otherwise a group's."""

    def window(self) -> Int:
        """Input rows of a step."""
        return (STEP_ROWS - 1) * self.stride + self.taps

    def window_stages(self) -> Int:
        """Stages that hold the input rows of a step."""
        return ceildiv(self.window(), STAGE_ROWS)

    def step_stages(self) -> Int:
        """Stages from a step to the next."""
        return STEP_ROWS * self.stride // STAGE_ROWS

    def stages(self, batch: Int) -> Int:
        """Stages of the ring, at least: those of a batch of steps and of the
        next, of which some are being loaded.

        Args:
            batch: Steps.
        """
        return self.window_stages() + max(
            2, (2 * batch - 1) * self.step_stages()
        )

    def together(self) -> Int:
        """Sets that a warp computes at the same time where nothing is fused:
        several where a multiprocessor has too few warps to hide latency."""
        return 2 if self.resident() == 1 else 1

    def resident(self) -> Int:
        """Blocks of a multiprocessor, at least: as many as registers allow.
        Shared memory is divided among them."""
        return 1 if self.taps == 7 else 2

    def copies_apart(self) -> Bool:
        """Whether one more warp copies: where its registers are free. Otherwise
        three threads of the computing warps copy."""
        return self.taps == 3 and self.group_chunks < 4

    def takes_turns(self) -> Bool:
        """Whether a multiply's 8 pixels may be 4 of one image and 4 of the next,
        which lies an odd number of pixels behind it: neighbours at stride 2 are
        two pixels apart, and with 8 of them half of the banks would be read
        twice. So it is where shared memory, and not the device's, is the limit:
        a group's pixels are read for every 8 of its filters."""
        return self.stride == 2 and self.group_chunks > 1

    def takes_wide_slabs(self) -> Bool:
        """Whether a slab may be wide: where one more warp's registers are
        free, too, and no load looks for channels beside the warp's own."""
        return self.copies_apart() and self.group_chunks == 1

    def slab_warps(self, channels: Int) -> Int:
        """Warps of a slab that compute: `WIDE_WARPS` instead of a slab of few
        channels more.

        Args:
            channels: Of the problem.
        """
        var chunks = ceildiv(channels, MATRIX)
        var rest = chunks % WARPS
        if (
            self.takes_wide_slabs()
            and rest > 0
            and rest <= NARROW_REST
            and chunks <= MOST_WIDE_CHUNKS
            and ceildiv(chunks, WIDE_WARPS) < ceildiv(chunks, WARPS)
        ):
            return WIDE_WARPS
        return WARPS

    def threads(self, slab_warps: Int) -> Int:
        """Threads of a block.

        Args:
            slab_warps: Warps that compute.
        """
        return WARP * (slab_warps + Int(self.copies_apart()))

    def max_threads(self) -> Int:
        """Threads of a block, at most."""
        return self.threads(WIDE_WARPS if self.takes_wide_slabs() else WARPS)

    def staged_columns(self, columns: Int) -> Int:
        """Input pixels of a staged row.

        Args:
            columns: Of the output.
        """
        return (columns - 1) * self.stride + self.taps

    def refusal(self, problem: ConvProblem) -> Optional[String]:
        """Why the kernel of this configuration cannot take a problem.

        Args:
            problem: The convolution, valid (`ConvProblem.validate`).

        Returns:
            The reason, or None if the kernel can.
        """
        if not self.takes_groups(problem):
            var allowed = String("1, 2, 4 or 8")
            if self.group_chunks > 1:
                allowed = String(self.group_chunks * MATRIX)
            return String(
                t"{self} takes groups of {allowed} channels and as many"
                t" filters; here {problem.group_channels()} and"
                t" {problem.group_filters()}"
            )
        if problem.channels % MATRIX != 0:
            return String(
                t"diagonal takes channels in multiples of {MATRIX}; here"
                t" {problem.channels}"
            )
        var filter = IndexList[SPATIAL](1, self.taps, self.taps)
        if problem.filter != filter:
            return String(
                t"diagonal takes filter {filter}; here {problem.filter}"
            )
        if problem.stride[1] != self.stride or problem.stride[2] != self.stride:
            return String(
                t"diagonal takes stride {self.stride} along h and w; here"
                t" {problem.stride}"
            )
        if problem.dilation[1] != 1 or problem.dilation[2] != 1:
            return String(
                t"diagonal takes dilation 1 along h and w; here"
                t" {problem.dilation}"
            )
        for axis in range(SPATIAL):
            var most = max(problem.padded(axis), 1)
            if problem.input[axis] < 1 or most >= MAX_INDEX:
                return String(
                    t"diagonal takes 1 to {MAX_INDEX - 1} padded input pixels"
                    t" along an axis; here input {problem.input}"
                )
        var steps = (
            problem.batch
            * problem.output[0]
            * problem.output[1]
            * problem.output[2]
            * ceildiv(problem.channels, SLAB)
        )
        if steps >= MAX_INDEX:
            return String(t"diagonal counts pixels with 31 bits; here {steps}")
        return None

    def takes_groups(self, problem: ConvProblem) -> Bool:
        """Whether the kernel of this configuration takes a problem's groups."""
        var width = problem.group_channels()
        return width == problem.group_filters() and self.takes_width(width)

    def takes_width(self, width: Int) -> Bool:
        """Whether the kernel of this configuration takes groups of so many
        channels.

        Args:
            width: How many.
        """
        if self.group_chunks > 1:
            return width == self.group_chunks * MATRIX
        return width == 1 or width == 2 or width == 4 or width == MATRIX

    def may_run(self, known: KnownFilter) -> Bool:
        """Whether a filter may be one for this configuration.

        Args:
            known: The facts known when the op is compiled.
        """
        var width = known.group_channels
        return known.may_have(taps=self.taps, stride=self.stride) and (
            width <= UNKNOWN or self.takes_width(width)
        )

    def write_to(self, mut writer: Some[Writer]):
        """Writes the configuration on one line."""
        writer.write(t"diagonal {self.taps}x{self.taps}, stride {self.stride}")
        if self.group_chunks > 1:
            writer.write(t", groups of {self.group_chunks * MATRIX} channels")


comptime NARROW_CANDIDATES = 2 * len(DIAGONAL_TAPS)
"""Configurations for groups of up to 8 channels."""

comptime DIAGONAL_CANDIDATES = NARROW_CANDIDATES + 2 * log2_floor(
    DIAGONAL_CHANNELS // MATRIX
)
"""Configurations to choose from: after the narrow ones, those of the smallest
filter for wider groups, each twice as wide as the one before."""


def diagonal_candidate(index: Int) -> DiagonalConfig:
    """A configuration to choose from.

    Args:
        index: From 0 to `DIAGONAL_CANDIDATES - 1`.
    """
    var stride = 1 + index % 2
    if index >= NARROW_CANDIDATES:
        var wide = (index - NARROW_CANDIDATES) // 2
        return DiagonalConfig(
            materialize[DIAGONAL_TAPS]()[0], stride, 2 << wide
        )
    return DiagonalConfig(materialize[DIAGONAL_TAPS]()[index // 2], stride, 1)


def choose_diagonal(problem: ConvProblem) -> Int:
    """The candidate that computes a problem, or -1."""
    # Formatting a refusal takes time: only one configuration is asked.
    var known = KnownFilter.of(problem)
    comptime for index in range(DIAGONAL_CANDIDATES):
        comptime config = diagonal_candidate(index)
        if config.may_run(known) and config.takes_groups(problem):
            return -1 if config.refusal(problem) else index
    return -1


def diagonal_refusal(problem: ConvProblem) -> Optional[String]:
    """Why no candidate computes a problem, or None."""
    var known = KnownFilter.of(problem)
    comptime for index in range(DIAGONAL_CANDIDATES):
        comptime config = diagonal_candidate(index)
        if config.may_run(known) and config.takes_groups(problem):
            return config.refusal(problem)
    return String(
        t"diagonal takes groups of 1, 2, 4, 8, 16 or 32 channels and as many"
        t" filters, of 3, 5 or 7 taps along w (3 from 16 channels on) and"
        t" stride 1 or 2; here {problem.group_channels()} and"
        t" {problem.group_filters()}, {problem.filter[2]} taps, stride"
        t" {problem.stride[2]}"
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
    """Slabs of neighbouring blocks: all, or one where a block goes on from slab
    to slab."""
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
        var share = self.blocks // self.slabs
        var most_steps = ceildiv(self.steps, self.blocks)
        if share > 0 and ceildiv(self.slab_steps(), share) <= most_steps:
            self.together = self.slabs
            self.blocks = share * self.slabs
        self.batch = min(self.batch, most_steps)
        self.stages = min(self.stages, most_steps * config.window_stages())

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
