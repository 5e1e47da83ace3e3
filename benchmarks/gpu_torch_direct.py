"""PyTorch's convolutions of few channels and depthwise, timed as tests/gpu/direct.mojo times ours.

    python benchmarks/gpu_torch_direct.py tests/gpu/direct_time.txt [--compile NAME ...]

bfloat16, channels-last, `cudnn.benchmark`; replays of a CUDA graph of 32 launches on random data,
over several input sets that together exceed the L2; the median of 7, after a pause in which the
chip cools. The convolution alone, then with bias, SiLU and residual: eager, and under
`torch.compile` for the problems that --compile names. Needs torch with CUDA; the lines of the file
are described in tests/gpu/direct.mojo.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from gpu.replays import Launch, input_sets, time_graph
from torch import Tensor
from torch.nn import functional


class Problem:
    """A line of the file, as PyTorch takes it: without the dimensions of extent 1 in front."""

    def __init__(self, line: str) -> None:
        self.name, *words = line.split()
        numbers = [int(word) for word in words]
        self.batch, depth, height, width, self.channels, self.filters, self.groups = numbers[:7]
        before, after = numbers[16::2], numbers[17::2]
        if before != after:
            raise ValueError(f"padding: {numbers[16:]} is not symmetric, as PyTorch needs it")
        extents = [depth, height, width]
        skip = 0
        while skip < 2 and extents[skip] == 1 and numbers[7 + skip] == 1:
            skip += 1
        self.input = extents[skip:]
        self.filter = numbers[7:10][skip:]
        self.stride = numbers[10:13][skip:]
        self.dilation = numbers[13:16][skip:]
        self.padding = before[skip:]
        self.output = [
            (i + 2 * p - (f - 1) * d - 1) // s + 1
            for i, f, s, d, p in zip(
                self.input, self.filter, self.stride, self.dilation, self.padding, strict=True
            )
        ]


def random_tensor(*shape: int) -> Tensor:
    """Random values, channels innermost."""
    values = torch.randn((shape[0], *shape[2:], shape[1]), device="cuda", dtype=torch.bfloat16)
    return values.movedim(-1, 1)


def convolve(problem: Problem, x: Tensor, weight: Tensor) -> Tensor:
    """The convolution alone."""
    function = (functional.conv1d, functional.conv2d, functional.conv3d)[len(problem.input) - 1]
    return function(
        x, weight, None, problem.stride, problem.padding, problem.dilation, problem.groups
    )


def milliseconds(launch: Launch, sets: int) -> float:
    """The median time of a launch."""
    return statistics.median(time_graph(launch, sets))


def measure(problem: Problem, compiled: bool) -> None:
    """Prints the times of a problem."""
    x_shape = (problem.batch, problem.channels, *problem.input)
    w_shape = (problem.filters, problem.channels // problem.groups, *problem.filter)
    y_shape = (problem.batch, problem.filters, *problem.output)
    elements = sum(torch.Size(shape).numel() for shape in (x_shape, w_shape, y_shape))
    sets = input_sets(2 * elements)
    xs = [random_tensor(*x_shape) for _ in range(sets)]
    ws = [random_tensor(*w_shape) for _ in range(sets)]
    rs = [random_tensor(*y_shape) for _ in range(sets)]
    bias = torch.randn(
        (problem.filters, *[1] * len(problem.input)), device="cuda", dtype=torch.bfloat16
    )

    def fused(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        return functional.silu(convolve(problem, x, weight) + bias) + residual

    bare = milliseconds(lambda i: convolve(problem, xs[i], ws[i]), sets)
    eager = milliseconds(lambda i: fused(xs[i], ws[i], rs[i]), sets)
    text = f"{problem.name} torch bare {bare:.4f} ms, eager {eager:.4f} ms"
    if compiled:
        function = torch.compile(fused)
        text += f", compiled {milliseconds(lambda i: function(xs[i], ws[i], rs[i]), sets):.4f} ms"
    print(text, flush=True)


def main() -> None:
    """Times every line of a file of problems."""
    parser = argparse.ArgumentParser(description="times PyTorch's convolutions on a GPU")
    parser.add_argument("problems", type=Path, help="as tests/gpu/direct_time.txt")
    parser.add_argument("--compile", nargs="*", default=[], metavar="NAME")
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    print("torch", torch.__version__, "cuDNN", torch.backends.cudnn.version(), flush=True)
    for line in arguments.problems.read_text().splitlines():
        if line and not line.startswith("#"):
            problem = Problem(line)
            measure(problem, problem.name in arguments.compile)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
