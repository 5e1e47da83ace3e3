"""Linear layers and transposed convolutions, as convolutions with something around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from ._modules import Conv1d, Conv2d, Conv3d, _Conv
from ._tracing import is_plain
from ._transposed import read_transposed, side_by_side
from ._transposed_modules import _ConvTranspose

__all__ = ["Form", "as_convolution"]

_CONVS: Final = (Conv1d, Conv2d, Conv3d)


class Form:
    """What is done around a convolution, so that it computes another layer."""

    kind: str
    """The name of the layer."""

    def enter(self, x: Tensor) -> Tensor:
        """Returns the convolution's input for the layer's."""
        raise NotImplementedError

    def leave(self, y: Tensor, x: Tensor) -> Tensor:
        """Returns the layer's output for the convolution's, and the layer's input."""
        raise NotImplementedError


class _Rows(Form):
    """A linear layer: each row of a matrix is an image of one pixel."""

    kind = "Linear"

    def enter(self, x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[-1], 1)

    def leave(self, y: Tensor, x: Tensor) -> Tensor:
        return y.view(*x.shape[:-1], y.shape[1])


@dataclass(frozen=True)
class _Phases(Form):
    """A transposed convolution: the phases of its output are side by side in the channels."""

    kind: str
    taps: tuple[int, ...]
    output_padding: tuple[int, ...]
    geometry: tuple[int, Any, Any, Any, int]
    """What ``read_transposed`` takes, in its order, but for the activation and the precision."""

    def plan(self) -> Any:
        """Returns the phases, or ``None`` if one convolution does not compute all."""
        arguments = read_transposed(*self.geometry, activation=None, precision=None)
        return side_by_side(self.taps, arguments, self.output_padding)

    def enter(self, x: Tensor) -> Tensor:
        return x if x.dim() == len(self.taps) + 2 else x.unsqueeze(0)

    def leave(self, y: Tensor, x: Tensor) -> Tensor:
        whole: Tensor = self.plan().interleave(y, self.enter(x))
        return whole if x.dim() == whole.dim() else whole.squeeze(0)


def as_convolution(
    module: nn.Module | None, arguments: Sequence[object]
) -> tuple[_Conv, Form] | None:
    """Returns the convolution that computes a layer, and what is around it.

    Args:
        module: The layer.
        arguments: What it is called with.

    Returns:
        ``None`` where the layer is another one: phases of several numbers of taps need several
        convolutions.
    """
    if len(arguments) != 1:
        return None
    with torch.inference_mode(False), torch.no_grad():
        if type(module) is nn.Linear and is_plain(module):
            return _of_linear(module), _Rows()
        if isinstance(module, _ConvTranspose):
            return _of_transposed(module)
    return None


def _of_linear(linear: nn.Linear) -> _Conv:
    conv = Conv1d(linear.in_features, linear.out_features, 1, bias=linear.bias is not None)
    _give(conv, linear.weight.detach().unsqueeze(-1), linear.bias)
    return conv


def _of_transposed(module: _ConvTranspose) -> tuple[_Conv, Form] | None:
    form = _Phases(
        type(module).__name__,
        tuple(module.kernel_size),
        tuple(module.output_padding),
        (module.rank, module.stride, module.padding, module.dilation, module.groups),
    )
    plan = form.plan()
    if plan is None:
        return None
    weight = plan.filters(module.weight)
    conv = _CONVS[module.rank - 1](
        module.in_channels,
        len(weight),
        tuple(weight.shape[2:]),
        padding=plan.padding,
        dilation=plan.dilation,
        groups=module.groups,
        bias=module.bias is not None,
        activation=module.activation,
    )
    _give(conv, weight, None if module.bias is None else plan.spread(module.bias))
    conv.channels_last = module.channels_last
    return conv, form


def _give(conv: _Conv, weight: Tensor, bias: Tensor | None) -> None:
    """Puts a weight and a bias into a convolution."""
    conv.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        conv.bias = nn.Parameter(bias.detach(), requires_grad=False)
