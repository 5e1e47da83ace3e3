"""What is timed: a contender's runs of a problem, and the names under which they are recorded."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

__all__ = [
    "BARE",
    "BFLOAT16",
    "CALL",
    "COLORS",
    "CONTENDERS",
    "FIGURES",
    "FUSED",
    "KERNEL",
    "MAX",
    "MAXCONV",
    "TORCH",
    "TORCH_COMPILE",
    "WORKS",
    "WRONG",
    "Entrant",
    "Float32",
    "HostRun",
    "Key",
    "Mismatch",
    "Run",
    "check",
    "time_calls",
]

#: What is computed: the convolution alone, or also bias, activation and the sum with a residual.
BARE, FUSED = WORKS = ("bare", "fused")

#: What is timed: the kernel alone, or a call as a user makes it, the host's part included.
KERNEL, CALL = FIGURES = ("kernel", "call")

MAXCONV, MAX, TORCH, TORCH_COMPILE = "maxconv", "max", "torch", "torch.compile"

#: maxconv in that type, beside which a type of 8 bits is timed.
BFLOAT16 = "bfloat16"

#: How the reason begins for which a wrong output has no time.
WRONG = "wrong result"

#: The contenders' names and colours, in the order of tables and plots.
COLORS = {
    MAXCONV: "#333333",
    "torch": "#d1495b",
    "torch.compile": "#e09f1f",
    "cudnn": "#00798c",
    MAX: "#7768ae",
    BFLOAT16: "#8d99ae",
}

CONTENDERS = tuple(COLORS)

Float32 = npt.NDArray[np.float32]


class Key(NamedTuple):
    """The name of a measurement within a problem."""

    contender: str
    work: str = BARE
    variant: str = ""
    """How the contender was called, where there is more than one way; empty for its main one."""

    def __str__(self) -> str:
        """The name in a message."""
        variant = f" ({self.variant})" if self.variant else ""
        return f"{self.contender}{variant}{', fused' if self.work == FUSED else ''}"


class Mismatch(ValueError):
    """A contender's output differs from the reference."""


class Run(Protocol):
    """Some convolutions of one problem, in one call."""

    @property
    def convolutions(self) -> int:
        """How many a call makes."""

    def burst(self, calls: int) -> Sequence[float]:
        """Makes calls one after the other.

        Returns:
            Seconds of a call: of each, or their mean where the device's clock sees only all.
        """

    def error(self, expected: Any, tolerance: float) -> float:
        """Returns how far outputs lie from the reference, in parts of ``1 + |reference|``.

        Args:
            expected: The reference, as the device keeps it.
            tolerance: The largest distance that passes.

        Raises:
            Mismatch: An output lies farther away, or is missing.
        """


@dataclass(frozen=True)
class Entrant:
    """What a contender is timed with, at least one of the two."""

    kernel: Run | None = None
    """Gives the kernel's time: many convolutions share what a call costs."""
    call: Run | None = None
    """Gives the time of a call as a user makes it."""
    note: str = ""
    """What a reader of the record must know."""
    tolerance: float | None = None
    """How far outputs may lie from the reference, where that is not the type's usual distance."""

    def runs(self) -> Iterator[tuple[str, Run]]:
        """Yields what is timed, by figure."""
        if self.kernel is not None:
            yield KERNEL, self.kernel
        if self.call is not None:
            yield CALL, self.call


def time_calls(
    call: Callable[[], object], calls: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Returns the seconds of each of ``calls`` calls."""
    samples = []
    for _ in range(calls):
        start = clock()
        result = call()
        samples.append(clock() - start)
        # Freeing an output is no part of the call, in any library.
        del result
    return samples


class HostRun(ABC):
    """A run whose calls end when their outputs are there, timed by the host's clock, one by one."""

    convolutions: int = 1

    @abstractmethod
    def __call__(self) -> Sequence[object]:
        """Convolves; returns the outputs, in the contender's own form and one a convolution."""

    @abstractmethod
    def outputs(self) -> list[Float32]:
        """Convolves; returns the outputs as ``[N, *spatial, K]`` in float32."""

    def burst(self, calls: int, clock: Callable[[], float] = time.perf_counter) -> list[float]:
        """Returns the seconds of each of ``calls`` calls."""
        return time_calls(self, calls, clock)

    def error(self, expected: Any, tolerance: float) -> float:
        """See ``Run.error``; ``expected`` is an array in float32."""
        outputs = self.outputs()
        if len(outputs) != self.convolutions:
            raise Mismatch(f"there are {len(outputs)} outputs, not {self.convolutions}")
        return max(check(output, expected, tolerance) for output in outputs)


def check(output: Float32, reference: Float32, tolerance: float) -> float:
    """Returns how far an output lies from the reference, in parts of ``1 + |reference|``.

    Raises:
        Mismatch: Farther than ``tolerance``, or of another size.
    """
    if output.size != reference.size:
        raise Mismatch(f"the output has {output.size} elements, not {reference.size}")
    expected = reference.reshape(-1)
    errors = np.abs(output.reshape(-1) - expected) / (1 + np.abs(expected))
    worst = float(np.max(errors, initial=0.0))
    # A NaN compares as false, and must not pass.
    if not worst <= tolerance:
        raise Mismatch(f"the output is off by {worst:.2g}; {tolerance:.2g} is allowed")
    return worst
