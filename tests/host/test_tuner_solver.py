"""Samples of constraint models."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from maxconv.tuner.generators import candidates, product, total
from maxconv.tuner.model import Constraint, Kind, Model
from maxconv.tuner.solver import ExhaustedError, InfeasibleError, Solver


def rectangle(least: int = 12) -> Model:
    """Sides of a rectangle of an area from ``least`` to 40."""
    model = Model()
    candidates(model, "a", range(1, 11))
    candidates(model, "b", range(1, 11))
    product(model, "area", "a", "b")
    model.require(Kind.LE, "area", 40, why="small")
    total(model, "room", "area", 1 - least)
    candidates(model, "one", (1,))
    model.require(Kind.LE, "one", "room", why="large")
    return model


def allowed(least: int = 12) -> set[tuple[int, int]]:
    return {(a, b) for a in range(1, 11) for b in range(1, 11) if least <= a * b <= 40}


def sides(drawn: list[dict[str, int]]) -> list[tuple[int, int]]:
    return [(values["a"], values["b"]) for values in drawn]


def test_samples_satisfy_the_model_and_differ() -> None:
    model = rectangle()
    drawn = Solver(model, 3).samples(30)
    assert len(set(sides(drawn))) == 30
    assert not any(model.violated(values) for values in drawn)


def test_a_seed_gives_its_samples() -> None:
    def drawn(seed: int) -> list[tuple[int, int]]:
        return sides(Solver(rectangle(), seed).samples(10))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_samples_spread_over_the_space() -> None:
    """Of all sides that are allowed most are drawn within as many samples, without exclusion."""
    solver = Solver(rectangle(), 5)
    drawn = set(sides([solver.sample() for _ in range(len(allowed()))]))
    assert len(drawn) > len(allowed()) / 3


def test_a_small_space_is_drawn_whole() -> None:
    drawn = Solver(rectangle(30), 1).samples(1000)
    assert set(sides(drawn)) == allowed(30)
    assert len(drawn) == len(allowed(30))
    with pytest.raises(ExhaustedError, match=f"excluded, of which there are {len(drawn)}"):
        Solver(rectangle(30), 2).sample(excluded=drawn)


def test_what_is_excluded_is_not_drawn() -> None:
    first = Solver(rectangle(), 1).samples(10)
    second = Solver(rectangle(), 1).samples(10, excluded=first)
    assert not set(sides(first)) & set(sides(second))


def test_values_that_are_asked_for() -> None:
    solver = Solver(rectangle(), 1)
    assert solver.sample(fixed={"a": 9})["a"] == 9
    # Hints are followed as far as they go.
    assert sides([solver.sample(hints={"a": 5, "b": 8})]) == [(5, 8)]
    assert solver.sample(hints={"a": 10, "b": 10})["area"] <= 40
    also = [Constraint(Kind.EQ, "area", (36,))]
    assert sides([solver.sample(also=also)])[0] in {(4, 9), (6, 6), (9, 4)}


def test_clashing_constraints_are_named() -> None:
    with pytest.raises(InfeasibleError) as caught:
        Solver(rectangle(41), 1).sample()
    message = str(caught.value)
    assert "area <= 40  (small)" in message
    assert "one <= room  (large)" in message
    assert "room = area + -40" in message
    assert {c.kind for c in caught.value.clash} == {Kind.LE, Kind.SUM}
    with pytest.raises(InfeasibleError, match=r"a = 1  \(asked for\)"):
        Solver(rectangle(), 1).sample(fixed={"a": 1})


def test_bad_arguments_are_named() -> None:
    solver = Solver(rectangle(), 1)
    with pytest.raises(ValueError, match="fixed: 'area' is no tunable variable"):
        solver.sample(fixed={"area": 4})
    with pytest.raises(ValueError, match="hints: 11 is no value of a in"):
        solver.sample(hints={"a": 11})
    with pytest.raises(ValueError, match="count: 0 is not positive"):
        solver.samples(0)


def test_a_missing_solver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, *arguments: Any) -> Any:
        if name.startswith("ortools"):
            raise ModuleNotFoundError(f"No module named {name!r}", name="ortools")
        return original(name, *arguments)

    original = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(
        ImportError, match=r"ortools is not installed; pip install 'maxconv\[tune\]'"
    ):
        Solver(rectangle(), 1)
