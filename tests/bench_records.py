"""A made-up record of the benchmark, and what its documents say, for several test modules."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from tests.documents import ROOT

from maxconv._problems import load_problems
from maxconv.bench.environment import Machine
from maxconv.bench.memory import Memory
from maxconv.bench.record import Functions, Record, Result
from maxconv.bench.statistics import Timing, summarize
from maxconv.bench.timing import FULL
from maxconv.bench.workload import TOLERANCE, convolutions

NAMED = load_problems()
SCHEMA = json.loads((ROOT / "benchmarks" / "record.schema.json").read_text(encoding="utf-8"))
PROTOCOL = (ROOT / "benchmarks" / "protocol.md").read_text(encoding="utf-8")
#: Contenders that are timed with one convolution a call as well.
SINGLES = SCHEMA["$defs"]["result"]["properties"]["singles"]["propertyNames"]["enum"]


def timing(seconds: float) -> Timing:
    return summarize([seconds * factor for factor in (0.9, 1.0, 1.2)])


def result(name: str, times: dict[str, float], **changes: Any) -> Result:
    """Returns a problem's result; `times` are in milliseconds, by contender.

    A call costs 0.05 ms: so much more a convolution takes that is alone in it.
    """
    problem = NAMED[name].problem
    made = Result(
        name=name,
        family=NAMED[name].family,
        problem=str(problem),
        rank=problem.spatial_rank,
        depthwise=problem.is_depthwise,
        flops=problem.flops,
        nbytes=problem.nbytes(),
        convolutions=convolutions(problem),
        timings={contender: timing(time / 1e3) for contender, time in times.items()},
        singles={
            contender: timing((time + 0.05) / 1e3)
            for contender, time in times.items()
            if contender in SINGLES and convolutions(problem) > 1
        },
        errors=dict.fromkeys(times, 1e-6),
    )
    return dataclasses.replace(made, **changes)


def record(**changes: Any) -> Record:
    ours = {"ours": 1.0, "ours_raw": 1.25, "ours_fused": 1.02}
    made = Record(
        date="2026-07-27T12:00:00+00:00",
        command="python -m maxconv bench",
        commit="0123456789abcdef0123456789abcdef01234567",
        modified=False,
        dtype="float32",
        threads=2,
        machine=Machine("Fast One", ("avx2", "fma"), 2, "Linux", 0.1),
        versions=dict.fromkeys(("maxconv", "max", "mojo", "torch", "python"), "1.2.3"),
        protocol=FULL,
        tolerance=TOLERANCE["float32"],
        results=[
            result(
                "resnet50.conv2_3x3",
                {**ours, "ours_lambda": 1.1, "max": 1.5, "torch": 1.3, "torch_prepacked": 0.8}
                | {"torch_fused": 1.0},
            ),
            result(
                "resnet50.conv2_expand",
                {**ours, "ours_fused": 1.04, "ours_lambda": 1.0, "max_input": 2.0, "torch": 1.25},
                missing={"max": "Failed to compile", "torch_prepacked": "no kernel"},
            ),
            result("mobilenet.dw_14", {**ours, "max": 30.0, "torch": 2.0, "torch_prepacked": 2.5}),
            result(
                "audio.dilated",
                {**ours, "torch": 1.0},
                missing=dict.fromkeys(("max", "max_input"), "the process dies of SIGSEGV"),
            ),
        ],
        memory=[Memory("vae.up_256", 16 << 20, 8 << 20, 2 << 20, 3 << 19)],
        functions=Functions(("resnet50.conv2_3x3", "audio.dilated"), True, 0.002, 0.0021),
    )
    return dataclasses.replace(made, **changes)
