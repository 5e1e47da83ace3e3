"""``maxconv bench``: its arguments, what it writes, and where it runs; nothing is measured."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.bench_records import NAMED, record
from tests.documents import ROOT

import maxconv
from maxconv import _cli as cli
from maxconv._problems import NamedProblem
from maxconv.bench import command, environment, report
from maxconv.bench.memory import Memory
from maxconv.bench.record import Functions, Record, load
from maxconv.bench.timing import FULL, QUICK

# The command line.


def test_all_problems_that_stand_in_a_family() -> None:
    every = command.select([], [])
    assert every == [named for named in NAMED.values() if named.family]


def test_selecting_problems() -> None:
    grouped = command.select(["grouped"], ["odd.conv1d", "resnet50.stem"])
    assert [named.name for named in grouped] == [
        "resnet50.stem",
        "resnext.conv2_g32",
        "resnext.conv4_g32",
        "odd.conv1d",
    ]
    assert [named.name for named in command.select([], ["vae.mid"])] == ["vae.mid"]


def test_a_quick_run_has_one_problem_of_each_family() -> None:
    quick = command.select([], [], quick=True)
    families = [named.family for named in command.select([], [])]
    assert [named.family for named in quick] == list(dict.fromkeys(families))
    assert quick[0].name == "resnet50.stem"
    named = command.select(["vae"], ["vae.mid"], quick=True)
    assert [entry.name for entry in named] == ["vae.conv_in", "vae.mid"]
    assert QUICK.rounds < FULL.rounds


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Measures nothing: the record is made up; returns what was to be measured."""
    asked = []

    def fake(problems: Sequence[NamedProblem], args: Any) -> Record:
        asked.append(([named.name for named in problems], args.dtype, args.quick))
        return record(command=command.repeat(args))

    monkeypatch.setattr(command, "measure", fake)
    return asked


def test_the_command(
    measured: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, picture = tmp_path / "made.json", tmp_path / "made.png"
    arguments = ["--problem", "vae.mid", "--dtype", "float16", "--quick"]
    outputs = ["--json", str(made), "--plot", str(picture)]
    assert cli.main(["bench", *arguments, *outputs]) == 0
    assert measured == [(["vae.mid"], "float16", True)]
    kept = load(made)
    assert kept.command == "python -m maxconv bench --problem vae.mid --dtype float16 --quick"
    assert capsys.readouterr().out == report.render_text(kept)
    assert picture.stat().st_size > 1000
    assert cli.main(["bench", "--render", str(made)]) == 0
    assert capsys.readouterr().out == report.render_markdown(kept)
    assert len(measured) == 1


def test_recording(
    measured: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clone = environment.Checkout(tmp_path, "0" * 40, False)
    monkeypatch.setattr(command, "checkout", lambda: clone)
    assert cli.main(["bench", "--record"]) == 0
    path = tmp_path / "benchmarks" / "results" / "2026-07-27-fast-one-float32.json"
    assert load(path) == record()
    assert capsys.readouterr().out.endswith(f"\n{path}\n")
    assert len(measured[0][0]) == len(command.select([], []))
    monkeypatch.setattr(command, "checkout", lambda: None)
    assert cli.main(["bench", "--record"]) == 1
    assert "does not run from a clone" in capsys.readouterr().err
    assert len(measured) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory": [Memory("vae.mid", 1, 1, 1, 9 << 20)]}, "more memory than allowed: vae.mid"),
        ({"functions": Functions(("vae.mid",), False, 1.0, 1.0)}, "outputs differ from the op's"),
    ],
)
def test_a_run_that_finds_something_wrong(
    changes: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "measure", lambda *_: record(**changes))
    assert cli.main(["bench"]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Summary" in printed.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--family", "resnet"], "family: 'resnet' does not exist; resnet50, vae,"),
        (["--problem", "vae.middle"], "problem: 'vae.middle' is not a named problem; near it: vae"),
        (["--record", "--quick"], "record: only a whole run is recorded"),
        (["--record", "--problem", "vae.mid"], "record: only a whole run is recorded"),
        (["--json", "nowhere/a.json"], "json: the folder of nowhere/a.json does not exist"),
        (["--plot", "nowhere/a.png"], "plot: the folder of nowhere/a.png does not exist"),
        (["--plot", "a.txt"], "plot: a.txt does not end with a format"),
        (["--render", "a.json", "--quick"], "render: --quick does not go with it"),
        (["--render", "a.json", "--record"], "render: --record does not go with it"),
        (["--render", "nowhere.json"], "[Errno 2] No such file or directory: 'nowhere.json'"),
    ],
)
def test_a_bad_argument_is_told_before_anything_is_measured(
    arguments: list[str],
    message: str,
    measured: list[Any],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", *arguments]) == 1
    assert capsys.readouterr().err.startswith(f"maxconv bench: {message}")
    assert measured == []


def test_an_unknown_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "--dtype", "int8"])
    assert "invalid choice" in capsys.readouterr().err


# Where it runs.


def test_this_machine() -> None:
    here = environment.machine()
    assert here.cpu
    assert 1 <= environment.usable_threads() <= here.cpus


def test_the_checkout() -> None:
    clone = environment.checkout()
    if clone is None:
        pytest.skip("not a clone, or without git")
    assert clone.root == ROOT
    assert re.fullmatch("[0-9a-f]{40}", clone.commit)


def test_an_installed_package_is_no_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = tmp_path / "site-packages" / "maxconv" / "__init__.py"
    monkeypatch.setattr(maxconv, "__file__", str(installed))
    assert environment.checkout() is None


def test_a_child_imports_this_package() -> None:
    first = environment.child_environment()["PYTHONPATH"].split(":")[0]
    assert (Path(first) / "maxconv" / "bench" / "child.py").samefile(
        Path(command.__file__).with_name("child.py")
    )
