"""A search that measures: rounds of proposals and trials, until a budget is spent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .measure.base import Configuration, Measurer
from .records import Records
from .search import Search
from .solver import InfeasibleError
from .space import Space, configuration
from .trials import Candidate, Trial, best, candidate_of

__all__ = ["DISPATCH", "Progress", "Result", "tune"]

#: What records call the search that chooses without the tuner.
DISPATCH = "dispatch"


@dataclass(frozen=True)
class Progress:
    """How far a search has come, after each round."""

    trials: int
    """Measured, those of earlier sessions included."""
    budget: int
    """Trials of this session."""
    spent: int
    """Of the budget."""
    baseline: float
    """Seconds of what dispatch chooses."""
    best: float
    """Seconds of the best configuration."""
    invalid: float
    """The share of what was proposed that the kernel refuses, or that failed."""
    seconds_left: float
    """Until the budget is spent, at the pace so far."""

    def __str__(self) -> str:
        return (
            f"{self.spent}/{self.budget} trials, best {self.best * 1e6:.1f} us "
            f"({self.baseline / self.best:.2f}x of dispatch's), "
            f"{100 * self.invalid:.1f} % invalid, {self.seconds_left:.0f} s left"
        )


@dataclass(frozen=True)
class Result:
    """What a search found."""

    best: Trial
    """The fastest configuration, as last measured."""
    baseline: Trial
    """What dispatch chooses, measured beside it at the end."""
    trials: Sequence[Trial]
    """All of this session and those that it began with."""
    interrupted: bool
    """Whether Ctrl-C ended it."""

    @property
    def gain(self) -> float:
        """How many times as fast the best one is."""
        return (self.baseline.seconds or 0.0) / (self.best.seconds or 1.0)


def tune(
    space: Space,
    search: Search,
    measurer: Measurer,
    *,
    budget: int,
    records: Records | None = None,
    name: str = "search",
    seed: int = 0,
    report: Callable[[Progress], None] = lambda progress: None,
    clock: Callable[[], float] = time.monotonic,
) -> Result:
    """Searches a space, beginning with what dispatch chooses and with what is recorded.

    Args:
        space: Where to search.
        search: Proposes.
        measurer: Measures.
        budget: Trials.
        records: Where each round is written, and earlier ones are read.
        name: Of the search, for the records.
        seed: Of the search, for the records.
        report: Is told how far it has come.
        clock: Returns seconds, for tests.

    Raises:
        ValueError: The budget is not positive; or what dispatch chooses fails, with which nothing
            can be compared.
        RecordError: The records cannot be written.
    """
    if budget < 1:
        raise ValueError(f"budget: {budget} is not positive; at least 1 trial is needed")
    choice = measurer.choice()
    history = records.trials(space, search.solver) if records is not None else []
    # A kernel's own choice may be what its rules leave out: where nothing else fits its caches.
    try:
        first = candidate_of(space, search.solver, choice)
    except InfeasibleError:
        values = dict(choice)
        first = Candidate(values, {}, tuple(values[name] for name in space.model.tunables))
    baseline = _measured(measurer, space, [first], None)[0]
    if baseline.seconds is None:
        raise ValueError(f"dispatch: its own choice fails: {baseline.error}")
    # One yardstick serves all sessions: what its first measurement was.
    if known := [t for t in history if t.candidate.key == first.key and t.seconds is not None]:
        baseline = known[0]
    elif first.counts:
        history.append(baseline)
        if records is not None:
            records.write(space, [baseline], search=DISPATCH, seed=seed)
    started, spent, failed, interrupted = clock(), 0, 0, False
    try:
        while spent < budget and (proposed := search.propose(history)):
            trials = _measured(measurer, space, proposed[: budget - spent], baseline)
            if records is not None:
                records.write(space, trials, search=name, seed=seed)
            history += trials
            spent += len(trials)
            failed += sum(trial.seconds is None for trial in trials)
            found = best([*history, baseline])
            report(
                Progress(
                    trials=len(history),
                    budget=budget,
                    spent=spent,
                    baseline=baseline.seconds or 0.0,
                    best=(found and found.seconds) or 0.0,
                    invalid=(search.invalid + failed) / search.proposed,
                    seconds_left=(clock() - started) / spent * (budget - spent),
                )
            )
    except KeyboardInterrupt:
        interrupted = True
    return _confirmed(space, measurer, history, baseline, choice, interrupted)


def _confirmed(
    space: Space,
    measurer: Measurer,
    history: Sequence[Trial],
    baseline: Trial,
    choice: Configuration,
    interrupted: bool,
) -> Result:
    """Measures the best few beside the baseline again: of many noisy times the least is too low."""
    ran = sorted((t for t in history if t.seconds is not None), key=lambda t: t.seconds or 0.0)
    leaders = [t for t in ran[:4] if t.candidate.key != baseline.candidate.key]
    if not leaders:
        return Result(baseline, baseline, history, interrupted)
    outcomes = measurer.measure(
        [configuration(space, trial.candidate.values) for trial in leaders], choice
    )
    # Ratios to the baseline beside them, as the machine's speed may have changed meanwhile.
    times = {
        place: outcome.seconds / outcome.incumbent
        for place, outcome in enumerate(outcomes)
        if outcome.seconds and outcome.incumbent
    }
    if not times or min(times.values()) >= 1:
        return Result(baseline, baseline, history, interrupted)
    place = min(times, key=times.__getitem__)
    winner = replace(leaders[place], seconds=outcomes[place].seconds, spread=outcomes[place].spread)
    return Result(
        winner, replace(baseline, seconds=outcomes[place].incumbent), history, interrupted
    )


def _measured(
    measurer: Measurer, space: Space, candidates: Sequence[Candidate], baseline: Trial | None
) -> list[Trial]:
    """Measures candidates beside what dispatch chooses.

    Their seconds are as many times its as they were beside it: a machine's speed changes from round
    to round, and rounds are compared. The best so far would be a bad yardstick: its own time is the
    luckiest of many, and from round to round the luck would multiply.
    """
    incumbent = None if baseline is None else configuration(space, baseline.candidate.values)
    trials = []
    asked = [configuration(space, candidate.values) for candidate in candidates]
    for candidate, outcome in zip(candidates, measurer.measure(asked, incumbent), strict=True):
        seconds = outcome.seconds
        if seconds and outcome.incumbent and baseline is not None and baseline.seconds:
            seconds *= baseline.seconds / outcome.incumbent
        trials.append(Trial(candidate, seconds, outcome.spread, outcome.error))
    return trials
