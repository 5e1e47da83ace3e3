"""What happens when in a launch: spans of warps, of asynchronous operations, of barriers' phases.

A ``Trace`` is passed to ``Module.launch`` and written as Chrome trace events, which
ui.perfetto.dev and chrome://tracing open (format: "Trace Event Format", Google). A block is a
process. Its tracks are its warps (running, or waiting for what), the engines that work beside
them (TMA, wgmma, ...) and its barriers, whose spans are their phases. An arrow leads from what
completed a phase, an arrival or a copy's bytes, to the wait that it ended.

Time is counted in instructions: a microsecond of a trace is an instruction of any warp, and
whatever takes no instruction but follows something else takes one. It is an order of events, one
of those that the hardware may take, and no measure of how long anything lasts there.

"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ._errors import EmulatorError

__all__ = [
    "BARRIER",
    "ENGINE",
    "RUNNING",
    "WARP",
    "Arrow",
    "Instant",
    "Span",
    "Trace",
    "Track",
]

#: Kinds of tracks, in the order in which a process shows them.
WARP, ENGINE, BARRIER = "warp", "engine", "barrier"
_KINDS = (WARP, ENGINE, BARRIER)

#: What a warp's span is called while its threads have work, whoever's turn it is.
RUNNING = "running"

#: Colours by which chrome://tracing tells the kinds apart.
_COLOURS = {ENGINE: "thread_state_iowait", BARRIER: "grey"}


@dataclass(frozen=True)
class Track:
    """A line of the picture.

    Attributes:
        block: The process: a block's number in the grid.
        kind: ``warp``, ``engine`` or ``barrier``.
        name: Its name.
        slot: 0, or more where spans of one name overlap.
    """

    block: int
    kind: str
    name: str
    slot: int = 0

    @property
    def title(self) -> str:
        """The name, with a number if it is not the first of it."""
        return f"{self.name} ({self.slot + 1})" if self.slot else self.name


@dataclass(eq=False)
class Span:
    """Something that lasts. ``end`` is None until it has ended; ``details`` are for the reader."""

    track: Track
    name: str
    start: int
    end: int | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Arrow:
    """From a moment of what completed something to the end of the wait for it."""

    source: Span
    left: int
    target: Span
    came: int


@dataclass(frozen=True)
class Instant:
    """Something that happens at one moment of a track."""

    track: Track
    name: str
    time: int


class Trace:
    """The spans, arrows and instants of one launch.

    A launch that is passed the trace fills it; ``start`` to ``end`` are for the launch alone.

    Attributes:
        blocks: Names of the processes, by number.
        spans: In the order of their starts.
        arrows: In order.
        instants: In order.
        error: What stopped the kernel.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, str] = {}
        self.spans: list[Span] = []
        self.arrows: list[Arrow] = []
        self.instants: list[Instant] = []
        self.error: EmulatorError | None = None
        self._clock: Callable[[], int] | None = None
        self._now = 0
        self._open: dict[Track, Span] = {}

    def start(self, clock: Callable[[], int]) -> None:
        """Begins to record a launch.

        Args:
            clock: The instructions that it has run so far.

        Raises:
            ValueError: The trace has another launch.
        """
        if self._clock is not None:
            raise ValueError("trace: it has a launch already; a trace records one")
        self._clock = clock

    def tick(self) -> int:
        """The time; later than every one before."""
        executed = self._clock() if self._clock is not None else 0
        self._now = max(executed, self._now + 1)
        return self._now

    def open(self, block: int, kind: str, name: str, title: str, **details: Any) -> Span:
        """Starts a span on the first track of a name that has none."""
        track = Track(block, kind, name)
        while track in self._open:
            track = Track(block, kind, name, track.slot + 1)
        span = Span(track, title, self.tick(), None, details)
        self._open[track] = span
        self.spans.append(span)
        return span

    def close(self, span: Span, **details: Any) -> None:
        """Ends a span; one that has ended stays."""
        if span.end is None:
            span.end = self.tick()
            span.details.update(details)
            del self._open[span.track]

    def point(self, span: Span, name: str) -> None:
        """Notes a moment of a span's track."""
        self.instants.append(Instant(span.track, name, self.tick()))

    def connect(self, source: Span, target: Span) -> None:
        """Draws an arrow to a wait that is about to end."""
        left = self.tick()
        self.arrows.append(Arrow(source, left, target, self.tick()))

    def close_barriers(self, block: int) -> None:
        """Ends the phases of a block that has ended."""
        for track, span in list(self._open.items()):
            if track.block == block and track.kind == BARRIER:
                self.close(span, completed=False)

    def fail(self, error: EmulatorError) -> None:
        """Notes what stopped the kernel, where there is a place."""
        self.error = error
        name = type(error).__name__
        for span in self._open.values():
            place = error.place
            if place is not None and span.details.get("at") == (place.block, place.warp):
                self.instants.append(Instant(span.track, f"{name}: {error.message}", self.tick()))
                span.details["error"] = str(error)
                return

    def end(self) -> None:
        """Ends what is open."""
        for span in list(self._open.values()):
            self.close(span, completed=False)

    def tracks(self) -> list[Track]:
        """All tracks: by block, then by kind, each kind's names as they came."""
        found = dict.fromkeys(span.track for span in self.spans)
        names = {(track.block, track.name): number for number, track in enumerate(reversed(found))}

        def place(track: Track) -> tuple[int, int, int, int]:
            first = -names[track.block, track.name]
            return track.block, _KINDS.index(track.kind), first, track.slot

        return sorted(found, key=place)

    def events(self) -> list[dict[str, Any]]:
        """The trace as Chrome trace events."""
        numbers = {track: number for number, track in enumerate(self.tracks(), 1)}

        def at(track: Track, time: int) -> dict[str, Any]:
            return {"pid": track.block, "tid": numbers[track], "ts": time}

        found: list[dict[str, Any]] = []
        for block, name in sorted(self.blocks.items()):
            args = {"name": name}
            found.append({"ph": "M", "name": "process_name", "pid": block, "args": args})
        for track, number in numbers.items():
            common: dict[str, Any] = {"ph": "M", "pid": track.block, "tid": number}
            found.append({**common, "name": "thread_name", "args": {"name": track.title}})
            found.append({**common, "name": "thread_sort_index", "args": {"sort_index": number}})
        for span in self.spans:
            assert span.end is not None
            details = {key: value for key, value in span.details.items() if key != "at"}
            event: dict[str, Any] = {
                "ph": "X",
                "name": span.name,
                "cat": span.track.kind,
                "args": details,
            }
            event |= {**at(span.track, span.start), "dur": span.end - span.start}
            found.append({**event, "cname": _colour(span)})
        for number, arrow in enumerate(self.arrows):
            flow: dict[str, Any] = {"cat": "completes", "name": "completes", "id": number}
            found.append({"ph": "s", **flow, **at(arrow.source.track, arrow.left)})
            found.append({"ph": "f", "bp": "e", **flow, **at(arrow.target.track, arrow.came)})
        for instant in self.instants:
            event = {"ph": "i", "s": "t", "name": instant.name, "cat": instant.track.kind}
            found.append({**event, **at(instant.track, instant.time)})
        return found

    def write(self, path: Path) -> None:
        """Writes the events to a file.

        Raises:
            OSError: It cannot be written.
        """
        # "ns" keeps the viewers from rounding; an instruction is a microsecond.
        document = {"displayTimeUnit": "ns", "traceEvents": self.events()}
        path.write_text(json.dumps(document, default=str), encoding="utf-8")


def _colour(span: Span) -> str:
    if span.track.kind == WARP:
        return "thread_state_running" if span.name == RUNNING else "thread_state_sleeping"
    return _COLOURS[span.track.kind]
