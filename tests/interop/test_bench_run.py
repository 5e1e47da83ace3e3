"""The benchmark itself, on one small problem: every contender runs, and all agree."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from tests.documents import ROOT

from maxconv import _cli as cli
from maxconv._problems import find_problem
from maxconv.bench.cpu import peers_max
from maxconv.bench.cpu.ours import PACKED_EACH_CALL, Call, OwnGraphs
from maxconv.bench.cpu.peers_torch import IN_TORCH, REORDERED
from maxconv.bench.cpu.workload import Workload, to_buffer
from maxconv.bench.entrant import BARE, FUSED, Key
from maxconv.bench.record import load
from maxconv.bench.report import render_text


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.torch
def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "made.json"
    # One dimension has the fewest graphs to compile: the op's, MAX's and the public functions'.
    asked = ["--quick", "--problems", "odd.conv1d", "--modified", "--json", str(made)]
    assert cli.main(["bench", *asked]) == 0
    schema = json.loads((ROOT / "benchmarks" / "record.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(json.loads(made.read_text(encoding="utf-8")), schema)
    record = load(made)
    assert capsys.readouterr().out == f"{render_text([record])}\n{made}\n"
    (result,) = record.results
    asymmetric = "torch's functions take the same padding before and after"
    timed = {
        Key("maxconv"),
        Key("maxconv", BARE, PACKED_EACH_CALL),
        Key("maxconv", FUSED),
        Key("max"),
    }
    for name, variant in (("torch", ""), ("torch", REORDERED), ("torch.compile", "")):
        timed |= {Key(name, BARE, variant), Key(name, FUSED, variant)}
    missing = {entry.key: entry.missing for entry in result.measurements if entry.missing}
    assert missing == {Key("maxconv", work, IN_TORCH): asymmetric for work in (BARE, FUSED)}
    measured = [entry for entry in result.measurements if not entry.missing]
    assert {entry.key for entry in measured} == timed
    assert all(entry.kernel and entry.call and entry.error is not None for entry in measured)
    assert result.convolutions == 8
    assert record.functions is not None
    assert record.functions.equal
    # Only Linux tells how much memory a process has had.
    assert len(record.memory) == (sys.platform == "linux")
    assert all(entry.fits for entry in record.memory)


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.torch
def test_every_convolution_of_a_call_reads_its_own_input() -> None:
    # What read another's input could be computed once for all, and the time divided by eight.
    work = Workload.make(find_problem("odd.conv1d"), "float32")
    count = work.convolutions
    assert count == 8
    ours = OwnGraphs("float32").contenders(work)[Key("maxconv")].kernel
    theirs = peers_max.load([work], constant=True)["odd.conv1d"].kernel
    for call in (ours, theirs):
        assert isinstance(call, Call)
        shape = call.operands[0].shape
        # Scaled by powers of two, since that changes no rounding.
        inputs = [to_buffer((work.x * 2.0**i).reshape(shape), "float32") for i in range(count)]
        first, *others = Call(call.model, (*inputs, *call.operands[count:])).outputs()
        assert np.any(first)
        for i, output in enumerate(others, start=1):
            np.testing.assert_array_equal(output, first * np.float32(2.0**i))
