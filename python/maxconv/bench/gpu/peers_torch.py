"""torch's contenders on a GPU, and cuDNN's fused plans, which torch's functions do not reach."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..entrant import BARE, FUSED, Entrant, Key
from ..statistics import summarize
from .clock import Clock, GraphRun, Launch, LaunchRun
from .operands import Operands

__all__ = ["MAKERS", "entrant"]

#: Replays by which the fastest plan of cuDNN's is found; it is then timed as all else is.
_SCREENINGS = 5


def entrant(clock: Clock, launch: Launch, sets: int, note: str = "") -> Entrant:
    """Returns what a contender in torch's process is timed with."""
    return Entrant(GraphRun(clock, launch, sets), LaunchRun(clock, launch, sets), note)


def _eager(operands: Operands) -> Entrant:
    return entrant(operands.clock, operands.convolve, operands.sets)


def _eager_fused(operands: Operands) -> Entrant:
    return entrant(operands.clock, operands.fuse, operands.sets)


def _compiled(operands: Operands) -> Entrant:
    """Returns the fused work through ``torch.compile``."""
    # Shapes of the problem before must not make this one's symbolic.
    torch._dynamo.reset()
    fast: Callable[..., Tensor] = torch.compile(operands.fused)
    o = operands
    return entrant(o.clock, lambda i: fast(o.x[i], o.filter[i], o.bias[i], o.residual[i]), o.sets)


class _CudnnPlans:
    """cuDNN's plans for one graph of convolution, bias, SiLU and residual."""

    def __init__(self, operands: Operands, swish: bool) -> None:
        """Builds the graph and all plans that cuDNN offers.

        Args:
            operands: Of the problem.
            swish: Whether SiLU is one node of the graph, or a sigmoid and a product.
        """
        # A distribution of its own, which ships no types.
        self._cudnn: Any = importlib.import_module("cudnn")
        cudnn = self._cudnn
        self._operands = operands
        self._handle = cudnn.create_handle()
        p = operands.named.problem
        kind = cudnn.data_type.BFLOAT16 if operands.dtype == "bfloat16" else cudnn.data_type.HALF
        graph = cudnn.pygraph(
            io_data_type=kind,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=self._handle,
        )

        def tensor(like: Tensor, name: str) -> Any:
            return graph.tensor(name=name, dim=list(like.shape), stride=list(like.stride()))

        bias = operands.bias[0].view(1, -1, 1, 1).to(memory_format=torch.channels_last)
        self._x, self._filter = tensor(operands.x[0], "x"), tensor(operands.filter[0], "filter")
        self._bias, self._residual = tensor(bias, "bias"), tensor(operands.residual[0], "residual")
        y = graph.conv_fprop(
            image=self._x,
            weight=self._filter,
            padding=list(p.pad_before),
            stride=list(p.stride),
            dilation=list(p.dilation),
        )
        y = graph.bias(input=y, bias=self._bias)
        if swish:
            y = graph.swish(input=y, swish_beta=1.0)
        else:
            y = graph.mul(a=y, b=graph.sigmoid(input=y))
        self._y = graph.add(a=y, b=self._residual)
        like = operands.residual[0]
        self._y.set_output(True).set_data_type(kind)
        self._y.set_dim(list(like.shape)).set_stride(list(like.stride()))
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans(cudnn.build_plan_policy.ALL)
        self._graph = graph
        self.count: int = graph.get_execution_plan_count()

    def launch(self, plan: int) -> Launch:
        """Returns what runs a plan on the current stream."""
        o = self._operands
        size = self._graph.get_workspace_size_plan_at_index(plan)
        workspace = torch.empty(max(1, size), device=o.clock.device, dtype=torch.uint8)

        def run(index: int) -> Tensor:
            y = torch.empty_like(o.residual[index])
            self._cudnn.set_stream(self._handle, torch.cuda.current_stream().cuda_stream)
            pack = {
                self._x: o.x[index],
                self._filter: o.filter[index],
                self._bias: o.bias[index],
                self._residual: o.residual[index],
                self._y: y,
            }
            self._graph.execute_plan_at_index(pack, workspace, plan, self._handle)
            return y

        return run


def _cudnn_fused(operands: Operands) -> Entrant:
    """Returns the fastest of the plans that cuDNN offers, found by timing each."""
    best: tuple[float, Launch] | None = None
    tried, refusals = 0, list[str]()
    for swish in (True, False):
        try:
            plans = _CudnnPlans(operands, swish)
        except ImportError:
            raise
        except Exception as refused:  # the other graph may be supported
            refusals.append(_words(refused))
            continue
        for plan in range(plans.count):
            tried += 1
            try:
                launch = plans.launch(plan)
                run = GraphRun(operands.clock, launch, operands.sets)
                seconds = summarize(run.burst(1)[0] for _ in range(_SCREENINGS)).median_s
            except Exception as refused:  # a plan may refuse to be captured or to run
                refusals.append(_words(refused))
                continue
            if best is None or seconds < best[0]:
                best = (seconds, launch)
    if best is None:
        raise RuntimeError(f"none of {tried} plans runs: {'; '.join(dict.fromkeys(refusals))}")
    return entrant(operands.clock, best[1], operands.sets, note=f"the fastest of {tried} plans")


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


#: Makes each contender in torch's process; what it raises is the reason why it is missing.
MAKERS: dict[Key, Callable[[Operands], Entrant]] = {
    Key("torch", BARE): _eager,
    Key("torch", FUSED): _eager_fused,
    Key("torch.compile", FUSED): _compiled,
    Key("cudnn", FUSED): _cudnn_fused,
}
