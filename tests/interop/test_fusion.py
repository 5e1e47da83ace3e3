"""Elementwise neighbours run inside the convolution's kernel: read off the compiled graph.

MAX writes the Mojo program that a graph becomes; every kernel in it opens one trace span, whose
label names all the operations in that kernel.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "fused_graph.py"

SPAN = re.compile(r'tracing\.Trace\[[^"]*?TraceLevel\.OP[^"]*?(?:"cpu"[^"]*?)"([^"]+)"', re.S)


def test_one_kernel_runs_a_convolution_and_its_neighbours(tmp_path: Path) -> None:
    name = "fusion"
    command = [sys.executable, str(PROGRAM), str(tmp_path), name]
    # An empty cache: MAX writes only what it compiles.
    environment = {**os.environ, "MODULAR_CACHE_DIR": str(tmp_path / "cache")}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    # float32 sums of 216 products of order 1; what follows has a slope of about 1.
    assert max(json.loads((tmp_path / "errors.json").read_text())) < 1e-4
    labels = SPAN.findall((tmp_path / f"{name}.mojo").read_text())
    convolutions = [label for label in labels if "conv" in label]
    assert len(convolutions) == 2, labels
    behind = next(label for label in convolutions if "silu" in label)
    around = next(label for label in convolutions if "tanh" in label)
    assert behind.count("add") == 2 and "Epilogue(conv" in behind
    assert "exp" in around
    # Nothing elementwise is left to a kernel of its own.
    others = [label for label in labels if label not in convolutions]
    assert not [label for label in others if re.search(r"add|silu|tanh|exp", label)], labels
