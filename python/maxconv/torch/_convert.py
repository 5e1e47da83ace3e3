"""``convert``: puts maxconv's convolutions into a PyTorch model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from ._arguments import is_channels_last
from ._fuse import fuse
from ._loading import guard, guard_model
from ._patterns import batch_norm, own_tensor
from ._pooling import pool_globally
from ._reading import called_convolutions, only_calls, reads_weights
from ._report import ConversionReport, Left, Replaced, Untraced
from ._sites import is_exact, is_own, refusal, replacement
from ._subclasses import Redirected, redirect
from ._tracing import is_block, trace
from ._untraced import keep_channels_last
from ._weights import copied, last_in_memory, materialize

__all__ = ["convert"]


def convert(module: nn.Module, *, channels_last: bool = True) -> tuple[nn.Module, ConversionReport]:
    """Returns a copy of a model that convolves with maxconv, and a report of what was done.

    Where ``torch.fx`` can trace a module, each convolution takes along what follows it: a
    normalization (in eval mode; folded into weight and bias), an activation, the addition of a
    residual, another activation. The result is then a ``torch.fx.GraphModule`` with the module's
    ``forward`` and attributes, but none of its other methods. A trace ends where the module asks
    something of a value that the graph would not ask again: whether it is true or ``None``, its
    type, its length. Then the module stays as it is, its children are tried in its stead, and
    single convolutions are replaced in place. A module that cannot be traced, in one that can, is
    called as a whole.

    Weights that are computed in every call (weight and spectral normalization, pruning, other
    parametrizations) are computed once. Subclasses of PyTorch's convolutions keep their
    ``forward``, in which maxconv's functions stand for PyTorch's. Means over all pixels become
    ``global_avg_pool``. In a model on a GPU group normalizations become ``group_norm``, where a
    trace shows them with the activations that follow.

    The copy is for inference: none of its parameters requires grad, and a normalization that was
    folded stays as it was. It refuses to train, and a checkpoint of the original model: load that
    before.

    Args:
        module: The model; it is not changed. Call its ``eval()`` first.
        channels_last: Whether convolutions of traced parts return channels-last tensors whatever
            they get, so that a network converts its input once. A ``view`` that this would break
            becomes a ``reshape``; modules that are not traced, and functions that PyTorch computes
            less exactly on channels-last tensors, get the format that they would have got. On a GPU
            the same holds of convolutions and group normalizations that are not traced, unless the
            code of ``forward`` around them may tell, as by a ``view``. If ``False``, formats are
            PyTorch's.

    Returns:
        The model and a ``ConversionReport``, whose ``str`` is a table.

    Raises:
        TypeError: ``module`` is not an ``nn.Module``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: a {type(module).__name__} is not a torch.nn.Module")
    # Parameters made under inference_mode have no version: their packed copies could not be kept.
    with torch.inference_mode(False), torch.no_grad():
        model = copied(module)
        converter = _Converter(model, channels_last)
        result = converter.convert(model, "", traceable=True)
        if channels_last:
            converter.order_weights(result)
            keep_channels_last(result)
        pool_globally(result)
        gone = set(module.state_dict()) - set(result.state_dict())
        if gone:
            guard_model(result, gone)
        return result, converter.report


