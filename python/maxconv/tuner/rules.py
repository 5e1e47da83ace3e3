"""Schedule rules as data, and how a list of them becomes a space.

The kinds of rules are Heron's (ASPLOS 2023). A rule looks at a workload and a target, and says
whether it applies; where it does, it adds variables and constraints with the generators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from .model import Model

__all__ = ["Facts", "Rule", "RuleKind", "Workload", "generate"]


class RuleKind(Enum):
    """What a rule does to a schedule."""

    ALWAYS_INLINE = "always-inline"
    """Computes a stage where it is used: it gets no memory and no loops of its own."""
    MULTI_LEVEL_TILING = "multi-level tiling"
    """Splits the loops over outputs and products into tiles of tiles."""
    ADD_CACHE_STAGE = "add-cache-stage"
    """Keeps an operand or the output in memory nearer to where it is used."""
    TENSORIZE = "tensorize"
    """Replaces the innermost loops by an instruction of fixed extents."""
    MULTI_LEVEL_SCRATCHPAD = "multi-level scratchpad"
    """Stages data through explicitly managed memory, and limits it."""
    MULTI_SCOPE_SCRATCHPAD = "multi-scope scratchpad"
    """Divides a memory among blocks or threads that reach one another's part."""
    USER_DEFINED = "user-defined"
    """What a kernel has beside."""


@dataclass(frozen=True)
class Facts:
    """Numbers that the kernel's own code says of a problem and a target, by name."""

    values: Mapping[str, tuple[tuple[int, ...], ...]]
    """Rows of numbers; most have one row of one number."""

    def __getitem__(self, name: str) -> int:
        """The number of a name.

        Raises:
            ValueError: There is none, or there are several numbers.
        """
        rows = self.rows(name)
        if len(rows) != 1 or len(rows[0]) != 1:
            raise ValueError(f"fact: {name} has {rows}, not one number")
        return rows[0][0]

    def row(self, name: str) -> tuple[int, ...]:
        """The numbers of a name that has one row."""
        (row,) = self.rows(name)
        return row

    def rows(self, name: str) -> tuple[tuple[int, ...], ...]:
        """The rows of a name.

        Raises:
            ValueError: There are none.
        """
        if name not in self.values:
            raise ValueError(f"fact: {name!r} is not one of {', '.join(self.values)}")
        return self.values[name]


@dataclass(frozen=True)
class Workload:
    """What rules look at."""

    target: str
    """``cpu``, ``sm90`` or ``sm100``."""
    facts: Facts
    residual: bool = False
    """Whether one is added to the output."""


@dataclass(frozen=True)
class Rule:
    """A schedule rule."""

    kind: RuleKind
    name: str
    """For people: what it does here."""
    apply: Callable[[Model, Workload], None]
    """Adds variables and constraints."""
    condition: Callable[[Workload], bool] = lambda workload: True
    """Whether it applies."""


def generate(rules: Sequence[Rule], workload: Workload) -> tuple[Model, list[Rule]]:
    """Applies rules in order.

    Returns:
        The model, and the rules that applied.
    """
    model = Model()
    applied = []
    for rule in rules:
        if rule.condition(workload):
            rule.apply(model, workload)
            applied.append(rule)
    return model, applied
