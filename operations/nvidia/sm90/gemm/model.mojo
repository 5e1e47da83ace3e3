"""How long a configuration should take: waves of tiles, and bytes."""

from std.math import ceildiv

from ...epilogue.work import FusedWork
from ....conv.memory import element_bytes
from ....conv.operands import OperandTypes
from ....conv.problem import SPATIAL, ConvProblem
from ...im2col.traversal import ROW_BYTES, Traversal
from ..wgmma import MMA_M
from .config import SUM_BYTES, Sm90Config
from .grid import Grid, pixel_clusters
from .mma import multiplies_of

# The model's constants. Fitted to timings of 20 configurations, in graphs where
# launches overlap: of 656 problems bare on an H200, of 300 with everything fused
# on an H100, and of 356 both ways there. Exchanges, and the corrections of the
# table's rows, are of 629 problems with 24 configurations on an H200, bare and
# with everything fused: what is chosen takes least. Loops, gathers and fused
# rows' stores are of fits before.

comptime CLOCK = 1.87e9
"""Cycles of a second."""

comptime LAUNCH_SECONDS = 0.501e-6
"""From a launch's begin to its first load, and from its last store to its end.
"""

comptime FIRST_ROW_CYCLES = 2.82
"""Of a row of the first stage, until it has come; of rows of fewer channels as
much less."""

comptime MEMORY_BYTES_PER_SECOND = 4.2e12
"""Of device memory."""

comptime TILE_ELEMENTS_PER_CYCLE = 32.0
"""Output elements of a tile that take one stage of products in a cycle."""

comptime SHARED_BYTES_PER_CYCLE = 128.0
"""Of shared memory."""

comptime WRITE_SHARE = 0.4
"""Of the bytes that TMA writes to shared memory, the part that
costs a multiply's reads their cycle."""

comptime L2_BYTES_PER_CYCLE = 277.0
"""Loaded bytes that cost a stage a cycle, though loads run ahead."""

comptime RECEIVED_BYTES_PER_CYCLE = 53.4
"""That each multiprocessor gets from the L2, at most, if all load."""

comptime POINT_SHARE = 1.17
"""What a byte of an activation's stage costs a multiprocessor to receive, over a
byte of a filter's: of one tap."""

comptime PLANE_SHARE = 1.19
"""The same, of several taps along one or two axes."""

comptime VOLUME_SHARE = 1.83
"""The same, of several taps along the depth too."""

comptime COLD_SHARE = 1.26
"""Of the filter's bytes, what the memory's traffic grows by where several tiles
along the pixels read them."""

comptime SHARED_COLD = 0.397
"""Of the bytes of a load that two blocks share, what each receives beside its
half where no tap has read them before."""

comptime LOAD_CYCLES = 2943.0
"""From a stage's release to its next data, where few stages hide it: with a
halo."""

comptime PARTIAL_ROW_CYCLES = 7.33
"""To load a row that ends beyond the channels."""

comptime GROUP_ROW_CYCLES = 7.0
"""To load a row of a group's channels that is no whole row of a stage."""

comptime GROUP_IDLE_SHARE = 0.35
"""Of that, what it costs less where no other multiprocessor is busy."""

comptime GROUP_HALO_SHARE = 1.36
"""The same with a halo, over that without."""

comptime MULTICAST_SHARE = 0.234
"""Of the bytes of a load that two blocks share, what it costs each."""

comptime PAIRED_STEP_CYCLES = 352.0
"""Of a stage that two blocks of one consumer each share, at least."""

comptime GATHERED_ROW_CYCLES = 9.4
"""To load a row of a stage by threads, whatever it has of channels."""

comptime DIRECT_ROW_CYCLES = 5.5
"""The same of rows that are copied straight into the ring."""

comptime GATHERED_TILE_CYCLES = 800.0
"""Of a tile whose rows threads load, to find them."""

comptime STORE_CYCLES = 2821.0
"""Of 64 pixels by 64 filters that cooperative consumers store."""

comptime EXPOSED_SHARE = 0.5
"""Of that, what each tile adds; the rest is the last tile's alone, as the next
one's loads hide it."""

comptime HIDDEN_STORE_CYCLES = 595.3
"""Of the same, while the other of two ping-pong consumers multiplies."""

comptime LAST_STORE_CYCLES = 927.0
"""Of the same, more for the last tile, behind which nothing multiplies."""

comptime ROW_STORE_CYCLES = 282.0
"""Of the same, more if the consumer's threads store and not TMA."""

comptime FUSED_STORE_CYCLES = 800.0
"""Of the same, more if the graph compiler fused something behind the output
and a tile's consumers would store rows without waiting for each other."""

comptime VISIT_CYCLES = 711.0
"""Of the same, more if anything is made of the values."""

comptime RESIDUAL_CYCLES = 1811.0
"""Of the same, more for a residual."""

comptime HIDDEN_RESIDUAL_CYCLES = 707.0
"""Of the same, while the other of two ping-pong consumers multiplies."""

comptime LOOP_CYCLES = 1500.0
"""Of the same, more if the activation is none of `FAST`."""

