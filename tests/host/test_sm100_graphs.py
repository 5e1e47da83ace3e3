"""A ResNet block compiles for Blackwell GPUs that are not there, on the kernel for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", ["sm_100a", pytest.param("sm_103a", marks=pytest.mark.nightly)]
)
def test_a_block_compiles(architecture: str, tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "tests.blackwell_graphs", architecture, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    (compiled,) = tmp_path.glob("*.mef")
    # MAX keeps the kernels as text.
    text = compiled.read_bytes()
    for words in (b"tcgen05.mma", b"clusterlaunchcontrol.try_cancel", b"tcgen05.mma.cta_group::2"):
        assert words in text
    assert f".target {architecture}".encode() in text
