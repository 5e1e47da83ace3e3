"""What a convolution of 8-bit integers computes, in float64, and models to quantize."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from tests.interop import conversion
from tests.interop.conversion import conv
from tests.interop.torch_tensors import draw
from torch import Tensor, nn
from torch.nn import functional

import maxconv.torch as mt
from maxconv.torch._quantized import QuantizedConv

U8, I8, F32 = torch.uint8, torch.int8, torch.float32
BATCHES = [draw(2, 4, 9, 8, seed=seed) for seed in (1, 2)]
X = BATCHES[0]

_CONVOLVE: dict[int, Callable[..., Tensor]] = {
    1: functional.conv1d,
    2: functional.conv2d,
    3: functional.conv3d,
}


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor,
    *geometry: Any,
    activation: Callable[[Tensor], Tensor] = lambda value: value,
    final_activation: Callable[[Tensor], Tensor] = lambda value: value,
    zero_point: int = 0,
    beta: float = 1.0,
    residual_zero_point: int = 0,
    out_dtype: torch.dtype = torch.float32,
    out_scale: float | None = None,
    out_zero_point: int = 0,
) -> Tensor:
    """The formula of ``mt.conv2d`` for integers, in float64; they are float64 too.

    ``geometry`` is stride, padding, dilation and groups.
    """
    rank = weight.dim() - 2
    shape = (-1, *(1,) * rank)
    sums = _CONVOLVE[rank](x.double() - zero_point, weight.double(), None, *geometry)
    y = sums * scale.double().view(shape)
    if bias is not None:
        y = y + bias.double().view(shape)
    y = activation(y)
    if residual is not None:
        y = y + beta * (residual.double() - residual_zero_point)
    y = final_activation(y)
    if out_scale is None:
        return y
    limits = torch.iinfo(out_dtype)
    return (torch.round(y / out_scale) + out_zero_point).clamp(limits.min, limits.max)


def integers(*shape: int, dtype: torch.dtype = torch.int8, seed: int = 0) -> Tensor:
    """All integers of a type, -128 of filters apart."""
    limits = torch.iinfo(dtype)
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(limits.min, limits.max + 1, shape, generator=drawn).to(dtype)


def layers(model: nn.Module) -> dict[str, QuantizedConv]:
    return {n: part for n, part in model.named_modules() if isinstance(part, QuantizedConv)}


def types(model: nn.Module, *inputs: Tensor) -> dict[str, tuple[torch.dtype, ...]]:
    """The types of input, residual and output of each convolution of integers in a call."""
    found: dict[str, tuple[torch.dtype, ...]] = {}
    handles = []
    for name, part in layers(model).items():

        def note(_: nn.Module, args: Any, kwargs: Any, output: Tensor, name: str = name) -> None:
            given = [*args, *(x for x in kwargs.values() if x is not None)]
            found[name] = (*(x.dtype for x in given), output.dtype)

        handles.append(part.register_forward_hook(note, with_kwargs=True))
    model(*inputs)
    for handle in handles:
        handle.remove()
    return found


class Residual(nn.Module):
    """A network of two blocks as ResNet has them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b, self.c, self.d = (conv() for _ in range(5))
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.pool(torch.relu(self.stem(x)))
        x = torch.relu(self.b(torch.relu(self.a(x))) + x)
        x = torch.relu(x + self.d(torch.relu(self.c(x))))
        return self.fc(x.mean((2, 3)))


def network(call: Callable[[Any, Tensor], Any], **parts: nn.Module) -> Any:
    return conversion.network(call, **parts)


def quantize(model: nn.Module, batches: Any, **options: Any) -> Any:
    return mt.quantize(model, batches, **options)


def quantized(model: nn.Module, *, error: float = 0.05, **options: Any) -> Any:
    """Quantizes, compares with the model in floats, which stays as it was; returns the result."""
    before = copy.deepcopy(model.state_dict())
    text = repr(model)
    result, report = quantize(model, BATCHES, **options)
    assert repr(model) == text
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    for x in BATCHES:
        for formats in (torch.contiguous_format, torch.channels_last):
            actual, wanted = result(x.to(memory_format=formats)), model(x)
            assert (actual.shape, actual.dtype) == (wanted.shape, wanted.dtype)
            assert (actual - wanted).norm() <= error * wanted.norm()
    assert report.error is not None and report.error <= error
    return result, report


def became(report: mt.QuantizationReport) -> dict[str, str]:
    return {layer.name: layer.became for layer in report.layers}
