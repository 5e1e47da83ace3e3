"""Sizes of parts."""

from __future__ import annotations

__all__ = ["parts"]


def parts(count: int) -> list[int]:
    """Returns the sizes of parts into which things can be cut: one for each number of parts.

    Args:
        count: How many things there are.
    """
    return sorted({-(-count // number) for number in range(1, count + 1)})
