"""Modules with the constructors and the state of ``torch.nn``'s transposed convolutions."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from .._checks import check_precision
from ..activations import ActivationLike, ActivationSpec, parse
from ._arguments import Ints, wanted_format
from ._filters import OPERANDS
from ._transposed import convolve_transposed, read_transposed

__all__ = ["ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]

_Self = TypeVar("_Self", bound="_ConvTranspose")


class _ConvTranspose(_ConvTransposeNd):
    """What the three modules share."""

    rank: ClassVar[int]
    """Spatial dimensions."""
    _base: ClassVar[type[_ConvTransposeNd]]

    activation: ActivationSpec

    #: As the argument of ``maxconv.torch.conv2d``.
    precision: str | None = None

    #: When the output is channels last: ``"always"``, or where the ``"input"`` is, whatever the
    #: weight is; otherwise PyTorch's rule holds.
    channels_last: str = ""

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
        if not isinstance(conv, cls._base):
            raise TypeError(f"conv: a {type(conv).__name__} is not a {cls._base.__name__}")
        module = cls(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,
            conv.stride,
            cast(Any, conv.padding),
            conv.output_padding,
            conv.groups,
            conv.bias is not None,
            conv.dilation,
            conv.padding_mode,
            "meta",
            conv.weight.dtype,
            activation=activation,
            precision=precision,
        )
        module.weight = nn.Parameter(conv.weight.detach(), requires_grad=False)
        if conv.bias is not None:
            module.bias = nn.Parameter(conv.bias.detach(), requires_grad=False)
        return module.train(conv.training)

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

    def repack(self) -> None:
        """Forgets what was made of weight and bias; the next call makes it anew.

        Needed only after a write that PyTorch does not count: through ``weight.data``, or through a
        numpy array that shares the memory.
        """
        OPERANDS.forget(self.weight)
        if self.bias is not None:
            OPERANDS.forget(self.bias)

    def extra_repr(self) -> str:
        """The constructor's arguments, as ``nn.ConvNd`` writes them."""
        base: Any = super()
        parts = [str(base.extra_repr())]
        if self.activation.kind:
            parts.append(f"activation={self.activation.kind.name.lower()}")
        if self.precision is not None:
            parts.append(f"precision={self.precision}")
        return ", ".join(parts)


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
