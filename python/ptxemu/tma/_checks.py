"""The check of a number, with the package's sentence for what is none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["check_integer", "check_integers"]


def check_integer(name: str, value: object, whole: Sequence[object] | None = None) -> int:
    """Returns ``value`` as an ``int``; the message shows ``whole``, which it is an entry of.

    Raises:
        TypeError: It is no integer; a ``bool`` is none.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        shown = _show(value)
        if whole is not None:
            entries = [_show(entry) for entry in whole]
            shown = f"({entries[0]},)" if len(entries) == 1 else f"({', '.join(entries)})"
        raise TypeError(f"{name}: {shown} holds a {type(value).__name__}; integers are allowed")
    return int(value)


def check_integers(name: str, value: object) -> tuple[int, ...]:
    """Returns a sequence of integers as a tuple.

    Raises:
        TypeError: It is no sequence, or an entry is no integer.
    """
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray):
        kind = type(value).__name__
        article = "an" if kind[0] in "aeiou" else "a"
        raise TypeError(f"{name}: {value!r} is {article} {kind}; a sequence of integers is allowed")
    return tuple(check_integer(name, entry, tuple(value)) for entry in value)


def _show(value: object) -> str:
    return repr(value) if isinstance(value, str) else str(value)
