"""What a terminal shows while something takes long: a spinner, the seconds so far, the result.

Everything goes to stderr, so that a program may read stdout. A compile that a cache answers ends
before anything is drawn.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["progress"]

_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_ASCII_FRAMES = "|/-\\"
_INTERVAL_S = 0.1
# Work that ends sooner than this is not worth a line.
_PATIENCE_S = 0.5


class _Spinner:
    """Draws the innermost running task on one line of the terminal, from a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: list[tuple[str, float]] = []
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._drawn = False

    def begin(self, message: str) -> tuple[str, float]:
        task = (message, time.monotonic())
        with self._lock:
            self._tasks.append(task)
            if self._thread is None:
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(self._stop,), name="maxconv-progress", daemon=True
                )
                self._thread.start()
        return task

    def end(self, task: tuple[str, float], outcome: str) -> None:
        thread = None
        with self._lock:
            self._tasks.remove(task)
            self._erase()
            message, start = task
            elapsed = time.monotonic() - start
            if elapsed >= _PATIENCE_S:
                sys.stderr.write(f"{message}: {elapsed:.1f} s{outcome}\n")
                sys.stderr.flush()
            if not self._tasks:
                thread, self._thread = self._thread, None
                self._stop.set()
        # Outside the lock: the thread takes it to draw.
        if thread is not None:
            thread.join()

    def _run(self, stop: threading.Event) -> None:
        frames = _FRAMES if _can_write(_FRAMES) else _ASCII_FRAMES
        tick = 0
        while not stop.wait(_INTERVAL_S):
            with self._lock:
                if stop.is_set() or not self._tasks:
                    continue
                message, start = self._tasks[-1]
                elapsed = time.monotonic() - start
                if elapsed >= _PATIENCE_S:
                    line = f"{frames[tick % len(frames)]} {message} {int(elapsed)} s"
                    # A line that wraps could not be erased.
                    width = shutil.get_terminal_size().columns - 1
                    sys.stderr.write(f"\r\x1b[K{line[:width]}")
                    sys.stderr.flush()
                    self._drawn = True
            tick += 1

    def _erase(self) -> None:
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._drawn = False


def _can_write(text: str) -> bool:
    """Whether stderr's encoding has these characters."""
    try:
        text.encode(getattr(sys.stderr, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


_spinner = _Spinner()


@contextmanager
def progress(message: str, *, announce: bool = True) -> Iterator[None]:
    """Shows on stderr that the body runs, and for how many seconds it has.

    On a terminal: a spinner after half a second, and one line with the time taken once the body
    ends. Elsewhere: ``message`` on one line, at the start. Calls may be nested and may come from
    several threads; the innermost is drawn.

    Args:
        message: What is being done, without a full stop: ``"compiling ResNet-50"``.
        announce: Whether to write the line where stderr is no terminal.
    """
    if not sys.stderr.isatty():
        if announce:
            print(f"{message} ...", file=sys.stderr, flush=True)
        yield
        return
    task = _spinner.begin(message)
    outcome = ", failed"
    try:
        yield
        outcome = ""
    finally:
        _spinner.end(task, outcome)
