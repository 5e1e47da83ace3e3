"""What the emulator reports: every error names the kernel line and the warp, where there is one."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "BarrierError",
    "BudgetError",
    "DeadlockError",
    "EmulatorError",
    "FenceError",
    "IllegalInstructionError",
    "MemoryFaultError",
    "Place",
    "PtxSyntaxError",
    "RaceError",
    "UnfinishedError",
    "UnsupportedError",
]


#: Characters of a line that a report shows.
_SHOWN = 100


@dataclass(frozen=True)
class Place:
    """Where a path stands.

    Attributes:
        line: In the PTX text, from 1.
        text: The line.
        block: Its index in the grid.
        warp: Its index in the block.
        lanes: Those of the warp that are there.
    """

    line: int
    text: str
    block: tuple[int, int, int]
    warp: int
    lanes: tuple[int, ...]

    def __str__(self) -> str:
        text = self.text if len(self.text) <= _SHOWN else self.text[:_SHOWN] + " ..."
        where = f"line {self.line} `{text}`, warp {self.warp} of block {self.block}"
        return where if len(self.lanes) == 32 else f"{where}, lanes {_ranges(self.lanes)}"


def _ranges(lanes: tuple[int, ...]) -> str:
    """Numbers as ranges, ``0-3, 7``."""
    parts: list[list[int]] = []
    for lane in lanes:
        if parts and lane == parts[-1][1] + 1:
            parts[-1][1] = lane
        else:
            parts.append([lane, lane])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


class EmulatorError(Exception):
    """The base of all that the emulator reports.

    Attributes:
        place: Where the error was found, if an instruction did.
        lanes: Those under whose predicate the instruction ran, if it has one.
        waiting: Where every path stands that waits, and for what, if the kernel did not end.
    """

    place: Place | None = None
    lanes: object = None
    waiting: tuple[tuple[Place, str], ...] = ()

    @property
    def message(self) -> str:
        """What happened, without the place."""
        return super().__str__()

    def __str__(self) -> str:
        """The place, then what happened there."""
        return f"{self.place}: {self.message}" if self.place else self.message


class PtxSyntaxError(EmulatorError):
    """The text is no PTX that the parser knows."""


class UnsupportedError(EmulatorError):
    """An instruction, or a form of one, that the emulator does not have; nothing has run."""


class IllegalInstructionError(EmulatorError):
    """Operands that the hardware refuses, or lanes that an instruction does not allow."""


class MemoryFaultError(EmulatorError):
    """An access outside of memory, or at an address of the wrong alignment."""


class RaceError(EmulatorError):
    """Memory or registers in asynchronous use, or that nothing wrote."""


class FenceError(EmulatorError):
    """Shared memory that one proxy wrote and another reads, without a fence between them."""


class BarrierError(EmulatorError):
    """A barrier got more arrivals or bytes than it expects, or is none."""


class UnfinishedError(EmulatorError):
    """A block ended while something that it started was not waited for."""


class DeadlockError(EmulatorError):
    """Every thread waits, and nothing is under way that would wake one."""


class BudgetError(EmulatorError):
    """The kernel ran as many instructions as it was allowed, and did not end."""
