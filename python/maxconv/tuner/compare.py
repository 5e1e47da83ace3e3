"""Compares searches: how many trials each needs to come near the best configuration known.

All searches see the same measurements: a configuration is measured once, by whichever search
proposes it first, and has that time for all others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from .model import Kind, Model, Role, Variable
from .search import SEARCHES
from .space import Space
from .trials import Candidate, Trial

__all__ = ["NEAR", "Comparison", "Memo", "Race", "race", "recorded_space", "table"]

#: What a search is to reach of the best configuration's speed.
NEAR = 0.95


class Memo:
    """Trials of one space, each configuration measured once.

    Args:
        measure: Measures candidates.
        known: Trials that were measured before.
    """

    def __init__(
        self,
        measure: Callable[[Sequence[Candidate]], Sequence[Trial]],
        known: Sequence[Trial] = (),
    ) -> None:
        self._measure = measure
        self._known = {trial.candidate.key: trial for trial in known}

    def __call__(self, candidates: Sequence[Candidate]) -> list[Trial]:
        """Returns the trials of candidates; those that are not known are measured together."""
        new = [each for each in candidates if each.key not in self._known]
        if new:
            self._known |= {trial.candidate.key: trial for trial in self._measure(new)}
        return [self._known[each.key] for each in candidates]

    def __len__(self) -> int:
        return len(self._known)

    def again(self, count: int, times: int = 2) -> None:
        """Measures the best configurations again, and gives each the median of its times.

        Of noisy times the least is too low, and the more are measured the more so.

        Args:
            count: How many configurations.
            times: How often.
        """
        ran = [trial for trial in self._known.values() if trial.seconds is not None]
        leaders = sorted(ran, key=lambda trial: trial.seconds or 0.0)[:count]
        if not leaders:
            return
        asked = [trial.candidate for trial in leaders]
        rounds = [leaders, *(self._measure(asked) for _ in range(times))]
        for place, leader in enumerate(leaders):
            seconds = [each[place].seconds for each in rounds]
            kept = [value for value in seconds if value is not None]
            self._known[leader.candidate.key] = replace(leader, seconds=statistics.median(kept))

    def timed(self, found: Race, trials: Sequence[Trial]) -> Race:
        """Returns a race with what its trials' configurations are known to take by now."""
        known = (self._known[trial.candidate.key].seconds for trial in trials)
        return replace(found, seconds=tuple(known))

    @property
    def best(self) -> float:
        """Seconds of the best configuration known.

        Raises:
            ValueError: None has run.
        """
        ran = [trial.seconds for trial in self._known.values() if trial.seconds is not None]
        if not ran:
            raise ValueError("compare: no configuration has run, so that none is the best")
        return min(ran)


@dataclass(frozen=True)
class Race:
    """A search of one problem."""

    problem: str
    search: str
    seed: int
    seconds: tuple[float | None, ...]
    """Of its trials, in their order; None of those that failed."""
    proposed: int
    """Configurations that it came up with."""
    invalid: int
    """Those of them that the kernel refuses, and that failed."""

    def trials_to(self, seconds: float) -> int | None:
        """Returns how many trials it took until one was as fast, or None if none was."""
        for count, each in enumerate(self.seconds, start=1):
            if each is not None and each <= seconds:
                return count
        return None

    def best_so_far(self) -> list[float]:
        """Returns the least seconds after each trial; infinite until one has run."""
        found: list[float] = []
        for each in self.seconds:
            least = found[-1] if found else math.inf
            found.append(least if each is None else min(least, each))
        return found


def race(
    name: str, space: Space, search: str, seed: int, memo: Memo, budget: int
) -> tuple[Race, list[Trial]]:
    """Runs a search that knows nothing, and returns it with its trials.

    Args:
        name: The problem's.
        space: Where to search.
        search: A name of ``SEARCHES``.
        seed: Of the search.
        memo: What configurations take.
        budget: Trials, at most: fewer where nothing is left to propose.

    Raises:
        ValueError: The search cannot take the space.
    """
    made = SEARCHES[search](space, seed, ())
    history: list[Trial] = []
    while len(history) < budget and (proposed := made.propose(history)):
        history += memo(proposed[: budget - len(history)])
    failed = sum(trial.seconds is None for trial in history)
    found = Race(
        name,
        search,
        seed,
        tuple(trial.seconds for trial in history),
        made.proposed,
        made.invalid + failed,
    )
    return found, history


@dataclass(frozen=True)
class Comparison:
    """What races say of one search."""

    search: str
    trials: float
    """To come near the best, the geometric mean over problems and seeds. A race that did not come
    there counts with the trials that it had: it would need more."""
    late: int
    """How many races did not."""
    races: int
    invalid: float
    """The share of what was proposed that the kernel refuses, or that failed."""

    @classmethod
    def of(cls, search: str, races: Sequence[Race], best: Callable[[str], float]) -> Comparison:
        """Returns what the races of a search say.

        Args:
            search: Its name.
            races: Of all searches.
            best: Returns the best seconds known of a problem.
        """
        own = [each for each in races if each.search == search]
        counts = [each.trials_to(best(each.problem) / NEAR) for each in own]
        logs = [
            math.log(count or max(1, len(each.seconds)))
            for count, each in zip(counts, own, strict=True)
        ]
        return cls(
            search,
            math.exp(statistics.fmean(logs)),
            counts.count(None),
            len(own),
            sum(each.invalid for each in own) / max(1, sum(each.proposed for each in own)),
        )


def table(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yields a line for each search, and how many times the first one's trials the others take."""
    first = comparisons[0]
    for each in comparisons:
        text = f"{each.search}: {each.trials:.1f} trials to {NEAR:.0%} of the best known"
        if each is not first:
            text += f", {each.trials / first.trials:.2f} times {first.search}'s"
        if each.late:
            text += f", {each.late} of {each.races} not within the budget"
        yield f"{text}; {100 * each.invalid:.1f} % invalid"


def recorded_space(space: Space, trials: Sequence[Trial]) -> Space:
    """Returns a space of nothing but what was recorded: a search replays it.

    Args:
        space: The whole space.
        trials: Of some of its configurations.

    Raises:
        ValueError: There are none.
    """
    keys = sorted({trial.candidate.key for trial in trials})
    if not keys:
        raise ValueError("compare: nothing is recorded of a problem that is to be replayed")
    whole = space.model
    model = Model(dict(whole.variables), list(whole.constraints), list(whole.tunables))
    place = model.add(Variable("recorded", range(len(keys)), Role.PLACE))
    for name, values in zip(model.tunables, zip(*keys, strict=True), strict=True):
        known = model.variables[name]
        model.variables[name] = replace(known, domain=tuple(sorted(set(values))))
        model.require(Kind.SELECT, name, *values, index=place, why="recorded")
    return replace(space, model=model)
