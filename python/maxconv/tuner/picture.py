"""A picture of searches: the best so far over trials."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot

# It chooses matplotlib's backend, which needs no display.
from ..bench.plot import check_format
from .compare import NEAR, Race
from .search import SEARCHES

__all__ = ["check_format", "curves", "draw"]

_COLORS = dict(zip(SEARCHES, ("#d62728", "#7f7f7f", "#1f77b4", "#2ca02c", "#9467bd"), strict=True))


def curves(races: Sequence[Race], best: Mapping[str, float]) -> dict[str, list[float]]:
    """Returns each search's best so far, as a share of the best known: the mean of its races.

    It is the geometric mean over races, from the trial on at which each has run something. Those
    that ended earlier count with their last value.

    Args:
        races: Of one or several problems and seeds.
        best: The best seconds known, by problem.
    """
    found: dict[str, list[float]] = {}
    for search in dict.fromkeys(each.search for each in races):
        own = [
            [best[each.problem] / seconds for seconds in each.best_so_far()]
            for each in races
            if each.search == search and each.seconds
        ]
        length = max(map(len, own), default=0)
        shares = [line + line[-1:] * (length - len(line)) for line in own]
        found[search] = [_mean(column) for column in zip(*shares, strict=True)]
    return found


def _mean(shares: Sequence[float]) -> float:
    """Returns the geometric mean, or NaN where a race has run nothing yet."""
    if not all(shares):
        return math.nan
    return math.exp(math.fsum(map(math.log, shares)) / len(shares))


def draw(races: Sequence[Race], best: Mapping[str, float], path: Path) -> None:
    """Draws searches to a file; its name's ending says the format.

    Args:
        races: Of one or several problems, searches and seeds.
        best: The best seconds known, by problem.
        path: The file.

    Raises:
        ValueError: There is no race, or the format is not known.
        OSError: The file cannot be written.
    """
    check_format(path)
    if not races:
        raise ValueError("plot: there is no search to draw")
    canvas, axis = pyplot.subplots(figsize=(8.0, 4.5), layout="constrained")
    for each in races:
        shares = [best[each.problem] / seconds for seconds in each.best_so_far()]
        _line(axis, shares, color=_COLORS[each.search], linewidth=0.6, alpha=0.25)
    for search, mean in curves(races, best).items():
        count = sum(each.search == search for each in races)
        _line(axis, mean, color=_COLORS[search], linewidth=2, label=f"{search} ({count})")
    axis.axhline(NEAR, color="0.6", linewidth=1, linestyle="--")
    axis.set_xscale("log")
    axis.set_xlabel("trials")
    axis.set_ylabel("speed of the best so far, of the best known")
    axis.set_ylim(0.4, 1.02)
    axis.grid(color="0.92")
    axis.set_axisbelow(True)
    axis.legend(loc="lower right", frameon=False)
    names = list(dict.fromkeys(each.problem for each in races))
    axis.set_title(names[0] if len(names) == 1 else f"{len(names)} convolutions, geometric mean")
    canvas.savefig(path, dpi=200)
    pyplot.close(canvas)


def _line(axis: Any, shares: Sequence[float], **style: Any) -> None:
    axis.step(range(1, len(shares) + 1), shares, where="post", **style)
