"""Measurement on a CPU, and searches that measure."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.host.kernel_checks import AVX512
from tests.reference import conv_reference

from maxconv import _cli as cli
from maxconv._fields import Kernel
from maxconv._library_files import Family
from maxconv._native import host
from maxconv._openmp import installed_parallel
from maxconv._packing import bfloat16_to_float32
from maxconv._problem import ConvProblem
from maxconv._problems import parse_problem
from maxconv._tuned import use_no_table
from maxconv.tuner.command import this_environment
from maxconv.tuner.measure import CpuMeasurer, Measurer, Outcome, Protocol
from maxconv.tuner.measure.base import DISPATCHED, Configuration, summarize
from maxconv.tuner.measure.clock import Clock
from maxconv.tuner.measure.cpu import Worker, WorkerError
from maxconv.tuner.measure.cuts import CutRequest, call_of, measure_cuts
from maxconv.tuner.measure.oracle import LARGEST, Operands, convolved
from maxconv.tuner.records import Environment, Records
from maxconv.tuner.rivals import rivals, shares
from maxconv.tuner.search import RandomSearch
from maxconv.tuner.search.random import RandomSettings
from maxconv.tuner.session import Progress, tune
from maxconv.tuner.solver import Solver
from maxconv.tuner.space import Space, configuration, open_space, open_spaces

#: As short as it gets: tests look at what is right, not at how long it takes.
QUICK = Protocol(rounds=2, burst_s=1e-6)

PROBLEMS = [
    parse_problem("1x12x13x24:40x3x3", padding=1),
    parse_problem("2x9x9x32:64x1x1"),
    parse_problem("1x11x20x32:48x3x5", stride=(2, 1), dilation=(1, 2), padding=2, groups=2),
    parse_problem("1x40x3:17x7", stride=2, padding=3),
    parse_problem("1x4x6x7x16:16x2x3x3", padding=1),
]


def request(space: Space) -> CutRequest:
    return CutRequest(
        *(space.problem, space.kernel.name.lower(), space.dtype, space.out_dtype),
        *(space.units, space.judge.fields, QUICK),
    )


def drawn(space: Space, count: int, seed: int = 1) -> list[Configuration]:
    return [configuration(space, v) for v in Solver(space.model, seed).samples(count)]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_oracle_is_the_definition(problem: ConvProblem) -> None:
    rng = np.random.default_rng(3)
    x = rng.integers(-LARGEST, LARGEST + 1, tuple(map(int, problem.input_shape)))
    taps, channels = problem.filter_size, int(problem.group_channels)
    krsc = rng.integers(-LARGEST, LARGEST + 1, (int(problem.filters), *taps, channels))
    expected = conv_reference(
        x,
        krsc,
        stride=problem.stride,
        dilation=problem.dilation,
        pad_before=problem.pad_before,
        pad_after=problem.pad_after,
        groups=problem.groups,
    )
    np.testing.assert_array_equal(convolved(problem, x, krsc), expected)


def test_the_oracle_sees_a_single_wrong_output() -> None:
    made = Operands(PROBLEMS[0], "bfloat16", "float32", 0)
    assert made.activation.dtype == np.uint16
    assert np.abs(bfloat16_to_float32(made.activation)).max() == LARGEST
    made.output[...] = made.expected
    assert made.wrong() is None
    made.output[made.output == 0] = -0.0
    assert made.wrong() is None
    made.output[0, 2, 3, 4] += 1
    count = made.expected.size
    assert made.wrong() == f"wrong result: 1 of {count} outputs, the first at (0, 2, 3, 4)"
    made.poison()
    assert np.isnan(made.output).all()
    assert str(made.wrong()).startswith(f"wrong result: {count} of {count} outputs")
    for dtype in ("int8", "uint8"):
        eight = Operands(PROBLEMS[0], dtype, dtype, 0)
        assert eight.activation.min() == (0 if dtype == "uint8" else -LARGEST)
        assert np.unique(eight.expected).size > 50
        eight.poison()
        assert str(eight.wrong()).startswith(f"wrong result: {count} of {count} outputs")
        eight.output[...] = eight.expected
        assert eight.wrong() is None
    with pytest.raises(ValueError, match="sums of 2000000 products may be no exact float32"):
        Operands(parse_problem("1x1x1x2000000:1x1x1"), "float32", "float32", 0)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_every_configuration_computes_the_convolution(problem: ConvProblem) -> None:
    space = open_space(problem, "cpu", units=2)
    asked = request(space)
    outcomes = measure_cuts(asked, drawn(space, 24), space.judge.choice())
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    assert all(outcome.seconds and outcome.incumbent for outcome in outcomes)


#: Problems of the other kernels: a filter a channel, narrow groups, few filters, small squares.
OTHERS = [
    parse_problem("2x9x13x24:24x3x3", padding=1, groups=24),
    parse_problem("1x7x50x19:19x5x5", padding=2, groups=19),
    parse_problem("2x9x13x32:32x3x3", padding=1, groups=8),
    parse_problem("1x13x19x40:5x3x3", padding=1),
    parse_problem("1x20x21x40:72x3x3", padding=1),
    parse_problem("2x19x19x12:36x2x2"),
]


@pytest.mark.parametrize("problem", OTHERS, ids=str)
def test_every_kernels_configurations_compute_the_convolution(problem: ConvProblem) -> None:
    for space in open_spaces(problem, "cpu", units=3):
        outcomes = measure_cuts(request(space), [*drawn(space, 24), space.judge.choice()])
        assert {outcome.error for outcome in outcomes} == {None}


@pytest.mark.extended
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "uint8"])
def test_many_configurations_compute_the_convolution(dtype: str) -> None:
    for place, problem in enumerate([*PROBLEMS, *OTHERS]):
        for units in (1, 3):
            for space in open_spaces(problem, "cpu", dtype=dtype, units=units):
                outcomes = measure_cuts(request(space), drawn(space, 60, place))
                assert {outcome.error for outcome in outcomes} == {None}, space.kernel


def test_what_cannot_run_is_said_and_the_rest_is_measured() -> None:
    space = open_space(PROBLEMS[0], "cpu", units=1)
    [good, bad] = drawn(space, 2)
    bad = {**bad, "tiles": 19}
    outcomes = measure_cuts(request(space), [bad, good])
    assert outcomes[0] == Outcome(None, error="configuration: tiles: 19 is not 1 to 18")
    assert outcomes[1].seconds is not None
    assert outcomes[1].incumbent is None
    with pytest.raises(ValueError, match="incumbent: configuration: tiles: 19 is not 1 to 18"):
        measure_cuts(request(space), [good], bad)


def test_a_cut_is_named_of_a_kernel_and_for_its_threads() -> None:
    use_no_table()
    library = host(Family("float32", "float32", "float32", scaled=False))
    made = Operands(PROBLEMS[0], "float32", "float32", 0)
    space = open_space(PROBLEMS[0], "cpu", units=1)
    cut = tuple(space.judge.choice().values())
    call = library.prepare(call_of(PROBLEMS[0], made, Kernel.IMPLICIT_GEMM))
    with pytest.raises(ValueError, match="configuration: 2 numbers are not access, tile_rows, ti"):
        library.name(call, cut[:2], 1)
    library.name(call, cut, 1)
    call.run(*made.addresses(1, 0))
    assert made.wrong() is None
    with pytest.raises(ValueError, match="threads: 2 are not the 1 of the configuration"):
        call.run(*made.addresses(2, installed_parallel()))
    for kernel, message in (
        (Kernel.AUTO, "config: auto has no cut; name the kernel whose it is"),
        (Kernel.DEPTHWISE, "depthwise takes one channel and one filter a group"),
        (Kernel.REFERENCE, "reference takes no cut by name"),
    ):
        other = library.prepare(call_of(PROBLEMS[0], made, kernel))
        with pytest.raises(ValueError, match=message):
            library.name(other, cut, 1)


def test_outcomes_are_medians_with_their_spread() -> None:
    outcome = summarize([4.0, 1.0, 2.0, 3.0, 100.0], [4.0, 2.0, 6.0, 9.0, 50.0])
    assert outcome == Outcome(
        3.0, spread=1.0 / 3.0, incumbent=6.0, incumbent_spread=2.5 / 6.0, gain=(1.0, 2.0, 3.0)
    )
    assert summarize([2.0]) == Outcome(2.0)
    with pytest.raises(ValueError, match="rounds: 0 is not positive"):
        Protocol(rounds=0)


def test_a_process_that_crashes_or_hangs_is_told_and_replaced() -> None:
    worker = Worker()
    try:
        first = worker.run(60, os.getpid)
        assert first != os.getpid()
        with pytest.raises(WorkerError, match="crashed: its process ended"):
            worker.run(60, os.abort)
        second = worker.run(60, os.getpid)
        assert second != first
        started = time.monotonic()
        with pytest.raises(WorkerError, match="hung: its process took more than 1 s"):
            worker.run(1, time.sleep, 600)
        assert time.monotonic() - started < 60
        with pytest.raises(ProcessLookupError):
            _wait_for_end(second)
        assert worker.run(60, os.getpid) not in (first, second)
    finally:
        worker.close()


def _wait_for_end(process: int) -> None:
    for _ in range(200):
        os.kill(process, 0)
        time.sleep(0.05)


class Fragile(Executor):
    """Runs work at once; breaks where a configuration has an odd number of tiles."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        configurations = args[1] if len(args) > 1 else []
        if any(configuration["tiles"] % 2 for configuration in configurations):
            future.set_exception(BrokenProcessPool("it ended"))
        else:
            future.set_result(fn(*args, **kwargs))
        return future


