"""The programs that check and time the kernels on a GPU machine are built without one.

The benchmark's own is built by `test_bench_gpu.py`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests import ptx

from maxconv import _library as library

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "maxconv"
PROGRAMS = [
    "tests/gpu/sm90.mojo",
    "tests/gpu/sm90_epilogue.mojo",
    "tests/gpu/sm90_visitors.mojo",
    "tests/gpu/chain.mojo",
    "tests/gpu/direct.mojo",
    "tests/gpu/integers.mojo",
    "tests/gpu/pooling.mojo",
]


@pytest.mark.extended
@pytest.mark.parametrize("source", PROGRAMS)
def test_a_program_is_built(source: str, tmp_path: Path) -> None:
    program = tmp_path / Path(source).stem
    folders = ("-I", str(ptx.import_folder()), "-I", str(ROOT / "tests" / "gpu"))
    arguments = (*folders, "--target-accelerator", "sm_90a", str(ROOT / source), "-o", str(program))
    built = library.run_mojo("build", *arguments)
    assert built.returncode == 0, built.stderr
    kernels = ptx.held(program)
    assert kernels
    assert all(".target sm_90a" in kernel for kernel in kernels)


def test_every_program_is_named() -> None:
    programs = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests" / "gpu").glob("*.mojo")
        if "\ndef main()" in path.read_text()
    ]
    assert sorted(programs) == sorted(PROGRAMS)


@pytest.mark.extended
def test_a_program_is_asked_more_often_than_it_may_open_files(tmp_path: Path) -> None:
    program = tmp_path / "echo_requests"
    source = str(ROOT / "tests" / "mojo" / "echo_requests.mojo")
    include = ("-I", str(PACKAGE / "bench" / "gpu"))
    built = library.run_mojo("build", *include, source, "-o", str(program))
    assert built.returncode == 0, built.stderr
    lines = "".join(f"problem {number}\n" for number in range(200))
    command = ["bash", "-c", 'ulimit -n 40; exec "$0"', str(program)]
    finished = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=60)
    assert finished.stdout == lines, finished.stderr


def test_no_program_opens_its_input_for_each_line() -> None:
    """``input`` does (``bench/gpu/requests.mojo``)."""
    programs = list(PACKAGE.rglob("*.mojo"))
    assert programs
    assert not [path for path in programs if "input()" in path.read_text()]
