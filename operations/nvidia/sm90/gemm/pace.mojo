"""How a launch that memory bounds goes through its tiles: how far its loads run
ahead, and whether some of its clusters take over from others."""

from std.math import ceil

from ...epilogue.work import FusedWork
from ...im2col.traversal import Traversal
from ...relays import MOST_RELAYS
from .config import Sm90Config
from .grid import Grid
from .model import CLOCK, MEMORY_BYTES_PER_SECOND, TILE_ELEMENTS_PER_CYCLE

# From 98 convolutions, bare, on an H200, and nine of them with work fused on an H100
# too. A relay costs 3 us: shorter launches lose by it, and those of fewer tiles or
# more products.

comptime LEAST_SECONDS = 45e-6
"""Of device memory, for the bytes of a launch that keeps a pace."""

comptime LEAST_WAVES = 36
"""Tiles of a block of such a launch."""

comptime LEAST_RATIO = 2.0
"""Its seconds of memory over those of its multiplies."""

comptime AHEAD_SECONDS = 1.5e-6
"""That its loads run ahead, about the latency of a busy memory. If they run
further, multiprocessors that get more of the memory run away from the others."""

comptime SHARED_AHEAD_SECONDS = 1.25e-6
"""The same, where blocks write parts of a line: they have to stay together."""

comptime LINE_BYTES = 128
"""Of memory that is written at once."""


@fieldwise_init
struct Pace(ImplicitlyCopyable, Movable):
    """How a launch goes through its tiles."""

    var relays: Int
    """At most."""
    var stages: Int
    """Of the activation ring that loads fill: at least 2, and all or at least 2
    fewer. A stage is filled when one behind it has been released, and two
    consumers in turns may release neighbours in any order."""

    @staticmethod
    def free(config: Sm90Config) -> Pace:
        """One relay, whose loads run as far ahead as the ring lets them.

        Args:
            config: The configuration.
        """
        return Pace(1, config.num_act_pipeline_stages)

    @staticmethod
    def of(
        config: Sm90Config, traversal: Traversal, grid: Grid, work: FusedWork
    ) -> Pace:
        """The pace of a problem whose tiles are a block's own.

        Args:
            config: The configuration.
            traversal: Of a problem that the configuration does not refuse.
            grid: The problem's.
            work: What the epilogue has to do.
        """
        var waves = grid.waves()
        if waves < LEAST_WAVES or not config.keeps_pace():
            return Pace.free(config)
        var inputs, outputs = _elements(traversal)
        var bytes = Float64((inputs + outputs) * traversal.channel_bytes)
        var memory = bytes / MEMORY_BYTES_PER_SECOND
        var steps = traversal.steps()
        var tile = config.block_tile_shape[0] * config.block_tile_shape[1]
        var multiplies = Float64(waves * steps * tile) / (
            TILE_ELEMENTS_PER_CYCLE * CLOCK
        )
        if memory < LEAST_SECONDS or memory < LEAST_RATIO * multiplies:
            return Pace.free(config)
        var stage = memory / Float64(waves * steps)
        var filters = traversal.filters * traversal.groups
        if filters > config.cluster_filters():
            # An H100 takes longer so, by 3 to 4 %.
            if work.residual and inputs < 2 * outputs:
                return Pace.free(config)
            if filters * traversal.channel_bytes % LINE_BYTES != 0:
                # What makes something of the values is slower than memory.
                if work.visits:
                    return Pace.free(config)
                return Pace(1, _stages(config, stage, SHARED_AHEAD_SECONDS))
        return Pace(MOST_RELAYS, _stages(config, stage, AHEAD_SECONDS))


def _stages(config: Sm90Config, stage: Float64, ahead: Float64) -> Int:
    """Stages to fill, so that loads run some seconds ahead, of which each stage
    takes memory a part; one more is being read."""
    var stages = 1 + Int(ceil(ahead / stage))
    var all = config.num_act_pipeline_stages
    return stages if stages <= all - 2 else all


def _elements(traversal: Traversal) -> Tuple[Int, Int]:
    """Of the pixels that are read, and of the output. Filters are few beside
    them."""
    var outputs = traversal.rows() * traversal.output[2]
    var inputs = traversal.images * traversal.input[0]
    inputs *= traversal.input[1] * traversal.input[2]
    inputs = min(inputs, outputs * traversal.taps())
    return (
        inputs * traversal.channels * traversal.groups,
        outputs * traversal.filters * traversal.groups,
    )
