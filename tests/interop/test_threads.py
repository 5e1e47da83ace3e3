"""A graph's convolution on as many of MAX's threads as the tests were given cores.

The processes of the tests have one core each: this file as a program has those that its arguments
name.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from tests.documents import ROOT
from tests.interop.graphs import input_type
from tests.reference import conv_reference


def test_all_cores(cores: frozenset[int]) -> None:
    if len(cores) < 2:
        pytest.skip("one core")
    command = [sys.executable, "-m", "tests.interop.test_threads", *map(str, cores)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def check() -> None:
    """Compares images that one thread convolves, and ones that all share, with float64."""
    from max.driver import CPU
    from max.engine import InferenceSession
    from max.graph import Graph

    import maxconv

    rng = np.random.default_rng(3)
    f = rng.standard_normal((3, 3, 32, 48)).astype(np.float32) / np.float32(17)
    types = [input_type(("n", "h", "w", 32))]
    with Graph("threads", input_types=types, kernel_library=maxconv.kernel_library()) as graph:
        graph.output(maxconv.conv2d(graph.inputs[0].tensor, f, padding=(1, 1, 1, 1)))
    model = InferenceSession(devices=[CPU()]).load(graph)
    for shape in ((1, 5, 7, 32), (2, 33, 31, 32), (3, 64, 40, 32)):
        x = rng.standard_normal(shape).astype(np.float32)
        ones = (1, 1)
        expected = conv_reference(
            x,
            np.moveaxis(f, -1, 0),
            stride=ones,
            dilation=ones,
            pad_before=ones,
            pad_after=ones,
        )
        # Sums of 288 products, each of variance 1/289; Winograd rounds more than a direct sum.
        np.testing.assert_allclose(model.execute(x)[0].to_numpy(), expected, rtol=0, atol=1e-4)


if __name__ == "__main__":
    # Before MAX starts its threads.
    os.sched_setaffinity(0, map(int, sys.argv[1:]))
    check()