def test_what_crashes_is_found_and_the_rest_is_measured() -> None:
    space = open_space(PROBLEMS[0], "cpu", units=1)
    asked = drawn(space, 12)
    bad = [bool(values["tiles"] % 2) for values in asked]
    assert 0 < sum(bad) < len(bad)
    outcomes = CpuMeasurer(space, QUICK, Fragile).measure(asked)
    assert [outcome.error == "crashed: its process ended" for outcome in outcomes] == bad
    assert [outcome.seconds is None for outcome in outcomes] == bad


def test_work_goes_to_the_executor_that_is_passed() -> None:
    space = open_space(PROBLEMS[1], "cpu", units=1)
    measurer = CpuMeasurer(space, QUICK, lambda: ThreadPoolExecutor(1))
    try:
        choice = measurer.choice()
        [outcome] = measurer.measure([choice], choice)
    finally:
        measurer.close()
    assert outcome.error is None
    assert measurer.measure([]) == []
    with pytest.raises(ValueError, match="target: 'sm90' is not measured here; 'cpu' is"):
        CpuMeasurer(open_space(parse_problem("1x9x9x64:64x3x3"), "sm90"))
    with pytest.raises(ValueError, match="residual: spaces without one are measured"):
        CpuMeasurer(open_space(PROBLEMS[1], "cpu", residual=True))


