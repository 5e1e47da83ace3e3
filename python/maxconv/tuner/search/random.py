"""Random search: samples of the solver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..space import Space
from ..trials import Candidate, Trial, candidates_of
from .base import Search, check_positive

__all__ = ["RandomSearch", "RandomSettings"]


@dataclass(frozen=True)
class RandomSettings:
    """Of the search.

    Raises:
        ValueError: A number is not positive.
    """

    measured: int = 32
    """Candidates of a round."""

    def __post_init__(self) -> None:
        check_positive(self)


class RandomSearch(Search):
    """Proposes samples of the space.

    Args:
        space: As of ``Search``, as ``seed``.
        seed: See there.
        settings: Of the search.
    """

    def __init__(self, space: Space, seed: int, settings: RandomSettings | None = None) -> None:
        super().__init__(space, seed)
        self.settings = settings or RandomSettings()

    def propose(self, history: Sequence[Trial]) -> list[Candidate]:
        """See ``Search``."""
        excluded = [trial.candidate.values for trial in history]
        drawn = self.solver.samples(self.settings.measured, excluded=excluded)
        self.proposed += len(drawn)
        return candidates_of(self.space, drawn)
