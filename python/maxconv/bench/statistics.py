"""Summaries of timings: percentiles of one contender's samples, means of ratios over problems."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Timing", "geometric_mean", "percentile", "summarize"]


@dataclass(frozen=True)
class Timing:
    """What is kept of one contender's timed calls, in seconds.

    ``best_s``, ``p10_s`` and ``p90_s`` are ``None`` in a record that kept its medians alone.
    """

    samples: int
    """Calls, or bursts of calls, that were timed and kept."""
    best_s: float | None
    """The shortest."""
    p10_s: float | None
    """The tenth percentile."""
    median_s: float
    """The median, from which every ratio is made."""
    p90_s: float | None
    """The ninetieth percentile."""

    def per(self, count: int) -> Timing:
        """Returns the time of each of ``count`` equal parts of a call."""

        def share(seconds: float | None) -> float | None:
            return None if seconds is None else seconds / count

        return Timing(
            self.samples,
            best_s=share(self.best_s),
            p10_s=share(self.p10_s),
            median_s=self.median_s / count,
            p90_s=share(self.p90_s),
        )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Returns a percentile of ascending values, interpolated linearly.

    Args:
        ordered: The values, ascending, at least one.
        share: 0 for the smallest, 0.5 for the median, 1 for the largest.

    Raises:
        ValueError: There are no values, or ``share`` is not within 0 and 1.
    """
    if not ordered:
        raise ValueError("samples: none were taken; at least 1 is needed")
    if not 0 <= share <= 1:
        raise ValueError(f"share: {share} is not a share; 0 to 1 is allowed")
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summarize(samples: Iterable[float]) -> Timing:
    """Returns the summary of the seconds that calls took.

    Raises:
        ValueError: There are no samples.
    """
    ordered = sorted(samples)
    return Timing(
        samples=len(ordered),
        best_s=percentile(ordered, 0),
        p10_s=percentile(ordered, 0.1),
        median_s=percentile(ordered, 0.5),
        p90_s=percentile(ordered, 0.9),
    )


def geometric_mean(values: Iterable[float]) -> float:
    """Returns the geometric mean of positive values.

    Raises:
        ValueError: There are none, or one is not positive.
    """
    factors = list(values)
    if not factors or min(factors) <= 0:
        raise ValueError(f"values: {factors} have no geometric mean; positive ones are needed")
    return math.exp(sum(map(math.log, factors)) / len(factors))
