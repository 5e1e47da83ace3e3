"""The tuned table of the Hopper implicit GEMM: which configuration a problem was fastest with.

``benchmarks/tuned/*.yaml`` is the table; the module that dispatch reads is written from it::

    python -m maxconv.tuner.gpu.tuned benchmarks/tuned/nvidia-h200.yaml
"""

from __future__ import annotations

import datetime
import itertools
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ..._library import OPERATIONS
from ..._problems import problem_of
from ..space import open_space
from .configurations import table_rows
from .problems import DTYPE
from .results import Summary, gain_of
from .run import WORKS, Result, Timed

__all__ = [
    "MODULE",
    "Tuned",
    "TunedRow",
    "keeping",
    "mojo_source",
    "problem_key",
    "read",
    "select",
    "write",
]

#: What ``mojo_source`` is written to.
MODULE = OPERATIONS / "nvidia" / "sm90" / "gemm" / "tuned_rows.mojo"

#: Of a configuration's gains, bare and fused, the least mean for which it becomes a row. The best
#: of many is chosen, and clocks differ from run to run.
LEAST_GAIN = 0.02

#: The same where it is measured again.
CONFIRMED_GAIN = 0.005

_OFFSET, _PRIME, _BITS = 0xCBF29CE484222325, 0x100000001B3, (1 << 64) - 1


@dataclass(frozen=True)
class TunedRow:
    """A problem, and what it was fastest with."""

    problem: str
    """A name, for people."""
    numbers: tuple[int, ...]
    """As ``ConvProblem.of_numbers`` takes them."""
    split_k: int
    configuration: dict[str, int]
    """Of the kernel's fields, but for ``split_k``."""
    us: dict[str, tuple[float, float]]
    """Of each kind of work what dispatch took before, and what the row takes, in microseconds. A
    row of one kind is for this kind alone, and goes before that of all kinds."""
    confirmed: dict[str, dict[str, tuple[float, float]]]
    """The same of other devices with as many multiprocessors. Without any the row is for the
    table's device alone, and goes before those for all."""


@dataclass(frozen=True)
class Tuned:
    """A table."""

    device: str
    driver: str
    capability: int
    """Compute capability, times ten."""
    units: int
    """Multiprocessors."""
    l2_bytes: int
    """Of its L2 cache, which tells it from others with as many multiprocessors."""
    date: str
    rows: tuple[TunedRow, ...]


def select(
    summary: Summary,
    *,
    device: str,
    driver: str,
    units: int,
    l2_bytes: int,
    date: str | None = None,
    confirmed: Mapping[str, Summary] | None = None,
) -> Tuned:
    """Returns the table that measurements make of the kernel's own rows.

    A problem gets a row if a configuration of the kernel's table is faster than dispatch's choice,
    bare and fused, in both measurements where it was timed once more, and by ``LEAST_GAIN`` in the
    mean of what exceeds the noise; wherever it was measured again, by ``CONFIRMED_GAIN``. It need
    not be faster where dispatch chooses it anyway. Of several it gets the fastest that is. With one
    kind of work it gets a row of its own if another configuration gains more by ``LEAST_GAIN``, and
    so does the device itself if one does there alone.

    Args:
        summary: The measurements.
        device: Where.
        driver: Of the device.
        units: Its multiprocessors.
        l2_bytes: Of its L2 cache.
        date: Of the table; by default today.
        confirmed: By device, measurements of the same configurations on others with as many
            multiprocessors: a problem that is missing there gets no row for them.
    """
    found = _by_problem(summary)
    again = {name: _by_problem(each) for name, each in (confirmed or {}).items()}
    own = _own_rows(found)
    rows = []
    for numbers, results in found.items():
        if set(results) != set(WORKS):
            continue
        elsewhere = {
            name: (confirmed[name], each.get(numbers, {}))
            for name, each in again.items()
            if confirmed is not None
        }
        gains = dict.fromkeys(WORKS, 0.0)
        # For all devices, then for this alone, and of all kinds of work together first: what comes
        # later must gain more.
        every = (WORKS, *((work,) for work in WORKS))
        for where, works in itertools.product((elsewhere, {}) if elsewhere else ({},), every):
            before = statistics.fmean(gains[work] for work in works)
            row = _row(summary, results, works, where, own, before + LEAST_GAIN)
            if row is not None:
                rows.append(row)
                gains |= {work: math.log(us[0] / us[1]) for work, us in row.us.items()}
    rows.sort(key=_place)
    today = date or datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return Tuned(device, driver, 90, units, l2_bytes, today, tuple(rows))


def _row(
    summary: Summary,
    results: Mapping[str, Result],
    works: Sequence[str],
    elsewhere: Mapping[str, tuple[Summary, Mapping[str, Result]]],
    own: Mapping[tuple[int, ...], int],
    least: float,
) -> TunedRow | None:
    """Returns the row of the fastest of the kernel's own configurations, if one gains enough.

    Args:
        summary: The measurements.
        results: Those of the problem.
        works: The kinds of work that the row is for.
        elsewhere: By device, measurements that must confirm it, and those of the problem.
        own: The kernel's rows by their values.
        least: What it must gain.
    """
    gaining = _gaining([results[work] for work in works], least)
    for pair, (us, _) in gaining.items():
        values = summary.configurations.listed[pair[0]].values
        others = {
            name: _confirmation((values, pair[1]), *each, works) for name, each in elsewhere.items()
        }
        if values in own and all(others.values()):
            held = summary.configurations.configuration(*pair)
            split_k = held.pop("split_k")
            first = results[WORKS[0]]
            return TunedRow(first.name, first.numbers, split_k, held, us, others)
    return None


