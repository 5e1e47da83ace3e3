"""What a trace is filled by: a scheduler and barriers that record what they do.

A launch without a trace has the ordinary ones, and nothing of this file runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .._hardware.barriers import (
    BarrierKinds,
    BlockThreads,
    ClusterBarrier,
    ClusterThreads,
    MBarrier,
    NamedBarrier,
)
from .._hardware.grid import Grid
from .._hardware.scheduler import UNNAMED, Operation, Scheduler
from .._text.flow import END
from .._warps.paths import Path
from ..trace import BARRIER, ENGINE, RUNNING, WARP, Span, Trace

__all__ = ["Recorder"]


class Recorder:
    """Fills a trace.

    Args:
        trace: It.
        grid: The launch that is recorded.

    Attributes:
        barriers: What the launch makes its barriers of.
        scheduler: What runs it.

    Raises:
        ValueError: The trace has another launch.
    """

    def __init__(self, trace: Trace, grid: Grid) -> None:
        trace.start(lambda: grid.executed)
        self.trace = trace
        self.grid = grid
        self.barriers = BarrierKinds(
            partial(_MBarrier, self), partial(_NamedBarrier, self), partial(_ClusterBarrier, self)
        )
        self.scheduler: Scheduler[Path] = _Scheduler(self, grid.device.seed)

    def process(self, block: BlockThreads) -> int:
        """A block's number in the trace, which gets its name."""
        x, y, z = block.index
        width, height, _ = self.grid.shape.grid
        number = x + width * (y + height * z)
        name = f"block {block.index}, rank {block.rank} of its cluster"
        self.trace.blocks.setdefault(number, name)
        return number


class _Scheduler(Scheduler[Path]):
    """A scheduler that tells a trace who runs, who waits, and what completes."""

    def __init__(self, recorder: Recorder, seed: int) -> None:
        super().__init__(seed)
        self.recorder = recorder
        self.trace = recorder.trace
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
            self.recorder.process(path.block),
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
            self.trace.close_barriers(self.recorder.process(path.block))

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
        other = "" if subject.block is path.block else f" of block {subject.block.index}"
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
        self, recorder: Recorder, block: BlockThreads, offset: int, count: int, thread: int
    ) -> None:
        super().__init__(block, offset, count, thread)
        self._recorder = recorder
        self._start()

    def _start(self) -> None:
        process = self._recorder.process(self.block)
        title, name = f"phase {self.phase}", _mbarrier_name(self)
        self._span = self._recorder.trace.open(process, BARRIER, name, title, arrivals=self.count)

    def arrive(self, count: int = 1, drop: bool = False) -> int:
        self._recorder.trace.point(self._span, f"arrive {count} of {self.pending}")
        return super().arrive(count, drop)

    def expect(self, transactions: int) -> None:
        verb = "expect_tx" if transactions >= 0 else "complete_tx"
        self._recorder.trace.point(self._span, f"{verb} {abs(transactions)}")
        super().expect(transactions)

    def _complete_phase(self) -> None:
        before = self.phase
        super()._complete_phase()
        if self.phase != before:
            self._recorder.trace.close(self._span, completed=True)
            self._start()


class _Generation:
    """The span of a barrier's generation: from the first arrival to the last."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder = recorder
        self._name = name
        self._span: Span | None = None

    def arrive(self, block: BlockThreads, generation: int, what: str) -> None:
        """Begins the span if it is the first that arrives."""
        if self._span is None:
            process = self._recorder.process(block)
            self._span = self._recorder.trace.open(
                process, BARRIER, self._name, f"generation {generation}"
            )
        self._recorder.trace.point(self._span, what)

    def end(self) -> None:
        """All have arrived."""
        if self._span is not None:
            self._recorder.trace.close(self._span, completed=True)
            self._span = None


class _NamedBarrier(NamedBarrier):
    """A block's barrier."""

    def __init__(self, recorder: Recorder, block: BlockThreads, number: int) -> None:
        super().__init__(block, number)
        self._shown = _Generation(recorder, f"barrier {number}")

    def arrive(self, threads: int | None) -> int:
        self._shown.arrive(self.block, self.generation, "a warp arrives")
        return super().arrive(threads)

    def complete(self) -> None:
        before = self.generation
        super().complete()
        if self.generation != before:
            self._shown.end()


class _ClusterBarrier(ClusterBarrier):
    """A cluster's barrier; it is shown with its first block."""

    def __init__(self, recorder: Recorder, cluster: ClusterThreads) -> None:
        super().__init__(cluster)
        self._shown = _Generation(recorder, "barrier.cluster")

    def arrive(self, threads: int) -> int:
        block = self.cluster.blocks[0]
        self._shown.arrive(block, self.generation, f"{threads} threads arrive")
        return super().arrive(threads)

    def complete(self) -> None:
        before = self.generation
        super().complete()
        if self.generation != before:
            self._shown.end()
