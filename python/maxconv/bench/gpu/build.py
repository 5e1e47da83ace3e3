"""Builds what the benchmark of a GPU runs, on a machine that needs no GPU.

A folder holds the program of the kernels with the libraries that it loads, compiled MAX graphs,
and ``build.json``, which says from what they were made. With torch and this package it is all that
the GPU machine needs; MAX itself is needed there for the graphs alone.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from maxconv import _program
from maxconv._progress import progress

from ..entrant import BFLOAT16, MAXCONV
from ..environment import Checkout, child_environment, source_digest, versions
from .graphs import FOLDER, GRAPHS
from .narrow import PROGRAM_BFLOAT16
from .program import PROGRAM

__all__ = ["FORMAT", "MANIFEST", "Build", "build", "check_folder", "read_build"]

#: The file that says what a folder holds, and the version of its form.
MANIFEST, FORMAT = "build.json", 1

_SOURCE = Path(__file__).parent / "kernels.mojo"


@dataclass(frozen=True)
class Build:
    """What a folder was built from."""

    commit: str | None
    modified: bool
    date: str
    """UTC, ISO 8601."""
    architecture: str
    dtype: str
    contenders: tuple[str, ...]
    source: str
    """Digest of the package's sources."""
    versions: Mapping[str, str | None]


def check_folder(folder: Path) -> None:
    """Checks that a folder can be built into, as ``maxconv._program.check_folder`` does."""
    _program.check_folder("build", folder, MANIFEST)


def build(
    folder: Path,
    *,
    architecture: str,
    dtype: str,
    contenders: Collection[str],
    clone: Checkout | None,
    graphs: bool = True,
) -> Build:
    """Builds a folder anew.

    Args:
        folder: Where; see ``check_folder``.
        architecture: The GPU's, ``sm_90a`` say.
        dtype: Storage type.
        contenders: Those that need something built: maxconv its program and its graphs, MAX its
            graphs.
        clone: The checkout that this package runs from.
        graphs: Whether MAX graphs are compiled.

    Raises:
        LibraryError: The kernels do not compile.
        RuntimeError: MAX does not compile the graphs.
    """
    check_folder(folder)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    made = Build(
        commit=clone.commit if clone else None,
        modified=clone.modified if clone else False,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        architecture=architecture,
        dtype=dtype,
        contenders=tuple(contenders),
        source=source_digest(),
        versions=versions(),
    )
    if MAXCONV in contenders:
        with progress(f"compiling maxconv's kernels for {architecture}"):
            build_program(folder, architecture, dtype)
    if BFLOAT16 in contenders:
        with progress(f"compiling maxconv's kernels of bfloat16 for {architecture}"):
            build_program(folder, architecture, BFLOAT16, PROGRAM_BFLOAT16)
    names = [name for name, kind in GRAPHS.items() if kind.key.contender in contenders]
    if names and graphs:
        with progress(f"compiling {len(names)} MAX graphs for {architecture}"):
            _build_graphs(folder / FOLDER, architecture, dtype, names)
    text = json.dumps({"format": FORMAT, **asdict(made)}, indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
    return made


def build_program(folder: Path, architecture: str, dtype: str, name: str = PROGRAM) -> None:
    """Compiles the program of the kernels, and puts the libraries that it loads beside it.

    Raises:
        LibraryError: It does not compile; the message has Mojo's output.
    """
    _program.build_program(_SOURCE, folder / name, architecture, "-D", f"dtype={dtype}")


def _build_graphs(folder: Path, architecture: str, dtype: str, names: Collection[str]) -> None:
    folder.mkdir()
    command = [sys.executable, "-m", "maxconv.bench.child", "graphs", architecture, dtype]
    finished = subprocess.run(
        [*command, str(folder), *names],
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    lost = [name for name in names if not (folder / f"{name}.mef").is_file()]
    if finished.returncode or lost:
        raise RuntimeError(f"MAX did not compile the graphs: {finished.stderr[-2000:].rstrip()}")


def read_build(folder: Path) -> Build:
    """Reads what a folder was built from.

    Raises:
        ValueError: It was not built by ``--build``, or from other sources than those that run.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"from: {folder} has no {MANIFEST}; a folder of --build is allowed")
    read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if read.pop("format", None) != FORMAT:
        raise ValueError(f"from: {path} is not of format {FORMAT}; build it again")
    made = Build(**{**read, "contenders": tuple(read["contenders"])})
    if made.source != source_digest():
        raise ValueError(
            f"from: {folder} was built from other sources than those that run, at commit "
            f"{made.commit}; one commit is allowed: build it again"
        )
    return made
