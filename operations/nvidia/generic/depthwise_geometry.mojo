"""How the GPU's general depthwise kernel cuts a problem among threads.

A thread has `width` neighbouring filters, and computes an item at a time:
`COLUMNS` output pixels of one row. Threads of a block that share an item are
its lanes. Blocks take consecutive items, so that the input rows that items
share come from the cache.
"""

from std.math import ceildiv
from std.sys.info import size_of

from ...conv.device_value import DeviceValue
from ...conv.divisor import Divisor
from ...conv.memory import element_bytes
from ...conv.problem import ConvProblem

comptime THREADS = 128
"""Threads of a block."""

comptime LANES = 32
"""Lanes of most configurations: a warp reads neighbouring filters of a pixel.
"""

comptime FILTER_BYTES = 48 * 1024
"""Shared memory for a block's filters, at most."""

comptime MAX_EXACT_TAPS = 1024
"""Taps whose products of int8 float32 adds up exactly: 1024 times 128 squared
are 2 ** 24."""

comptime ACCESS_BYTES = 8
"""Bytes that a thread reads of a pixel."""

comptime COLUMNS = 4
"""Output pixels of an item, along w."""

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


comptime DEPTHWISE_CANDIDATES = 3
"""Configurations to choose from, in the order of preference."""


def vector_width(dtype: DType) -> Int:
    """Neighbouring filters of a thread, unless it has one.

    Args:
        dtype: Of the activation.
    """
    return ACCESS_BYTES // element_bytes(dtype)


def depthwise_candidate(dtype: DType, index: Int) -> DepthwiseConfig:
    """A configuration to choose from.

    Args:
        dtype: Of the activation.
        index: From 0 to `DEPTHWISE_CANDIDATES - 1`.
    """
    if index == 0:
        return DepthwiseConfig(vector_width(dtype), LANES)
    if index == 1:
        return DepthwiseConfig(1, LANES)
    return DepthwiseConfig(1, 1)


def choose_depthwise(dtype: DType, problem: ConvProblem) -> Int:
    """The candidate that computes a problem.

    Args:
        dtype: Of the activation.
        problem: The convolution, one channel a group.
    """
    var wide = (
        problem.group_filters() == 1
        and problem.filters % vector_width(dtype) == 0
    )
    for index in range(DEPTHWISE_CANDIDATES):
        var config = depthwise_candidate(dtype, index)
        if (wide or config.width == 1) and config.filter_bytes(
            problem.taps()
        ) <= FILTER_BYTES:
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
    var dilation_w: Int32
    var taps_d: Int32
    var taps_h: Int32
    var taps_w: Int32
    var out_planes: Divisor
    var out_rows: Divisor
    var out_columns: UInt32
    var items_w: Divisor
    var items: UInt32
    """Items of all images."""
    var block_items: UInt32
    """Items of a block, consecutive ones."""

    @always_inline
    def taps(self) -> UInt32:
        """Taps of the filter."""
        return UInt32(self.taps_d * self.taps_h * self.taps_w)


def items_of(problem: ConvProblem) -> Int:
    """Items of all images."""
    return (
        problem.batch
        * problem.output[0]
        * problem.output[1]
        * ceildiv(problem.output[2], COLUMNS)
    )


def depthwise_geometry(
    config: DepthwiseConfig, problem: ConvProblem, workers: Int
) -> DepthwiseGeometry:
    """Builds the geometry from a problem.

    Args:
        config: The configuration.
        problem: The convolution, with at least one output.
        workers: Blocks that run at the same time.
    """
    var lanes = lanes_of(config, problem)
    var vectors = problem.filters // config.width
    var slabs = ceildiv(vectors, lanes)
    var items = items_of(problem)
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
        dilation_w=Int32(problem.dilation[2]),
        taps_d=Int32(problem.filter[0]),
        taps_h=Int32(problem.filter[1]),
        taps_w=Int32(problem.filter[2]),
        out_planes=Divisor(problem.output[0]),
        out_rows=Divisor(problem.output[1]),
        out_columns=UInt32(problem.output[2]),
        items_w=Divisor(ceildiv(problem.output[2], COLUMNS)),
        items=UInt32(items),
        block_items=UInt32(ceildiv(share, together) * together),
    )
