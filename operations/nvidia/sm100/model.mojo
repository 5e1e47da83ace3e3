"""How long a configuration should take on a Blackwell GPU: a model, made of
what the data sheet and the instruction set promise and fitted to nothing, as
no such GPU has been timed.

Multiplies, loads and stores overlap; the slowest of them is a tile's time.
"""

from std.math import ceildiv
from std.sys.info import size_of

from ...conv.problem import ConvProblem
from ..im2col.traversal import Traversal
from ..limits import MMA_K_BYTES
from .config import SUM_BYTES, Conv2dConfig

comptime CLOCK = 1.85e9
"""Cycles of a second (B200, boost)."""

comptime ROW_CYCLES_PER_MMA = 0.25
"""Cycles of an instruction for each of its columns: 128 rows by 32 bytes of
products a block, or 8192 multiply-adds of 16 bits a cycle, as 148 units of them
make 2.25e15 operations of a second dense (B200's data sheet: 2.25 PFLOP/s)."""


comptime LOAD_BYTES_PER_CYCLE = 128.0
"""That a multiprocessor's shared memory takes; L2 is assumed to keep up."""

comptime STORE_BYTES_PER_CYCLE = 64.0
"""That a multiprocessor gives to L2; an assumption."""

comptime TMEM_BYTES_PER_CYCLE = 512.0
"""That four warps read of tensor memory: 128 lanes of 4 bytes."""

comptime VISIT_CYCLES = 2.0
"""Of an instruction on 128 values, for four warps on four schedulers: one
each, and as much again for what stands beside it."""

comptime VISIT_INSTRUCTIONS = 12.0
"""Of a value: rounding, shared memory, and a short activation."""

comptime EXCHANGE_CYCLES = 1000.0
"""From one block's last store into another's shared memory until that one has
seen it, there and back; an assumption."""

comptime MEMORY_BYTES_PER_SECOND = 8.0e12
"""Of device memory (B200's data sheet)."""

comptime LAUNCH_SECONDS = 3.0e-6
"""From a launch's begin to its first multiply, and from its last to its end;
an assumption."""


@fieldwise_init
struct Prediction(ImplicitlyCopyable, Movable):
    """A configuration's times for a problem; of a tile in cycles."""

    var tiles: Int
    """Of whole clusters."""
    var waves: Int
    """That the clusters which fit at a time need."""
    var multiply: Float64
    var load: Float64
    var store: Float64
    """Out of tensor memory, through what is fused, to memory."""
    var memory: Float64
    """Seconds that device memory needs for every operand once."""
    var seconds: Float64

    def bound(self) -> StaticString:
        """What takes longest."""
        var cycles = max(max(self.multiply, self.load), self.store)
        if self.memory >= Float64(self.waves) * cycles / CLOCK:
            return "memory"
        if self.multiply >= cycles:
            return "multiply"
        return "load" if self.load >= cycles else "store"


def predict[
    act_type: DType,
    filter_type: DType,
    out_type: DType,
](
    config: Conv2dConfig[act_type, filter_type, out_type],
    problem: ConvProblem,
    multiprocessors: Int,
    residual: Bool = False,
) -> Prediction:
    """What the model says about a configuration.

    Parameters:
        act_type: Of the activation.
        filter_type: Of the filter.
        out_type: Of the output.

    Args:
        config: The configuration, whose `problem_refusal` has nothing against
            the problem.
        problem: The convolution, with at least one output.
        multiprocessors: Of the device.
        residual: Whether one is added.
    """
    var traversal = Traversal(problem)
    var split_k = config.split_k()
    # The longest part's.
    var steps = Float64(
        ceildiv(traversal.taps() * traversal.slices[act_type](), split_k)
    )
    var columns = Float64(config.mma_shape[1])
    var size = config.cluster_size()
    var tiles = config.blocks(traversal) // size
    var waves = ceildiv(tiles, max(1, multiprocessors // size))
    comptime instructions = Float64(128 // MMA_K_BYTES)
    var multiply = steps * instructions * columns * ROW_CYCLES_PER_MMA
    # A block that shares a tile loads its part of it.
    var loaded = (
        config.act_tile_bytes() // config.cluster_shape[1]
        + config.filter_tile_bytes()
        * config.cta_group
        // config.cluster_shape[0]
    )
    var load = steps * Float64(loaded) / LOAD_BYTES_PER_CYCLE
    var rows = Float64(config.block_tile_shape[0])
    var values = rows * columns
    var bytes = values * Float64(size_of[out_type]())
    if residual:
        load += bytes / Float64(split_k) / LOAD_BYTES_PER_CYCLE
    # Blocks that share a tile store a part of it each.
    var store = values * Float64(SUM_BYTES) / TMEM_BYTES_PER_CYCLE + (
        columns * VISIT_INSTRUCTIONS * VISIT_CYCLES
        + bytes / STORE_BYTES_PER_CYCLE
    ) / Float64(split_k)
    if split_k > 1:
        var sent = (
            values
            * Float64(SUM_BYTES)
            * Float64(split_k - 1)
            / Float64(split_k)
        )
        store += EXCHANGE_CYCLES + sent * (
            1 / STORE_BYTES_PER_CYCLE + 1 / LOAD_BYTES_PER_CYCLE
        )
    var cycles = max(max(multiply, load), store)
    # The first tile's loads and the last one's stores overlap with nothing.
    var seconds = (Float64(waves) * cycles + store) / CLOCK
    var output = Float64(problem.gemm_m() * problem.filters) * Float64(
        size_of[out_type]()
    )
    var pixels = problem.input[0] * problem.input[1] * problem.input[2]
    var memory = (
        Float64(problem.batch * pixels * problem.channels)
        * Float64(size_of[act_type]())
        + Float64(problem.filters * problem.gemm_k())
        * Float64(size_of[filter_type]())
        + output * (2.0 if residual else 1.0)
    ) / MEMORY_BYTES_PER_SECOND
    return Prediction(
        tiles=tiles,
        waves=waves,
        multiply=multiply,
        load=load,
        store=store,
        memory=memory,
        seconds=max(seconds, memory) + LAUNCH_SECONDS,
    )
