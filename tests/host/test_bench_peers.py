"""What the benchmark runs against: MAX, which it tries first, and torch; no graph is compiled."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import weakref
from collections.abc import Sequence, Set
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.bench_records import NAMED

from maxconv.bench.cpu import integers, peers_max, peers_torch
from maxconv.bench.cpu.peers_max import Attempt, Unit, max_arguments, read_answer, try_all
from maxconv.bench.cpu.peers_torch import IN_TORCH, REORDERED
from maxconv.bench.cpu.workload import Workload
from maxconv.bench.device import TOLERANCE
from maxconv.bench.entrant import BARE, FUSED, Entrant, HostRun, Key, Mismatch

PROBLEMS = [NAMED[f"resnet50.{name}"] for name in ("stem", "conv2_3x3", "conv2_expand")]
A, B, C = (named.name for named in PROBLEMS)


# Problems with a constant filter (True), and with the filter as an input.
Keys: TypeAlias = Set[tuple[str, bool]]


class FakeMax:
    """Tries units as MAX would that does not compile, raises for, and dies of some problems."""

    def __init__(
        self,
        errors: Keys = frozenset(),
        raises: Keys = frozenset(),
        dies: Keys = frozenset(),
        dies_compiling: Keys = frozenset(),
    ) -> None:
        self.errors, self.raises, self.dies = errors, raises, dies
        self.dies_compiling = dies_compiling
        self.seen: list[tuple[tuple[str, ...], bool]] = []

    def __call__(self, units: Sequence[Unit], skip: Set[str]) -> list[Attempt]:
        attempts = []
        for unit in units:
            self.seen.append((unit.names, unit.constant))
            attempt = Attempt(unit)
            attempts.append(attempt)
            keys = {name: (name, unit.constant) for name in unit.names}
            if not self.dies_compiling.isdisjoint(keys.values()):
                attempt.died = "the process dies of SIGABRT"
                break
            if not self.errors.isdisjoint(keys.values()):
                attempt.error = "Failed to compile"
                continue
            for name in unit.names:
                if name in skip:
                    continue
                if keys[name] in self.dies:
                    attempt.died, attempt.during = "the process dies of SIGSEGV", name
                    return attempts
                if keys[name] in self.raises:
                    attempt.failed[name] = "no such kernel"
                else:
                    attempt.ran.add(name)
        return attempts


def test_max_takes_everything() -> None:
    fake = FakeMax()
    tried = try_all(PROBLEMS, fake)
    # What has one tap is compiled alone, since MAX is known to refuse it.
    assert fake.seen == [((A, B), True), ((C,), True)]
    assert tried.units == [Unit((A, B)), Unit((C,))]
    assert tried.runs == {True: {A, B, C}, False: set()}
    assert tried.failures == {}


def test_a_constant_filter_that_does_not_compile_becomes_an_input() -> None:
    fake = FakeMax(errors={(C, True)})
    tried = try_all(PROBLEMS, fake)
    assert tried.units == [Unit((A, B)), Unit((C,), False)]
    assert tried.runs == {True: {A, B}, False: {C}}
    assert tried.failures == {C: {True: "Failed to compile"}}


def test_one_problem_does_not_spoil_the_others_of_its_unit() -> None:
    tried = try_all(PROBLEMS, FakeMax(errors={(A, True), (A, False)}))
    assert tried.units == [Unit((C,)), Unit((B,))]
    assert tried.runs == {True: {B, C}, False: set()}
    assert tried.failures == {A: {True: "Failed to compile", False: "Failed to compile"}}


def test_a_call_that_ends_the_process() -> None:
    fake = FakeMax(dies={(A, True), (A, False)})
    tried = try_all(PROBLEMS, fake)
    # The unit stays as it is, so that MAX's cache has it; the call is left out.
    assert tried.units == [Unit((A, B)), Unit((C,))]
    assert tried.runs == {True: {B, C}, False: set()}
    assert set(tried.failures) == {A}
    assert tried.failures[A][True] == "the process dies of SIGSEGV"


def test_a_compilation_that_ends_the_process() -> None:
    tried = try_all(PROBLEMS, FakeMax(dies_compiling={(B, True)}))
    assert tried.runs == {True: {A, C}, False: {B}}
    assert tried.failures == {B: {True: "the process dies of SIGABRT"}}


def test_a_call_that_raises() -> None:
    tried = try_all(PROBLEMS, FakeMax(raises={(B, True), (B, False)}))
    assert tried.runs == {True: {A, C}, False: set()}
    assert tried.failures == {B: {True: "no such kernel", False: "no such kernel"}}


def test_no_problem_at_all() -> None:
    assert try_all([], FakeMax()).units == []


def events(*entries: object) -> list[str]:
    return [json.dumps(entry) for entry in entries]


def test_the_answer_of_a_child() -> None:
    units = [Unit((A, B)), Unit((C,)), Unit((A,), False)]
    lines = events(
        {"event": "unit"},
        {"event": "run", "name": A},
        {"event": "ran", "name": A},
        {"event": "run", "name": B},
        {"event": "failed", "name": B, "reason": "no"},
        {"event": "done"},
        {"event": "unit"},
        {"event": "error", "reason": "Failed"},
        {"event": "done"},
        {"event": "unit"},
        {"event": "run", "name": A},
    )
    first, second, third = read_answer(units, lines, "the process dies of SIGSEGV")
    assert first == Attempt(units[0], ran={A}, failed={B: "no"})
    assert second == Attempt(units[1], error="Failed")
    assert third == Attempt(units[2], died="the process dies of SIGSEGV", during=A)


@pytest.mark.parametrize(
    ("lines", "during"), [([], None), (events({"event": "unit"}), None)], ids=["start", "compile"]
)
def test_a_child_that_dies_early(lines: list[str], during: str | None) -> None:
    made = read_answer([Unit((A,))], lines, "the process exits with 1")
    assert made == [Attempt(Unit((A,)), died="the process exits with 1", during=during)]


def test_a_child_that_dies_after_its_work() -> None:
    lines = events({"event": "unit"}, {"event": "ran", "name": A}, {"event": "done"})
    assert read_answer([Unit((A,))], lines, "the process dies of SIGABRT")[0].died is None


@dataclasses.dataclass
class FakeCall(HostRun):
    """A call of MAX's that computes the reference and more."""

    work: Workload
    wrong_by: float = 0.0
    convolutions: int = 1

    def __call__(self) -> list[object]:
        raise AssertionError("outputs are asked for, not timed")

    def outputs(self) -> list[npt.NDArray[np.float32]]:
        if math.isinf(self.wrong_by):
            raise ValueError("no such kernel. Please file an issue.")
        reference = peers_torch.reference(self.work)[BARE]
        # Only the last is wrong.
        return [*[reference] * (self.convolutions - 1), reference + np.float32(self.wrong_by)]


