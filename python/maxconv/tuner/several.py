"""Searches one convolution after the other: each has its own budget, and what is found is kept."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from .measure.cpu import WorkerError
from .session import Progress
from .table import Confirmation

__all__ = ["INTERRUPTED", "Totals", "reports", "search_all"]

#: The exit status after Ctrl-C, as shells have it.
INTERRUPTED = 130


def search_all(
    names: Sequence[str], search: Callable[[str, str], bool], optional: Collection[str] = ()
) -> int:
    """Searches convolutions in order; returns the exit status.

    Args:
        names: Theirs.
        search: Searches one, keeps what it finds, and returns whether Ctrl-C ended it. It is given
            what to call it, which of several says which it is, and its name.
        optional: Names of those that may fail without ending the others: they are named at the end,
            and the status is 1.

    Raises:
        ValueError: One that is not optional cannot be measured.
    """
    failed: dict[str, str] = {}
    for number, name in enumerate(names, start=1):
        told = name if len(names) == 1 else f"[{number}/{len(names)}] {name}"
        try:
            stopped = search(told, name)
        except KeyboardInterrupt:
            _say(f"{told}: interrupted; --records has its rounds")
            stopped = True
        except (ValueError, WorkerError) as error:
            if name not in optional:
                raise
            failed[name] = str(error)
            continue
        if stopped:
            if len(names) > 1:
                _say(f"interrupted: {len(names) - number} of {len(names)} are not searched")
            return INTERRUPTED
    for name, reason in failed.items():
        _say(f"{name}: failed: {reason}")
    return int(bool(failed))


@dataclass
class Totals:
    """What all layers take together, before and after, of what was confirmed."""

    before: float = 0.0
    """Seconds with what dispatch chooses."""
    after: float = 0.0
    """Seconds where each that a gain was confirmed of has its best configuration."""
    layers: int = 0

    def add(self, confirmed: Sequence[Confirmation], count: int) -> None:
        """Counts a convolution that so many layers are, with what was confirmed of its kernels."""
        if not confirmed:
            return
        best = max(confirmed, key=lambda each: (each.holds, each.gain[1]))
        self.layers += count
        self.before += count * best.before
        self.after += count * (best.after if best.holds else best.before)

    def __str__(self) -> str:
        return (
            f"{self.layers} layers: {self.before * 1e3:.2f} ms by dispatch, {self.after * 1e3:.2f} "
            f"ms with what was found, {self.before / self.after:.3f}x"
        )


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
