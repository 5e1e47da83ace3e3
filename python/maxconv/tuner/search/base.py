"""What all searches are."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence

from ..solver import Solver
from ..space import Space
from ..trials import Candidate, Trial

__all__ = ["Search", "check_positive"]


class Search(ABC):
    """Proposes what to measure next.

    The same seed and the same history give the same proposals.

    Args:
        space: Where to search.
        seed: Of everything random.

    Raises:
        MissingExtraError: A package that it needs is not installed.
    """

    def __init__(self, space: Space, seed: int) -> None:
        self.space = space
        self.random = random.Random(seed)
        self.solver = Solver(space.model, seed)
        self.proposed = 0
        """Configurations that it has come up with."""
        self.invalid = 0
        """Those of them that the kernel would refuse."""

    @abstractmethod
    def propose(self, history: Sequence[Trial]) -> list[Candidate]:
        """Returns candidates that are not in the history; none where nothing is left.

        Args:
            history: All trials so far, the oldest first.

        Raises:
            InfeasibleError: The space is empty.
        """


def check_positive(settings: object) -> None:
    """Raises ``ValueError`` for a number of settings that is not positive."""
    for name, value in vars(settings).items():
        if not isinstance(value, bool) and value <= 0:
            raise ValueError(f"{name}: {value} is not positive")
