"""How the GPU's general depthwise kernel cuts a problem among threads.

A thread has `width` neighbouring filters, and computes an item at a time:
`COLUMNS` output pixels of one row. Threads of a block that share an item are
its lanes. Blocks take consecutive items, so that the input rows that items
share come from the cache.

The taps of a row of the filter are added in phases. With the output pixels of
an item `spacing` apart, output `q` at tap `phase + a * phases` sees input
`q + a` of the phase's, which are `step` apart: a window that slides over them,
each pixel of which is loaded once for all taps of the phase. With stride `s`
and dilation `d`, whose greatest common divisor is `g`, that is so for outputs
`d / g` apart, inputs `s * d / g` apart and `s / g` phases. Where such outputs
are too few to fill items, they are neighbours, and every tap is a phase.
"""

from std.math import ceildiv, gcd
from std.sys.info import size_of

from ...conv.device_value import DeviceValue
from ...conv.divisor import Divisor
from ...conv.memory import element_bytes
from ...conv.problem import ConvProblem
from ..pipeline.chunks import CHUNK_BYTES

comptime THREADS = 128
"""Threads of a block."""

comptime LANES = 32
"""Lanes of most configurations: a warp reads neighbouring filters of a pixel.
"""

comptime FILTER_BYTES = 48 * 1024
"""Shared memory for a block's filters, at most."""


def exact_taps(dtype: DType) -> Int:
    """Taps whose products float32 adds up exactly: up to a sum of 2 ** 24.

    Args:
        dtype: Of the activation: int8 or uint8, beside filters of int8.
    """
    var largest = 255 if dtype == DType.uint8 else 128
    return (1 << 24) // (largest * 128)


comptime ACCESS_BYTES = CHUNK_BYTES
"""Bytes that a thread reads of a pixel, at most."""

comptime MAX_WIDTH = 8
"""Neighbouring filters of a thread, at most: its sums are registers."""

comptime COLUMNS = 4
"""Output pixels of an item, along w."""

comptime WINDOW_TAPS = 4
"""Taps of a phase that are added from a window in registers."""

comptime WINDOW = COLUMNS + WINDOW_TAPS - 1
"""Input pixels of that window."""

comptime RESIDENT = 4
"""Blocks that a multiprocessor runs at the same time, at least: what the
registers of a thread allow."""


@fieldwise_init
struct DepthwiseConfig(ImplicitlyCopyable, Movable, Writable):
    """How the general depthwise kernel is built."""

    var width: Int
    """Neighbouring filters of a thread."""
    var lanes: Int
    """Threads of a block that share an item, at most."""

    def filter_row(self) -> Int:
        """Elements of shared memory from a tap to the next."""
        return self.lanes * self.width

    def filter_bytes(self, taps: Int) -> Int:
        """Shared memory of a block's filters.

        Args:
            taps: Of the filter.
        """
        return taps * self.filter_row() * size_of[DType.float32]()

    def write_to(self, mut writer: Some[Writer]):
        """Writes the configuration on one line."""
        writer.write(
            t"depthwise of any filter, {self.lanes} lanes of {self.width}"
            t" filters"
        )


comptime DEPTHWISE_CANDIDATES = 4
"""Configurations to choose from, in the order of preference."""


