"""Squeeze and excitation of 8-bit integers: means over pixels, products with a number a channel."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from .._calibration import Quantization
from ._arguments import read
from ._chains import Chained, Planned
from ._dtypes import BY_NAME
from ._functional import convolve, plan_of
from ._means import MeanPlan, plan_mean
from ._modules import _Conv
from ._patterns import module_of
from ._pooling import GLOBAL_POOLS, averaged, pooled
from ._quantized import Constants, Quantize, added_module, round_floats, rounded_to

__all__ = ["Product", "QuantizedMean", "QuantizedProduct", "is_mean", "mark_products", "write_mean"]

_Modules = Mapping[str, nn.Module]
_MULTIPLICATIONS: Final = (operator.mul, torch.mul, "mul")


# Means ------------------------------------------------------------------------------------------


def is_mean(node: Node, modules: _Modules) -> bool:
    """Whether a node of a converted model is a mean, of which integers are averaged as floats."""
    module = module_of(node, modules)
    return isinstance(module, GLOBAL_POOLS) or node.target in (pooled, averaged)


class QuantizedMean(Chained, Constants):
    """The mean of integers: floats, or integers again.

    Args:
        quantization: Of the integers, with one scale.
        dimensions: Those that are averaged.
        keepdim: Whether they stay, as ones.
        dtype: Of the floats.
        after: Of the integers that come out; ``None`` where floats do.
    """

    def __init__(
        self,
        quantization: Quantization,
        dimensions: tuple[int, ...],
        keepdim: bool,
        dtype: torch.dtype,
        after: Quantization | None = None,
    ) -> None:
        super().__init__()
        self.scale = float(quantization.scale)
        self.zero_point = quantization.zero_point
        self.dimensions, self.keepdim, self.dtype = dimensions, keepdim, dtype
        self.rounded = None if after is None else rounded_to(after)
        self.training = False

    def forward(self, x: Tensor) -> Tensor:
        """Returns the mean of what the integers stand for; sums are exact."""
        plan = self._plan(x)
        if plan is not None:
            return plan.run(x)
        mean = self._mean(x)
        return (
            mean
            if self.rounded is None
            else round_floats(mean, *self.rounded[1:], self.rounded.dtype)
        )

    def planned(self, x: Tensor) -> Planned | None:
        """Returns the plan that ``forward`` has just run, and its operand."""
        plan = self._plan(x)
        return None if plan is None else (plan, (x,))

    def _plan(self, x: Tensor) -> MeanPlan | None:
        rank = x.dim() - 2
        places = sorted(axis % x.dim() for axis in self.dimensions)
        if not self.keepdim or places != list(range(2, rank + 2)):
            return None
        return plan_mean(x, self.scale, -self.scale * self.zero_point, self.dtype, self.rounded)

    def _mean(self, x: Tensor) -> Tensor:
        """Returns the mean in floats, by PyTorch."""
        count = math.prod(x.shape[axis] for axis in self.dimensions)
        sums: Any = x.sum(self.dimensions, self.keepdim, dtype=torch.int32)
        mean: Tensor = sums.float().mul_(self.scale / count).sub_(self.scale * self.zero_point)
        return mean.to(self.dtype)


def write_mean(
    model: GraphModule, modules: _Modules, node: Node, known: Quantization, dtype: torch.dtype
) -> None:
    """Has a node that is a mean take integers, and give floats, or what all readers make of them.

    Args:
        model: Whose graph the node is in.
        modules: The model's.
        node: ``is_mean`` holds for it.
        known: What the integers stand for.
        dtype: Of the floats.
    """
    if node.target is averaged:
        x, dimensions, keepdim = node.args
    else:
        module = module_of(node, modules)
        rank: Any = module.rank if isinstance(module, GLOBAL_POOLS) else node.args[1]
        x, dimensions, keepdim = node.args[0], tuple(range(-rank, 0)), True
    after = _integers_behind(model, node)
    mean: Any = QuantizedMean(known, tuple(dimensions), keepdim, dtype, after)  # type: ignore[arg-type] # numbers
    with model.graph.inserting_before(node):
        new = model.graph.call_module(added_module(model, "mean", mean), (x,))
    if after is not None:
        for reader in list(node.users):
            reader.replace_all_uses_with(new)
            model.graph.erase_node(reader)
    node.replace_all_uses_with(new)
    model.graph.erase_node(node)


def _integers_behind(model: GraphModule, node: Node) -> Quantization | None:
    """Returns what all readers of a node make of its floats; ``None`` if one reads the floats."""
    found: list[Quantization] = []
    for reader in node.users:
        if reader.op != "call_module":
            return None
        quantizer = model.get_submodule(str(reader.target))
        if not isinstance(quantizer, Quantize) or quantizer.quantization.per_channel:
            return None
        found.append(quantizer.quantization)
    return found[0] if found and all(each == found[0] for each in found) else None


# Products ---------------------------------------------------------------------------------------


class Product(nn.Module):
    """Multiplies each channel of each image by a number.

    Args:
        conv: Gives the image.
    """

    def __init__(self, conv: _Conv) -> None:
        super().__init__()
        self.channels, self.rank, self.dtype = conv.out_channels, conv.rank, conv.weight.dtype
        self.training = False

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        """Returns the product.

        Args:
            x: ``[N, C, *spatial]`` or ``[C, *spatial]``.
            factor: ``[N, C, 1, ...]`` or ``[C, 1, ...]``.
        """
        return x * factor


def mark_products(model: nn.Module) -> None:
    """Makes modules of the products in a converted model's squeeze and excitation, in place.

    These are a convolution's output times what pointwise convolutions make of a mean over pixels.
    """
    for part in model.modules():
        if not isinstance(part, GraphModule):
            continue
        modules = dict(part.named_modules())
        changed = False
        for node in list(part.graph.nodes):
            found = _operands(node, modules)
            if found is None:
                continue
            x, factor, conv = found
            with part.graph.inserting_before(node):
                path = added_module(part, "product", Product(conv))
                new = part.graph.call_module(path, (x, factor))
            node.replace_all_uses_with(new)
            part.graph.erase_node(node)
            changed = True
        if changed:
            part.recompile()


def _operands(node: Node, modules: _Modules) -> tuple[Node, Node, _Conv] | None:
    """Returns the image, the factor and what convolves the image, if a node is such a product."""
    if node.target not in _MULTIPLICATIONS or len(node.args) != 2 or node.kwargs:
        return None
    for x, factor in (node.args, node.args[::-1]):
        if isinstance(x, Node) and isinstance(factor, Node):
            conv = module_of(x, modules)
            if isinstance(conv, _Conv) and _is_excited(factor, modules, conv):
                return x, factor, conv
    return None


def _is_excited(factor: Node, modules: _Modules, image: _Conv) -> bool:
    """Whether a node gives a number for each channel of an image: convolved means over pixels."""
    last = module_of(factor, modules)
    if not isinstance(last, _Conv) or last.out_channels != image.out_channels:
        return False
    node: object = factor
    while isinstance(node, Node) and isinstance(conv := module_of(node, modules), _Conv):
        pointwise = all(size == 1 for size in conv.kernel_size) and conv.upsample == 1
        if conv.rank != image.rank or not pointwise or any(_numbers(conv.padding)):
            return False
        if len(node.args) != 1 or node.kwargs:
            return False
        node = node.args[0]
    return isinstance(node, Node) and _is_one_pixel(node, modules, image.rank)


def _numbers(padding: Any) -> tuple[int, ...]:
    # A name of a padding is 0 pixels of one tap.
    return () if isinstance(padding, str) else tuple(padding)


def _is_one_pixel(node: Node, modules: _Modules, rank: int) -> bool:
    module = module_of(node, modules)
    if isinstance(module, GLOBAL_POOLS):
        return module.rank == rank
    if node.target is pooled:
        return bool(node.args[1] == rank)
    if node.target is not averaged:
        return False
    _, dimensions, keepdim = node.args
    wanted = (list(range(2, rank + 2)), list(range(-rank, 0)))
    return keepdim is True and list(dimensions) in wanted  # type: ignore[arg-type] # a tuple


class QuantizedProduct(Chained, Constants):
    """A ``Product`` of integers: a depthwise convolution whose scales are the factors.

    Args:
        product: What it was.
        before: Of the integers.
        after: Of the output; ``None`` where floats come out.
    """

    weight: Tensor

    def __init__(self, product: Product, before: Quantization, after: Quantization | None) -> None:
        super().__init__()
        ones = torch.ones(product.channels, 1, *(1,) * product.rank, dtype=torch.int8)
        self.register_buffer("weight", ones, persistent=False)
        self.rank = product.rank
        # The factors are the scales as they are: the input's is a part of the output's.
        self.scale = float(before.scale) if after is None else None
        out_dtype = product.dtype if after is None else BY_NAME[after.dtype]
        self.arguments = read(
            self.rank,
            (1,) * self.rank,
            (0,) * self.rank,
            (1,) * self.rank,
            product.channels,
            None,
            1.0,
            None,
            None,
            out_dtype,
            1,
            (before.zero_point, 0, 0 if after is None else after.zero_point),
            None if after is None else float(after.scale) / float(before.scale),
        )
        self.training = False

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        """Multiplies integers.

        Args:
            x: int8 or uint8, ``[N, C, *spatial]`` or ``[C, *spatial]``.
            factor: Floats, ``[N, C, 1, ...]`` or ``[C, 1, ...]``.
        """
        if x.dim() == self.rank + 1:
            return self.forward(x.unsqueeze(0), factor.unsqueeze(0)).squeeze(0)
        factors = factor.float().flatten(1)
        if self.scale is not None:
            factors = factors * self.scale
        # Scales are those of one image.
        images = [self._of_one(x[i : i + 1], factors[i]) for i in range(len(x))]
        return images[0] if len(images) == 1 else torch.cat(images)

    def planned(self, x: Tensor, factor: Tensor) -> Planned | None:
        """Returns the plan that ``forward`` has just run, and its operands."""
        if x.dim() != self.rank + 2 or len(x) != 1 or self.scale is not None:
            return None
        tensors = x, self.weight, None, None, factor.float().flatten(1)[0]
        plan = plan_of(tensors, self.arguments, constant=True, channels_last=True)
        return None if plan is None else (plan, tensors)

    def _of_one(self, x: Tensor, scale: Tensor) -> Tensor:
        return convolve(
            x, self.weight, None, None, scale, self.arguments, constant=True, channels_last=True
        )
