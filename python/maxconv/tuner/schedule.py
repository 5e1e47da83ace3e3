"""A schedule, as far as memory goes.

It is the stages of a kernel in the order in which they run, and the buffers that each writes and
reads, from which follows which buffers live together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .model import Term

__all__ = ["Schedule", "Stage"]


@dataclass(frozen=True)
class Stage:
    """A step of a kernel, after which the next one starts.

    Work of several roles that runs at the same time is one stage, which writes and reads what all
    of them do.
    """

    name: str
    writes: tuple[str, ...] = ()
    """Buffers, by name."""
    reads: tuple[str, ...] = ()
    """Buffers, by name."""


@dataclass(frozen=True)
class Schedule:
    """Stages in order, and the bytes of their buffers in one memory.

    Raises:
        ValueError: A stage reads a buffer that none before it, nor itself, has written, or one has
            no bytes.
    """

    memory: str
    """For people: which memory it is."""
    stages: Sequence[Stage]
    sizes: Mapping[str, Term]
    """Bytes of each buffer: a variable, or a constant."""

    def __post_init__(self) -> None:
        written: set[str] = set()
        for stage in self.stages:
            written.update(stage.writes)
            if early := set(stage.reads) - written:
                raise ValueError(
                    f"stages: {stage.name} reads {sorted(early)}, which no stage up to it writes"
                )
        if written != self.sizes.keys():
            odd = sorted(written ^ self.sizes.keys())
            raise ValueError(f"sizes: {odd} are not both written by a stage and given bytes")

    def lifetimes(self) -> dict[str, tuple[int, int]]:
        """Returns the first and the last stage, by place, in which each buffer lives.

        It lives from the first write to the last read; one that nobody reads, to its last write.
        """
        lives: dict[str, tuple[int, int]] = {}
        for place, stage in enumerate(self.stages):
            for name in (*stage.writes, *stage.reads):
                lives[name] = (lives.get(name, (place, place))[0], place)
        return lives

    def live(self) -> list[tuple[str, ...]]:
        """Returns the buffers that live in each stage, in the order of ``sizes``."""
        lives = self.lifetimes()
        return [
            tuple(name for name in self.sizes if lives[name][0] <= place <= lives[name][1])
            for place in range(len(self.stages))
        ]

    def peaks(self) -> dict[str, tuple[str, ...]]:
        """Returns the sets of buffers that live together, by the stage that has each first.

        A set that is part of another is left out: where the other fits, it does too.
        """
        live = self.live()
        found: dict[str, tuple[str, ...]] = {}
        for stage, names in zip(self.stages, live, strict=True):
            larger = any(set(names) < set(other) for other in live)
            if names and not larger and names not in found.values():
                found[stage.name] = names
        return found
