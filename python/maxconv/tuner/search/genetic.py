"""The constraint-based genetic algorithm, after Heron (ASPLOS 2023).

A child is a solution of the space with constraints added: each key variable has one of its two
parents' values. A mutation leaves one of these out. So every child satisfies all constraints, and
the solver completes what the key variables leave open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..cost import CostModel
from ..model import Constraint, Kind
from ..solver import ExhaustedError
from ..space import Space
from ..trials import Candidate, Trial, candidates_of
from .base import Search, check_positive

__all__ = ["Genetic", "GeneticSettings"]


@dataclass(frozen=True)
class GeneticSettings:
    """Of the search.

    Raises:
        ValueError: A number is not positive, or more than what it is a part of.
    """

    population: int = 200
    """Candidates of a generation."""
    kept: int = 100
    """Those that survive it, and have children."""
    generations: int = 5
    """Of a round."""
    measured: int = 32
    """Candidates of a round that are measured."""
    predicted_share: float = 0.6
    """Of the measured ones, those of the best predictions; the rest is random."""
    key_variables: int = 8
    """Variables that children inherit."""
    mutation: float = 0.5
    """Probability that a child inherits one variable less."""

    def __post_init__(self) -> None:
        check_positive(self)
        if self.kept > self.population:
            raise ValueError(f"kept: {self.kept} is more than the population of {self.population}")
        for name in ("predicted_share", "mutation"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name}: {getattr(self, name)} is more than 1")


class Genetic(Search):
    """Breeds candidates.

    Args:
        space: As of ``Search``, as ``seed``.
        seed: See there.
        cost: Says which candidates are good, and which variables are key; learns from the history.
        settings: Of the search.
    """

    def __init__(
        self, space: Space, seed: int, cost: CostModel, settings: GeneticSettings | None = None
    ) -> None:
        super().__init__(space, seed)
        self.settings = settings or GeneticSettings()
        self.cost = cost

    def propose(self, history: Sequence[Trial]) -> list[Candidate]:
        """See ``Search``."""
        settings = self.settings
        self.cost.fit(history)
        measured = {trial.candidate.key for trial in history}
        population = self._first(history)
        if all(candidate.key in measured for candidate in population):
            return []
        for _ in range(settings.generations):
            survivors = self._survivors(population)
            known = {candidate.key for candidate in survivors}
            children = self._children(survivors, settings.population - len(survivors))
            new = {child.key: child for child in children if child.key not in known}
            population = [*survivors, *new.values()]
        # Random ones are measured too, so that the model learns where it has not been.
        fresh = [candidate for candidate in population if candidate.key not in measured]
        order = list(np.argsort(-self.cost.fitness(fresh), kind="stable")) if fresh else []
        best = round(settings.predicted_share * settings.measured)
        chosen = [fresh[place] for place in order[:best]]
        rest = [fresh[place] for place in order[best:]]
        self.random.shuffle(rest)
        chosen += rest[: settings.measured - len(chosen)]
        self.proposed += len(chosen)
        return chosen

    def _first(self, history: Sequence[Trial]) -> list[Candidate]:
        """Returns the first generation of a round: the best trials, and samples."""
        ran = [trial for trial in history if trial.seconds is not None]
        ran.sort(key=lambda trial: trial.seconds or 0.0)
        kept = [trial.candidate for trial in ran[: self.settings.kept]]
        missing = self.settings.population - len(kept)
        excluded = [trial.candidate.values for trial in history]
        drawn = self.solver.samples(missing, excluded=excluded)
        return [*kept, *candidates_of(self.space, drawn)]

    def _survivors(self, population: Sequence[Candidate]) -> list[Candidate]:
        """Returns ``kept`` candidates, drawn without replacement by their fitness.

        The fittest one always survives.
        """
        fitness = self.cost.fitness(population)
        # Of exponential variables with these rates the least are such a draw (Efraimidis, Spirakis,
        # "Weighted random sampling with a reservoir", 2006). The square favours the best.
        rates = (fitness / fitness.max()) ** 2
        draws = [self.random.expovariate(max(float(rate), 1e-12)) for rate in rates]
        draws[int(fitness.argmax())] = -1.0
        order = sorted(range(len(population)), key=draws.__getitem__)
        return [population[place] for place in order[: self.settings.kept]]

    def _children(self, parents: Sequence[Candidate], count: int) -> list[Candidate]:
        """Returns children of random pairs of parents."""
        keys = self.cost.key_variables(self.settings.key_variables)
        drawn = []
        for _ in range(count):
            first, second = self.random.choice(parents), self.random.choice(parents)
            # Before the model knows better, any tunables may be key.
            tunables = list(self.space.model.tunables)
            inherited = keys or self.random.sample(
                tunables, min(self.settings.key_variables, len(tunables))
            )
            if self.random.random() < self.settings.mutation:
                inherited = [*inherited]
                inherited.remove(self.random.choice(inherited))
            also = [
                Constraint(
                    Kind.IN,
                    name,
                    tuple(sorted({first.values[name], second.values[name]})),
                    why="inherited",
                )
                for name in inherited
            ]
            # What is not key comes from either parent, as far as that is possible.
            hints = {
                name: self.random.choice((first, second)).values[name]
                for name in self.space.model.tunables
            }
            try:
                drawn.append(self.solver.sample(also=also, hints=hints))
            except ExhaustedError:
                continue
        return candidates_of(self.space, drawn) if drawn else []
