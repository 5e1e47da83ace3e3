"""The programs that check and time the kernels on a GPU machine are built without one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import ptx

from maxconv import _library as library

ROOT = Path(__file__).parents[2]
PROGRAMS = [
    "tests/gpu/sm90.mojo",
    "tests/gpu/sm90_epilogue.mojo",
    "tests/gpu/sm90_visitors.mojo",
    "tests/gpu/direct.mojo",
    "benchmarks/gpu/ours.mojo",
]


@pytest.mark.extended
@pytest.mark.parametrize("source", PROGRAMS)
def test_a_program_is_built(source: str, tmp_path: Path) -> None:
    program = tmp_path / Path(source).stem
    folders = ("-I", str(ROOT), "-I", str(ROOT / "tests" / "gpu"))
    arguments = (*folders, "--target-accelerator", "sm_90a", str(ROOT / source), "-o", str(program))
    built = library.run_mojo("build", *arguments)
    assert built.returncode == 0, built.stderr
    kernels = ptx.held(program)
    assert kernels
    assert all(".target sm_90a" in kernel for kernel in kernels)


def test_every_program_is_named() -> None:
    folders = [ROOT / "tests" / "gpu", ROOT / "benchmarks" / "gpu"]
    programs = [
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in folder.glob("*.mojo")
        if "\ndef main()" in path.read_text()
    ]
    assert sorted(programs) == sorted(PROGRAMS)
