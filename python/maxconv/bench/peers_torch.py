"""torch's contenders: oneDNN with channels last, and with a filter in oneDNN's own order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .entrant import Entrant
from .workload import Float32, Workload

__all__ = ["Loop", "contenders", "reference", "session"]

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
class Loop:
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


def _tensor(values: Float32, dtype: torch.dtype, rank: int) -> Tensor:
    """Returns ``[N, *spatial, C]`` as torch's ``[N, C, *spatial]``, in torch's best format."""
    tensor = torch.from_numpy(values).to(dtype).movedim(-1, 1)
    # A copy in any case: torch aligns its own memory, numpy does not.
    return tensor.clone(memory_format=_FORMAT[rank])


def _padding(work: Workload) -> tuple[tuple[int, ...], list[int]]:
    """Returns the padding that torch's convolution takes, and what must be padded before it."""
    problem = work.named.problem
    if problem.pad_before == problem.pad_after:
        return problem.pad_before, []
    pairs = reversed(list(zip(problem.pad_before, problem.pad_after, strict=True)))
    return (0,) * problem.spatial_rank, [size for pair in pairs for size in pair]


def reference(work: Workload) -> tuple[Float32, Float32]:
    """Returns what all are compared with, in float32: the convolution, and it with the epilogue."""
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
    return plain, np.maximum(plain + work.bias, 0) + work.residual


def contenders(work: Workload) -> tuple[dict[str, Entrant], dict[str, str]]:
    """Returns what a problem is timed with, by name, and why others are missing.

    ``torch`` is ``torch.nn.functional.conv*`` with activation and filter in channels-last format
    (one dimension: in torch's only format); ``torch_prepacked`` oneDNN's convolution with a filter
    that was reordered before, as ``torch.compile`` calls it when it may freeze weights;
    ``torch_fused`` the latter, or the former where that is missing, with a bias, then ReLU and the
    addition of a residual, both in place.
    """
    rank = work.named.problem.spatial_rank
    dtype = getattr(torch, work.dtype)
    x = _tensor(work.x, dtype, rank)
    residual = _tensor(work.residual, dtype, rank)
    bias = torch.from_numpy(work.bias).to(dtype)
    entrants: dict[str, Entrant] = {}
    missing: dict[str, str] = {}
    for name, make in (("torch", _eager), ("torch_prepacked", _prepacked)):
        try:
            convolve = make(work, x, dtype)
            convolve(None)
        except (RuntimeError, AttributeError) as error:
            missing[name] = str(error).splitlines()[0]
            continue
        plain = Loop(partial(convolve, None), work.convolutions)
        single = replace(plain, convolutions=1) if work.convolutions > 1 else None
        entrants[name] = Entrant(plain, single)
        fused = Loop(partial(_fused, convolve, bias, residual), work.convolutions)
        entrants["torch_fused"] = Entrant(fused, fused=True)
    return entrants, missing


def _fused(convolve: Callable[[Tensor | None], Tensor], bias: Tensor, residual: Tensor) -> Tensor:
    return convolve(bias).relu_().add_(residual)


def _eager(work: Workload, x: Tensor, dtype: torch.dtype) -> Callable[[Tensor | None], Tensor]:
    problem = work.named.problem
    rank = problem.spatial_rank
    filter = _tensor(work.filter, dtype, rank)
    padding, before = _padding(work)
    function = _CONVOLVE[rank]

    def convolve(bias: Tensor | None) -> Tensor:
        padded = functional.pad(x, before) if before else x
        return function(
            padded, filter, bias, problem.stride, padding, problem.dilation, problem.groups
        )

    return convolve


def _prepacked(work: Workload, x: Tensor, dtype: torch.dtype) -> Callable[[Tensor | None], Tensor]:
    problem = work.named.problem
    rank = problem.spatial_rank
    padding, before = _padding(work)
    filter = _tensor(work.filter, dtype, rank)
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
