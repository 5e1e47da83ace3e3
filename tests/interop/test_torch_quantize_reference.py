"""``maxconv.torch.quantize`` of graphs that PyTorch quantized, as ``convert_pt2e`` makes them.

PyTorch itself computes such a graph in floats: the expected values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.ao.quantization.fx._decomposed  # the operators
from tests.interop.quantized import layers, types
from tests.interop.torch_tensors import draw
from torch import Tensor, nn
from torch.nn import functional

import maxconv.torch as mt
from maxconv import quantize_filter
from maxconv.torch._quantized import Dequantize, Quantize

U8, I8, F32 = torch.uint8, torch.int8, torch.float32
X = draw(2, 4, 9, 8, seed=5)
_ops: Any = torch.ops.quantized_decomposed


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def steps(x: Tensor, scale: float, zero_point: int, dtype: torch.dtype = U8) -> Tensor:
    limits = torch.iinfo(dtype)
    made: Tensor = _ops.quantize_per_tensor(x, scale, zero_point, limits.min, limits.max, dtype)
    return made


def floats(x: Tensor, scale: float, zero_point: int, dtype: torch.dtype = U8) -> Tensor:
    limits = torch.iinfo(dtype)
    made: Tensor = _ops.dequantize_per_tensor(x, scale, zero_point, limits.min, limits.max, dtype)
    return made


def rounded(x: Tensor, *step: Any) -> Tensor:
    return floats(steps(x, *step), *step)


class Filter(nn.Module):
    """A convolution whose filter is dequantized, a scale for each output channel."""

    weight: Tensor
    zeros: Tensor
    bias: Tensor

    def __init__(
        self, c: int = 4, k: int = 4, taps: int = 3, least: int = -127, **options: Any
    ) -> None:
        super().__init__()
        self.options: dict[str, Any] = {"padding": taps // 2} | options
        shape = (k, c // self.options.get("groups", 1), taps, taps)
        filter, scales = quantize_filter(draw(*shape, seed=k + c).numpy())
        self.register_buffer("weight", torch.from_numpy(filter).clamp(min=least))
        self.register_buffer("scales", torch.from_numpy(scales).double())
        self.register_buffer("zeros", torch.zeros(k, dtype=torch.int64))
        self.register_buffer("bias", draw(k, seed=7))

    def forward(self, x: Tensor) -> Tensor:
        weight = _ops.dequantize_per_channel(self.weight, self.scales, self.zeros, 0, -128, 127, I8)
        return functional.conv2d(x, weight, self.bias, **self.options)


class Network(nn.Module):
    """A network whose ``forward`` is a function of itself and its input."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.call = [call]
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.call[0](self, x)


def quantize(graph: Any) -> Any:
    return mt.quantize(graph)


def taken(call: Callable[[Any, Tensor], Any], **parts: nn.Module) -> Any:
    """Exports a network, and quantizes it; compares with what PyTorch makes of it."""
    graph: Any = torch.export.export(Network(call, **parts), (X,)).module()
    before = str(graph.graph)
    result, report = quantize(graph)
    assert str(graph.graph) == before
    for x in (X, 3 * draw(*X.shape, seed=6)):
        actual, wanted = result(x), graph(x)
        assert (actual.shape, actual.dtype) == (wanted.shape, wanted.dtype)
        # Single pixels may be rounded to the other side of a half.
        different = (actual - wanted).abs() > 1e-5 * wanted.abs().max()
        assert different.double().mean() < 0.02
        assert (actual - wanted).norm() < 0.01 * wanted.norm()
    assert not any("decomposed" in str(node.target) for node in result.graph.nodes)
    return result, report


def test_integers_from_convolution_to_convolution() -> None:
    def call(self: Any, x: Tensor) -> Tensor:
        x = rounded(x, 0.02, 120)
        x = rounded(torch.relu(self.a(x)), 0.05, 0)
        return torch.relu(self.b(x))

    result, report = taken(call, a=Filter(), b=Filter(4, 6, 1))
    first, second = report.layers
    assert (first.kind, first.became, second.became) == (
        "conv2d",
        "uint8 -> uint8",
        "uint8 -> float32",
    )
    assert (first.input_scale, first.input_zero_point) == (0.02, 120)
    assert (first.output_scale, first.output_zero_point) == (0.05, 0)
    assert (second.input_scale, second.output_scale, second.error) == (0.05, None, None)
    assert list(types(result, X).values()) == [(U8, U8), (U8, F32)]
    assert "2 of 2 layers quantized\n" in str(report)
    assert not any(parameter.requires_grad for parameter in result.parameters())


@pytest.mark.parametrize("dtype", [U8, I8])
def test_residuals_and_pooling(dtype: torch.dtype) -> None:
    """A residual is added in the convolution; a pooling in front of the rounding, of integers."""
    zero = 100 if dtype == U8 else -20
    low = 0 if dtype == U8 else -128

    def call(self: Any, x: Tensor) -> Tensor:
        x = rounded(x, 0.03, zero, dtype)
        x = functional.max_pool2d(torch.relu_(self.a(x)), 3, 2, 1, ceil_mode=True)
        x = rounded(x, 0.06, low, dtype)
        y = rounded(functional.relu6(self.b(x)), 0.05, low, dtype)
        x = rounded(torch.relu(self.c(y) + x), 0.1, low, dtype)
        return x.mean((2, 3))

    result, _ = taken(call, a=Filter(), b=Filter(groups=4), c=Filter(taps=1))
    pair = (dtype, dtype)
    assert list(types(result, X).values()) == [pair, pair, (dtype, dtype, dtype)]
    assert sum(isinstance(part, Quantize) for part in result.modules()) == 1
    assert sum(isinstance(part, Dequantize) for part in result.modules()) == 1


