"""What a convolution of 8-bit integers computes, in float64, and models to quantize."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from maxconv.torch._quantized import QuantizedConv

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
    """The formula of ``quantized_conv``, in float64; integers are float64 too.

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