comptime TURN_CYCLES = 722.0
"""Of a ping-pong tile, beside its multiplies."""

comptime OVERLAP_SHARE = 0.308
"""What the shorter of computation and memory traffic adds to the longer."""

comptime CLUSTER_SECONDS = 0.0313e-6
"""What it costs a launch that blocks share loads."""

comptime CLUSTER_SYNC_SECONDS = 0.34e-6
"""To sync the blocks of a tile."""

comptime RINGS_SYNC_SECONDS = 0.79e-6
"""The same, more where the blocks' rings serve the exchange."""

comptime SENT_BYTES_PER_SECOND = 13.4e9
"""That a block sends to the others."""


def fused_cycles(work: FusedWork, cooperative: Bool) -> Float64:
    """Of 64 pixels by 64 filters, what an epilogue takes beside their store.

    Args:
        work: What it has to do.
        cooperative: Whether consumers share a tile.
    """
    var result = 0.0
    if work.visits:
        result += VISIT_CYCLES
    if work.residual:
        result += RESIDUAL_CYCLES if cooperative else HIDDEN_RESIDUAL_CYCLES
    if work.looped:
        result += LOOP_CYCLES
    return result


def predicted_seconds(
    config: Sm90Config,
    problem: ConvProblem,
    traversal: Traversal,
    multiprocessors: Int,
    split_k: Int,
    types: OperandTypes,
    work: FusedWork,
) -> Float64:
    """The model's time of a problem: waves of tiles, or the bytes of device
    memory.

    Args:
        config: The configuration.
        problem: The convolution, which the configuration does not refuse.
        traversal: The problem's.
        multiprocessors: Of the device.
        split_k: Blocks that share a tile, which `split_refusal` allows.
        types: Of the operands.
        work: What the epilogue has to do.

    Returns:
        Seconds.
    """
    var grid = Grid.of(config, traversal, multiprocessors, split_k)
    var steps = ceildiv(traversal.steps(), split_k)
    var blocks = grid.tiles * config.cluster_size() * split_k
    var busy = min(1.0, Float64(blocks) / Float64(multiprocessors))
    var tile = Float64(steps) * _step_cycles(
        config, traversal, grid.keeps_filters, busy
    )
    if config.gathers():
        tile += GATHERED_TILE_CYCLES
    var stored = config.own_pixels(split_k, types.output)
    stored *= config.consumer_filters()
    var units = Float64(stored) / Float64(MMA_M * MMA_M)
    var extra = fused_cycles(work, config.cooperative) * units
    var last: Float64
    if config.cooperative:
        var store = STORE_CYCLES * units + extra
        if types.fused_output and not config.epilogue.tma_store:
            store += FUSED_STORE_CYCLES * units
        tile += EXPOSED_SHARE * store
        last = (1 - EXPOSED_SHARE) * store
    else:
        # One consumer stores while the other multiplies, but for the last.
        var store = HIDDEN_STORE_CYCLES * units + extra
        if not config.epilogue.tma_store:
            store += ROW_STORE_CYCLES * units
        tile = max(tile + TURN_CYCLES, (tile + store) / 2)
        last = LAST_STORE_CYCLES * units + extra
    last += _first_cycles(config, traversal, grid.keeps_filters)
    var launch = LAUNCH_SECONDS
    if config.cluster_size() > 1:
        launch += CLUSTER_SECONDS
    var waves = Float64(grid.waves())
    var computation = (waves * tile + last) / CLOCK
    if split_k > 1:
        # A cluster shares one tile and ends: none of it is hidden.
        var shared = _exchange_seconds(config, split_k)
        computation = waves * ((tile + last) / CLOCK + shared)
    computation += launch
    var output = problem.gemm_m() * problem.filters
    output *= element_bytes(types.output)
    var bytes = _input_elements(problem) * element_bytes(types.input) + output
    if work.residual:
        bytes += output
    var cold = _cold_bytes(config, problem, traversal, types)
    var memory = (Float64(bytes) + cold) / MEMORY_BYTES_PER_SECOND
    return max(computation, memory) + OVERLAP_SHARE * min(computation, memory)


def _exchange_seconds(config: Sm90Config, split_k: Int) -> Float64:
    """What passes until the blocks that share a tile have added up its sums.

    Args:
        config: The configuration.
        split_k: How many blocks.
    """
    var bytes = config.block_tile_shape[0] * config.block_tile_shape[1]
    bytes *= SUM_BYTES
    var sent = Float64(bytes) * (1.0 - 1.0 / Float64(split_k))
    var result = CLUSTER_SYNC_SECONDS + sent / SENT_BYTES_PER_SECOND
    if not config.separate_exchange_bytes(0):
        result += RINGS_SYNC_SECONDS
    return result


def _cold_bytes(
    config: Sm90Config,
    problem: ConvProblem,
    traversal: Traversal,
    types: OperandTypes,
) -> Float64:
    """Bytes of filters that blocks read again: each half of the L2 gets its own
    copy, from the other half."""
    if pixel_clusters(config, traversal) == 1:
        return 0.0
    var filter = problem.filters * problem.gemm_k()
    return COLD_SHARE * Float64(filter * element_bytes(types.input))


