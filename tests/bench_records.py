"""A made-up record of the benchmark, and what its documents say, for several test modules."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from tests.documents import ROOT

from maxconv._problems import NamedProblem, find_problem, load_problems
from maxconv.bench.cpu.memory import Memory
from maxconv.bench.cpu.workload import convolutions
from maxconv.bench.device import CPU, DEVICES, TOLERANCE
from maxconv.bench.entrant import BARE, FUSED, Key
from maxconv.bench.environment import Machine
from maxconv.bench.record import (
    Forward,
    Functions,
    Measurement,
    ModelResult,
    Peak,
    Record,
    Result,
)
from maxconv.bench.statistics import Timing, summarize

NAMED = load_problems()
SCHEMA = json.loads((ROOT / "benchmarks" / "record.schema.json").read_text(encoding="utf-8"))
PROTOCOL = (ROOT / "benchmarks" / "protocol.md").read_text(encoding="utf-8")

OURS, TORCH, MAX = Key("maxconv"), Key("torch"), Key("max")
OURS_FUSED, TORCH_FUSED = Key("maxconv", FUSED), Key("torch", FUSED)
PACKED = Key("maxconv", BARE, "filter packed in each call")
REORDERED = Key("torch", BARE, "filter reordered before")
AS_INPUT = Key("max", BARE, "filter as an input")


def timing(seconds: float) -> Timing:
    return summarize([seconds * factor for factor in (0.9, 1.0, 1.2)])


def measurement(key: Key, milliseconds: float, **changes: Any) -> Measurement:
    """Returns a contender's figures. A call costs 0.05 ms more than the kernel's time."""
    kernel, call = timing(milliseconds / 1e3), timing((milliseconds + 0.05) / 1e3)
    made = Measurement(*key, kernel, call, error=1e-6)
    return dataclasses.replace(made, **changes)


def result(
    name: str, times: Mapping[Key, float], missing: Mapping[Key, str] | None = None, **changes: Any
) -> Result:
    """Returns a problem's result; `times` are in milliseconds."""
    named: NamedProblem = find_problem(name)
    problem = named.problem
    measurements = [measurement(key, time) for key, time in times.items()]
    measurements += [Measurement(*key, missing=why) for key, why in (missing or {}).items()]
    made = Result(
        name=name,
        family=named.family,
        problem=str(problem),
        rank=problem.spatial_rank,
        depthwise=problem.is_depthwise,
        flops=problem.flops,
        nbytes=problem.nbytes(),
        convolutions=convolutions(problem),
        measurements=measurements,
    )
    return dataclasses.replace(made, **changes)


def record(**changes: Any) -> Record:
    """Returns a made-up run on a CPU."""
    ours = {OURS: 1.0, PACKED: 1.25, OURS_FUSED: 1.02}
    made = Record(
        date="2026-07-27T12:00:00+00:00",
        command="python -m maxconv bench",
        commit="0123456789abcdef0123456789abcdef01234567",
        modified=False,
        device="cpu",
        dtype="float32",
        activation="relu",
        machine=Machine("Fast One", ("avx2", "fma"), 2, "Linux", 0.1, 2),
        versions=dict.fromkeys(("maxconv", "max", "mojo", "torch", "python"), "1.2.3"),
        protocol=CPU.full,
        tolerance=TOLERANCE["float32"],
        results=[
            result(
                "resnet50.conv2_3x3",
                {**ours, MAX: 1.5, TORCH: 1.3, REORDERED: 0.8, TORCH_FUSED: 1.0},
            ),
            result(
                "resnet50.conv2_expand",
                {**ours, OURS_FUSED: 1.04, AS_INPUT: 2.0, TORCH: 1.25},
                {MAX: "Failed to compile", REORDERED: "no kernel"},
            ),
            result("mobilenet.dw_14", {**ours, MAX: 30.0, TORCH: 2.0, REORDERED: 2.5}),
            result(
                "audio.dilated",
                {**ours, TORCH: 1.0},
                dict.fromkeys((MAX, AS_INPUT), "the process dies of SIGSEGV"),
            ),
        ],
        models=[],
        memory=[Memory("vae.up_256", 16 << 20, 8 << 20, 2 << 20, 3 << 19)],
        functions=Functions(("resnet50.conv2_3x3", "audio.dilated"), True, 0.002, 0.0021),
        peak=Peak("float32 FMA, 256 bits", 2, 400e9, 20),
    )
    return dataclasses.replace(made, **changes)


def forward(
    variant: str, milliseconds: float, *, channels_last: bool = True, **changes: Any
) -> Forward:
    """Returns the figures of a way of running a model."""
    call = timing(milliseconds / 1e3)
    made = Forward(variant, channels_last, call, 1e-6, first_call_s=2.5, kept=3 << 20, peak=1 << 20)
    return dataclasses.replace(made, **changes)


def models_record(**changes: Any) -> Record:
    """Returns a made-up run of models on a CPU."""
    torch = [forward("eager", 75.0, channels_last=False), forward("eager", 60.0)]
    failed = Forward("converted", True, missing="no such layer")
    return record(
        command="python -m maxconv bench --models resnet50 tasnet",
        protocol=CPU.models,
        results=[],
        memory=[],
        functions=None,
        peak=None,
        models=[
            ModelResult(
                "resnet50",
                "torchvision",
                1,
                "1x3x224x224",
                "float64",
                [*torch, forward("compile", 55.0), forward("converted", 50.0)],
                parameters=25_557_032,
                replaced=53,
            ),
            ModelResult(
                "resnet50",
                "torchvision",
                8,
                "8x3x224x224",
                "float64",
                [forward("eager", 1500.0), forward("converted", 1200.0)],
                parameters=25_557_032,
                replaced=52,
                left={"it has forward hooks": 1},
            ),
            ModelResult(
                "tasnet", "torchaudio", 1, "1x1x16000", "float32", [forward("eager", 9.0), failed]
            ),
        ],
        starts={"eager": 0.1, "converted": 22.0},
        **changes,
    )


def gpu_record(**changes: Any) -> Record:
    """Returns a made-up run on a GPU."""
    cudnn, compiled = Key("cudnn", FUSED), Key("torch.compile", FUSED)
    fused = {OURS_FUSED: 0.032, TORCH_FUSED: 0.105, compiled: 0.061, cudnn: 0.05}
    gpu = DEVICES["gpu"]
    made = record(
        command="python -m maxconv bench --device gpu",
        device="gpu",
        dtype="bfloat16",
        activation="silu",
        machine=Machine("Host", (), 16, "Linux", 0.1, 16, "NVIDIA H200", "580.1", 132),
        versions={**record().versions, "cudnn": "9.19"},
        protocol=gpu.full,
        tolerance=TOLERANCE["bfloat16"],
        results=[
            result("resnet50.conv2_3x3@64", {OURS: 0.0258, TORCH: 0.0426, **fused}),
            result(
                "mobilenet.dw_56_128@64",
                {OURS: 0.0313, TORCH: 0.0463, OURS_FUSED: 0.0488, TORCH_FUSED: 0.183},
                {cudnn: "none of 0 plans runs", MAX: "not here: No module named 'max'"},
            ),
        ],
        memory=[],
        functions=None,
        peak=None,
    )
    return dataclasses.replace(made, **changes)
