"""What measurements on a GPU say: of each problem, of all, and of rows that a table could get."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..._problems import problem_of
from ..kernels import Judged
from ..records import Environment, Records
from ..space import Space, open_space
from ..trials import Candidate, Trial
from .configurations import NOT_IN_TABLE, Configurations, Listed
from .cover import greedy
from .problems import DTYPE
from .run import RESULTS, Result, Timed, read_results

__all__ = [
    "Gain",
    "Summary",
    "environment_of",
    "gain_of",
    "joined",
    "record",
    "sizes_of",
    "summarize",
]

#: Standard errors by which a gain must exceed 0 to count.
_ERRORS = 2.0

#: The standard deviation of a normal distribution over the distance of its quartiles, and that of
#: the median of many samples over that of their mean.
_DEVIATION, _MEDIAN = 1 / 1.349, math.sqrt(math.pi / 2)

#: Gains smaller than this do not count: clocks and caches differ so much from call to call.
_LEAST = 0.005


@dataclass(frozen=True)
class Gain:
    """How much faster a configuration is than the incumbent."""

    log: float
    """The logarithm of the incumbent's time over the configuration's: of pairs of bursts, the
    median."""
    error: float
    """Its standard error."""

    @property
    def counted(self) -> float:
        """The logarithm where it exceeds the noise, otherwise 0."""
        return self.log if self.log > max(_ERRORS * self.error, _LEAST) else 0.0


def gain_of(timed: Timed) -> Gain:
    """Returns the gain of a configuration that was timed.

    Raises:
        ValueError: It was not, or not beside the incumbent.
    """
    if not timed.bursts or len(timed.bursts) != len(timed.beside):
        raise ValueError(
            f"gain: {len(timed.bursts)} bursts beside {len(timed.beside)} of the incumbent"
        )
    logs = [math.log(b / a) for a, b in zip(timed.bursts, timed.beside, strict=True)]
    middle = statistics.median(logs)
    if len(logs) < 3:
        # Nothing is known of the noise.
        return Gain(middle, math.inf)
    low, _, high = statistics.quantiles(logs, n=4, method="inclusive")
    return Gain(middle, (high - low) * _DEVIATION * _MEDIAN / math.sqrt(len(logs)))


@dataclass(frozen=True)
class Summary:
    """What measurements say together."""

    configurations: Configurations
    results: Sequence[Result]

    @property
    def measured(self) -> list[Result]:
        """The results of problems whose incumbent was timed."""
        return [result for result in self.results if result.error is None]

    def best(self, result: Result, *, new: bool = True) -> tuple[Timed, Gain] | None:
        """Returns the best configuration of a problem, and its gain, or None if none was timed.

        Those that were timed once more count, if there are any: of the others the best one's noise
        has chosen it.

        Args:
            result: Of the problem.
            new: Whether only those count that are not in the hand-written table.
        """
        ran = [each for each in self._ran(result) if not new or self._is_new(each)]
        ran = [each for each in ran if each.final] or ran
        found = [(each, gain_of(each)) for each in ran]
        return max(found, key=lambda pair: pair[1].log, default=None)

    def mean(self, *, new: bool = True) -> float:
        """Returns the geometric mean of what problems gain by their best configurations.

        Gains within the noise count as none. ``new`` is as for ``best``.
        """
        logs = [found[1].counted if (found := self.best(r, new=new)) else 0 for r in self.measured]
        return math.exp(statistics.fmean(logs)) if logs else 1.0

    def rows(self, most: int) -> list[tuple[int, float]]:
        """Returns the new configurations that gain most together, by index.

        With each the geometric mean of what problems gain by it and those before.
        """
        results = self.measured
        gains = np.zeros((len(results), len(self.configurations.listed)))
        for place, result in enumerate(results):
            final = {(t.index, t.split_k) for t in self._ran(result) if t.final}
            for timed in self._ran(result):
                # What was timed once more has no other time.
                if self._is_new(timed) and (
                    timed.final or (timed.index, timed.split_k) not in final
                ):
                    counted = gain_of(timed).counted
                    gains[place, timed.index] = max(gains[place, timed.index], counted)
        chosen = greedy(gains, np.ones(len(results)), most)
        means = [
            float(np.exp(gains[:, chosen[: i + 1]].max(axis=1).mean())) for i in range(len(chosen))
        ]
        return list(zip(chosen, means, strict=True))

    def _ran(self, result: Result) -> list[Timed]:
        return [each for each in result.timed if each.bursts]

    def _is_new(self, timed: Timed) -> bool:
        return self.configurations.listed[timed.index].row == NOT_IN_TABLE

    def lines(self, rows: int) -> list[str]:
        """Returns all for people: a line a problem, and what it comes to.

        Args:
            rows: How many new rows to propose at most.
        """
        found = [self._line(result) for result in self.results]
        errors: dict[str, int] = {}
        for result in self.results:
            for timed in result.timed:
                if timed.error is not None:
                    key = f"configuration {timed.index}: {timed.error.partition(' of ')[0]}"
                    errors[key] = errors.get(key, 0) + 1
        found += [f"{text} ({count} times)" for text, count in sorted(errors.items())]
        found += [
            f"{len(self.measured)} problems; each with its best: {self.mean():.4f}x by new "
            f"configurations, {self.mean(new=False):.4f}x with the table's own rows"
        ]
        for number, (index, mean) in enumerate(self.rows(rows), start=1):
            entry = self.configurations.listed[index]
            found.append(
                f"{number} new rows: {mean:.4f}x with {index} ({entry.origin}): "
                f"{', '.join(map(str, entry.values))}"
            )
        return found

    def _line(self, result: Result) -> str:
        name = f"{result.name} {result.work}"
        if result.error is not None:
            return f"{name}: {result.error}"
        best, own = self.best(result), self.best(result, new=False)
        if best is None:
            return f"{name}: no new configuration was timed"
        timed, gain = best
        before, after = (1e6 * statistics.median(t) for t in (timed.beside, timed.bursts))
        counts = "" if gain.counted else ", within the noise"
        others = f"; of all {math.exp(own[1].log):.3f}x" if own else ""
        return (
            f"{name}: {before:.2f} us, {after:.2f} us by {timed.index}/{timed.split_k}, "
            f"{math.exp(gain.log):.3f}x +- {gain.error:.3f}{counts}{others}"
        )


def summarize(configurations: Configurations, folder: Path) -> Summary:
    """Reads results; of a problem that was measured twice the last ones count.

    Args:
        configurations: Of the build.
        folder: Where the results are.

    Raises:
        ValueError: There are none, a line is no result, or one is of another build.
    """
    path = folder / RESULTS
    if not path.is_file():
        raise ValueError(f"--import: {folder} has no {RESULTS}; a folder of --from is allowed")
    found = {(result.name, result.work): result for result in read_results(path)}
    for result in found.values():
        if any(t.index >= len(configurations.listed) for t in result.timed):
            raise ValueError(f"--import: {path} is of another build")
    return Summary(configurations, list(found.values()))


def joined(parts: Sequence[Summary]) -> Summary:
    """Returns what several builds say together: a problem has the configurations of all.

    Raises:
        ValueError: There is none, or their kernels have different fields.
    """
    if not parts or len({part.configurations.fields for part in parts}) != 1:
        raise ValueError("--import: builds of one kernel are needed, with the same fields")
    listed: dict[tuple[int, ...], Listed] = {}
    for part in parts:
        for entry in part.configurations.listed:
            listed.setdefault(entry.values, entry)
    places = {values: place for place, values in enumerate(listed)}
    found: dict[tuple[str, str], Result] = {}
    for part in parts:
        index = [places[entry.values] for entry in part.configurations.listed]
        for result in part.results:
            timed = [replace(each, index=index[each.index]) for each in result.timed]
            earlier = found.get((result.name, result.work))
            if earlier is not None and earlier.error is None and result.error is None:
                timed = [*earlier.timed, *timed]
            elif earlier is not None and result.error is not None:
                continue
            found[result.name, result.work] = replace(result, timed=timed)
    configurations = Configurations(parts[0].configurations.fields, tuple(listed.values()))
    return Summary(configurations, list(found.values()))


def environment_of(folder: Path) -> Environment:
    """Returns where results were measured.

    Raises:
        ValueError: They do not say.
    """
    about = _about(folder)
    return Environment(about["device"], about["driver"], about["versions"])


def sizes_of(folder: Path) -> tuple[int, int]:
    """Returns multiprocessors and bytes of L2 cache of the device where results were measured.

    Raises:
        ValueError: They do not say.
    """
    about = _about(folder)
    return int(about["units"]), int(about["l2_bytes"])


def _about(folder: Path) -> dict[str, Any]:
    for line in (folder / RESULTS).read_text(encoding="utf-8").splitlines():
        about: dict[str, Any] | None = json.loads(line).get("about")
        if about is not None:
            return about
    raise ValueError(f"--import: {folder / RESULTS} does not say where it was measured")


def record(records: Records, summary: Summary, *, seed: int) -> int:
    """Writes all trials into records; returns how many.

    Args:
        records: The file, of the environment where the trials were measured.
        summary: The trials.
        seed: Of the choice of configurations.
    """
    written = 0
    for result in summary.measured:
        space = open_space(
            problem_of(result.numbers), "sm90", dtype=DTYPE, residual=result.work == "fused"
        )
        every = [
            (t, summary.configurations.configuration(t.index, t.split_k)) for t in result.timed
        ]
        judged = space.judge.judge([values for _, values in every])
        trials = [
            _trial(space, timed, values, found)
            for (timed, values), found in zip(every, judged, strict=True)
        ]
        records.write(space, trials, search="build", seed=seed)
        written += len(trials)
    return written


def _trial(space: Space, timed: Timed, values: dict[str, int], judged: Judged) -> Trial:
    """Returns what was timed as a trial of a search."""
    key = tuple(values[name] for name in space.model.tunables)
    candidate = Candidate(values, judged.counts, key)
    if timed.error is not None:
        return Trial(candidate, None, error=timed.error)
    middle = statistics.median(timed.bursts)
    spread = 0.0
    if len(timed.bursts) > 1:
        low, _, high = statistics.quantiles(timed.bursts, n=4, method="inclusive")
        spread = (high - low) / 2 / middle
    return Trial(candidate, middle, spread)
