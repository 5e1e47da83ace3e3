"""Elementwise neighbours run inside the convolution's kernel: read off what MAX compiles.

MAX writes the Mojo program that a graph becomes; every kernel in it opens one trace span, whose
label names all the operations in that kernel.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tests.documents import ROOT
from tests.interop import fused_graph
from tests.interop.graphs import Source

if TYPE_CHECKING:
    from max.engine import Model

SPAN = re.compile(r'tracing\.Trace\[[^"]*?TraceLevel\.OP[^"]*?(?:"cpu"[^"]*?)"([^"]+)"', re.S)

GRAPHS = {fused_graph.NAME: Source(fused_graph.build)}


def written_mojo(cache: Path) -> str:
    """The Mojo that MAX makes of the graph; it stops before it compiles that."""
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            [sys.executable, "-m", "tests.interop.fused_graph", folder],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            # An empty cache: MAX writes only what it compiles.
            env={**os.environ, "MODULAR_CACHE_DIR": str(cache)},
        )
        assert ended.returncode == 0, ended.stderr
        return Path(folder, f"{fused_graph.NAME}.mojo").read_text()


def test_one_kernel_runs_a_convolution_and_its_neighbours(tmp_path: Path) -> None:
    labels = SPAN.findall(written_mojo(tmp_path))
    convolutions = [label for label in labels if "conv" in label]
    assert len(convolutions) == 3, labels
    behind = next(label for label in convolutions if "silu" in label)
    around = next(label for label in convolutions if "tanh" in label)
    assert behind.count("add") == 2 and "Epilogue(custom__maxconv_conv" in behind
    assert "exp" in around
    rounded = next(label for label in convolutions if "round" in label)
    assert "cast" in rounded
    # Nothing elementwise is left to a kernel of its own.
    others = [label for label in labels if label not in convolutions]
    assert not [label for label in others if re.search(r"add|silu|tanh|exp|round|cast", label)], (
        labels
    )


def test_it_computes_what_it_should(models: dict[str, Model], rng: np.random.Generator) -> None:
    inputs = [
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((1, 5, 6, 24), (20,), (1, 5, 6, 20))
    ]
    outputs = models[fused_graph.NAME].execute(*inputs)
    *expected, steps = fused_graph.expected(*inputs)
    for output, wanted in zip(outputs[:2], expected, strict=True):
        # Sums of 216 products of order 1; what follows has a slope of about 1.
        np.testing.assert_allclose(output.to_numpy(), wanted, rtol=0, atol=1e-4)
    integers = outputs[2].to_numpy()
    assert integers.dtype == np.int8
    # Sums of 24 products of order 1, divided by 0.02 at least: what is nearer to a half than their
    # float32 error may be rounded either way.
    near = np.abs(np.abs(steps - np.floor(steps)) - 0.5) < 1e-3
    assert near.mean() < 0.01
    np.testing.assert_array_equal(integers[~near], np.rint(steps)[~near])
