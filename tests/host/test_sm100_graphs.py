"""A ResNet block compiles for Blackwell GPUs that are not there, on the kernel for them."""

from __future__ import annotations

import re
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
    # MAX keeps what its assembler made: sections named after the kernels, and its arguments.
    content = compiled.read_bytes()
    kernels = set(re.findall(rb"\.text\.(maxconv_sm100_kernel_Conv2dF\w+)", content))
    # Each of two configurations, with a residual and without.
    assert len(kernels) >= 4
    assert set(re.findall(rb"-arch (sm_\w+)", content)) == {architecture.encode()}
