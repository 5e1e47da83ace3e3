"""Subclasses of PyTorch's convolutions: their own ``forward``, with maxconv's functions in it."""

from __future__ import annotations

from functools import cache
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ._arguments import read, wanted_format
from ._functional import convolve
from ._inference import refuse_training
from ._static import Forward
from ._transposed import convolve_transposed, read_transposed

__all__ = ["RANKS", "TRANSPOSED_RANKS", "Redirected", "redirect"]

#: PyTorch's functions by spatial rank; those of ``torch.nn.functional`` are the same objects.
RANKS: Final[dict[Any, int]] = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
TRANSPOSED_RANKS: Final[dict[Any, int]] = {
    torch.conv_transpose1d: 1,
    torch.conv_transpose2d: 2,
    torch.conv_transpose3d: 3,
}


_Self = TypeVar("_Self", bound="Redirected")


class _Redirection(TorchFunctionMode):
    """Has PyTorch's convolutions computed by maxconv while a module's ``forward`` runs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.static = Forward.of(module)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rank = RANKS.get(func)
        if rank is not None:
            return self._convolve(rank, *args, **kwargs)
        rank = TRANSPOSED_RANKS.get(func)
        if rank is not None:
            return self._convolve_transposed(rank, *args, **kwargs)
        return (
            func(*args, **kwargs) if self.static is None else self.static.call(func, args, kwargs)
        )

    def __exit__(self, *raised: Any) -> None:
        leave: Any = super().__exit__
        leave(*raised)
        if self.static is not None:
            self.static.end()

    def _convolve(
        self,
        rank: int,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        arguments = read(rank, stride, padding, dilation, groups, None, 1.0, None, None, None)
        return convolve(
            input,
            weight,
            bias,
            None,
            None,
            arguments,
            constant=self._own(weight, bias),
            channels_last=self._format(input, rank),
        )

    def _convolve_transposed(
        self,
        rank: int,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Tensor:
        return convolve_transposed(
            input,
            weight,
            bias,
            output_padding,
            read_transposed(rank, stride, padding, dilation, groups, None, None),
            constant=self._own(weight, bias),
            channels_last=self._format(input, rank),
        )

    def _own(self, weight: Tensor, bias: Tensor | None) -> bool:
        own, static = (self.module.weight, self.module.bias, None), self.static
        return all(
            any(tensor is value for value in own)
            or (static is not None and static.is_static(tensor))
            for tensor in (weight, bias)
        )

    def _format(self, input: Tensor, rank: int) -> bool | None:
        return wanted_format(cast(str, self.module.channels_last), input, rank)


class Redirected(nn.Module):
    """What the class of such a module has in front of its own base class."""

    channels_last: str = ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the base class computes."""
        forward: Any = super().forward
        with _Redirection(self):
            return forward(*args, **kwargs)

    def train(self: _Self, mode: bool = True) -> _Self:
        """Sets eval mode.

        Raises:
            RuntimeError: ``mode`` is true.
        """
        refuse_training(mode)
        return super().train(mode)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the base class by its name; this class has none."""
        return _made, (type(self).__mro__[2],), self.__dict__


def _made(base: type[nn.Module]) -> nn.Module:
    kind = _class(cast(Any, base))
    return kind.__new__(kind)


@cache
def _class(base: Any) -> type[nn.Module]:
    return type(base.__name__, (Redirected, base), {"__module__": base.__module__})


def redirect(conv: nn.Module) -> None:
    """Has the convolutions in a module's ``forward`` computed by maxconv."""
    conv.__class__ = _class(cast(Any, type(conv)))
