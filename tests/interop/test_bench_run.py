"""The benchmark itself, on one small problem: every contender runs, and all agree."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema
import pytest
from tests.documents import ROOT

from maxconv import cli
from maxconv.bench.record import load
from maxconv.bench.report import render_text


@pytest.mark.slow
@pytest.mark.torch
def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "made.json"
    # One dimension has the fewest graphs to compile: the op's, MAX's and the public functions'.
    assert cli.main(["bench", "--quick", "--problem", "odd.conv1d", "--json", str(made)]) == 0
    schema = json.loads((ROOT / "benchmarks" / "record.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(json.loads(made.read_text(encoding="utf-8")), schema)
    record = load(made)
    assert capsys.readouterr().out == render_text(record)
    (result,) = record.results
    assert result.missing == {}
    assert (
        set(result.timings)
        == set(result.errors)
        == {
            "ours",
            "ours_raw",
            "ours_fused",
            "max",
            "torch",
            "torch_prepacked",
            "torch_fused",
        }
    )
    assert record.functions is not None
    assert record.functions.equal
    # Only Linux tells how much memory a process has had.
    assert len(record.memory) == (sys.platform == "linux")
    assert all(entry.fits for entry in record.memory)
