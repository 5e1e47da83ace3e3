"""Several convolutions at once: what a command line asks for, and how they are searched."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.fake_measurer import FakeMeasurer

from maxconv import _cli as cli
from maxconv._fields import Kernel
from maxconv._problem import ConvProblem
from maxconv._problems import load_problems, network_problems, parse_problem
from maxconv._tuned_table import read_table
from maxconv.tuner import command
from maxconv.tuner.asked import Asked, asked_of, spaces_of
from maxconv.tuner.command import this_environment
from maxconv.tuner.gpu.problems import kernel_of, those_of_hopper
from maxconv.tuner.measure.cpu import WorkerError
from maxconv.tuner.records import Records
from maxconv.tuner.search import SEARCHES, RandomSearch
from maxconv.tuner.several import search_all
from maxconv.tuner.space import Space, open_space

#: Two convolutions, as a command line writes them.
TWO = ["--conv", "1x8x8x16:16x3x3", "--conv", "1x9x9x32:32x1x1"]


def asked(*arguments: str) -> list[Asked]:
    parser = cli.build_parser(["tune"])
    return asked_of(parser.parse_args(["tune", *arguments]))


def of_one_kernel(problem: ConvProblem, target: str, **given: Any) -> list[Space]:
    """The space of the kernel whose times the fake knows."""
    return [open_space(problem, target, kernel=Kernel.IMPLICIT_GEMM, **given)]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[FakeMeasurer]:
    """Measures by a formula, with a user's folder of its own; returns the measurers made."""
    made: list[FakeMeasurer] = []

    def make(space: Any, **_: Any) -> FakeMeasurer:
        made.append(FakeMeasurer(space))
        return made[-1]

    monkeypatch.setattr(command, "CpuMeasurer", make)
    monkeypatch.setattr(command, "open_spaces", of_one_kernel)
    monkeypatch.setattr(command, "user_table", lambda: tmp_path / "tuned.yaml")
    return made


def test_what_is_asked_for_comes_once_and_in_order() -> None:
    found = asked("resnet50.conv2_3x3", *TWO, "--suite", "problems")
    assert [each.name for each in found[:3]] == [
        "resnet50.conv2_3x3",
        "1x8x8x16:16x3x3",
        "1x9x9x32:32x1x1",
    ]
    assert [each.optional for each in found[:4]] == [False, False, False, True]
    names = [each.name for each in found]
    assert len(set(names)) == len(names)
    numbers = [tuple(each.problem.numbers()) for each in found]
    assert len(set(numbers)) == len(numbers)
    known = {tuple(entry.problem.numbers()) for entry in load_problems().values()}
    assert known <= set(numbers)
    # A shape that has two names is searched once.
    every = [entry.problem for entry in network_problems()]
    assert len(asked("--suite", "networks")) == len({tuple(p.numbers()) for p in every})
    with pytest.raises(ValueError, match="problem: none is given; name one, a --suite or a"):
        asked()


def test_what_a_target_cannot_take_is_left_out_with_its_reason() -> None:
    depthwise = parse_problem("1x9x9x32:32x3x3", groups=32)
    dense = parse_problem("1x9x9x32:32x3x3")
    both = [Asked("depthwise", depthwise, optional=True), Asked("dense", dense, optional=True)]
    spaces, left_out = spaces_of(both, lambda problem: of_one_kernel(problem, "cpu", units=1))
    assert list(spaces) == ["dense"]
    assert list(left_out) == ["depthwise"]
    assert "depthwise filters are not packed into" in left_out["depthwise"]
    # What a person named is an error.
    with pytest.raises(ValueError, match="depthwise filters are not packed into"):
        spaces_of([Asked("named", depthwise)], lambda problem: of_one_kernel(problem, "cpu"))
    with pytest.raises(ValueError, match="all 1 convolutions are left out, depthwise since"):
        spaces_of(both[:1], lambda problem: of_one_kernel(problem, "cpu"))


def test_a_suite_on_hopper_has_what_dispatch_gives_to_the_implicit_gemm() -> None:
    depthwise = parse_problem("1x9x9x32:32x3x3", groups=32)
    dense = parse_problem("1x28x28x128:128x3x3", padding=1)
    huge = parse_problem("512x224x224x128:128x3x3", padding=1)
    assert kernel_of(depthwise) is not Kernel.SM90
    given = [Asked("depthwise", depthwise, True), Asked("dense", dense, True)]
    given.append(Asked("huge", huge, True))
    found, left_out = those_of_hopper(given)
    assert [each.name for each in found] == ["dense"]
    assert left_out == {
        "depthwise": f"dispatch gives it to {kernel_of(depthwise).name.lower()}",
        "huge": "its tensors have more than 4 GiB",
    }
    with pytest.raises(ValueError, match="all 1 convolutions are left out: sm90 runs none"):
        those_of_hopper(given[:1])


