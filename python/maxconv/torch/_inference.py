"""What the modules of convolutions and of transposed convolutions share."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar, cast

from torch import nn
from torch.nn.modules.conv import _ConvNd

from ..activations import ActivationSpec
from ._filters import OPERANDS

__all__ = ["Inference", "refuse_training"]

_Self = TypeVar("_Self", bound="Inference")


def refuse_training(mode: bool) -> None:
    """Raises an error if ``mode`` is true, for a module that ``convert`` made."""
    if mode:
        raise RuntimeError(
            f"mode: {mode} is not supported by what maxconv.torch.convert has made, which is for "
            "inference; False is allowed. Train the original model, call its eval(), and convert "
            "it again"
        )


class Inference:
    """Stands in front of ``torch.nn``'s class in a module for inference."""

    rank: ClassVar[int]
    """Spatial dimensions."""
    _base: ClassVar[type[_ConvNd]]

    #: As the argument of ``maxconv.torch.conv2d``.
    precision: str | None = None

    #: Whether ``convert`` put it in the place of a module that can be trained.
    converted: bool = False

    #: When the output is channels last: ``"always"``, or where the ``"input"`` is, whatever the
    #: weight is; otherwise PyTorch's rule holds.
    channels_last: str = ""

    @classmethod
    def _like(cls: type[_Self], conv: _ConvNd, **others: Any) -> _Self:
        """Returns a module with the geometry and the memory of ``conv``'s, without a gradient.

        Args:
            conv: Of the class that this class stands for.
            others: Further arguments of the constructor.

        Raises:
            TypeError: ``conv`` is of another class.
        """
        if not isinstance(conv, cls._base):
            raise TypeError(f"conv: a {type(conv).__name__} is not a {cls._base.__name__}")
        module: Any = cast(Any, cls)(
            in_channels=conv.in_channels,
            out_channels=conv.out_channels,
            kernel_size=conv.kernel_size,
            stride=conv.stride,
            padding=conv.padding,
            dilation=conv.dilation,
            groups=conv.groups,
            bias=conv.bias is not None,
            padding_mode=conv.padding_mode,
            device="meta",
            dtype=conv.weight.dtype,
            **others,
        )
        module.weight = nn.Parameter(conv.weight.detach(), requires_grad=False)
        if conv.bias is not None:
            module.bias = nn.Parameter(conv.bias.detach(), requires_grad=False)
        return cast(_Self, module.train(conv.training))

    def train(self: _Self, mode: bool = True) -> _Self:
        """Sets the mode, which changes nothing.

        Raises:
            RuntimeError: ``mode`` is true, and ``convert`` made the module.
        """
        if self.converted:
            refuse_training(mode)
        return cast(_Self, cast(Any, super()).train(mode))

    def repack(self) -> None:
        """Forgets what was derived from weight and bias; the next call makes it anew.

        Needed only after a write that PyTorch does not count: through ``weight.data``, or through a
        numpy array that shares the memory.
        """
        module = cast(_ConvNd, self)
        OPERANDS.forget(module.weight)
        if module.bias is not None:
            OPERANDS.forget(module.bias)

    def extra_repr(self) -> str:
        """The constructor's arguments, as ``nn.ConvNd`` writes them."""
        parts = [str(cast(Any, super()).extra_repr())]
        for name in ("activation", "final_activation"):
            spec: ActivationSpec | None = getattr(self, name, None)
            if spec is not None and spec.kind:
                parts.append(f"{name}={spec.kind.name.lower()}")
        if self.precision is not None:
            parts.append(f"precision={self.precision}")
        return ", ".join(parts)
