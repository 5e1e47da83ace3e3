"""Searches, the cost model and records, on times that a formula gives."""

from __future__ import annotations

import importlib
import math
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxconv import _cli as cli
from maxconv._problem import ConvProblem
from maxconv._problems import parse_problem
from maxconv.tuner import records as recording
from maxconv.tuner.cost import CostModel, CostSettings, Study
from maxconv.tuner.records import Environment, RecordError, Records
from maxconv.tuner.search import SEARCHES, Search
from maxconv.tuner.search.annealing import Annealing, AnnealingSettings
from maxconv.tuner.search.exhaustive import Exhaustive
from maxconv.tuner.search.genetic import Genetic, GeneticSettings
from maxconv.tuner.search.random import RandomSearch, RandomSettings
from maxconv.tuner.search.tpe import Tpe, TpeSettings
from maxconv.tuner.solver import Solver
from maxconv.tuner.space import Space, open_space
from maxconv.tuner.transfer import Transfer
from maxconv.tuner.trials import Candidate, Trial, best, candidate_of, candidates_of

PROBLEM = parse_problem("1x56x56x64:64x3x3", padding=1)
HERE = Environment("a device", "driver 1", {"maxconv": "0.1.0", "mojo": "1.2"})

#: Of the tests: rounds of few candidates.
SMALL = GeneticSettings(population=24, kept=12, generations=2, measured=12)


@pytest.fixture(scope="module")
def cpu() -> Space:
    return open_space(PROBLEM, "cpu", units=2)


@pytest.fixture(scope="module")
def gpu() -> Space:
    return open_space(PROBLEM, "sm90")


def seconds(candidate: Candidate) -> float:
    """A time that the kernel's model has wrong: it depends on one field more."""
    wrong = abs(math.log2(candidate.values["block_tile_shape.m"] / 96))
    return candidate.predicted * (1 + 0.5 * wrong)


def measured(candidates: list[Candidate]) -> list[Trial]:
    return [Trial(candidate, seconds(candidate)) for candidate in candidates]


def searched(search: Search, trials: int) -> list[Trial]:
    history: list[Trial] = []
    while len(history) < trials and (proposed := search.propose(history)):
        history += measured(proposed)
    return history


def small(name: str, space: Space, seed: int) -> Search:
    if name == "genetic":
        return Genetic(space, seed, CostModel(space, seed), SMALL)
    if name == "random":
        return RandomSearch(space, seed, RandomSettings(12))
    if name == "tpe":
        return Tpe(space, seed, TpeSettings(measured=6, tries=12))
    if name == "annealing":
        return Annealing(space, seed, AnnealingSettings(walks=4))
    return Exhaustive(space, seed)


@pytest.mark.parametrize("name", sorted(SEARCHES.keys() - {"exhaustive"}))
def test_what_is_proposed_is_new_and_a_seed_repeats_it(name: str, gpu: Space) -> None:
    history = searched(small(name, gpu, 1), 24)
    keys = [trial.candidate.key for trial in history]
    assert len(set(keys)) == len(keys) >= 24
    assert not any(gpu.model.violated(trial.candidate.values) for trial in history)
    again = searched(small(name, gpu, 1), 24)
    assert [trial.candidate.key for trial in again] == keys
    other = searched(small(name, gpu, 2), 12)
    assert [trial.candidate.key for trial in other] != keys[: len(other)]


def test_the_genetic_search_beats_random_search(gpu: Space) -> None:
    """By the geometric mean over seeds, after as many trials."""
    gains = []
    for seed in range(6):
        found = [best(searched(small(name, gpu, seed), 48)) for name in ("genetic", "random")]
        times = [trial.seconds for trial in found if trial and trial.seconds]
        gains.append(math.log(times[1] / times[0]))
    assert np.mean(gains) > math.log(1.05)


def test_all_but_tpe_propose_nothing_invalid(gpu: Space) -> None:
    for name in ("genetic", "random", "annealing"):
        search = small(name, gpu, 3)
        searched(search, 12)
        assert search.proposed >= 12
        assert search.invalid == 0
    # It knows no constraints.
    tpe = small("tpe", gpu, 3)
    searched(tpe, 6)
    assert tpe.proposed == 12
    assert tpe.invalid > 6


