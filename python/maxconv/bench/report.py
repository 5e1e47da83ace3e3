"""Records as tables: for a terminal, and as Markdown for ``benchmarks/results``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .cpu.memory import ALLOWANCE
from .device import ACTIVATIONS, is_narrow
from .entrant import BARE, CALL, FIGURES, FUSED, KERNEL, MAXCONV, WORKS
from .models.report import notes as model_notes
from .models.report import tables as model_tables
from .networks import tables as network_tables
from .record import OF_THE_PEAK, Functions, Peak, Record, Result, peers, summary
from .statistics import geometric_mean

__all__ = ["check_one_commit", "render_markdown", "render_text"]

_NONE = "-"

#: A note names all of so many problems, or some of more.
_MANY, _SOME = 40, 8

_WORKS = {BARE: "The convolution alone", FUSED: "With bias, {activation} and a residual"}
_FIGURES = {KERNEL: "the kernel alone", CALL: "as a user calls it"}


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


def check_one_commit(records: Sequence[Record]) -> None:
    """Checks that records may stand in one document: a table comes from one commit.

    Raises:
        ValueError: Their commits differ, or one is from files that no commit has.
    """
    commits = list(dict.fromkeys(record.commit for record in records))
    if len(commits) > 1:
        raise ValueError(
            f"report: the records are of the commits {', '.join(map(str, commits))}; one commit is "
            "allowed"
        )
    if len(records) > 1 and any(record.modified for record in records):
        raise ValueError(
            "report: a record is of files that differ from its commit; several records are allowed "
            "from unmodified files only"
        )


def render_text(records: Sequence[Record]) -> str:
    """Returns everything that runs found, for people.

    Raises:
        ValueError: See ``check_one_commit``.
    """
    check_one_commit(records)
    parts = []
    for record in records:
        parts.append(_provenance(record))
        parts += [f"{title}\n{table.text()}" for title, table in _tables(record)]
        parts += [*_sentences(record), "\n".join(_notes(record))]
    return "\n\n".join(filter(None, parts)) + "\n"


def render_markdown(records: Sequence[Record]) -> str:
    """Returns the same as a document.

    Raises:
        ValueError: See ``check_one_commit``.
    """
    check_one_commit(records)
    parts = []
    for record in records:
        machine = record.machine
        parts.append(f"# {machine.gpu or machine.cpu}, {record.dtype}")
        parts.append(f"`{record.command}`: {_provenance(record)}.")
        for title, table in _tables(record):
            parts += [f"## {title}", table.markdown()]
        parts += [*_sentences(record), "\n".join(f"- {note}" for note in _notes(record))]
    return "\n\n".join(filter(None, parts)) + "\n"


def _provenance(record: Record) -> str:
    machine, versions = record.machine, record.versions
    parts = [record.date[:10]]
    if machine.gpu:
        parts += [machine.gpu, f"driver {machine.driver or 'unknown'}"]
    else:
        parts.append(f"{machine.cpu}, {machine.threads} thread{'s' * (machine.threads != 1)}")
    parts.append(record.dtype)
    names = ("maxconv", "max", "torch", "cudnn", "cudnn_frontend")
    parts += [f"{name} {versions[name]}" for name in names if versions.get(name)]
    if record.commit:
        parts.append(f"commit {record.commit[:10]}{' with changes' * record.modified}")
    return ", ".join(parts)


def _tables(record: Record) -> Iterator[tuple[str, _Table]]:
    if record.models:
        for title, header, rows in model_tables(record):
            yield title, _Table(header, rows)
        return
    if record.suite:
        for title, header, rows, left in network_tables(record):
            yield title, _Table(header, rows, left)
        return
    activation = ACTIVATIONS[record.activation]
    yield "Summary", _summary(record)
    for work in WORKS:
        for figure in FIGURES:
            title = f"{_WORKS[work].format(activation=activation)}: {_FIGURES[figure]}"
            if table := _speeds(record, work, figure):
                yield title, table
    if table := _fusing(record.results):
        yield "Time of the fused work, as a multiple of the convolution's alone", table
    if table := _variants(record.results):
        yield "Other ways to call the same: microseconds of the kernel / of a call", table
    if record.memory:
        yield "Memory", _memory(record)


def _unit(record: Record) -> tuple[str, float]:
    """Returns what speeds are shown in, and how many operations a second that is."""
    if record.device == "gpu":
        return "TFLOP/s", 1e12
    return ("GOP/s" if is_narrow(record.dtype) else "GFLOP/s"), 1e9


def _speeds(record: Record, work: str, figure: str) -> _Table | None:
    """Returns the problems' times; ``None`` if maxconv has none."""
    results, peak = record.results, record.peak
    names = peers(results, work, figure)
    unit, scale = _unit(record)
    header = ["problem", "convolution", f"{MAXCONV}, us", "p10-p90", unit]
    header += [OF_THE_PEAK] if peak else []
    header += [f"{name}, us" for name in names] + [f"/ {name}" for name in names]
    rows = []
    ratios: dict[str, list[float]] = {name: [] for name in names}
    shares = []
    for result in results:
        own = result.best(MAXCONV, work, figure)
        seconds = own and own.median(figure)
        if own is None or not seconds:
            continue
        timing = own.kernel if figure == KERNEL else own.call
        low, high = (timing.p10_s, timing.p90_s) if timing else (None, None)
        row = [result.name, result.problem, _time(seconds)]
        row.append(f"{_time(low)}-{_time(high)}" if low and high else _NONE)
        row.append(_number(result.flops / seconds / scale))
        if (share := result.share(peak, work, figure)) is not None:
            row.append(_share(share))
            shares.append(share)
        for name in names:
            best = result.best(name, work, figure)
            other = "*" if best and best.variant else ""
            row.append(_time(best.median(figure) if best else None) + other)
        for name in names:
            ratio = result.ratio(name, work, figure)
            row.append(_ratio(ratio))
            ratios[name] += [] if ratio is None else [ratio]
        rows.append(row)
    if not rows:
        return None
    means = [_ratio(geometric_mean(ratios[name]) if ratios[name] else None) for name in names]
    last = ["geometric mean", *[""] * 4]
    last += [_share(geometric_mean(shares))] if shares else []
    rows.append([*last, *[""] * len(names), *means])
    return _Table(header, rows, left=2)


