"""Builds what measures configurations on a GPU machine, on a machine that needs no GPU.

A folder holds the measuring program with the libraries that it loads, and ``tune.json``: the
configurations, the problems, and for each of them which configurations to measure. That and this
package is all that the GPU machine needs.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..._program import LIBRARIES, build_program
from ..._targets import HOPPER
from ..space import open_space
from .configurations import NOT_IN_TABLE, Configurations
from .problems import DTYPE, Measured

__all__ = ["FORMAT", "MANIFEST", "PROGRAM", "Folder", "Task", "build", "read_folder", "tasks_of"]

#: The file that says what a folder holds, the version of its form, and the program.
MANIFEST, FORMAT, PROGRAM = "tune.json", 1, "measure"

_SOURCE = Path(__file__).parent / "measure.mojo"

#: Where the sources are that the program imports, beside the operations.
_BENCH = Path(__file__).parents[2] / "bench" / "gpu"

_SPLITS = (1, 2, 4, 8)


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


def tasks_of(
    problems: Sequence[Measured], configurations: Configurations, slower: float
) -> tuple[Task, ...]:
    """Returns what is measured of each problem: what the kernel does not refuse.

    Args:
        problems: The problems.
        configurations: Of the build.
        slower: How many times the table's time the model may predict. The table's own rows are
            measured whatever it predicts.

    Raises:
        ValueError: No row of the table runs a problem.
    """
    tasks = []
    splits = configurations.fields.index("cluster_shape.k")
    asked = [
        (index, split)
        for index, entry in enumerate(configurations.listed)
        for split in _SPLITS
        if split <= entry.values[splits]
    ]
    rows = [configurations.configuration(*pair) for pair in asked]
    for problem in problems:
        space = open_space(problem.problem, "sm90", dtype=DTYPE, residual=True)
        judged = space.judge.judge(rows)
        times = {
            pair: found.counts["seconds"]
            for pair, found in zip(asked, judged, strict=True)
            if found.refusal is None
        }
        own = {pair for pair in times if configurations.listed[pair[0]].row != NOT_IN_TABLE}
        best = min((times[pair] for pair in own), default=math.inf)
        if math.isinf(best):
            raise ValueError(f"{problem.name}: no row of the hand-written table runs it")
        ratios = sorted(
            (round(seconds / best, 4), *pair)
            for pair, seconds in times.items()
            if pair in own or seconds <= slower * best
        )
        tasks.append(
            Task(
                name=problem.name,
                numbers=tuple(problem.problem.numbers()),
                layers=problem.layers,
                line=problem.line,
                launches=problem.launches,
                candidates=tuple((index, split, ratio) for ratio, index, split in ratios),
            )
        )
    return tuple(tasks)


def build(
    folder: Path,
    configurations: Configurations,
    tasks: Sequence[Task],
    versions: Mapping[str, str],
) -> Folder:
    """Builds a folder anew.

    Args:
        folder: Where: a new or empty folder, or one of an earlier build.
        configurations: What is compiled.
        tasks: What is measured with them.
        versions: See ``Folder``.

    Raises:
        ValueError: The folder holds something that no build wrote, or cannot be made.
        LibraryError: The program does not compile.
    """
    check_folder(folder)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "configurations.mojo").write_text(configurations.source(), encoding="utf-8")
        include = ("-I", str(_BENCH), "-I", scratch)
        build_program(_SOURCE, folder / PROGRAM, HOPPER, *include)
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    made = Folder(date, dict(versions), configurations, tuple(tasks))
    write_folder(folder, made)
    return made


def check_folder(folder: Path) -> None:
    """Checks that a folder can be built into.

    Raises:
        ValueError: It holds something that no build wrote, or cannot be made.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST).is_file():
        raise ValueError(f"--build: {folder} holds other files; a new or an empty one is allowed")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--build: {folder} is no folder")
    if not folder.absolute().parent.is_dir():
        raise ValueError(f"--build: the folder of {folder} does not exist")


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


def read_folder(folder: Path) -> Folder:
    """Reads what a folder holds.

    Raises:
        ValueError: It was not built by ``--build``, or is not whole.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"--from: {folder} has no {MANIFEST}; a folder of --build is allowed")
    read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if read.get("format") != FORMAT:
        raise ValueError(f"--from: {path} is not of format {FORMAT}; build it again")
    if not (folder / LIBRARIES).is_dir() or not (folder / PROGRAM).is_file():
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
