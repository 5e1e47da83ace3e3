"""A GPU's benchmark where there is no GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.bench_gpu import fake
from tests.documents import ROOT

from maxconv import _cli as cli
from maxconv.bench import command, environment
from maxconv.bench.gpu import build as building
from maxconv.bench.gpu import clock as clocks
from maxconv.bench.gpu import operands, run
from maxconv.bench.gpu.clock import OnHost


@pytest.fixture
def few_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sets of operands instead of one a launch."""
    monkeypatch.setattr(operands, "input_sets", lambda _: 2)


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of `--build`, whose program is the fake, and a GPU that is torch's CPU."""

    def build_program(folder: Path, architecture: str, dtype: str) -> None:
        assert (architecture, dtype) == ("sm_90a", "bfloat16")
        fake(folder)

    monkeypatch.setattr(building, "build_program", build_program)
    monkeypatch.setattr(building, "_build_graphs", lambda *_: None)
    monkeypatch.setattr(run, "check_gpu", lambda: None)
    monkeypatch.setattr(clocks, "Cuda", OnHost)
    monkeypatch.setattr(
        run, "this_machine", lambda: dataclasses.replace(environment.machine(), gpu="NVIDIA H999")
    )
    clone = environment.Checkout(ROOT, "0" * 40, False)
    monkeypatch.setattr(command, "checkout", lambda: clone)
    folder = tmp_path / "built"
    assert cli.main(["bench", "--device", "gpu", "--build", str(folder)]) == 0
    return folder