def test_the_child_serves_what_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ("conv1d", "conv3d", "groups_wide", "few_filters", "one_pixel")
    names = [f"odd.{name}" for name in kinds]
    right, wrong, wrong_alone, raises, skipped = names
    errors = {wrong: 0.5, raises: math.inf}

    def load_units(works: Sequence[Workload], *, constant: bool) -> dict[str, Entrant]:
        if not constant:
            raise RuntimeError("Failed to compile the model. Please file an issue.\nMore.")
        entrants = {}
        for work in works:
            name = work.named.name
            alone = FakeCall(work, 0.5 if name == wrong_alone else 0)
            several = FakeCall(work, errors.get(name, 0), work.convolutions)
            entrants[name] = Entrant(several, alone)
        return entrants

    monkeypatch.setattr(peers_max, "load", load_units)
    units = [Unit(tuple(names)), Unit((right,), False)]
    request = {
        "dtype": "float32",
        "units": [[unit.names, unit.constant] for unit in units],
        "skip": [skipped],
    }
    lines = [json.dumps(event) for event in peers_max.serve(request)]
    first, second = read_answer(units, lines, None)
    assert first.ran == {right}
    assert set(first.failed) == {wrong, wrong_alone, raises}
    for name in (wrong, wrong_alone):
        assert first.failed[name].startswith("wrong result: the output is off by 0.")
    assert first.failed[raises] == "no such kernel"
    assert second == Attempt(units[1], error="Failed to compile the model")


def test_how_a_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    monkeypatch.setattr(peers_max, "child_environment", lambda: {"PATH": "/usr/bin:/bin"})
    # The shell does not know `-m`: a child that does not even start is told as well.
    (made,) = peers_max.run_child([Unit((A,))], set(), dtype="float32")
    assert made.died is not None
    assert made.died.startswith("the process exits with ")


