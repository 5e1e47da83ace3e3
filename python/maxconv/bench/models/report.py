"""What a record says of models, as cells of tables and as sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..device import GPU
from ..record import Forward, ModelResult, Record
from ..statistics import geometric_mean
from .variants import VARIANTS, usable

__all__ = ["notes", "tables"]

_NONE = "-"

#: A variant, and whether it runs channels last.
_Way = tuple[str, bool]

#: A title, a header and rows.
_Cells = tuple[str, Sequence[str], Sequence[Sequence[str]]]


def tables(record: Record) -> Iterator[_Cells]:
    """Yields the tables of a record's models."""
    ways = _ways(record.models)
    names = [label(*way) for way in ways]
    ours = [name for name in VARIANTS if any(name in result.ratios() for result in record.models)]
    header = ["model", "batch", *names, *(f"torch's best / {name}" for name in ours)]
    rows = _rows(record.models, ways, _time)
    for row, result in zip(rows, record.models, strict=True):
        row += [_ratio(result.ratios().get(name)) for name in ours]
    yield "A forward pass, ms", header, [*rows, *_means(record.models, ours, len(names))]
    for title, cell in (
        ("From the model to its first output, s", _first),
        ("Memory, MiB: held between calls + taken by a call", _memory),
        ("Error, as a share of the largest output", _error),
    ):
        yield title, ["model", "batch", *names], _rows(record.models, ways, cell)
    if record.starts:
        started = list(record.starts)
        yield "What a process pays once, s", started, [[f"{record.starts[k]:.1f}" for k in started]]


def label(variant: str, channels_last: bool) -> str:
    """Returns what a way of running a model is called in a table."""
    return variant if channels_last else f"{variant}, contiguous"


def _ways(models: Sequence[ModelResult]) -> list[_Way]:
    found = {(one.variant, one.channels_last) for result in models for one in result.forwards}
    return [(name, last) for name in VARIANTS for last in (False, True) if (name, last) in found]


def _rows(
    models: Sequence[ModelResult], ways: Sequence[_Way], cell: Callable[[Forward], str]
) -> list[list[str]]:
    rows = []
    for result in models:
        found = {(forward.variant, forward.channels_last): forward for forward in result.forwards}
        cells = [cell(found[way]) if way in found else _NONE for way in ways]
        rows.append([result.name, str(result.batch), *cells])
    return rows


def _means(models: Sequence[ModelResult], ours: Sequence[str], times: int) -> Iterator[list[str]]:
    """Yields the geometric means of ratios: of all, of batch 1, and of larger ones."""
    groups = {
        "all": list(models),
        "1": [result for result in models if result.batch == 1],
        "> 1": [result for result in models if result.batch > 1],
    }
    for batches, members in groups.items():
        ratios = [[r for result in members if (r := result.ratios().get(name))] for name in ours]
        means = [_ratio(geometric_mean(values) if values else None) for values in ratios]
        if members:
            yield ["geometric mean", batches, *[""] * times, *means]


def _time(forward: Forward) -> str:
    if forward.call is None:
        return _NONE
    milli = forward.call.median_s * 1e3
    return f"{milli:.0f}" if milli >= 100 else f"{milli:.3g}"


def _first(forward: Forward) -> str:
    return _NONE if forward.first_call_s is None else f"{forward.first_call_s:.2f}"


def _memory(forward: Forward) -> str:
    if forward.kept is None or forward.peak is None:
        return _NONE
    return f"{forward.kept / 2**20:.0f} + {forward.peak / 2**20:.0f}"


def _error(forward: Forward) -> str:
    return _NONE if forward.error is None else f"{forward.error:.1e}"


def _ratio(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}x"


def notes(record: Record) -> list[str]:
    """Returns what a reader of the tables must know, in sentences."""
    said = [
        "Weights and inputs are channels last unless a column says contiguous. Ratios above 1 are "
        "in maxconv's favour, against the fastest of torch's columns."
    ]
    if record.device != GPU.name:
        absent = [name for name in VARIANTS if name not in usable(record.device)]
        said.append(f"{', '.join(absent)}: do not apply to a CPU, which has no CUDA graphs.")
    for result in record.models:
        title = f"{result.name}, batch {result.batch}"
        for forward in result.forwards:
            if forward.missing is not None:
                way = label(forward.variant, forward.channels_last)
                said.append(f"Without {title}, {way}: {forward.missing}.")
    left: dict[str, list[str]] = {}
    for result in record.models:
        for reason, count in result.left.items():
            left.setdefault(f"{count} left in PyTorch: {reason}", []).append(result.name)
    said += [f"Converted, {', '.join(dict.fromkeys(names))}: {why}." for why, names in left.items()]
    return said