def test_a_small_space_is_searched_whole() -> None:
    space = open_space(parse_problem("1x2x2x8:16x1x1"), "cpu", units=1)
    search = Exhaustive(space, 1)
    history: list[Trial] = []
    while proposed := search.propose(history):
        history += [Trial(candidate, candidate.predicted) for candidate in proposed]
    assert 1 < len(history) <= space.model.raw_size
    assert len({trial.candidate.key for trial in history}) == len(history)
    for name in ("genetic", "random", "annealing", "tpe"):
        assert small(name, space, 1).propose(history) == []


def test_a_large_space_is_not_searched_whole(gpu: Space) -> None:
    with pytest.raises(ValueError, match="exhaustive takes spaces of up to 10000 configurations"):
        Exhaustive(gpu, 1)


@pytest.mark.parametrize(
    ("settings", "values", "message"),
    [
        (GeneticSettings, {"population": 0}, "population: 0 is not positive"),
        (GeneticSettings, {"kept": 300}, "kept: 300 is more than the population of 200"),
        (GeneticSettings, {"predicted_share": 1.5}, "predicted_share: 1.5 is more than 1"),
        (AnnealingSettings, {"cooling": 1.0}, "cooling: 1.0 is not below 1"),
        (RandomSettings, {"measured": -1}, "measured: -1 is not positive"),
        (CostSettings, {"trees": 0}, "trees: 0 is not positive"),
    ],
)
def test_settings_are_checked(settings: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**values)


def test_the_cost_model_starts_from_the_kernels_own(gpu: Space) -> None:
    candidates = candidates_of(gpu, Solver(gpu.model, 5).samples(20))
    model = CostModel(gpu, 1)
    model.fit([])
    np.testing.assert_allclose(model.predict(candidates), [c.predicted for c in candidates])
    assert (model.valid(candidates) == 1).all()
    assert model.key_variables(8) == []


def error_of(model: CostModel, candidates: list[Candidate]) -> float:
    """The mean of the logarithms' differences."""
    true = np.log([seconds(candidate) for candidate in candidates])
    return float(np.abs(np.log(model.predict(candidates)) - true).mean())


def test_the_cost_model_learns_from_trials_and_from_other_problems(gpu: Space) -> None:
    candidates = candidates_of(gpu, Solver(gpu.model, 6).samples(130))
    trials, rest = measured(candidates[:100]), candidates[100:]
    model = CostModel(gpu, 1)
    model.fit(trials[:2])
    before = error_of(model, rest)
    model.fit(trials)
    assert error_of(model, rest) < before / 2
    # What the formula adds is what it finds.
    assert "block_tile_shape.m" in model.key_variables(3)
    other = open_space(parse_problem("1x28x28x128:128x3x3", padding=1), "sm90")
    taught = CostModel(other, 1, others=[Study(gpu, trials)])
    alone = CostModel(other, 1)
    theirs = candidates_of(other, Solver(other.model, 7).samples(40))
    taught.fit(measured(theirs[:2]))
    alone.fit(measured(theirs[:2]))
    assert error_of(taught, theirs[2:]) < 0.7 * error_of(alone, theirs[2:])
    with pytest.raises(ValueError, match="others: sm90 is not sm100"):
        CostModel(open_space(PROBLEM, "sm100"), 1, others=[Study(gpu, trials)])


def test_other_problems_teach_before_the_first_trial(gpu: Space) -> None:
    """What fails elsewhere is unlikely here, and what is fast elsewhere is proposed first."""
    candidates = candidates_of(gpu, Solver(gpu.model, 6).samples(130))

    def fails(candidate: Candidate) -> bool:
        return candidate.values["consumers"] == 1

    trials = [
        Trial(each, None, error="it crashed") if fails(each) else Trial(each, seconds(each))
        for each in candidates
    ]
    assert 20 < sum(fails(each) for each in candidates) < 110
    other = open_space(parse_problem("1x28x28x128:128x3x3", padding=1), "sm90")
    model = CostModel(other, 1, others=[Study(gpu, trials)])
    model.fit([])
    theirs = candidates_of(other, Solver(other.model, 7).samples(60))
    chances = model.valid(theirs)
    bad = np.array([fails(each) for each in theirs])
    assert chances[bad].max() < 0.5 < chances[~bad].min()
    assert "block_tile_shape.m" in model.key_variables(3)


