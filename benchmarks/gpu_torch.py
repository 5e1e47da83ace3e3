"""PyTorch's convolutions on a GPU, timed as tests/gpu/sm90.mojo times ours.

    python benchmarks/gpu_torch.py tests/gpu/sm90_time.txt

bfloat16, channels-last (one axis: as PyTorch has it), `cudnn.benchmark`; replays of a CUDA graph of
32 launches on random data, over several input sets that together exceed the L2; the median of 7,
after a pause in which the chip cools. Needs torch with CUDA; the lines of the file are described in
tests/gpu/problems.mojo.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path

import torch
from gpu.replays import PAUSE, input_sets, time_graph
from torch.nn import functional

LONG = 2e10
"""Operations of a convolution after which the chip has to cool."""

CONVOLUTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)
FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def parse(words: list[str]) -> tuple[list[int], list[list[int]]]:
    """Batch, channels, filters, groups; input, filter, stride, dilation, padding before, after."""
    if len(words) == 15:
        n, h, w, c, k, r, s, *rest = map(int, words)
        stride, dilation, (top, bottom, left, right) = rest[:2], rest[2:4], rest[4:]
        axes = [[h, w], [r, s], stride, dilation, [top, left], [bottom, right]]
        return [n, c, k, 1], axes
    counts = [int(words[at]) for at in (0, 2, 3, 9)]
    return counts, [[int(x) for x in words[at].split("x")] for at in (1, 4, 5, 6, 7, 8)]


def measure(words: list[str]) -> tuple[float, float]:
    """Milliseconds of a convolution, and its TFLOP/s."""
    (n, c, k, groups), (size, taps, stride, dilation, before, after) = parse(words)
    if before != after:
        raise ValueError(f"padding: {before}, {after} is not symmetric, as PyTorch needs it")
    outputs = [
        (x + 2 * p - (r - 1) * d - 1) // s + 1
        for x, p, r, d, s in zip(size, before, taps, dilation, stride, strict=True)
    ]
    reduction = math.prod(taps) * c // groups
    set_bytes = 2 * (n * math.prod(size) * c + k * reduction + n * math.prod(outputs) * k)
    sets = input_sets(set_bytes)
    operations = 2 * n * math.prod(outputs) * k * reduction

    def operands(*shape: int) -> list[torch.Tensor]:
        return [
            torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(
                memory_format=FORMATS[len(size) - 1]
            )
            for _ in range(sets)
        ]

    activations, filters = operands(n, c, *size), operands(k, c // groups, *taps)
    convolution = CONVOLUTIONS[len(size) - 1]

    def launch(index: int) -> torch.Tensor:
        return convolution(
            activations[index], filters[index], None, stride, before, dilation, groups
        )

    times = time_graph(launch, sets, pause=PAUSE if operations > LONG else 0.01)
    milliseconds = statistics.median(times)
    return milliseconds, operations / milliseconds / 1e9


def main() -> None:
    """Times every line of a file of problems."""
    parser = argparse.ArgumentParser(description="times PyTorch's convolutions on a GPU")
    parser.add_argument("problems", type=Path, help="as tests/gpu/sm90_time.txt")
    problems: Path = parser.parse_args().problems
    torch.backends.cudnn.benchmark = True
    print("torch", torch.__version__, "cuDNN", torch.backends.cudnn.version(), flush=True)
    for line in problems.read_text().splitlines():
        if line and not line.startswith("#"):
            name, *words = line.split()
            milliseconds, teraflops = measure(words)
            print(f"{name} torch {milliseconds:.4f} ms {teraflops:.0f} TFLOP/s", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
