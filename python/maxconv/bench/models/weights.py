"""Draws weights and statistics with which a model's outputs depend on all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..resnet import randomize

__all__ = ["draw", "tensors"]

#: How much the outputs of two inputs must differ, as a share of the largest output.
LEAST_DIFFERENCE = 1e-3


def draw(
    model: nn.Module,
    inputs: Callable[[int], Sequence[Tensor]],
    place: str = "cpu",
    seed: int = 0,
) -> None:
    """Draws a model's weights in place, and its BatchNorm statistics for them.

    Constructors leave much that hides errors: normalizations that do nothing, biases of zero, layer
    scales of 1e-6, and statistics that are not those of any activation. Here convolutions and
    linear layers are drawn so that activations keep their magnitude, and parameters whose elements
    are all equal get different ones. Each BatchNorm then gets the mean and variance of what reaches
    it, moved by up to a fifth of a standard deviation and by half: as after training, its output is
    of about one, and it is no identity.

    Args:
        model: In eval mode, on the CPU: the same weights on every device.
        inputs: Returns the inputs of a batch.
        place: Where the model goes, and runs to find its statistics.
        seed: Of the draws.

    Raises:
        ValueError: The outputs are not finite, or hardly depend on the input.
    """
    with torch.no_grad():
        randomize(model, seed)
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            _spread(parameter, generator)
        model.to(place)
        hooks = [
            module.register_forward_pre_hook(_measure(generator))
            for module in model.modules()
            if isinstance(module, _BatchNorm) and module.running_mean is not None
        ]
        model(*inputs(2))
        for hook in hooks:
            hook.remove()
        _check(tensors(model(*inputs(2))))


def _spread(parameter: Tensor, generator: torch.Generator) -> None:
    """Draws a parameter whose elements are all equal."""
    if parameter.numel() < 2 or not parameter.is_floating_point():
        return
    value = float(parameter.flatten()[0])
    if bool((parameter == value).all()):
        low, high = (-0.1, 0.1) if abs(value) < 0.01 else sorted((0.5 * value, 1.5 * value))
        drawn = torch.empty(parameter.shape).uniform_(low, high, generator=generator)
        parameter.copy_(drawn)


def _measure(generator: torch.Generator) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """Returns a hook that gives a BatchNorm the statistics of its input, a little moved."""

    def hook(norm: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(norm, _BatchNorm)
        x = arguments[0]
        axes = [axis for axis in range(x.dim()) if axis != 1]
        variance, mean = torch.var_mean(x, axes, correction=0)
        # A channel that hardly varies, as behind a pooling of noise, would amplify rounding errors.
        variance = torch.maximum(variance, 0.1 * mean.square() + 0.1 * variance.mean() + 1e-6)
        moves = torch.rand((2, mean.numel()), generator=generator).to(mean) - 0.5
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.copy_(mean + 0.4 * moves[0] * variance.sqrt())
        norm.running_var.copy_(variance * (1 + moves[1]))

    return hook


def _check(outputs: Sequence[Tensor]) -> None:
    largest = max((float(output.abs().max()) for output in outputs), default=0.0)
    if not outputs or not all(bool(output.isfinite().all()) for output in outputs):
        raise ValueError("with random weights its outputs are not finite")
    differing = max(float((output[0] - output[1]).abs().max()) for output in outputs)
    if differing <= LEAST_DIFFERENCE * largest:
        raise ValueError("with random weights its outputs hardly depend on the input")


def tensors(output: Any) -> list[Tensor]:
    """Returns the floating-point tensors of what a model returns, in order."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [tensor for part in output for tensor in tensors(part)]
    return []