def test_what_only_moves_elements() -> None:
    def call(self: Any, x: Tensor) -> Tensor:
        step = 0.05, 90
        a, b = (rounded(part(rounded(x, 0.02, 120)), *step) for part in (self.a, self.b))
        x = rounded(torch.cat([a, b], 1).permute(0, 1, 3, 2), *step)
        return self.c(x)  # type: ignore[no-any-return]

    result, _ = taken(call, a=Filter(), b=Filter(), c=Filter(8, 4))
    assert list(types(result, X).values()) == [(U8, U8), (U8, U8), (U8, F32)]
    assert not any(isinstance(part, Dequantize) for part in result.modules())


def test_floats_where_somebody_reads_them() -> None:
    """The convolution gives floats, and what was to be rounded is."""

    def call(self: Any, x: Tensor) -> Tensor:
        y = self.a(rounded(x, 0.02, 120))
        return self.b(rounded(y, 0.05, 90)) * torch.sigmoid(y)  # type: ignore[no-any-return]

    result, _ = taken(call, a=Filter(), b=Filter())
    assert list(types(result, X).values()) == [(U8, F32), (U8, F32)]


def test_a_residual_of_floats() -> None:
    """Integers come out only where the residual consists of integers too."""

    def call(self: Any, x: Tensor) -> Tensor:
        y = torch.relu(self.a(rounded(x, 0.02, 120)) + x)
        return self.b(rounded(y, 0.05, 90))  # type: ignore[no-any-return]

    result, _ = taken(call, a=Filter(), b=Filter())
    assert list(types(result, X).values()) == [(U8, F32, F32), (U8, F32)]


def test_integers_of_fewer_bits_are_rounded_apart() -> None:
    """As of ``reduce_range``: the convolution would clamp to the whole range."""

    def seven(x: Tensor) -> Tensor:
        made: Tensor = _ops.quantize_per_tensor(x, 0.02, 10, 0, 127, U8)
        given: Tensor = _ops.dequantize_per_tensor(made, 0.02, 10, 0, 127, U8)
        return given

    def call(self: Any, x: Tensor) -> Tensor:
        return self.b(seven(self.a(rounded(x, 0.02, 120))))  # type: ignore[no-any-return]

    graph: Any = torch.export.export(Network(call, a=Filter(), b=Filter()), (X,)).module()
    result, report = quantize(graph)
    assert list(types(result, X).values()) == [(U8, F32), (U8, F32)]
    assert (result(X) - graph(X)).norm() < 0.01 * graph(X).norm()
    assert report.layers[1].input_scale == 0.02


def test_filters_of_minus_128() -> None:
    filter = Filter(least=-128)
    filter.weight[0, 0, 0, 0] = -128
    net = Network(lambda self, x: self.a(rounded(x, 0.02, 120)), a=filter)
    graph: Any = torch.export.export(net, (X,)).module()
    result, _ = quantize(graph)
    (part,) = layers(result).values()
    assert int(part.weight.min()) == -128
    assert (result(X) - graph(X)).norm() < 1e-5 * graph(X).norm()


def test_a_filter_that_is_rounded_in_the_graph() -> None:
    """As ``convert_pt2e(fold_quantize=False)`` leaves it, with one scale."""
    weight = nn.Parameter(draw(4, 4, 3, 3))

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return functional.conv2d(rounded(x, 0.02, 120), rounded(self.weight, 0.03, 0, I8))

    graph: Any = torch.export.export(Whole(), (X,)).module()
    result, report = quantize(graph)
    assert report.layers[0].became == "uint8 -> float32"
    torch.testing.assert_close(result(X), graph(X), rtol=1e-4, atol=1e-4)
    (part,) = layers(result).values()
    wanted = np.clip(np.rint(weight.detach().double().numpy() / 0.03), -127, 127)
    np.testing.assert_array_equal(part.weight.numpy(), wanted)


def test_convolutions_that_are_left() -> None:
    plain = nn.Conv2d(4, 4, 3)
    odd = Filter()
    odd.zeros[1] = 3

    def call(self: Any, x: Tensor) -> Tensor:
        y = rounded(x, 0.02, 120)
        return self.odd(y).mean() + self.plain(y).mean() + self.a(x).mean()  # type: ignore[no-any-return]

    net = Network(call, plain=plain, odd=odd, a=Filter())
    graph: Any = torch.export.export(net, (X,)).module()
    result, report = quantize(graph)
    assert [layer.became for layer in report.layers] == ["float"] * 3
    assert [layer.note for layer in report.layers] == [
        "its weight has a zero point",
        "its weight is not made of integers",
        "its input is not made of integers of 8 bits with one scale",
    ]
    torch.testing.assert_close(result(X), graph(X))


def test_batches_beside_scales_are_refused() -> None:
    net = Network(lambda self, x: self.a(rounded(x, 0.02, 120)), a=Filter())
    graph: Any = torch.export.export(net, (X,)).module()
    message = "batches: given beside a graph that has scales already; None is allowed"
    with pytest.raises(ValueError, match=re.escape(message)):
        mt.quantize(graph, [X])
