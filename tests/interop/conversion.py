"""Small models to convert, and the comparison of what becomes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from tests.interop.torch_tensors import draw
from torch import Tensor, nn

import maxconv.torch as mt
from maxconv.bench.resnet import randomize

#: How often ``convert_and_compare`` calls a converted model: as often in each memory format.
CALLS = 6


def convert_and_compare(
    model: nn.Module, *inputs: Tensor, **options: Any
) -> tuple[nn.Module, mt.ConversionReport]:
    """Converts, and compares with the original in float64; the original must stay as it was."""
    before = copy.deepcopy(model.state_dict())
    text = repr(model)
    converted, report = mt.convert(model, **options)
    assert repr(model) == text
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    exact_model = copy.deepcopy(model).double()
    with torch.no_grad():
        exact = exact_model(*(x.double() for x in inputs))
        own = model(*(x.clone() for x in inputs))
    for formats in (torch.contiguous_format, torch.channels_last):
        # Without no_grad: a converted model has nothing that requires grad. The first call takes
        # no chains, the next one makes them, the last one runs them.
        calls = [
            converted(
                *(x.clone(memory_format=formats) if x.dim() == 4 else x.clone() for x in inputs)
            )
            for _ in range(CALLS // 2)
        ]
        actual = calls[0]
        assert all(torch.equal(actual, later) for later in calls[1:])
        assert actual.shape == exact.shape and actual.dtype == own.dtype
        scale = exact.abs().max()
        error = (actual.double() - exact).abs().max() / scale
        # PyTorch's own float32 error says what the depth of the network costs.
        assert error <= 4 * ((own.double() - exact).abs().max() / scale) + 1e-6
    return converted, report


def fused(report: mt.ConversionReport) -> dict[str, tuple[str, ...]]:
    return {entry.name: entry.fused for entry in report.replaced}


def left(report: mt.ConversionReport) -> dict[str, str]:
    return {entry.name: entry.reason for entry in report.left}


class Network(nn.Module):
    """A module whose ``forward`` is a function of itself and its input."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        # Not an attribute of the instance: nn.Module would not call it with self. Nor a public one:
        # a module with methods is not traced unless it is the model.
        cast(Any, type(self))._call = staticmethod(call)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, cast(Any, type(self))._call(self, x))


def network(call: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> nn.Module:
    """A module of a class of its own, in eval mode, with drawn normalizations."""
    kind = type("Net", (Network,), {})
    return randomize(kind(call, **parts)).eval()


def conv(c: int = 4, k: int = 4, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(c, k, 3, padding=1, **options)


X = draw(2, 4, 9, 8)
