"""Modules that convolve 8-bit integers, and the steps between integers and floats."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional

from .._calibration import Quantization
from ..activations import ActivationSpec
from ._arguments import read, wanted_format
from ._chains import Chained, Planned
from ._dtypes import BY_NAME
from ._functional import convolve, plan_of
from ._inference import refuse_training
from ._loading import guard_integers
from ._means import Rounded, plan_rounding
from ._modules import _Conv
from ._quantize_forms import Form
from ._tracing import recorded

__all__ = [
    "Constants",
    "Dequantize",
    "Quantize",
    "QuantizedConv",
    "Rounding",
    "added_module",
    "max_pool",
    "repeated_nearest",
    "round_floats",
    "rounded_to",
]

_Self = TypeVar("_Self", bound="Constants")


def rounded_to(quantization: Quantization) -> Rounded:
    """Returns the integers of a quantization with one scale."""
    factor = float(_factor(quantization))
    return Rounded(BY_NAME[quantization.dtype], factor, quantization.zero_point)


def _factor(quantization: Quantization) -> Tensor:
    """Returns the steps in 1, which floats are multiplied with, as ONNX's QuantizeLinear."""
    return (1 / torch.as_tensor(quantization.scale, dtype=torch.float64)).float()


def round_floats(x: Tensor, factor: Tensor | float, zero_point: int, dtype: torch.dtype) -> Tensor:
    """Returns floats as integers; ``factor`` is a step's reciprocal."""
    limits = torch.iinfo(dtype)
    steps = x.float() * (factor.to(x.device) if isinstance(factor, Tensor) else factor)
    return steps.round_().add_(zero_point).clamp_(limits.min, limits.max).to(dtype)


@recorded
def repeated_nearest(x: Tensor, **options: Any) -> Tensor:
    """Returns ``interpolate(x, **options)`` in a mode that repeats pixels, of 8-bit integers.

    PyTorch has it for uint8 alone; where only pixels move, int8 may be called that.
    """
    return functional.interpolate(x.view(torch.uint8), **options).view(x.dtype)


@recorded
def max_pool(
    x: Tensor,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    ceil_mode: bool,
) -> Tensor:
    """Returns ``max_pool1d``, ``2d`` or ``3d`` of 8-bit integers, by the number of dimensions.

    PyTorch's own counts the pixels of channels-last images in 8 bits, and has no ``max_pool1d``.
    """
    lowest = torch.iinfo(x.dtype).min
    for axis, (k, s, p, d) in enumerate(zip(size, stride, padding, dilation, strict=True)):
        place = axis - len(size)
        count, taps = x.shape[place], d * (k - 1) + 1
        outputs = (count + 2 * p - taps + (s - 1 if ceil_mode else 0)) // s + 1
        # The last window begins in the image or in front of it.
        if ceil_mode and (outputs - 1) * s >= count + p:
            outputs -= 1
        after = max((outputs - 1) * s + taps - count - p, 0)
        amounts = [0, 0] * (-place - 1) + [p, after]
        padded = functional.pad(x, amounts, "constant", lowest)
        windows = [padded.movedim(place, 0)[t * d :: s][:outputs] for t in range(k)]
        x = functools.reduce(torch.maximum, windows).movedim(0, place)
    return x


# Modules ----------------------------------------------------------------------------------------


def added_module(model: GraphModule, base: str, module: nn.Module) -> str:
    """Adds a module under a name that is free, and returns that."""
    number = 0
    while hasattr(model, f"{base}_{number}"):
        number += 1
    model.add_submodule(f"{base}_{number}", module)
    return f"{base}_{number}"


