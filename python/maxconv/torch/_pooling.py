"""Global average pooling: the mean over each image's pixels.

A network with squeeze and excitation has one in every block, and PyTorch's own takes longer there
than the convolutions beside it, on GPUs, and of 16-bit types on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.fx import GraphModule, Node
from torch.nn import functional

from . import _op
from ._chains import Chained, Planned
from ._dtypes import DTYPES
from ._functional import is_plain_memory, is_watched
from ._means import is_dense_image, mean_output, plan_average
from ._tracing import is_plain, opened_modules, recorded

__all__ = ["GLOBAL_POOLS", "averaged", "global_avg_pool", "pool_globally", "pooled"]


def global_avg_pool(input: Tensor) -> Tensor:
    """Returns the mean over all pixels, as ``nn.AdaptiveAvgPool2d(1)`` does, for any rank.

    maxconv computes it for channels-last tensors, with sums in float32 and one rounding. Others,
    and tensors that need a gradient, are PyTorch's.

    Args:
        input: ``[N, C, *spatial]``, of one to three spatial dimensions.

    Returns:
        ``[N, C, 1, ...]``, of the input's dtype.

    Raises:
        TypeError: ``input`` is no tensor.
        ValueError: It has another number of dimensions.
    """
    if not isinstance(input, Tensor):
        raise TypeError(f"input: a {type(input).__name__} is not a torch.Tensor")
    if not 3 <= input.dim() <= 5:
        raise ValueError(
            f"input: {input.dim()} dimensions; [N, C, *spatial] with one to three spatial "
            "dimensions is allowed"
        )
    return _average(input) if _is_ours(input) else _by_pytorch(input)


def _by_pytorch(input: Tensor) -> Tensor:
    return input.mean(tuple(range(2, input.dim())), keepdim=True)


def _average(input: Tensor) -> Tensor:
    """Averages what ``_is_ours``."""
    if is_dynamo_compiling() or is_watched():
        output: Tensor = _operator(input)
        return output
    return _enqueue(input)


def _is_ours(input: Tensor) -> bool:
    """Whether maxconv's kernel takes a tensor."""
    if not _is_on(input) or input.dtype not in DTYPES or input.layout is not torch.strided:
        return False
    if torch.is_grad_enabled() and input.requires_grad:
        return False
    if not is_dynamo_compiling() and not is_plain_memory(input):
        return False
    return is_dense_image(input)


def _is_on(input: Tensor) -> bool:
    """Whether a tensor is where maxconv has a kernel; PyTorch's compiler has its own for a CPU."""
    return input.is_cuda or (input.is_cpu and not is_dynamo_compiling())


def _new_output(input: Tensor) -> Tensor:
    """Returns what holds nothing: ``[N, C, 1, ...]``, channels last."""
    shape, strides, _ = mean_output(input.shape, input.dtype)
    return input.new_empty_strided(shape, strides)


def _run(input: Tensor) -> Tensor:
    """The operator, which others than ``global_avg_pool`` may call."""
    return _enqueue(input) if _is_ours(input) else _by_pytorch(input)


def _enqueue(input: Tensor) -> Tensor:
    """Enqueues the kernel on PyTorch's current stream, or runs that of the CPU."""
    return plan_average(input.shape, input.dtype, input.get_device()).run(input)


_operator: Final = _op.define("global_avg_pool(Tensor input) -> Tensor", _run, _new_output)


# In converted models ------------------------------------------------------------------------------


class _ToOnePixel(Chained):
    """Stands in front of ``torch.nn``'s class in a module whose output is one pixel."""

    rank: ClassVar[int]
    """Spatial dimensions."""

    def forward(self, input: Tensor) -> Tensor:
        """See ``global_avg_pool``; what the kernel does not take is PyTorch's."""
        return pooled(input, self.rank)

    def planned(self, input: Tensor) -> Planned | None:
        """Returns the plan that ``forward`` has just run, and its operand."""
        if input.dim() != self.rank + 2 or not _is_ours(input) or is_watched():
            return None
        return plan_average(input.shape, input.dtype, input.get_device()), (input,)


class GlobalAvgPool1d(_ToOnePixel, nn.AdaptiveAvgPool1d):
    """``nn.AdaptiveAvgPool1d(1)``."""

    rank = 1


class GlobalAvgPool2d(_ToOnePixel, nn.AdaptiveAvgPool2d):
    """``nn.AdaptiveAvgPool2d(1)``."""

    rank = 2


class GlobalAvgPool3d(_ToOnePixel, nn.AdaptiveAvgPool3d):
    """``nn.AdaptiveAvgPool3d(1)``."""

    rank = 3


#: What ``convert`` makes of PyTorch's.
GLOBAL_POOLS: Final = (GlobalAvgPool1d, GlobalAvgPool2d, GlobalAvgPool3d)

