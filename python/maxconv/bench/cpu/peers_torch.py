"""torch's contenders, and maxconv's functions for torch, which are called in the same way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from maxconv._packing import Array

from ..entrant import BARE, CONTENDERS, FUSED, MAXCONV, Entrant, Float32, HostRun, Key
from .workload import Workload

__all__ = ["IN_TORCH", "REORDERED", "Loop", "contenders", "reference", "session", "tensor"]

#: A variant of torch: the filter is in oneDNN's order.
REORDERED = "filter reordered before"

#: A variant of maxconv: its function for torch.
IN_TORCH = "in PyTorch"

_FORMAT = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d}
_CONVOLVE: Mapping[int, Callable[..., Tensor]] = {
    1: functional.conv1d,
    2: functional.conv2d,
    3: functional.conv3d,
}


def session(threads: int) -> AbstractContextManager[object]:
    """Makes torch use so many threads, and returns what its calls must run within."""
    torch.set_num_threads(threads)
    return torch.inference_mode()


@dataclass(frozen=True)
class Loop(HostRun):
    """A convolution, some times in a row."""

    function: Callable[[], Tensor]
    convolutions: int

    def __call__(self) -> list[Tensor]:
        """Convolves; keeps all outputs until the end, as a graph does that returns them."""
        return [self.function() for _ in range(self.convolutions)]

    def outputs(self) -> list[Float32]:
        """Convolves and returns what was computed as ``[N, *spatial, K]``."""
        return [_channels_last(value) for value in self()]


def _channels_last(value: Tensor) -> Float32:
    return np.ascontiguousarray(value.float().movedim(1, -1).numpy())


def tensor(values: Array, dtype: torch.dtype, rank: int) -> Tensor:
    """Returns ``[N, *spatial, C]`` as torch's ``[N, C, *spatial]``, in torch's best format."""
    image = torch.from_numpy(values).to(dtype).movedim(-1, 1)
    # A copy in any case: torch aligns its own memory, numpy does not.
    return image.clone(memory_format=_FORMAT[rank])


def _padding(work: Workload) -> tuple[tuple[int, ...], list[int]]:
    """Returns the padding that torch's convolution takes, and what must be padded before it."""
    problem = work.named.problem
    if problem.pad_before == problem.pad_after:
        return problem.pad_before, []
    pairs = reversed(list(zip(problem.pad_before, problem.pad_after, strict=True)))
    return (0,) * problem.spatial_rank, [size for pair in pairs for size in pair]


def reference(work: Workload) -> dict[str, Float32]:
    """Returns what all are compared with, in float32, by work."""
    problem = work.named.problem
    padding, before = _padding(work)
    y = _CONVOLVE[problem.spatial_rank](
        functional.pad(torch.from_numpy(work.x).movedim(-1, 1), before),
        torch.from_numpy(work.torch_filter),
        None,
        problem.stride,
        padding,
        problem.dilation,
        problem.groups,
    )
    plain = _channels_last(y)
    return {BARE: plain, FUSED: np.maximum(plain + work.bias, 0) + work.residual}


def contenders(
    work: Workload, names: Collection[str] = CONTENDERS
) -> tuple[dict[Key, Entrant], dict[Key, str]]:
    """Returns what a problem is timed with, and why others are missing.

    ``torch`` is ``torch.nn.functional.conv*`` with activation and filter in channels-last format
    (one dimension: in torch's only format); its variant has a filter that oneDNN reordered before.
    Fused, ReLU and the addition of a residual follow, both in place. ``torch.compile`` compiles
    the same as one function, with the filter as a constant. maxconv's variant is
    ``maxconv.torch.conv*``.

    Args:
        work: The problem's operands.
        names: The contenders that are wanted.
    """
    operands = _Operands.make(work)
    makers: dict[Key, Callable[[_Operands], Callable[[], Tensor]]] = {}
    for fused in (False, True):
        kind = FUSED if fused else BARE
        makers |= {
            Key("torch", kind): partial(_torch, convolve=_eager, fused=fused),
            Key("torch", kind, REORDERED): partial(_torch, convolve=_reordered, fused=fused),
            Key("torch.compile", kind): partial(_compiled, fused=fused),
            Key(MAXCONV, kind, IN_TORCH): partial(_ours, fused=fused),
        }
    entrants: dict[Key, Entrant] = {}
    missing: dict[Key, str] = {}
    for key, make in makers.items():
        if key.contender not in names:
            continue
        try:
            function = make(operands)
            function()
        # The compiler of torch raises what it likes; the others are still worth timing.
        except Exception as error:
            missing[key] = (str(error).strip() or type(error).__name__).splitlines()[0]
            continue
        single = Loop(function, 1) if work.convolutions > 1 else None
        entrants[key] = Entrant(Loop(function, work.convolutions), single)
    return entrants, missing


