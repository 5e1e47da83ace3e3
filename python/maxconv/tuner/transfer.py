"""What was measured of other problems, for a cost model to begin with."""

from __future__ import annotations

import math
from collections.abc import Callable

from .._problem import ConvProblem
from .cost import Study
from .records import Records
from .solver import Solver
from .space import Space

__all__ = ["Transfer", "distance"]


class Transfer:
    """Reads trials of other problems from records, those of each problem once.

    Args:
        records: The file.
        problems: How many problems teach at most: the nearest ones.
    """

    def __init__(self, records: Records, problems: int = 8) -> None:
        self._records = records
        self._problems = problems
        self._read: dict[tuple[object, ...], Study] = {}

    def studies(self, space: Space, open_one: Callable[[ConvProblem], Space]) -> list[Study]:
        """Returns trials of the problems that are nearest to a space's, the nearest first.

        They are those of the space's kernel and types that were measured on this device with these
        versions, failures included.

        Args:
            space: Whose candidates will be asked about.
            open_one: Opens the space of another problem, of the same kernel and types.
        """
        others = self._records.problems(space)
        others.sort(key=lambda other: distance(space.problem, other))
        found = [self._study(other, space, open_one) for other in others[: self._problems]]
        return [study for study in found if study.trials]

    def _study(
        self, problem: ConvProblem, space: Space, open_one: Callable[[ConvProblem], Space]
    ) -> Study:
        types = (
            space.target,
            space.kernel,
            space.dtype,
            space.out_dtype,
            space.residual,
            space.units,
        )
        key = (space.target, *types, *problem.numbers())
        if key not in self._read:
            other = open_one(problem)
            self._read[key] = Study(other, self._records.trials(other, Solver(other.model, 0)))
        return self._read[key]


def distance(first: ConvProblem, second: ConvProblem) -> float:
    """Returns how far problems are apart: the sum of how many times their sizes differ, in octaves.

    The sizes are those of the matrix products that they are, and the taps.
    """
    sizes = []
    for problem in (first, second):
        gemm = problem.gemm
        sizes.append((gemm.m, gemm.n, gemm.k, gemm.groups, problem.taps))
    return sum(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in zip(*sizes, strict=True))
