"""A graph's convolution on as many of MAX's threads as the machine has cores.

The processes of the tests have one core each: this one starts a program that has all.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.documents import ROOT

PROGRAM = """
import os

os.sched_setaffinity(0, range(os.cpu_count()))
assert len(os.sched_getaffinity(0)) > 1

import numpy as np
from max.driver import CPU
from max.engine import InferenceSession
from max.graph import Graph
from tests.interop.graphs import input_type
from tests.reference import conv_reference

import maxconv

rng = np.random.default_rng(3)
f = rng.standard_normal((3, 3, 32, 48)).astype(np.float32) / np.float32(17)
library = maxconv.kernel_library()
types = [input_type(("n", "h", "w", 32))]
with Graph("threads", input_types=types, kernel_library=library) as graph:
    graph.output(maxconv.conv2d(graph.inputs[0].tensor, f, padding=(1, 1, 1, 1)))
model = InferenceSession(devices=[CPU()]).load(graph)
for shape in ((1, 5, 7, 32), (2, 33, 31, 32), (3, 64, 40, 32)):
    x = rng.standard_normal(shape).astype(np.float32)
    expected = conv_reference(
        x.astype(np.float64),
        np.moveaxis(f.astype(np.float64), -1, 0),
        stride=(1, 1),
        dilation=(1, 1),
        pad_before=(1, 1),
        pad_after=(1, 1),
        groups=1,
    )
    # Sums of 288 products, each of variance 1/289; Winograd rounds more than a direct sum.
    np.testing.assert_allclose(model.execute(x)[0].to_numpy(), expected, rtol=0, atol=1e-4)
"""


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or os.cpu_count() == 1, reason="one core, or no affinity"
)
def test_all_cores() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