@dataclass(frozen=True)
class _Operands:
    """A problem's operands as torch's tensors."""

    work: Workload
    x: Tensor
    filter: Tensor
    bias: Tensor
    residual: Tensor

    @classmethod
    def make(cls, work: Workload) -> _Operands:
        rank, dtype = work.named.problem.spatial_rank, getattr(torch, work.dtype)
        x, filter, residual = (
            tensor(values, dtype, rank) for values in (work.x, work.filter, work.residual)
        )
        return cls(work, x, filter, torch.from_numpy(work.bias).to(dtype), residual)


#: A convolution with a bias or without.
_Convolve = Callable[[Tensor | None], Tensor]


def _torch(
    operands: _Operands, *, convolve: Callable[[_Operands], _Convolve], fused: bool
) -> Callable[[], Tensor]:
    function = convolve(operands)
    if not fused:
        return partial(function, None)
    return lambda: function(operands.bias).relu_().add_(operands.residual)


def _compiled(operands: _Operands, *, fused: bool) -> Callable[[], Tensor]:
    """Returns what ``torch.compile`` makes of a module, whose weights it takes as constants."""
    from torch._inductor import config

    convolve, bias, residual = _eager(operands), operands.bias, operands.residual

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = torch.nn.Parameter(operands.filter, requires_grad=False)
            self.bias = torch.nn.Parameter(bias, requires_grad=False)

        def forward(self, x: Tensor, residual: Tensor) -> Tensor:
            y = convolve.function(x, self.filter, self.bias if fused else None)
            return functional.relu(y) + residual if fused else y

    # Shapes of the problem before must not make this one's symbolic.
    torch._dynamo.reset()
    with config.patch(freezing=True):
        fast = torch.compile(Module().eval())
        fast(operands.x, residual)
    return lambda: fast(operands.x, residual)


def _ours(operands: _Operands, *, fused: bool) -> Callable[[], Tensor]:
    import maxconv.torch as mt

    problem = operands.work.named.problem
    if problem.pad_before != problem.pad_after:
        raise ValueError("torch's functions take the same padding before and after")
    function: Callable[..., Tensor] = (mt.conv1d, mt.conv2d, mt.conv3d)[problem.spatial_rank - 1]
    arguments: dict[str, object] = {
        "stride": problem.stride,
        "padding": problem.pad_before,
        "dilation": problem.dilation,
        "groups": problem.groups,
    }
    if fused:
        arguments |= {"bias": operands.bias, "activation": "relu", "residual": operands.residual}
    return partial(function, operands.x, operands.filter, **arguments)


@dataclass(frozen=True)
class _Eager:
    """``torch.nn.functional.conv*`` of a problem."""

    operands: _Operands

    def function(self, x: Tensor, filter: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the convolution of other operands of the same shapes."""
        problem = self.operands.work.named.problem
        padding, before = _padding(self.operands.work)
        padded = functional.pad(x, before) if before else x
        return _CONVOLVE[problem.spatial_rank](
            padded, filter, bias, problem.stride, padding, problem.dilation, problem.groups
        )

    def __call__(self, bias: Tensor | None) -> Tensor:
        return self.function(self.operands.x, self.operands.filter, bias)


def _eager(operands: _Operands) -> _Eager:
    return _Eager(operands)


def _reordered(operands: _Operands) -> _Convolve:
    """Returns oneDNN's convolution with a filter that it reordered before."""
    problem, x, filter = operands.work.named.problem, operands.x, operands.filter
    rank = problem.spatial_rank
    padding, before = _padding(operands.work)
    geometry = [list(padding), list(problem.stride), list(problem.dilation)]
    if rank == 1:
        # oneDNN through torch takes two dimensions or three: one becomes two, of which one is 1.
        x = x.unsqueeze(2).contiguous(memory_format=torch.channels_last)
        filter = filter.unsqueeze(2).contiguous(memory_format=torch.channels_last)
        geometry = [[0, *geometry[0]], [1, *geometry[1]], [1, *geometry[2]]]
    padded_shape = list(functional.pad(x, before).shape)
    # These two have no documentation, but they are what torch's own compiler calls.
    packed = torch.ops.mkldnn._reorder_convolution_weight(
        filter, *geometry, problem.groups, padded_shape
    )
    function = torch.ops.mkldnn._convolution_pointwise

    def convolve(bias: Tensor | None) -> Tensor:
        padded = functional.pad(x, before) if before else x
        y: Tensor = function(padded, packed, bias, *geometry, problem.groups, "none", [], "")
        return y.squeeze(2) if rank == 1 else y

    return convolve
