"""Builds what measures configurations on a GPU machine, on a machine that needs no GPU."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from ..._doctor import versions
from ..._library import OPERATIONS, fingerprint
from ..._program import build_program
from ..._targets import HOPPER
from ..space import open_space
from .configurations import NOT_IN_TABLE, Configurations
from .folder import PROGRAM, Folder, Task, check_folder, write_folder
from .problems import DTYPE, Measured

__all__ = ["build", "built_versions", "tasks_of"]

_SOURCE = Path(__file__).parent / "measure.mojo"

#: Where the sources are that the program imports, beside the operations.
_BENCH = Path(__file__).parents[2] / "bench" / "gpu"


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
    for problem in problems:
        space = open_space(problem.problem, "sm90", dtype=DTYPE, residual=True)
        asked = [
            (index, split)
            for index, entry in enumerate(configurations.listed)
            for split in space.judge.facts.row("splits")
            if split <= entry.values[splits]
        ]
        rows = [configurations.configuration(*pair) for pair in asked]
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


def built_versions() -> dict[str, str]:
    """Returns the versions that decide what is built."""
    found = {name: str(version) for name, version in versions().items()}
    found["operations"] = fingerprint(OPERATIONS, of="tuner")
    return found


def build(
    folder: Path,
    configurations: Configurations,
    tasks: Sequence[Task],
    made_of: Mapping[str, str],
) -> Folder:
    """Builds a folder anew.

    Args:
        folder: Where: a new or empty folder, or one of an earlier build.
        configurations: What is compiled.
        tasks: What is measured with them.
        made_of: The versions: see ``Folder``.

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
    made = Folder(date, dict(made_of), configurations, tuple(tasks))
    write_folder(folder, made)
    return made
