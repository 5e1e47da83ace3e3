"""What ``convert`` did to a model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["ConversionReport", "Left", "Replaced", "Untraced"]


@dataclass(frozen=True)
class Replaced:
    """A convolution that now runs in maxconv."""

    name: str
    """Where it is: a module's path, or a function and its place in the graph."""
    kind: str
    """What it was, as ``Conv2d``."""
    fused: tuple[str, ...] = ()
    """What its kernel does besides, in order, as ``BatchNorm2d bn1``, ``ReLU``, ``residual``."""
    note: str = ""
    """Why nothing more was fused, where something stood next to it that could be."""


@dataclass(frozen=True)
class Left:
    """A convolution or normalization that runs in PyTorch as before, a module or a function."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Untraced:
    """A module that cannot be traced: its parts were converted one by one."""

    name: str
    reason: str


@dataclass
class ConversionReport:
    """What ``convert`` replaced, what it left, and why. ``str(report)`` is a table."""

    replaced: list[Replaced] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    traced: list[str] = field(default_factory=list)
    """Modules in which neighbours were fused; the model itself is ``(model)``."""
    untraced: list[Untraced] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as dictionaries, lists and strings."""
        return asdict(self)

    def to_json(self, indent: int | None = 2) -> str:
        """Returns the report as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        """The report as tables."""
        lines = [f"{len(self.replaced)} convolutions replaced, {len(self.left)} modules left"]
        lines += _table(
            ("replaced", "was", "fused", ""),
            ((r.name, r.kind, " + ".join(r.fused), r.note) for r in self.replaced),
        )
        lines += _table(("left", "is", "because"), ((e.name, e.kind, e.reason) for e in self.left))
        lines += _table(
            ("not traced: single convolutions only", "because"),
            ((e.name, e.reason) for e in self.untraced),
        )
        if self.untraced:
            lines += ["", 'torch.compile(model, backend="maxconv") fuses in these too']
        return "\n".join(lines)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table, none if there is no row."""
    body = [list(row) for row in rows]
    if not body:
        return []
    table = [list(head), *body]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    rule = ["-" * width for width in widths]
    return [
        "",
        *(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (table[0], rule, *body)
        ),
    ]
