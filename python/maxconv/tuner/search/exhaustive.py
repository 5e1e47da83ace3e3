"""Exhaustive search of a small space: every configuration once, in random order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..space import Space
from ..trials import Candidate, Trial
from .base import Search, check_positive
from .random import RandomSearch, RandomSettings

__all__ = ["Exhaustive", "ExhaustiveSettings"]


@dataclass(frozen=True)
class ExhaustiveSettings:
    """Of the search.

    Raises:
        ValueError: A number is not positive.
    """

    measured: int = 32
    """Candidates of a round."""
    largest: int = 10_000
    """The raw size of the largest space that is searched so."""

    def __post_init__(self) -> None:
        check_positive(self)


class Exhaustive(Search):
    """Proposes everything.

    Args:
        space: As of ``Search``, as ``seed``.
        seed: See there.
        settings: Of the search.

    Raises:
        ValueError: The space is too large.
    """

    def __init__(self, space: Space, seed: int, settings: ExhaustiveSettings | None = None) -> None:
        super().__init__(space, seed)
        self.settings = settings or ExhaustiveSettings()
        if space.model.raw_size > self.settings.largest:
            raise ValueError(
                f"search: exhaustive takes spaces of up to {self.settings.largest} configurations "
                f"before constraints; here {space.model.raw_size}"
            )
        self._samples = RandomSearch(space, seed, RandomSettings(self.settings.measured))

    def propose(self, history: Sequence[Trial]) -> list[Candidate]:
        """See ``Search``."""
        found = self._samples.propose(history)
        self.proposed += len(found)
        return found