def keeping(tuned: Tuned, before: Tuned) -> Tuned:
    """Returns a table and those rows of the one before it whose problems it lacks.

    Args:
        tuned: What measurements selected beside dispatch, which had ``before``.
        before: That table, of the same device.

    Raises:
        ValueError: ``before`` is another device's.
    """
    here, there = ((each.device, each.units) for each in (tuned, before))
    if here != there:
        raise ValueError(
            f"--keep: a table of {there[0]} with {there[1]} multiprocessors, but measured was "
            f"{here[0]} with {here[1]}"
        )
    whole = [row for row in tuned.rows if set(row.us) == set(WORKS)]
    replaced = {(row.numbers, False) for row in whole}
    replaced |= {(row.numbers, True) for row in whole if row.confirmed}
    rows = {_key(row): row for row in before.rows}
    rows = {key: row for key, row in rows.items() if key[:2] not in replaced}
    rows |= {_key(row): row for row in tuned.rows}
    return replace(tuned, rows=tuple(sorted(rows.values(), key=_place)))


def _key(row: TunedRow) -> tuple[tuple[int, ...], bool, tuple[str, ...]]:
    """Returns what a row is for: a problem, on all devices or one, with some kinds of work."""
    return (row.numbers, bool(row.confirmed), tuple(row.us))


def _place(row: TunedRow) -> tuple[str, bool, int, str]:
    """Returns where a row stands.

    Those of the device alone come first, and those of one kind of work before that of all.
    """
    return (row.problem, bool(row.confirmed), len(row.us), next(iter(row.us)))


def _by_problem(summary: Summary) -> dict[tuple[int, ...], dict[str, Result]]:
    """Returns the results of each problem, by the kind of work."""
    found: dict[tuple[int, ...], dict[str, Result]] = {}
    for result in summary.measured:
        found.setdefault(result.numbers, {})[result.work] = result
    return found


def _confirmation(
    values: tuple[tuple[int, ...], int],
    other: Summary,
    results: Mapping[str, Result],
    works: Sequence[str],
) -> dict[str, tuple[float, float]]:
    """Returns the times of a configuration elsewhere, or none unless it gains there."""
    if len(results) != len(WORKS):
        return {}
    gaining = _gaining([results[work] for work in works], CONFIRMED_GAIN)
    for (index, split_k), (us, _) in gaining.items():
        if (other.configurations.listed[index].values, split_k) == values:
            return us
    return {}


def _gaining(
    results: Sequence[Result], least: float
) -> dict[tuple[int, int], tuple[dict[str, tuple[float, float]], float]]:
    """Returns the configurations that gain, the fastest first.

    With them their times with each work, and the mean of their gains' logarithms.

    Args:
        results: Of one problem, of some kinds of work.
        least: The mean of their gains.
    """
    gains = [_gains(result) for result in results]
    works = list(zip(results, gains, strict=True))
    means = {
        pair: statistics.fmean(_counted(result, each[pair]) for result, each in works)
        for pair in gains[0]
        if all(pair in each and _is_allowed(result, each[pair]) for result, each in works)
    }
    fastest = sorted(means, key=means.__getitem__, reverse=True)
    return {
        pair: ({result.work: _us_of(result, each[pair]) for result, each in works}, means[pair])
        for pair in fastest
        if means[pair] >= least
    }


def _is_chosen(result: Result, timed: Timed) -> bool:
    """Returns whether a configuration is what dispatch chooses anyway."""
    return (timed.index, timed.split_k) == result.incumbent


def _is_allowed(result: Result, timed: Timed) -> bool:
    """Returns whether a configuration makes a problem no slower."""
    return _is_chosen(result, timed) or _is_faster(timed)


def _counted(result: Result, timed: Timed) -> float:
    """Returns a configuration's gain that exceeds the noise."""
    return 0.0 if _is_chosen(result, timed) else gain_of(timed).counted


def _us_of(result: Result, timed: Timed) -> tuple[float, float]:
    """Returns what dispatch took before, and a configuration, in microseconds."""
    before, after = _us(timed)
    return (before, before) if _is_chosen(result, timed) else (before, after)


def _is_faster(timed: Timed) -> bool:
    """Returns whether a configuration is, by the table's medians and burst by burst."""
    before, after = _us(timed)
    return after < before and gain_of(timed).log > 0


def _own_rows(found: Mapping[tuple[int, ...], object]) -> dict[tuple[int, ...], int]:
    """Returns the kernel's own rows by their values; of any problem they are the same."""
    if not found:
        raise ValueError("--export: nothing was measured; results of --from are needed")
    space = open_space(problem_of(next(iter(found))), "sm90", dtype=DTYPE)
    return {entry.values: entry.row for entry in table_rows(space.judge)}


