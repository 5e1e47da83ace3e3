"""Measuring configurations on a GPU, without one: the folder, the driver, and what results say."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from maxconv import _cli as cli
from maxconv._problems import find_problem, problem_of
from maxconv._program import LIBRARIES, ProgramError
from maxconv.tuner.gpu.assembler import assemble, assembling
from maxconv.tuner.gpu.configurations import (
    NOT_IN_TABLE,
    Configurations,
    Listed,
    without_split,
)
from maxconv.tuner.gpu.cover import greedy
from maxconv.tuner.gpu.folder import MANIFEST, PROGRAM, Folder, Task, read_folder, write_folder
from maxconv.tuner.gpu.results import Summary, gain_of, joined, summarize
from maxconv.tuner.gpu.run import RESULTS, Protocol, Result, Timed, measure, read_results

FAKE = Path(__file__).parents[1] / "fake_tuned.py"
QUICK = Protocol(rounds=3, final_rounds=5, finalists=1, timeout_s=20)
FIELDS = ("tile", "stages")
LISTED = Configurations(
    FIELDS, (Listed((64, 2), 7), *(Listed((64, i), origin="dressed") for i in range(3, 10)))
)


def task(name: str, count: int = 5) -> Task:
    candidates = tuple((index, 1, 1.0) for index in range(count))
    return Task(name, (1,) * 22, 2, f"problem {name}", 4, candidates)


def built(
    folder: Path, *tasks: Task, faults: Mapping[str, str] | None = None, **times: float
) -> Folder:
    """Writes a folder whose program is a fake."""
    (folder / LIBRARIES).mkdir(parents=True)
    program = folder / PROGRAM
    given = {
        "FAKE_FAULTS": json.dumps(faults or {}),
        "FAKE_TIMES": json.dumps({name[1:]: value for name, value in times.items()}),
        "FAKE_LOG": str(folder / "asked"),
    }
    exports = "".join(f"export {name}='{value}'\n" for name, value in given.items())
    program.write_text(f'#!/bin/sh\n{exports}exec "{sys.executable}" "{FAKE}"\n')
    program.chmod(0o755)
    write_folder(folder, Folder("now", {"maxconv": "1"}, LISTED, tasks or (task("a"),)))
    return read_folder(folder)


def run(folder: Path, held: Folder, protocol: Protocol = QUICK, minutes: float = 5) -> int:
    return measure(folder, held, folder / "out", minutes=minutes, protocol=protocol, workers=0)


def results(folder: Path) -> list[Result]:
    return read_results(folder / "out" / RESULTS)


def errors(result: Result) -> dict[int, str]:
    return {timed.index: timed.error for timed in result.timed if timed.error is not None}


# The driver.


def test_what_is_measured(tmp_path: Path) -> None:
    held = built(tmp_path / "f", t1=0.5, t2=3.0)
    assert run(tmp_path / "f", held) == 0
    (result,) = results(tmp_path / "f")
    assert (result.incumbent, result.device, result.error) == ((0, 1), "a fake", None)
    assert [timed.index for timed in result.timed] == [0, 1, 2, 3, 4, 1]
    by_index = {timed.index: timed for timed in result.timed if not timed.final}
    assert by_index[1].bursts == pytest.approx([5e-6] * 3)
    assert by_index[1].beside == pytest.approx([1e-5] * 3)
    # It is hopeless.
    assert by_index[2].bursts == pytest.approx([3e-5])
    final = result.timed[-1]
    assert (final.final, len(final.bursts), len(final.beside)) == (True, 5, 5)
    # A burst takes a millisecond at least: 4 launches of 10 us, 25 times.
    asked = (tmp_path / "f" / "asked").read_text()
    assert "replay 0 25\n" in asked
    assert "prepare 1 1 bare 4\n" in asked


def test_a_failure_loses_one_configuration(tmp_path: Path) -> None:
    faults = {"1": "crash", "2": "lost", "3": "refused", "4": "wrong", "5": "error", "6": "hang"}
    held = built(tmp_path / "f", task("a", 8), faults=faults, t7=0.5)
    assert run(tmp_path / "f", held, replace(QUICK, timeout_s=1.0)) == 0
    (result,) = results(tmp_path / "f")
    assert errors(result) == {
        1: "the program ended with -11: it said nothing",
        2: "CUDA: an illegal address",
        3: "refused: too large",
        4: "wrong: 3 of 9 elements",
        5: "no memory",
        6: "the program ended with -9: it said nothing",
    }
    assert [timed.index for timed in result.timed if timed.bursts] == [0, 7, 7]
    # Behind a crash, a lost GPU and a hang it started anew.
    assert (tmp_path / "f" / "asked").read_text().count("problem a\n") == 4


def test_what_ends_the_program_has_two_chances(tmp_path: Path) -> None:
    tasks = [task(name, 3) for name in "abcd"]
    held = built(tmp_path / "f", *tasks, faults={"1": "crash"})
    assert run(tmp_path / "f", held) == 0
    found = [errors(result) for result in results(tmp_path / "f")]
    assert found[:2] == [{1: "the program ended with -11: it said nothing"}] * 2
    assert found[2:] == [{1: "it ended the program 2 times before"}] * 2
    assert all(result.timed[2].bursts for result in results(tmp_path / "f"))


def test_a_problem_without_memory_is_passed_over(tmp_path: Path) -> None:
    held = built(tmp_path / "f", task("a"), task("b"), faults={"problem a": "error"})
    assert run(tmp_path / "f", held) == 0
    found = results(tmp_path / "f")
    assert [result.error for result in found] == ["no memory", None]
    assert not found[0].timed


def test_it_goes_on_where_it_ended(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    held = built(folder, task("a"), task("b"), task("c"))
    clock = iter([0.0, 0.0, 0.0, 0.0, 100.0])
    left = measure(
        folder,
        held,
        folder / "out",
        minutes=1,
        protocol=QUICK,
        workers=0,
        clock=lambda: next(clock),
    )
    assert left == 2
    path = folder / "out" / RESULTS
    # It was killed while it wrote the next one.
    path.write_text(path.read_text() + '{"name": "b", "num')
    assert [result.name for result in results(folder)] == ["a"]
    assert run(folder, held) == 0
    assert [result.name for result in results(folder)] == ["a", "b", "c"]
    asked = (folder / "asked").read_text()
    assert run(folder, held) == 0
    assert (folder / "asked").read_text() == asked


def test_kernels_are_assembled_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maxconv.tuner.gpu.run.find_assembler", lambda: "/usr/bin/ptxas")
    folder = tmp_path / "f"
    held = built(folder, task("a", 1))
    texts: list[str] = []
    arguments = {"minutes": 1.0, "protocol": QUICK, "report": texts.append, "workers": 2}
    assert measure(folder, held, folder / "out", **arguments) == 0  # type: ignore[arg-type]
    assert texts[0].startswith("assembled 8 of 8 configurations in ")
    asked = (folder / "asked").read_text().splitlines()
    assert sorted(asked[:8]) == [f"load {index}" for index in range(8)]
    assert (folder / "cubins" / "ptxas").is_file()
    held = built(tmp_path / "g", faults={"start": "x"})
    with pytest.raises(ProgramError, match="no GPU"):
        measure(tmp_path / "g", held, tmp_path / "out", **arguments)  # type: ignore[arg-type]
    assert texts[-1].startswith("assembled 0 of 8 configurations in ")
    assert texts[-1].endswith(" s; failed: no GPU")


def test_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "f"
    held = built(folder, faults={"start": "x"})
    with pytest.raises(ProgramError, match="no GPU"):
        run(folder, held)
    command = ["tune", "--target", "sm90", "--from", str(folder), "--out", str(tmp_path / "o")]
    assert cli.main(command) == 1
    assert f"--from: the program of {folder} does not run: no GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "x"], "--out: it must be given with --from"),
        (["--from", "x", "--out", "o"], f"--from: x has no {MANIFEST}"),
        (["--target", "cpu", "--from", "x"], "--target: cpu is not measured in steps"),
        (["--build", "/nowhere/at/all"], "--build: the folder of /nowhere/at/all does not exist"),
        (["--build", "x", "--configurations", "0"], "configurations: 0 is not positive"),
        (["--import", "x", "y"], f"--from: x has no {MANIFEST}"),
        (["--import", "x"], "--import: 1 folders are no pairs"),
        (["--import", "x", "y", "--rows", "0"], "--rows: 0 is not positive"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", "--target", "sm90", *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"minutes": 0.0}, "--minutes: 0.0 is not positive"),
        ({"workers": -1}, "--workers: -1 is negative"),
        ({"works": ("bare", "odd")}, "--works: odd is not one of bare, fused"),
    ],
)
def test_bad_measurements(arguments: dict[str, object], message: str, tmp_path: Path) -> None:
    held = built(tmp_path / "f")
    with pytest.raises(ValueError, match=message):
        measure(tmp_path / "f", held, tmp_path / "o", **{"minutes": 1.0, **arguments})  # type: ignore[arg-type]


def test_it_runs_with_little_installed(tmp_path: Path) -> None:
    """The GPU machine has neither MAX and Mojo nor what searches need."""
    folder = tmp_path / "f"
    built(folder)
    missing = ["max", "mojo", "modular", "ortools", "xgboost", "optuna", "torch"]
    program = (
        f"import sys\nsys.modules.update(dict.fromkeys({missing}))\n"
        "from maxconv._cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    command = ["tune", "--target", "sm90", "--from", str(folder), "--out", str(tmp_path / "o")]
    finished = subprocess.run(
        [sys.executable, "-c", program, *command], capture_output=True, text=True, check=False
    )
    assert finished.stdout == "all is measured\n", finished.stderr
    assert len(read_results(tmp_path / "o" / RESULTS)) == 1


# The assembler.


def test_what_was_assembled_once_is_copied(tmp_path: Path) -> None:
    real = tmp_path / "real"
    count = tmp_path / "count"
    real.write_text(f'#!/bin/sh\necho x >> {count}\n[ "$1" != bad ] && cp "$2" "$4"\n')
    real.chmod(0o755)
    kept = tmp_path / "kept"
    environment = assembling(str(real), kept)
    (tmp_path / "a.ptx").write_text("text")
    for name in ("one", "two"):
        arguments = ["-O3", str(tmp_path / "a.ptx"), "-o", str(tmp_path / name)]
        script = environment["MODULAR_NVPTX_COMPILER_PATH"]
        subprocess.run([script, *arguments], env={**os.environ, **environment}, check=True)
        assert (tmp_path / name).read_text() == "text"
    assert count.read_text() == "x\n"
    # Other options are another kernel; a failure is not kept.
    assert assemble(["-O1", *arguments[1:]], str(real), kept) == 0
    for _ in range(2):
        assert assemble(["bad", *arguments[1:]], str(real), kept) == 1
    assert count.read_text() == "x\n" * 4


# Lists of configurations.


def test_a_list_round_trips() -> None:
    assert Configurations.of_json(json.loads(json.dumps(LISTED.as_json()))) == LISTED
    assert LISTED.configuration(1, 4) == {"tile": 64, "stages": 3, "split_k": 4}
    text = LISTED.source()
    assert "    [64, 2],\n    [64, 3],\n" in text
    assert f"comptime ROWS: List[Int] = [\n    7,\n    {NOT_IN_TABLE},\n" in text


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ((Listed((1, 2)), Listed((1, 2))), "one stands there twice"),
        ((Listed((1,)),), r"\(1,\) are not 2 values"),
    ],
)
def test_a_list_that_is_none(listed: tuple[Listed, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Configurations(FIELDS, listed)


def test_without_the_plan() -> None:
    assert without_split(("a", "split_k")) == ("a",)
    with pytest.raises(ValueError, match="the last is b"):
        without_split(("split_k", "b"))


# What results say.


def noisy(
    index: int, ratio: float, noise: float, *, seed: int = 0, final: bool = True, count: int = 15
) -> Timed:
    """A configuration that takes ``ratio`` times the incumbent's time, and noise."""
    source = random.Random(f"{index} {seed}")
    bursts = [1e-5 * ratio * math.exp(source.gauss(0, noise)) for _ in range(count)]
    beside = [1e-5 * math.exp(source.gauss(0, noise)) for _ in range(count)]
    return Timed(index, 1, bursts, beside, final=final)


