"""What measuring is, on every target: an interface, a protocol, and how outcomes are summarized."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["DISPATCHED", "Configuration", "Measurer", "Outcome", "Protocol", "summarize"]

#: A kernel's configuration: a number for each of its fields.
Configuration = Mapping[str, int]

#: What stands for the kernel and configuration that dispatch chooses without anything tuned.
DISPATCHED: Configuration = {}


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
    confirming: int = 31
    """Bursts of each, where a gain is confirmed."""
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
    incumbent_spread: float = 0.0
    """As ``spread``, of the incumbent."""
    gain: tuple[float, float, float] | None = None
    """The incumbent's time over the candidate's in neighbouring bursts: the quartiles."""


def summarize(bursts: Sequence[float], incumbent: Sequence[float] = ()) -> Outcome:
    """Returns the outcome of a candidate that is right.

    Args:
        bursts: Seconds of a call, of each burst.
        incumbent: The same of the incumbent, beside them.
    """
    median, spread = _spread(bursts)
    if not incumbent:
        return Outcome(median, spread)
    beside, beside_spread = _spread(incumbent)
    gains = [old / new for old, new in zip(incumbent, bursts, strict=True)]
    return Outcome(median, spread, None, beside, beside_spread, _quartiles(gains))


def _spread(bursts: Sequence[float]) -> tuple[float, float]:
    """Returns the median, and half of the distance of the quartiles over it."""
    low, median, high = _quartiles(bursts)
    return median, (high - low) / 2 / median


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the quartiles; of a single value, it."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


class Measurer(ABC):
    """Measures configurations of one space."""

    @abstractmethod
    def measure(
        self, configurations: Sequence[Configuration], incumbent: Configuration | None = None
    ) -> list[Outcome]:
        """Checks configurations against an oracle, and times those that are right.

        Args:
            configurations: What to measure.
            incumbent: What is timed beside each of them, in turns: a configuration, or
                ``DISPATCHED``.

        Returns:
            An outcome for each; one that crashed, hung or computed something wrong has an error.
        """

    @abstractmethod
    def choice(self) -> Configuration:
        """Returns the configuration that the kernel's own search chooses."""

    @abstractmethod
    def dispatched(self) -> str:
        """Returns the name of the kernel that dispatch chooses, which may be another."""

    @abstractmethod
    def confirm(self, configuration: Configuration) -> Outcome:
        """Measures a configuration beside what dispatch chooses, long enough to tell them apart.

        Args:
            configuration: What a search found.
        """

    def close(self) -> None:  # noqa: B027 # most hold nothing
        """Ends what measures."""
