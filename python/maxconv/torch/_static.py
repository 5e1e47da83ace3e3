"""What a module's own ``forward`` computes from its parameters, kept until one of them changes.

Where such a ``forward`` cannot be traced, its computations show call by call only.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ._filters import state_of
from ._functional import is_watched

__all__ = ["Forward", "forget"]

#: PyTorch's functions and methods, by name, whose results depend on their arguments alone.
_PURE: Final = frozenset(
    (
        *("abs", "add", "amax", "amin", "clamp", "contiguous", "div", "divide", "exp", "expand"),
        *("expand_as", "flatten", "flip", "linalg_norm", "mean", "mul", "multiply", "neg", "norm"),
        *("normalize", "permute", "pow", "reciprocal", "repeat", "reshape", "reshape_as", "rsqrt"),
        *("sqrt", "square", "squeeze", "std", "std_mean", "sub", "subtract", "sum", "t", "tanh"),
        *("transpose", "true_divide", "unsqueeze", "var", "var_mean", "view", "view_as"),
        *("__add__", "__getitem__", "__mul__", "__neg__", "__pow__", "__radd__", "__rmul__"),
        *("__rsub__", "__rtruediv__", "__sub__", "__truediv__", "layer_norm"),
    )
)


@dataclass
class _Memory:
    """Results of calls, and the tensors that they are computed from, as these were then."""

    own: list[Tensor]
    state: Any
    results: dict[Any, Any] = field(default_factory=dict)

    def holds_for(self, own: Sequence[Tensor], state: Any) -> bool:
        return (
            len(own) == len(self.own)
            and all(map(operator.is_, own, self.own))
            and self.state == state
        )


_MEMORIES: Final[weakref.WeakKeyDictionary[nn.Module, _Memory]] = weakref.WeakKeyDictionary()

#: Modules that write to their tensors, or to what they compute from them.
_WRITERS: Final[weakref.WeakSet[nn.Module]] = weakref.WeakSet()


def forget(module: nn.Module) -> None:
    """Drops what a module has computed; its next call makes it anew."""
    _MEMORIES.pop(module, None)


class Forward:
    """One call of a module's ``forward``, of whose steps some are known from earlier calls.

    What the call computes itself is kept when it ends: until then, it may write to that.
    """

    def __init__(self, module: nn.Module, own: list[Tensor], state: Any) -> None:
        self._module = module
        memory = _MEMORIES.get(module)
        if memory is None or not memory.holds_for(own, state):
            memory = _Memory(own, state)
        self._memory = memory
        self._new: dict[Any, Any] = {}
        self._static = {id(tensor): tensor for tensor in own}
        self._writes = False

    @classmethod
    def of(cls, module: nn.Module) -> Forward | None:
        """Returns a call that begins; ``None`` if it has to compute everything.

        On GPUs it has to: a CUDA graph or another stream could read what is kept after that has
        gone. Under autocast, functions compute other things.
        """
        if module in _WRITERS or is_watched() or torch.is_autocast_enabled("cpu"):
            return None
        tensors = [*module._parameters.values(), *module._buffers.values()]
        own = [tensor for tensor in tensors if tensor is not None]
        if any(
            type(tensor) not in (Tensor, nn.Parameter)
            or tensor.device.type != "cpu"
            or tensor.requires_grad
            for tensor in own
        ):
            return None
        state = state_of(own)
        return None if state is None else cls(module, own, state)

    def call(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns what a function of PyTorch's returns, from an earlier call if there is one."""
        if not any(self.is_static(value) for value in (*args, *kwargs.values())):
            return function(*args, **kwargs)
        name = str(getattr(function, "__name__", ""))
        self._writes |= _writes(name, kwargs)
        pure = _is_pure(function, name, args)
        key = self._key((function, args, *sorted(kwargs.items()))) if pure else None
        if key is None:
            return function(*args, **kwargs)
        result = self._memory.results.get(key, self._new.get(key))
        if result is None:
            # Under inference_mode it would have no version, and could not be packed once.
            with torch.inference_mode(False), torch.no_grad():
                result = self._new[key] = function(*args, **kwargs)
        for tensor in result if isinstance(result, tuple) else (result,):
            self._static[id(tensor)] = tensor
        return result

    def is_static(self, value: object) -> bool:
        """Whether a value is one of the module's tensors, or computed from them alone."""
        return id(value) in self._static

    def end(self) -> None:
        """Keeps what was computed, unless the module has written to any of it."""
        if self._writes:
            _WRITERS.add(self._module)
            _MEMORIES.pop(self._module, None)
        elif self._new:
            self._memory.results |= self._new
            _MEMORIES[self._module] = self._memory

    def _key(self, value: object) -> Any:
        """Returns what tells a call's arguments apart; ``None`` if nothing does."""
        if isinstance(value, tuple | list):
            parts = [self._key(entry) for entry in value]
            return None if None in parts else (type(value), *parts)
        if isinstance(value, Tensor):
            return ("tensor", id(value)) if self.is_static(value) else None
        # True is 1, and 1 is 1.0, but not as an argument.
        return (type(value), value) if type(value).__hash__ is not None else None


def _is_pure(function: Any, name: str, args: tuple[Any, ...]) -> bool:
    if function is functional.batch_norm:
        # It writes to running statistics.
        return len(args) > 2 and args[1] is None and args[2] is None
    owner = str(getattr(function, "__module__", None) or "torch").split(".")[0]
    return owner == "torch" and name in _PURE


def _writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    if "out" in kwargs or kwargs.get("inplace"):
        return True
    if name.startswith("__"):
        return name == "__setitem__" or name in _IN_PLACE
    return name.endswith("_")


_IN_PLACE: Final = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "matmul")
)