class Formula(Measurer):
    """Times by a formula, of which one field fails."""

    def __init__(self, space: Space, *, interrupt_after: int = 10**9) -> None:
        self.space = space
        self.asked = 0
        self._interrupt_after = interrupt_after

    def choice(self) -> Configuration:
        return self.space.judge.choice()

    def dispatched(self) -> str:
        return "winograd"

    def confirm(self, configuration: Configuration) -> Outcome:
        [outcome] = self.measure([configuration], DISPATCHED)
        assert outcome.seconds
        assert outcome.incumbent
        gain = outcome.incumbent / outcome.seconds
        return replace(outcome, gain=(0.99 * gain, gain, 1.01 * gain))

    def measure(
        self, configurations: Sequence[Configuration], incumbent: Configuration | None = None
    ) -> list[Outcome]:
        self.asked += len(configurations)
        if self.asked > self._interrupt_after:
            raise KeyboardInterrupt
        assert incumbent == DISPATCHED
        beside = self._seconds(self.choice())
        return [
            Outcome(None, error="too deep")
            if values["depth"] == 16
            else Outcome(self._seconds(values), incumbent=beside)
            for values in configurations
        ]

    def _seconds(self, values: Configuration) -> float:
        return 1e-3 * (1 + abs(values["tiles"] - 3) + abs(values["tile_rows"] - 4))


@pytest.fixture(scope="module")
def space() -> Space:
    return open_space(parse_problem("1x56x56x64:64x3x3", padding=1), "cpu", units=2)


HERE = Environment("a device", "a driver", {"maxconv": "0.1.0"})