def test_records_of_other_problems_are_read_nearest_first(tmp_path: Path) -> None:
    def opened(problem: ConvProblem, dtype: str = "float32") -> Space:
        return open_space(problem, "cpu", dtype=dtype, units=1)

    near = parse_problem("1x28x28x64:64x3x3", padding=1)
    far = parse_problem("1x7x7x512:512x1x1")
    own = opened(parse_problem("1x28x28x64:128x3x3", padding=1))
    with Records(tmp_path / "r.sqlite", HERE) as records:
        for space in (opened(far), opened(near), own, opened(near, "bfloat16")):
            drawn = candidates_of(space, Solver(space.model, 1).samples(3))
            trials = [Trial(drawn[0], 1e-3), Trial(drawn[1], None, error="it hung")]
            records.write(space, trials, search="random", seed=1)
        found = Transfer(records).studies(own, opened)
        assert [study.space.problem.filters for study in found] == [64, 512]
        assert all(study.space.dtype == "float32" for study in found)
        assert [trial.error for trial in found[0].trials] == [None, "it hung"]
        [nearest] = Transfer(records, problems=1).studies(own, opened)
        assert nearest.space.problem.numbers() == near.numbers()
    elsewhere = Environment("another device", "driver 1", HERE.versions)
    with Records(tmp_path / "r.sqlite", elsewhere) as records:
        assert Transfer(records).studies(own, opened) == []


def test_failures_teach_what_does_not_run(gpu: Space) -> None:
    candidates = candidates_of(gpu, Solver(gpu.model, 8).samples(120))

    def fails(candidate: Candidate) -> bool:
        return candidate.values["num_act_pipeline_stages"] > 5

    trials = [
        Trial(c, None, error="no launch") if fails(c) else Trial(c, seconds(c))
        for c in candidates[:80]
    ]
    model = CostModel(gpu, 1)
    model.fit(trials)
    valid = model.valid(candidates[80:])
    bad = np.array([fails(candidate) for candidate in candidates[80:]])
    assert bad.any()
    assert not bad.all()
    assert valid[bad].max() < 0.5 < valid[~bad].min()
    fitness = model.fitness(candidates[80:])
    np.testing.assert_allclose(fitness, valid / model.predict(candidates[80:]))


def test_records_are_read_again(cpu: Space, tmp_path: Path) -> None:
    solver = Solver(cpu.model, 1)
    candidates = candidates_of(cpu, solver.samples(4))
    trials = [Trial(c, 1e-3 * (i + 1), spread=0.01) for i, c in enumerate(candidates[:3])]
    trials.append(Trial(candidates[3], None, error="it crashed"))
    path = tmp_path / "records.sqlite"
    with Records(path, HERE) as records:
        records.write(cpu, trials[:2], search="random", seed=7)
        records.write(cpu, trials[2:], search="random", seed=7)
    with Records(path, HERE) as records:
        again = records.trials(cpu, solver)
        assert again == trials
        [first, *_] = records.of(cpu)
        assert (first.search, first.seed, first.spread) == ("random", 7, 0.01)
        # The last measurement of a configuration counts.
        records.write(cpu, [Trial(candidates[0], 5e-3)], search="genetic", seed=8)
        assert records.trials(cpu, solver)[-1] == Trial(candidates[0], 5e-3)
        assert len(records.trials(cpu, solver)) == 4


