"""``convert``: puts maxconv's convolutions into a PyTorch model."""

from __future__ import annotations

import copy
import inspect
import random

import torch
from torch import fx, nn
from torch.nn.modules.conv import _ConvNd

from ._fuse import fuse
from ._patterns import has_hooks
from ._sites import refusal, replacement
from .modules import _Conv
from .report import ConversionReport, Left, Replaced, Untraced

__all__ = ["convert"]


def convert(module: nn.Module, *, channels_last: bool = True) -> tuple[nn.Module, ConversionReport]:
    """Returns a copy of a model that convolves with maxconv, and a report of what was done.

    Where ``torch.fx`` can trace the model, each convolution takes along what follows it: a
    normalization (in eval mode; folded into weight and bias), an activation, the addition of a
    residual, another activation. The result is then a ``torch.fx.GraphModule`` with the model's
    ``forward`` and attributes, but none of its other methods. Where it cannot (``forward`` branches
    on values, has an argument that defaults to ``None``, or draws random numbers), its children are
    tried in its stead, and single convolutions are replaced in place.

    The copy is for inference: none of its parameters requires grad, and a normalization that was
    folded stays as it was.

    Args:
        module: The model; it is not changed. Call its ``eval()`` first.
        channels_last: Whether convolutions of traced parts return channels-last tensors whatever
            they get, so that a network converts its input once. A ``view`` that this would break
            becomes a ``reshape``. Otherwise, and in parts that are not traced, the memory format
            follows input and weight, as in PyTorch.

    Returns:
        The model and a ``ConversionReport``, whose ``str`` is a table.

    Raises:
        TypeError: ``module`` is not an ``nn.Module``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: a {type(module).__name__} is not a torch.nn.Module")
    # Parameters made under inference_mode have no version: their packed copies could not be kept.
    with torch.inference_mode(False), torch.no_grad():
        model = copy.deepcopy(module).requires_grad_(False)
        converter = _Converter(channels_last)
        return converter.convert(model, "", traceable=True), converter.report


class _Tracer(fx.Tracer):
    """Leaves PyTorch's modules and maxconv's whole; sees what is done to buffers."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a call of a module is one node."""
        return isinstance(m, _Conv) or super().is_leaf_module(m, module_qualified_name)


class _Converter:
    def __init__(self, channels_last: bool) -> None:
        self.channels_last = channels_last
        self.report = ConversionReport()
        self.done: dict[nn.Module, nn.Module] = {}

    def convert(self, module: nn.Module, name: str, *, traceable: bool) -> nn.Module:
        """Returns what takes a module's place; the module itself where only parts change.

        ``traceable`` says whether a traced copy would do for whoever calls the module.
        """
        if module not in self.done:
            self.done[module] = self._convert(module, name, traceable)
        return self.done[module]

    def _convert(self, module: nn.Module, name: str, traceable: bool) -> nn.Module:
        if isinstance(module, _Conv):
            return module
        if isinstance(module, _ConvNd):
            return self._convert_single(module, name)
        if name and not any(isinstance(part, _ConvNd) for part in module.modules()):
            return module
        if traceable:
            traced = _trace(module)
            if isinstance(traced, fx.GraphModule):
                self.report.traced.append(name or "(model)")
                fuse(traced, f"{name}." if name else "", self.channels_last, self.report)
                return traced
            self.report.untraced.append(Untraced(name or "(model)", traced))
        # Not named_children(), which leaves out a module's second name.
        for child_name, child in list(module._modules.items()):
            if child is None:
                continue
            path = f"{name}.{child_name}" if name else child_name
            new = self.convert(child, path, traceable=_is_block(child))
            if new is not child:
                setattr(module, child_name, new)
        return module

    def _convert_single(self, conv: _ConvNd, name: str) -> nn.Module:
        kind = type(conv).__name__
        if reason := refusal(conv):
            self.report.left.append(Left(name or "(model)", kind, reason))
            return conv
        self.report.replaced.append(Replaced(name or "(model)", kind))
        return replacement(conv)


def _is_block(module: nn.Module) -> bool:
    """Whether callers can only call a module: it has no methods but ``forward``, nor hooks.

    Containers are looped over and indexed by whoever has them, so they are no blocks.
    """
    if type(module).__module__.startswith("torch.") or has_hooks(module):
        return False
    own: set[str] = set()
    for base in type(module).__mro__:
        if base.__module__.startswith("torch.") or base is object:
            continue
        own |= {attribute for attribute in vars(base) if not attribute.startswith("_")}
    return own <= {"forward"} | set(vars(nn.Module))


def _trace(module: nn.Module) -> fx.GraphModule | str:
    """Returns a module as a graph, or why it is none."""
    for name, parameter in inspect.signature(module.forward).parameters.items():
        if parameter.default is None:
            return f"forward does something else without its optional argument {name!r}"
    for name, part in module.named_modules():
        if has_hooks(part) and not type(part).__module__.startswith("torch."):
            return f"{name or 'the module itself'} has forward hooks"
    tracer = _Tracer()
    states = torch.get_rng_state(), random.getstate()
    try:
        graph = tracer.trace(module)
    except Exception as error:  # Tracing runs the model's own code, which may raise anything.
        text = str(error).strip().splitlines()
        return f"torch.fx: {text[0] if text else type(error).__name__}"
    finally:
        drawn = not torch.equal(states[0], torch.get_rng_state()) or states[1] != random.getstate()
        torch.set_rng_state(states[0])
        random.setstate(states[1])
    if drawn:
        return "forward draws random numbers, which a trace would hold as constants"
    traced = fx.GraphModule(tracer.root, graph, type(module).__name__)
    for name, part in traced.named_modules():
        # Tracing makes empty modules for what only holds others.
        part.training = module.get_submodule(name).training
    # What others may read of the original.
    for name, value in vars(module).items():
        if not name.startswith("_") and name not in vars(traced):
            setattr(traced, name, value)
    return traced
