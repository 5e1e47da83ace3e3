"""The tuner's constraint model, its generators, and which buffers live together."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxconv.tuner.generators import (
    bounded_if,
    candidates,
    ceildiv,
    loop_split,
    memory_limit,
    product,
    rounded_up,
    table,
    total,
)
from maxconv.tuner.model import Constraint, Kind, Model, Role, Variable
from maxconv.tuner.rules import Facts
from maxconv.tuner.schedule import Schedule, Stage
from maxconv.tuner.solver import InfeasibleError, Solver

LIMIT = 48 * 1024


def solutions(model: Model) -> set[tuple[int, ...]]:
    """The tunables' values of every assignment that violates nothing, by trying all."""
    domains = [variable.domain for variable in model.variables.values()]
    names = list(model.variables)
    found = set()
    for values in itertools.product(*domains):
        assignment = dict(zip(names, values, strict=True))
        if not model.violated(assignment):
            found.add(tuple(assignment[name] for name in model.tunables))
    return found


@pytest.mark.parametrize(
    ("kind", "operands", "index", "good", "bad"),
    [
        (Kind.PROD, ("a", "b", 2), None, 12, 11),
        (Kind.SUM, ("a", "b", -1), None, 4, 5),
        (Kind.EQ, ("a",), None, 2, 3),
        (Kind.LE, ("b",), None, 3, 4),
        (Kind.IN, (1, 7), None, 7, 2),
        (Kind.SELECT, (9, "b", 11), "i", 3, 9),
    ],
)
def test_what_a_constraint_says(
    kind: Kind, operands: tuple[str | int, ...], index: str | None, good: int, bad: int
) -> None:
    constraint = Constraint(kind, "v", operands, index)
    values = {"a": 2, "b": 3, "i": 1}
    assert constraint.holds({**values, "v": good})
    assert not constraint.holds({**values, "v": bad})


def test_a_model_prints_and_counts_itself() -> None:
    model = Model()
    candidates(model, "tile", (16, 32, 64), "pixels of a tile")
    table(model, "double", "tile", lambda v: 2 * v)
    product(model, "bytes", "tile", "double", why="of a stage")
    model.require(Kind.LE, "bytes", 4096)
    assert model.raw_size == 3
    assert model.counts() == {
        **{"tunable": 1, "place": 1, "derived": 2},
        **{"PROD": 1, "SUM": 0, "EQ": 0, "LE": 1, "IN": 1, "SELECT": 2},
    }
    printed = str(model)
    for line in (
        "  tile in {16, 32, 64}",
        "  bytes in 512..8192",
        "  PROD   bytes = tile * double  (of a stage)",
        "  LE     bytes <= 4096",
        "constraints by kind: 1 PROD, 0 SUM, 0 EQ, 1 LE, 1 IN, 2 SELECT",
        "raw space: 3.000e+00 configurations",
    ):
        assert line in printed.splitlines()


def test_bad_parts_of_a_model_are_named() -> None:
    model = Model()
    candidates(model, "tile", (16, 32))
    with pytest.raises(ValueError, match="tile is there already"):
        candidates(model, "tile", (16,))
    with pytest.raises(ValueError, match="names 'other', which is no variable"):
        model.require(Kind.LE, "tile", "other")
    with pytest.raises(ValueError, match="that of empty is empty"):
        Variable("empty", ())
    with pytest.raises(ValueError, match=r"\(2, 1\) of v is not ascending"):
        Variable("v", (2, 1))
    with pytest.raises(ValueError, match="LE of tile has 2"):
        model.require(Kind.LE, "tile", 1, 2)
    with pytest.raises(ValueError, match="IN of tile takes constants only"):
        model.require(Kind.IN, "tile", "tile")
    with pytest.raises(ValueError, match="fact: 'steps' is not one of filters"):
        Facts({"filters": ((1,),)})["steps"]


def test_what_is_violated_is_said() -> None:
    model = Model()
    candidates(model, "tile", (16, 32))
    model.require(Kind.LE, "tile", 16, why="small")
    assert not model.violated({"tile": 16})
    assert list(map(str, model.violated({"tile": 32}))) == ["tile <= 16  (small)"]
    assert len(model.violated({"tile": 17})) == 3


@settings(deadline=None)
@given(st.integers(1, 40), st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True))
def test_quotients_are_rounded_up(value: int, divisors: list[int]) -> None:
    model = Model()
    candidates(model, "d", divisors)
    ceildiv(model, "q", value, "d")
    solver = Solver(model, 1)
    for divisor in divisors:
        assert solver.sample(fixed={"d": divisor})["q"] == math.ceil(value / divisor)


def test_generators_say_what_they_are_named_for() -> None:
    model = Model()
    candidates(model, "n", (4, 6, 7))
    candidates(model, "flag", (0, 1))
    loop_split(model, "n", "outer", 2)
    assert solutions(model) == {(4, 0), (4, 1), (6, 0), (6, 1)}
    bounded_if(model, "n", "flag", None, 5)
    assert solutions(model) == {(4, 0), (4, 1), (6, 0)}
    rounded_up(model, "whole", "n", 5)
    total(model, "more", "n", "whole")
    drawn = Solver(model, 1).sample(fixed={"n": 6})
    assert (drawn["whole"], drawn["more"], drawn["outer"]) == (10, 16, 3)


