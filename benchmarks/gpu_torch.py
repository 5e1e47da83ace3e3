"""PyTorch's convolutions on a GPU, timed as tests/gpu/sm90.mojo times ours.

    python benchmarks/gpu_torch.py tests/gpu/sm90_time.txt

bfloat16, channels-last, `cudnn.benchmark`; replays of a CUDA graph of 32 launches on random data,
over several input sets that together exceed the L2; the median of 7, after a pause in which the
chip cools. Needs torch with CUDA; the lines of the file are described in tests/gpu/sm90.mojo.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

LAUNCHES = 32
ROTATED_BYTES = 256 << 20
REPLAYS = 3


def measure(numbers: list[int]) -> tuple[float, float]:
    """Milliseconds of a convolution, and its TFLOP/s."""
    n, h, w, c, k, r, s, stride_h, stride_w, dilation_h, dilation_w, top, bottom, left, right = (
        numbers
    )
    if (top, left) != (bottom, right):
        raise ValueError(f"padding: {numbers[11:]} is not symmetric, as PyTorch needs it")
    p = (h + top + bottom - (r - 1) * dilation_h - 1) // stride_h + 1
    q = (w + left + right - (s - 1) * dilation_w - 1) // stride_w + 1
    set_bytes = 2 * (n * h * w * c + k * r * s * c + n * p * q * k)
    sets = max(1, min(LAUNCHES, ROTATED_BYTES // set_bytes + 1))

    def operands(*shape: int) -> list[torch.Tensor]:
        return [
            torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(
                memory_format=torch.channels_last
            )
            for _ in range(sets)
        ]

    activations, filters = operands(n, c, h, w), operands(k, c, r, s)

    def launch(index: int) -> torch.Tensor:
        return torch.nn.functional.conv2d(
            activations[index],
            filters[index],
            None,
            (stride_h, stride_w),
            (top, left),
            (dilation_h, dilation_w),
        )

    for index in range(sets):
        launch(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    outputs: list[torch.Tensor] = []
    with torch.cuda.graph(graph):
        for index in range(LAUNCHES):
            outputs.append(launch(index % sets))
            if len(outputs) > sets:
                outputs.pop(0)
    time.sleep(0.25)
    for _ in range(REPLAYS):
        graph.replay()
    times = []
    for _ in range(7):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / (REPLAYS * LAUNCHES))
    milliseconds = statistics.median(times)
    return milliseconds, 2 * n * p * q * k * c * r * s / milliseconds / 1e9


def main() -> None:
    """Times every line of a file of problems."""
    parser = argparse.ArgumentParser(description="times PyTorch's convolutions on a GPU")
    parser.add_argument("problems", type=Path, help="as tests/gpu/sm90_time.txt")
    problems: Path = parser.parse_args().problems
    torch.backends.cudnn.benchmark = True
    print("torch", torch.__version__, "cuDNN", torch.backends.cudnn.version(), flush=True)
    for line in problems.read_text().splitlines():
        if line and not line.startswith("#"):
            name, *numbers = line.split()
            milliseconds, teraflops = measure([int(number) for number in numbers])
            print(f"{name} torch {milliseconds:.4f} ms {teraflops:.0f} TFLOP/s", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
