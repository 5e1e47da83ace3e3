"""How long a configuration should take on a Blackwell GPU: a model, made of
what the data sheet and the instruction set promise and fitted to nothing, as
no such GPU has been timed.

Multiplies, loads and stores overlap; the slowest of them is a tile's time.
"""

from std.math import ceildiv

from ...conv.memory import element_bytes
from ...conv.problem import ConvProblem
from .config import SUM_BYTES, Conv2dConfig
from .mma import MMA_STEPS

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


def predict(
    config: Conv2dConfig,
    problem: ConvProblem,
    multiprocessors: Int,
    residual: Bool = False,
) -> Prediction:
    """What the model says about a configuration.

    Args:
        config: The configuration, whose `problem_refusal` has nothing against
            the problem.
        problem: The convolution, with at least one output.
        multiprocessors: Of the device.
        residual: Whether one is added.
    """
    var traversal = config.traversal(problem)
    var size = config.cluster_size()
    var tiles = config.blocks(traversal) // size
    var waves = ceildiv(tiles, max(1, multiprocessors // size))
    # The longest part's.
    var steps = Float64(ceildiv(traversal.steps(), config.split_k()))
    var columns = Float64(config.mma_shape[1])
    var multiply = steps * Float64(MMA_STEPS) * columns * ROW_CYCLES_PER_MMA
    var load = _load_cycles(config, steps, residual)
    var store = _store_cycles(config)
    var cycles = max(max(multiply, load), store)
    # The first tile's loads and the last one's stores overlap with nothing.
    var seconds = (Float64(waves) * cycles + store) / CLOCK
    var memory = _memory_bytes(config, problem, residual) / (
        MEMORY_BYTES_PER_SECOND
    )
    return Prediction(
        tiles=tiles,
        waves=waves,
        multiply=multiply,
        load=load,
        store=store,
        memory=memory,
        seconds=max(seconds, memory) + LAUNCH_SECONDS,
    )


def _tile_values(config: Conv2dConfig) -> Float64:
    """Of a block's part of a tile."""
    return Float64(config.block_tile_shape[0]) * Float64(config.mma_shape[1])


def _tile_bytes(config: Conv2dConfig) -> Float64:
    """Of the same, in the output's type."""
    return _tile_values(config) * Float64(element_bytes(config.types.out))


def _load_cycles(
    config: Conv2dConfig, steps: Float64, residual: Bool
) -> Float64:
    """Of a tile's operands and its residual."""
    # A block that shares a tile loads its part of it.
    var loaded = (
        config.act_tile_bytes() // config.cluster_shape[1]
        + config.filter_tile_bytes()
        * config.cta_group
        // config.cluster_shape[0]
    )
    var cycles = steps * Float64(loaded) / LOAD_BYTES_PER_CYCLE
    if residual:
        cycles += (
            _tile_bytes(config)
            / Float64(config.split_k())
            / LOAD_BYTES_PER_CYCLE
        )
    return cycles


def _store_cycles(config: Conv2dConfig) -> Float64:
    """Out of tensor memory, through what is fused, to memory."""
    var split_k = Float64(config.split_k())
    var columns = Float64(config.mma_shape[1])
    var sums = _tile_values(config) * Float64(SUM_BYTES)
    # Blocks that share a tile store a part of it each.
    var cycles = (
        sums / TMEM_BYTES_PER_CYCLE
        + (
            columns * VISIT_INSTRUCTIONS * VISIT_CYCLES
            + _tile_bytes(config) / STORE_BYTES_PER_CYCLE
        )
        / split_k
    )
    if config.split_k() > 1:
        var sent = sums * (split_k - 1) / split_k
        cycles += EXCHANGE_CYCLES + sent * (
            1 / STORE_BYTES_PER_CYCLE + 1 / LOAD_BYTES_PER_CYCLE
        )
    return cycles


def _memory_bytes(
    config: Conv2dConfig, problem: ConvProblem, residual: Bool
) -> Float64:
    """Of every operand, once."""
    var output = problem.gemm_m() * problem.filters
    output *= element_bytes(config.types.out)
    if residual:
        output *= 2
    var pixels = problem.input[0] * problem.input[1] * problem.input[2]
    var activation = problem.batch * pixels * problem.channels
    var filter = problem.filters * problem.gemm_k()
    return Float64(
        activation * element_bytes(config.types.act)
        + filter * element_bytes(config.types.filter)
        + output
    )
