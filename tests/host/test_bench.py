"""The benchmark's arithmetic, its turns, its records and tables; nothing here compiles a graph."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any, TypeAlias

import jsonschema
import numpy as np
import numpy.typing as npt
import pytest
from tests.documents import ROOT

import maxconv
from maxconv import cli
from maxconv.bench import command, environment, peers_max, peers_torch, report, runner
from maxconv.bench.environment import Machine, slug
from maxconv.bench.memory import ALLOWANCE, Memory, largest, smallest
from maxconv.bench.peers_max import Attempt, Unit, max_arguments, read_answer, try_all
from maxconv.bench.record import Functions, Record, Result, load, results_name, summary
from maxconv.bench.statistics import Timing, geometric_mean, percentile, summarize
from maxconv.bench.timing import FULL, QUICK, Protocol, interleave
from maxconv.bench.workload import MAX_TOLERANCE, TOLERANCE, Mismatch, Workload, aligned, check
from maxconv.problems import NamedProblem, load_problems

NAMED = load_problems()
SCHEMA = json.loads((ROOT / "benchmarks" / "record.schema.json").read_text(encoding="utf-8"))
PROTOCOL = (ROOT / "benchmarks" / "protocol.md").read_text(encoding="utf-8")


def timing(seconds: float) -> Timing:
    return summarize([seconds * factor for factor in (0.9, 1.0, 1.2)])


def result(name: str, times: dict[str, float], **changes: Any) -> Result:
    """Returns a problem's result; `times` are in milliseconds, by contender."""
    problem = NAMED[name].problem
    made = Result(
        name=name,
        family=NAMED[name].family,
        problem=str(problem),
        rank=problem.spatial_rank,
        depthwise=problem.is_depthwise,
        flops=problem.flops,
        nbytes=problem.nbytes(),
        timings={contender: timing(time / 1e3) for contender, time in times.items()},
        errors=dict.fromkeys(times, 1e-6),
    )
    return dataclasses.replace(made, **changes)


def record(**changes: Any) -> Record:
    ours = {"ours": 1.0, "ours_raw": 1.25, "ours_fused": 1.02}
    made = Record(
        date="2026-07-27T12:00:00+00:00",
        command="python -m maxconv bench",
        commit="0123456789abcdef0123456789abcdef01234567",
        modified=False,
        dtype="float32",
        threads=2,
        machine=Machine("Fast One", ("avx2", "fma"), 2, "Linux", 0.1),
        versions=dict.fromkeys(("maxconv", "max", "mojo", "torch", "python"), "1.2.3"),
        protocol=FULL,
        tolerance=TOLERANCE["float32"],
        results=[
            result(
                "resnet50.conv2_3x3",
                {**ours, "ours_lambda": 1.1, "max": 1.5, "torch": 1.3, "torch_prepacked": 0.8}
                | {"torch_fused": 1.0},
            ),
            result(
                "resnet50.conv2_expand",
                {**ours, "ours_fused": 1.04, "ours_lambda": 1.0, "max_input": 2.0, "torch": 1.25},
                missing={"max": "Failed to compile", "torch_prepacked": "no kernel"},
            ),
            result("mobilenet.dw_14", {**ours, "max": 30.0, "torch": 2.0, "torch_prepacked": 2.5}),
            result(
                "audio.dilated",
                {**ours, "torch": 1.0},
                missing=dict.fromkeys(("max", "max_input"), "the process dies of SIGSEGV"),
            ),
        ],
        memory=[Memory("vae.up_256", 16 << 20, 8 << 20, 2 << 20, 3 << 19)],
        functions=Functions(("resnet50.conv2_3x3", "audio.dilated"), True, 0.002, 0.0021),
    )
    return dataclasses.replace(made, **changes)


# Statistics.


def test_percentiles_interpolate() -> None:
    values = [1.0, 2.0, 4.0, 8.0, 16.0]
    assert [percentile(values, share) for share in (0, 0.5, 1)] == [1, 4, 16]
    assert percentile(values, 0.1) == pytest.approx(1.4)
    assert percentile(values, 0.9) == pytest.approx(12.8)
    assert percentile([3.0], 0.9) == 3


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], 1.5), ([1.0], -0.1)])
def test_a_percentile_that_is_none(values: list[float], share: float) -> None:
    with pytest.raises(ValueError, match=r"needed|allowed"):
        percentile(values, share)


def test_a_summary_does_not_depend_on_the_order() -> None:
    made = summarize([5.0, 1.0, 4.0, 2.0, 3.0])
    assert dataclasses.astuple(made) == pytest.approx((5, 1.0, 1.4, 3.0, 4.6))


