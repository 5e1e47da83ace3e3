"""Times maxconv.torch: what a call costs beside the convolution, ResNet-50, and the first call.

    python benchmarks/pytorch.py [--json]

Contenders alternate in one process, after a pause each, so that one's idle threads do not spin
while the other works. The first call is timed in a process of its own whose caches are empty.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from max.dtype import DType
from max.experimental.torch import graph_op
from max.graph import DeviceRef, TensorType, TensorValue, ops
from torch import nn
from torch.nn import functional

import maxconv.torch as mt
from maxconv._fields import GEOMETRY_LENGTH, SCALARS_LENGTH, encode_scalars
from maxconv._library import kernel_library
from maxconv._packing import pack_filter
from maxconv._problem import ConvProblem

ROOT = Path(__file__).resolve().parents[1]
PAUSE_S = 0.02


def alternate(
    contenders: Mapping[str, Callable[[], object]], rounds: int, calls: int
) -> dict[str, dict[str, float]]:
    """Returns the median and the least time of a call of each contender, in microseconds."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            time.sleep(PAUSE_S)
            call()
            for _ in range(calls):
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
    return {
        name: {"median_us": statistics.median(t) * 1e6, "least_us": min(t) * 1e6}
        for name, t in times.items()
    }


def bridge(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], object]:
    """Returns the call of the same op through ``max.experimental.torch.graph_op``."""
    cpu = DeviceRef.CPU()
    output = TensorType(DType.float32, ("n", "p", "q", "k"), cpu)
    none = TensorType(DType.float32, ("none",), cpu)
    residual = TensorType(DType.float32, ("rn", "rp", "rq", "rk"), cpu)

    def conv(
        x: TensorValue,
        filter: TensorValue,
        bias: TensorValue,
        residual: TensorValue,
        geometry: TensorValue,
        scalars: TensorValue,
    ) -> TensorValue:
        # The bias that is not there stands for the scale too.
        operands = [x, filter, bias, residual, bias, geometry, scalars]
        return ops.custom("maxconv.conv", cpu, operands, [output])[0].tensor

    op = graph_op(
        conv,
        kernel_library=kernel_library(),
        input_types=[
            TensorType(DType.float32, ("n", "h", "w", "c"), cpu),
            TensorType(DType.float32, ("f",), cpu),
            none,
            residual,
            TensorType(DType.int64, (GEOMETRY_LENGTH,), cpu),
            TensorType(DType.float32, (SCALARS_LENGTH,), cpu),
        ],
        output_types=[output],
    )
    pixels = x.permute(0, 2, 3, 1)
    problem = ConvProblem.from_arguments(
        pixels.shape, weight.shape, filter_layout="FCRS", padding=1
    )
    operands = (
        pixels,
        torch.from_numpy(pack_filter(weight, "FCRS").data.copy()),
        torch.empty(0),
        torch.empty(0, 0, 0, 0),
        torch.from_numpy(problem.geometry()),
        torch.from_numpy(encode_scalars()),
    )
    shape = (*pixels.shape[:3], weight.shape[0])
    return lambda: op(torch.empty(shape), *operands)


def overhead() -> dict[str, dict[str, float]]:
    """Times a convolution that is hardly any work: 1x16x4x4, 16 filters of 3x3."""
    x = torch.randn(1, 16, 4, 4).to(memory_format=torch.channels_last)
    conv: Any = nn.Conv2d(16, 16, 3, padding=1, bias=False)
    conv = conv.to(memory_format=torch.channels_last)
    module = mt.Conv2d.from_torch(conv)
    contenders = {
        "maxconv.torch.Conv2d": lambda: module(x),
        "maxconv.torch.conv2d": lambda: mt.conv2d(x, module.weight, None, 1, 1),
        "max.experimental.torch.graph_op": bridge(x, conv.weight.detach()),
        "torch": lambda: functional.conv2d(x, conv.weight, None, 1, 1),
    }
    return alternate(contenders, rounds=20, calls=200)


def resnet() -> dict[str, dict[str, float]]:
    """Times ResNet-50 on one image of 224x224."""
    from tests.interop.resnet import resnet50

    model: Any = resnet50()
    converted, _ = mt.convert(model)
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(1, 3, 224, 224).to(memory_format=torch.channels_last)
    return alternate(
        {"maxconv.torch": lambda: converted(x), "torch": lambda: model(x)}, rounds=15, calls=4
    )


def first_call() -> dict[str, float]:
    """Times the first call of a converted ResNet-50 with nothing compiled, and with all of it."""
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as home:
        environment = os.environ | {"HOME": home, "XDG_CACHE_HOME": f"{home}/.cache"}
        environment.pop("MAXCONV_CACHE_DIR", None)
        for name in ("cold_s", "warm_s"):
            command = [sys.executable, __file__, "--first-call"]
            finished = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True
            )
            seconds[name] = float(finished.stdout.split()[-1])
    return seconds


def main() -> int:
    """Runs the measurements; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    parser.add_argument("--first-call", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    with torch.inference_mode():
        if arguments.first_call:
            from tests.interop.resnet import resnet50

            converted, _ = mt.convert(resnet50())
            start = time.perf_counter()
            converted(torch.randn(1, 3, 224, 224))
            print(time.perf_counter() - start)
            return 0
        calls, networks, first = overhead(), resnet(), first_call()
    if arguments.json:
        record = {"call": calls, "resnet50": networks, "first_call": first}
        print(json.dumps(record, indent=2))
        return 0
    for title, table in (("call", calls), ("resnet50", networks)):
        print(f"{title:<34}{'median us':>12}{'least us':>12}")
        for name, entry in table.items():
            print(f"  {name:<32}{entry['median_us']:>12.1f}{entry['least_us']:>12.1f}")
    ratio = networks["torch"]["median_us"] / networks["maxconv.torch"]["median_us"]
    print(f"resnet50: {ratio:.2f} times as fast as torch")
    print(f"first call: {first['cold_s']:.1f} s, once compiled {first['warm_s']:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
