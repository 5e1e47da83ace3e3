"""Lists of configurations: as a Mojo module for the measuring program, and as JSON beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..kernels import KernelSpace


__all__ = ["NOT_IN_TABLE", "Configurations", "Listed", "table_rows", "without_split"]

#: The row of a configuration that is not in the hand-written table.
NOT_IN_TABLE = -1

#: The last of a kernel's fields, which the plan has and not the configuration.
_SPLIT_K = "split_k"


@dataclass(frozen=True)
class Listed:
    """A configuration of a list."""

    values: tuple[int, ...]
    """Of the kernel's fields, but for the plan's."""
    row: int = NOT_IN_TABLE
    """Of the hand-written table, or ``NOT_IN_TABLE``."""
    origin: str = "table"
    """How it was found."""


@dataclass(frozen=True)
class Configurations:
    """A list of configurations; a configuration's index is its place.

    Raises:
        ValueError: A configuration stands there twice, or has another number of values.
    """

    fields: tuple[str, ...]
    """The kernel's, but for the plan's."""
    listed: tuple[Listed, ...]

    def __post_init__(self) -> None:
        values = [entry.values for entry in self.listed]
        if len(set(values)) != len(values):
            raise ValueError("configurations: one stands there twice")
        for entry in self.listed:
            if len(entry.values) != len(self.fields):
                raise ValueError(
                    f"configurations: {entry.values} are not {len(self.fields)} values"
                )

    def configuration(self, index: int, split_k: int) -> dict[str, int]:
        """Returns all of the kernel's fields of a configuration and a split."""
        values = dict(zip(self.fields, self.listed[index].values, strict=True))
        return values | {_SPLIT_K: split_k}

    def source(self) -> str:
        """Returns the Mojo module ``configurations`` of the measuring program."""
        numbers = "".join(f"    [{', '.join(map(str, e.values))}],\n" for e in self.listed)
        rows = "".join(f"    {entry.row},\n" for entry in self.listed)
        return (
            '"""Configurations that are measured; written by `maxconv tune --build`."""\n\n'
            f"comptime NUMBERS: List[List[Int]] = [\n{numbers}]\n"
            f'"""{", ".join(self.fields)}."""\n\n'
            f"comptime ROWS: List[Int] = [\n{rows}]\n"
            f'"""Of the hand-written table, or {NOT_IN_TABLE}."""\n'
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the list for ``of_json``."""
        listed = [[entry.row, entry.origin, *entry.values] for entry in self.listed]
        return {"fields": list(self.fields), "listed": listed}

    @classmethod
    def of_json(cls, read: Mapping[str, Any]) -> Configurations:
        """Returns the list of ``as_json``."""
        listed = (Listed(tuple(values), row, origin) for row, origin, *values in read["listed"])
        return cls(tuple(read["fields"]), tuple(listed))


def table_rows(space: KernelSpace) -> tuple[Listed, ...]:
    """Returns the rows of the hand-written table that are offered for a problem's types."""
    return tuple(Listed(tuple(values), row) for row, *values in space.facts.rows("row"))


def without_split(fields: Sequence[str]) -> tuple[str, ...]:
    """Returns a kernel's fields but for the plan's.

    Raises:
        ValueError: The last one is not the plan's.
    """
    if fields[-1] != _SPLIT_K:
        raise ValueError(f"fields: the last is {fields[-1]}, not {_SPLIT_K}")
    return tuple(fields[:-1])