def test_the_geometric_mean_of_a_ratio_and_its_inverse_is_one() -> None:
    assert geometric_mean([4.0, 0.25, 1.0]) == pytest.approx(1)
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4)
    for values in ([], [1.0, 0.0], [1.0, -2.0]):
        with pytest.raises(ValueError, match="geometric mean"):
            geometric_mean(values)


# Turns.


class Clock:
    """Time that passes only when something says so, and what was called when."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.log.append("pause")

    def contender(self, name: str, durations: Callable[[], float]) -> Callable[[], object]:
        def call() -> None:
            self.now += durations()
            self.log.append(name)

        return call

    def bursts(self) -> list[tuple[str, int]]:
        """Returns who was called how often between pauses."""
        parts = " ".join(self.log).split("pause")[1:]
        return [(calls.split()[0], len(calls.split())) for calls in parts]


def test_contenders_take_turns_and_a_different_one_begins() -> None:
    clock = Clock()
    contenders = {name: clock.contender(name, lambda: 1e-3) for name in "abc"}
    protocol = Protocol(rounds=3, budget_s=10)
    made = interleave(contenders, protocol, clock=clock.read, sleep=clock.sleep)
    estimates, turns = clock.bursts()[:3], clock.bursts()[3:]
    assert estimates == [("a", 1), ("b", 1), ("c", 1)]
    assert turns == [(name, 10) for name in "abcbcacab"]
    assert {name: entry.samples for name, entry in made.items()} == dict.fromkeys("abc", 3 * 7)
    assert list(made) == ["a", "b", "c"]


def test_the_first_calls_of_a_burst_are_thrown_away() -> None:
    clock = Clock()
    # After the call that estimates, bursts of 10: the first 3 of each take ten times as long.
    burst = [1e-2] * 3 + [1e-3] * 7
    slow_start = clock.contender("a", itertools.chain([1e-3], itertools.cycle(burst)).__next__)
    made = interleave({"a": slow_start}, Protocol(), clock=clock.read, sleep=clock.sleep)["a"]
    assert [made.best_s, made.p90_s] == pytest.approx([1e-3, 1e-3])


def test_slow_contenders_are_called_less() -> None:
    clock = Clock()
    durations = {"fast": 1e-3, "slow": 0.05, "slower": 0.5, "once": 3.0}
    contenders = {
        name: clock.contender(name, itertools.repeat(time).__next__)
        for name, time in durations.items()
    }
    made = interleave(contenders, FULL, clock=clock.read, sleep=clock.sleep)
    bursts = clock.bursts()[4:]
    assert [bursts.count(("fast", 10)), bursts.count(("slow", 3))] == [30, 6]
    assert bursts.count(("slower", 3)) == FULL.fewest_rounds
    assert {name: entry.samples for name, entry in made.items()} == {
        "fast": 30 * 7,
        "slow": 6 * 2,
        "slower": 5 * 2,
        "once": 1,
    }
    for name, time in durations.items():
        assert made[name].median_s == pytest.approx(time)
    # The slow ones' turns are spread over the run.
    places = [place for place, (name, _) in enumerate(bursts) if name == "slow"]
    assert max(np.diff(places)) < len(bursts) / 4


def test_nothing_to_time() -> None:
    assert interleave({}) == {}


def test_the_protocol_says_what_the_program_does() -> None:
    for words in (
        f"a sleep of\n  {FULL.pause_s * 1e3:.0f} ms",
        f"{FULL.calls} calls, of which the first {FULL.discarded} are thrown away",
        f"{FULL.rounds} rounds. Slow contenders get fewer, at least {FULL.fewest_rounds},",
        f"each takes about {FULL.budget_s:.0f} s; one whose call takes {FULL.slow_s:.0f} s",
        f"{ALLOWANCE >> 20} MiB are allowed",
    ):
        assert words in PROTOCOL
    for name in SCHEMA["$defs"]["contender"]["enum"]:
        assert f"| `{name}` |" in PROTOCOL


# Data and its check.


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_data_is_of_the_type_and_the_same_every_time(dtype: str) -> None:
    named = NAMED["odd.groups_uneven"]
    work = Workload.make(named, dtype)
    again = Workload.make(named, dtype)
    for values in (work.x, work.filter, work.bias, work.residual):
        assert values.dtype == np.float32
        bits = values.view(np.uint32)
        if dtype == "bfloat16":
            assert not (bits & 0xFFFF).any()
        if dtype == "float16":
            assert np.array_equal(values, values.astype(np.float16))
    assert np.array_equal(work.x, again.x)
    assert np.array_equal(work.filter, again.filter)
    assert (work.filter.shape, work.residual.shape) == ((18, 3, 3, 2), (2, 7, 6, 18))
    other = Workload.make(NAMED["odd.groups_wide"], dtype)
    assert other.x.flat[0] != work.x.flat[0]


def test_filters_for_the_others() -> None:
    work = Workload.make(NAMED["odd.conv3d"], "float32")
    assert (work.torch_filter.shape, work.max_filter.shape) == ((11, 4, 2, 3, 2), (2, 3, 2, 4, 11))
    assert work.torch_filter[7, 1, 0, 2, 1] == work.filter[7, 0, 2, 1, 1]
    assert work.max_filter[0, 2, 1, 1, 7] == work.filter[7, 0, 2, 1, 1]
    assert work.max_filter.flags.c_contiguous


def test_outputs_are_about_one() -> None:
    work = Workload.make(NAMED["odd.deep_reduction"], "float32")
    middle = np.tensordot(work.filter, work.x[0], axes=3)
    assert 0.3 < np.std(middle) < 3


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7)])
def test_operands_are_aligned(dtype: type[np.generic], shape: tuple[int, ...]) -> None:
    values = np.arange(math.prod(shape)).astype(dtype).reshape(shape)
    copy = aligned(values)
    assert copy.ctypes.data % 64 == 0
    assert copy.dtype == dtype
    assert np.array_equal(copy, values)
    assert aligned(values[:0]).shape == values[:0].shape


def test_the_check_of_an_output() -> None:
    reference = np.array([[0.0, 100.0], [-3.0, 1.0]], np.float32)
    assert check(reference, reference, TOLERANCE["float32"]) == 0
    assert check(reference.reshape(-1) + np.float32(5e-5), reference, TOLERANCE["float32"]) < 1e-4
    off = reference.copy()
    off[0, 1] += 0.009
    assert check(off, reference, TOLERANCE["float32"]) == pytest.approx(0.009 / 101, rel=0.01)
    off[0, 0] = 0.009
    with pytest.raises(Mismatch, match=r"off by 0\.009; 0\.0001 is allowed"):
        check(off, reference, TOLERANCE["float32"])
    assert check(off, reference, TOLERANCE["bfloat16"]) == pytest.approx(0.009)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_check_refuses_what_is_no_number(bad: float) -> None:
    with pytest.raises(Mismatch):
        check(np.array([1.0, bad], np.float32), np.ones(2, np.float32), TOLERANCE["float32"])


def test_the_check_refuses_another_size() -> None:
    with pytest.raises(Mismatch, match="2 elements, not 3"):
        check(np.ones(2, np.float32), np.ones(3, np.float32), TOLERANCE["float32"])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_max_may_be_less_exact(dtype: str) -> None:
    factor = MAX_TOLERANCE[dtype] / TOLERANCE[dtype]
    assert factor == (1 if dtype == "float32" else 16)


# A problem's measurement, with made-up contenders.


def measure(outputs: dict[str, float], missing: dict[str, str] | None = None) -> Result:
    named = NAMED["odd.one_of_everything"]
    reference = np.full((1, 1, 1, 1), 2, np.float32), np.full((1, 1, 1, 1), 5, np.float32)
    entrants = {
        name: runner.Entrant(
            lambda: None,
            functools.partial(np.full, (1, 1, 1, 1), value, np.float32),
            fused="fused" in name,
        )
        for name, value in outputs.items()
    }
    protocol = Protocol(pause_s=0, calls=3, discarded=1, rounds=2)
    return runner.measure_problem(named, entrants, reference, "float32", protocol, missing or {})


def test_a_problem_is_checked_and_timed() -> None:
    made = measure({"ours": 2, "ours_fused": 5, "max": 2, "torch": 2.0001}, {"max_input": "why"})
    assert {name: entry.samples for name, entry in made.timings.items()} == dict.fromkeys(
        ("ours", "ours_fused", "max", "torch"), 4
    )
    assert made.errors["torch"] == pytest.approx(1e-4 / 3, rel=0.01)
    assert made.missing == {"max_input": "why"}
    assert (made.flops, made.rank, made.family) == (2, 2, None)


@pytest.mark.parametrize(("name", "value"), [("ours", 2.1), ("ours_fused", 2), ("torch", 3)])
def test_a_wrong_output_ends_the_run(name: str, value: float) -> None:
    with pytest.raises(Mismatch, match=rf"odd\.one_of_everything: {name}: the output is off"):
        measure({"ours": 2, "ours_fused": 5, "torch": 2, name: value})


def test_a_wrong_output_of_max_is_recorded() -> None:
    made = measure({"ours": 2, "max": 4})
    assert set(made.timings) == {"ours"}
    assert made.missing["max"].startswith("wrong result: the output is off by 0.67")


# What MAX takes.


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
class FakeCall:
    """A call of MAX's that computes the reference and more."""

    work: Workload
    error: float = 0.0

    def output(self) -> npt.NDArray[np.float32]:
        if math.isinf(self.error):
            raise ValueError("no such kernel. Please file an issue.")
        reference = peers_torch.reference(self.work)[0]
        moved: npt.NDArray[np.float32] = (reference + self.error).astype(np.float32)
        return moved