def result(name: str, *timed: Timed) -> Result:
    return Result(name, (1,) * 22, "bare", 1, "a fake", (0, 1), timed)


def test_a_gain() -> None:
    gain = gain_of(noisy(1, 0.8, 0.01))
    assert gain.log == pytest.approx(math.log(1 / 0.8), abs=0.02)
    assert 0 < gain.error < 0.02
    assert gain.counted == gain.log
    assert gain_of(noisy(1, 1.25, 0.01)).counted == 0
    with pytest.raises(ValueError, match="0 bursts beside 0"):
        gain_of(Timed(1, 1, error="x"))
    # Of one burst nobody knows the noise.
    assert gain_of(Timed(1, 1, [1.0], [9.0])).counted == 0


def test_noise_is_no_gain() -> None:
    """Of equally fast configurations few seem to gain, and hardly anything."""
    gains = [gain_of(noisy(1, 1.0, 0.05, seed=seed)).counted for seed in range(200)]
    assert sum(gain > 0 for gain in gains) <= 16
    assert np.mean(gains) < 0.004
    found = [gain_of(noisy(1, 0.9, 0.05, seed=seed)).counted for seed in range(200)]
    assert np.mean(found) > 0.08


def test_a_summary() -> None:
    table, new = noisy(0, 0.7, 0), noisy(1, 0.8, 0)
    early = noisy(2, 0.5, 0, final=False)
    summary = Summary(
        LISTED, [result("a", table, new, early), result("b", noisy(3, 1.3, 0)), failed("c")]
    )
    best = summary.best(summary.results[0])
    assert best is not None
    assert best[0] is new
    own = summary.best(summary.results[0], new=False)
    assert own is not None
    assert own[0] is table
    assert summary.mean() == pytest.approx(math.sqrt(1 / 0.8), rel=0.01)
    assert summary.mean(new=False) == pytest.approx(math.sqrt(1 / 0.7), rel=0.01)
    text = "\n".join(summary.lines(1))
    assert "a bare: 10.0" in text
    assert "1.250x +- 0.000; of all 1.429x" in text
    assert "within the noise" in text.splitlines()[1]
    assert "c bare: no memory" in text
    assert "configuration 4: wrong: 1 (1 times)" in text
    assert "2 problems; each with its best: 1.118" in text
    assert "1 new rows: 1.414" in text


