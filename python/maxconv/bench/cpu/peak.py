"""The peak of a CPU: how fast it multiplies operands that stay in registers.

What multiplies is the instruction that a dense convolution of the type gets on this CPU, in a
register tile of the kernels' size, on the threads of PyTorch's pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from maxconv._native import Multiplier, multiplier
from maxconv.torch._threads import parallel_function

from ..record import Peak

__all__ = ["PeakMeter"]

#: Seconds of a call: a thread that wakes late is no longer seen.
_CALL_S = 0.02

#: Calls of a burst, and the pause before it, as before those of contenders.
_CALLS, _PAUSE_S = 10, 0.01

#: Half the steps of the first call, which is too short to count.
_FIRST_CHUNKS = 64


class PeakMeter:
    """Measures the peak burst by burst, between other measurements; the fastest call counts."""

    def __init__(
        self,
        dtype: str,
        threads: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Builds the loop.

        Args:
            dtype: Of activation and filter.
            threads: How many multiply; PyTorch has no more.
            clock: Returns seconds, for tests.
            sleep: Waits for seconds, for tests.

        Raises:
            LibraryError: It cannot be built; see ``maxconv.library_path``.
        """
        self._loop: Multiplier = multiplier(dtype)
        self._threads = threads
        self._clock, self._sleep = clock, sleep
        self._chunks = 0
        self._calls = 0
        self._best = 0.0

    def burst(self) -> None:
        """Measures some calls."""
        self._sleep(_PAUSE_S)
        if not self._chunks:
            self._chunks = self._enough()
        for _ in range(_CALLS):
            products, seconds = self._call(self._chunks, self._threads)
            self._best = max(self._best, 2 * products / seconds)
            self._calls += 1

    def peak(self) -> Peak | None:
        """Returns what was found, or ``None`` if nothing was measured."""
        if not self._calls:
            return None
        unit = self._loop.unit(self._threads, parallel_function())
        return Peak(unit, self._threads, self._best, self._calls)

    def _call(self, chunks: int, threads: int) -> tuple[int, float]:
        """Returns how many products a call computed, and its seconds."""
        start = self._clock()
        products = self._loop.multiply(chunks, threads, parallel_function())
        return products, self._clock() - start

    def _enough(self) -> int:
        """Returns the steps of a call of about ``_CALL_S``, from what one thread takes alone.

        Several wait for each other where other programs run: that is no work.
        """
        chunks, seconds = _FIRST_CHUNKS, 0.0
        while seconds < _CALL_S / 10:
            chunks *= 2
            seconds = min(self._call(chunks, 1)[1] for _ in range(3))
        return max(1, round(chunks * _CALL_S / seconds))
