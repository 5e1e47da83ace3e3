"""Which configuration of the Hopper kernel takes a problem: the one that a
model of waves and bytes finds fastest."""

from max.gpu.host import DeviceAttribute, DeviceContext
from std.math import ceildiv
from std.sys.info import size_of

from ..conv.access import OutputTarget
from ..conv.epilogue import Epilogue
from ..conv.memory import Reads
from ..conv.problem import ConvProblem
from .config import (
    MMA_M,
    ROW_BYTES,
    Sm90Config,
    can_implement,
    channel_slices,
    walk_width,
)
from .epilogue_config import EpilogueConfig
from .launch import LaunchPlan

comptime CANDIDATES = 15
"""Configurations to choose from."""


def _rows(
    tile_m: Int,
    tile_n: Int,
    activation_stages: Int,
    filter_stages: Int,
    epilogue_stages: Int,
    *,
    subtile_pixels: Int = 64,
    consumers: Int = 2,
    cooperative: Bool = True,
    blocks_m: Int = 1,
    blocks_n: Int = 1,
    halo: Int = 0,
    stationary: Bool = False,
) -> Sm90Config:
    """A configuration whose filters are the multiply's rows; the copy engine
    stores tiles without a halo."""
    return Sm90Config(
        tile_m=tile_m,
        tile_n=tile_n,
        consumers=consumers,
        cooperative=cooperative,
        swapped=True,
        blocks_m=blocks_m,
        blocks_n=blocks_n,
        halo=halo,
        activation_stages=activation_stages,
        filter_stages=filter_stages,
        stationary=stationary,
        epilogue=EpilogueConfig(
            subtile_pixels=subtile_pixels,
            stages_c=epilogue_stages,
            stages_d=min(2, epilogue_stages),
            fragment_size=16,
            reuse_c=True,
            delay_store=False,
            engine_store=halo == 0,
        ),
    )


def candidate(index: Int) -> Sm90Config:
    """A configuration to choose from.

    Args:
        index: From 0 to `CANDIDATES - 1`.
    """
    if index == 0:
        return _rows(256, 128, 3, 5, 2, blocks_m=2, halo=8)
    if index == 1:
        return _rows(256, 128, 3, 5, 2, blocks_n=2, halo=16)
    if index == 2:
        return _rows(256, 128, 4, 4, 2, blocks_m=2)
    if index == 3:
        return _rows(256, 128, 4, 4, 2, blocks_n=2)
    if index == 4:
        return _rows(224, 128, 3, 5, 7, blocks_n=2, halo=16, subtile_pixels=32)
    if index == 5:
        return _rows(224, 128, 4, 4, 6, blocks_n=2, subtile_pixels=32)
    if index == 6:
        return _rows(192, 128, 5, 5, 3, subtile_pixels=32)
    if index == 7:
        return _rows(192, 128, 5, 5, 3, blocks_n=2, subtile_pixels=32)
    if index == 8:
        return _rows(96, 128, 7, 7, 3, subtile_pixels=32)
    if index == 9:
        return _rows(96, 128, 7, 7, 3, blocks_n=2, subtile_pixels=32)
    if index == 10:
        return _rows(256, 64, 4, 4, 4, cooperative=False)
    if index == 11:
        return _rows(256, 64, 3, 8, 3, cooperative=False, halo=8)
    if index == 12:
        return _rows(
            256, 64, 3, 9, 3, cooperative=False, halo=8, stationary=True
        )
    if index == 13:
        return _rows(
            160,
            64,
            4,
            9,
            5,
            cooperative=False,
            halo=8,
            stationary=True,
            subtile_pixels=32,
        )
    return _rows(64, 64, 8, 8, 4, consumers=1)


# The model's constants, fitted to timings of 20 configurations on an H200.

comptime CLOCK = 1.7e9
"""Cycles of a second, as the power limit has it under load."""

comptime LAUNCH_SECONDS = 3.0e-6
"""From a launch's begin to its first multiply, and from its last to its end.
"""

comptime MEMORY_BYTES_PER_SECOND = 4.1e12
"""Of device memory."""

comptime TILE_ELEMENTS_PER_CYCLE = 32.0
"""Output elements of a tile that take one stage of products in a cycle."""

comptime SHARED_BYTES_PER_CYCLE = 128.0
"""Of shared memory."""

comptime L2_BYTES_PER_CYCLE = 64.0
"""That reach a multiprocessor."""

comptime WRITE_SHARE = 0.75
"""Of the bytes that the copy engine writes to shared memory, the part that
costs a multiply's reads their cycle."""

comptime SHARED_SHARE = 0.2
comptime L2_SHARE = 0.1
"""What hidden traffic costs nevertheless, mostly in power."""

comptime STORE_CYCLES = 300.0
"""Of 64 pixels by 64 filters that a cooperative consumer stores."""

comptime TURN_CYCLES = 600.0
"""Of a ping-pong tile, beside its multiplies."""

comptime OVERLAP_SHARE = 0.1
"""What the shorter of computation and memory traffic adds to the longer."""