def _input_elements(problem: ConvProblem) -> Int:
    """Elements of activation and filter."""
    var pixels = problem.batch
    for axis in range(SPATIAL):
        pixels *= problem.input[axis]
    return pixels * problem.channels + problem.filters * problem.gemm_k()


def _step_cycles(
    config: Sm90Config,
    traversal: Traversal,
    keeps_filters: Bool,
    busy: Float64,
) -> Float64:
    """The model's time of one stage of a tile: the multiply's, shared memory's,
    or the L2's, of whose multiprocessors a share is `busy`."""
    var activation = Float64(config.act_stage_bytes())
    if config.halo > 0:
        activation /= Float64(traversal.filter[2])
    var filter = Float64(config.filter_tile_bytes())
    if keeps_filters:
        filter = 0.0
    var read = (
        config.mma_rows()
        // MMA_M
        * (MMA_M * multiplies_of(config.mma_columns()) + config.mma_columns())
        * ROW_BYTES
        * config.tile_consumers()
    )
    var multiply = (
        Float64(config.block_tile_shape[0] * config.block_tile_shape[1])
        / TILE_ELEMENTS_PER_CYCLE
    )
    var shared = (
        WRITE_SHARE * (activation + filter) + Float64(read)
    ) / SHARED_BYTES_PER_CYCLE
    var half = 0.5 + SHARED_COLD / Float64(traversal.taps())
    var received = activation * (half if config.cluster_shape[1] > 1 else 1.0)
    received *= _activation_share(traversal)
    received += filter * (half if config.cluster_shape[0] > 1 else 1.0)
    if config.cluster_shape[1] > 1:
        activation *= MULTICAST_SHARE
    if config.cluster_shape[0] > 1:
        filter *= MULTICAST_SHARE
    var step = (
        max(multiply, shared) + (activation + filter) / L2_BYTES_PER_CYCLE
    )
    step = max(step, received * busy / RECEIVED_BYTES_PER_CYCLE)
    if config.gathers():
        var rows = Float64(config.block_tile_shape[0])
        if not keeps_filters:
            rows += Float64(config.block_tile_shape[1])
        if config.gathers_directly():
            return max(step, DIRECT_ROW_CYCLES * rows)
        return max(step, GATHERED_ROW_CYCLES * rows)
    if config.consumers == 1 and config.cluster_size() > 1:
        step = max(step, PAIRED_STEP_CYCLES)
    if config.halo > 0:
        # A stage serves a filter row, and one of the ring is being read.
        var stages = Float64(
            (config.num_act_pipeline_stages - 1) * traversal.filter[2]
        )
        step = max(step, LOAD_CYCLES / stages)
    if traversal.groups > 1:
        var rows = _group_rows_cycles(config, traversal, keeps_filters)
        return max(step, rows * (1 - GROUP_IDLE_SHARE * (1 - busy)))
    if traversal.slice_channels() == traversal.row_channels():
        step = max(step, _partial_rows_cycles(config, traversal, keeps_filters))
    return step


def _activation_share(traversal: Traversal) -> Float64:
    """What a byte of an activation's stage costs to receive, over one of a
    filter's."""
    if traversal.filter[0] > 1:
        return VOLUME_SHARE
    return POINT_SHARE if traversal.taps() == 1 else PLANE_SHARE


def _partial_rows_cycles(
    config: Sm90Config, traversal: Traversal, keeps_filters: Bool
) -> Float64:
    """What loads of rows that end beyond the channels cost a step, on average:
    those of one slice of a tap."""
    var bytes = traversal.channels * traversal.channel_bytes
    if bytes % ROW_BYTES == 0:
        return 0.0
    var rows = Float64(config.act_tile_dim0())
    if config.halo > 0:
        rows /= Float64(traversal.filter[2])
    if not keeps_filters:
        rows += Float64(config.filter_tile_dim0())
    return PARTIAL_ROW_CYCLES * rows / Float64(traversal.slices())


def _group_rows_cycles(
    config: Sm90Config, traversal: Traversal, keeps_filters: Bool
) -> Float64:
    """What loads of a group's channels cost a step, if these are no whole rows
    and all multiprocessors are busy."""
    if traversal.channels * traversal.channel_bytes % ROW_BYTES == 0:
        return 0.0
    var cycles = GROUP_ROW_CYCLES * Float64(config.act_tile_dim0())
    if config.halo > 0:
        cycles *= GROUP_HALO_SHARE / Float64(traversal.filter[2])
    if not keeps_filters:
        cycles += GROUP_ROW_CYCLES * Float64(config.filter_tile_dim0())
    return cycles


def _first_cycles(
    config: Sm90Config, traversal: Traversal, keeps_filters: Bool
) -> Float64:
    """What passes until a block's first stage has come."""
    var rows = Float64(config.act_stage_pixels())
    if config.halo > 0:
        rows /= Float64(traversal.filter[2])
    if not keeps_filters:
        rows += Float64(config.block_tile_shape[1])
    var channels = traversal.slice_channels()
    var part = Float64(channels) / Float64(traversal.row_channels())
    return FIRST_ROW_CYCLES * rows * part
