"""The epilogue's activations in PyTorch's words, for what is left outside of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from .._fields import Activation
from ..activations import NAMES, ActivationSpec

__all__ = ["apply", "as_argument"]

_PLAIN: Final[dict[Activation, Callable[[Tensor], Tensor]]] = {
    Activation.RELU: torch.relu,
    Activation.SIGMOID: torch.sigmoid,
    Activation.SILU: functional.silu,
    Activation.HARD_SWISH: functional.hardswish,
    Activation.HARD_SIGMOID: functional.hardsigmoid,
    Activation.GELU: functional.gelu,
    Activation.TANH: torch.tanh,
}


def apply(spec: ActivationSpec, tensor: Tensor) -> Tensor:
    """Returns an activation of a tensor, computed by PyTorch."""
    if spec.kind is Activation.NONE:
        return tensor
    if spec.kind is Activation.CLAMP:
        return torch.clamp(tensor, spec.p0, spec.p1)
    if spec.kind is Activation.LEAKY_RELU:
        return functional.leaky_relu(tensor, spec.p0)
    if spec.kind is Activation.GELU_TANH:
        return functional.gelu(tensor, approximate="tanh")
    return _PLAIN[spec.kind](tensor)


def as_argument(spec: ActivationSpec) -> str | tuple[str | float, ...]:
    """Returns an activation in a form that generated code can hold."""
    for name, known in NAMES.items():
        if known == spec:
            return name
    parameters = spec.parameters if spec.kind is Activation.CLAMP else spec.parameters[:1]
    return (spec.kind.name.lower(), *parameters)