class Constants(nn.Module):
    """A module for inference whose floats are float32 whatever dtype a model is brought to."""

    def _apply(self: _Self, fn: Callable[..., Any], recurse: bool = True) -> _Self:
        exact = {
            name: buffer
            for name, buffer in self.named_buffers(recurse=False)
            if buffer.is_floating_point()
        }
        cast(Any, super())._apply(fn, recurse)
        for name, buffer in exact.items():
            self._buffers[name] = buffer.to(self.get_buffer(name).device)
        return self

    def train(self: _Self, mode: bool = True) -> _Self:
        """Sets eval mode.

        Raises:
            RuntimeError: ``mode`` is true.
        """
        refuse_training(mode)
        return super().train(mode)


class Quantize(Chained, Constants):
    """Makes integers of floats.

    Args:
        quantization: Of the integers.
        axis: The channels' dimension, counted from the end, where each has a scale.
    """

    factor: Tensor

    def __init__(self, quantization: Quantization, axis: int) -> None:
        super().__init__()
        shape = (-1, *(1,) * (-axis - 1)) if quantization.per_channel else ()
        self.register_buffer("factor", _factor(quantization).view(shape))
        self.zero_point = quantization.zero_point
        self.dtype = BY_NAME[quantization.dtype]
        self.quantization = quantization
        self.rounded = None if quantization.per_channel else rounded_to(quantization)
        self.training = False

    def forward(self, x: Tensor) -> Tensor:
        """Rounds to integers, halves to even, and clamps."""
        plan = None if self.rounded is None else plan_rounding(x, self.rounded)
        if plan is not None:
            return plan.run(x)
        return round_floats(x, self.factor, self.zero_point, self.dtype)

    def planned(self, x: Tensor) -> Planned | None:
        """Returns the plan that ``forward`` has just run, and its operand."""
        plan = None if self.rounded is None else plan_rounding(x, self.rounded)
        return None if plan is None else (plan, (x,))

    def extra_repr(self) -> str:
        """What the integers are."""
        return f"{self.dtype}, zero_point={self.zero_point}"


class Dequantize(Constants):
    """Makes floats of integers.

    Args:
        quantization: Of the integers, with one scale.
        dtype: Of the floats.
    """

    def __init__(self, quantization: Quantization, dtype: torch.dtype) -> None:
        super().__init__()
        assert isinstance(quantization.scale, float)
        self.scale = quantization.scale
        self.zero_point = quantization.zero_point
        self.dtype = dtype
        self.training = False

    def forward(self, x: Tensor) -> Tensor:
        """Returns what the integers stand for."""
        return ((x.float() - self.zero_point) * self.scale).to(self.dtype)

    def extra_repr(self) -> str:
        """What the integers are."""
        return f"scale={self.scale:g}, zero_point={self.zero_point}, {self.dtype}"


@dataclass(frozen=True)
class Rounding:
    """What integers go into a convolution, and what comes out of it."""

    input: Quantization
    output: Quantization | None
    """``None`` where floats come out."""
    residual: Quantization | None = None
    """``None`` where the residual consists of floats, or there is none."""


