"""Refuses a checkpoint of the original model, which a converted one would read as its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

__all__ = ["guard", "guard_integers", "guard_model", "mark_normalized"]

#: The buffer that says that weight and bias have a normalization in them.
_MARK: Final = "normalized"


def mark_normalized(conv: nn.Module) -> None:
    """Marks that weight and bias have a normalization in them; a state without the mark is refused.

    The mark is a buffer, so that the state of a converted model has it.
    """
    device = next(conv.parameters()).device
    conv.register_buffer(_MARK, torch.ones((), dtype=torch.uint8, device=device))


def guard(conv: nn.Module) -> None:
    """Has a module refuse to train, and the state of the one whose place it took if it differs."""
    module: Any = conv
    module.converted = True
    module._register_load_state_dict_pre_hook(_check, with_module=True)


def _check(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    given = {key[len(prefix) :] for key in state if key.startswith(prefix)}
    # Such as a norm and a direction, of which the weight was computed.
    unknown = given - {"weight", "bias", _MARK}
    if hasattr(module, _MARK) and given and _MARK not in given:
        unknown |= given
    if unknown:
        raise _refusal(f"{prefix}{min(unknown)}")


def guard_integers(conv: nn.Module) -> None:
    """Has a module with an int8 weight refuse another's, which PyTorch would round to integers."""
    register: Any = conv._register_load_state_dict_pre_hook
    register(_check_integers, with_module=True)


def _check_integers(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    weight = state.get(f"{prefix}weight")
    if weight is not None and weight.dtype != torch.int8:
        raise RuntimeError(
            f"{prefix}weight is {weight.dtype}, of the model before maxconv.torch.quantize, not "
            "torch.int8; load the checkpoint into that model, and quantize it again"
        )


def guard_model(model: nn.Module, keys: set[str]) -> None:
    """Has a model refuse any state with one of ``keys``, which conversion took from it."""
    register: Any = model._register_load_state_dict_pre_hook
    register(_Gone(frozenset(keys)))


@dataclass(frozen=True)
class _Gone:
    """A hook: names alone would be ignored by ``strict=False``."""

    keys: frozenset[str]

    def __call__(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        found = sorted(key for key in state if key[len(prefix) :] in self.keys)
        if found:
            raise _refusal(found[0])


def _refusal(key: str) -> RuntimeError:
    # Raised by a hook, before PyTorch loads what is right in a state, and what is not.
    return RuntimeError(
        f"{key} is of the model before maxconv.torch.convert; load the checkpoint into that model, "
        "and convert it again"
    )