def gemm(a: tuple[int, int, int], b: tuple[int, int, int], c: tuple[int, int, int]) -> Model:
    """The shared memory of a GEMM that keeps its part of B for several blocks of rows.

    It loads B, then for each block of rows: A; multiplies, into registers; writes the sums to C,
    and copies C to global memory. The next rows' multiply reads B again.

    Each buffer is rows, width and the offset that keeps rows in different banks, of 2 bytes each.
    """
    model = Model()
    for name, (rows, width, offset) in (("A", a), ("B", b), ("C", c)):
        candidates(model, f"{name}.rows", (rows,))
        candidates(model, f"{name}.offset", (offset,))
        total(model, f"{name}.row", width, f"{name}.offset")
        product(model, name, f"{name}.rows", f"{name}.row", 2)
    stages = (
        Stage("load", writes=("A", "B")),
        Stage("multiply", reads=("A", "B")),
        Stage("write C", writes=("C",)),
        Stage("copy C", reads=("C",)),
        Stage("load next rows", writes=("next A",)),
        Stage("multiply next rows", reads=("next A", "B")),
    )
    sizes: dict[str, str | int] = {"A": "A", "B": "B", "C": "C", "next A": "A"}
    memory_limit(model, Schedule("shared", stages, sizes), LIMIT)
    return model


# Trials of fp16 GEMMs that Heron's release recorded: rows, width and offset of A, B and C; whether
# the device ran them.
TRIALS = [
    ((256, 32, 24), (64, 32, 24), (256, 64, 24), False),
    ((256, 32, 8), (32, 32, 0), (256, 64, 8), True),
    ((256, 32, 8), (64, 32, 24), (256, 64, 0), True),
]


@pytest.mark.parametrize(("a", "b", "c", "ran"), TRIALS)
def test_buffers_that_do_not_live_together_do_not_add_up(
    a: tuple[int, int, int], b: tuple[int, int, int], c: tuple[int, int, int], ran: bool
) -> None:
    model = gemm(a, b, c)
    size_a, size_b, size_c = (2 * rows * (width + offset) for rows, width, offset in (a, b, c))
    # The sum of all refuses what ran.
    assert size_a + size_b + size_c > LIMIT
    assert (max(size_a, size_c) + size_b <= LIMIT) is ran
    solver = Solver(model, 1)
    if ran:
        drawn = solver.sample()
        assert (drawn["A"], drawn["B"], drawn["C"]) == (size_a, size_b, size_c)
    else:
        with pytest.raises(InfeasibleError) as caught:
            solver.sample()
        assert "limit of shared" in str(caught.value)
        assert any(c.target == "shared.in_write C" for c in caught.value.clash)


def test_what_lives_together_in_the_gemm() -> None:
    model = gemm(*TRIALS[0][:3])
    sums = [c for c in model.constraints if c.target.startswith("shared.")]
    assert [(c.kind, c.target, c.operands) for c in sums] == [
        (Kind.SUM, "shared.in_load", ("A", "B")),
        (Kind.LE, "shared.in_load", (LIMIT,)),
        (Kind.SUM, "shared.in_write C", ("B", "C")),
        (Kind.LE, "shared.in_write C", (LIMIT,)),
        (Kind.SUM, "shared.in_load next rows", ("B", "A")),
        (Kind.LE, "shared.in_load next rows", (LIMIT,)),
    ]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Schedules of up to six stages and five buffers."""
    names = [f"b{i}" for i in range(draw(st.integers(1, 5)))]
    written: list[str] = []
    stages = []
    for place in range(draw(st.integers(len(names), 6))):
        new = names[place : place + 1]
        again = draw(st.lists(st.sampled_from(written), max_size=2)) if written else []
        written += new
        reads = draw(st.lists(st.sampled_from(written), max_size=3))
        stages.append(Stage(f"s{place}", tuple({*new, *again}), tuple(set(reads))))
    return Schedule("memory", stages, {name: draw(st.integers(0, 9)) for name in names})


@given(schedules())
def test_a_buffer_lives_from_its_first_write_to_its_last_read(schedule: Schedule) -> None:
    most = 0
    for place in range(len(schedule.stages)):
        live = 0
        for name, size in schedule.sizes.items():
            touched = [
                at
                for at, stage in enumerate(schedule.stages)
                if name in stage.writes or name in stage.reads
            ]
            assert isinstance(size, int)
            live += size * (touched[0] <= place <= touched[-1])
        most = max(most, live)
    peaks = schedule.peaks().values()
    assert max(sum(int(schedule.sizes[name]) for name in names) for names in peaks) == most


def test_bad_schedules_are_named() -> None:
    with pytest.raises(ValueError, match=r"use reads \['A'\], which no stage up to it writes"):
        Schedule("shared", (Stage("use", reads=("A",)),), {})
    with pytest.raises(ValueError, match=r"\['B'\] are not both written"):
        Schedule("shared", (Stage("load", writes=("A",)),), {"A": 1, "B": 2})
    with pytest.raises(ValueError, match="limit: 0 bytes of shared"):
        memory_limit(Model(), Schedule("shared", (Stage("s", writes=("A",)),), {"A": 1}), 0)


def test_places_and_derived_variables_are_not_searched() -> None:
    model = gemm(*TRIALS[1][:3])
    assert {model.variables[name].role for name in model.tunables} == {Role.TUNABLE}
    assert model.raw_size == 1
