"""Optuna's tree-structured Parzen estimator, for comparison.

It does not know the constraints: what it proposes and the kernel refuses is told it as a failure,
counted, and not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._extra import extra
from ..solver import InfeasibleError
from ..space import Space
from ..trials import Candidate, Trial, candidates_of
from .base import Search, check_positive

__all__ = ["Tpe", "TpeSettings"]


@dataclass(frozen=True)
class TpeSettings:
    """Of the search.

    Raises:
        ValueError: A number is not positive.
    """

    measured: int = 8
    """Candidates of a round."""
    tries: int = 64
    """Proposals of a round, at most: most are refused."""
    repaired: bool = True
    """Whether what is missing after as many is drawn near refused proposals, by the solver."""

    def __post_init__(self) -> None:
        check_positive(self)


class Tpe(Search):
    """Asks Optuna.

    Args:
        space: As of ``Search``, as ``seed``.
        seed: See there.
        settings: Of the search.
    """

    def __init__(self, space: Space, seed: int, settings: TpeSettings | None = None) -> None:
        super().__init__(space, seed)
        self.settings = settings or TpeSettings()
        self._optuna = extra("optuna")
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        sampler = self._optuna.samplers.TPESampler(seed=seed)
        self._study = self._optuna.create_study(direction="minimize", sampler=sampler)
        self._asked: dict[tuple[int, ...], Any] = {}
        variables = space.model.variables
        integer = self._optuna.distributions.IntDistribution
        # Domains are ordered: the place in one is what distances are taken of.
        self._domains = {
            name: integer(0, len(variables[name].domain) - 1) for name in space.model.tunables
        }

    def propose(self, history: Sequence[Trial]) -> list[Candidate]:
        """See ``Search``."""
        self._tell(history)
        taken = {trial.candidate.key: trial.candidate.values for trial in history}
        found: list[Candidate] = []
        refused: list[dict[str, int]] = []
        for _ in range(self.settings.tries):
            if len(found) == self.settings.measured:
                break
            asked = self._study.ask(self._domains)
            values = {
                name: self.space.model.variables[name].domain[place]
                for name, place in asked.params.items()
            }
            key = tuple(values[name] for name in self.space.model.tunables)
            self.proposed += 1
            candidate = self._solved(values)
            if candidate is None:
                self.invalid += 1
                refused.append(values)
            if candidate is None or key in taken:
                self._study.tell(asked, state=self._optuna.trial.TrialState.FAIL)
                continue
            taken[key] = candidate.values
            self._asked[key] = asked
            found.append(candidate)
        while self.settings.repaired and refused and len(found) < self.settings.measured:
            try:
                values = self.solver.sample(excluded=taken.values(), hints=refused.pop())
            except InfeasibleError as error:
                if error.clash:
                    raise
                break
            [candidate] = candidates_of(self.space, [values])
            taken[candidate.key] = candidate.values
            found.append(candidate)
        return found

    def _solved(self, values: dict[str, int]) -> Candidate | None:
        """Returns the candidate of proposed values, or None if the kernel refuses them."""
        if self.space.judged([values])[0].refusal is not None:
            return None
        try:
            return candidates_of(self.space, [self.solver.sample(fixed=values)])[0]
        except InfeasibleError:
            # The rules may be tighter than the kernel.
            return None

    def _tell(self, history: Sequence[Trial]) -> None:
        """Tells what became of what was asked, and of what the solver repaired."""
        states = self._optuna.trial.TrialState
        known = {trial.candidate.key: trial for trial in history}
        for key, asked in list(self._asked.items()):
            if (trial := known.get(key)) is not None:
                del self._asked[key]
                if trial.seconds is None:
                    self._study.tell(asked, state=states.FAIL)
                else:
                    self._study.tell(asked, trial.seconds)
