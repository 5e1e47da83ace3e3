"""A problem's data, its check and its measurement, with made-up contenders."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from tests.bench_records import NAMED

from maxconv._problems import NamedProblem
from maxconv.bench import measure as measuring
from maxconv.bench.cpu.memory import ALLOWANCE, Memory, largest, smallest
from maxconv.bench.cpu.workload import (
    SEVERAL,
    SMALL_FLOPS,
    SMALL_NBYTES,
    Workload,
    aligned,
    convolutions,
)
from maxconv.bench.device import CPU, MAX_TOLERANCE, TOLERANCE
from maxconv.bench.entrant import (
    BARE,
    FUSED,
    Entrant,
    Float32,
    HostRun,
    Key,
    Mismatch,
    check,
)
from maxconv.bench.record import Measurement, Result
from maxconv.bench.statistics import Timing, summarize

# Data and its check.


@pytest.mark.parametrize("dtype", [name for name in TOLERANCE if name != "uint8"])
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


@pytest.mark.parametrize("dtype", MAX_TOLERANCE)
def test_max_may_be_less_exact(dtype: str) -> None:
    factor = MAX_TOLERANCE[dtype] / TOLERANCE[dtype]
    assert factor == (1 if dtype == "float32" else 16)


def test_torch_may_round_between_fused_operations() -> None:
    allowed = {
        (contender, work): measuring._tolerance(Key(contender, work), "bfloat16")
        for contender in ("maxconv", "torch", "torch.compile", "cudnn")
        for work in (BARE, FUSED)
    }
    for contender in ("torch", "torch.compile"):
        assert allowed.pop((contender, FUSED)) == 2.0**-4
    assert set(allowed.values()) == {2.0**-6}


def test_small_convolutions_share_a_call() -> None:
    for named in NAMED.values():
        problem = named.problem
        small = problem.flops < SMALL_FLOPS and problem.nbytes("float32") < SMALL_NBYTES
        assert convolutions(problem) == (SEVERAL if small else 1)
        if named.family == "depthwise":
            assert convolutions(problem) == SEVERAL
    # By its operations alone vae.conv_out would be small, by its size alone video.conv3d.
    large = ("vae.mid", "vae.conv_out", "video.conv3d")
    assert [convolutions(NAMED[name].problem) for name in large] == [1, 1, 1]
    work = Workload.make(SMALL, "float16")
    assert work.convolutions == SEVERAL


# A problem's measurement, with made-up contenders.


OURS, OURS_FUSED, TORCH, MAX = Key("maxconv"), Key("maxconv", FUSED), Key("torch"), Key("max")


class FakeRun(HostRun):
    """Some convolutions of one element."""

    def __init__(self, values: Sequence[float], convolutions: int) -> None:
        self.values, self.convolutions = values, convolutions

    def __call__(self) -> Sequence[float]:
        return self.values

    def outputs(self) -> list[Float32]:
        return [np.full((1, 1, 1, 1), value, np.float32) for value in self.values]


SMALL, LARGE = NAMED["odd.one_of_everything"], NAMED["unet.down1"]


def measure(
    outputs: Mapping[Key, Sequence[float]],
    singles: Mapping[Key, Sequence[float]] | None = None,
    missing: Mapping[Key, str] | None = None,
    named: NamedProblem = SMALL,
) -> Result:
    reference = {
        work: np.full((1, 1, 1, 1), value, np.float32) for work, value in ((BARE, 2), (FUSED, 5))
    }
    count = convolutions(named.problem)
    alone = {key: FakeRun(values, 1) for key, values in (singles or {}).items()}
    entrants = {
        key: Entrant(FakeRun(values, count), alone.get(key)) for key, values in outputs.items()
    }
    protocol = dataclasses.replace(CPU.full, pause_s=0, calls=3, discarded=1, rounds=2)
    return measuring.measure_problem(named, entrants, reference, "float32", protocol, missing or {})


def by_key(made: Result) -> dict[Key, Measurement]:
    return {entry.key: entry for entry in made.measurements}


def median(timing: Timing | None) -> float:
    assert timing is not None
    return timing.median_s


def test_a_problem_is_checked_and_timed() -> None:
    right = {OURS: [2.0] * 8, OURS_FUSED: [5.0] * 8, MAX: [2.0] * 8, TORCH: [2.0001] * 8}
    as_input = Key("max", BARE, "filter as an input")
    made = measure(right, {OURS: [2], MAX: [2]}, {as_input: "why"})
    entries = by_key(made)
    assert {key for key, entry in entries.items() if entry.kernel} == set(right)
    assert all(entry.kernel.samples == 4 for entry in entries.values() if entry.kernel)
    assert {key for key, entry in entries.items() if entry.call} == {OURS, MAX}
    assert entries[TORCH].error == pytest.approx(1e-4 / 3, rel=0.01)
    assert entries[as_input] == Measurement(*as_input, missing="why")
    assert (made.flops, made.rank, made.family, made.convolutions) == (2, 2, None, 8)


@pytest.fixture
def call_of_10_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes 10 us, and each of its convolutions 2 us."""

    def fake(bursts: Mapping[Any, Any], protocol: object) -> dict[Any, Timing]:
        runs = {key: burst.__self__ for key, burst in bursts.items()}
        return {key: summarize([10e-6 + 2e-6 * len(run.values)]) for key, run in runs.items()}

    monkeypatch.setattr(measuring, "interleave", fake)


