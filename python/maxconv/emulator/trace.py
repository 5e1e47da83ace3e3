"""What happens when in a launch: spans of warps, of asynchronous operations, of barriers' phases.

A ``Trace`` is passed to ``Module.launch`` and written as Chrome trace events, which
ui.perfetto.dev and chrome://tracing open (format: "Trace Event Format", Google). A block is a
process. Its tracks are its warps (running, or waiting for what), the engines that work beside
them (TMA, wgmma, ...) and its barriers, whose spans are their phases. An arrow leads from what
completed a phase, an arrival or a copy's bytes, to the wait that it ended.

Time is counted in instructions: a microsecond of a trace is an instruction of any warp, and
whatever takes no instruction but follows something else takes one. It is an order of events, one
of those that the hardware may take, and no measure of how long anything lasts there.

A launch without a trace has the ordinary scheduler and barriers, and nothing of this file runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from .barriers import BarrierKinds, ClusterBarrier, MBarrier, NamedBarrier
from .errors import EmulatorError
from .flow import END
from .scheduler import UNNAMED, Operation, Scheduler

if TYPE_CHECKING:
    from .blocks import Cluster, ThreadBlock
    from .launch import Launch
    from .paths import Path

__all__ = ["Arrow", "Instant", "Span", "Trace"]

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
        self.barriers = BarrierKinds(
            partial(_MBarrier, self), partial(_NamedBarrier, self), partial(_ClusterBarrier, self)
        )
        self._launch: Launch | None = None
        self._now = 0
        self._open: dict[Track, Span] = {}

    def scheduler(self, launch: Launch) -> Scheduler:
        """The scheduler of the launch that is to be recorded.

        Raises:
            ValueError: The trace has another launch.
        """
        if self._launch is not None:
            raise ValueError("trace: it has a launch already; a trace records one")
        self._launch = launch
        return _Scheduler(launch, self)

    def process(self, block: ThreadBlock) -> int:
        """A block's number."""
        x, y, z = block.index
        width, height, _ = block.launch.grid
        number = x + width * (y + height * z)
        self.blocks.setdefault(number, f"block {block.index}, rank {block.rank} of its cluster")
        return number

    def tick(self) -> int:
        """The time; later than every one before."""
        executed = self._launch.executed if self._launch is not None else 0
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

    def write(self, path: FilePath) -> None:
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


class _Scheduler(Scheduler):
    """A scheduler that tells a trace who runs, who waits, and what completes."""

    def __init__(self, launch: Launch, trace: Trace) -> None:
        super().__init__(launch.machine.seed)
        self.trace = trace
        # The span that every path is in.
        self.spans: dict[int, Span] = {}
        # What happens at the moment: a path's turn, or an operation that completes.
        self.turn_of: Path | None = None
        self.acting: Span | None = None

    def add(self, path: Path) -> None:
        super().add(path)
        self._run(path)

    def wake(self, path: Path) -> None:
        if id(path) in self.waiting:
            cause, wait = self.cause(), self.spans[id(path)]
            if cause is not None:
                self.trace.connect(cause, wait)
            self.trace.close(wait)
            self._run(path)
        super().wake(path)

    def cause(self) -> Span | None:
        """The span of what happens at the moment."""
        if self.acting is not None:
            return self.acting
        return self.spans.get(id(self.turn_of)) if self.turn_of is not None else None

    def give_turn(self, path: Path, blocks: int) -> bool:
        self.turn_of = path
        goes_on = path.run(blocks)
        if not goes_on:
            self._stop(path)
        self.turn_of = None
        return goes_on

    def later(self, act: Callable[[], None], operation: Operation = UNNAMED) -> None:
        cause = self.cause()
        assert cause is not None, "nothing that happens started it"
        line = {"line": operation.line} if operation.line else {}
        span = self.trace.open(cause.track.block, ENGINE, operation.engine, operation.name, **line)

        def complete() -> None:
            before, self.acting = self.acting, span
            act()
            self.acting = before
            self.trace.close(span)

        super().later(complete, operation)

    def _run(self, path: Path) -> None:
        self.spans[id(path)] = self._start(path, RUNNING)

    def _start(self, path: Path, title: str, **details: Any) -> Span:
        details |= {"line": path.line(), "lanes": _lanes(path)}
        return self.trace.open(
            self.trace.process(path.block),
            WARP,
            f"warp {path.warp.index}",
            title,
            at=(path.block.index, path.warp.index),
            **details,
        )

    def _stop(self, path: Path) -> None:
        """A path waits or has ended."""
        running = self.spans.pop(id(path))
        last = {} if path.position == END else {"to line": path.line()}
        self.trace.close(running, **last)
        if path.wait is not None:
            title = f"wait: {_subject(path)}"
            self.spans[id(path)] = self._start(path, title, **{"for": path.wait.reason})
            return
        self._move_up(path)
        if not path.block.live_threads:
            self.trace.close_barriers(self.trace.process(path.block))

    def _move_up(self, ended: Path) -> None:
        """What still runs of a warp goes on on the first of its tracks that is free."""
        for other in self.runnable:
            if other.warp is ended.warp and other is not ended:
                span = self.spans[id(other)]
                if span.track.slot:
                    self.trace.close(span)
                    self._run(other)


