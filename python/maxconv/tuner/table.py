"""What confirmations make of a tuned table: rows where the gain exceeds the noise, no others."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .._tuned_table import CUT_FIELDS, Device, Row, Timing, read_table, write_table
from .measure.base import Configuration, Outcome
from .space import Space

__all__ = ["LEAST_GAIN", "Changes", "Confirmation", "change_table", "configuration_in"]

#: The least gain that a row has.
LEAST_GAIN = 1.02


@dataclass(frozen=True)
class Confirmation:
    """A configuration that was measured beside what dispatch chooses, in turns."""

    problem: tuple[int, ...]
    """``ConvProblem.numbers``."""
    dtype: str
    out_dtype: str
    units: int
    """Threads."""
    tuned: str
    """The kernel whose configuration it is, by name."""
    configuration: Configuration
    kernel: str
    """What dispatch chooses."""
    before: float
    """Its seconds."""
    before_spread: float
    after: float
    """The configuration's."""
    after_spread: float
    gain: tuple[float, float, float]
    """The quartiles of the gain in neighbouring turns."""

    @classmethod
    def of(
        cls, space: Space, configuration: Configuration, kernel: str, outcome: Outcome
    ) -> Confirmation | None:
        """Returns the confirmation that an outcome is, or None if the configuration failed.

        Args:
            space: The configuration's.
            configuration: What was measured.
            kernel: What dispatch chooses.
            outcome: What measuring them in turns gave.
        """
        if outcome.seconds is None or outcome.incumbent is None or outcome.gain is None:
            return None
        return cls(
            *(tuple(space.problem.numbers()), space.dtype, space.out_dtype, space.units),
            *(space.kernel.name.lower(), dict(configuration), kernel),
            *(outcome.incumbent, outcome.incumbent_spread, outcome.seconds, outcome.spread),
            outcome.gain,
        )

    @property
    def holds(self) -> bool:
        """Whether the gain exceeds the noise: in three of four turns, and by more than it varies.

        Of 31 turns with nothing between the two, three in four are one's in 1 of 500 cases.
        """
        low, median, high = self.gain
        return low > 1 and median >= LEAST_GAIN and median - 1 > (high - low) / 2


@dataclass(frozen=True)
class Changes:
    """What became of a table."""

    written: int
    """Rows that were added, or took another's place."""
    removed: int
    """Rows whose gain was not confirmed again."""

    def __str__(self) -> str:
        return f"{self.written} written, {self.removed} removed"


def change_table(
    path: Path,
    confirmations: Iterable[Confirmation],
    device: Device,
    versions: Mapping[str, str],
) -> Changes:
    """Writes confirmations into a table, made where it is missing.

    Of a problem and a kernel the last one counts; of a problem's kernels, the largest gain.

    Args:
        path: Of the table.
        confirmations: Made on this device, with these versions.
        device: The CPU.
        versions: Of what ran.

    Raises:
        TableError: What is there is no table, or is broken.
        OSError: It cannot be read or written.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"tuned table: the folder {path.parent} does not exist")
    with _alone(path.parent):
        rows = {row.key: row for row in read_table(path)} if path.exists() else {}
        before = dict(rows)
        latest = {}
        for confirmation in confirmations:
            row = _row(confirmation, device, versions)
            rows.pop(row.key, None)
            latest[row.key, confirmation.tuned] = (confirmation, row)
        for confirmation, row in latest.values():
            known = rows.get(row.key)
            if confirmation.holds and (known is None or row.gain[1] > known.gain[1]):
                rows[row.key] = row
        if rows or before:
            write_table(path, list(rows.values()))
    written = sum(before.get(key) != row for key, row in rows.items())
    return Changes(written, len(before.keys() - rows.keys()))


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lets one process at a time change the tables of a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def configuration_in(rows: Sequence[Row], space: Space, device: Device) -> Configuration | None:
    """Returns the configuration of a space that a table has for a CPU, of any version.

    Args:
        rows: Of the table.
        space: The space.
        device: The CPU.
    """
    key = (device, space.dtype, space.out_dtype, space.units, tuple(space.problem.numbers()))
    kernel = space.kernel.name.lower()
    found = (row.configuration for row in rows if row.key == key and row.after.kernel == kernel)
    return next(found, None)


def _row(confirmation: Confirmation, device: Device, versions: Mapping[str, str]) -> Row:
    """Returns the row of a confirmation."""
    before = Timing(confirmation.kernel, *_rounded(confirmation.before, confirmation.before_spread))
    after = Timing(confirmation.tuned, *_rounded(confirmation.after, confirmation.after_spread))
    low, median, high = (round(gain, 4) for gain in confirmation.gain)
    return Row(
        problem=confirmation.problem,
        dtype=confirmation.dtype,
        out_dtype=confirmation.out_dtype,
        threads=confirmation.units,
        device=device,
        configuration={
            name: confirmation.configuration[name] for name in CUT_FIELDS[confirmation.tuned]
        },
        before=before,
        after=after,
        gain=(low, median, high),
        versions=dict(versions),
    )


def _rounded(seconds: float, spread: float) -> tuple[float, float]:
    """Returns microseconds and spread with the digits that mean something."""
    return round(seconds * 1e6, 2), round(spread, 4)