def failed(name: str) -> Result:
    wrong = Timed(4, 1, error="wrong: 1 of 2 elements")
    return replace(result(name, wrong), error="no memory", incumbent=None)


def test_rows_that_gain_most_together() -> None:
    summary = Summary(
        LISTED,
        [
            result("a", noisy(1, 0.80, 0), noisy(2, 0.85, 0)),
            result("b", noisy(1, 0.80, 0), noisy(2, 0.85, 0), noisy(0, 0.1, 0)),
            result("c", noisy(1, 1.50, 0), noisy(2, 0.85, 0), noisy(3, 0.84, 0)),
        ],
    )
    rows = summary.rows(9)
    assert [index for index, _ in rows] == [2, 1, 3]
    first, second, third = (mean for _, mean in rows)
    assert first == pytest.approx(1 / 0.85)
    assert second == pytest.approx((1 / 0.8 / 0.8 / 0.85) ** (1 / 3))
    assert third == pytest.approx((1 / 0.8 / 0.8 / 0.84) ** (1 / 3))
    assert len(summary.rows(1)) == 1


def test_builds_are_joined() -> None:
    other = Configurations(FIELDS, (LISTED.listed[0], Listed((9, 9), origin="genetic")))
    first = Summary(LISTED, [result("a", noisy(1, 0.9, 0)), failed("b")])
    second = Summary(
        other, [result("a", noisy(1, 0.8, 0), noisy(0, 0.95, 0)), result("b", noisy(1, 0.7, 0))]
    )
    together = joined([first, second])
    assert together.configurations.listed == (*LISTED.listed, other.listed[1])
    place = len(LISTED.listed)
    assert [t.index for t in together.results[0].timed] == [1, place, 0]
    assert [t.index for t in together.results[1].timed] == [place]
    assert together.mean() == pytest.approx((1 / 0.8 / 0.7) ** 0.5)
    # An error does not take away what another build has measured.
    assert [r.error for r in joined([second, first]).results] == [None, None]
    odd = Summary(Configurations(("x",), (Listed((1,)),)), [])
    for parts in ([], [first, odd]):
        with pytest.raises(ValueError, match="builds of one kernel are needed"):
            joined(parts)


@pytest.mark.parametrize("most", [0, 1, 5])
def test_a_cover(most: int) -> None:
    gains = np.array([[0.0, 0.3, 0.2], [0.4, 0.0, 0.2]])
    chosen = greedy(gains, np.array([1.0, 2.0]), most)
    assert chosen == [0, 1][:most]
    assert greedy(np.zeros((2, 0)), np.ones(2), 3) == []


def test_results_of_another_build(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    held = built(folder)
    run(folder, held)
    assert len(summarize(LISTED, folder / "out").results) == 1
    with pytest.raises(ValueError, match="is of another build"):
        summarize(Configurations(FIELDS, LISTED.listed[:2]), folder / "out")
    path = folder / "out" / RESULTS
    path.write_text("odd\n" + path.read_text())
    with pytest.raises(ValueError, match=r"line 1 of .* is no result"):
        summarize(LISTED, folder / "out")


@pytest.mark.parametrize("name", ["resnet50.stem", "resnext.conv2_g32"])
def test_a_problem_of_numbers(name: str) -> None:
    problem = find_problem(name).problem
    assert problem_of(problem.numbers()).numbers() == problem.numbers()
