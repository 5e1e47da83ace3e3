"""Simulated annealing.

Several walks go to neighbours that are better, or, less and less often, worse: Kirkpatrick, Gelatt,
Vecchi, "Optimization by Simulated Annealing", Science 220, 1983. How much worse is the logarithm of
the ratio of the times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..model import Assignment
from ..solver import InfeasibleError
from ..space import Space
from ..trials import Candidate, Trial, candidates_of
from .base import Search, check_positive

__all__ = ["Annealing", "AnnealingSettings"]

_TRIES = 32
"""Changes of a walk before it starts anew."""


@dataclass(frozen=True)
class AnnealingSettings:
    """Of the search.

    Raises:
        ValueError: A number is not positive, or ``cooling`` is not below 1.
    """

    walks: int = 8
    """At a time: a candidate of each is measured in a round."""
    temperature: float = 0.3
    """At the start: by so much worse is gone to with a probability of 1/e."""
    cooling: float = 0.93
    """What the temperature is multiplied with after each round."""

    def __post_init__(self) -> None:
        check_positive(self)
        if self.cooling >= 1:
            raise ValueError(f"cooling: {self.cooling} is not below 1")


class Annealing(Search):
    """Walks through the space.

    Args:
        space: As of ``Search``, as ``seed``.
        seed: See there.
        settings: Of the search.
    """

    def __init__(self, space: Space, seed: int, settings: AnnealingSettings | None = None) -> None:
        super().__init__(space, seed)
        self.settings = settings or AnnealingSettings()
        self._temperature = self.settings.temperature
        self._places: list[Trial | None] = [None] * self.settings.walks
        self._asked: list[Candidate] = []

    def propose(self, history: Sequence[Trial]) -> list[Candidate]:
        """See ``Search``."""
        self._move(history)
        taken = {trial.candidate.key: trial.candidate.values for trial in history}
        found: list[Candidate] = []
        for place in self._places:
            values = self._neighbour(place, taken)
            if values is None:
                break
            [candidate] = candidates_of(self.space, [values])
            taken[candidate.key] = candidate.values
            found.append(candidate)
        self.proposed += len(found)
        self._asked = found
        return found

    def _move(self, history: Sequence[Trial]) -> None:
        """Goes where the last round's trials allow."""
        trials = {trial.candidate.key: trial for trial in history}
        for walk, candidate in enumerate(self._asked):
            trial = trials.get(candidate.key)
            if trial is None or trial.seconds is None:
                continue
            place = self._places[walk]
            worse = 0.0 if place is None else math.log(trial.seconds / (place.seconds or 1.0))
            if worse <= 0 or self.random.random() < math.exp(-worse / self._temperature):
                self._places[walk] = trial
        if self._asked:
            self._temperature *= self.settings.cooling

    def _neighbour(
        self, place: Trial | None, taken: dict[tuple[int, ...], Assignment]
    ) -> dict[str, int] | None:
        """Returns an assignment that differs in a tunable, and in what that makes necessary."""
        if place is not None:
            here = place.candidate.values
            hints = {name: here[name] for name in self.space.model.tunables}
            for _ in range(_TRIES):
                name = self.random.choice(self.space.model.tunables)
                others = [v for v in self.space.model.variables[name].domain if v != here[name]]
                if not others:
                    continue
                try:
                    fixed = {name: self.random.choice(others)}
                    found = self.solver.sample(fixed=fixed, hints=hints)
                except InfeasibleError:
                    continue
                if self.solver.key(found) not in taken:
                    return found
        drawn = self.solver.samples(1, excluded=taken.values())
        return drawn[0] if drawn else None