def predicted_seconds[
    in_type: DType, out_type: DType
](config: Sm90Config, problem: ConvProblem, multiprocessors: Int) -> Float64:
    """The model's time of a problem: waves of tiles, or the bytes of device
    memory.

    Parameters:
        in_type: Of activation and filter.
        out_type: Of the output.

    Args:
        config: The configuration.
        problem: The convolution; `can_implement` has agreed.
        multiprocessors: Of the device.

    Returns:
        Seconds.
    """
    var pixels = (
        problem.batch * problem.output[1] * walk_width(problem, config.halo)
    )
    var clusters = ceildiv(pixels, config.tile_m * config.blocks_m) * ceildiv(
        problem.filters, config.tile_n * config.blocks_n
    )
    var waves = ceildiv(clusters, multiprocessors // config.cluster_size())
    var steps = problem.taps() * channel_slices[in_type](problem)
    var tile = Float64(steps) * _step_cycles(config, problem)
    if config.cooperative:
        tile += (
            STORE_CYCLES
            * Float64(config.consumer_pixels() * config.consumer_filters())
            / Float64(MMA_M * MMA_M)
        )
    else:
        tile += TURN_CYCLES
    var computation = Float64(waves) * tile / CLOCK + LAUNCH_SECONDS
    var inputs = (
        problem.batch * problem.input[1] * problem.input[2] * problem.channels
        + problem.filters * problem.gemm_k()
    )
    var bytes = (
        inputs * size_of[in_type]()
        + problem.gemm_m() * problem.filters * size_of[out_type]()
    )
    var memory = Float64(bytes) / MEMORY_BYTES_PER_SECOND
    return max(computation, memory) + OVERLAP_SHARE * min(computation, memory)


def _step_cycles(config: Sm90Config, problem: ConvProblem) -> Float64:
    """The model's time of one stage of a tile: the multiply's, or shared
    memory's."""
    var activation = Float64(config.activation_stage_bytes())
    if config.halo > 0:
        activation /= Float64(problem.filter[2])
    var filter = Float64(config.filter_stage_bytes())
    if config.stationary:
        filter = 0.0
    var read = (
        config.mma_rows()
        // MMA_M
        * (MMA_M + config.mma_columns())
        * ROW_BYTES
        * config.tile_consumers()
    )
    var multiply = (
        Float64(config.tile_m * config.tile_n) / TILE_ELEMENTS_PER_CYCLE
    )
    var shared = (
        WRITE_SHARE * (activation + filter) + Float64(read)
    ) / SHARED_BYTES_PER_CYCLE
    var l2 = (
        activation / Float64(config.blocks_n)
        + filter / Float64(config.blocks_m)
    ) / L2_BYTES_PER_CYCLE
    return max(multiply, shared) + SHARED_SHARE * shared + L2_SHARE * l2


@fieldwise_init
struct Choice(Copyable, Movable, Writable):
    """A candidate, or why there is none."""

    var index: Int
    """Of the candidate; -1 if every one refuses."""
    var seconds: Float64
    """The model's time."""
    var refusal: String
    """Of the last candidate that refused."""

    def write_to(self, mut writer: Some[Writer]):
        """Writes the choice on one line.

        Args:
            writer: Where to.
        """
        if self.index < 0:
            writer.write(self.refusal)
        else:
            var microseconds = round(self.seconds * 1e7) / 10
            writer.write(
                t"{candidate(self.index)}: {microseconds} us by the model"
            )


def choose[
    in_type: DType, out_type: DType
](problem: ConvProblem, multiprocessors: Int) -> Choice:
    """The candidate that the model finds fastest among those that can take a
    problem.

    Parameters:
        in_type: Of activation and filter.
        out_type: Of the output.

    Args:
        problem: The convolution, valid and with at least one output.
        multiprocessors: Of the device.

    Returns:
        The choice.
    """
    var best = Choice(-1, 0.0, String())
    for index in range(CANDIDATES):
        var config = candidate(index)
        var refusal = can_implement[in_type, out_type](config, problem)
        if refusal:
            best.refusal = refusal.value()
            continue
        var seconds = predicted_seconds[in_type, out_type](
            config, problem, multiprocessors
        )
        if best.index < 0 or seconds < best.seconds:
            best.index = index
            best.seconds = seconds
    return best^


def convolve[
    in_type: DType, Output: OutputTarget, bias_type: DType
](
    ctx: DeviceContext,
    problem: ConvProblem,
    activation: Reads[in_type],
    filter: Reads[in_type],
    epilogue: Epilogue[bias_type, Output.dtype],
    output: Output,
) raises:
    """Enqueues a convolution on the fastest configuration.

    Parameters:
        in_type: Of activation and filter: bfloat16 or float16.
        Output: The output, of bfloat16, float16 or float32 as is the residual,
            and what the graph compiler fused behind it.
        bias_type: Of the bias.

    Args:
        ctx: The device; nothing is waited for.
        problem: The convolution, valid and with at least one output.
        activation: `[N, H, W, C]` in device memory.
        filter: `[K, R, S, C]` in device memory.
        epilogue: What is fused; its operands in device memory.
        output: `[N, P, Q, K]`, its elements in device memory.

    Raises:
        Why no configuration can take the problem, or what the driver refused.
    """
    var choice = choose[in_type, Output.dtype](
        problem, ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)
    )
    if choice.index < 0:
        raise Error(t"sm90: {choice.refusal}; problem {problem}")
    comptime for index in range(CANDIDATES):
        if choice.index == index:
            LaunchPlan[in_type, Output, bias_type, candidate(index)](
                ctx, problem, activation, filter, epilogue, output
            ).launch(ctx)
