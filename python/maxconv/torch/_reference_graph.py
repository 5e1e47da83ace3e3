"""Takes over graphs that PyTorch quantized, with nodes that quantize and dequantize.

Such a graph (of ``convert_pt2e``) computes with floats that are made of integers, and its scales
are what the convolutions of integers here get.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from .._calibration import Quantization
from .._dtypes import INTEGERS
from ..activations import NONE, ActivationSpec
from ._aten import activation_of, arguments_of
from ._dtypes import INTEGER_NAMES
from ._modules import Conv1d, Conv2d, Conv3d, _Conv
from ._patterns import own_tensor
from ._quantize_report import QuantizationReport, QuantizedLayer
from ._quantized import Dequantize, Quantize, QuantizedConv, Rounding, added_module, max_pool

__all__ = ["convert_reference", "is_reference"]

_aten: Any = torch.ops.aten
_BY_RANK: Final[dict[int, type[_Conv]]] = {1: Conv1d, 2: Conv2d, 3: Conv3d}

_CONVOLUTIONS: Final = frozenset(
    (
        *(_aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default),
        *(_aten.conv1d.padding, _aten.conv2d.padding, _aten.conv3d.padding),
        _aten.convolution.default,
    )
)
_POOLS: Final = {
    _aten.max_pool1d.default: 1,
    _aten.max_pool2d.default: 2,
    _aten.max_pool3d.default: 3,
}
#: What only moves elements, and does so to integers as well.
_MOVING: Final = frozenset(
    (
        *(_aten.flatten.using_ints, _aten.view.default, _aten.reshape.default),
        *(_aten.permute.default, _aten.transpose.int, _aten.unsqueeze.default),
        *(_aten.squeeze.dim, _aten.slice.Tensor, _aten.pixel_shuffle.default),
        *(_aten.contiguous.default, _aten.clone.default, _aten.cat.default),
    )
)


def is_reference(model: nn.Module) -> bool:
    """Whether a model is a graph that PyTorch quantized."""
    return isinstance(model, GraphModule) and any(
        _kind(node).startswith(("quantize_per", "dequantize_per")) for node in model.graph.nodes
    )


def _kind(node: object) -> str:
    """Returns the name of the step between integers and floats that a node is, or nothing."""
    target = node.target if isinstance(node, Node) and node.op == "call_function" else None
    if getattr(target, "namespace", "") != "quantized_decomposed":
        return ""
    name: str = target._schema.name.split("::")[1]  # type: ignore[union-attr] # an OpOverload
    return name


def convert_reference(model: nn.Module) -> tuple[GraphModule, QuantizationReport]:
    """Returns a copy of a graph that PyTorch quantized, in which maxconv convolves integers.

    Raises:
        ValueError: No convolution in it reads integers.
    """
    assert isinstance(model, GraphModule)
    converter = _Converter(copy.deepcopy(model))
    converter.run()
    converter.model.requires_grad_(False)
    return converter.model, QuantizationReport(converter.rows)


@dataclass(eq=False)
class _Chain:
    """A convolution of integers, and what is computed with it."""

    node: Node
    conv: _Conv
    weight: Tensor
    scales: Tensor
    input: Node
    """Its dequantized input."""
    before: Quantization
    tail: Node = field(init=False)
    activation: ActivationSpec = NONE
    final: ActivationSpec = NONE
    residual: Node | None = None
    beta: float = 1.0
    beside: Quantization | None = None
    after: Quantization | None = None

    def __post_init__(self) -> None:
        self.tail = self.node


def _equal(left: Quantization | None, right: Quantization | None) -> bool:
    fields = ("scale", "zero_point", "dtype")
    return left is not None and all(getattr(left, f) == getattr(right, f, None) for f in fields)


class _Converter:
    def __init__(self, model: GraphModule) -> None:
        self.model, self.graph = model, model.graph
        self.chains: dict[Node, _Chain] = {}
        """By the last node of each."""
        self.rows: list[QuantizedLayer] = []
        self.integers: dict[tuple[Node, tuple[Any, ...]], Node] = {}

    def run(self) -> None:
        self._normalize()
        rows: list[QuantizedLayer] = []
        # Backwards, so that of two convolutions that are added the later one adds the other.
        for node in reversed(list(self.graph.nodes)):
            if node.op != "call_function" or node.target not in _CONVOLUTIONS:
                continue
            found = self._chain(node)
            if isinstance(found, str):
                rows.append(QuantizedLayer(node.name, _shown(node), "float", note=found))
            else:
                self._grow(found)
                self.chains[found.tail] = found
        for node in self.graph.nodes:
            rounding = self._rounding(node)
            if rounding is not None and self._can(node.args[0], rounding):
                self._decide(node.args[0], rounding)
        for node in list(self.graph.nodes):
            if node in self.chains:
                rows.append(self._emit(self.chains[node]))
            elif (rounding := self._rounding(node)) and self._decided(node.args[0], rounding):
                node.replace_all_uses_with(self._make(node.args[0], rounding, node))
        order = {node.name: place for place, node in enumerate(self.graph.nodes)}
        self.rows = sorted(rows, key=lambda row: order[row.name])
        self._finish()

    def _normalize(self) -> None:
        """Replaces what writes to its only read input by what does not."""
        for node in self.graph.nodes:
            if node.op != "call_function" or getattr(node.target, "namespace", "") != "aten":
                continue
            name = node.target._schema.name.split("::")[1]
            if not name.endswith("_") or name.endswith("__") or not node.args:
                continue
            plain = getattr(getattr(_aten, name[:-1], None), node.target._overloadname, None)
            if plain is not None and len(node.args[0].users) == 1:
                node.target = plain

    # What a node is -----------------------------------------------------------------------------

    def _rounding(self, node: Node) -> Quantization | None:
        """Returns what a node makes of floats: all integers of a type, with one scale."""
        return self._step(node, "quantize_per_tensor")

    def _origin(self, node: object) -> Quantization | None:
        """Returns what a node makes floats of."""
        return self._step(node, "dequantize_per_tensor")

    def _step(self, node: object, kind: str) -> Quantization | None:
        if _kind(node) != kind:
            return None
        assert isinstance(node, Node)
        given = arguments_of(node)
        scale, zero_point = (self._number(given[name]) for name in ("scale", "zero_point"))
        dtype = INTEGER_NAMES.get(given["dtype"])
        if scale is None or zero_point is None or dtype is None:
            return None
        limits = tuple(self._number(given[name]) for name in ("quant_min", "quant_max"))
        # What is read may have fewer values than its type.
        if kind.startswith("quantize") and limits != INTEGERS[dtype]:
            return None
        return Quantization(float(scale), int(zero_point), dtype)

    def _number(self, value: object) -> float | None:
        if isinstance(value, int | float):
            return value
        tensor = own_tensor(self.model, value)
        return None if tensor is None or tensor.numel() != 1 else float(tensor)

    def _constant(self, value: object) -> Tensor | None:
        """Returns the model's own tensor that an argument is, or is made of."""
        tensor = own_tensor(self.model, value)
        if tensor is not None or not _kind(value):
            return None if tensor is None else tensor.detach()
        assert isinstance(value, Node)
        arguments = []
        for argument in value.args:
            known = self._constant(argument) if isinstance(argument, Node) else argument
            if isinstance(argument, Node) and known is None:
                return None
            arguments.append(known)
        target: Any = value.target
        computed: Tensor = target(*arguments, **value.kwargs)
        return computed

    def _chain(self, node: Node) -> _Chain | str:
        """Returns a convolution of integers, or why a node is none."""
        given = arguments_of(node)
        before = self._origin(given["input"])
        if before is None:
            return "its input is not made of integers of 8 bits with one scale"
        if given.get("transposed"):
            return "it is transposed"
        filter = self._filter(given["weight"])
        if isinstance(filter, str):
            return filter
        weight, scales = filter
        bias = None if given["bias"] is None else self._constant(given["bias"])
        if given["bias"] is not None and bias is None:
            return "its bias is computed in the graph"
        rank = weight.dim() - 2
        sizes: dict[str, Any] = {
            name: given[name] if isinstance(given[name], str) else _each(given[name], rank)
            for name in ("stride", "padding", "dilation")
        }
        groups = given["groups"]
        conv = _BY_RANK[rank](
            weight.shape[1] * groups,
            weight.shape[0],
            tuple(weight.shape[2:]),
            groups=groups,
            bias=bias is not None,
            device="meta",
            **sizes,
        )
        if bias is not None:
            conv.bias = nn.Parameter(bias.float(), requires_grad=False)
        return _Chain(node, conv, weight, scales, given["input"], before)

    def _filter(self, node: object) -> tuple[Tensor, Tensor] | str:
        """Returns a filter's integers and their scales, or why they cannot be taken."""
        kind = _kind(node)
        if kind not in ("dequantize_per_channel", "dequantize_per_tensor"):
            return "its weight is not made of integers"
        assert isinstance(node, Node)
        given = arguments_of(node)
        weight = self._constant(given["input"])
        if weight is None or weight.dtype != torch.int8 or not 3 <= weight.dim() <= 5:
            return "its weight is not an int8 constant of the graph"
        if kind == "dequantize_per_tensor":
            number, zero = self._number(given["scale"]), self._number(given["zero_point"])
            if number is None or zero != 0:
                return "its weight has a zero point"
            scales = torch.full((len(weight),), number, dtype=torch.float64)
        else:
            found, zeros = self._constant(given["scales"]), given["zero_points"]
            zeros = None if zeros is None else self._constant(zeros)
            if found is None or given["axis"] != 0:
                return "its weight's scales are not of its output channels"
            if zeros is not None and bool(zeros.any()):
                return "its weight has a zero point"
            scales = found.double()
        return weight, scales

    def _grow(self, chain: _Chain) -> None:
        """Takes along what follows a convolution, as far as one kernel does it."""
        while len(chain.tail.users) == 1:
            (user,) = chain.tail.users
            spec = activation_of(user) if user.op == "call_function" else None
            if spec is not None and chain.residual is None and not chain.activation.kind:
                chain.activation = spec
            elif spec is not None and chain.residual is not None and not chain.final.kind:
                chain.final = spec
            elif not self._add(chain, user):
                return
            chain.tail = user

    def _add(self, chain: _Chain, user: Node) -> bool:
        if user.target is not _aten.add.Tensor or chain.residual is not None:
            return False
        given = arguments_of(user)
        left, right, alpha = given["self"], given["other"], given["alpha"]
        nodes = isinstance(left, Node) and isinstance(right, Node) and left is not right
        if not nodes or not isinstance(alpha, int | float):
            return False
        if left is not chain.tail and alpha != 1:
            return False
        other = right if left is chain.tail else left
        shapes = {_shape(chain.tail), _shape(user)}
        if len(shapes) != 1 or _shape(other) not in (None, *shapes):
            return False
        chain.residual, chain.beta = other, float(alpha)
        chain.beside = self._origin(other)
        return True

    # Where integers come out --------------------------------------------------------------------

    def _can(self, node: Node, rounding: Quantization) -> bool:
        """Whether floats that are rounded so can be had as integers at once."""
        if _equal(self._origin(node), rounding):
            return True
        if node in self.chains:
            chain = self.chains[node]
            if chain.residual is not None and (
                chain.beside is None or chain.beside.dtype != rounding.dtype
            ):
                return False
            return self._is_only_rounded(node, rounding)
        inputs = _moved(node)
        return bool(inputs) and all(self._can(x, rounding) for x in inputs)

    def _is_only_rounded(self, node: Node, rounding: Quantization) -> bool:
        return all(
            _equal(self._rounding(user), rounding)
            or (bool(_moved(user)) and self._is_only_rounded(user, rounding))
            for user in node.users
        )

    def _decide(self, node: Node, rounding: Quantization) -> None:
        self.integers[node, _key(rounding)] = node
        if node in self.chains:
            self.chains[node].after = rounding
        elif self._origin(node) is None:
            for x in _moved(node):
                self._decide(x, rounding)

    def _decided(self, node: Node, rounding: Quantization) -> bool:
        return (node, _key(rounding)) in self.integers

    def _make(self, node: Node, rounding: Quantization, place: Node) -> Node:
        """Returns the node of the integers, which is put in front of another if it is new."""
        key = node, _key(rounding)
        if self.integers[key] is not node:
            return self.integers[key]
        if self._origin(node) is not None:
            made = node.args[0]
        else:
            inputs = {x: self._make(x, rounding, place) for x in _moved(node)}
            with self.graph.inserting_before(place):
                made = self._moved_integers(node, inputs)
        assert isinstance(made, Node)
        self.integers[key] = made
        return made

    def _moved_integers(self, node: Node, inputs: Mapping[Node, Node]) -> Node:
        if node.target in _POOLS:
            given, rank = arguments_of(node), _POOLS[node.target]
            size = _each(given["kernel_size"], rank)
            stride = _each(given["stride"], rank) if given["stride"] else size
            rest = _each(given["padding"], rank), _each(given["dilation"], rank)
            arguments = (inputs[given["self"]], size, stride, *rest, given["ceil_mode"])
            return self.graph.call_function(max_pool, arguments)
        copied = self.graph.node_copy(node, lambda x: inputs.get(x, x))
        copied.meta = {}
        return copied

    # Writing ------------------------------------------------------------------------------------

    def _emit(self, chain: _Chain) -> QuantizedLayer:
        before, after = chain.before, chain.after
        beside = chain.beside if after is not None else None
        chain.conv.activation, chain.conv.final_activation = chain.activation, chain.final
        module = QuantizedConv(
            chain.conv,
            chain.weight,
            chain.scales,
            Rounding(before, after, beside),
            chain.beta,
            _dtype(chain.tail),
        )
        path = added_module(self.model, "convolution", module)
        keywords: dict[str, Any] = {}
        if chain.residual is not None:
            residual = chain.residual if beside is None else chain.residual.args[0]
            keywords["residual"] = residual
        with self.graph.inserting_after(chain.tail):
            new = self.graph.call_module(path, (chain.input.args[0],), keywords)
        if after is None:
            chain.tail.replace_all_uses_with(new)
        else:
            self.integers[chain.tail, _key(after)] = new
        dtype = str(module.out_dtype).removeprefix("torch.")
        return QuantizedLayer(
            chain.node.name,
            _shown(chain.node),
            f"{before.dtype} -> {dtype}",
            float(before.scale),
            before.zero_point,
            None if after is None else float(after.scale),
            None if after is None else after.zero_point,
        )

    def _finish(self) -> None:
        """Replaces what is left of PyTorch's steps, and removes what nobody reads."""
        self._drop()
        for node in list(self.graph.nodes):
            module: nn.Module | None = None
            if (rounding := self._rounding(node)) is not None:
                module = Quantize(rounding, -1)
            elif (origin := self._origin(node)) is not None:
                module = Dequantize(origin, arguments_of(node)["out_dtype"] or torch.float32)
            if _kind(node) and (known := self._constant(node)) is not None:
                self._hold(node, known)
            elif module is not None:
                name = "quantize" if isinstance(module, Quantize) else "dequantize"
                path = added_module(self.model, name, module)
                with self.graph.inserting_before(node):
                    new = self.graph.call_module(path, (node.args[0],))
                node.replace_all_uses_with(new)
        self._drop()
        self.model.delete_all_unused_submodules()
        self.graph.lint()
        self.model.recompile()

    def _hold(self, node: Node, value: Tensor) -> None:
        """Puts a tensor of the model's own in the place of what computes it."""
        number = 0
        while hasattr(self.model, f"constant_{number}"):
            number += 1
        self.model.register_buffer(f"constant_{number}", value)
        with self.graph.inserting_before(node):
            held = self.graph.get_attr(f"constant_{number}")
        node.replace_all_uses_with(held)

    def _drop(self) -> None:
        for node in reversed(list(self.graph.nodes)):
            computes = node.op == "call_function" and not node.is_impure()
            if not node.users and (computes or node.op == "get_attr"):
                self.graph.erase_node(node)
        used = {str(node.target) for node in self.graph.nodes if node.op == "get_attr"}
        for held in (self.model._parameters, self.model._buffers):
            for name in [name for name in held if name not in used]:
                delattr(self.model, name)


def _key(rounding: Quantization) -> tuple[Any, ...]:
    scale = rounding.scale
    assert not isinstance(scale, np.ndarray)
    return scale, rounding.zero_point, rounding.dtype


def _moved(node: Node) -> list[Node]:
    """Returns the tensors whose elements a node moves; none if it does something else."""
    if node.target in _POOLS or (node.op == "call_function" and node.target in _MOVING):
        given = node.args[0]
        found = given if isinstance(given, tuple | list) else [given]
        return [x for x in found if isinstance(x, Node)]
    return []


def _each(values: Any, rank: int) -> tuple[int, ...]:
    """Returns one integer a spatial dimension, where a single one stands for all."""
    found = tuple(values) if isinstance(values, tuple | list) else (values,)
    return found * (rank if len(found) == 1 else 1)


def _shape(node: object) -> tuple[int, ...] | None:
    """Returns the shape that the exporter has noted of a node."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _dtype(node: Node) -> torch.dtype:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else torch.float32


def _shown(node: Node) -> str:
    return str(node.target).removeprefix("aten.").partition(".")[0]
