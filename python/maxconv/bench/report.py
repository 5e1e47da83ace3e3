"""A record as tables: for a terminal, and as the README's Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .memory import ALLOWANCE
from .record import Functions, Record, Result, summary

__all__ = ["render_markdown", "render_text"]

_NONE = "-"
_SINGLES = (
    "The only convolution of its call: how many times as fast as the other maxconv is, and "
    "microseconds of such a call / of one convolution of a longer call"
)
_CONTENDERS = {
    "max": "MAX with a constant filter",
    "max_input": "MAX with the filter as an input",
    "torch": "torch",
    "torch_prepacked": "torch with a prepacked filter",
}


@dataclass(frozen=True)
class _Table:
    """Cells as text; the first ``left`` columns are flush left, the others right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1

    def text(self) -> str:
        """Returns the table with columns of one width."""
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        return "\n".join(
            "  ".join(
                f"{cell:<{width}}" if number < self.left else f"{cell:>{width}}"
                for number, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in (self.header, *self.rows)
        )

    def markdown(self) -> str:
        """Returns the table as Markdown."""
        rule = ["---" if number < self.left else "--:" for number in range(len(self.header))]
        return "\n".join(f"| {' | '.join(row)} |" for row in (self.header, rule, *self.rows))


def render_text(record: Record) -> str:
    """Returns everything that a run found, for people."""
    parts = [_provenance(record)]
    for family, results in _families(record.results).items():
        parts.append(f"{family}\n{_speeds(results).text()}")
    if singles := _singles(record.results):
        parts.append(f"{_SINGLES}\n{singles.text()}")
    parts.append(
        "Time with bias, ReLU and a residual added, as a multiple of the convolution's alone\n"
        + _fusion(record.results).text()
    )
    if record.memory:
        parts.append(f"Memory\n{_memory(record).text()}")
    if record.functions is not None:
        parts.append(_functions(record.functions))
    parts.append(f"Summary\n{_summary(record.results).text()}")
    parts.append("\n".join(_notes(record)))
    return "\n\n".join(filter(None, parts)) + "\n"


def render_markdown(record: Record) -> str:
    """Returns the README's part about speed: where it was measured, a summary, the problems."""
    parts = [
        f"`{record.command}`: {_provenance(record)}.",
        _summary(record.results).markdown(),
        "GFLOP/s within a call of several convolutions, and how many times as fast as the other "
        "maxconv is:",
        _speeds(record.results, full=False).markdown(),
    ]
    if singles := _singles(record.results):
        parts += [f"{_SINGLES}:", singles.markdown()]
    parts.append("\n".join(f"{note}  " for note in _notes(record)).rstrip())
    return "\n\n".join(filter(None, parts)) + "\n"


def _provenance(record: Record) -> str:
    versions = record.versions
    parts = [
        record.date[:10],
        f"{record.machine.cpu}, {record.threads} thread{'s' * (record.threads != 1)}",
        record.dtype,
        *(f"{name} {versions[name]}" for name in ("maxconv", "max", "torch") if versions[name]),
    ]
    if record.commit:
        parts.append(f"commit {record.commit[:10]}{' with changes' * record.modified}")
    return ", ".join(parts)


def _families(results: Sequence[Result]) -> Mapping[str, list[Result]]:
    families: dict[str, list[Result]] = {}
    for result in results:
        families.setdefault(result.family or "others", []).append(result)
    return families


def _speeds(results: Sequence[Result], *, full: bool = True) -> _Table:
    """Returns the problems' speeds; ``full`` adds what only somebody who measures wants."""
    header = ["problem", "convolution", "maxconv", "torch", "MAX", "/ torch", "/ MAX"]
    header += ["p10-p90 ms", "packed in each call", "fused"] if full else ["fused"]
    rows = []
    for result in results:
        mark = "*" * (result.max == "max_input" and "max_input" in result.timings)
        row = [
            result.name,
            result.problem,
            _number(result.gflops("ours")),
            _number(result.gflops(result.torch())),
            _number(result.gflops(result.max)) + mark,
            _ratio(result.ratio(result.torch())),
            _ratio(result.ratio(result.max)) + mark,
        ]
        if full:
            timing = result.timings["ours"]
            row.append(f"{timing.p10_s * 1e3:.3f}-{timing.p90_s * 1e3:.3f}")
            row.append(_ratio(result.ratio("ours_raw")))
        rows.append([*row, _ratio(result.ratio("ours_fused"))])
    return _Table(header, rows, left=2)


def _singles(results: Sequence[Result]) -> _Table | None:
    """Returns what calls of one convolution take; ``None`` where no call has more."""
    rows = []
    for result in results:
        if result.convolutions == 1:
            continue
        torch, torch_alone = result.torch(), result.torch(single=True)
        times = (("ours", "ours"), (torch_alone, torch), (result.max, result.max))
        rows.append(
            [
                result.name,
                str(result.convolutions),
                *(_alone_and_shared(result, *names) for names in times),
                _ratio(result.ratio(torch_alone, single=True)),
                _ratio(result.ratio(result.max, single=True)),
            ]
        )
    header = ["problem", "convolutions a call", "maxconv", "torch", "MAX", "/ torch", "/ MAX"]
    return _Table(header, rows) if rows else None


def _alone_and_shared(result: Result, alone: str, shared: str) -> str:
    seconds = (result.median(alone, single=True), result.median(shared))
    return " / ".join(_number(None if time is None else time * 1e6) for time in seconds)


def _fusion(results: Sequence[Result]) -> _Table:
    rows = []
    for result in results:
        alone = "torch_prepacked" if "torch_prepacked" in result.timings else "torch"
        row = [
            result.name,
            _ratio(result.ratio("ours_fused")),
            _ratio(result.ratio("ours_lambda")),
            _ratio(result.ratio("torch_fused", alone)),
            _ratio(result.ratio("torch_fused", "ours_fused")),
        ]
        rows.append(row)
    header = ["problem", "as arguments", "by the graph compiler", "torch", "maxconv / torch"]
    return _Table(header, rows)


def _memory(record: Record) -> _Table:
    rows = [
        [
            entry.name,
            *(f"{size / 2**20:.1f}" for size in (entry.input, entry.output, entry.filter)),
            f"{entry.extra / 2**20:.1f}",
            "yes" if entry.fits else "NO",
        ]
        for entry in record.memory
    ]
    header = ["problem", "input MiB", "output", "packed filter", "more", "within allowance"]
    return _Table(header, rows)


def _functions(made: Functions) -> str:
    same = "equal, bit for bit" if made.equal else "NOT equal"
    count = f"{len(made.names)} convolution{'s' * (len(made.names) != 1)}"
    return (
        f"The public functions, {count} with constant filters in one graph: outputs {same}; "
        f"{made.graph_s * 1e3:.2f} ms against {made.sum_s * 1e3:.2f} ms one by one"
    )


def _summary(results: Sequence[Result]) -> _Table:
    rows = [
        [
            ratio.what,
            _ratio(ratio.geometric_mean),
            _ratio(ratio.worst),
            ratio.worst_problem,
            str(ratio.problems),
        ]
        for ratio in summary(results)
    ]
    header = ["maxconv is or takes", "geometric mean", "worst", "of", "problems"]
    return _Table(header, rows)


def _notes(record: Record) -> list[str]:
    """Returns what a reader of the tables must know."""
    notes = []
    if any(
        result.max == "max_input" and "max_input" in result.timings for result in record.results
    ):
        notes.append("*: MAX takes no constant filter here; its filter is an input of the graph.")
    reasons: dict[tuple[str, str], list[str]] = {}
    for result in record.results:
        for contender, reason in result.missing.items():
            reasons.setdefault((contender, reason), []).append(result.name)
    for (contender, reason), names in reasons.items():
        notes.append(
            f"Without {_CONTENDERS.get(contender, contender)}: {', '.join(names)}: {reason}."
        )
    if record.memory:
        notes.append(
            f"Memory beyond input, output and packed filter; {ALLOWANCE >> 20} MiB are allowed."
        )
    if record.machine.load is not None and record.machine.load > 0.5 * record.machine.cpus:
        notes.append(
            f"Other programs were running (load {record.machine.load}): measure again on a quiet "
            "machine."
        )
    return notes


def _number(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _ratio(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:.1f}x" if value >= 10 else f"{value:.2f}x"
