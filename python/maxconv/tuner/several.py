"""Searches one convolution after the other: each has its own budget, and what is found is kept."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping

from .measure.cpu import WorkerError
from .session import Progress
from .space import Space

__all__ = ["INTERRUPTED", "reports", "search_all"]

#: The exit status after Ctrl-C, as shells have it.
INTERRUPTED = 130


def search_all(
    spaces: Mapping[str, Space],
    search: Callable[[str, Space], bool],
    optional: Collection[str] = (),
) -> int:
    """Searches spaces in order; returns the exit status.

    Args:
        spaces: By name.
        search: Searches a space, keeps what it finds, and returns whether Ctrl-C ended it. Of
            several spaces the name that it is given says which of them this is.
        optional: Names of those that may fail without ending the others: they are named at the end,
            and the status is 1.

    Raises:
        ValueError: A space that is not optional cannot be measured.
    """
    failed: dict[str, str] = {}
    for number, (name, space) in enumerate(spaces.items(), start=1):
        told = name if len(spaces) == 1 else f"[{number}/{len(spaces)}] {name}"
        try:
            stopped = search(told, space)
        except KeyboardInterrupt:
            _say(f"{told}: interrupted; --records has its rounds")
            stopped = True
        except (ValueError, WorkerError) as error:
            if name not in optional:
                raise
            failed[name] = str(error)
            continue
        if stopped:
            if len(spaces) > 1:
                _say(f"interrupted: {len(spaces) - number} of {len(spaces)} are not searched")
            return INTERRUPTED
    for name, reason in failed.items():
        _say(f"{name}: failed: {reason}")
    return int(bool(failed))


@contextlib.contextmanager
def reports(name: str) -> Iterator[Callable[[Progress], None]]:
    """Shows how far a search has come on stderr: in one line on a terminal, otherwise in many."""
    terminal = sys.stderr.isatty()
    begin, end = ("\r\x1b[K", "") if terminal else ("", "\n")

    def report(progress: Progress) -> None:
        print(f"{begin}{name}: {progress}", end=end, file=sys.stderr, flush=True)

    try:
        yield report
    finally:
        if terminal:
            print(begin, end="", file=sys.stderr, flush=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