def _gains(result: Result) -> dict[tuple[int, int], Timed]:
    """Returns that measurement of each configuration in which it gained least."""
    least: dict[tuple[int, int], Timed] = {}
    for timed in result.timed:
        if not timed.bursts or timed.error is not None:
            continue
        pair = (timed.index, timed.split_k)
        if pair not in least or gain_of(timed).log < gain_of(least[pair]).log:
            least[pair] = timed
    return least


def _us(timed: Timed) -> tuple[float, float]:
    before, after = (statistics.median(t) * 1e6 for t in (timed.beside, timed.bursts))
    return round(before, 2), round(after, 2)


def problem_key(numbers: Sequence[int]) -> int:
    """Returns ``problem_key`` of ``tuned.mojo``: FNV-1a of 64 bits, a number a step."""
    key = _OFFSET
    for number in numbers:
        key = (key ^ number) * _PRIME & _BITS
    return key


def write(path: Path, tuned: Tuned) -> None:
    """Writes a table as YAML, a line a row."""
    held = asdict(tuned)
    rows = held.pop("rows")
    text = yaml.safe_dump(held, sort_keys=False)
    lines = [
        f"- {yaml.safe_dump(_plain(row), default_flow_style=True, width=10**6, sort_keys=False)}"
        for row in rows
    ]
    path.write_text(f"{text}rows:\n{''.join(lines)}", encoding="utf-8")


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    def listed(us: dict[str, Any]) -> dict[str, Any]:
        return {work: list(pair) for work, pair in us.items()}

    confirmed = {name: listed(us) for name, us in row["confirmed"].items()}
    numbers = list(row["numbers"])
    return {**row, "numbers": numbers, "us": listed(row["us"]), "confirmed": confirmed}


def read(path: Path) -> Tuned:
    """Reads a table.

    Raises:
        ValueError: It is none, or a problem stands there twice.
    """
    try:
        held = yaml.safe_load(path.read_text(encoding="utf-8"))
        rows = tuple(
            TunedRow(
                problem=row["problem"],
                numbers=tuple(row["numbers"]),
                split_k=row["split_k"],
                configuration=dict(row["configuration"]),
                us=_pairs(row["us"]),
                confirmed={name: _pairs(us) for name, us in row["confirmed"].items()},
            )
            for row in held.pop("rows")
        )
        tuned = Tuned(rows=rows, **held)
    except (yaml.YAMLError, TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: no tuned table: {error}") from error
    keys = {(problem_key(numbers), *others) for numbers, *others in map(_key, rows)}
    if len(keys) != len(rows):
        raise ValueError(f"{path}: a problem stands there twice")
    return tuned


def _pairs(us: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    return {work: (before, after) for work, (before, after) in us.items()}


def mojo_source(tuned: Tuned) -> str:
    """Returns the module that dispatch reads.

    Raises:
        ValueError: A row's configuration is not in the kernel's table.
        LibraryError: The library that knows the table cannot be built.
    """
    own = _own_rows({row.numbers: row for row in tuned.rows})
    keys, places, splits, works, elsewhere = [], [], [], [], []
    for row in tuned.rows:
        values = tuple(row.configuration.values())
        if values not in own:
            raise ValueError(
                f"{row.problem}: {row.configuration} is not in the kernel's table "
                "(operations/nvidia/sm90/gemm/candidates.mojo)"
            )
        keys.append(f"    0x{problem_key(row.numbers):016X},\n")
        places.append(f"    {own[values]},\n")
        splits.append(f"    {row.split_k},\n")
        works.append(f"    {sum(1 << WORKS.index(work) for work in row.us)},\n")
        elsewhere.append(f"    {bool(row.confirmed)},\n")
    return (
        '"""Measured choices; written from benchmarks/tuned by `python -m'
        ' maxconv.tuner.gpu.tuned`."""\n\n'
        f'comptime CAPABILITY = {tuned.capability}\n"""Of {tuned.device}."""\n\n'
        f'comptime UNITS = {tuned.units}\n"""Its multiprocessors."""\n\n'
        f'comptime L2_BYTES = {tuned.l2_bytes}\n"""Of its L2 cache."""\n\n'
        f'comptime KEYS: List[UInt64] = [\n{"".join(keys)}]\n"""`problem_key` of each."""\n\n'
        f'comptime ROWS: List[Int] = [\n{"".join(places)}]\n"""Of the table of candidates."""\n\n'
        f'comptime SPLITS: List[Int] = [\n{"".join(splits)}]\n"""Blocks that share a tile."""\n\n'
        f"comptime WORKS: List[Int] = [\n{''.join(works)}]\n"
        '"""For which work: `BARE`, `FUSED`, or both."""\n\n'
        f"comptime ELSEWHERE: List[Bool] = [\n{''.join(elsewhere)}]\n"
        '"""Whether for other devices with as many multiprocessors too."""\n'
    )


if __name__ == "__main__":
    MODULE.write_text(mojo_source(read(Path(sys.argv[1]))), encoding="utf-8")
