"""Searches of a space, which all propose configurations by one interface."""

from __future__ import annotations

from collections.abc import Callable

from ..cost import CostModel
from ..space import Space
from .annealing import Annealing
from .base import Search
from .exhaustive import Exhaustive
from .genetic import Genetic
from .random import RandomSearch
from .tpe import Tpe

__all__ = ["SEARCHES", "Annealing", "Exhaustive", "Genetic", "RandomSearch", "Search", "Tpe"]


def _genetic(space: Space, seed: int) -> Search:
    return Genetic(space, seed, CostModel(space, seed))


#: By name: a space and a seed give a search with its settings' defaults.
SEARCHES: dict[str, Callable[[Space, int], Search]] = {
    "genetic": _genetic,
    "random": RandomSearch,
    "tpe": Tpe,
    "annealing": Annealing,
    "exhaustive": Exhaustive,
}
