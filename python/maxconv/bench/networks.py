"""The tables of a record of a suite's convolutions: how the ratios lie, worst first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from maxconv._problems import load_networks, named_at

from .device import LIMITS, is_narrow
from .entrant import BARE, BFLOAT16, FUSED, KERNEL, MAXCONV, WORKS
from .record import Record, Result
from .statistics import geometric_mean, percentile

__all__ = ["tables"]

#: Shares of the problems at which the distribution is shown.
_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)

#: What a kernel should reach of the opponent's speed, by work.
_GOALS = {BARE: 1.0, FUSED: 1.05}

Rows = list[list[str]]


def tables(record: Record) -> Iterator[tuple[str, list[str], Rows, int]]:
    """Yields a title, a header, rows, and how many columns are flush left.

    The opponent is the fastest of the other contenders on a problem.
    """
    results = record.results
    if rows := _distribution(results):
        header = ["with", "problems", "geometric mean", "below the goal"]
        header += [_quantile(share) for share in _SHARES]
        narrow = is_narrow(record.dtype)
        others = f"{MAXCONV} in {BFLOAT16}" if narrow else "the fastest of the others"
        yield f"Times as fast as {others}", header, rows, 1
    if rows := _ways(results):
        header = ["way", "with", "problems", "geometric mean", *map(_quantile, _SHARES)]
        yield f"{MAXCONV}'s other ways, times as fast as its usual one", header, rows, 2
    if rows := _sums(results):
        yield "Sums over a network's convolutions, in us", _sum_header(), rows, 1
    if rows := _problems(record):
        yield "Problems, worst first", _problem_header(), rows, 2


def _quantile(share: float) -> str:
    return {0.0: "worst", 0.5: "median", 1.0: "best"}.get(share, f"{share:.0%}")


def _distribution(results: Sequence[Result]) -> Rows:
    rows = []
    for work in WORKS:
        known = (result.advantage(work) for result in results)
        ratios = sorted(ratio for ratio in known if ratio is not None)
        if ratios:
            below = sum(ratio < _GOALS[work] for ratio in ratios)
            cells = [work, str(len(ratios)), f"{geometric_mean(ratios):.2f}x"]
            cells.append(f"{below} ({_GOALS[work]}x)")
            rows.append(cells + [f"{percentile(ratios, share):.2f}x" for share in _SHARES])
    return rows


def _ways(results: Sequence[Result]) -> Rows:
    """Returns how the ratios of maxconv's variants to its usual way lie."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for result in results:
        for work in WORKS:
            usual = result.median(MAXCONV, work)
            for entry in result.of(MAXCONV, work):
                seconds = entry.median(KERNEL)
                if entry.variant and usual and seconds:
                    ratios.setdefault((entry.variant, work), []).append(usual / seconds)
    rows = []
    for (variant, work), found in ratios.items():
        found.sort()
        cells = [variant, work, str(len(found)), f"{geometric_mean(found):.2f}x"]
        rows.append(cells + [f"{percentile(found, share):.2f}x" for share in _SHARES])
    return rows


def _sum_header() -> list[str]:
    header = ["network", "batch"]
    for work in WORKS:
        header += [f"{MAXCONV}, {work}", "the fastest others", "ratio"]
    return header


def _sums(results: Sequence[Result]) -> Rows:
    """Returns a row for each network and batch of which every convolution was measured."""
    named = {result.name: result for result in results}
    rows = []
    for network in load_networks().values():
        for batch in network.batches:
            parts = [
                (named.get(named_at(name, batch)), count) for name, count in network.counts.items()
            ]
            row = [network.name, str(batch)]
            for work in WORKS:
                row += _sum(parts, work)
            if any(cell != "-" for cell in row[2:]):
                rows.append(row)
    return rows


def _sum(parts: Sequence[tuple[Result | None, int]], work: str) -> list[str]:
    own = other = 0.0
    for result, count in parts:
        seconds = result and result.median(MAXCONV, work)
        opponent = result and result.opponent(work)
        if not seconds or not opponent:
            return ["-"] * 3
        own += count * seconds
        other += count * opponent[1]
    return [f"{own * 1e6:.0f}", f"{other * 1e6:.0f}", f"{other / own:.2f}x"]


def _problem_header() -> list[str]:
    header = ["problem", "convolution", "bare, us", "others", "ratio", "fused, us", "others"]
    return [*header, "ratio", "TFLOP/s", "GB/s", "of the limit"]


def _problems(record: Record) -> Rows:
    def worst(result: Result) -> float:
        known = (result.advantage(work) for work in WORKS)
        return min((ratio for ratio in known if ratio is not None), default=float("inf"))

    return [_problem(result, record) for result in sorted(record.results, key=worst)]


def _problem(result: Result, record: Record) -> list[str]:
    row = [result.name, result.problem]
    for work in WORKS:
        own, other = result.median(MAXCONV, work), result.opponent(work)
        ratio = result.advantage(work)
        row.append(f"{own * 1e6:.1f}" if own else "-")
        row.append(f"{other[1] * 1e6:.1f}" if other else "-")
        row.append(f"{ratio:.2f}x" if ratio else "-")
    seconds = result.median(MAXCONV)
    if not seconds:
        return [*row, "-", "-", "-"]
    row.append(f"{result.flops / seconds / 1e12:.1f}")
    row.append(f"{result.nbytes / seconds / 1e9:.0f}")
    if (of_peak := result.share(record.peak)) is not None:
        return [*row, f"{of_peak:.0%} products"]
    limits = LIMITS.get(record.machine.gpu or "")
    if limits is None:
        return [*row, "-"]
    share = limits.seconds(result.flops, result.nbytes, record.dtype) / seconds
    computing = limits.computing(result.flops, record.dtype)
    by = "products" if computing > result.nbytes / limits.nbytes else "bytes"
    return [*row, f"{share:.0%} {by}"]
