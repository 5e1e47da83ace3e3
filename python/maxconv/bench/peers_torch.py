"""torch's contenders: oneDNN with channels last, and with a filter in oneDNN's own order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .workload import Float32, Workload

__all__ = ["TorchCall", "contenders", "reference", "threads"]

_FORMAT = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d}
_CONVOLVE: Mapping[int, Callable[..., Tensor]] = {
    1: functional.conv1d,
    2: functional.conv2d,
    3: functional.conv3d,
}


@dataclass(frozen=True)
class TorchCall:
    """A function without arguments, run under ``torch.inference_mode``."""

    function: Callable[[], Tensor]

    def __call__(self) -> Tensor:
        """Runs the function."""
        with torch.inference_mode():
            return self.function()

    def output(self) -> Float32:
        """Runs the function and returns what it computed as ``[N, *spatial, K]``."""
        return _channels_last(self())


def threads(count: int) -> None:
    """Makes torch use so many threads."""
    torch.set_num_threads(count)


def _channels_last(value: Tensor) -> Float32:
    return np.ascontiguousarray(value.float().movedim(1, -1).numpy())


def _tensor(values: Float32, dtype: torch.dtype, rank: int) -> Tensor:
    """Returns ``[N, *spatial, C]`` as torch's ``[N, C, *spatial]``, in torch's best format."""
    tensor = torch.from_numpy(values).to(dtype).movedim(-1, 1)
    return tensor.contiguous(memory_format=_FORMAT[rank])


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
    with torch.inference_mode():
        x = functional.pad(torch.from_numpy(work.x).movedim(-1, 1), before)
        y = _CONVOLVE[problem.spatial_rank](
            x,
            torch.from_numpy(work.torch_filter),
            None,
            problem.stride,
            padding,
            problem.dilation,
            problem.groups,
        )
        plain = _channels_last(y)
    return plain, np.maximum(plain + work.bias, 0) + work.residual


def contenders(work: Workload) -> tuple[dict[str, TorchCall], dict[str, str]]:
    """Returns the calls that a problem is timed with, by name, and why others are missing.

    ``torch`` is ``torch.nn.functional.conv*`` with activation and filter in channels-last format
    (one dimension: in torch's only format); ``torch_prepacked`` oneDNN's convolution of a filter
    that was reordered before, as ``torch.compile`` with ``freezing`` calls it; ``torch_fused`` the
    faster kind's convolution with bias, then ReLU and the residual's addition, both in place.
    """
    rank = work.named.problem.spatial_rank
    dtype = getattr(torch, work.dtype)
    calls: dict[str, TorchCall] = {}
    missing: dict[str, str] = {}
    with torch.inference_mode():
        x = _tensor(work.x, dtype, rank)
        residual = _tensor(work.residual, dtype, rank)
        bias = torch.from_numpy(work.bias).to(dtype)
        for name, make in (("torch", _eager), ("torch_prepacked", _prepacked)):
            try:
                convolve = make(work, x, dtype)
                convolve(None)
            except (RuntimeError, AttributeError) as error:
                missing[name] = str(error).splitlines()[0]
                continue
            calls[name] = TorchCall(lambda convolve=convolve: convolve(None))
            # Where both work, the second is the faster.
            calls["torch_fused"] = TorchCall(
                lambda convolve=convolve: convolve(bias).relu_().add_(residual)
            )
    return calls, missing


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
