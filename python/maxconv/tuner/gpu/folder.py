"""What a folder of ``--build`` holds.

It is the measuring program with the libraries that it loads, and ``tune.json``: the configurations,
the problems, and for each of them what to measure. That and this package is all that the GPU
machine needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ... import _program
from ..._program import LIBRARIES
from .configurations import Configurations

__all__ = [
    "FORMAT",
    "MANIFEST",
    "PROGRAM",
    "Folder",
    "Task",
    "check_folder",
    "read_folder",
    "write_folder",
]

#: The file that says what a folder holds, the version of its form, and the program.
MANIFEST, FORMAT, PROGRAM = "tune.json", 1, "measure"


@dataclass(frozen=True)
class Task:
    """A problem, and what is measured of it."""

    name: str
    numbers: tuple[int, ...]
    """``ConvProblem.numbers``."""
    layers: int
    """How many layers of the networks have it."""
    line: str
    """By which the program makes its operands."""
    launches: int
    """Of a graph."""
    candidates: tuple[tuple[int, int, float], ...]
    """Configurations by index, their split, and the model's time over the table's, the least
    first."""


@dataclass(frozen=True)
class Folder:
    """What a folder holds."""

    date: str
    """UTC, ISO 8601."""
    versions: Mapping[str, str]
    """Of the package, MAX and Mojo, and what the kernels' source says of itself."""
    configurations: Configurations
    tasks: tuple[Task, ...]


def check_folder(folder: Path) -> None:
    """Checks that a folder can be built into, as ``maxconv._program.check_folder`` does."""
    _program.check_folder("--build", folder, MANIFEST)


def write_folder(folder: Path, made: Folder) -> None:
    """Writes what a folder holds into its ``tune.json``."""
    document = {
        "format": FORMAT,
        "date": made.date,
        "versions": dict(made.versions),
        "configurations": made.configurations.as_json(),
        "tasks": [asdict(task) for task in made.tasks],
    }
    (folder / MANIFEST).write_text(json.dumps(document) + "\n", encoding="utf-8")


def read_folder(folder: Path, *, whole: bool = True) -> Folder:
    """Reads what a folder holds.

    Args:
        folder: Where.
        whole: Whether its program is needed.

    Raises:
        ValueError: It was not built by ``--build``, or is not whole.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"--from: {folder} has no {MANIFEST}; a folder of --build is allowed")
    read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if read.get("format") != FORMAT:
        raise ValueError(f"--from: {path} is not of format {FORMAT}; build it again")
    if whole and not ((folder / LIBRARIES).is_dir() and (folder / PROGRAM).is_file()):
        raise ValueError(f"--from: {folder} lacks {PROGRAM} or {LIBRARIES}; build it again")
    tasks = tuple(
        Task(
            **{
                **task,
                "numbers": tuple(task["numbers"]),
                "candidates": tuple((int(i), int(k), float(r)) for i, k, r in task["candidates"]),
            }
        )
        for task in read["tasks"]
    )
    configurations = Configurations.of_json(read["configurations"])
    return Folder(read["date"], read["versions"], configurations, tasks)
