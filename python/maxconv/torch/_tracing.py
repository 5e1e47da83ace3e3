"""Traces a module with ``torch.fx``, or says why that would not tell what the module does."""

from __future__ import annotations

import inspect
import operator
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.fx import GraphModule, Node, Proxy

from ._modules import _Conv

__all__ = ["has_hooks", "in_place", "is_block", "trace"]


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody watches or changes what goes in or out of a module."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def in_place(name: str, left: Any, right: Any) -> Any:
    """Returns ``left`` after ``left += right``, or what ``name`` of module ``operator`` does.

    A call in a traced model: what ``torch.fx`` makes of ``+=`` itself is ``+``, which has another
    dtype and does not change what other names stand for.
    """
    return getattr(operator, name)(left, right)


def _recorded(name: str) -> Callable[[Proxy, object], Proxy]:
    def record(self: Proxy, other: object) -> Proxy:
        return self.tracer.create_proxy("call_function", in_place, (name, self, other), {})

    return record


class _Proxy(Proxy):
    """A proxy that records assignments such as ``+=`` as what they are."""


for _name in (
    *("iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow"),
    *("irshift", "isub", "itruediv", "ixor"),
):
    setattr(_Proxy, f"__{_name}__", _recorded(_name))


class _Tracer(fx.Tracer):
    """Leaves PyTorch's modules and maxconv's whole; sees what is done to buffers."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a call of a module is one node."""
        return isinstance(m, _Conv) or super().is_leaf_module(m, module_qualified_name)

    def proxy(self, node: Node) -> Proxy:
        """Returns the proxy of a node."""
        return _Proxy(node, self)


def is_block(module: nn.Module) -> bool:
    """Whether callers can only call a module: it has no methods but ``forward``, nor hooks.

    PyTorch's containers are looped over and indexed by whoever has them, so they are no blocks.
    """
    if type(module).__module__.startswith("torch.") or has_hooks(module):
        return False
    methods = {
        name
        for base in type(module).__mro__
        if base is not object and not base.__module__.startswith("torch.")
        for name, value in vars(base).items()
        if not name.startswith("_") and (callable(value) or hasattr(value, "__get__"))
    }
    return methods <= {"forward"} | set(vars(nn.Module))


def trace(module: nn.Module) -> GraphModule | str:
    """Returns a module as a graph that shares its parameters, or why it is none."""
    for name, parameter in inspect.signature(module.forward).parameters.items():
        # Whether it is None would be decided while tracing, where nothing is.
        if parameter.default is None:
            return f"forward does something else without its optional argument {name!r}"
    for name, part in module.named_modules():
        if has_hooks(part) and not type(part).__module__.startswith("torch."):
            return f"{name or 'the module itself'} has forward hooks"
    states = torch.get_rng_state(), random.getstate()
    tracer = _Tracer()
    try:
        graph = tracer.trace(module)
        drawn = not torch.equal(states[0], torch.get_rng_state()) or states[1] != random.getstate()
    except Exception as error:  # Tracing runs the model's own code, which may raise anything.
        text = str(error).strip().splitlines()
        return f"torch.fx: {text[0] if text else type(error).__name__}"
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
    if drawn:
        return "forward draws random numbers, which a trace would hold as constants"
    traced = GraphModule(tracer.root, graph, type(module).__name__)
    for name, part in traced.named_modules():
        # Tracing makes empty modules for what only holds others.
        part.training = module.get_submodule(name).training
    _copy_attributes(module, traced)
    return traced


def _copy_attributes(source: nn.Module, target: nn.Module) -> None:
    """Gives a traced module what others may read of the original, its class's constants too."""
    for owner in (*reversed(type(source).__mro__), source):
        for name, value in vars(owner).items():
            plain = not callable(value) and not hasattr(value, "__get__")
            if not name.startswith("_") and plain and name not in dir(nn.Module):
                setattr(target, name, value)