class _Converter:
    def __init__(self, model: nn.Module, channels_last: bool) -> None:
        self.channels_last = channels_last
        self.report = ConversionReport()
        self.done: dict[nn.Module, nn.Module] = {}
        self.kinds = {type(part) for part in model.modules()}
        for part in model.modules():
            if isinstance(part, _ConvNd) and not is_own(part):
                materialize(part)

    def convert(self, module: nn.Module, name: str, *, traceable: bool) -> nn.Module:
        """Returns what takes a module's place; the module itself where only parts change.

        ``traceable`` says whether a traced copy would do for whoever calls the module.
        """
        if module not in self.done:
            self.done[module] = self._convert(module, name, traceable)
        return self.done[module]

    def _convert(self, module: nn.Module, name: str, traceable: bool) -> nn.Module:
        if is_own(module):
            return module
        if isinstance(module, torch.jit.ScriptModule):
            self._report_scripted(module, name)
            return module
        if isinstance(module, _ConvNd):
            return self._convert_single(module, name)
        if isinstance(module, _BatchNorm) and name:
            self._report_norm(module, name)
        if isinstance(module, torch._dynamo.OptimizedModule):
            why = "it is compiled; convert the model, and compile the result"
            self.report.left.append(Left(name or "(model)", type(module._orig_mod).__name__, why))
            return module
        if name and not _has_convolutions(module):
            return module
        if traceable:
            made = trace(module)
            if made.graph is not None:
                self.report.traced.append(name or "(model)")
                for part, reason in made.opaque.items():
                    self._convert_opaque(made.graph, part, reason, name)
                prefix = f"{name}." if name else ""
                fuse(made.graph, prefix, self.channels_last, not name, self.report)
                return made.graph
            self.report.untraced.append(Untraced(name or "(model)", made.reason))
        self._report_functions(module, name)
        # Not named_children(), which leaves out a module's second name.
        for child_name, child in list(module._modules.items()):
            if child is None:
                continue
            path = f"{name}.{child_name}" if name else child_name
            new = self.convert(child, path, traceable=self._is_called(module, child_name, child))
            if new is not child:
                setattr(module, child_name, new)
        return module

    def _is_called(self, owner: nn.Module, name: str, part: nn.Module) -> bool:
        """Whether a model does nothing with a part but call it."""
        if is_block(part):
            return True
        return type(part) is nn.Sequential and only_calls(self.kinds, type(owner), name)

    def _convert_opaque(
        self, graph: fx.GraphModule, part: nn.Module, reason: str, name: str
    ) -> None:
        """Converts a module that a traced one calls as a whole."""
        paths = [path for path, m in graph.named_modules(remove_duplicate=False) if m is part]
        for path in paths:
            # What is read of it besides would be looked for in its place.
            read = any(str(n.target).startswith(f"{path}.") for n in graph.graph.nodes)
            new = self.convert(part, f"{name}.{path}" if name else path, traceable=not read)
            if new is not part:
                owner, _, last = path.rpartition(".")
                setattr(graph.get_submodule(owner), last, new)

    def _convert_single(self, conv: _ConvNd, name: str) -> nn.Module:
        kind, where = type(conv).__name__, name or "(model)"
        if reason := refusal(conv):
            self.report.left.append(Left(where, kind, reason))
            return conv
        if is_exact(conv):
            own = replacement(conv)
            guard(own)
            self.report.replaced.append(Replaced(where, kind))
            return own
        cast(Any, conv).channels_last = "" if is_channels_last(conv.weight) else "input"
        redirect(conv)
        self.report.replaced.append(Replaced(where, kind, note="in its own forward"))
        return conv

    # What stays in PyTorch ----------------------------------------------------------------------

    def _report_functions(self, module: nn.Module, name: str) -> None:
        """Reports convolutions in the code of a module that stays as it is."""
        for function in called_convolutions(type(module)):
            why = f"a {type(module).__name__}, which cannot be traced, calls it"
            self.report.left.append(Left(name or "(model)", function, why))

    def _report_norm(self, norm: _BatchNorm, name: str) -> None:
        found = batch_norm(norm)
        why = found if isinstance(found, str) else "the module that calls it cannot be traced"
        self.report.left.append(Left(name, type(norm).__name__, why))

    def _report_scripted(self, module: torch.jit.ScriptModule, name: str) -> None:
        for kind in _scripted_convolutions(module.inlined_graph):
            why = "it is scripted: PyTorch's interpreter runs it"
            self.report.left.append(Left(name or "(model)", kind, why))

    # Weights ------------------------------------------------------------------------------------

    def order_weights(self, result: nn.Module) -> None:
        """Puts the weights of maxconv's modules into the order in memory that GPUs read."""
        graphs = [part for part in result.modules() if isinstance(part, fx.GraphModule)]
        read = {
            id(own_tensor(graph, node))
            for graph in graphs
            for node in graph.graph.nodes
            if node.op == "get_attr"
        }
        own = [part for part in result.modules() if is_own(part)]
        if reads_weights({type(part) for part in result.modules() if not is_own(part)}):
            return
        for part in own:
            weight: Any = part.weight
            if not isinstance(part, Redirected) and id(weight) not in read:
                weight.data = last_in_memory(weight.data)


def _has_convolutions(module: nn.Module) -> bool:
    return any(
        isinstance(part, _ConvNd | _BatchNorm | torch.jit.ScriptModule)
        or bool(called_convolutions(type(part)))
        for part in module.modules()
    )


def _scripted_convolutions(graph: Any) -> Iterator[str]:
    """Yields the convolutions of a scripted module's graph."""
    for node in graph.nodes():
        kind = str(node.kind()).removeprefix("aten::").removeprefix("_")
        if kind.startswith("conv") and not kind.startswith("convert"):
            yield kind
        for block in node.blocks():
            yield from _scripted_convolutions(block)
