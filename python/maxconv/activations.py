"""Activation functions of the kernels' epilogue.

An argument ``activation=`` takes a name (``"relu"``), or one of these where it has parameters::

    maxconv.conv2d(x, w, activation=leaky_relu(0.2))
    maxconv.conv2d(x, w, activation=clamp(0, 6))

``None`` is no activation. They are computed in float32, before the one rounding to the output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ._fields import Activation

__all__ = ["NAMES", "NONE", "ActivationLike", "ActivationSpec", "clamp", "leaky_relu", "parse"]


@dataclass(frozen=True)
class ActivationSpec:
    """An activation and its two parameters, as the kernels read them.

    ``CLAMP`` reads ``(min, max)``, ``LEAKY_RELU`` reads ``(slope, unused)``, the others read none.

    Raises:
        TypeError: ``kind`` is no ``Activation``, or a parameter is no number.
        ValueError: A parameter is NaN, or a clamp's minimum is above its maximum.
    """

    kind: Activation
    p0: float = 0.0
    p1: float = 0.0

    def __post_init__(self) -> None:
        """Checks and normalizes the fields."""
        if not isinstance(self.kind, Activation):
            raise TypeError(f"activation: {self.kind!r} is not a maxconv activation code")
        for name in ("p0", "p1"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(
                    f"activation: parameter {value!r} is a {type(value).__name__}; a number is "
                    "allowed"
                )
            if math.isnan(value):
                raise ValueError("activation: a parameter is nan; a number is needed")
            object.__setattr__(self, name, float(value))
        if self.kind is Activation.CLAMP and self.p0 > self.p1:
            raise ValueError(
                f"activation: clamp({self.p0}, {self.p1}) is empty; the minimum must not be above "
                "the maximum"
            )

    @property
    def parameters(self) -> tuple[float, float]:
        """``(p0, p1)``."""
        return self.p0, self.p1


#: What an ``activation`` argument may be; a tuple is ``("leaky_relu", slope)`` or
#: ``("clamp", min, max)``.
ActivationLike: TypeAlias = "str | ActivationSpec | tuple[str | float, ...] | None"

#: No activation.
NONE = ActivationSpec(Activation.NONE)

#: Activations that a name alone can ask for.
NAMES: Mapping[str, ActivationSpec] = {
    "relu": ActivationSpec(Activation.RELU),
    "relu6": ActivationSpec(Activation.CLAMP, 0.0, 6.0),
    "leaky_relu": ActivationSpec(Activation.LEAKY_RELU, 0.01),
    "sigmoid": ActivationSpec(Activation.SIGMOID),
    "silu": ActivationSpec(Activation.SILU),
    "hard_swish": ActivationSpec(Activation.HARD_SWISH),
    "hardswish": ActivationSpec(Activation.HARD_SWISH),
    "hard_sigmoid": ActivationSpec(Activation.HARD_SIGMOID),
    "hardsigmoid": ActivationSpec(Activation.HARD_SIGMOID),
    "gelu": ActivationSpec(Activation.GELU),
    "gelu_tanh": ActivationSpec(Activation.GELU_TANH),
    "tanh": ActivationSpec(Activation.TANH),
}


def clamp(minimum: float, maximum: float) -> ActivationSpec:
    """Returns ``min(max(x, minimum), maximum)``; infinities leave a side open.

    Raises:
        TypeError: A bound is no number.
        ValueError: A bound is NaN, or ``minimum`` is above ``maximum``.
    """
    return ActivationSpec(Activation.CLAMP, minimum, maximum)


def leaky_relu(slope: float = 0.01) -> ActivationSpec:
    """Returns ``x`` where it is positive and ``slope * x`` elsewhere.

    Raises:
        TypeError: ``slope`` is no number.
        ValueError: ``slope`` is NaN.
    """
    return ActivationSpec(Activation.LEAKY_RELU, slope)


def parse(name: str, value: object) -> ActivationSpec:
    """Returns the activation that an argument stands for.

    Args:
        name: The argument's name, for messages.
        value: An ``ActivationLike``.

    Raises:
        TypeError: ``value`` is of another type.
        ValueError: An unknown name, or wrong parameters.
    """
    if value is None:
        return NONE
    if isinstance(value, ActivationSpec):
        return value
    allowed = f"{', '.join(NAMES)}, clamp(min, max), leaky_relu(slope) and None are allowed"
    if isinstance(value, str):
        if value in NAMES:
            return NAMES[value]
        raise ValueError(f"{name}: {value!r} is not an activation; {allowed}")
    if isinstance(value, tuple) and value and isinstance(value[0], str):
        kind, *parameters = value
        if kind == "clamp" and len(parameters) == 2:
            return clamp(*parameters)
        if kind == "leaky_relu" and len(parameters) == 1:
            return leaky_relu(*parameters)
        if kind in NAMES and not parameters:
            return NAMES[kind]
        raise ValueError(f"{name}: {value!r} is not an activation; {allowed}")
    raise TypeError(f"{name}: {value!r} is a {type(value).__name__}; {allowed}")
