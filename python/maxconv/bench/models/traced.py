"""Which convolutions a model runs: it runs once, and each is noted with its module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Noted", "Shape", "trace"]


class Shape(NamedTuple):
    """A convolution, or a transposed one."""

    batch: int
    input: tuple[int, ...]
    """``[*spatial, C]``."""
    filters: int
    filter: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    """On both sides of each axis."""
    groups: int
    transposed: bool = False
    output_padding: tuple[int, ...] = ()
    """Of a transposed one."""


@dataclass
class Noted:
    """What was noted, the first convolution first."""

    counts: Counter[Shape] = field(default_factory=Counter)
    """How many ran of each shape."""
    names: dict[Shape, str] = field(default_factory=dict)
    """The path of the first module that has a shape."""


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's own
    """Notes the convolutions that run, and the modules that they run in."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's own
        self.noted = Noted()
        self.inside: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Notes a convolution, and computes it."""
        if function is torch.ops.aten.convolution.default:
            shape = _shape(*args)
            self.noted.counts[shape] += 1
            self.noted.names.setdefault(shape, self.inside[-1])
        return function(*args, **(kwargs or {}))


def _shape(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Shape:
    """Returns the shape of ``aten::convolution``'s arguments."""
    batch, channels, *size = map(int, x.shape)
    return Shape(
        batch,
        (*size, channels),
        int(weight.shape[1]) * groups if transposed else int(weight.shape[0]),
        tuple(weight.shape[2:]),
        tuple(stride),
        tuple(dilation),
        tuple(padding),
        groups,
        transposed,
        tuple(output_padding) if transposed else (),
    )


@contextmanager
def _paths(model: nn.Module, inside: list[str]) -> Iterator[None]:
    """Keeps the names of the modules that are being called."""
    handles = []
    for path, module in model.named_modules():

        def enter(*_: object, path: str = path) -> None:
            inside.append(path)

        def leave(*_: object) -> None:
            inside.pop()

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def trace(model: nn.Module, inputs: Sequence[Tensor]) -> Noted:
    """Runs a model, and returns what it convolved.

    Args:
        model: On the device of its inputs; on ``meta`` it runs without data.
        inputs: What its forward takes.
    """
    noting = _Noting()
    with torch.no_grad(), _paths(model, noting.inside), noting:
        model(*inputs)
    return noting.noted