_MODULES: Final[dict[type[nn.Module], type[nn.Module]]] = {
    nn.AdaptiveAvgPool1d: GlobalAvgPool1d,
    nn.AdaptiveAvgPool2d: GlobalAvgPool2d,
    nn.AdaptiveAvgPool3d: GlobalAvgPool3d,
}

#: PyTorch's functions, by the spatial dimensions of their input.
_FUNCTIONS: Final[dict[int, Callable[..., Tensor]]] = {
    1: functional.adaptive_avg_pool1d,
    2: functional.adaptive_avg_pool2d,
    3: functional.adaptive_avg_pool3d,
}
_RANKS: Final = {function: rank for rank, function in _FUNCTIONS.items()}


def pool_globally(model: nn.Module) -> None:
    """Puts ``global_avg_pool`` wherever a converted model averages all pixels, in place.

    Modules keep their class's interface. In traced modules functions and the method ``mean`` are
    replaced too.
    """
    made: dict[nn.Module, nn.Module] = {}
    for part in opened_modules(model):
        for name, child in list(part._modules.items()):
            kind = None if child is None else _MODULES.get(type(child))
            if child is None or kind is None or not is_plain(child) or not _is_one(child):
                continue
            if child not in made:
                size = cast(Any, child).output_size
                made[child] = cast(Any, kind)(size).train(child.training)
            setattr(part, name, made[child])
        if isinstance(part, GraphModule):
            _replace_calls(part)


def _is_one(pool: nn.Module) -> bool:
    """Whether a pooling's output is one pixel."""
    return _all_one(cast(Any, pool).output_size)


def _all_one(size: object) -> bool:
    sizes = size if isinstance(size, tuple | list) else (size,)
    return all(type(length) is int and length == 1 for length in sizes)


@recorded
def averaged(input: Any, dimensions: Sequence[int], keepdim: bool) -> Any:
    """Returns ``input.mean(dimensions, keepdim)``.

    Args:
        input: A tensor, or what else has such a method.
        dimensions: Those of pixels, if it is an image.
        keepdim: As ``mean`` takes it.
    """
    if isinstance(input, Tensor) and 3 <= input.dim() <= 5:
        places = sorted(place % input.dim() for place in dimensions)
        if places == list(range(2, input.dim())) and _is_ours(input):
            output = _average(input)
            return output if keepdim else output.flatten(1)
    return input.mean(dimensions, keepdim=True) if keepdim else input.mean(dimensions)


@recorded
def pooled(input: Any, rank: int) -> Tensor:
    """Returns the adaptive average pooling of ``input`` to one pixel.

    Args:
        input: ``[N, C, *spatial]`` or ``[C, *spatial]``.
        rank: Its spatial dimensions.
    """
    if isinstance(input, Tensor) and input.dim() == rank + 2 and _is_ours(input):
        return _average(input)
    return _FUNCTIONS[rank](input, 1)


def _replace_calls(model: GraphModule) -> None:
    """Replaces functions and methods of a traced module."""
    changed = False
    for node in list(model.graph.nodes):
        call = _call_of(node)
        if call is not None:
            function, arguments = call
            with model.graph.inserting_before(node):
                new = model.graph.call_function(function, arguments)
            node.replace_all_uses_with(new)
            model.graph.erase_node(node)
            changed = True
    if changed:
        model.recompile()


def _call_of(node: Node) -> tuple[Any, tuple[Any, ...]] | None:
    """Returns what computes a node's mean over pixels, and its arguments, if it is one."""
    if node.op == "call_function" and node.target in _RANKS:
        return _as_pooling(node)
    by_method = node.op == "call_method" and node.target == "mean"
    if by_method or (node.op == "call_function" and node.target is torch.mean):
        return _as_mean(node)
    return None


def _as_pooling(node: Node) -> tuple[Any, tuple[Any, ...]] | None:
    given = dict(zip(("input", "output_size"), node.args, strict=False)) | node.kwargs
    if set(given) != {"input", "output_size"} or not _all_one(given["output_size"]):
        return None
    return pooled, (given["input"], _RANKS[cast(Any, node.target)])


def _as_mean(node: Node) -> tuple[Any, tuple[Any, ...]] | None:
    given = dict(zip(("input", "dim", "keepdim"), node.args, strict=False)) | node.kwargs
    places, keepdim = given.get("dim"), given.get("keepdim", False)
    known = set(given) <= {"input", "dim", "keepdim"} and len(node.args) <= 3
    if not known or "input" not in given or not isinstance(keepdim, bool):
        return None
    if isinstance(places, int):
        places = (places,)
    if not isinstance(places, tuple | list) or not places:
        return None
    if not all(type(place) is int for place in places):
        return None
    return averaged, (given["input"], tuple(places), keepdim)
