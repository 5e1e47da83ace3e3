"""Keeps a traced model's tensors channels last where nobody can tell, and nowhere else.

A convolution that gives channels-last tensors whatever it gets changes strides, not values. Who
reads only values may have them. Others get what they would have got: modules that are not traced,
what asks for strides, and PyTorch's functions that are less exact on channels-last tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.fx import GraphModule, Node
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from ._arguments import wanted_format
from ._functional import is_plain_memory, is_watched
from ._norm import GroupNorm
from ._patterns import is_metadata, module_of, mutates
from ._reading import STRIDED
from ._reorder import channels_last_strides, contiguous_copy, lies
from ._sites import is_own
from ._tracing import in_place, recorded, unpacked

__all__ = ["as_without", "asks_strides", "restore_formats"]

#: What gives its output the format of its inputs.
_PRESERVING_MODULES: Final = (
    *(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
    *(nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.LeakyReLU, nn.Sigmoid, nn.SiLU, nn.Hardswish, nn.GELU),
    *(nn.Tanh, nn.ELU, nn.Mish, nn.Hardsigmoid, nn.Softplus, nn.PReLU),
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Upsample),
    *(nn.MaxPool1d, nn.AvgPool1d, nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d),
)
_PRESERVING: Final = frozenset(
    (
        *(operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, in_place),
        *(torch.add, torch.sub, torch.mul, torch.div, torch.cat, torch.relu, torch.sigmoid),
        *(torch.tanh, torch.clamp, torch.maximum, torch.minimum, torch.relu_),
        *(functional.relu, functional.relu6, functional.silu, functional.gelu, functional.mish),
        *(functional.leaky_relu, functional.hardswish, functional.hardsigmoid, functional.elu),
        *(functional.hardtanh, functional.sigmoid, functional.tanh, functional.softplus),
        *(functional.dropout, functional.interpolate, functional.pad, functional.max_pool2d),
        *(functional.avg_pool2d, functional.adaptive_avg_pool2d, functional.batch_norm),
        *("add", "add_", "sub", "mul", "mul_", "div", "relu", "relu_", "sigmoid", "tanh", "clamp"),
        *("float", "half", "bfloat16", "clone", "detach"),
    )
)

#: Methods and functions that depend on strides.
_STRIDED: Final = frozenset(
    (
        *STRIDED,
        *("unflatten", "unfold", "data", "numpy", "__array__"),
        *(torch.as_strided, torch.unflatten),
    )
)

#: PyTorch's CPU kernels add these up in one go on channels-last tensors: a group's variance was off
#: by 1e-3 where its mean was 30 times its deviation, 5e-7 on contiguous ones.
_LESS_EXACT_MODULES: Final = (nn.GroupNorm,)
_LESS_EXACT: Final = frozenset(
    (
        *(functional.group_norm, torch.group_norm, torch.norm, torch.linalg.norm),
        *(torch.linalg.vector_norm, "norm"),
    )
)


@recorded
def as_without(tensor: Tensor, *inputs: object) -> Tensor:
    """Returns a tensor in the format that it has in the model before conversion.

    Args:
        tensor: Channels last.
        inputs: The model's; none if the format does not depend on theirs.
    """
    images = [x for x in inputs if isinstance(x, Tensor) and x.dim() > 2]
    last = (wanted_format("input", x, x.dim() - 2) and not x.is_contiguous() for x in images)
    if images and all(last):
        return tensor
    return contiguous_copy(tensor) if _is_plain(tensor) else tensor.contiguous()


def asks_strides(model: GraphModule) -> bool:
    """Whether a traced model calls what depends on how a tensor lies in memory."""
    return any(
        node.target in _STRIDED or (node.target is getattr and node.args[1] in _STRIDED)
        for node in model.graph.nodes
        if node.op in ("call_method", "call_function")
    )


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is channels last, and memory that no one but this code works on now."""
    if is_dynamo_compiling() or is_watched() or not is_plain_memory(tensor):
        return False
    if tensor.requires_grad or tensor.layout is not torch.strided:
        return False
    if tensor.numel() == 0 or not 3 <= tensor.dim() <= 5 or tensor.is_contiguous():
        return False
    return lies(tensor.shape, tensor.stride(), channels_last_strides(tensor.shape))


