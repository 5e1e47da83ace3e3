"""``convert``: puts maxconv's convolutions into a PyTorch model."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from ._fuse import fuse
from ._modules import _Conv
from ._report import ConversionReport, Left, Replaced, Untraced
from ._sites import refusal, replacement
from ._tracing import is_block, trace

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
        model = copy.deepcopy(module)
        for parameter in model.parameters():
            if not is_lazy(parameter):
                parameter.requires_grad_(False)
        converter = _Converter(channels_last)
        return converter.convert(model, "", traceable=True), converter.report


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
            made = trace(module)
            if made.graph is not None:
                self.report.traced.append(name or "(model)")
                fuse(made.graph, f"{name}." if name else "", self.channels_last, self.report)
                return made.graph
            self.report.untraced.append(Untraced(name or "(model)", made.reason))
        # Not named_children(), which leaves out a module's second name.
        for child_name, child in list(module._modules.items()):
            if child is None:
                continue
            path = f"{name}.{child_name}" if name else child_name
            new = self.convert(child, path, traceable=is_block(child))
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
