"""What was tuned, in use: how the kernels of a process learn of a tuned table.

The user's own table lies in the cache folder; ``MAXCONV_TUNED`` names another one, or, where it is
empty, none.

The kernels read no YAML. The rows that are for this CPU and these versions are written to a small
text file, an entry of the cache that is named by what is in it, and a variable of the environment
tells the kernels its path (``operations/conv/tuned.mojo``). They look when they plan a problem,
in PyTorch's calls and in graphs, and read the file once a process.
"""

from __future__ import annotations

import hashlib
import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ._library import LibraryError, cached
from ._machine import kernel_features
from ._tuned_table import (
    CUT_FIELDS,
    Device,
    Row,
    TableError,
    kernel_versions,
    read_table,
    this_device,
    user_table,
)

__all__ = [
    "FILE_VARIABLE",
    "TABLE_VARIABLE",
    "Line",
    "derived",
    "known_features",
    "table_in_use",
    "text_of",
    "use_file",
    "use_no_table",
    "use_table",
]

#: The variable that names a table instead of the user's own, or, empty, none.
TABLE_VARIABLE = "MAXCONV_TUNED"

#: The variable that names the kernels' file. Each process sets it anew.
FILE_VARIABLE = "MAXCONV_TUNED_FILE"

_TEXT_SCHEMA = "maxconv tuned cpu 2"
_TEXT_NAME = "tuned.txt"


class Line(NamedTuple):
    """What the kernels read of a row."""

    dtype: str
    out_dtype: str
    threads: int
    problem: tuple[int, ...]
    kernel: str
    """What runs it, by name."""
    cut: tuple[int, ...]
    """The numbers of the kernel's ``CUT_FIELDS``."""


def text_of(lines: Sequence[Line]) -> str:
    """Returns a file for the kernels."""
    texts = [
        " ".join(map(str, (*line[:3], *line.problem, "=", line.kernel, *line.cut)))
        for line in lines
    ]
    return "\n".join((_TEXT_SCHEMA, *texts, f"end {len(texts)}", ""))


def derived(rows: Sequence[Row], device: Device, versions: Mapping[str, str]) -> list[Line]:
    """Returns what the kernels read: the rows that are for a CPU and versions.

    Args:
        rows: Of a table.
        device: The CPU.
        versions: As ``kernel_versions`` returns them.
    """
    return [
        Line(
            *(row.dtype, row.out_dtype, row.threads, row.problem, row.after.kernel),
            tuple(row.configuration[name] for name in CUT_FIELDS[row.after.kernel]),
        )
        for row in rows
        if row.device == device and row.versions == versions
    ]


_lock = threading.Lock()
_decided: list[Path | None] = []


def use_table() -> None:
    """Has the kernels of this process use what was tuned; only the first call does anything.

    A table that cannot be used is told in a warning, and what dispatch chooses runs.
    """
    with _lock:
        if not _decided:
            _decide(_file())


def use_no_table() -> None:
    """Has the kernels of this process run what dispatch chooses, as the tuner measures.

    Raises:
        ValueError: They use a table already.
    """
    with _lock:
        if not _decided:
            _decide(None)
        elif _decided[0] is not None:
            raise ValueError(
                f"tuned table: the kernels of this process use {_decided[0]}; measure in another "
                f"process, or with {TABLE_VARIABLE} empty"
            )


def use_file(file: Path) -> None:
    """Has the kernels of this process use a file of theirs, as ``text_of`` makes it.

    Raises:
        ValueError: It was decided already what they use.
    """
    with _lock:
        if _decided:
            raise ValueError(f"tuned table: the kernels of this process use {_decided[0]} already")
        _decide(file)


def table_in_use() -> Path | None:
    """Returns the kernels' file, if this process uses one."""
    return _decided[0] if _decided else None


def known_features() -> int | None:
    """Returns what may be told of this CPU to what is compiled for it, as ``kernel_features`` does.

    It then has the kernels that dispatch chooses from on such a CPU. A tuned table may name others:
    beside one it is None.
    """
    use_table()
    return kernel_features() if table_in_use() is None else None


def _decide(file: Path | None) -> None:
    """Tells the kernels, once."""
    os.environ.pop(FILE_VARIABLE, None)
    if file is not None:
        os.environ[FILE_VARIABLE] = str(file)
    _decided.append(file)


def _file() -> Path | None:
    """Returns the kernels' file, made now where it is missing, or None if there is no table."""
    given = os.environ.get(TABLE_VARIABLE)
    if given == "":
        return None
    try:
        path = user_table() if given is None else Path(given).absolute()
        if given is None and not path.exists():
            return None
        lines = derived(read_table(path), this_device(), kernel_versions())
        if not lines:
            return None
        text = text_of(lines)
        name = hashlib.sha256(f"tuned {text}".encode()).hexdigest()[:32]

        def make(file: Path) -> None:
            file.write_text(text, encoding="utf-8")

        return cached(_TEXT_NAME, lambda: name, make, "writing what was tuned for the kernels")
    except (LibraryError, OSError, TableError) as error:
        warnings.warn(f"what was tuned is not used: {error}", RuntimeWarning, stacklevel=4)
        return None
