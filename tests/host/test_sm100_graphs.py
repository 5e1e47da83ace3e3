"""A ResNet block compiles for Blackwell GPUs that are not there, on the kernel for them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.extended]

ROOT = Path(__file__).parents[2]


def compiled(architecture: str, folder: Path, graph: str = "block", **further: str) -> bytes:
    """What MAX made of a graph, with further environment variables."""
    finished = subprocess.run(
        [sys.executable, "-m", "tests.blackwell_graphs", architecture, str(folder), graph],
        cwd=ROOT,
        env={**os.environ, **further},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    (file,) = folder.glob("*.mef")
    return file.read_bytes()


def kernels(content: bytes) -> set[bytes]:
    """Kernels for Blackwell: MAX keeps what its assembler made, sections named after them."""
    return set(re.findall(rb"\.text\.(maxconv_nvidia_sm100_kern\w+)", content))


@pytest.mark.parametrize("architecture", ["sm_100a", "sm_103a"])
def test_a_block_compiles(architecture: str, tmp_path: Path) -> None:
    content = compiled(architecture, tmp_path)
    # Each of two configurations, with a residual and without.
    assert len(kernels(content)) >= 4
    assert set(re.findall(rb"-arch (sm_\w+)", content)) == {architecture.encode()}


def test_types_of_8_bits(tmp_path: Path) -> None:
    """They compile to this kernel, int8 also to any GPU's, for a Hopper GPU to none of these."""
    (tmp_path / "blackwell").mkdir()
    (tmp_path / "hopper").mkdir()
    # Beside a graph's kernels MAX keeps those of graphs that its cache holds.
    cache = {"MODULAR_CACHE_DIR": str(tmp_path / "cache")}
    content = compiled("sm_100a", tmp_path / "blackwell", "narrow", **cache)
    # For each of two types two configurations, with a residual and without.
    assert len(kernels(content)) == 8
    assert b".text.maxconv_nvidia_sm80_kern" in content
    content = compiled("sm_90a", tmp_path / "hopper", "narrow", **cache)
    assert b".text.maxconv_nvidia_sm90_gemm" in content
    assert not kernels(content)
