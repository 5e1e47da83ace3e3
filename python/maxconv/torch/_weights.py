"""Copies a model, and makes the weights of its convolutions plain parameters."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

__all__ = ["copied", "last_in_memory", "materialize", "why_computed"]


def copied(module: nn.Module) -> nn.Module:
    """Returns a copy of a model, for inference: no parameter requires grad."""
    # What a hook computed is no leaf of autograd, which deepcopy refuses.
    memo: dict[int, Any] = {
        id(value): value.detach().clone()
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    model = copy.deepcopy(module, memo)
    for parameter in model.parameters():
        if not is_lazy(parameter):
            parameter.requires_grad_(False)
    return model


def materialize(conv: nn.Module) -> None:
    """Makes a parameter of each tensor that is computed from others in every call, if that is so.

    Weight normalization, spectral normalization, pruning and other parametrizations, old and new.
    """
    for hook in list(conv._forward_pre_hooks.values()):
        if isinstance(hook, WeightNorm):
            remove_weight_norm(conv, hook.name)
        elif isinstance(hook, SpectralNorm) and not conv.training:
            remove_spectral_norm(conv, hook.name)
        elif isinstance(hook, prune.BasePruningMethod):
            cast(Any, prune).remove(conv, hook._tensor_name)
    if not parametrize.is_parametrized(conv) or not _is_constant(conv):
        return
    # The class has properties for the tensors, which are removed; the original shares it.
    shared: Any = type(conv)
    conv.__class__ = type(shared.__name__, shared.__bases__, dict(vars(shared)))
    for name in _parametrized(conv):
        parametrize.remove_parametrizations(conv, name, leave_parametrized=True)
        value = getattr(conv, name)
        if not isinstance(value, nn.Parameter):
            delattr(conv, name)
            conv.register_parameter(name, nn.Parameter(value, requires_grad=False))


def why_computed(conv: nn.Module) -> str:
    """Returns why a weight is still computed in every call, and nothing if it is not."""
    if any(isinstance(hook, SpectralNorm) for hook in conv._forward_pre_hooks.values()):
        return "its spectral norm changes in training mode; call eval() first"
    if parametrize.is_parametrized(conv):
        return "its parametrization gives another weight in every call"
    return ""


def _parametrized(conv: nn.Module) -> list[str]:
    """Returns the names of the tensors that have parametrizations."""
    return list(cast(Any, conv).parametrizations)


def _is_constant(conv: nn.Module) -> bool:
    """Whether parametrizations give the same each time, and change nothing."""
    names = _parametrized(conv)
    before, drawn = copy.deepcopy(conv.state_dict()), torch.get_rng_state()
    first, second = ([getattr(conv, name).clone() for name in names] for _ in range(2))
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    same = same and torch.equal(drawn, torch.get_rng_state())
    torch.set_rng_state(drawn)
    for key, value in conv.state_dict().items():
        same = same and torch.equal(value, before[key])
        value.copy_(before[key])
    return same


def last_in_memory(tensor: Tensor) -> Tensor:
    """Returns the same values with dimension 1 innermost in memory."""
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
