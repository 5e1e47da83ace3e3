"""Configurations that are proposed, and what measuring them gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .model import Assignment, Role
from .solver import Solver
from .space import Space

__all__ = [
    "Candidate",
    "Trial",
    "best",
    "candidate_of",
    "candidates_of",
    "feature_names",
    "features",
]


@dataclass(frozen=True)
class Candidate:
    """A configuration that the kernel does not refuse."""

    values: Assignment
    """Of all variables of the space."""
    counts: Mapping[str, float]
    """What the kernel says follows from it; the first is its model's time."""
    key: tuple[int, ...]
    """The tunables' values, which tell it from others."""

    @property
    def predicted(self) -> float:
        """The kernel's model's time, in a unit that all candidates of a space share."""
        return next(iter(self.counts.values()))


@dataclass(frozen=True)
class Trial:
    """A candidate that was measured."""

    candidate: Candidate
    seconds: float | None
    """The median; None if it failed."""
    spread: float = 0.0
    """Of the samples: half of the distance of their quartiles, over the median."""
    error: str | None = None
    """Why it failed."""
    samples: Sequence[float] = field(default=(), compare=False)
    """Seconds of each call, if they are kept."""

    def __post_init__(self) -> None:
        if (self.seconds is None) != (self.error is not None):
            raise ValueError(f"trial: {self.seconds} s with error {self.error!r}; one is needed")


def candidates_of(space: Space, assignments: Sequence[Assignment]) -> list[Candidate]:
    """Returns assignments of a space as candidates.

    Raises:
        RuntimeError: The kernel refuses one: the space's rules are looser than the kernel.
    """
    found = []
    for values, judged in zip(assignments, space.judged(assignments), strict=True):
        if judged.refusal is not None:
            raise RuntimeError(f"space: {space.kernel.name.lower()} refuses: {judged.refusal}")
        key = tuple(values[name] for name in space.model.tunables)
        found.append(Candidate(values, judged.counts, key))
    return found


def candidate_of(space: Space, solver: Solver, configuration: Mapping[str, int]) -> Candidate:
    """Returns the candidate of a configuration's fields.

    Raises:
        InfeasibleError: It is not in the space.
    """
    [found] = candidates_of(space, [solver.sample(fixed=configuration)])
    return found


def feature_names(space: Space) -> list[str]:
    """Returns the names of ``features``, sorted."""
    return sorted([*_told(space), *(f"count:{name}" for name in space.judge.counts)])


def _told(space: Space) -> list[str]:
    """Returns the variables whose values say something: those that vary and name no place."""
    return [
        name
        for name, variable in space.model.variables.items()
        if variable.role is not Role.PLACE and len(variable.domain) > 1
    ]


def features(space: Space, candidate: Candidate) -> dict[str, float]:
    """Returns the numbers that a cost model sees: solved variables, and the kernel's counts."""
    found = {name: float(candidate.values[name]) for name in _told(space)}
    return found | {f"count:{name}": value for name, value in candidate.counts.items()}


def best(trials: Sequence[Trial]) -> Trial | None:
    """Returns the fastest trial, or None if none has run."""
    ran = [trial for trial in trials if trial.seconds is not None]
    return min(ran, key=lambda trial: trial.seconds or 0.0, default=None)