def test_the_child_serves_what_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"odd.{name}" for name in ("conv1d", "conv3d", "few_filters", "one_pixel")]
    right, wrong, raises, skipped = names
    errors = {wrong: 0.5, raises: math.inf}

    def load_units(works: Sequence[Workload], *, constant: bool) -> dict[str, FakeCall]:
        if not constant:
            raise RuntimeError("Failed to compile the model. Please file an issue.\nMore.")
        return {w.named.name: FakeCall(w, errors.get(w.named.name, 0)) for w in works}

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
    assert set(first.failed) == {wrong, raises}
    assert first.failed[wrong].startswith("wrong result: the output is off by 0.")
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


# Memory.


@pytest.mark.parametrize("named", NAMED.values(), ids=lambda named: named.name)
def test_the_smallest_image_of_a_problem(named: NamedProblem) -> None:
    small, full = smallest(named.problem), named.problem
    assert small.output_size == (1,) * full.spatial_rank or 1 in small.input_size
    assert small.nbytes() <= full.nbytes()
    assert (small.filters, small.filter_size) == (full.filters, full.filter_size)
    assert (small.stride, small.pad_before) == (full.stride, full.pad_before)


def test_the_largest_problems() -> None:
    sizes = {name: named.problem.nbytes() for name, named in NAMED.items()}
    made = [named.name for named in largest(list(NAMED.values()), 2)]
    assert made == sorted(sizes, key=lambda name: -sizes[name])[:2]