def depthwise_candidate(dtype: DType, index: Int) -> DepthwiseConfig:
    """A configuration to choose from.

    Args:
        dtype: Of the activation.
        index: From 0 to `DEPTHWISE_CANDIDATES - 1`.
    """
    var width = min(MAX_WIDTH, ACCESS_BYTES // element_bytes(dtype))
    if index == 0:
        return DepthwiseConfig(width, LANES)
    if index == 1:
        return DepthwiseConfig(width // 2, LANES)
    if index == 2:
        return DepthwiseConfig(1, LANES)
    return DepthwiseConfig(1, 1)


def choose_depthwise(dtype: DType, problem: ConvProblem) -> Int:
    """The candidate that computes a problem.

    Args:
        dtype: Of the activation.
        problem: The convolution, one channel a group.
    """
    for index in range(DEPTHWISE_CANDIDATES):
        var config = depthwise_candidate(dtype, index)
        var takes = config.width == 1 or (
            problem.group_filters() == 1 and problem.filters % config.width == 0
        )
        if takes and config.filter_bytes(problem.taps()) <= FILTER_BYTES:
            return index
    return DEPTHWISE_CANDIDATES - 1


def lanes_of(config: DepthwiseConfig, problem: ConvProblem) -> Int:
    """Threads of a block that share an item."""
    var vectors = problem.filters // config.width
    return ceildiv(vectors, ceildiv(vectors, config.lanes))


@fieldwise_init
struct DepthwiseGeometry(
    DeviceValue, ImplicitlyCopyable, Movable, TrivialRegisterPassable
):
    """A problem as the depthwise kernel sees it."""

    var channels: UInt32
    var multiplier: Divisor
    """Filters of a channel."""
    var vectors: UInt32
    """Vectors of all filters."""
    var filters: UInt32
    var lanes: Divisor
    var slabs: Divisor
    """Blocks that share items: each has `lanes` of the vectors."""
    var depth: Int32
    var height: Int32
    var width: Int32
    var step_d: Int32
    var step_h: Int32
    var step_w: Int32
    var start_d: Int32
    var start_h: Int32
    var start_w: Int32
    var dilation_d: Int32
    var dilation_h: Int32
    var phases: Int32
    """Of a row of taps."""
    var dilation_w: Int32
    """Input pixels from a phase to the next."""
    var window_step: Int32
    """Input pixels from one of a phase's to the next."""
    var taps_d: Int32
    var taps_h: Int32
    var taps_w: Int32
    var out_planes: Divisor
    var out_rows: Divisor
    var out_columns: UInt32
    var spacing: Divisor
    """Output columns from one of an item's to the next."""
    var filter_taps: Divisor
    """Of a filter."""
    var items_w: Divisor
    """Items of a row."""
    var items: UInt32
    """Items of all images."""
    var block_items: UInt32
    """Items of a block, consecutive ones."""


@fieldwise_init
struct Phases(ImplicitlyCopyable, Movable):
    """How the taps of a row of the filter are added."""

    var spacing: Int
    """Output columns from one of an item's to the next."""
    var step: Int
    """Input pixels from one of a phase's to the next."""
    var count: Int
    """Of a row of taps."""
    var items: Int
    """Of a row of outputs."""

    @staticmethod
    def of(problem: ConvProblem) -> Phases:
        """Those that load less.

        Args:
            problem: The convolution.
        """
        var taps = problem.filter[2]
        var stride = problem.stride[2]
        var common = gcd(stride, problem.dilation[2])
        var spacing = problem.dilation[2] // common
        var sliding = Phases(
            spacing,
            spacing * stride,
            stride // common,
            spacing * ceildiv(ceildiv(problem.output[2], spacing), COLUMNS),
        )
        var apart = Phases.of_taps(problem)
        return apart if apart._loads(taps) < sliding._loads(taps) else sliding

    @staticmethod
    def of_taps(problem: ConvProblem) -> Phases:
        """A phase for every tap, of neighbouring outputs.

        Args:
            problem: The convolution.
        """
        return Phases(
            1,
            problem.stride[2],
            problem.filter[2],
            ceildiv(problem.output[2], COLUMNS),
        )

    def _loads(self, taps: Int) -> Int:
        """Pixels that are loaded for a row of outputs, taps and filters."""
        var windows = min(self.count, taps)
        return self.items * (taps + windows * (COLUMNS - 1))


def items_of(problem: ConvProblem, phases: Phases) -> Int:
    """Items of all images."""
    return problem.batch * problem.output[0] * problem.output[1] * phases.items


def depthwise_geometry(
    config: DepthwiseConfig, problem: ConvProblem, phases: Phases, workers: Int
) -> DepthwiseGeometry:
    """Builds the geometry from a problem.

    Args:
        config: The configuration.
        problem: The convolution, with at least one output.
        phases: Of its taps.
        workers: Blocks that run at the same time.
    """
    var lanes = lanes_of(config, problem)
    var vectors = problem.filters // config.width
    var slabs = ceildiv(vectors, lanes)
    var items = items_of(problem, phases)
    var together = THREADS // lanes
    var share = ceildiv(items, max(1, workers // slabs))
    return DepthwiseGeometry(
        channels=UInt32(problem.channels),
        multiplier=Divisor(problem.group_filters()),
        vectors=UInt32(vectors),
        filters=UInt32(problem.filters),
        lanes=Divisor(lanes),
        slabs=Divisor(slabs),
        depth=Int32(problem.input[0]),
        height=Int32(problem.input[1]),
        width=Int32(problem.input[2]),
        step_d=Int32(problem.stride[0]),
        step_h=Int32(problem.stride[1]),
        step_w=Int32(problem.stride[2]),
        start_d=Int32(-problem.pad_before[0]),
        start_h=Int32(-problem.pad_before[1]),
        start_w=Int32(-problem.pad_before[2]),
        dilation_d=Int32(problem.dilation[0]),
        dilation_h=Int32(problem.dilation[1]),
        phases=Int32(phases.count),
        dilation_w=Int32(problem.dilation[2]),
        window_step=Int32(phases.step),
        taps_d=Int32(problem.filter[0]),
        taps_h=Int32(problem.filter[1]),
        taps_w=Int32(problem.filter[2]),
        out_planes=Divisor(problem.output[0]),
        out_rows=Divisor(problem.output[1]),
        out_columns=UInt32(problem.output[2]),
        spacing=Divisor(phases.spacing),
        filter_taps=Divisor(problem.taps()),
        items_w=Divisor(phases.items),
        items=UInt32(items),
        block_items=UInt32(ceildiv(share, together) * together),
    )
