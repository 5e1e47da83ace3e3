"""The GPU's kernels for few input channels and for depthwise convolutions compile without a GPU.

Where `ptxas` is on the path (CUDA's toolkit), they also assemble: no spills, and registers for as
many blocks as each counts on.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from maxconv import library

SOURCE = Path(__file__).parent.parent / "mojo" / "emit_direct.mojo"
REGISTERS = 64 * 1024


@dataclass(frozen=True)
class Kernel:
    """A configuration, as the Mojo side describes it, and its PTX."""

    name: str
    threads: int
    resident: int
    ptx: Path


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """Every configuration, compiled for sm_90a."""
    folder = tmp_path_factory.mktemp("direct")
    program = folder / "emit_direct"
    include = str(library.OPERATIONS.parent)
    arguments = ("-I", include, "--target-accelerator", "sm_90a", str(SOURCE), "-o", str(program))
    built = library.run_mojo("build", *arguments)
    assert built.returncode == 0, built.stderr
    printed = subprocess.run(
        [str(program), str(folder)], capture_output=True, text=True, check=True
    ).stdout
    found = []
    for line in printed.splitlines():
        name, threads, resident, _ = line.split(" ", 3)
        found.append(Kernel(name, int(threads), int(resident), folder / f"{name}.ptx"))
    assert {re.sub(r"\d", "", kernel.name) for kernel in found} == {"stem", "strip", "depthwise"}
    return found


def test_ptx_holds_the_instructions(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        ptx = kernel.ptx.read_text()
        assert f".maxntid {kernel.threads}\n" in ptx
        is_stem = kernel.name.startswith("stem")
        assert ("wgmma.mma_async.sync.aligned" in ptx) == is_stem
        assert ("setmaxnreg" in ptx) == is_stem
        assert ("cp.async.cg.shared.global" in ptx) == kernel.name.startswith("strip")
        assert "st.local" not in ptx, "an array in local memory"
        assert "call" not in re.sub(r"//.*", "", ptx), "a function that is not inlined"


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")
def test_kernels_assemble_without_spills(kernels: list[Kernel], tmp_path: Path) -> None:
    for kernel in kernels:
        output = str(tmp_path / "kernel.cubin")
        assembled = subprocess.run(
            ["ptxas", "-arch=sm_90a", "-v", str(kernel.ptx), "-o", output],
            capture_output=True,
            text=True,
        )
        report = assembled.stdout + assembled.stderr
        assert assembled.returncode == 0, report
        no_spills = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
        assert no_spills in report, kernel.name + report
        assert "Potential Performance Loss" not in report, report
        used = re.search(r"Used (\d+) registers", report)
        assert used and int(used[1]) * kernel.threads * kernel.resident <= REGISTERS
