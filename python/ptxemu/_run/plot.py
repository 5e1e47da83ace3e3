"""A picture of a trace: a row a track, a bar a span."""

from __future__ import annotations

from pathlib import Path

import matplotlib

# Chosen before pyplot is loaded: a plot must not need a display.
matplotlib.use("agg")

from matplotlib import pyplot
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.patches import Patch

from ..trace import BARRIER, ENGINE, RUNNING, WARP, Span, Trace, Track
from .schema import ConfigError

__all__ = ["check_format", "plot"]

_COLOURS = {
    RUNNING: "#3a7d44",
    "waiting": "#d9d9d9",
    ENGINE: "#00798c",
    "phase, even": "#edae49",
    "phase, odd": "#d1495b",
}

#: Arrows beyond this many hide what they lead to.
_ARROWS = 400


def check_format(path: Path) -> None:
    """Raises ``ConfigError`` if a picture cannot be written in the format that a name ends with."""
    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in formats:
        raise ConfigError(f"--plot: {path}; one of .{', .'.join(formats)} at its end is allowed")


def plot(trace: Trace, path: Path) -> None:
    """Draws a trace to a file; its name's ending says the format.

    Barriers of which no phase ended are left out.

    Raises:
        OSError: The file cannot be written.
    """
    used = {span.track for span in trace.spans if span.details.get("completed") is not False}
    tracks = [track for track in trace.tracks() if track.kind == WARP or track in used]
    rows = {track: row for row, track in enumerate(tracks)}
    figure, axes = pyplot.subplots(figsize=(14, 1.5 + 0.19 * len(rows)), layout="constrained")
    for span in trace.spans:
        if span.track in rows and span.end is not None:
            length, row = span.end - span.start, rows[span.track]
            axes.barh(row, length, left=span.start, height=0.8, color=_COLOURS[_kind(span)])
    if len(trace.arrows) <= _ARROWS:
        for arrow in trace.arrows:
            ends = (arrow.left, arrow.came), (rows[arrow.source.track], rows[arrow.target.track])
            axes.plot(*ends, color="black", linewidth=0.4, alpha=0.6)
    for instant in trace.instants:
        if trace.error is not None and instant.name.startswith(type(trace.error).__name__):
            axes.plot(instant.time, rows[instant.track], "x", color="black")
    axes.set_yticks(range(len(tracks)), [_label(trace, track) for track in tracks], fontsize=6)
    axes.set_ylim(len(tracks) - 0.4, -0.6)
    axes.set_xlabel("instructions of all warps (an order of events, no time)")
    handles = [Patch(color=colour, label=name) for name, colour in _COLOURS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=7)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _kind(span: Span) -> str:
    if span.track.kind == BARRIER:
        return "phase, odd" if int(span.name.split()[-1]) % 2 else "phase, even"
    if span.track.kind == ENGINE:
        return ENGINE
    return RUNNING if span.name == RUNNING else "waiting"


def _label(trace: Trace, track: Track) -> str:
    return track.title if len(trace.blocks) == 1 else f"{track.title}, block {track.block}"
