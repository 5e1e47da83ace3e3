"""Writes a plan into a model: modules of integers, and the steps between integers and floats."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from .._calibration import Quantization, quantize_filter
from ._commuting import make_integral
from ._excitation import QuantizedProduct, write_mean
from ._modules import _Conv
from ._quantize_plan import Layer, Place, Plan
from ._quantized import Dequantize, Quantize, QuantizedConv, Rounding, added_module

__all__ = ["make_convolution", "make_quantizer", "values_of", "write"]


def make_convolution(layer: Layer) -> QuantizedConv | QuantizedProduct:
    """Returns the convolution of integers that a layer becomes."""
    if layer.product is not None:
        coming = None if layer.after is None else _known(layer.after)
        return QuantizedProduct(layer.product, _known(layer.before), coming).to(
            layer.conv.weight.device
        )
    rounding = Rounding(
        _known(layer.before),
        None if layer.after is None else _known(layer.after),
        _known(layer.beside) if layer.beside is not None and layer.adds_integers else None,
    )
    weight = layer.conv.weight.detach().double()
    if rounding.input.per_channel:
        weight = _absorbed(weight, layer.conv, torch.as_tensor(rounding.input.scale))
    integers, scales = quantize_filter(weight.cpu().numpy())
    device = layer.conv.weight.device
    return QuantizedConv(
        layer.conv,
        torch.from_numpy(integers).to(device),
        torch.from_numpy(scales).to(device),
        rounding,
        layer.beta,
        layer.conv.weight.dtype,
        layer.form,
        _shift(layer, weight, torch.from_numpy(integers), torch.from_numpy(scales)),
    )


def _shift(layer: Layer, weight: Tensor, integers: Tensor, scales: Tensor) -> Tensor | None:
    """Returns what makes up, in the bias, for the rounding of a filter.

    Rounding moves an output by the filter's errors times the input: on average, by their products
    with the mean of each channel of the input.

    Args:
        layer: Whose input's means are known.
        weight: The filter that was rounded, float64.
        integers: What it became.
        scales: What steps of it stand for.
    """
    if layer.means.count == 0:
        return None
    conv = layer.conv
    means = layer.means.mean.to(weight.device)
    known = _known(layer.before)
    if known.per_channel:
        means = means / torch.as_tensor(known.scale, device=means.device).double()
    whole = integers.to(weight.device).double() * scales.to(weight.device).double().view(
        -1, *(1,) * (conv.rank + 1)
    )
    errors = (whole - weight).flatten(2).sum(2)
    filters = errors.view(conv.groups, -1, errors.shape[1])
    return -(filters * means.view(conv.groups, 1, -1)).sum(2).view(-1)


def make_quantizer(place: Place, device: torch.device) -> Quantize:
    """Returns what makes integers of a place's floats.

    Args:
        place: Calibrated.
        device: Of the floats.
    """
    return Quantize(_known(place), -(place.rank + 1)).to(device)


def _known(place: Place) -> Quantization:
    assert place.quantization is not None
    return place.quantization


def _absorbed(weight: Tensor, conv: _Conv, scales: Tensor) -> Tensor:
    """Returns a filter that takes its input's channels in steps of their own."""
    each = scales.to(weight.device).double().view(conv.groups, 1, -1, *(1,) * conv.rank)
    grouped = weight.view(conv.groups, -1, *weight.shape[1:])
    return (grouped * each).view(weight.shape)


def values_of(place: Place, integers: Tensor) -> Tensor:
    """Returns what a place's integers stand for, in float32."""
    known = _known(place)
    scale = torch.as_tensor(known.scale, dtype=torch.float32, device=integers.device)
    if known.per_channel:
        scale = scale.view(-1, *(1,) * place.rank)
    return (integers.float() - known.zero_point) * scale


def write(plan: Plan) -> None:
    """Has a traced model convolve integers, in place; all places are calibrated."""
    _Writer(plan).run()


class _Writer:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.model, self.graph = plan.model, plan.model.graph
        # What is written to between two readers becomes integers for each of them.
        self.writes = plan.writes
        self.made: dict[Any, Node] = {}

    def run(self) -> None:
        plan = self.plan
        for node, layer in plan.layers.items():
            keywords: dict[str, Any] = {}
            if layer.residual is not None:
                keywords["residual"] = self._residual(layer)
            others = () if layer.factor is None else (layer.factor,)
            node.args = (self._integers(layer.input, layer.before, layer), *others)
            node.kwargs = keywords
            self.model.set_submodule(str(node.target), make_convolution(layer))
        for node, inputs in plan.moving.items():
            place = plan.of_node.get(node)
            if place is None:
                continue
            for x in inputs:
                if x not in plan.of_node:
                    node.replace_input_with(x, self._rounded(x, place, node))
            make_integral(self.model, plan.modules, node, _known(place).zero_point)
        for node in plan.means:
            (x,) = node.all_input_nodes
            place = plan.of_node.get(x)
            if place is not None:
                write_mean(
                    self.model, plan.modules, node, _known(place), place.makers[0].conv.weight.dtype
                )
        self.model.delete_all_unused_submodules()
        self.graph.lint()
        self.model.recompile()

    def _residual(self, layer: Layer) -> Node:
        residual = layer.residual
        assert residual is not None
        if layer.beside is None:
            return residual
        if layer.adds_integers:
            return self._integers(residual, layer.beside, layer)
        key = residual, "floats"
        if key not in self.made:
            module = Dequantize(_known(layer.beside), layer.conv.weight.dtype)
            self.made[key] = self._call("dequantize", module, residual, layer.node)
        return self.made[key]

    def _integers(self, node: Node, place: Place, layer: Layer) -> Node:
        """Returns the node of a tensor's integers."""
        if node in self.plan.of_node:
            return node
        return self._rounded(node, place, layer.node)

    def _rounded(self, node: Node, place: Place, reader: Node) -> Node:
        """Returns the node that makes integers of floats, for a reader and those behind it."""
        key = (node, place, reader) if self.writes else (node, place)
        if key not in self.made:
            # Where the model's weights are.
            device = next(iter(self.plan.layers.values())).conv.weight.device
            module = make_quantizer(place, device)
            self.made[key] = self._call("quantize", module, node, reader)
        return self.made[key]

    def _call(self, base: str, module: nn.Module, x: Node, reader: Node) -> Node:
        path = added_module(self.model, base, module)
        with self.graph.inserting_before(reader):
            return self.graph.call_module(path, (x,))
