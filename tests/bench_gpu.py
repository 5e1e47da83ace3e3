"""The benchmark of a GPU with a fake program in the place of the kernels', for several modules."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

from tests.documents import ROOT

from maxconv.bench.entrant import Key
from maxconv.bench.gpu.program import LIBRARIES, PROGRAM
from maxconv.bench.record import Measurement, Result

FAKE = ROOT / "tests" / "fake_kernels.py"


def fake(folder: Path, fault: str = "") -> Path:
    """Makes a folder as `--build` does, with a program that has a fault; returns it."""
    folder.mkdir(exist_ok=True)
    (folder / LIBRARIES).mkdir(exist_ok=True)
    program = folder / PROGRAM
    program.write_text(f"#!/bin/sh\nexec {sys.executable} {FAKE} {fault}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


def by_key(result: Result) -> dict[Key, Measurement]:
    return {entry.key: entry for entry in result.measurements}