def test_a_search_measures_until_its_budget_is_spent(space: Space, tmp_path: Path) -> None:
    told: list[Progress] = []
    search = RandomSearch(space, 1, RandomSettings(16))
    with Records(tmp_path / "r.sqlite", HERE) as records:
        result = tune(space, search, Formula(space), budget=40, records=records, report=told.append)
        # And what dispatch chooses.
        assert [record.search for record in records.of(space)].count("dispatch") == 1
        assert len(records.of(space)) == 41
    assert len(result.trials) == 41
    assert [progress.spent for progress in told] == [16, 32, 40]
    assert result.gain > 1.5
    assert result.best
    assert result.best.seconds == min(trial.seconds for trial in result.trials if trial.seconds)
    assert result.confirmation
    assert result.confirmation.holds
    assert result.confirmation.kernel == result.kernel == "winograd"
    assert told[-1].invalid == sum(t.seconds is None for t in result.trials) / search.proposed
    assert re.fullmatch(
        r"40/40 trials, best [\d.]+ us \([\d.]+x of dispatch's\), [\d.]+ % invalid, 0 s left",
        str(told[-1]),
    )


def test_an_interrupted_search_keeps_its_rounds_and_goes_on(space: Space, tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    with Records(path, HERE) as records:
        search = RandomSearch(space, 1, RandomSettings(8))
        stopped = tune(
            space,
            search,
            # The third round is interrupted; the confirmation is measured by nothing then.
            _Once(space, interrupt_at=4),
            budget=100,
            records=records,
        )
        assert stopped.interrupted
        assert len(records.of(space)) == 17
    with Records(path, HERE) as records:
        search = RandomSearch(space, 1, RandomSettings(8))
        result = tune(space, search, Formula(space), budget=8, records=records)
        assert not result.interrupted
        assert len(records.of(space)) == 25
        # None is measured twice.
        keys = [tuple(sorted(r.configuration.items())) for r in records.of(space)]
        assert len(set(keys)) == 25
    assert len(result.trials) == 25


class _Once(Formula):
    """Is interrupted in one of its calls."""

    def __init__(self, space: Space, *, interrupt_at: int) -> None:
        super().__init__(space)
        self._calls = 0
        self._interrupt_at = interrupt_at

    def measure(
        self, configurations: Sequence[Configuration], incumbent: Configuration | None = None
    ) -> list[Outcome]:
        self._calls += 1
        if self._calls == self._interrupt_at:
            raise KeyboardInterrupt
        return super().measure(configurations, incumbent)


def test_times_of_rounds_compare_on_a_machine_whose_speed_changes(space: Space) -> None:
    class Changing(Formula):
        def _seconds(self, values: Configuration) -> float:
            return super()._seconds(values) * (1 + self.asked % 3)

    measurer = Changing(space)
    result = tune(space, RandomSearch(space, 1, RandomSettings(8)), measurer, budget=32)
    steady = Formula(space)
    # The first measurement, of what dispatch chooses, is in a slow second.
    for trial in result.trials:
        if trial.seconds is not None:
            expected = 2 * steady._seconds(configuration(space, trial.candidate.values))
            assert trial.seconds == pytest.approx(expected)


def test_nothing_is_found_where_dispatch_is_best(space: Space) -> None:
    class Slow(Formula):
        def _seconds(self, values: Configuration) -> float:
            return 1e-3 if values == self.choice() else 2e-3

    measurer = Slow(space)
    result = tune(space, RandomSearch(space, 1, RandomSettings(8)), measurer, budget=8)
    assert result.best is None
    assert result.gain == 1
    # Equal, which is no gain.
    assert result.confirmation
    assert result.confirmation.gain[1] == 1
    assert not result.confirmation.holds
    with pytest.raises(ValueError, match="budget: 0 is not positive; at least 1 trial"):
        tune(space, RandomSearch(space, 1), measurer, budget=0)


def test_the_command_searches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.sqlite"
    arguments = ["tune", "--conv", "1x8x8x16:16x1x1", "--units", "1", "--search", "random"]
    arguments += ["--budget", "5", "--seed", "3", "--records", str(path), "--no-table"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr()
    assert "1x8x8x16:16x1x1: 5/5 trials, best " in printed.err
    assert re.match(r"1x8x8x16:16x1x1: 6 trials; dispatch [\d.]+ us \(\w+\), ", printed.out)
    assert "tuned.yaml" not in printed.out
    with Records(path, this_environment()) as records:
        small = open_space(parse_problem("1x8x8x16:16x1x1"), "cpu", units=1)
        found = records.of(small)
        assert {(record.search, record.seed, record.error) for record in found} == {
            ("random", 3, None),
            ("dispatch", 3, None),
        }
        assert len(found) == 6
        [confirmation] = records.confirmations("cpu")
        assert confirmation.problem == tuple(small.problem.numbers())


def test_the_command_searches_every_kernel_that_may_be_faster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maxconv.tuner.rivals.HOPELESS", 100.0)
    path = tmp_path / "r.sqlite"
    arguments = ["tune", "--conv", "1x8x8x16:16x3x3", "--units", "1", "--search", "random"]
    arguments += ["--budget", "5", "--records", str(path), "--no-table"]
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1x8x8x16:16x3x3 on implicit_gemm: 4 trials; ")
    # With AVX-512 its space is smaller than its share of the budget.
    trials = 2 if AVX512 else 3
    assert lines[1].startswith(f"1x8x8x16:16x3x3 on winograd: {trials} trials; ")
    with Records(path, this_environment()) as records:
        found = records.confirmations("cpu")
    assert [confirmation.tuned for confirmation in found] == ["implicit_gemm", "winograd"]


class Timed(Formula):
    """Takes a number of times what dispatch's choice takes."""

    def __init__(self, space: Space, times: float) -> None:
        super().__init__(space)
        self.closed = False
        self._times = times

    def measure(
        self, configurations: Sequence[Configuration], incumbent: Configuration | None = None
    ) -> list[Outcome]:
        return [Outcome(1e-3 * self._times, incumbent=1e-3) for _ in configurations]

    def close(self) -> None:
        self.closed = True


def test_kernels_that_are_hopeless_are_not_searched(space: Space) -> None:
    other = open_space(space.problem, "cpu", units=2, kernel=Kernel.WINOGRAD)
    made: dict[Kernel, Timed] = {}

    def asked(gemm: float, winograd: float, tabled: Kernel | None = None) -> list[Kernel]:
        made[space.kernel], made[other.kernel] = Timed(space, gemm), Timed(other, winograd)
        found = rivals(
            [space, other],
            lambda each: made[each.kernel],
            lambda each: {"tiles": 1} if each.kernel is tabled else None,
        )
        kept = [rival.space.kernel for rival in found]
        assert [kernel for kernel, measurer in made.items() if not measurer.closed] == kept
        return kept

    assert asked(1.0, 1.4) == [Kernel.IMPLICIT_GEMM, Kernel.WINOGRAD]
    assert asked(2.0, 1.0) == [Kernel.WINOGRAD]
    assert asked(2.0, 1.0, Kernel.IMPLICIT_GEMM) == [Kernel.IMPLICIT_GEMM, Kernel.WINOGRAD]
    # Of those that are all slower than what dispatch chooses, the best.
    assert asked(2.0, 3.0) == [Kernel.IMPLICIT_GEMM]
    assert shares(7, 3) == [3, 2, 2]
    assert shares(1, 2) == [1, 1]


def test_a_clock_of_one_thread_stands_still_while_it_waits() -> None:
    assert Clock(1).seconds(lambda: time.sleep(0.02), 2) < 0.01
    assert Clock(2).seconds(lambda: time.sleep(0.02), 2) >= 0.02


def test_a_disturbed_burst_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Seconds on the wall, and of two threads together.
    bursts = iter([(1.0, 2.0), (3.0, 2.0), (1.5, 2.0), (1.1, 2.2), *[(4.0, 2.0)] * 3, (2.0, 2.0)])
    monkeypatch.setattr(Clock, "_burst", lambda *_: next(bursts))
    clock = Clock(2)
    assert clock.seconds(lambda: None, 2) == 0.5
    assert clock.seconds(lambda: None, 1) == 1.1
    # The least disturbed of four.
    assert clock.seconds(lambda: None, 1) == 2.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "0"], "--budget: 0 is not positive; at least 1 trial is needed"),
        (["--target", "sm90"], "--target: sm90 can be shown with --show-space; cpu is searched"),
        (["--units", "0"], "units: 0 is not positive; at least 1 is needed"),
    ],
)
def test_bad_arguments_of_the_command(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", "resnet50.conv2_3x3", *arguments]) == 1
    assert message in capsys.readouterr().err
