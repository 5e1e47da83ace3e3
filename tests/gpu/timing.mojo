"""How the GPU programs time: medians of replays of a graph of launches, over
input sets that together exceed the L2, after pauses in which the chip cools."""

from max.gpu.host import DeviceContext, DeviceGraph, DeviceGraphBuilder
from std.time import sleep

from operations.nvidia.stream import Stream
from operations.nvidia.stream_graph import StreamGraph

comptime LAUNCHES = 32
"""Launches of a graph."""

comptime ROTATED_BYTES = 256 << 20
"""Bytes that the input sets of a timing have together, at least."""

comptime REPLAYS = 3
"""Replays that are timed together."""

comptime ROUNDS = 7
"""Timings that the median is taken of."""

comptime PAUSE = 0.25
"""Seconds of a pause: the chip neither reaches its power limit after it nor
falls asleep in it."""


def input_sets(bytes: Int) -> Int:
    """Sets to rotate.

    Args:
        bytes: Of one.
    """
    return max(1, min(LAUNCHES, ROTATED_BYTES // bytes + 1))


def median_of[
    Seconds: def() raises -> Float64, //, every_round: Bool
](seconds: Seconds) raises -> Float64:
    """Milliseconds of a launch: the median, `seconds` returning those of
    `REPLAYS` times `LAUNCHES`."""
    sleep(PAUSE)
    _ = seconds()
    var times = List[Float64]()
    for _ in range(ROUNDS):
        comptime if every_round:
            sleep(PAUSE)
        times.append(seconds() / Float64(REPLAYS * LAUNCHES) * 1e3)
    sort(times)
    return times[len(times) // 2]


def executed_of[
    Run: def(DeviceContext) raises -> None, //, every_round: Bool
](ctx: DeviceContext, run: Run) raises -> Float64:
    """`median_of` what MAX times, `run` making `LAUNCHES`."""

    def seconds() raises {imm} -> Float64:
        return Float64(ctx.execution_time(run, REPLAYS)) / 1e9

    return median_of[every_round](seconds)


def time_captured[
    Enqueue: def(mut Stream, Int) raises -> None,
    //,
    every_round: Bool = False,
](ctx: DeviceContext, enqueue: Enqueue) raises -> Float64:
    """Milliseconds of a launch in a graph that is captured from a stream.

    Parameters:
        Enqueue: Of `enqueue`.
        every_round: Whether to pause before each round, not the first alone.

    Args:
        ctx: The device.
        enqueue: Makes a launch; it is told where, and which, from 0 to
            `LAUNCHES - 1`.
    """
    var first = Stream(ctx)
    enqueue(first, 0)

    def launches(mut stream: Stream) raises {imm}:
        for i in range(LAUNCHES):
            enqueue(stream, i)

    var graph = StreamGraph(ctx, launches)

    def seconds() raises {imm} -> Float64:
        return graph.seconds(REPLAYS)

    return median_of[every_round](seconds)


def time_graph[
    Enqueue: def(DeviceContext, Int) raises -> None,
    //,
    every_round: Bool = False,
](ctx: DeviceContext, enqueue: Enqueue) raises -> Float64:
    """Milliseconds of a launch in a graph that MAX records: no launch begins
    before the last has ended.

    Parameters:
        Enqueue: Of `enqueue`.
        every_round: Whether to pause before each round, not the first alone.

    Args:
        ctx: The device.
        enqueue: Makes a launch; it is told which, from 0 to `LAUNCHES - 1`.
    """
    enqueue(ctx, 0)
    ctx.synchronize()

    def build(mut builder: DeviceGraphBuilder) raises {imm}:
        var recorded = builder.recording_context()
        for i in range(LAUNCHES):
            enqueue(recorded, i)

    var graph = DeviceGraph.create(ctx, build)

    def replay(ctx: DeviceContext) raises {imm}:
        graph.replay()

    return executed_of[every_round](ctx, replay)


def time_stream[
    Enqueue: def(DeviceContext, Int) raises -> None,
    //,
    every_round: Bool = False,
](ctx: DeviceContext, enqueue: Enqueue) raises -> Float64:
    """Milliseconds of a launch, enqueued one by one.

    Parameters:
        Enqueue: Of `enqueue`.
        every_round: As for `time_graph`.

    Args:
        ctx: The device.
        enqueue: As for `time_graph`.
    """

    def run(ctx: DeviceContext) raises {imm}:
        for i in range(LAUNCHES):
            enqueue(ctx, i)

    return executed_of[every_round](ctx, run)
