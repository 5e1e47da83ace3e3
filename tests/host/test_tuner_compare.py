"""Searches against the same measurements, what is counted of them, and its picture."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.fake_measurer import FakeMeasurer

from maxconv import _cli as cli
from maxconv._problems import parse_problem
from maxconv.tuner import comparing
from maxconv.tuner.command import this_environment
from maxconv.tuner.compare import Comparison, Memo, Race, race, recorded_space, table
from maxconv.tuner.records import Environment, Records, environments
from maxconv.tuner.solver import Solver
from maxconv.tuner.space import Space, open_space
from maxconv.tuner.trials import Candidate, Trial, candidates_of

PROBLEM = "1x28x28x64:64x3x3"


@pytest.fixture(scope="module")
def cpu() -> Space:
    return open_space(parse_problem(PROBLEM), "cpu", units=1)


def timed(candidates: Any) -> list[Trial]:
    return [Trial(each, each.predicted) for each in candidates]


def test_a_configuration_is_measured_once(cpu: Space) -> None:
    asked: list[Candidate] = []

    def measure(candidates: Any) -> list[Trial]:
        asked.extend(candidates)
        return timed(candidates)

    drawn = candidates_of(cpu, Solver(cpu.model, 1).samples(6))
    memo = Memo(measure, timed(drawn[:2]))
    assert memo(drawn[1:4]) == timed(drawn[1:4])
    assert [each.key for each in asked] == [each.key for each in drawn[2:4]]
    memo(drawn)
    assert len(asked) == 4
    assert len(memo) == 6
    assert memo.best == min(each.predicted for each in drawn)
    failed = Memo(lambda each: [], [Trial(drawn[0], None, error="it hung")])
    with pytest.raises(ValueError, match="compare: no configuration has run"):
        _ = failed.best


def test_the_best_are_measured_again(cpu: Space) -> None:
    drawn = candidates_of(cpu, Solver(cpu.model, 1).samples(4))
    # The first one is lucky once, and never again; the second one fails once.
    times: dict[tuple[int, ...], list[float]] = {
        drawn[0].key: [0.1, 3.0, 4.0],
        drawn[1].key: [1.0, 1.5, 0.0],
        drawn[2].key: [5.0],
        drawn[3].key: [6.0],
    }

    def measure(asked: Any) -> list[Trial]:
        found = [times[each.key].pop(0) for each in asked]
        return [
            Trial(each, seconds or None, error=None if seconds else "it hung")
            for each, seconds in zip(asked, found, strict=True)
        ]

    memo = Memo(measure)
    history = memo(drawn)
    assert memo.best == 0.1
    memo.again(2)
    assert memo.best == 1.25
    raced = Race("a", "random", 0, (0.1, 1.0, 5.0, 6.0), 4, 0)
    assert memo.timed(raced, history).seconds == (3.0, 1.25, 5.0, 6.0)
    # There is nothing to measure again.
    nothing = Memo(measure)
    nothing.again(2)
    assert len(nothing) == 0


def test_trials_are_counted_until_one_is_near_the_best() -> None:
    quick = Race("a", "genetic", 0, (3.0, None, 1.04, 1.0), 5, 2)
    slow = Race("b", "genetic", 0, (8.0, 4.0), 2, 0)
    other = Race("a", "random", 0, (1.0,), 1, 0)
    assert quick.trials_to(1.0 / 0.95) == 3
    assert slow.trials_to(2.0 / 0.95) is None
    assert quick.best_so_far() == [3.0, 3.0, 1.04, 1.0]
    assert Race("a", "random", 0, (None, 2.0), 2, 1).best_so_far() == [math.inf, 2.0]
    best = {"a": 1.0, "b": 2.0}
    races = [quick, slow, other]
    genetic, random = (Comparison.of(n, races, best.__getitem__) for n in ("genetic", "random"))
    # The one that did not come there counts with its two trials.
    assert genetic.trials == pytest.approx(math.sqrt(6))
    assert genetic == Comparison("genetic", genetic.trials, 1, 2, 2 / 7)
    assert random == Comparison("random", 1.0, 0, 1, 0.0)
    assert list(table([random, genetic])) == [
        "random: 1.0 trials to 95% of the best known; 0.0 % invalid",
        "genetic: 2.4 trials to 95% of the best known, 2.45 times random's, 1 of 2 not within the "
        "budget; 28.6 % invalid",
    ]


@pytest.mark.parametrize("search", [pytest.param("genetic", marks=pytest.mark.extended), "random"])
def test_a_replay_proposes_what_was_recorded_and_nothing_else(search: str) -> None:
    space = open_space(parse_problem("1x28x28x128:128x3x3", padding=1), "sm90")
    trials = timed(candidates_of(space, Solver(space.model, 2).samples(9)))
    small = recorded_space(space, trials)
    memo = Memo(lambda candidates: pytest.fail("it was not recorded"), trials)
    found, history = race("x", small, search, 1, memo, 50)
    keys = [trial.candidate.key for trial in history]
    assert len(keys) == len(set(keys)) == len(found.seconds) == 9
    assert set(keys) == {trial.candidate.key for trial in trials}
    assert min(each for each in found.seconds if each) == memo.best
    # The space that it is a part of stays as it is.
    assert "recorded" not in space.model.variables
    with pytest.raises(ValueError, match="compare: nothing is recorded of a problem"):
        recorded_space(space, [])


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[FakeMeasurer]:
    made: list[FakeMeasurer] = []

    def make(space: Any, **_: Any) -> FakeMeasurer:
        made.append(FakeMeasurer(space))
        return made[-1]

    monkeypatch.setattr(comparing, "CpuMeasurer", make)
    return made


def test_the_command_compares_and_draws(
    measured: list[FakeMeasurer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, picture = tmp_path / "r.sqlite", tmp_path / "p.svg"
    arguments = ["tune", "--conv", PROBLEM, "--units", "1", "--records", str(path)]
    more = ["--compare", "random", "annealing", "--seeds", "2", "--budget", "12"]
    more += ["--reference", "20", "--plot", str(picture)]
    assert cli.main([*arguments, *more]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        rf"{PROBLEM}: \d+ configurations known; trials: random [\d.]+, annealing [\d.]+", printed[0]
    )
    assert re.match(r"random: [\d.]+ trials to 95% of the best known", printed[1])
    assert re.match(r"annealing: .* times random's.*; 0.0 % invalid$", printed[2])
    assert picture.read_text().startswith("<?xml")
    with Records(path, this_environment()) as records:
        found = [(record.search, record.seed) for record in records.of(measured[0].space)]
    assert {pair: found.count(pair) for pair in found} == {
        ("reference", 0): 20,
        **{(name, seed): 12 for name in ("random", "annealing") for seed in (0, 1)},
    }
    # And from the records alone, as a picture of another format.
    other = tmp_path / "p.png"
    assert cli.main([*arguments, "--plot", str(other)]) == 0
    assert other.read_bytes().startswith(b"\x89PNG")
    assert len(measured) == 1


def test_a_comparison_on_hopper_replays_the_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.sqlite"
    space = open_space(parse_problem(PROBLEM), "sm90")
    there = Environment("a GPU", "driver", {"maxconv": "1"})
    with Records(path, there) as records:
        drawn = candidates_of(space, Solver(space.model, 2).samples(6))
        records.write(space, timed(drawn), search="build", seed=0)
    assert environments(path, "sm90") == [there]
    assert environments(path, "cpu") == []
    arguments = ["tune", "--target", "sm90", "--records", str(path), "--compare", "random"]
    assert cli.main([*arguments, "--conv", PROBLEM, "--conv", "1x9x9x64:64x3x3"]) == 0
    printed = capsys.readouterr()
    assert "replaying what was measured on a GPU" in printed.err
    assert "1x9x9x64:64x3x3: left out: nothing is recorded of it" in printed.err
    assert f"{PROBLEM}: 6 configurations known; trials: random " in printed.out
    assert cli.main([*arguments, "--conv", "1x9x9x64:64x3x3"]) == 1
    assert "has none of these problems" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "random", "--seeds", "0"], "--seeds: 0 is too few"),
        (["--compare", "random", "random"], "--compare: random random names a search twice"),
        (["--target", "sm100", "--compare", "random"], "--compare: nothing is measured for sm100"),
        (["--target", "sm90", "--compare", "random"], "--records: None is no file"),
        (["--plot", "p.svg"], "--records: None is no file; what is recorded is needed"),
        (["--compare", "random", "--plot", "p.doc"], "plot: p.doc does not end with a format"),
        (["--compare", "random", "--plot", "plot"], "plot: plot does not end with a format"),
    ],
)
def test_what_cannot_be_compared(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", "--conv", PROBLEM, *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_picture_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "maxconv.tuner.picture", raising=False)
    monkeypatch.delitem(sys.modules, "maxconv.bench.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = ["tune", "--conv", PROBLEM, "--compare", "random", "--plot", "p.svg"]
    assert cli.main(arguments) == 1
    assert "--plot: matplotlib is not installed; pip install 'maxconv[plot]'" in (
        capsys.readouterr().err
    )


def test_records_without_a_search_are_not_drawn(
    cpu: Space, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.sqlite"
    with Records(path, this_environment()) as records:
        records.write(
            cpu, timed(candidates_of(cpu, [Solver(cpu.model, 1).sample()])), search="x", seed=0
        )
    arguments = ["tune", "--conv", PROBLEM, "--units", "1", "--records", str(path)]
    assert cli.main([*arguments, "--plot", str(tmp_path / "p.svg")]) == 1
    assert f"--records: no search of {PROBLEM} is recorded there" in capsys.readouterr().err
    assert not (tmp_path / "p.svg").exists()
