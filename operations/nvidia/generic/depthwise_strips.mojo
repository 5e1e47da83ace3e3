"""How the GPU's strip kernel, for depthwise filters of the common sizes, cuts a
problem.

A block has some channels, some columns of the output and some of its rows. It
goes down the rows, a few a step. A ring in shared memory holds the input rows
of a step, and those of the next steps while they are loaded. A thread has
`width` channels and `COLUMNS` neighbouring columns, a strip of the block's.
"""

from std.math import ceildiv

from ...conv.device_value import DeviceValue
from ...conv.divisor import Divisor
from ...conv.known import KnownFilter
from ...conv.memory import element_bytes
from ...conv.problem import ConvProblem
from ..pipeline.chunks import CHUNK_BYTES

comptime COLUMNS = 4
"""Neighbouring output pixels of a thread."""

comptime LANES = 16
"""Threads that have the channels of the same pixels."""

comptime MAX_WIDTH = 4
"""Channels of a thread, at most: its sums are registers."""

comptime MAX_LANE_BYTES = CHUNK_BYTES // 2
"""Bytes that a thread reads of a pixel, at most: half of what it copies at a
time."""

comptime MAX_STRIPS = 14
"""Strips of a block at stride 1, at most."""

comptime MAX_THREADS = LANES * MAX_STRIPS
"""Threads of a block, at most."""

comptime MULTIPROCESSOR_REGISTERS = 64 * 1024

comptime MULTIPROCESSOR_BYTES = 227 * 1024
"""Shared memory of a multiprocessor."""

comptime BLOCK_BYTES = 1024
"""Shared memory that the system takes for each block."""

comptime MAX_RESIDENT = 16
"""Blocks of a multiprocessor that the model assumes, at most."""

comptime START_ROWS = 8
"""The time to start and end a block, in input rows."""


@fieldwise_init
struct StripConfig(ImplicitlyCopyable, Movable, Writable):
    """How the strip kernel is built."""

    var width: Int
    """Channels of a thread."""
    var lane_bytes: Int
    """Bytes that a thread reads of a pixel."""
    var taps: Int
    """Of the filter, along h and w."""
    var stride: Int
    """Along h and w."""

    def may_run(self, known: KnownFilter) -> Bool:
        """Whether a filter may be one for this configuration.

        Args:
            known: The facts known when the op is compiled.
        """
        return known.may_have(taps=self.taps, stride=self.stride)

    def pixel_bytes(self) -> Int:
        """Bytes of a pixel in shared memory."""
        return LANES * self.lane_bytes

    def rows(self) -> Int:
        """Output rows of a step."""
        return 2 if self.stride == 1 else 1

    def step_rows(self) -> Int:
        """Input rows from a step to the next."""
        return self.rows() * self.stride

    def window(self) -> Int:
        """Input rows of a step."""
        return (self.rows() - 1) * self.stride + self.taps

    def ahead(self) -> Int:
        """Steps whose input rows are being loaded."""
        return 2

    def ring(self) -> Int:
        """Input rows in shared memory."""
        return self.window() + self.ahead() * self.step_rows()

    def input_columns(self) -> Int:
        """Input pixels of a thread along w."""
        return (COLUMNS - 1) * self.stride + self.taps

    def registers(self) -> Int:
        """Registers of a thread, at most."""
        return 128 if self.stride == 1 else 80

    def resident(self) -> Int:
        """Blocks of a multiprocessor that registers allow, at least."""
        return MULTIPROCESSOR_REGISTERS // (self.registers() * MAX_THREADS)

    def max_strips(self) -> Int:
        """Strips of a block, at most."""
        return MAX_STRIPS // self.stride

    def filter_bytes(self) -> Int:
        """Shared memory of a block's filters, float32."""
        return self.taps * self.taps * LANES * self.width * 4

    def takes(self, problem: ConvProblem) -> Bool:
        """Whether the kernel computes a depthwise problem."""
        return (
            problem.group_filters() == 1
            and problem.channels * self.lane_bytes % (self.width * CHUNK_BYTES)
            == 0
            and problem.filter[0] == 1
            and problem.filter[1] == self.taps
            and problem.filter[2] == self.taps
            and problem.stride[1] == self.stride
            and problem.stride[2] == self.stride
            and problem.dilation[1] == 1
            and problem.dilation[2] == 1
        )

    def write_to(self, mut writer: Some[Writer]):
        """Writes the configuration on one line."""
        writer.write(
            t"depthwise {self.taps}x{self.taps}, stride {self.stride},"
            t" {self.width} channels a thread"
        )


comptime STRIP_CANDIDATES = 5
"""Configurations to choose from."""