class QuantizedConv(Chained, Constants):
    """A convolution of integers, for inference.

    Args:
        conv: What it was.
        weight: int8, ``[K, C / groups, *taps]``.
        scales: float32 ``[K]``: what steps of the weight stand for, with one scale of the input
            already in them where each of its channels has one.
        rounding: The integers around it.
        beta: Factor of the residual.
        out_dtype: Of floats that come out.
        form: What is around the convolution where it computes another layer.
        shift: ``[K]``, what is added to the bias.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(
        self,
        conv: _Conv,
        weight: Tensor,
        scales: Tensor,
        rounding: Rounding,
        beta: float,
        out_dtype: torch.dtype,
        form: Form | None = None,
        shift: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.form = form
        before, after, residual = rounding.input, rounding.output, rounding.residual
        scale = scales.double()
        bias = None if conv.bias is None else conv.bias.detach().double()
        if shift is not None:
            bias = shift if bias is None else bias + shift
        if not before.per_channel:
            scale = scale * float(before.scale)
        self.out_scale: float | None = None
        self.out_zero_point = 0
        if after is not None:
            self.out_scale, self.out_zero_point = 1.0, after.zero_point
            if after.per_channel:
                # The activation of a multiple is that multiple of the activation.
                each = torch.as_tensor(after.scale, dtype=torch.float64, device=scale.device)
                scale, bias = scale / each, None if bias is None else bias / each
            else:
                self.out_scale = float(after.scale)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.float())
        self.register_buffer("bias", None if bias is None else bias.float())
        self.rank = conv.rank
        self.kernel_size = conv.kernel_size
        self.stride, self.dilation, self.groups = conv.stride, conv.dilation, conv.groups
        self.padding, self.padding_mode = conv.padding, conv.padding_mode
        self.upsample = conv.upsample
        self.border = tuple(conv._reversed_padding_repeated_twice)
        self.activation, self.final_activation = conv.activation, conv.final_activation
        self.zero_point = before.zero_point
        self.beta = beta if residual is None else beta * float(residual.scale)
        self.residual_zero_point = 0 if residual is None else residual.zero_point
        self.out_dtype = out_dtype if after is None else BY_NAME[after.dtype]
        self.channels_last = conv.channels_last
        # Nobody changes the geometry of a quantized module, so it is read once.
        self.arguments = read(
            self.rank,
            self.stride,
            self.padding if self.padding_mode == "zeros" else "valid",
            self.dilation,
            self.groups,
            self.activation,
            self.beta,
            self.final_activation,
            None,
            self.out_dtype,
            1,
            (self.zero_point, self.residual_zero_point, self.out_zero_point),
            self.out_scale,
        )
        self.training = False
        guard_integers(self)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Convolves integers.

        Args:
            input: int8 or uint8, ``[N, C, *spatial]`` or ``[C, *spatial]``, or what the form takes.
            residual: Of the output's shape and dtype.

        Raises:
            TypeError: A tensor is none, or of another dtype.
            ValueError: A shape or a device is not allowed.
        """
        if self.form is not None:
            return self.form.leave(self._convolve(self.form.enter(input), residual), input)
        return self._convolve(input, residual)

    def planned(self, input: Tensor, residual: Tensor | None = None) -> Planned | None:
        """Returns the plan that ``forward`` has just run, and its operands."""
        if self.form is not None or self.upsample != 1 or self.padding_mode != "zeros":
            return None
        tensors = input, self.weight, self.bias, residual, self.scale
        channels_last = wanted_format(self.channels_last, input, self.rank)
        plan = plan_of(tensors, self.arguments, constant=True, channels_last=channels_last)
        return None if plan is None or input.dim() != self.rank + 2 else (plan, tensors)

    def _convolve(self, input: Tensor, residual: Tensor | None) -> Tensor:
        if self.upsample != 1:
            factors = self.upsample
            each = (factors,) * self.rank if isinstance(factors, int) else tuple(factors)
            for axis, factor in zip(range(-self.rank, 0), each, strict=True):
                input = input.repeat_interleave(factor, axis)
        if self.padding_mode != "zeros":
            input = functional.pad(input, self.border, mode=self.padding_mode)
        return convolve(
            input,
            self.weight,
            self.bias,
            residual,
            self.scale,
            self.arguments,
            constant=True,
            channels_last=wanted_format(self.channels_last, input, self.rank),
        )

    def extra_repr(self) -> str:
        """Geometry, and what comes out."""
        filters, channels, *_ = self.weight.shape
        parts = [f"{channels * self.groups}, {filters}, kernel_size={self.kernel_size}"]
        parts += [f"stride={self.stride}, padding={self.padding}, zero_point={self.zero_point}"]
        for name in ("activation", "final_activation"):
            spec: ActivationSpec = getattr(self, name)
            if spec.kind:
                parts.append(f"{name}={spec.kind.name.lower()}")
        scale = "" if self.out_scale is None else f" * {self.out_scale:g}"
        return ", ".join([*parts, f"out={self.out_dtype}{scale}"])