def test_the_allowance() -> None:
    assert ALLOWANCE == 8 * 2**20
    assert Memory("a", 1, 1, 1, ALLOWANCE).fits
    assert not Memory("a", 1, 1, 1, ALLOWANCE + 1).fits


# Ratios and summaries.


def test_ratios_are_of_medians() -> None:
    first, second, *_ = record().results
    assert first.ratio("max") == pytest.approx(1.5)
    assert first.ratio("torch_fused", "ours_fused") == pytest.approx(1 / 1.02)
    assert first.torch == "torch_prepacked"
    assert first.gflops("ours") == pytest.approx(2 * 56 * 56 * 64 * 64 * 9 / 1e-3 / 1e9)
    assert second.torch == "torch"
    assert (first.max, second.max) == ("max", "max_input")
    assert second.ratio("max") is None
    assert second.gflops("max") is None


def test_the_summary() -> None:
    made = {ratio.what: ratio for ratio in summary(record().results)}
    torch = made["times as fast as torch, 2-D"]
    assert torch.geometric_mean == pytest.approx((0.8 * 1.25 * 2.0) ** (1 / 3))
    assert torch.worst == pytest.approx(0.8)
    assert (torch.worst_problem, torch.problems) == ("resnet50.conv2_3x3", 3)
    dense = made["times as fast as MAX, 2-D, constant filter"]
    assert [dense.geometric_mean, dense.problems] == pytest.approx([1.5, 1])
    deep = made["times as fast as MAX, 2-D depthwise, constant filter"]
    assert [deep.worst, deep.problems] == pytest.approx([30, 1])
    fused = made["times the time with bias, ReLU and residual as arguments, 2-D"]
    # Of a cost, the largest is the worst.
    assert fused.worst == pytest.approx(1.04)
    assert fused.worst_problem == "resnet50.conv2_expand"
    assert made["times as fast as torch, 1-D and 3-D"].problems == 1
    assert "times as fast as MAX, 1-D and 3-D" not in made


# The record.


def test_a_record_follows_its_schema_and_comes_back() -> None:
    for made in (record(), record(commit=None, functions=None, memory=[])):
        text = made.to_json()
        jsonschema.validate(json.loads(text), SCHEMA)
        assert Record.from_json(text) == made
        assert Record.from_json(text).to_json() == text


