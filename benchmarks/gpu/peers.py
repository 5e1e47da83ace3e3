"""Times PyTorch's and cuDNN's convolutions on a GPU.

    python benchmarks/gpu/peers.py build/gpu_problems.txt > peers.jsonl

Needs torch with CUDA and, for the fused cuDNN graph, nvidia-cudnn-frontend. bfloat16, channels
last, `cudnn.benchmark`. Every contender is captured in a CUDA graph of 32 launches over input sets
that together exceed the L2, and timed as replays; `launch_ms` is the same without a graph, one call
after the other. One JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from replays import LAUNCHES, Launch, input_sets, time_graph, time_runs
from torch.nn import functional

SCREENING_PAUSE = 0.02
"""Seconds in front of each round of a plan of cuDNN's; the best is timed again as all else is."""


@dataclass(frozen=True)
class Problem:
    """A 2-D convolution with the same padding on both sides."""

    name: str
    batch: int
    channels: int
    filters: int
    groups: int
    size: tuple[int, int]
    filter: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    padding: tuple[int, int]

    @staticmethod
    def of(line: str) -> Problem:
        """Reads a line of numbers; see lines.py."""
        name, *words = line.split()
        n = [int(word) for word in words]
        pairs = [(n[i + 1], n[i + 2]) for i in range(4, 22, 3)]
        if pairs[4] != pairs[5]:
            raise ValueError(
                f"{name}: padding {pairs[4]} and {pairs[5]}; PyTorch takes equal sides"
            )
        return Problem(name, n[0], n[1], n[2], n[3], *pairs[:5])

    @property
    def output(self) -> tuple[int, int]:
        """Output height and width."""
        spans = ((f - 1) * d + 1 for f, d in zip(self.filter, self.dilation, strict=True))
        each = zip(self.size, self.padding, spans, self.stride, strict=True)
        height, width = ((size + 2 * pad - span) // step + 1 for size, pad, span, step in each)
        return height, width

    @property
    def products(self) -> int:
        """Multiply-adds."""
        height, width = self.output
        depth = self.channels // self.groups * self.filter[0] * self.filter[1]
        return self.batch * height * width * self.filters * depth


class Operands:
    """Random operands of a problem: as many sets as exceed the L2 together."""

    def __init__(self, problem: Problem) -> None:
        """Draws them."""
        n, c, k = problem.batch, problem.channels, problem.filters
        height, width = problem.output
        each = n * c * problem.size[0] * problem.size[1] + 2 * n * k * height * width
        self.sets = input_sets(2 * each)
        self.problem = problem
        self.x = self._draw(n, c, *problem.size)
        self.w = self._draw(k, c // problem.groups, *problem.filter)
        self.residual = self._draw(n, k, height, width)
        self.bias = [torch.randn(k, device="cuda", dtype=torch.bfloat16) for _ in range(self.sets)]

    def _draw(self, *shape: int) -> list[torch.Tensor]:
        return [
            torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(
                memory_format=torch.channels_last
            )
            for _ in range(self.sets)
        ]

    def convolve(self, index: int, bias: bool = False) -> torch.Tensor:
        """Returns the convolution of a set."""
        p = self.problem
        return functional.conv2d(
            self.x[index],
            self.w[index],
            self.bias[index] if bias else None,
            p.stride,
            p.padding,
            p.dilation,
            p.groups,
        )

    def fused(self, index: int) -> torch.Tensor:
        """Returns `silu(convolution + bias) + residual` of a set."""
        return functional.silu(self.convolve(index, bias=True)) + self.residual[index]


def compiled(operands: Operands) -> Launch:
    """`fused` through torch.compile."""
    p = operands.problem

    def function(
        x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        y = functional.conv2d(x, w, bias, p.stride, p.padding, p.dilation, p.groups)
        return functional.silu(y) + residual

    # Shapes of the problem before must not make this one's symbolic.
    torch._dynamo.reset()
    fast: Callable[..., torch.Tensor] = torch.compile(function)
    o = operands
    return lambda index: fast(o.x[index], o.w[index], o.bias[index], o.residual[index])


class CudnnPlans:
    """cuDNN's plans for one graph of convolution, bias, SiLU and residual."""

    def __init__(self, operands: Operands, swish: bool) -> None:
        """Builds the graph and all plans that cuDNN offers.

        Args:
            operands: Of the problem.
            swish: Whether SiLU is one node of the graph, or a sigmoid and a product.
        """
        import cudnn

        self.operands = operands
        self.handle = cudnn.create_handle()
        p = operands.problem
        graph = cudnn.pygraph(
            io_data_type=cudnn.data_type.BFLOAT16,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=self.handle,
        )

        def tensor(like: torch.Tensor, name: str) -> Any:
            return graph.tensor(name=name, dim=list(like.shape), stride=list(like.stride()))

        bias = operands.bias[0].view(1, -1, 1, 1).to(memory_format=torch.channels_last)
        self.x, self.w = tensor(operands.x[0], "x"), tensor(operands.w[0], "w")
        self.bias, self.residual = tensor(bias, "bias"), tensor(operands.residual[0], "residual")
        y = graph.conv_fprop(
            image=self.x,
            weight=self.w,
            padding=list(p.padding),
            stride=list(p.stride),
            dilation=list(p.dilation),
        )
        y = graph.bias(input=y, bias=self.bias)
        if swish:
            y = graph.swish(input=y, swish_beta=1.0)
        else:
            y = graph.mul(a=y, b=graph.sigmoid(input=y))
        self.y = graph.add(a=y, b=self.residual)
        like = operands.residual[0]
        self.y.set_output(True).set_data_type(cudnn.data_type.BFLOAT16)
        self.y.set_dim(list(like.shape)).set_stride(list(like.stride()))
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans(cudnn.build_plan_policy.ALL)
        self.graph = graph
        self.count = graph.get_execution_plan_count()

    def launch(self, plan: int) -> Launch:
        """Returns a function that runs a plan on the current stream."""
        import cudnn

        o = self.operands
        size = self.graph.get_workspace_size_plan_at_index(plan)
        workspace = torch.empty(max(1, size), device="cuda", dtype=torch.uint8)

        def run(index: int) -> torch.Tensor:
            y = torch.empty_like(o.residual[index])
            cudnn.set_stream(self.handle, torch.cuda.current_stream().cuda_stream)
            pack = {
                self.x: o.x[index],
                self.w: o.w[index],
                self.bias: o.bias[index],
                self.residual: o.residual[index],
                self.y: y,
            }
            self.graph.execute_plan_at_index(pack, workspace, plan, self.handle)
            return y

        return run


def time_calls(launch: Launch, sets: int) -> list[float]:
    """Times launches one after the other, without a graph."""

    def run() -> None:
        for index in range(LAUNCHES):
            launch(index % sets)

    return time_runs(run, LAUNCHES)


def report(problem: Problem, contender: str, launch: Launch, sets: int) -> None:
    """Times a contender both ways, and prints a line."""
    replayed, called = time_graph(launch, sets), time_calls(launch, sets)
    print_times(problem, contender, replayed, called)


def print_times(
    problem: Problem, contender: str, replayed: list[float], called: list[float], **more: object
) -> None:
    """Prints a contender's line."""
    line = {
        "problem": problem.name,
        "contender": contender,
        "ms": statistics.median(replayed),
        "fastest": replayed[0],
        "slowest": replayed[-1],
        "launch_ms": statistics.median(called),
        **more,
    }
    print(json.dumps(line), flush=True)


def time_cudnn(operands: Operands) -> None:
    """Times cuDNN's plans one by one, and prints the best."""
    best: tuple[float, Launch] | None = None
    tried, refusals = 0, set[str]()
    for swish in (True, False):
        try:
            plans = CudnnPlans(operands, swish)
        except Exception as refused:  # the other graph may be supported
            refusals.add(str(refused)[:200])
            continue
        for plan in range(plans.count):
            tried += 1
            try:
                launch = plans.launch(plan)
                milliseconds = time_graph(launch, operands.sets, operands.sets, SCREENING_PAUSE)[0]
            except Exception as refused:  # a plan may refuse to be captured or to run
                refusals.add(str(refused)[:200])
                continue
            if best is None or milliseconds < best[0]:
                best = (milliseconds, launch)
    if best is None:
        raise RuntimeError(f"none of {tried} plans runs: {sorted(refusals)}")
    replayed, called = time_graph(best[1], operands.sets), time_calls(best[1], operands.sets)
    print_times(operands.problem, "cudnn_fused", replayed, called, plans=tried)


def time_contender(name: str, operands: Operands) -> None:
    """Times a contender and prints its line, or why there is none."""
    problem = operands.problem
    try:
        if name == "cudnn_fused":
            time_cudnn(operands)
            return
        launches = {
            "torch": lambda: operands.convolve,
            "torch_fused": lambda: operands.fused,
            "torch_compile": lambda: compiled(operands),
        }
        report(problem, name, launches[name](), operands.sets)
    except Exception as error:  # the others are still worth timing
        print(json.dumps({"problem": problem.name, "contender": name, "why": str(error)[:400]}))


def main() -> None:
    """Times every line of a file of problems."""
    contenders = ("torch", "torch_fused", "torch_compile", "cudnn_fused")
    parser = argparse.ArgumentParser(description="times PyTorch's and cuDNN's convolutions")
    parser.add_argument("problems", type=Path, help="lines of lines.py")
    parser.add_argument("--contenders", nargs="+", choices=contenders, default=contenders)
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    about = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }
    print(json.dumps({"about": about}), flush=True)
    for line in arguments.problems.read_text().splitlines():
        operands = Operands(Problem.of(line))
        for name in arguments.contenders:
            time_contender(name, operands)
        del operands
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