def test_records_of_other_places_are_kept_and_not_used(cpu: Space, tmp_path: Path) -> None:
    [candidate] = candidates_of(cpu, Solver(cpu.model, 1).samples(1))
    path = tmp_path / "records.sqlite"
    newer = Environment(HERE.device, HERE.driver, {**HERE.versions, "mojo": "1.3"})
    other = Environment("another device", HERE.driver, HERE.versions)
    for environment in (HERE, newer, other):
        with Records(path, environment) as records:
            assert records.of(cpu) == []
            records.write(cpu, [Trial(candidate, 1e-3)], search="random", seed=1)
    with Records(path, HERE) as records:
        assert len(records.of(cpu)) == 1
        assert records.foreign(cpu) == 2
        assert records.problems(cpu) == []
        wider = open_space(parse_problem("1x56x56x64:64x3x3", padding=1), "cpu", units=4)
        assert records.of(wider) == []
        third = open_space(parse_problem("2x30x64:64x3", padding=1), "cpu", units=2)
        [found] = records.problems(third)
        assert found.numbers() == PROBLEM.numbers()


def test_a_process_that_is_killed_loses_one_round(cpu: Space, tmp_path: Path) -> None:
    """The second round's transaction is open when the process ends."""
    path = tmp_path / "records.sqlite"
    [candidate] = candidates_of(cpu, Solver(cpu.model, 1).samples(1))
    with Records(path, HERE) as records:
        records.write(cpu, [Trial(candidate, 1e-3)], search="random", seed=1)
    script = (
        "import os, sqlite3, sys\n"
        "database = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "database.execute('BEGIN IMMEDIATE')\n"
        "database.execute('INSERT INTO trials SELECT NULL, ' + ', '.join(\n"
        "    row[1] for row in database.execute('PRAGMA table_info(trials)') if row[1] != 'id'\n"
        ") + ' FROM trials')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert killed.returncode == -9
    with Records(path, HERE) as records:
        assert len(records.of(cpu)) == 1


def test_files_that_are_no_records(cpu: Space, tmp_path: Path) -> None:
    text = tmp_path / "text.sqlite"
    text.write_text("this is no database, and longer than a header of one " * 40)
    with pytest.raises(RecordError, match="is no file of records: file is not a database"):
        Records(text, HERE)
    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as database:
        database.execute("CREATE TABLE other (a)")
    with pytest.raises(RecordError, match="is a database of another program"):
        Records(foreign, HERE)
    path = tmp_path / "records.sqlite"
    trials = [Trial(c, 1.0) for c in candidates_of(cpu, Solver(cpu.model, 1).samples(64))]
    with Records(path, HERE) as records:
        for _ in range(4):
            records.write(cpu, trials, search="random", seed=1)
    half = tmp_path / "half.sqlite"
    half.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(RecordError, match=r"half\.sqlite is (broken|no file of records)"):
        Records(half, HERE)
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA user_version = {recording.SCHEMA + 1}")
    with pytest.raises(RecordError, match="has schema 4; this version reads schema 3"):
        Records(path, HERE)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        Records(tmp_path / "nowhere" / "records.sqlite", HERE)


def test_a_trial_ran_or_failed(cpu: Space) -> None:
    solver = Solver(cpu.model, 1)
    values = solver.sample()
    candidate = candidate_of(cpu, solver, {name: values[name] for name in cpu.judge.fields})
    assert candidate.key == solver.key(values)
    with pytest.raises(ValueError, match=r"trial: None s with error None; one is needed"):
        Trial(candidate, None)


@pytest.mark.parametrize(("name", "package"), [("genetic", "xgboost"), ("tpe", "optuna")])
def test_a_missing_package_is_told(
    name: str,
    package: str,
    cpu: Space,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    original = importlib.import_module

    def missing(module: str, *arguments: Any) -> Any:
        if module.startswith(package):
            raise ModuleNotFoundError(f"No module named {module!r}", name=package)
        return original(module, *arguments)

    monkeypatch.setattr(importlib, "import_module", missing)
    message = rf"{package} is not installed; pip install 'maxconv\[tune\]'"
    with pytest.raises(ImportError, match=message):
        SEARCHES[name](cpu, 1, ())
    capsys.readouterr()
    problem = ["--conv", "1x8x8x16:16x3x3", "--units", "1"]
    assert cli.main(["tune", *problem, "--search", name]) == 1
    told = capsys.readouterr().err
    assert told == f"maxconv tune: {package} is not installed; pip install 'maxconv[tune]'\n"
