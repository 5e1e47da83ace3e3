"""The GPU's kernels for few pixels, and few channels of an input or a group, compile without one.

Where `ptxas` is on the path (CUDA's toolkit), they also assemble: no spills, and registers for as
many blocks as each counts on.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests import overlap, ptx


@dataclass(frozen=True)
class Kernel:
    """A configuration, as the Mojo side describes it, and its PTX."""

    name: str
    threads: int
    resident: int
    ptx: Path

    @property
    def kind(self) -> str:
        """Its name without the configuration's number."""
        return self.name.rpartition("-")[0]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """Every configuration, compiled for sm_90a."""
    inspected, _ = ptx.inspect_once(tmp_path_factory)
    folder = tmp_path_factory.mktemp("direct")
    found = []
    for line in ptx.emit("emit_direct", folder):
        name, threads, resident, _ = line.split(" ", 3)
        home = folder if name.startswith("depthwise-strip") else inspected
        found.append(Kernel(name, int(threads), int(resident), home / f"{name}.ptx"))
    assert {kernel.kind for kernel in found} == {
        "stem",
        "depthwise",
        "diagonal",
        "slabs",
        "depthwise-strip",
        "gemv",
        "gemv-vector",
    }
    return found


def test_ptx_holds_the_instructions(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        text = kernel.ptx.read_text()
        assert f".maxntid {kernel.threads}\n" in text
        is_stem, is_slabs = kernel.kind == "stem", kernel.kind == "slabs"
        assert ("wgmma.mma_async.sync.aligned" in text) == (is_stem or is_slabs)
        assert ("setmaxnreg" in text) == is_stem
        is_diagonal = kernel.kind == "diagonal"
        assert ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in text) == is_diagonal
        for instruction in (
            "ldmatrix.sync.aligned",
            "cp.async.bulk.tensor.5d.shared::cluster.global",
            "cp.async.bulk.tensor.5d.global.shared::cta",
        ):
            assert (instruction in text) == (is_diagonal or is_slabs)
        copies = kernel.kind in ("depthwise-strip", "stem")
        assert ("cp.async.cg.shared.global" in text) == copies
        is_gemv = kernel.kind.startswith("gemv")
        assert ("shfl.sync.bfly.b32" in text) == is_gemv
        assert not overlap.mistakes(text)
        if kernel.kind == "gemv-vector":
            assert "ld.global.nc.v4.b32" in text
        assert "st.local" not in text, "an array in local memory"
        assert "call" not in re.sub(r"//.*", "", text), "a function that is not inlined"


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")
def test_kernels_assemble_without_spills(kernels: list[Kernel], tmp_path: Path) -> None:
    for kernel in kernels:
        report = ptx.assemble(kernel.ptx, tmp_path)
        assert ptx.NO_SPILLS in report, kernel.name + report
        assert "Potential Performance Loss" not in report, report
        used = re.search(r"Used (\d+) registers", report)
        assert used and int(used[1]) * kernel.threads * kernel.resident <= ptx.REGISTERS
