"""The columns of a table of gains that gain most together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["greedy"]

#: Gains below this are rounding errors.
_LEAST = 1e-9


def greedy(
    gains: npt.NDArray[np.float64], weights: npt.NDArray[np.float64], most: int
) -> list[int]:
    """Returns columns, the one that gains most first; each gains something beside those before.

    Args:
        gains: Of each problem (rows) with each configuration (columns), at least 0; a problem gains
            what its best configuration does.
        weights: Of the problems.
        most: Columns at most.
    """
    best = np.zeros(len(gains))
    chosen: list[int] = []
    while len(chosen) < most and gains.size:
        more = weights @ np.maximum(gains - best[:, None], 0.0)
        column = int(more.argmax())
        if more[column] <= _LEAST:
            break
        chosen.append(column)
        best = np.maximum(best, gains[:, column])
    return chosen
