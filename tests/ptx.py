"""Compiles the programs of tests/mojo that write kernels as PTX, and assembles what they wrote."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from maxconv import _library as library

if TYPE_CHECKING:
    import pytest

SOURCES = Path(__file__).parent / "mojo"

REGISTERS = 64 * 1024
"""Of a multiprocessor."""

NO_SPILLS = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"

SPILLED = {24: 40, 26: 20, 28: 28, 33: 76, 35: 120}
"""Bytes that the Hopper implicit GEMM may spill, by row of its table: some whose blocks share a
tile keep addresses of the exchange on the stack."""


def may_spill(name: str) -> int:
    """Returns the bytes that a row's kernel may spill; its name has the number by itself."""
    row = re.search(r"(?:^|-)(\d+)(?:-|$)", name)
    return SPILLED.get(int(row[1]), 0) if row else 0


def import_folder() -> Path:
    """Returns a folder for ``-I`` of Mojo programs, with the kernels precompiled.

    They take 3 to 12 s less to compile than with the source; to precompile it takes 35 s.
    """
    source = library.OPERATIONS

    def make(file: Path) -> None:
        library.run_or_raise(source, file, "precompile", str(source))

    def name() -> str:
        return library.fingerprint(source, of=" imported")

    return library.cached(
        f"{source.name}.mojoc", name, make, "precompiling maxconv's Mojo kernels"
    ).parent


def build(name: str, program: Path, arch: str = "sm_90a", *defined: str) -> None:
    """Compiles a program for a GPU's architecture, with names defined."""
    source, include = str(SOURCES / f"{name}.mojo"), str(import_folder())
    names = (word for name in defined for word in ("-D", name))
    arguments = ("-I", include, "--target-accelerator", arch, *names, source, "-o", str(program))
    built = library.run_mojo("build", *arguments)
    assert built.returncode == 0, built.stderr


def run(program: Path, folder: Path, *further: str) -> list[str]:
    """Lets a program write to a folder; returns what it printed.

    ``further`` are its arguments behind the folder.
    """
    printed = subprocess.run(
        [str(program), str(folder), *further], capture_output=True, text=True, check=True
    ).stdout
    return printed.splitlines()


def held(program: Path) -> list[str]:
    """The PTX texts that a program holds, as it passes them to the driver: zero-terminated."""
    data = program.read_bytes()
    found = []
    for match in re.finditer(rb"\.version \d+\.\d+", data):
        start, stop = data.rfind(b"\0", 0, match.start()) + 1, data.index(b"\0", match.start())
        found.append(data[start:stop].decode())
    return found


def emit(name: str, folder: Path, *further: str, defined: Sequence[str] = ()) -> list[str]:
    """Compiles a program for sm_90a, with names defined, and lets it write as ``run``."""
    program = folder / name
    build(name, program, "sm_90a", *defined)
    return run(program, folder, *further)


def emit_once(name: str, factory: pytest.TempPathFactory, *further: str) -> tuple[Path, list[str]]:
    """As ``emit``, in one of the processes that run the tests; returns the folder too."""
    return once(name, factory, lambda folder: emit(name, folder, *further))


def inspect_once(factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Lets ``maxconv inspect`` write its kernels of bfloat16 for Hopper, as ``emit_once``."""
    return once("inspected", factory, _inspect)


def _inspect(folder: Path) -> list[str]:
    command = [sys.executable, "-m", "maxconv", "inspect", "--emit", "ptx", "--out", str(folder)]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()


def once(
    name: str, factory: pytest.TempPathFactory, make: Callable[[Path], list[str]]
) -> tuple[Path, list[str]]:
    """Fills a folder in one of the processes that run the tests.

    With ``MAXCONV_TEST_BUILDS`` in the environment it is one of that folder, for several runs of
    pytest on the same files.

    Returns the folder, and the lines that ``make`` did.
    """
    base = factory.getbasetemp()
    shared = base.parent if base.name.startswith("popen-") else base
    parent = Path(os.environ.get("MAXCONV_TEST_BUILDS", shared)) / name
    folder, printed = parent / "files", parent / "printed"
    folder.mkdir(parents=True, exist_ok=True)
    with (parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not printed.exists():
            printed.write_text("\n".join(make(folder)))
    return folder, printed.read_text().splitlines()


def assemble(ptx: Path, folder: Path, arch: str = "sm_90a") -> str:
    """Assembles a kernel for a GPU's architecture; returns what ptxas reports."""
    output = str(folder / "kernel.cubin")
    assembled = subprocess.run(
        ["ptxas", f"-arch={arch}", "-v", str(ptx), "-o", output], capture_output=True, text=True
    )
    report = assembled.stdout + assembled.stderr
    assert assembled.returncode == 0, report
    return report
