"""Searches of a space, which all propose configurations by one interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..cost import CostModel, Study
from ..space import Space
from .annealing import Annealing
from .base import Search
from .exhaustive import Exhaustive
from .genetic import Genetic
from .random import RandomSearch
from .tpe import Tpe

__all__ = ["SEARCHES", "Annealing", "Exhaustive", "Genetic", "RandomSearch", "Search", "Tpe"]


def _genetic(space: Space, seed: int, others: Sequence[Study]) -> Search:
    return Genetic(space, seed, CostModel(space, seed, others=others))


#: By name: a space, a seed and trials of other problems, which the genetic search's cost model
#: learns from, give a search with its settings' defaults.
SEARCHES: dict[str, Callable[[Space, int, Sequence[Study]], Search]] = {
    "genetic": _genetic,
    "random": lambda space, seed, _: RandomSearch(space, seed),
    "tpe": lambda space, seed, _: Tpe(space, seed),
    "annealing": lambda space, seed, _: Annealing(space, seed),
    "exhaustive": lambda space, seed, _: Exhaustive(space, seed),
}
