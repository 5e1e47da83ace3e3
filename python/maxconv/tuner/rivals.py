"""The kernels of a problem that are worth searching: those that may beat what dispatch chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .measure.base import DISPATCHED, Configuration, Measurer
from .space import Space

__all__ = ["HOPELESS", "Rival", "rivals", "shares"]

#: A kernel whose own choice takes so many times what dispatch's takes is not searched: cuts are
#: worth less.
HOPELESS = 1.5


@dataclass(frozen=True)
class Rival:
    """A kernel that is searched."""

    space: Space
    measurer: Measurer
    tabled: Configuration | None
    """What a tuned table has of it."""


def rivals(
    spaces: Sequence[Space],
    measurer_of: Callable[[Space], Measurer],
    tabled_of: Callable[[Space], Configuration | None],
) -> list[Rival]:
    """Returns the kernels that are worth searching, measuring each as it is; never none.

    Args:
        spaces: Of the kernels that take a problem.
        measurer_of: Returns what measures a space; that of a kernel left out is closed.
        tabled_of: Returns what a tuned table has of a space: its kernel is not left out.
    """
    found: list[tuple[float, Rival]] = []
    for space in spaces:
        rival = Rival(space, measurer_of(space), tabled_of(space))
        found.append((0.0 if len(spaces) == 1 else _slowness(rival), rival))
    least = min(slowness for slowness, _ in found)
    kept = []
    for slowness, rival in found:
        if rival.tabled is not None or slowness <= max(HOPELESS, least):
            kept.append(rival)
        else:
            rival.measurer.close()
    return kept


def _slowness(rival: Rival) -> float:
    """Returns how many times what dispatch's choice takes the kernel's own choice takes."""
    [outcome] = rival.measurer.measure([rival.measurer.choice()], DISPATCHED)
    if outcome.seconds is None or outcome.incumbent is None:
        raise ValueError(
            f"dispatch: {rival.space.kernel.name.lower()}'s own choice fails: {outcome.error}"
        )
    return outcome.seconds / outcome.incumbent


def shares(budget: int, count: int) -> list[int]:
    """Returns parts of a budget, of nearly one size and at least 1 each.

    Args:
        budget: Trials.
        count: How many parts.
    """
    return [max(1, budget // count + (place < budget % count)) for place in range(count)]
