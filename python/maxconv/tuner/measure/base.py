"""What measuring is, on every target: an interface, a protocol, and how outcomes are summarized."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Configuration", "Measurer", "Outcome", "Protocol", "summarize"]

#: A kernel's configuration: a number for each of its fields.
Configuration = Mapping[str, int]


@dataclass(frozen=True)
class Protocol:
    """How a candidate is timed.

    Raises:
        ValueError: A number is not positive.
    """

    rounds: int = 9
    """Bursts of each candidate, one of the incumbent beside each."""
    burst_s: float = 0.004
    """Seconds of a burst, at least: as many calls as that takes, and one."""
    hopeless: float = 2.5
    """A candidate whose best of two bursts takes so many times the incumbent's gets no other."""
    timeout_s: float = 60.0
    """Seconds for a candidate, on average, before its process is taken for hung."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"{name}: {value} is not positive")


@dataclass(frozen=True)
class Outcome:
    """What measuring a configuration gave."""

    seconds: float | None
    """Of a call, the median of bursts; None if it failed."""
    spread: float = 0.0
    """Half of the distance of the bursts' quartiles, over the median."""
    error: str | None = None
    """Why it failed."""
    incumbent: float | None = None
    """Seconds of a call of the incumbent meanwhile, if there was one."""


def summarize(bursts: Sequence[float], incumbent: Sequence[float] = ()) -> Outcome:
    """Returns the outcome of a candidate that is right.

    Args:
        bursts: Seconds of a call, of each burst.
        incumbent: The same of the incumbent, beside them.
    """
    median = statistics.median(bursts)
    spread = 0.0
    if len(bursts) > 1:
        low, _, high = statistics.quantiles(bursts, n=4, method="inclusive")
        spread = (high - low) / 2 / median
    return Outcome(median, spread, incumbent=statistics.median(incumbent) if incumbent else None)


class Measurer(ABC):
    """Measures configurations of one space."""

    @abstractmethod
    def measure(
        self, configurations: Sequence[Configuration], incumbent: Configuration | None = None
    ) -> list[Outcome]:
        """Checks configurations against an oracle, and times those that are right.

        Args:
            configurations: What to measure.
            incumbent: What is timed beside each of them, in turns.

        Returns:
            An outcome for each; one that crashed, hung or computed something wrong has an error.
        """

    @abstractmethod
    def choice(self) -> Configuration:
        """Returns the configuration that the kernel's own dispatch chooses."""

    def close(self) -> None:  # noqa: B027 # most hold nothing
        """Ends what measures."""
