"""The benchmark's arithmetic and its turns."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.bench_records import PROTOCOL

from maxconv.bench.cpu.memory import ALLOWANCE
from maxconv.bench.cpu.workload import SEVERAL, SMALL_FLOPS, SMALL_NBYTES
from maxconv.bench.device import (
    _ENOUGH_S,
    _FEWEST_LAUNCHES,
    CPU,
    DEVICES,
    GPU,
    LAUNCHES,
    ROTATED_NBYTES,
    Device,
)
from maxconv.bench.entrant import CONTENDERS, HostRun
from maxconv.bench.statistics import Timing, geometric_mean, percentile, summarize
from maxconv.bench.timing import Burst, interleave

FULL = CPU.full

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


def test_the_time_of_a_part_of_a_call() -> None:
    made = summarize([4.0, 8.0]).per(4)
    assert dataclasses.astuple(made) == pytest.approx((2, 1.0, 1.1, 1.5, 1.9))


def test_percentiles_that_were_not_kept() -> None:
    assert Timing(7, None, None, 8.0, None).per(4) == Timing(7, None, None, 2.0, None)


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

    def contender(self, name: str, durations: Callable[[], float]) -> Burst:
        clock = self

        class Run(HostRun):
            def __call__(self) -> list[object]:
                clock.now += durations()
                clock.log.append(name)
                return []

            def outputs(self) -> list[Any]:
                raise AssertionError("calls are timed, not read")

        run = Run()
        return lambda calls: run.burst(calls, self.read)

    def bursts(self) -> list[tuple[str, int]]:
        """Returns who was called how often between pauses."""
        parts = " ".join(self.log).split("pause")[1:]
        return [(calls.split()[0], len(calls.split())) for calls in parts]


def test_contenders_take_turns_and_a_different_one_begins() -> None:
    clock = Clock()
    contenders = {name: clock.contender(name, lambda: 1e-3) for name in "abc"}
    protocol = dataclasses.replace(FULL, rounds=3, budget_s=10)
    made = interleave(contenders, protocol, sleep=clock.sleep)
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
    made = interleave({"a": slow_start}, FULL, sleep=clock.sleep)["a"]
    assert (made.best_s, made.p90_s) == pytest.approx((1e-3, 1e-3))


def test_slow_contenders_are_called_less() -> None:
    clock = Clock()
    durations = {"fast": 1e-3, "slow": 0.05, "slower": 0.5, "once": 3.0}
    contenders = {
        name: clock.contender(name, itertools.repeat(time).__next__)
        for name, time in durations.items()
    }
    made = interleave(contenders, FULL, sleep=clock.sleep)
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
    assert interleave({}, FULL) == {}


def test_a_device_that_sees_only_whole_bursts_gives_one_sample_each() -> None:
    asked: list[int] = []

    def burst(calls: int) -> list[float]:
        asked.append(calls)
        return [2e-3]

    paused: list[float] = []
    made = interleave({"a": burst}, GPU.full, sleep=paused.append)["a"]
    assert asked == [1] + [GPU.full.calls] * GPU.full.rounds
    assert made == summarize([2e-3] * GPU.full.rounds)
    # The chip rests longer after a longer burst, up to a limit.
    assert paused[1:] == pytest.approx([GPU.full.rest * GPU.full.calls * 2e-3] * GPU.full.rounds)
    paused.clear()
    interleave({"a": lambda calls: [0.05]}, GPU.full, sleep=paused.append)
    assert set(paused[1:]) == {GPU.full.longest_pause_s}
    paused.clear()
    interleave({"a": lambda calls: [1e-6]}, GPU.full, sleep=paused.append)
    assert set(paused) == {GPU.full.pause_s}


def test_the_protocol_says_what_the_program_does() -> None:
    gpu, many = GPU.full, GPU.many
    changed = ("pause_s", "rest")
    for name in (field.name for field in dataclasses.fields(gpu)):
        assert (getattr(gpu, name) == getattr(many, name)) == (name not in changed)
    for words in (
        f"runs {SEVERAL} convolutions",
        f"fewer than {SMALL_FLOPS / 1e8:.0f}e8 floating-point operations",
        f"fewer than {SMALL_NBYTES >> 20} MiB of activation, filter and output in float32",
        f"| least pause | {FULL.pause_s * 1e3:.0f} ms | {gpu.pause_s * 1e3:.0f} ms, ",
        f"or {gpu.rest:.0f} times the burst, at most {gpu.longest_pause_s * 1e3:.0f} ms |",
        f"{many.pause_s * 1e3:.0f} ms, or {many.rest:.0f} times the burst, at most "
        f"{many.longest_pause_s * 1e3:.0f} ms",
        f"{_FEWEST_LAUNCHES} to {LAUNCHES} launches",
        f"at least {_ENOUGH_S * 1e3} ms",
        f"| calls of a burst | {FULL.calls}, of which the first {FULL.discarded} are thrown away "
        f"| {gpu.calls} |",
        f"| rounds | {FULL.rounds} | {gpu.rounds} |",
        f"| fewest rounds | {FULL.fewest_rounds} | {gpu.fewest_rounds} |",
        f"| seconds for a contender | {FULL.budget_s:.0f} | {gpu.budget_s:.0f} |",
        f"| a call is timed once from | {FULL.slow_s:.0f} s | {gpu.slow_s:.1f} s |",
        f"| convolutions of a call | {SEVERAL} or 1 | {LAUNCHES} |",
        f"more than {ROTATED_NBYTES >> 20} MiB",
        f"{ALLOWANCE >> 20} MiB are allowed",
    ):
        assert words in " ".join(PROTOCOL.split()), words


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_the_protocol_names_who_is_timed(device: Device) -> None:
    place = list(DEVICES).index(device.name) + 1
    for contender in CONTENDERS:
        (row,) = (line for line in PROTOCOL.splitlines() if line.startswith(f"| `{contender}` |"))
        works = row.split("|")[1 + place].split(":")[0]
        timed = {**device.narrow_works, **device.works}
        assert works.strip() == (", ".join(timed.get(contender, ())) or "-")
