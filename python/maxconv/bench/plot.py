"""A record as a picture: how many times as fast as torch and as MAX, problem by problem."""

from __future__ import annotations

from pathlib import Path

import matplotlib

# Chosen before pyplot is loaded: a plot must not need a display.
matplotlib.use("agg")

from matplotlib import pyplot
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.ticker import FuncFormatter, LogLocator

from .record import Record

__all__ = ["check_format", "plot"]

_COLORS = {"torch": "#d1495b", "MAX, constant filter": "#00798c", "MAX, filter as input": "#8fc1c9"}
_HEIGHT = 0.38


def check_format(path: Path) -> None:
    """Raises ``ValueError`` if a plot cannot be written in the format that a name ends with."""
    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in formats:
        raise ValueError(
            f"plot: {path} does not end with a format; {', '.join(formats)} are allowed"
        )


def plot(record: Record, path: Path) -> None:
    """Draws the record's ratios to a file; its name's ending says the format.

    Raises:
        OSError: The file cannot be written.
        ValueError: The format is unknown.
    """
    results = record.results
    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.34 * len(results)), layout="constrained")
    labelled: set[str] = set()
    for row, result in enumerate(results):
        peer = "MAX, constant filter" if result.max == "max" else "MAX, filter as input"
        bars = (("torch", result.ratio(result.torch())), (peer, result.ratio(result.max)))
        for (name, ratio), shift in zip(bars, (-_HEIGHT / 2, _HEIGHT / 2), strict=True):
            if ratio is None:
                axes.annotate("none", (1, row + shift), (4, 0), textcoords="offset points",
                              va="center", fontsize=7, color="0.5")  # fmt: skip
                continue
            # On a logarithmic axis a bar has no zero to start from: it starts from a ratio of 1.
            axes.barh(
                row + shift,
                ratio - 1,
                _HEIGHT,
                left=1,
                color=_COLORS[name],
                label=None if name in labelled else name,
            )
            labelled.add(name)
            axes.annotate(
                f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}",
                (ratio, row + shift),
                (3 if ratio >= 1 else -3, 0),
                textcoords="offset points",
                va="center",
                ha="left" if ratio >= 1 else "right",
                fontsize=7,
            )
    axes.axvline(1, color="0.2", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.5) * 0.85, max(high, 2) * 1.15)
    axes.set_yticks(range(len(results)), [result.name for result in results], fontsize=8)
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.set_xlabel("maxconv is so many times as fast as")
    axes.set_title(
        f"{record.dtype}, {record.machine.cpu}, {record.threads} threads, {record.date[:10]}",
        fontsize=10,
    )
    if labelled:
        axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