def restore_formats(
    model: GraphModule, forced: Collection[Node], norms: Collection[Node], whole: bool
) -> None:
    """Gives whoever can tell what format a tensor has the one that it would have had.

    Args:
        model: The model; its convolutions are maxconv's.
        forced: Calls whose outputs are channels last whatever their inputs are.
        norms: Calls whose outputs have their inputs' format, and would have been contiguous.
        whole: Whether nothing but the user reads what the model returns.
    """
    _Formats(model, forced, norms, whole).run()


class _Formats:
    def __init__(
        self, model: GraphModule, forced: Collection[Node], norms: Collection[Node], whole: bool
    ) -> None:
        self.graph = model.graph
        self.modules = dict(model.named_modules())
        self.whole = whole
        self.inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        #: Channels last, where contiguous tensors would have been, by what preserves the format.
        self.last = {*forced, *norms}
        #: Those of them that would have been contiguous whatever the model's inputs are.
        self.contiguous = set(norms)
        #: Of other strides than they would have been.
        self.other: set[Node] = set()
        self.restored: dict[Node, Node] = {}
        self.writes = any(mutates(node, self.modules) for node in self.graph.nodes)

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node in self.restored.values():
                continue
            inputs = node.all_input_nodes
            if not any(x in self.last or x in self.other for x in inputs):
                continue
            if self._can_tell(node):
                for x in inputs:
                    self._restore(x, node)
            elif node in self.last or is_metadata(node):
                continue
            elif self._preserves(node) and not any(x in self.other for x in inputs):
                self.last.add(node)
                if any(x in self.contiguous for x in inputs):
                    self.contiguous.add(node)
            elif not (node.op == "call_method" and node.target == "contiguous"):
                self.other.add(node)

    def _restore(self, node: Node, user: Node) -> None:
        """Has ``user`` read a node in the format that it would have had."""
        if node in self.last:
            if node not in self.restored:
                deciding = [] if node in self.contiguous else self.inputs
                with self.graph.inserting_after(node):
                    made = self.graph.call_function(as_without, (node, *deciding))
                self.restored[node] = made
                if self.writes:
                    # A copy must not part what is written from what is read.
                    node.replace_all_uses_with(made, lambda other: other is not made)
            user.replace_input_with(node, self.restored[node])
        elif node in self.other:
            # Of what it was made: then its strides are what they would have been.
            self.other.discard(node)
            for x in node.all_input_nodes:
                self._restore(x, node)

    def _can_tell(self, node: Node) -> bool:
        if node.op == "output":
            return not self.whole
        if node.op == "call_module":
            module = module_of(node, self.modules)
            if isinstance(module, _LESS_EXACT_MODULES) and type(module) is not GroupNorm:
                return True
            if isinstance(module, _BatchNorm):
                return module.training or module.running_mean is None
            known = type(module).__module__.startswith("torch.nn.modules.")
            return not (known or is_own(module) or type(module) is GroupNorm)
        if node.op == "call_method":
            return node.target in _STRIDED or node.target in _LESS_EXACT
        if node.op != "call_function":
            return False
        if node.target is getattr:
            return node.args[1] in _STRIDED
        if node.target is functional.batch_norm:
            return "training" in str(node.kwargs) or True in node.args
        target: Any = node.target
        owner = str(getattr(target, "__module__", None) or "torch").split(".")[0]
        known = owner in ("torch", "_operator", "operator", "math", "builtins", "maxconv")
        return target in _STRIDED or target in _LESS_EXACT or not (known or target is unpacked)

    def _preserves(self, node: Node) -> bool:
        if node.op == "call_module":
            module = module_of(node, self.modules)
            return type(module) in _PRESERVING_MODULES or isinstance(module, _BatchNorm)
        return node.target in _PRESERVING
