"""Times bursts of calls on a CPU that other processes use too."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Clock"]

#: Times that a disturbed burst is taken again at most.
_RETRIES = 3

#: The share of the least disturbed burst's processors that an undisturbed one has, at least.
_UNDISTURBED = 0.95


class Clock:
    """Times bursts of one call.

    A single thread is timed by its processor's time, which stands still while another process has
    the core. Several threads wait for one another, so that there it is the time on the wall; a
    burst in which they had less of the processors than in others is taken again, and the least
    disturbed one counts.

    Args:
        threads: That run a call.
    """

    def __init__(self, threads: int) -> None:
        self._alone = threads == 1
        self._most = 0.0

    def seconds(self, call: Callable[[], None], calls: int) -> float:
        """Returns the seconds of a call, in a burst of some.

        Args:
            call: Calls.
            calls: How many times.
        """
        best = (-1.0, 0.0)
        for _ in range(1 + _RETRIES):
            wall, processors = self._burst(call, calls)
            if self._alone:
                return processors / calls
            share = processors / wall
            best = max(best, (share, wall / calls))
            self._most = max(self._most, share)
            if share >= _UNDISTURBED * self._most:
                break
        return best[1]

    @staticmethod
    def _burst(call: Callable[[], None], calls: int) -> tuple[float, float]:
        """Returns the seconds of a burst, and those of all threads together."""
        wall, processors = time.perf_counter(), time.process_time()
        for _ in range(calls):
            call()
        return time.perf_counter() - wall, time.process_time() - processors