def _fusing(results: Sequence[Result]) -> _Table | None:
    names = [MAXCONV, *peers(results, FUSED, KERNEL)]
    rows = []
    for result in results:
        costs = [result.fusing(name) for name in names]
        if any(cost is not None for cost in costs):
            rows.append([result.name, *map(_ratio, costs)])
    known = [place for place in range(len(names)) if any(row[place + 1] != _NONE for row in rows)]
    if not known:
        return None
    header = ["problem", *(names[place] for place in known)]
    return _Table(header, [[row[0], *(row[place + 1] for place in known)] for row in rows])


def _variants(results: Sequence[Result]) -> _Table | None:
    keys = dict.fromkeys(
        entry.key
        for result in results
        for entry in result.measurements
        if entry.variant and entry.missing is None
    )
    rows = []
    for result in results:
        found = {entry.key: entry for entry in result.measurements if entry.missing is None}
        if keys.keys() & found.keys():
            cells = []
            for key in keys:
                entry = found.get(key)
                times = [_time(entry.median(figure)) for figure in FIGURES] if entry else [_NONE]
                cells.append(" / ".join(times))
            rows.append([result.name, *cells])
    return _Table(["problem", *map(str, keys)], rows) if rows else None


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


def _summary(record: Record) -> _Table:
    rows = []
    for ratio in summary(record.results, record.peak):
        shown = _share if ratio.what.startswith(OF_THE_PEAK) else _ratio
        values = (shown(ratio.geometric_mean), shown(ratio.worst))
        names = (ratio.what, ratio.work, ratio.figure)
        rows.append([*names, *values, ratio.worst_problem, str(ratio.problems)])
    header = ["maxconv is or takes", "work", "figure", "geometric mean", "worst", "of", "problems"]
    return _Table(header, rows, left=3)


def _sentences(record: Record) -> list[str]:
    return [] if record.functions is None else [_functions(record.functions)]


def _functions(made: Functions) -> str:
    same = "equal, bit for bit" if made.equal else "NOT equal"
    count = f"{len(made.names)} convolution{'s' * (len(made.names) != 1)}"
    return (
        f"The public functions, {count} with constant filters in one graph: outputs {same}; "
        f"{made.graph_s * 1e3:.2f} ms against {made.sum_s * 1e3:.2f} ms one by one."
    )


def _notes(record: Record) -> list[str]:
    """Returns what a reader of the tables must know."""
    notes = model_notes(record) if record.models else []
    entries = [entry for result in record.results for entry in result.measurements]
    if any(entry.variant and entry.contender != MAXCONV for entry in entries):
        notes.append(
            "A contender's time is that of its fastest way to be called, marked * where it is not "
            "the usual one; maxconv's is that of its usual one."
        )
    for what, pick in (("Without", "missing"), ("Of", "note")):
        words: dict[tuple[str, str], list[str]] = {}
        for result in record.results:
            for entry in result.measurements:
                if said := getattr(entry, pick):
                    words.setdefault((str(entry.key), said), []).append(result.name)
        for (key, said), names in words.items():
            notes.append(f"{what} {key}: {_listed(names, len(record.results))}: {said}.")
    if record.peak is not None:
        notes.append(_peak(record.peak, *_unit(record)))
    if record.memory:
        notes.append(
            f"Memory beyond input, output and packed filter; {ALLOWANCE >> 20} MiB are allowed."
        )
    machine = record.machine
    if not machine.gpu and machine.load is not None and machine.load > 0.5 * machine.cpus:
        notes.append(
            f"Other programs were running (load {machine.load}): measure again on a quiet machine."
        )
    return notes


def _peak(peak: Peak, unit: str, scale: float) -> str:
    threads = f"{peak.threads} thread{'s' * (peak.threads != 1)}"
    return (
        f"The peak is {_number(peak.per_second / scale)} {unit}: {peak.unit}, of operands that "
        f"stay in registers, {threads}."
    )


def _listed(names: Sequence[str], of: int) -> str:
    if len(names) == of > 1:
        return "everywhere"
    shown = names if len(names) <= _MANY else names[:_SOME]
    others = f" and {len(names) - len(shown)} others" if len(names) > len(shown) else ""
    return ", ".join(shown) + others


def _time(seconds: float | None) -> str:
    """Returns microseconds, with three digits that count."""
    if seconds is None:
        return _NONE
    micro = seconds * 1e6
    return f"{micro:.0f}" if micro >= 100 else f"{micro:.1f}"


def _number(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _ratio(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:.1f}x" if value >= 10 else f"{value:.2f}x"


def _share(value: float) -> str:
    return f"{value:.0%}" if value >= 0.1 else f"{value:.1%}"