def test_the_schema_is_one_and_names_every_field() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    made = json.loads(record().to_json())
    assert set(SCHEMA["properties"]) == set(SCHEMA["required"]) == set(made)
    for key, value in (("threads", 0), ("dtype", "int8"), ("date", "yesterday"), ("format", 2)):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**made, key: value}, SCHEMA)


KEPT = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_the_kept_records(path: Path) -> None:
    jsonschema.validate(json.loads(path.read_text(encoding="utf-8")), SCHEMA)
    kept = load(path)
    assert path.name == results_name(kept)
    assert kept.protocol == FULL
    assert report.render_markdown(kept)


def test_the_name_of_a_record() -> None:
    assert results_name(record()) == "2026-07-27-fast-one-float32.json"
    assert slug("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz") == "intel-xeon-platinum-8481c"
    assert slug("AMD EPYC 9654 96-Core Processor") == "amd-epyc-9654-96-core"
    assert slug("™") == "unknown"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 2}', '{"format": 1}', '{"format": 1, "summary": []}']
)
def test_what_is_no_record(text: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"record\.json: this is no record of format 1"):
        load(path)


# Tables.


def test_the_table_for_people() -> None:
    text = report.render_text(record())
    lines = text.splitlines()
    assert lines[0].startswith("2026-07-27, Fast One, 2 threads, float32, maxconv 1.2.3, max 1.2.3")
    assert lines[0].endswith("commit 0123456789")
    first = next(line for line in lines if line.startswith("resnet50.conv2_3x3"))
    assert re.split(r"\s{2,}", first) == [
        "resnet50.conv2_3x3",
        "1x56x56x64 -> 64 3x3 p1x1",
        "231",
        "289",
        "154",
        "0.80x",
        "1.50x",
        "0.920-1.160",
        "1.25x",
        "1.02x",
    ]
    expand = next(line for line in lines if line.startswith("resnet50.conv2_expand"))
    assert "2.00x*" in expand
    assert "*: MAX takes no constant filter here" in text
    assert "Without MAX with a constant filter: resnet50.conv2_expand: Failed to compile." in text
    assert "audio.dilated: the process dies of SIGSEGV." in text
    assert "outputs equal, bit for bit; 2.00 ms against 2.10 ms one by one" in text
    assert re.search(r"vae\.up_256 +16\.0 +8\.0 +2\.0 +1\.5 +yes", text)
    assert "Other programs" not in text
    # Families in the order of the list, and columns under each other.
    assert [text.index(f"\n{family}\n") for family in ("resnet50", "depthwise", "audio")] == sorted(
        text.index(f"\n{family}\n") for family in ("resnet50", "depthwise", "audio")
    )
    header = next(line for line in lines if line.startswith("problem"))
    assert header.index("convolution") == first.index("1x56x56x64")


def test_the_tables_warn() -> None:
    busy = dataclasses.replace(record().machine, load=1.5)
    too_much = Memory("vae.up_256", 1, 1, 1, 9 << 20)
    functions = Functions(("audio.dilated",), False, 0.002, 0.002)
    made = record(machine=busy, memory=[too_much], functions=functions, modified=True)
    text = report.render_text(made)
    for words in ("(load 1.5)", "outputs NOT equal", "1 convolution with", "with changes"):
        assert words in text
    assert re.search(r"vae\.up_256 .* NO\n", text)


def test_the_table_of_the_readme() -> None:
    text = report.render_markdown(record())
    assert text.startswith("`python -m maxconv bench`: 2026-07-27, Fast One, 2 threads, float32")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    tables = [row for row in cells if set(row[-1]) <= {"-", ":"}]
    assert len(tables) == 2
    expected = ["resnet50.conv2_3x3", "1x56x56x64 -> 64 3x3 p1x1", "231", "289", "154"]
    assert [*expected, "0.80x", "1.50x", "1.02x"] in cells
    assert [len(row) for row in cells[-4:]] == [8] * 4
    assert ["times as fast as torch, 2-D", "1.26x", "0.80x", "resnet50.conv2_3x3", "3"] in cells


# The plot.


def test_the_plot(tmp_path: Path) -> None:
    from maxconv.bench.plot import plot

    for name in ("plot.png", "plot.svg"):
        plot(record(), tmp_path / name)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    for words in ("resnet50.conv2_3x3", "MAX, constant filter", "MAX, filter as input", "torch"):
        assert f"<!-- {words} -->" in drawn


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
