"""Modules with the constructors and the state of ``torch.nn``'s transposed convolutions."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from .._checks import check_precision
from ..activations import ActivationLike, ActivationSpec, parse
from ._arguments import Ints, wanted_format
from ._inference import Inference
from ._transposed import convolve_transposed, read_transposed

__all__ = ["ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]

_Self = TypeVar("_Self", bound="_ConvTranspose")


class _ConvTranspose(Inference, _ConvTransposeNd):
    """What the three modules share."""

    activation: ActivationSpec

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Ints,
        stride: Ints = 1,
        padding: Ints = 0,
        output_padding: Ints = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Ints = 1,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: ActivationLike = None,
        precision: str | None = None,
    ) -> None:
        if precision is not None:
            check_precision(precision)
        spec = parse("activation", activation)
        arguments: dict[str, Any] = {
            "kernel_size": kernel_size,
            "stride": stride,
            "padding": padding,
            "output_padding": output_padding,
            "groups": groups,
            "bias": bias,
            "dilation": dilation,
            "padding_mode": padding_mode,
            "device": device,
            "dtype": dtype,
        }
        # A parameter made under inference_mode has no version to tell a derived filter's age by.
        with torch.inference_mode(False):
            # The second base class is nn.ConvTranspose1d, 2d or 3d.
            super().__init__(in_channels, out_channels, **arguments)
        self.activation = spec
        self.precision = precision
        self.requires_grad_(False)

    @classmethod
    def from_torch(
        cls: type[_Self],
        conv: _ConvTransposeNd,
        *,
        activation: ActivationLike = None,
        precision: str | None = None,
    ) -> _Self:
        """Returns the module that does what ``conv`` does, without a gradient.

        It has the memory of ``conv``'s weight and bias, as parameters of its own.

        Raises:
            TypeError: ``conv`` is of another class than the one that this class stands for.
        """
        return cls._like(
            conv, output_padding=conv.output_padding, activation=activation, precision=precision
        )

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Computes ``activation(conv_transpose(input))``.

        Args:
            input: ``[N, C, *spatial]`` or ``[C, *spatial]``.
            output_size: The output's, as ``nn.ConvTranspose2d`` takes it: it tells the output
                padding.

        Raises:
            TypeError: A tensor is none, or dtypes are unsupported or do not go together.
            ValueError: A value, a shape or a device is not allowed.
            RuntimeError: A tensor requires grad while grad mode is on.
        """
        extra: Any = self.output_padding
        if output_size is not None:
            geometry: Any = (self.stride, self.padding, self.kernel_size, self.rank, self.dilation)
            extra = self._output_padding(input, output_size, *geometry)
        arguments = read_transposed(
            self.rank,
            self.stride,
            cast(Any, self.padding),
            self.dilation,
            self.groups,
            self.activation,
            self.precision,
        )
        return convolve_transposed(
            input,
            self.weight,
            self.bias,
            extra,
            arguments,
            constant=True,
            channels_last=wanted_format(self.channels_last, input, self.rank),
        )


class ConvTranspose1d(_ConvTranspose, nn.ConvTranspose1d):
    """``nn.ConvTranspose1d`` for inference, with an activation fused.

    What ``ConvTranspose2d`` says of arguments and state holds with one spatial dimension.
    """

    rank = 1
    _base = nn.ConvTranspose1d


class ConvTranspose2d(_ConvTranspose, nn.ConvTranspose2d):
    """``nn.ConvTranspose2d`` for inference, with an activation fused.

    The constructor and the state (``weight`` ``[C, K / groups, R, S]``, ``bias`` ``[K]``) are those
    of ``nn.ConvTranspose2d``, and ``isinstance(module, nn.ConvTranspose2d)`` holds. The parameters
    do not require grad. The filters of the output's phases are made in the first call, and again
    when the weight has changed.

    Args:
        activation: Applied to the output; see ``maxconv.torch.conv2d``.
        precision: Of float32 products on a GPU; see ``maxconv.torch.conv2d``.

    The other arguments are ``nn.ConvTranspose2d``'s.

    Raises:
        TypeError: An activation or the precision is of a wrong type.
        ValueError: An activation or the precision is unknown, or ``nn.ConvTranspose2d`` refuses an
            argument.
    """

    rank = 2
    _base = nn.ConvTranspose2d


class ConvTranspose3d(_ConvTranspose, nn.ConvTranspose3d):
    """``nn.ConvTranspose3d`` for inference, with an activation fused.

    What ``ConvTranspose2d`` says of arguments and state holds with three spatial dimensions.
    """

    rank = 3
    _base = nn.ConvTranspose3d
