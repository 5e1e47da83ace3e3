"""The tuned table of the Hopper implicit GEMM: what becomes a row, and that dispatch reads it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from maxconv._fields import Kernel
from maxconv._problems import problem_of
from maxconv.tuner.gpu import tuned as tables
from maxconv.tuner.gpu.configurations import Configurations, table_rows, without_split
from maxconv.tuner.gpu.results import Summary
from maxconv.tuner.gpu.run import WORKS, Result, Timed
from maxconv.tuner.kernels import rules
from maxconv.tuner.space import Space, open_space

TABLE = Path(__file__).resolve().parents[2] / "benchmarks" / "tuned" / "nvidia-h200.yaml"
NUMBERS = (1, 64, 64, 1, 1, 56, 56, 1, 3, 3, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 1, 1)

select = functools.partial(tables.select, device="a", driver="1", units=132, l2_bytes=1 << 20)


def opened(numbers: tuple[int, ...], units: int = 132, *, work: str = "bare") -> Space:
    problem = problem_of(numbers)
    return open_space(problem, "sm90", dtype="bfloat16", residual=work == "fused", units=units)


@pytest.fixture(scope="module")
def configurations() -> Configurations:
    space = opened(NUMBERS)
    return Configurations(without_split(space.judge.fields), table_rows(space.judge))


def summary(configurations: Configurations, gains: Mapping[str, float], index: int = 2) -> Summary:
    """Of one problem, with which a configuration gains so much with each kind of work."""
    results = [
        Result(
            name="one",
            numbers=NUMBERS,
            work=work,
            layers=1,
            device="a GPU",
            incumbent=None,
            timed=[
                Timed(index=0, split_k=1, bursts=[1e-5] * 5, beside=[0.99e-5] * 5),
                Timed(index=index, split_k=1, bursts=[1e-5] * 5, beside=[gain * 1e-5] * 5),
            ],
        )
        for work, gain in gains.items()
    ]
    return Summary(configurations, results)


def test_dispatch_chooses_what_the_table_says() -> None:
    tuned = tables.read(TABLE)
    assert len(tuned.rows) > 30
    assert tables.MODULE.read_text(encoding="utf-8") == tables.mojo_source(tuned)
    for row in tuned.rows:
        assert all(before >= after for before, after in row.us.values()), row.problem
        assert any(before > after for before, after in row.us.values()), row.problem


@pytest.mark.parametrize("here", [True, False])
def test_the_first_row_for_device_and_work_is_chosen(here: bool) -> None:
    tuned = tables.read(TABLE)
    rows = [row for row in tuned.rows if here or row.confirmed]
    assert here == any(not row.confirmed for row in rows)
    first = {(row.numbers, work): row for row in reversed(rows) for work in row.us}
    assert {len(row.us) for row in first.values()} == {1, len(WORKS)}
    for (numbers, work), row in first.items():
        space = rules().open(
            Kernel.SM90,
            problem_of(numbers),
            "bfloat16",
            "bfloat16",
            residual=work == "fused",
            units=tuned.units,
            l2_bytes=tuned.l2_bytes if here else 0,
        )
        own = {entry.values: entry.row for entry in table_rows(space)}
        expected = (own[tuple(row.configuration.values())], row.split_k)
        assert tuple(space.facts.row("choice")) == expected, row.problem


def test_other_devices_have_the_model() -> None:
    row = next(row for row in tables.read(TABLE).rows if row.confirmed)
    here, there = (opened(row.numbers, units).judge.facts.row("choice") for units in (132, 114))
    assert tuple(here) != tuple(there)


def test_what_gains_with_all_work_is_a_row(configurations: Configurations) -> None:
    measured = summary(configurations, dict.fromkeys(WORKS, 1.1))
    confirmed = {"another": summary(configurations, dict.fromkeys(WORKS, 1.05))}
    tuned = select(measured, confirmed=confirmed)
    (row,) = tuned.rows
    assert (row.numbers, row.split_k) == (NUMBERS, 1)
    assert tuple(row.configuration.values()) == configurations.listed[2].values
    assert row.us == dict.fromkeys(WORKS, (11.0, 10.0))
    assert row.confirmed == {"another": dict.fromkeys(WORKS, (10.5, 10.0))}


@pytest.mark.parametrize(
    ("gains", "elsewhere"),
    [
        ((1.019, 0.999), (1.05, 1.05)),
        ((0.999, 1.019), (1.05, 1.05)),
        ((1.019, 1.019), (1.05, 1.05)),
    ],
)
def test_what_gains_too_little_is_none(
    configurations: Configurations, gains: tuple[float, ...], elsewhere: tuple[float, ...]
) -> None:
    measured, again = (
        summary(configurations, dict(zip(WORKS, each, strict=True))) for each in (gains, elsewhere)
    )
    chosen = select(measured, confirmed={"b": again})
    assert not chosen.rows


@pytest.mark.parametrize("elsewhere", [(1.004, 0.999), (1.004, 1.004)])
def test_what_gains_on_the_device_alone_is_a_row_for_it(
    configurations: Configurations, elsewhere: tuple[float, ...]
) -> None:
    measured = summary(configurations, dict.fromkeys(WORKS, 1.1))
    again = summary(configurations, dict(zip(WORKS, elsewhere, strict=True)))
    (row,) = select(measured, confirmed={"b": again}).rows
    assert row.us == dict.fromkeys(WORKS, (11.0, 10.0))
    assert not row.confirmed


@pytest.mark.parametrize("work", WORKS)
def test_a_gain_with_one_work_and_a_loss_with_the_other_is_a_row_of_that_work(
    configurations: Configurations, work: str
) -> None:
    gains = {each: 1.1 if each == work else 0.9 for each in WORKS}
    measured = summary(configurations, gains)
    again = {"b": summary(configurations, gains)}
    (row,) = select(measured, confirmed=again).rows
    assert row.us == {work: (11.0, 10.0)}
    assert row.confirmed == {"b": row.us}


def test_a_row_of_one_work_gains_more_than_that_of_both(configurations: Configurations) -> None:
    both = summary(configurations, dict.fromkeys(WORKS, 1.1))
    for gain, rows in ((1.1, 1), (1.119, 1), (1.15, 2)):
        bare, fused = both.results
        other = Timed(index=3, split_k=1, bursts=[1e-5] * 5, beside=[gain * 1e-5] * 5)
        worse = replace(other, beside=[0.9e-5] * 5)
        found = select(
            Summary(
                configurations,
                [
                    replace(bare, timed=[*bare.timed, other]),
                    replace(fused, timed=[*fused.timed, worse]),
                ],
            ),
        ).rows
        assert len(found) == rows
        assert set(found[-1].us) == set(WORKS)
        assert rows == 1 or tuple(found[0].us) == (WORKS[0],)


def test_a_gain_with_one_work_and_no_loss_with_the_other_is_a_row(
    configurations: Configurations,
) -> None:
    measured = summary(configurations, dict(zip(WORKS, (1.001, 1.1), strict=True)))
    again = {"b": summary(configurations, dict(zip(WORKS, (1.02, 1.001), strict=True)))}
    (row,) = select(measured, confirmed=again).rows
    assert row.us == dict(zip(WORKS, ((10.01, 10.0), (11.0, 10.0)), strict=True))


def test_what_dispatch_chooses_with_one_work_may_be_the_row(
    configurations: Configurations,
) -> None:
    """Beside itself it gains nothing: the noise must not decide."""
    gains = dict(zip(WORKS, (0.99, 1.1), strict=True))
    bare, fused = summary(configurations, gains).results
    (row,) = select(Summary(configurations, [bare, fused])).rows
    assert set(row.us) == {WORKS[1]}
    chosen = Summary(configurations, [replace(bare, incumbent=(2, 1)), fused])
    (row,) = select(chosen).rows
    assert row.us == dict(zip(WORKS, ((9.9, 9.9), (11.0, 10.0)), strict=True))


def test_the_fastest_that_is_confirmed_is_the_row_for_all(configurations: Configurations) -> None:
    best, second = (
        summary(configurations, dict.fromkeys(WORKS, gain), index)
        for index, gain in ((2, 1.2), (3, 1.1))
    )
    both = [
        replace(one, timed=[*one.timed, *two.timed])
        for one, two in zip(best.results, second.results, strict=True)
    ]
    here, everywhere = select(Summary(configurations, both), confirmed={"b": second}).rows
    assert tuple(here.configuration.values()) == configurations.listed[2].values
    assert not here.confirmed
    assert tuple(everywhere.configuration.values()) == configurations.listed[3].values
    assert set(everywhere.confirmed) == {"b"}


def test_what_was_measured_in_part_is_none(configurations: Configurations) -> None:
    whole = summary(configurations, dict.fromkeys(WORKS, 1.1))
    part = summary(configurations, {WORKS[0]: 1.1})
    assert not select(part).rows
    (row,) = select(whole, confirmed={"another": part}).rows
    assert not row.confirmed


def test_rows_of_the_table_before_stay(configurations: Configurations) -> None:
    measured = summary(configurations, dict.fromkeys(WORKS, 1.1))
    tuned = select(measured)
    (row,) = tuned.rows
    slower = replace(row, configuration=row.configuration | {"halo": 5})
    other = replace(row, problem="other", numbers=(2, *row.numbers[1:]))
    kept = tables.keeping(tuned, replace(tuned, rows=(slower, other)))
    assert kept.rows == tuple(sorted((row, other), key=lambda each: each.problem))
    bare = replace(row, us={WORKS[0]: (11.0, 9.0)})
    kept = tables.keeping(replace(tuned, rows=(bare,)), tuned)
    assert kept.rows == (bare, row)
    assert tables.keeping(tuned, replace(tuned, rows=(bare, slower))).rows == (row,)
    everywhere = replace(slower, confirmed={"b": row.us})
    assert tables.keeping(tuned, replace(tuned, rows=(everywhere,))).rows == (row, everywhere)
    confirmed = replace(tuned, rows=(everywhere,))
    assert tables.keeping(confirmed, replace(tuned, rows=(row, bare))).rows == (everywhere,)
    with pytest.raises(ValueError, match="--keep: a table of b with 132 multiprocessors, but"):
        tables.keeping(tuned, replace(tuned, device="b"))


def test_a_table_is_read_as_it_was_written(configurations: Configurations, tmp_path: Path) -> None:
    measured = summary(configurations, dict.fromkeys(WORKS, 1.1))
    tuned = select(measured, date="2026-01-02")
    tables.write(tmp_path / "a.yaml", tuned)
    assert tables.read(tmp_path / "a.yaml") == tuned


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows: [", "no tuned table"),
        ("device: a", "no tuned table"),
        ("rows: [{problem: a}]", "no tuned table"),
    ],
)
def test_what_is_no_table(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        tables.read(file)


def test_a_problem_has_one_row(tmp_path: Path) -> None:
    tuned = tables.read(TABLE)
    tables.write(tmp_path / "a.yaml", tuned)
    line = next(line for line in TABLE.read_text().splitlines() if line.startswith("- "))
    with (tmp_path / "a.yaml").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(ValueError, match="a problem stands there twice"):
        tables.read(tmp_path / "a.yaml")


def test_a_configuration_must_be_in_the_kernels_table() -> None:
    tuned = tables.read(TABLE)
    row = tuned.rows[0]
    strange = tables.TunedRow(
        row.problem,
        row.numbers,
        row.split_k,
        row.configuration | {"halo": 5},
        row.us,
        row.confirmed,
    )
    with pytest.raises(ValueError, match=r"is not in the kernel's table .*candidates\.mojo"):
        tables.mojo_source(tables.Tuned("a", "1", 90, 132, 1 << 20, "2026-01-02", (strange,)))