@pytest.mark.usefixtures("call_of_10_us")
def test_times_are_of_one_convolution() -> None:
    made = by_key(measure({OURS: [2] * 8}, {OURS: [2]}))[OURS]
    assert median(made.kernel) == pytest.approx(3.25e-6)
    assert median(made.call) == pytest.approx(12e-6)


@pytest.mark.usefixtures("call_of_10_us")
def test_a_large_problem_has_one_convolution_a_call() -> None:
    made = measure({OURS: [2]}, named=LARGE)
    assert made.convolutions == 1
    entry = by_key(made)[OURS]
    assert median(entry.kernel) == pytest.approx(12e-6)
    assert entry.call == entry.kernel


@pytest.mark.parametrize(("key", "value"), [(OURS, 2.1), (OURS_FUSED, 2), (TORCH, 3)])
def test_a_wrong_output_ends_the_run(key: Key, value: float) -> None:
    right = {OURS: [2.0] * 8, OURS_FUSED: [5.0] * 8, TORCH: [2.0] * 8}
    wrong = [*right[key][:7], value]
    with pytest.raises(Mismatch, match=rf"odd\.one_of_everything: {key}: the output is off"):
        measure({**right, key: wrong})
    with pytest.raises(
        Mismatch, match=r"odd\.one_of_everything: maxconv: the output is off by 0\.33"
    ):
        measure(right, {OURS: [3]})


def test_a_call_that_does_not_convolve_often_enough_ends_the_run() -> None:
    with pytest.raises(Mismatch, match="maxconv: there are 7 outputs, not 8"):
        measure({OURS: [2] * 7})
    with pytest.raises(Mismatch, match="maxconv: there are 2 outputs, not 1"):
        measure({OURS: [2] * 8}, {OURS: [2, 2]})


def test_an_entrant_may_say_how_far_it_may_lie() -> None:
    """Of torch's integers, which saturate where a CPU has no VNNI: timed, with its error."""
    far = Entrant(FakeRun([3.0], 1), note="saturates", tolerance=math.inf)
    protocol = dataclasses.replace(CPU.full, pause_s=0, calls=3, discarded=1, rounds=2)
    reference = {BARE: np.full((1, 1, 1, 1), 2, np.float32)}

    def made(entrant: Entrant) -> list[Measurement]:
        return measuring.measure_entrants(
            "a", {TORCH: entrant}, reference, lambda key: 0.01, protocol, {}
        )

    (measurement,) = made(far)
    assert measurement.kernel is not None
    assert measurement.error == pytest.approx(1 / 3)
    assert measurement.note == "saturates"
    for bad in (
        Entrant(FakeRun([3.0], 1)),
        dataclasses.replace(far, kernel=FakeRun([math.nan], 1)),
    ):
        with pytest.raises(Mismatch, match="a: torch: the output is off"):
            made(bad)


def test_a_wrong_output_of_max_is_recorded() -> None:
    made = by_key(measure({OURS: [2] * 8, MAX: [4] * 8}, {OURS: [2], MAX: [2]}))
    assert (made[MAX].kernel, made[MAX].call) == (None, None)
    assert made[OURS].kernel is not None
    assert (made[MAX].missing or "").startswith("wrong result: the output is off by 0.67")


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
