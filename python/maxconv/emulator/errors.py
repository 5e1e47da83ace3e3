"""What the emulator reports: every error names the kernel line and the warp, where there is one."""

from __future__ import annotations

__all__ = [
    "BarrierError",
    "BudgetError",
    "DeadlockError",
    "EmulatorError",
    "FenceError",
    "IllegalInstructionError",
    "MemoryFaultError",
    "PtxSyntaxError",
    "RaceError",
    "UnfinishedError",
    "UnsupportedError",
]


class EmulatorError(Exception):
    """The base of all that the emulator reports.

    Attributes:
        place: Line, warp and lanes, added where the error was found.
        lanes: Those under whose predicate the instruction ran, if it has one.
    """

    place: str = ""
    lanes: object = None

    def __str__(self) -> str:
        """The place, then what happened there."""
        text = super().__str__()
        return f"{self.place}: {text}" if self.place else text


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
