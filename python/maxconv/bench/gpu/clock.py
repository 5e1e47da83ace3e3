"""How a GPU's work is timed: replays of a captured graph by events, launches by the host's clock.

``Cuda`` is the clock of a GPU. ``OnHost`` stands in for it where there is none, so that all the
rest runs without a GPU; its times are those of torch's CPU kernels and nobody records them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..device import LAUNCHES, ROTATED_NBYTES
from ..entrant import Mismatch

__all__ = ["Clock", "Cuda", "GraphRun", "Launch", "LaunchRun", "OnHost", "distance", "input_sets"]

#: Enqueues the convolution of an input set, and returns its output, channels second.
Launch = Callable[[int], Tensor]


class Clock(Protocol):
    """A device that torch runs on, and its time."""

    device: str
    """torch's name for it."""

    def synchronize(self) -> None:
        """Waits until the device has done everything."""

    def capture(self, enqueue: Callable[[], Any]) -> Callable[[], None]:
        """Returns what replays the launches that ``enqueue`` makes."""

    def elapsed(self, run: Callable[[], None], times: int) -> float:
        """Returns the device's seconds of so many runs, one after the other."""


class Cuda:
    """The current CUDA device."""

    device = "cuda"

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def synchronize(self) -> None:
        """See ``Clock``."""
        torch.cuda.synchronize()

    def capture(self, enqueue: Callable[[], Any]) -> Callable[[], None]:
        """See ``Clock``."""
        if self._stream is None:
            stream: Any = torch.cuda.Stream
            self._stream = stream()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph, which first frees what torch's allocator keeps: the next operands
        # would have to be allocated anew.
        with torch.cuda.stream(self._stream):
            graph.capture_begin()
            try:
                enqueue()
            finally:
                graph.capture_end()
        return graph.replay

    def elapsed(self, run: Callable[[], None], times: int) -> float:
        """See ``Clock``."""
        torch.cuda.synchronize()
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class OnHost:
    """torch's CPU in the place of a GPU."""

    device = "cpu"

    def synchronize(self) -> None:
        """Does nothing: what was called has ended."""

    def capture(self, enqueue: Callable[[], Any]) -> Callable[[], None]:
        """Returns what makes the launches again."""
        return lambda: enqueue() and None

    def elapsed(self, run: Callable[[], None], times: int) -> float:
        """Returns the host's seconds."""
        begin = time.perf_counter()
        for _ in range(times):
            run()
        return time.perf_counter() - begin


def input_sets(set_nbytes: int) -> int:
    """Returns how many sets of operands exceed the L2 cache together, up to one a launch."""
    return max(1, min(LAUNCHES, ROTATED_NBYTES // set_nbytes + 1))


def distance(output: Tensor, expected: Tensor, tolerance: float) -> float:
    """Returns how far an output lies from the reference, in parts of ``1 + |reference|``.

    Raises:
        Mismatch: Farther than ``tolerance``, or of another shape.
    """
    if output.shape != expected.shape:
        raise Mismatch(f"the output is {tuple(output.shape)}, not {tuple(expected.shape)}")
    worst = float(((output.float() - expected).abs() / (1 + expected.abs())).max())
    # A NaN compares as false, and must not pass.
    if not worst <= tolerance:
        raise Mismatch(f"the output is off by {worst:.2g}; {tolerance:.2g} is allowed")
    return worst


@dataclass
class LaunchRun:
    """Launches made one by one, as a user makes them: the host's time is in it."""

    clock: Clock
    launch: Launch
    sets: int
    convolutions: int = LAUNCHES

    def burst(self, calls: int) -> list[float]:
        """Returns the mean seconds of ``calls`` calls of ``convolutions`` launches."""
        self.clock.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            for index in range(self.convolutions):
                self.launch(index % self.sets)
        self.clock.synchronize()
        return [(time.perf_counter() - begin) / calls]

    def error(self, expected: Tensor, tolerance: float) -> float:
        """See ``Run.error``; ``expected`` is that of the first set."""
        return distance(self.launch(0), expected, tolerance)


class GraphRun:
    """A captured graph of launches, which is replayed: the host's time is not in it."""

    def __init__(
        self, clock: Clock, launch: Launch, sets: int, convolutions: int = LAUNCHES
    ) -> None:
        """Captures the launches, of all sets in turn and of the first set at the end."""
        self.convolutions = convolutions
        self._clock = clock
        self._launch = launch
        self._last: list[Tensor] = []

        def enqueue() -> None:
            outputs: list[Tensor] = []
            for index in reversed(range(convolutions)):
                outputs.append(launch(index % sets))
                # What is dropped here, the graph's later launches write to again.
                del outputs[:-sets]
            self._last = outputs[-1:]

        for index in range(sets):
            launch(index)
        self._replay = clock.capture(enqueue)

    def burst(self, calls: int) -> list[float]:
        """Returns the mean seconds of ``calls`` replays."""
        return [self._clock.elapsed(self._replay, calls) / calls]

    def error(self, expected: Tensor, tolerance: float) -> float:
        """See ``Run.error``; ``expected`` is that of the first set."""
        self._replay()
        self._clock.synchronize()
        try:
            return distance(self._last[0], expected, tolerance)
        except Mismatch as error:
            alone = self._launch(0)
            self._clock.synchronize()
            try:
                distance(alone, expected, tolerance)
            except Mismatch:
                raise Mismatch(f"{error}, also without a graph") from error
            raise Mismatch(f"{error}, and without a graph it is right") from error