def strip_candidate(dtype: DType, index: Int) -> StripConfig:
    """A configuration to choose from.

    Args:
        dtype: Of the activation.
        index: From 0 to `STRIP_CANDIDATES - 1`.
    """
    var bytes = element_bytes(dtype)
    var width = min(MAX_WIDTH, MAX_LANE_BYTES // bytes)
    var lane = width * bytes
    if index == 0:
        return StripConfig(width, lane, 3, 1)
    if index == 1:
        return StripConfig(width, lane, 3, 2)
    if index == 2:
        return StripConfig(width, lane, 5, 1)
    if index == 3:
        return StripConfig(width, lane, 5, 2)
    return StripConfig(width, lane, 7, 1)


def choose_strips(dtype: DType, problem: ConvProblem) -> Int:
    """The candidate that computes a problem, or -1.

    Args:
        dtype: Of the activation.
        problem: The convolution, one channel a group.
    """
    for index in range(STRIP_CANDIDATES):
        if strip_candidate(dtype, index).takes(problem):
            return index
    return -1


@fieldwise_init
struct StripPlan(ImplicitlyCopyable, Movable, Writable):
    """How a problem is cut."""

    var strips: Int
    """Of a block."""
    var groups: Int
    """Blocks along the columns."""
    var slabs: Int
    """Blocks along the channels."""
    var rows: Int
    """Output rows of a block."""
    var segments: Int
    """Blocks along the rows."""
    var blocks: Int
    var staged_columns: Int
    """Pixels of an input row in shared memory."""
    var shared_bytes: Int

    @staticmethod
    def nothing() -> StripPlan:
        """The cut of a problem that strips do not take."""
        return StripPlan(0, 0, 0, 0, 0, 0, 0, 0)

    def __init__(
        out self,
        config: StripConfig,
        problem: ConvProblem,
        multiprocessors: Int,
    ):
        """Cuts a problem so that the last block ends as early as possible.

        Args:
            config: The configuration.
            problem: The convolution, with at least one output.
            multiprocessors: Of the device.
        """
        var all_strips = ceildiv(problem.output[2], COLUMNS)
        self.groups = ceildiv(all_strips, config.max_strips())
        self.strips = ceildiv(all_strips, self.groups)
        self.groups = ceildiv(all_strips, self.strips)
        self.slabs = ceildiv(problem.channels, LANES * config.width)
        self.staged_columns = (
            self.strips * COLUMNS - 1
        ) * config.stride + config.taps
        self.shared_bytes = (
            config.filter_bytes()
            + config.ring() * self.staged_columns * config.pixel_bytes()
        )
        var resident = min(
            MULTIPROCESSOR_BYTES // (self.shared_bytes + BLOCK_BYTES),
            MULTIPROCESSOR_REGISTERS
            // (config.registers() * ceildiv(self.strips * LANES, 32) * 32),
        )
        var slots = multiprocessors * max(1, min(resident, MAX_RESIDENT))
        var columns = (
            problem.batch * problem.output[0] * self.groups * self.slabs
        )
        self.rows = problem.output[1]
        self.segments = 1
        var least = Int.MAX
        for segments in range(1, min(64, problem.output[1]) + 1):
            var rows = ceildiv(problem.output[1], segments)
            rows = ceildiv(rows, config.rows()) * config.rows()
            var blocks = columns * ceildiv(problem.output[1], rows)
            var time = ceildiv(blocks, slots) * (
                rows * config.stride + config.window() + START_ROWS
            )
            if time < least:
                least = time
                self.rows = rows
                self.segments = ceildiv(problem.output[1], rows)
        self.blocks = columns * self.segments

    def threads(self) -> Int:
        """Threads of a block: whole warps."""
        return ceildiv(self.strips * LANES, 32) * 32

    def write_to(self, mut writer: Some[Writer]):
        """Writes the cut on one line."""
        writer.write(
            t"{self.blocks} blocks of {self.rows} rows, {self.strips} strips,"
            t" {self.shared_bytes} bytes of shared memory"
        )


@fieldwise_init
struct StripGeometry(
    DeviceValue, ImplicitlyCopyable, Movable, TrivialRegisterPassable
):
    """A problem as the strip kernel sees it."""

    var channels: UInt32
    var depth: Int32
    var height: Int32
    var width: Int32
    var step_d: Int32
    var start_d: Int32
    var start_h: Int32
    var start_w: Int32
    var out_planes: Divisor
    var out_rows: UInt32
    var out_columns: UInt32
    var slabs: Divisor
    var groups: Divisor
    var segments: Divisor
    var rows: UInt32
    """Output rows of a block."""
    var strips: UInt32
    var staged_columns: Divisor

    @staticmethod
    def of(problem: ConvProblem, plan: StripPlan) -> StripGeometry:
        """Builds the geometry from a problem and its cut."""
        return StripGeometry(
            channels=UInt32(problem.channels),
            depth=Int32(problem.input[0]),
            height=Int32(problem.input[1]),
            width=Int32(problem.input[2]),
            step_d=Int32(problem.stride[0]),
            start_d=Int32(-problem.pad_before[0]),
            start_h=Int32(-problem.pad_before[1]),
            start_w=Int32(-problem.pad_before[2]),
            out_planes=Divisor(problem.output[0]),
            out_rows=UInt32(problem.output[1]),
            out_columns=UInt32(problem.output[2]),
            slabs=Divisor(plan.slabs),
            groups=Divisor(plan.groups),
            segments=Divisor(plan.segments),
            rows=UInt32(plan.rows),
            strips=UInt32(plan.strips),
            staged_columns=Divisor(plan.staged_columns),
        )