def test_the_command_searches_each_with_its_own_budget(
    measured: list[FakeMeasurer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.sqlite"
    arguments = ["tune", *TWO, "--units", "1", "--search", "random", "--budget", "6"]
    assert cli.main([*arguments, "--records", str(path)]) == 0
    printed = capsys.readouterr()
    for number, name in enumerate(("1x8x8x16:16x3x3", "1x9x9x32:32x1x1"), start=1):
        assert f"[{number}/2] {name}: 6/6 trials, best " in printed.err
        assert f"[{number}/2] {name}: 7 trials; dispatch " in printed.out
    assert len(measured) == 2
    with Records(path, this_environment()) as records:
        for measurer in measured:
            assert len(records.of(measurer.space)) == 7
    assert re.search(r"^2 layers: [\d.]+ ms by dispatch, [\d.]+ ms with what", printed.out, re.M)
    rows = read_table(tmp_path / "tuned.yaml")
    assert {row.problem for row in rows} == {tuple(m.space.problem.numbers()) for m in measured}


def test_the_cost_model_is_given_what_was_measured_before(
    measured: list[FakeMeasurer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[list[tuple[tuple[int, ...], int]]] = []

    def make(space: Any, seed: int, others: Any) -> RandomSearch:
        told = [(tuple(s.space.problem.numbers()), len(s.trials)) for s in others]
        given.append(told)
        return RandomSearch(space, seed)

    monkeypatch.setitem(SEARCHES, "genetic", make)
    arguments = ["tune", *TWO, "--units", "1", "--budget", "4", "--no-table"]
    assert cli.main([*arguments, "--records", str(tmp_path / "r.sqlite")]) == 0
    first = tuple(parse_problem("1x8x8x16:16x3x3").numbers())
    # With what dispatch chooses.
    assert given == [[], [(first, 5)]]
    # Without records, nothing is known of other problems.
    given.clear()
    assert cli.main(arguments) == 0
    assert given == [[], []]


def test_a_suite_names_what_it_leaves_out(
    measured: list[FakeMeasurer],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from maxconv.tuner import asked as asking

    suite = [
        ("depthwise", parse_problem("1x9x9x32:32x3x3", groups=32)),
        ("dense", parse_problem("1x9x9x32:32x3x3")),
    ]
    monkeypatch.setattr(asking, "SUITES", {**asking.SUITES, "problems": lambda: suite})
    arguments = ["tune", "--suite", "problems", "--units", "1", "--search", "random"]
    assert cli.main([*arguments, "--budget", "2"]) == 0
    printed = capsys.readouterr()
    assert "depthwise: left out: problem: implicit_gemm cannot take it" in printed.err
    assert "1 of 2 convolutions are left out" in printed.err
    assert len(measured) == 1
    assert "dense: 3 trials" in printed.out


def test_ctrl_c_keeps_all_that_was_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[FakeMeasurer] = []

    def make(space: Any, **_: Any) -> FakeMeasurer:
        # The second one's third call: its second round.
        made.append(FakeMeasurer(space, interrupt_at=3 if made else 10**9))
        return made[-1]

    monkeypatch.setattr(command, "CpuMeasurer", make)
    monkeypatch.setattr(command, "open_spaces", of_one_kernel)
    monkeypatch.setattr(command, "user_table", lambda: tmp_path / "tuned.yaml")
    three = [*TWO, "--conv", "1x7x7x32:32x1x1"]
    arguments = ["tune", *three, "--units", "1", "--search", "annealing", "--budget", "16"]
    assert cli.main(arguments) == 130
    printed = capsys.readouterr()
    assert "[2/3] 1x9x9x32:32x1x1: 9 trials" in printed.out
    assert "; interrupted" in printed.out
    assert printed.err.endswith("interrupted: 1 of 3 are not searched\n")
    # The first round of the second one counts, too.
    assert len(read_table(tmp_path / "tuned.yaml")) == 2
    assert len(made) == 2


def test_a_workload_that_cannot_be_measured_does_not_end_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    searched: list[str] = []

    def search(told: str, name: str) -> bool:
        searched.append(told)
        if name == "bad":
            raise WorkerError("crashed: its process ended")
        if name == "interrupted":
            raise KeyboardInterrupt
        return False

    names = ["bad", "good"]
    assert search_all(names, search, optional=names) == 1
    assert searched == ["[1/2] bad", "[2/2] good"]
    assert capsys.readouterr().err == "bad: failed: crashed: its process ended\n"
    with pytest.raises(WorkerError, match="crashed"):
        search_all(names, search)
    # While it confirmed, say.
    assert search_all(["interrupted"], search) == 130
    assert "interrupted: interrupted; --records has its rounds" in capsys.readouterr().err
