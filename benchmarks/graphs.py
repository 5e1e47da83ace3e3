"""Times ResNet-50 as a MAX graph beside PyTorch's, in one process and in turns, and prints a table.

The graph is that of ``graphs/resnet50.py``. PyTorch runs the same weights eagerly and compiled, on
a CPU with frozen weights, on a GPU in mode ``reduce-overhead``.

    python benchmarks/graphs.py --device cpu
    python benchmarks/graphs.py --device gpu --batch 64
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from max.driver import CPU, Accelerator, Buffer, Device
from max.dtype import DType
from max.engine import InferenceSession
from torch import Tensor

from maxconv.bench.device import DEVICES
from maxconv.bench.entrant import time_calls
from maxconv.bench.resnet import resnet50 as torch_resnet50
from maxconv.bench.timing import interleave
from maxconv.graphs import resnet50
from maxconv.graphs.common import DTYPES, device_ref, make_run, settle_options

Run = Callable[[], Any]


def graph_ways(images: resnet50.Floats, args: argparse.Namespace) -> dict[str, Run]:
    """Returns functions that run the graph, by the name of the way."""
    device: Device = Accelerator() if args.device == "gpu" else CPU()
    weights = resnet50.random_weights()
    graph = resnet50.build_graph(weights, dtype=DType[args.dtype], device=device_ref(args))
    model = InferenceSession(devices=[device]).load(graph)
    x = Buffer.from_numpy(images).to(device)
    ways: dict[str, Run] = {"maxconv, executed": make_run(model, x, device, replay=False)}
    if args.device == "gpu":
        ways["maxconv, replayed"] = make_run(model, x, device, replay=True)
    return ways


def torch_ways(images: resnet50.Floats, args: argparse.Namespace) -> dict[str, Run]:
    """Returns functions that run PyTorch's network, by the name of the way."""
    on_gpu = args.device == "gpu"
    device, dtype = torch.device("cuda" if on_gpu else "cpu"), getattr(torch, args.dtype)
    model = torch_resnet50()
    arrays = resnet50.random_weights()
    model.load_state_dict({name: torch.from_numpy(a) for name, a in arrays.items()}, strict=False)
    model = model.to(device, dtype, memory_format=torch.channels_last)
    # Channels last, as a view.
    x = torch.from_numpy(images).permute(0, 3, 1, 2).to(device, dtype)
    torch._inductor.config.freezing = True
    mode = "reduce-overhead" if on_gpu else "default"
    compiled = torch.compile(model, mode=mode)

    def run(network: Callable[[Tensor], Tensor]) -> Run:
        def once() -> Tensor:
            with torch.inference_mode():
                scores = network(x)
                if on_gpu:
                    torch.cuda.synchronize()
                return scores

        return once

    return {"torch, eager": run(model), f"torch.compile, {mode}": run(compiled)}


def main() -> None:
    """Times all ways and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "gpu"), help="a GPU if there is one")
    parser.add_argument("--dtype", choices=DTYPES, help="bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0, help="of timing for each way")
    parser.set_defaults(replay=False)
    args = parser.parse_args()
    settle_options(args)
    shape = (args.batch, resnet50.SIZE, resnet50.SIZE, 3)
    images = np.random.default_rng(0).standard_normal(shape, np.float32)
    ways = {**graph_ways(images, args), **torch_ways(images, args)}
    for run in ways.values():
        for _ in range(3):
            run()
    protocol = replace(DEVICES[args.device].models, budget_s=args.seconds, rounds=10)
    timings = interleave({name: partial(time_calls, run) for name, run in ways.items()}, protocol)
    best = min(t.median_s for name, t in timings.items() if name.startswith("torch"))
    print(f"ResNet-50, {args.device}, {args.dtype}, batch {args.batch}")
    print("| way | ms | p10 | p90 | torch's best / it |\n|---|--:|--:|--:|--:|")
    for name, found in timings.items():
        low, high = 1e3 * (found.p10_s or 0), 1e3 * (found.p90_s or 0)
        times = f"{1e3 * found.median_s:.2f} | {low:.2f} | {high:.2f}"
        print(f"| {name} | {times} | {best / found.median_s:.2f}x |")


if __name__ == "__main__":
    main()
