"""torch's contenders on a GPU, and cuDNN's fused plans, which torch's functions do not reach."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from maxconv.tuner.heron import PRODUCTS

from ..entrant import BARE, FUSED, TORCH, TORCH_COMPILE, Entrant, Key
from ..statistics import summarize
from .clock import Clock, GraphRun, Launch, LaunchRun
from .operands import Operands

__all__ = ["AS_COMPILED", "AS_PRODUCT", "AS_ROW", "MAKERS", "Maker", "entrant", "makers"]

#: Variants: of torch in one dimension, of torch where the operator is a product of matrices, and
#: of torch.compile without its compiler.
AS_ROW = "conv2d of one row"
AS_PRODUCT = "mm, mv or bmm"
AS_COMPILED = "one kernel behind the convolution"

_NOTE = "what torch.compile makes, compiled by hand: the convolution, then one Triton kernel"

#: Replays by which the fastest plan of cuDNN's is found; it is then timed as all else is.
_SCREENINGS = 5


def entrant(operands: Operands, launch: Launch, note: str = "") -> Entrant:
    """Returns what a contender in torch's process is timed with."""
    clock, sets, launches = operands.clock, operands.sets, operands.launches
    kernel = GraphRun(clock, launch, sets, launches)
    return Entrant(kernel, LaunchRun(clock, launch, sets, launches), note)


def _eager(operands: Operands) -> Entrant:
    return entrant(operands, operands.convolve)


def _as_row(operands: Operands) -> Entrant | None:
    """Returns the convolution as one of an image; ``None`` in two and three dimensions."""
    one = operands.named.problem.spatial_rank == 1
    return entrant(operands, operands.convolve_row) if one else None


def _as_product(operands: Operands) -> Entrant | None:
    """Returns the product that an operator is, by cuBLAS; ``None`` where it is none.

    Rows and columns are those of the convolution, in its memory: nothing is copied.
    """
    named = operands.named
    if named.family not in PRODUCTS:
        return None
    groups, channels = int(named.problem.groups), int(named.problem.group_channels)
    filters = int(named.problem.filters) // groups
    rows = [x.movedim(1, -1).reshape(-1, groups, channels) for x in operands.x]
    columns = [filter.reshape(groups, filters, channels) for filter in operands.filter]

    def launch(index: int) -> Tensor:
        a, b = rows[index], columns[index]
        if groups > 1:
            y = a.new_empty(len(a), groups, filters)
            torch.bmm(a.transpose(0, 1), b.transpose(1, 2), out=y.transpose(0, 1))
        elif len(a) == 1:
            y = torch.mv(b[0], a[0, 0])
        else:
            y = torch.mm(a[:, 0], b[0].t())
        return y.reshape(1, len(a), -1).movedim(-1, 1)

    return entrant(operands, launch)


def _eager_fused(operands: Operands) -> Entrant:
    return entrant(operands, operands.fuse)


def _compiled(operands: Operands) -> Entrant:
    """Returns the fused work through ``torch.compile``."""
    # Shapes of the problem before must not make this one's symbolic.
    torch._dynamo.reset()
    fast: Callable[..., Tensor] = torch.compile(operands.fused)
    o = operands
    return entrant(o, lambda i: fast(o.x[i], o.filter[i], o.bias[i], o.residual[i]))


def _as_compiled(operands: Operands) -> Entrant:
    """Returns the fused work as ``torch.compile`` does it, without its seconds for each problem.

    Raises:
        ImportError: Triton is not installed.
    """
    o = operands
    convolve = o.convolve_row if o.named.problem.spatial_rank == 1 else o.convolve

    def last(y: Tensor) -> Tensor:
        """Returns an output with channels innermost; torch stores others rarely."""
        return y.movedim(1, -1).contiguous().movedim(-1, 1)

    y = convolve(0)
    copied = not y.movedim(1, -1).is_contiguous()
    fuse = _pointwise(o.clock, last(y), o.bias[0], o.residual[0])

    def launch(index: int) -> Tensor:
        y = last(convolve(index))
        fuse(y, o.bias[index], o.residual[index])
        return y

    return entrant(o, launch, _NOTE + ", with a copy to channels last between" * copied)


def _pointwise(clock: Clock, y: Tensor, bias: Tensor, residual: Tensor) -> Callable[..., None]:
    """See ``pointwise.fastest``, which is imported where it is needed."""
    fastest = importlib.import_module(".pointwise", __package__).fastest
    found: Callable[..., None] = fastest(clock, y, bias, residual)
    return found


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
                run = GraphRun(operands.clock, launch, operands.sets, operands.launches)
                seconds = summarize(run.burst(1)[0] for _ in range(_SCREENINGS)).median_s
            except Exception as refused:  # a plan may refuse to be captured or to run
                refusals.append(_words(refused))
                continue
            if best is None or seconds < best[0]:
                best = (seconds, launch)
    if best is None:
        raise RuntimeError(f"none of {tried} plans runs: {'; '.join(dict.fromkeys(refusals))}")
    return entrant(operands, best[1], note=f"the fastest of {tried} plans")


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


#: See ``MAKERS``.
Maker = Callable[[Operands], "Entrant | None"]

#: Makes each contender in torch's process, or nothing where there is no such way to call it; what
#: it raises is the reason why it is missing.
MAKERS: dict[Key, Maker] = {
    Key(TORCH, BARE): _eager,
    Key(TORCH, BARE, AS_ROW): _as_row,
    Key(TORCH, BARE, AS_PRODUCT): _as_product,
    Key(TORCH, FUSED): _eager_fused,
    Key(TORCH_COMPILE, FUSED): _compiled,
    Key(TORCH_COMPILE, FUSED, AS_COMPILED): _as_compiled,
    Key("cudnn", FUSED): _cudnn_fused,
}


def makers(
    contenders: Collection[str], works: Collection[str], *, many: bool = False
) -> dict[Key, Maker]:
    """Returns the makers of contenders and kinds of work.

    Args:
        contenders: Their names.
        works: The kinds of work.
        many: Whether there are hundreds of problems: ``torch.compile`` compiles none of them then,
            and torch without its compiler, which runs three kernels where that runs one, does no
            fused work beside it.
    """
    left = set[Key]()
    if many:
        left.add(Key(TORCH_COMPILE, FUSED))
        if TORCH_COMPILE in contenders:
            left.add(Key(TORCH, FUSED))
    return {
        key: make
        for key, make in MAKERS.items()
        if key.contender in contenders and key.work in works and key not in left
    }
