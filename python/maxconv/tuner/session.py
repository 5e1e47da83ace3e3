"""A search that measures: rounds of proposals and trials, until a budget is spent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .measure.base import DISPATCHED, Configuration, Measurer, Outcome
from .records import Records
from .search import Search
from .solver import InfeasibleError
from .space import Space, configuration
from .table import Confirmation
from .trials import Candidate, Trial, best, candidate_of

__all__ = ["DISPATCH", "Progress", "Result", "measure_candidates", "tune"]

#: What records call the search that the kernel has itself.
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

    best: Trial | None
    """The fastest configuration, as last measured; None if none ran faster than what dispatch
    chooses."""
    kernel: str
    """What dispatch chooses."""
    dispatch: float
    """Its seconds, as last measured."""
    trials: Sequence[Trial]
    """All of this session and those that it began with."""
    interrupted: bool
    """Whether Ctrl-C ended it."""
    confirmation: Confirmation | None = None
    """The fastest configuration beside what dispatch chooses at the end; None if none ran."""

    @property
    def gain(self) -> float:
        """How many times as fast the best one is."""
        if self.best is None or self.confirmation is None:
            return 1.0
        return self.confirmation.gain[1]


def tune(
    space: Space,
    search: Search,
    measurer: Measurer,
    *,
    budget: int,
    records: Records | None = None,
    tabled: Configuration | None = None,
    name: str = "search",
    seed: int = 0,
    report: Callable[[Progress], None] = lambda progress: None,
    clock: Callable[[], float] = time.monotonic,
) -> Result:
    """Searches a space, beginning with what the kernel itself chooses and with what is recorded.

    Args:
        space: Where to search.
        search: Proposes.
        measurer: Measures.
        budget: Trials.
        records: Where each round is written, and earlier ones are read.
        tabled: What a tuned table has, which is confirmed again.
        name: Of the search, for the records.
        seed: Of the search, for the records.
        report: Is told how far it has come.
        clock: Returns seconds, for tests.

    Raises:
        ValueError: The budget is not positive; or what the kernel itself chooses fails.
        RecordError: The records cannot be written.
    """
    if budget < 1:
        raise ValueError(f"budget: {budget} is not positive; at least 1 trial is needed")
    choice = measurer.choice()
    history = records.trials(space, search.solver) if records is not None else []
    first = _candidate(space, search, choice)
    outcome = measurer.measure([choice], DISPATCHED)[0]
    if outcome.seconds is None or outcome.incumbent is None:
        raise ValueError(f"dispatch: the kernel's own choice fails: {outcome.error}")
    yardstick = outcome.incumbent
    # One yardstick serves all sessions: what the kernel's own choice took first.
    if known := [t.seconds for t in history if t.candidate.key == first.key and t.seconds]:
        yardstick *= known[0] / outcome.seconds
    elif first.counts:
        trial = Trial(first, outcome.seconds, outcome.spread)
        history.append(trial)
        if records is not None:
            records.write(space, [trial], search=DISPATCH, seed=seed)
    started, spent, failed, interrupted = clock(), 0, 0, False
    try:
        while spent < budget and (proposed := search.propose(history)):
            trials = measure_candidates(measurer, space, proposed[: budget - spent], yardstick)
            if records is not None:
                records.write(space, trials, search=name, seed=seed)
            history += trials
            spent += len(trials)
            failed += sum(trial.seconds is None for trial in trials)
            found = best(history)
            report(
                Progress(
                    trials=len(history),
                    budget=budget,
                    spent=spent,
                    baseline=yardstick,
                    best=min(yardstick, (found and found.seconds) or yardstick),
                    invalid=(search.invalid + failed) / search.proposed,
                    seconds_left=(clock() - started) / spent * (budget - spent),
                )
            )
    except KeyboardInterrupt:
        interrupted = True
    ran = sorted((t for t in history if t.seconds is not None), key=lambda t: t.seconds or 0.0)
    leaders = ran[:4]
    if tabled is not None:
        leaders.append(Trial(_candidate(space, search, tabled), yardstick))
    result = _confirmed(space, measurer, leaders, yardstick)
    if records is not None and result.confirmation is not None:
        records.confirm(space, result.confirmation)
    return replace(result, trials=history, interrupted=interrupted)


def _candidate(space: Space, search: Search, values: Configuration) -> Candidate:
    """Returns a configuration as a candidate, without counts if it is not in the space.

    A kernel's own choice may be what its rules leave out: where nothing else fits its caches.
    """
    try:
        return candidate_of(space, search.solver, values)
    except (InfeasibleError, ValueError):
        plain = dict(values)
        return Candidate(plain, {}, tuple(plain[name] for name in space.model.tunables))


def _confirmed(
    space: Space, measurer: Measurer, leaders: Sequence[Trial], yardstick: float
) -> Result:
    """Measures the best few again, then the best of those: of noisy times the least is too low.

    What is told is what the last measurement says, which chose nothing.
    """
    kernel = measurer.dispatched()
    nothing = Result(None, kernel, yardstick, (), False)
    asked = [configuration(space, trial.candidate.values) for trial in leaders]
    # Ratios to what ran beside them, as the machine's speed may have changed meanwhile.
    times = {
        place: outcome.seconds / outcome.incumbent
        for place, outcome in enumerate(measurer.measure(asked, DISPATCHED))
        if outcome.seconds and outcome.incumbent
    }
    if not times:
        return nothing
    place = min(times, key=times.__getitem__)
    outcome: Outcome = measurer.confirm(asked[place])
    confirmation = Confirmation.of(space, asked[place], kernel, outcome)
    if confirmation is None:
        return nothing
    winner = replace(leaders[place], seconds=outcome.seconds, spread=outcome.spread)
    faster = confirmation.gain[1] > 1
    return Result(winner if faster else None, kernel, confirmation.before, (), False, confirmation)


def measure_candidates(
    measurer: Measurer, space: Space, candidates: Sequence[Candidate], yardstick: float
) -> list[Trial]:
    """Measures candidates beside what dispatch chooses.

    Their seconds are as many times the yardstick as they were times what ran beside them: a
    machine's speed changes from round to round, and rounds are compared. The best so far would be a
    bad yardstick: its own time is the luckiest of many, and from round to round the luck would
    multiply.
    """
    trials = []
    asked = [configuration(space, candidate.values) for candidate in candidates]
    for candidate, outcome in zip(candidates, measurer.measure(asked, DISPATCHED), strict=True):
        seconds = outcome.seconds
        if seconds and outcome.incumbent:
            seconds *= yardstick / outcome.incumbent
        trials.append(Trial(candidate, seconds, outcome.spread, outcome.error))
    return trials