def _lanes(path: Path) -> str:
    return f"{int(path.mask.sum())} of 32"


def _subject(path: Path) -> str:
    """What a path waits for, in a few words."""
    assert path.wait is not None
    subject = path.wait.subject
    if isinstance(subject, MBarrier):
        other = "" if subject.block is path.block else f" of block {subject.block}"
        return f"{_mbarrier_name(subject)}{other}"
    if isinstance(subject, NamedBarrier):
        return f"barrier {subject.number}"
    if isinstance(subject, ClusterBarrier):
        return "barrier.cluster"
    return str(subject)


def _mbarrier_name(barrier: MBarrier) -> str:
    return f"mbarrier {barrier.offset}"


class _MBarrier(MBarrier):
    """An mbarrier whose phases are spans."""

    def __init__(
        self, trace: Trace, block: ThreadBlock, offset: int, count: int, thread: int
    ) -> None:
        super().__init__(block, offset, count, thread)
        self._trace = trace
        self._start()

    def _start(self) -> None:
        process = self._trace.process(self.block)
        title, name = f"phase {self.phase}", _mbarrier_name(self)
        self._span = self._trace.open(process, BARRIER, name, title, arrivals=self.count)

    def arrive(self, count: int = 1, drop: bool = False) -> int:
        self._trace.point(self._span, f"arrive {count} of {self.pending}")
        return super().arrive(count, drop)

    def expect(self, transactions: int) -> None:
        verb = "expect_tx" if transactions >= 0 else "complete_tx"
        self._trace.point(self._span, f"{verb} {abs(transactions)}")
        super().expect(transactions)

    def _settle(self) -> None:
        before = self.phase
        super()._settle()
        if self.phase != before:
            self._trace.close(self._span, completed=True)
            self._start()


class _Generation:
    """The span of a barrier's generation: from the first arrival to the last."""

    def __init__(self, trace: Trace, name: str) -> None:
        self._trace = trace
        self._name = name
        self._span: Span | None = None

    def arrive(self, block: ThreadBlock, generation: int, what: str) -> None:
        """Begins the span if it is the first that arrives."""
        if self._span is None:
            process = self._trace.process(block)
            self._span = self._trace.open(process, BARRIER, self._name, f"generation {generation}")
        self._trace.point(self._span, what)

    def end(self) -> None:
        """All have arrived."""
        if self._span is not None:
            self._trace.close(self._span, completed=True)
            self._span = None


class _NamedBarrier(NamedBarrier):
    """A block's barrier."""

    def __init__(self, trace: Trace, block: ThreadBlock, number: int) -> None:
        super().__init__(block, number)
        self._shown = _Generation(trace, f"barrier {number}")

    def arrive(self, threads: int | None) -> int:
        self._shown.arrive(self.block, self.generation, "a warp arrives")
        return super().arrive(threads)

    def settle(self) -> None:
        before = self.generation
        super().settle()
        if self.generation != before:
            self._shown.end()


class _ClusterBarrier(ClusterBarrier):
    """A cluster's barrier; it is shown with its first block."""

    def __init__(self, trace: Trace, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._shown = _Generation(trace, "barrier.cluster")

    def arrive(self, threads: int) -> int:
        block = self.cluster.blocks[0]
        self._shown.arrive(block, self.generation, f"{threads} threads arrive")
        return super().arrive(threads)

    def settle(self) -> None:
        before = self.generation
        super().settle()
        if self.generation != before:
            self._shown.end()
