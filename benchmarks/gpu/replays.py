"""How the peers of the GPU benchmarks are timed: rounds of replays of a CUDA graph of launches."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

LAUNCHES = 32
ROTATED_BYTES = 256 << 20
REPLAYS = 3
ROUNDS = 7
PAUSE = 0.25

Launch = Callable[[int], Tensor]


def input_sets(set_bytes: int) -> int:
    """How many input sets of so many bytes exceed the L2 together, up to one a launch."""
    return max(1, min(LAUNCHES, ROTATED_BYTES // set_bytes + 1))


def time_runs(run: Callable[[], None], launches: int, pause: float = PAUSE) -> list[float]:
    """Milliseconds of a launch in each round, sorted; `run` makes `launches` of them.

    In a pause in front of each round the chip cools: without, long problems reach its power limit.
    """
    for _ in range(REPLAYS):
        run()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        time.sleep(pause)
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(REPLAYS):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / (REPLAYS * launches))
    return sorted(times)


def time_graph(
    launch: Launch, sets: int, launches: int = LAUNCHES, pause: float = PAUSE
) -> list[float]:
    """Times replays of a CUDA graph of launches, each of the next input set; see `time_runs`."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for index in range(sets):
            launch(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    outputs: list[Tensor] = []
    with torch.cuda.graph(graph):
        for index in range(launches):
            outputs.append(launch(index % sets))
            if len(outputs) > sets:
                outputs.pop(0)
    return time_runs(graph.replay, launches, pause)
