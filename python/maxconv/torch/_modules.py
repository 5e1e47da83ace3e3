"""Modules with the constructors and the state of ``torch.nn``'s convolutions, for inference."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from .._arguments import ConvArguments
from .._checks import check_precision
from ..activations import ActivationLike, ActivationSpec, parse
from ._activations import apply
from ._arguments import Ints, is_channels_last, read, wanted_format
from ._chains import Chained, Planned
from ._functional import convolve, plan_of
from ._inference import Inference
from ._plan import output_shape

__all__ = ["Conv1d", "Conv2d", "Conv3d"]

_Self = TypeVar("_Self", bound="_Conv")


class _Conv(Chained, Inference, _ConvNd):
    """What the three modules share."""

    activation: ActivationSpec
    final_activation: ActivationSpec

    #: How a residual of another shape or dtype is added after the kernel, by PyTorch: ``"add"``,
    #: ``"add_"``, or not at all: it is an error.
    unequal_residual: str = ""

    #: How often each pixel of the input is repeated, as ``maxconv.torch.conv2d`` takes it.
    upsample: Ints = 1

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Ints,
        stride: Ints = 1,
        padding: Ints | str = 0,
        dilation: Ints = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: ActivationLike = None,
        final_activation: ActivationLike = None,
        precision: str | None = None,
        upsample: Ints = 1,
    ) -> None:
        if precision is not None:
            check_precision(precision)
        first = parse("activation", activation)
        last = parse("final_activation", final_activation)
        arguments: dict[str, Any] = {
            "kernel_size": kernel_size,
            "stride": stride,
            "padding": padding,
            "dilation": dilation,
            "groups": groups,
            "bias": bias,
            "padding_mode": padding_mode,
            "device": device,
            "dtype": dtype,
        }
        # A parameter made under inference_mode has no version to tell a packed copy's age by.
        with torch.inference_mode(False):
            # The second base class is nn.Conv1d, 2d or 3d.
            super().__init__(in_channels, out_channels, **arguments)
        self.activation = first
        self.final_activation = last
        self.precision = precision
        self.upsample = upsample
        if type(upsample) is not int or upsample != 1:
            # A factor that is not allowed is an error of the constructor.
            self._arguments(self.padding, 1.0, None, upsample)
        self.requires_grad_(False)

    @classmethod
    def from_torch(
        cls: type[_Self],
        conv: _ConvNd,
        *,
        activation: ActivationLike = None,
        final_activation: ActivationLike = None,
        precision: str | None = None,
        upsample: Ints = 1,
    ) -> _Self:
        """Returns the module that does what ``conv`` does, without a gradient.

        It has the memory of ``conv``'s weight and bias, as parameters of its own.

        Raises:
            TypeError: ``conv`` is of another class than the one that this class stands for.
        """
        return cls._like(
            conv,
            activation=activation,
            final_activation=final_activation,
            precision=precision,
            upsample=upsample,
        )

    def forward(
        self, input: Tensor, residual: Tensor | None = None, *, beta: float = 1.0
    ) -> Tensor:
        """Computes ``final_activation(activation(conv(input)) + beta * residual)``.

        Args:
            input: ``[N, C, *spatial]`` or ``[C, *spatial]``.
            residual: Of the output's shape and dtype.
            beta: Factor of the residual.

        Raises:
            TypeError: A tensor is none, or dtypes are unsupported or do not go together.
            ValueError: A value, a shape or a device is not allowed.
            RuntimeError: A tensor requires grad while grad mode is on.
        """
        channels_last = wanted_format(self.channels_last, input, self.rank)
        padding: Ints | str = self.padding
        upsample = self.upsample
        if self.padding_mode != "zeros":
            if channels_last is None:
                unbatched = input.dim() == self.rank + 1
                channels_last = is_channels_last(input, unbatched) or is_channels_last(self.weight)
            input, padding, upsample = self._padded(input), 0, 1
        final = self.final_activation
        arguments = self._arguments(padding, beta, final, upsample)
        if residual is None or not self.unequal_residual or self._fits(input, residual, arguments):
            return convolve(
                input,
                self.weight,
                self.bias,
                residual,
                None,
                arguments,
                constant=True,
                channels_last=channels_last,
            )
        output = convolve(
            input,
            self.weight,
            self.bias,
            None,
            None,
            self._arguments(padding, 1.0, None, upsample),
            constant=True,
            channels_last=channels_last,
        )
        add: Any = getattr(output, self.unequal_residual)
        return apply(final, add(residual, alpha=beta))

    def planned(
        self, input: Tensor, residual: Tensor | None = None, *, beta: float = 1.0
    ) -> Planned | None:
        """Returns the plan that ``forward`` has just run, and its operands."""
        arguments = self._arguments(self.padding, beta, self.final_activation, self.upsample)
        if self.padding_mode != "zeros":
            return None
        unequal = residual is not None and bool(self.unequal_residual)
        if unequal and not self._fits(input, residual, arguments):
            return None
        tensors = input, self.weight, self.bias, residual, None
        channels_last = wanted_format(self.channels_last, input, self.rank)
        plan = plan_of(tensors, arguments, constant=True, channels_last=channels_last)
        return None if plan is None or input.dim() != self.rank + 2 else (plan, tensors)

    def _padded(self, input: Tensor) -> Tensor:
        """Returns the enlarged image with a border that repeats or reflects it."""
        if self.upsample != 1:
            factors = self.upsample
            each = (factors,) * self.rank if isinstance(factors, int) else tuple(factors)
            sizes = zip(input.shape[-self.rank :], each, strict=True)
            size = [count * factor for count, factor in sizes]
            if input.dim() == self.rank + 2:
                input = functional.interpolate(input, size)
            else:
                input = functional.interpolate(input.unsqueeze(0), size).squeeze(0)
        # nn.ConvNd holds the amounts for functional.pad, innermost first.
        amounts = self._reversed_padding_repeated_twice
        return functional.pad(input, amounts, mode=self.padding_mode)

    def _arguments(
        self, padding: Ints | str, beta: float, final: ActivationSpec | None, upsample: Ints
    ) -> ConvArguments:
        # In every call: models are known to set stride, padding or dilation after they are built.
        return read(
            self.rank,
            self.stride,
            padding,
            self.dilation,
            self.groups,
            self.activation,
            beta,
            final,
            self.precision,
            None,
            upsample,
        )

    def extra_repr(self) -> str:
        """The constructor's arguments, as ``nn.ConvNd`` writes them."""
        enlarged = f", upsample={self.upsample}" if self.upsample != 1 else ""
        return super().extra_repr() + enlarged

    def _fits(self, input: Tensor, residual: object, arguments: ConvArguments) -> bool:
        if not isinstance(residual, Tensor):
            return False
        batched = input.dim() == self.rank + 2
        shape = tuple(input.shape) if batched else (1, *input.shape)
        expected = output_shape(shape, self.weight.shape, arguments)
        expected = expected if batched else expected[1:]
        return residual.dtype == input.dtype and tuple(residual.shape) == expected