def test_max_has_no_convolution_of_one_dimension() -> None:
    shape, filters, arguments = max_arguments(NAMED["odd.conv1d"].problem)
    assert (shape, filters) == ((2, 1, 23, 6), (1, 5, 6, 10))
    assert arguments == {
        "stride": (1, 2),
        "dilation": (1, 2),
        "padding": (0, 0, 3, 1),
        "groups": 1,
    }


def test_maxs_arguments_in_three_dimensions() -> None:
    shape, filters, arguments = max_arguments(NAMED["odd.conv3d"].problem)
    assert (shape, filters) == ((1, 5, 6, 7, 4), (2, 3, 2, 4, 11))
    assert arguments["padding"] == (1, 0, 1, 2, 0, 1)


# torch.


@pytest.mark.parametrize("name", ["odd.conv1d", "odd.groups_wide", "odd.conv3d"])
def test_torch_convolves_as_often_as_it_is_asked(name: str) -> None:
    work = Workload.make(NAMED[name], "float32")
    with peers_torch.session(torch.get_num_threads()):
        entrants, missing = peers_torch.contenders(work, ["torch"])
        assert missing == {}
        assert set(entrants) == {
            Key("torch", kind, variant) for kind in (BARE, FUSED) for variant in ("", REORDERED)
        }
        reference = peers_torch.reference(work)
        for key, entrant in entrants.items():
            runs = dict(entrant.runs())
            assert [run.convolutions for run in runs.values()] == [work.convolutions, 1]
            for run in runs.values():
                assert run.error(reference[key.work], TOLERANCE["float32"]) < 1e-5
                with pytest.raises(Mismatch):
                    run.error(reference[key.work] + np.float32(0.01), TOLERANCE["float32"])


def test_what_torch_cannot_call_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> object:
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(torch, "compile", refuses)
    work = Workload.make(NAMED["odd.asymmetric_padding"], "float32")
    with peers_torch.session(torch.get_num_threads()):
        entrants, missing = peers_torch.contenders(work, ["torch.compile", "maxconv"])
    assert entrants == {}
    assert missing == {
        Key("torch.compile"): "no compiler",
        Key("torch.compile", FUSED): "no compiler",
        Key("maxconv", BARE, IN_TORCH): "torch's functions take the same padding before and after",
        Key("maxconv", FUSED, IN_TORCH): "torch's functions take the same padding before and after",
    }


@pytest.mark.slow
def test_torch_compile_computes_the_same() -> None:
    work = Workload.make(NAMED["odd.groups_wide"], "float32")
    with peers_torch.session(torch.get_num_threads()):
        entrants, missing = peers_torch.contenders(work, ["torch.compile"])
        assert missing == {}
        reference = peers_torch.reference(work)
        for key, entrant in entrants.items():
            for _, run in entrant.runs():
                assert run.error(reference[key.work], TOLERANCE["float32"]) < 1e-5


def test_torch_keeps_its_outputs_until_the_end() -> None:
    left: list[int] = []

    def convolve() -> torch.Tensor:
        output = torch.zeros(1)
        weakref.finalize(output, left.append, output.data_ptr())
        assert left == []
        return output

    outputs = peers_torch.Loop(convolve, 3)()
    assert len({output.data_ptr() for output in outputs}) == 3
    del outputs
    assert len(left) == 3


@pytest.mark.parametrize(
    ("features", "machine", "wrong"),
    [
        (("avx2", "fma"), "x86_64", True),
        (("avx2", "avx512f", "avx512bw"), "x86_64", True),
        (("avx2", "avx_vnni"), "x86_64", False),
        (("avx2", "avx512f", "avx512_vnni"), "x86_64", False),
        (("asimd",), "aarch64", False),
    ],
)
def test_where_torchs_integers_saturate(
    features: tuple[str, ...], machine: str, wrong: bool
) -> None:
    assert integers.saturates(features, machine) == wrong


def test_torchs_integers_are_timed_where_they_saturate(monkeypatch: pytest.MonkeyPatch) -> None:
    work = integers.IntegerWorkload.make(NAMED["odd.one_of_everything"])
    for features, tolerance in ((("avx2",), math.inf), (("avx2", "avx_vnni"), None)):
        monkeypatch.setattr(integers, "cpu_features", lambda features=features: features)
        monkeypatch.setattr("platform.machine", lambda: "x86_64")
        entrants, missing = integers.contenders(work, ["torch"])
        assert entrants
        assert not missing
        assert all(entrant.tolerance == tolerance for entrant in entrants.values())
        assert all(bool(entrant.note) == (tolerance is not None) for entrant in entrants.values())
