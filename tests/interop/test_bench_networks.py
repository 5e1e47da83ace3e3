"""Whole networks in the benchmark: a small one that is compiled, and faults that must be seen."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import jsonschema
import pytest
import torch
from tests.bench_records import SCHEMA, record
from torch import Tensor, nn

import maxconv.torch as mt
from maxconv.bench import networks
from maxconv.bench.device import CPU
from maxconv.bench.entrant import BARE, CALL, Key, Mismatch
from maxconv.bench.record import Network

QUICK = dataclasses.replace(CPU.full, pause_s=0, rounds=2, calls=3, discarded=1)


def small() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    return nn.Sequential(*layers).eval()


def measure(monkeypatch: pytest.MonkeyPatch, *contenders: str) -> Network:
    source = networks._Source(small, (2, 3, 9, 7))
    monkeypatch.setattr(networks, "NETWORKS", {"small": source})
    monkeypatch.setattr(networks, "_first_calls", lambda _: {"cold": 2.0, "warm": 1.0})
    (made,) = networks.measure_networks(["small"], "cpu", "float32", QUICK, contenders)
    return made


@pytest.mark.slow
@pytest.mark.torch
def test_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    made = measure(monkeypatch, "maxconv", "torch", "torch.compile", "max")
    assert [entry.key for entry in made.measurements] == [
        Key("maxconv"),
        Key("torch"),
        Key("torch.compile"),
    ]
    for entry in made.measurements:
        assert entry.missing is None
        assert entry.kernel is None
        assert entry.call is not None
        assert entry.error is not None
        assert entry.error < 1e-5
    assert made.ratio("torch", BARE, CALL) is not None
    assert (made.batch, made.first_call_s) == (2, {"cold": 2.0, "warm": 1.0})
    jsonschema.validate(json.loads(record(networks=[made]).to_json()), SCHEMA)


@pytest.mark.torch
def test_a_network_that_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(model: nn.Module) -> tuple[Callable[[Tensor], Tensor], str]:
        return lambda x: model(x) + 0.01, "wrong"

    monkeypatch.setattr(mt, "convert", convert)
    with pytest.raises(Mismatch, match=r"small: maxconv: the output is off by 0\.0"):
        measure(monkeypatch, "maxconv", "torch")


@pytest.mark.torch
def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(model: nn.Module) -> None:
        raise RuntimeError("no such\n layer")

    monkeypatch.setattr(mt, "convert", convert)
    made = measure(monkeypatch, "maxconv", "torch")
    entries = {entry.key: entry for entry in made.measurements}
    assert entries[Key("maxconv")].missing == "no such layer"
    assert entries[Key("torch")].call is not None
