"""A record as a picture: how many times as fast as each other contender, problem by problem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

# Chosen before pyplot is loaded: a plot must not need a display.
matplotlib.use("agg")

from matplotlib import pyplot
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.lines import Line2D

from .device import ACTIVATIONS
from .entrant import BARE, CALL, COLORS, FUSED, KERNEL, MAXCONV, WORKS
from .record import Record, Result, peers

__all__ = ["check_format", "plot"]

_TITLES = {BARE: "the convolution alone", FUSED: "with bias, {activation}, residual"}

#: Where the axis of ratios ends; what lies beyond is drawn at its edge, with its number.
_LOW, _HIGH = 0.5, 3.0

#: Inches at 100 pixels each: the README shows a picture 800 pixels wide.
_WIDTH, _ROW, _REST = 8.0, 0.26, 1.35


def check_format(path: Path) -> None:
    """Raises ``ValueError`` if a plot cannot be written in the format that a name ends with."""
    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in formats:
        raise ValueError(
            f"plot: {path} does not end with a format; {', '.join(formats)} are allowed"
        )


def plot(record: Record, path: Path) -> None:
    """Draws a record's ratios to a file; its name's ending says the format.

    A panel for each kind of work shows the kernels' ratios, or where there are none the calls'.

    Raises:
        OSError: The file cannot be written.
        ValueError: The record has no ratio.
    """
    panels = []
    for work in WORKS:
        figure = KERNEL if peers(record.results, work, KERNEL) else CALL
        if names := peers(record.results, work, figure):
            panels.append((work, figure, names))
    if not panels:
        raise ValueError(f"plot: the record of {record.date} has no other contender than maxconv")
    results = list(record.results)
    height = _REST + _ROW * len(results)
    canvas, axes = pyplot.subplots(
        1, len(panels), figsize=(_WIDTH, height), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (work, figure, names) in zip(axes[0], panels, strict=True):
        _draw(axis, results, work, figure, names)
        activation = ACTIVATIONS[record.activation]
        axis.set_title(_TITLES[work].format(activation=activation), fontsize=11)
    axes[0][0].set_yticks(range(len(results)), [result.name for result in results], fontsize=9)
    axes[0][0].set_ylim(len(results) - 0.5, -0.5)
    drawn = [name for name in COLORS if any(name in names for *_, names in panels)]
    canvas.legend(
        handles=[_dot(COLORS[name], label=name) for name in drawn],
        loc="outside lower center",
        ncols=len(drawn),
        frameon=False,
        fontsize=10,
    )
    machine = record.machine
    canvas.suptitle(
        f"maxconv is so many times as fast as the others: {record.dtype}, "
        f"{machine.gpu or machine.cpu}",
        fontsize=12,
    )
    canvas.savefig(path, dpi=200)
    pyplot.close(canvas)


def _draw(axis: Any, results: list[Result], work: str, figure: str, names: list[str]) -> None:
    for row, result in enumerate(results):
        beyond = 0
        for name in names:
            ratio = result.ratio(name, work, figure)
            if ratio is None:
                continue
            place = min(max(ratio, _LOW), _HIGH)
            marker = "o" if place == ratio else ">" if ratio > _HIGH else "<"
            # A marker at the edge is drawn whole.
            axis.plot(place, row, marker, color=COLORS[name], markersize=6, clip_on=False)
            if ratio > _HIGH:
                axis.annotate(
                    f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}",
                    (_HIGH, row),
                    (-8 - 22 * beyond, 0),
                    textcoords="offset points",
                    va="center",
                    ha="right",
                    fontsize=8,
                    color=COLORS[name],
                )
                beyond += 1
    # Equal to maxconv.
    axis.axvline(1, color=COLORS[MAXCONV], linewidth=1.5)
    axis.set_xlim(_LOW, _HIGH)
    axis.set_xticks([0.5, 1, 1.5, 2, 2.5, 3], ["0.5", "1.0", "1.5", "2.0", "2.5", "3.0"])
    axis.tick_params(labelsize=9)
    axis.grid(color="0.92")
    axis.set_axisbelow(True)


def _dot(color: str, label: str) -> Line2D:
    return Line2D([], [], marker="o", linestyle="", color=color, label=label)
