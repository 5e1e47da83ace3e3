"""Compiles the programs of tests/mojo that write kernels as PTX, and assembles what they wrote."""

from __future__ import annotations

import subprocess
from pathlib import Path

from maxconv import library

SOURCES = Path(__file__).parent / "mojo"

REGISTERS = 64 * 1024
"""Of a multiprocessor."""

NO_SPILLS = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"


def emit(name: str, folder: Path, *further: str, target: str = "sm_90a") -> list[str]:
    """Compiles a program for a GPU and lets it write to a folder; returns what it printed.

    ``further`` are its arguments behind the folder.
    """
    program = folder / name
    source, include = str(SOURCES / f"{name}.mojo"), str(library.OPERATIONS.parent)
    arguments = ("-I", include, "--target-accelerator", target, source, "-o", str(program))
    built = library.run_mojo("build", *arguments)
    assert built.returncode == 0, built.stderr
    printed = subprocess.run(
        [str(program), str(folder), *further], capture_output=True, text=True, check=True
    ).stdout
    return printed.splitlines()


def assemble(ptx: Path, folder: Path, target: str = "sm_90a") -> str:
    """Assembles a kernel for a GPU; returns what ptxas reports."""
    output = str(folder / "kernel.cubin")
    assembled = subprocess.run(
        ["ptxas", f"-arch={target}", "-v", str(ptx), "-o", output], capture_output=True, text=True
    )
    report = assembled.stdout + assembled.stderr
    assert assembled.returncode == 0, report
    return report
