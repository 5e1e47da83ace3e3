"""The benchmark of what real networks convolve: many problems, in runs that resume."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import torch
from tests.bench_gpu import by_key, fake
from tests.bench_records import SCHEMA
from torch import Tensor

from maxconv import _cli as cli
from maxconv._problems import NamedProblem, parse_problem
from maxconv.bench import command
from maxconv.bench.device import GPU
from maxconv.bench.entrant import FUSED, WORKS, Entrant, Key
from maxconv.bench.gpu import build as building
from maxconv.bench.gpu import run
from maxconv.bench.gpu.clock import LaunchRun, OnHost
from maxconv.bench.gpu.operands import Operands
from maxconv.bench.gpu.peers_torch import AS_COMPILED
from maxconv.bench.gpu.program import Program, ProgramError
from maxconv.bench.record import Record, load

pytestmark = pytest.mark.usefixtures("few_sets")

SMALL = parse_problem("2x5x4x6:8x3x3", padding=1)

#: Stand for what networks convolve: small, and torch's functions take them.
FEW = [NamedProblem(f"net.{name}", SMALL, "net") for name in ("a", "b", "c")]


@pytest.fixture
def measured(built: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """There are three problems of networks, and each takes a minute; returns those measured."""
    names: list[str] = []
    minutes = itertools.count()

    def entrants(self: Program, named: NamedProblem, *further: Any) -> Any:
        names.append(named.name)
        return real(self, named, *further)

    real = Program.entrants
    monkeypatch.setattr(Program, "entrants", entrants)
    monkeypatch.setattr(command, "network_problems", lambda *_: FEW)
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: 60 * next(minutes)))
    return names


def bench_networks(folder: Path, *further: str) -> int:
    where = ["--device", "gpu", "--problems", "networks", "--contenders", "maxconv", "torch"]
    return cli.main(["bench", *where, "--rounds", "2", "--from", str(folder), *further])


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def names_of(path: Path) -> list[str]:
    return [result.name for result in load(path).results]


def test_a_run_of_networks_goes_on(
    built: Path, measured: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = ("--json", str(tmp_path / "made.json"))
    partial = tmp_path / "made.partial.json"
    assert bench_networks(built, *kept, "--minutes", "1.5") == 0
    assert capsys.readouterr().out.endswith(f"\n{partial}\n\n1 of 3 problems; --resume goes on\n")
    assert files(tmp_path) == ["made.partial.json"]
    assert names_of(partial) == measured == ["net.a"]
    jsonschema.validate(json.loads(partial.read_text(encoding="utf-8")), SCHEMA)
    first = load(partial)
    assert bench_networks(built, *kept, "--resume", "--minutes", "1.5") == 0
    assert "2 of 3 problems" in capsys.readouterr().out
    assert names_of(partial) == measured == ["net.a", "net.b"]
    assert bench_networks(built, *kept, "--resume", "--minutes", "1.5") == 0
    printed = capsys.readouterr().out
    assert printed.endswith(f"\n{tmp_path / 'made.json'}\n")
    assert "--resume goes on" not in printed
    assert files(tmp_path) == ["made.json"]
    whole = load(tmp_path / "made.json")
    assert [result.name for result in whole.results] == measured == ["net.a", "net.b", "net.c"]
    assert whole.results[0] == first.results[0]
    assert (whole.date, whole.command, whole.suite) == (first.date, first.command, "networks")


def test_a_run_without_a_limit_measures_all(
    built: Path, measured: list[str], tmp_path: Path
) -> None:
    # What is to be resumed need not be there.
    assert bench_networks(built, "--json", str(tmp_path / "made.json"), "--resume") == 0
    assert names_of(tmp_path / "made.json") == measured == [named.name for named in FEW]
    assert files(tmp_path) == ["made.json"]


def test_a_run_of_networks_goes_on_after_it_broke(
    built: Path, measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ("--json", str(tmp_path / "made.json"))

    def references(self: Operands, works: Collection[str]) -> dict[str, Tensor]:
        if measured == ["net.a", "net.b"]:
            raise ProgramError("it broke")
        return real(self, works)

    real = Operands.references
    monkeypatch.setattr(Operands, "references", references)
    with pytest.raises(ProgramError, match="it broke"):
        bench_networks(built, *kept)
    assert files(tmp_path) == ["made.partial.json"]
    assert bench_networks(built, *kept, "--resume") == 0
    assert measured == ["net.a", "net.b", "net.b", "net.c"]
    assert names_of(tmp_path / "made.json") == [named.name for named in FEW]


def test_a_run_goes_on_on_another_day(built: Path, measured: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    kept = ("--out", str(out))
    assert bench_networks(built, *kept, "--minutes", "1.5") == 0
    (name,) = files(out)
    today = load(out / name).date
    assert name == f"{today[:10]}-nvidia-h999-bfloat16-networks.partial.json"
    text = (out / name).read_text(encoding="utf-8").replace(today, "2026-01-02T23:59:00+00:00")
    (out / name).write_text(text, encoding="utf-8")
    (out / name).rename(out / name.replace(today[:10], "2026-01-02"))
    assert bench_networks(built, *kept, "--resume") == 0
    assert measured == [named.name for named in FEW]
    assert files(out) == ["2026-01-02-nvidia-h999-bfloat16-networks.json"]
    assert load(out / files(out)[0]).date == "2026-01-02T23:59:00+00:00"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"commit": "1" * 40}, f"is of commit '{'1' * 40}', and this run of '{'0' * 40}'"),
        ({"modified": True}, "is of modified True, and this run of False"),
        ({"command": "python -m maxconv bench"}, "is of command 'python -m maxconv bench', and"),
        ({"versions": {"torch": "1.0"}}, "is of versions {'torch': '1.0'}, and this run of {"),
        ({"gpu": "NVIDIA H998"}, "was measured on 'NVIDIA H998', and this is 'NVIDIA H999'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_another_run_left_is_refused(
    changes: dict[str, Any],
    message: str,
    built: Path,
    measured: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = ("--json", str(tmp_path / "made.json"))
    partial = tmp_path / "made.partial.json"
    assert bench_networks(built, *kept, "--minutes", "1.5") == 0
    before = load(partial)
    if "gpu" in changes:
        changes = {"machine": dataclasses.replace(before.machine, **changes)}
    text = dataclasses.replace(before, **changes).to_json()
    partial.write_text(text, encoding="utf-8")
    capsys.readouterr()
    assert bench_networks(built, *kept, "--resume") == 1
    assert capsys.readouterr().err.startswith(f"maxconv bench: resume: {partial} {message}")
    assert measured == ["net.a"]
    assert files(tmp_path) == ["made.partial.json"]
    assert partial.read_text(encoding="utf-8") == text


def test_no_calls_are_timed_of_many_problems(
    built: Path, measured: list[str], tmp_path: Path
) -> None:
    assert bench_networks(built, "--json", str(tmp_path / "made.json")) == 0
    for result in load(tmp_path / "made.json").results:
        timed = [entry for entry in result.measurements if entry.missing is None]
        assert {entry.contender for entry in timed} == {"maxconv", "torch"}
        assert all(entry.kernel is not None and entry.call is None for entry in timed)
    # What has no other figure keeps it, as a graph of MAX's.
    one = LaunchRun(OnHost(), lambda _: torch.zeros(1), 1)
    assert run._kernel_alone(Entrant(call=one)) == Entrant(call=one)
    assert run._kernel_alone(Entrant(one, one, "a note")) == Entrant(one, None, "a note")


@pytest.mark.parametrize("fault", ["dies", "breaks"])
def test_a_program_that_fails_is_started_anew(
    fault: str, built: Path, measured: list[str], tmp_path: Path
) -> None:
    fake(built, fault)
    made = tmp_path / "made.json"
    assert bench_networks(built, "--json", str(made)) == 0
    reason = {"dies": "the program ended with 1: a bad address", "breaks": "CUDA call failed"}
    for result in load(made).results:
        # Each problem's operands could be made again.
        assert {entry.missing for entry in result.measurements} == {reason[fault]}
    assert measured == [named.name for named in FEW]


def test_hundreds_of_problems_are_not_written_each_time(
    built: Path, measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = itertools.count(step=command._KEEP_S / 2 + 1)
    written: list[int] = []

    def keep(_: object, record: Record) -> None:
        written.append(len(record.results))

    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(command, "_keep", keep)
    assert bench_networks(built, "--json", str(tmp_path / "made.json")) == 0
    assert written == [2, 3]


def test_the_usual_contenders_of_networks(
    built: Path, measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made.json"
    usual = ["--device", "gpu", "--problems", "networks"]
    asked = ["bench", *usual, "--from", str(built), "--json", str(made)]
    assert cli.main(asked) == 0
    record = load(made)
    assert record.command == "python -m maxconv bench --device gpu --problems networks"
    assert record.protocol == GPU.many
    for result in record.results:
        entries = by_key(result)
        assert set(entries) == {
            *(Key("maxconv", work) for work in WORKS),
            Key("torch"),
            Key("torch.compile", FUSED, AS_COMPILED),
        }
        assert entries[Key("torch")].kernel is not None
    # MAX's graphs are compiled for those who ask.
    graphs: list[str] = []
    monkeypatch.setattr(building, "_build_graphs", lambda *asked: graphs.extend(asked[3]))
    folder = ["--build", str(built)]
    assert cli.main(["bench", *usual, *folder]) == 0
    assert graphs == []
    assert cli.main(["bench", *usual, "--contenders", "maxconv", "max", *folder]) == 0
    assert len(graphs) == 6


def test_a_wrong_output_of_many_problems_is_recorded(
    built: Path, measured: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(built, "wrong")
    kept = ("--json", str(tmp_path / "made.json"))
    assert bench_networks(built, *kept, "--minutes", "1.5") == 1
    assert bench_networks(built, *kept, "--resume") == 1
    assert measured == [named.name for named in FEW]
    told = capsys.readouterr().err
    for result in load(tmp_path / "made.json").results:
        entries = by_key(result)
        for work in WORKS:
            reason = entries[Key("maxconv", work)].missing or ""
            assert reason.startswith("wrong result: the output is off by 0.")
            assert f"{result.name}: {Key('maxconv', work)}: {reason}\n" in told
            assert entries[Key("torch", work)].kernel is not None