class Conv1d(_Conv, nn.Conv1d):
    """``nn.Conv1d`` for inference, with an activation and a residual fused.

    What ``Conv2d`` says of arguments, state and packing holds with one spatial dimension.
    """

    rank = 1
    _base = nn.Conv1d


class Conv2d(_Conv, nn.Conv2d):
    """``nn.Conv2d`` for inference, with an activation and a residual fused.

    The constructor and the state (``weight`` ``[K, C / groups, R, S]``, ``bias`` ``[K]``) are those
    of ``nn.Conv2d``, and ``isinstance(module, nn.Conv2d)`` holds. The parameters do not require
    grad. The weight is packed in the first call, and again when it has changed; a copy made by
    ``deepcopy``, ``pickle`` or ``to(dtype)`` packs its own.

    Args:
        activation: Applied to the convolution; see ``maxconv.torch.conv2d``.
        final_activation: Applied after the residual was added.
        precision: Of float32 products on a GPU; see ``maxconv.torch.conv2d``.
        upsample: How often each pixel is repeated before the image is convolved; see
            ``maxconv.torch.conv2d``.

    The other arguments are ``nn.Conv2d``'s. A ``padding_mode`` other than ``"zeros"`` pads with
    ``torch.nn.functional.pad`` first.

    Raises:
        TypeError: An activation or the precision is of a wrong type.
        ValueError: An activation or the precision is unknown, or ``nn.Conv2d`` refuses an argument.
    """

    rank = 2
    _base = nn.Conv2d


class Conv3d(_Conv, nn.Conv3d):
    """``nn.Conv3d`` for inference, with an activation and a residual fused.

    What ``Conv2d`` says of arguments, state and packing holds with three spatial dimensions.
    """

    rank = 3
    _base = nn.Conv3d
