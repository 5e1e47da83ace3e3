"""``maxconv.torch.quantize``: where integers flow from convolution to convolution."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.interop.conversion import conv
from tests.interop.quantized import (
    F32,
    I8,
    U8,
    Residual,
    X,
    became,
    integers,
    layers,
    network,
    quantize,
    quantized,
    types,
)
from tests.interop.torch_tensors import draw, last
from torch import Tensor, nn
from torch.nn import functional

import maxconv.torch as mt
from maxconv._calibration import Quantization
from maxconv.torch._excitation import Product, QuantizedMean, QuantizedProduct
from maxconv.torch._quantized import Dequantize, Quantize, max_pool


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", [U8, I8])
def test_residual_blocks_have_no_floats_between(dtype: torch.dtype) -> None:
    result, report = quantized(Residual().eval(), dtype=dtype)
    assert types(result, X) == {
        "stem": (dtype, dtype),
        "a": (dtype, dtype),
        "b": (dtype, dtype, dtype),
        "c": (dtype, dtype),
        # The mean reads floats, so the residual is one.
        "d": (dtype, F32, F32),
        "fc": (dtype, F32),
    }
    assert sum(isinstance(part, Quantize) for part in result.modules()) == 2
    assert sum(isinstance(part, Dequantize) for part in result.modules()) == 1
    short = str(dtype).removeprefix("torch.")
    assert became(report)["b"] == f"{short} -> {short}"
    assert became(report)["d"] == f"{short} -> float32"


def test_symmetric_integers_have_no_zero_point() -> None:
    result, report = quantized(Residual().eval(), dtype=I8, symmetric=True)
    assert {layer.input_zero_point for layer in report.layers} == {0}
    for part in layers(result).values():
        assert (part.zero_point, part.out_zero_point, part.residual_zero_point) == (0, 0, 0)


#: What stands between two convolutions, and whether integers go through it.
BETWEEN: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "max_pool2d": (lambda x: functional.max_pool2d(x, 3, 2, 1, ceil_mode=True), True),
    "nearest": (lambda x: functional.interpolate(x, scale_factor=3), True),
    "bilinear": (lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"), False),
    "pad": (lambda x: functional.pad(x, (1, 2, 0, 1)), True),
    "pad with ones": (lambda x: functional.pad(x, (1, 2), value=1.0), False),
    "reflect": (lambda x: functional.pad(x, (1, 2, 0, 1), mode="reflect"), True),
    "permute": (lambda x: x.permute(0, 1, 3, 2), True),
    "list": (lambda x: torch.cat(list(x.chunk(2, 1))[::-1], 1), True),
    "shuffle": (lambda x: functional.channel_shuffle(x, 2), True),
    "view": (lambda x: x.reshape(x.shape[0], 4, -1).flatten(2).view(x.shape), True),
    "chunk": (lambda x: torch.cat([x.chunk(2, 1)[1], x.chunk(2, 1)[0]], 1), True),
    "cat and relu": (lambda x: torch.relu(torch.cat([x[:, 2:], x[:, :2]], 1)), True),
    "dropout": (lambda x: functional.dropout(x, training=False), True),
    "mean": (lambda x: functional.avg_pool2d(x, 2), False),
    "sum": (lambda x: x + 1, False),
}


@pytest.mark.parametrize("dtype", [U8, I8])
@pytest.mark.parametrize("name", list(BETWEEN))
def test_what_integers_go_through(name: str, dtype: torch.dtype) -> None:
    between, passes = BETWEEN[name]
    # A convolution with a stride takes no enlargement.
    net = network(lambda self, x: self.b(between(self.a(x))), a=conv(), b=conv(stride=2))
    result, _ = quantized(net, dtype=dtype)
    found = types(result, X)
    assert found["a"] == (dtype, dtype if passes else F32)
    assert found["b"] == (dtype, F32)
    if passes:
        # Exactly what the same does to the floats that the integers stand for.
        first, second = layers(result)["a"], layers(result)["b"]
        step = first.out_scale
        assert step is not None
        (quantizer,) = (part for part in result.modules() if isinstance(part, Quantize))
        steps = first(quantizer(X))
        floats = between((steps.double() - first.out_zero_point) * step)
        wanted = second((floats / step).round().add(first.out_zero_point).to(dtype))
        assert torch.equal(result(X), wanted)


def test_poolings_of_integers() -> None:
    """As PyTorch pools floats, for every geometry that it allows."""
    drawn = random.Random(5)
    for trial in range(200):
        rank = drawn.choice((1, 2, 3))
        size, stride, dilation = (tuple(drawn.randint(1, 3) for _ in range(rank)) for _ in range(3))
        padding = tuple(drawn.randint(0, k // 2) for k in size)
        ceil_mode = drawn.random() < 0.5
        shape = [drawn.randint(d * (k - 1) + 1, 9) for k, d in zip(size, dilation, strict=True)]
        x = integers(2, 3, *shape, dtype=drawn.choice((U8, I8)), seed=trial)
        pool: Callable[..., Tensor] = getattr(functional, f"max_pool{rank}d")
        wanted = pool(x.double(), size, stride, padding, dilation, ceil_mode)
        actual = max_pool(last(x), size, stride, padding, dilation, ceil_mode)
        assert actual.dtype == x.dtype
        assert torch.equal(actual.double(), wanted)


MODULES: dict[str, nn.Module] = {
    "MaxPool2d": nn.MaxPool2d((2, 3), (1, 2), (1, 0), 1),
    "Upsample": nn.Upsample(scale_factor=2),
    "ZeroPad2d": nn.ZeroPad2d((1, 0, 2, 1)),
    "ConstantPad2d": nn.ConstantPad2d(1, 0.0),
    "ReplicationPad2d": nn.ReplicationPad2d(1),
    "ChannelShuffle": nn.ChannelShuffle(2),
    "Identity": nn.Identity(),
    "Dropout": nn.Dropout(),
}


# What enlarges an image has a library of its own.
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.extended if n == "Upsample" else ()) for n in MODULES],
)
def test_modules_that_integers_go_through(name: str) -> None:
    net = network(lambda self, x: self.b(self.m(self.a(x))), a=conv(), m=MODULES[name], b=conv())
    result, _ = quantized(net)
    assert types(result, X) == {"a": (U8, U8), "b": (U8, F32)}


TRANSPOSED: dict[str, tuple[nn.Module, bool]] = {
    "2 taps, 2 steps": (nn.ConvTranspose2d(4, 4, 2, 2), True),
    "4 taps, 2 steps": (nn.ConvTranspose2d(4, 4, 4, 2), True),
    "groups": (nn.ConvTranspose2d(4, 4, (2, 3), (2, 3), groups=2, bias=False), True),
    "longer": (nn.ConvTranspose2d(4, 4, 2, 2, output_padding=1), False),
    # Phases with taps on one side and on the other: several convolutions.
    "a border": (nn.ConvTranspose2d(4, 4, 4, 2, 1), False),
}


@pytest.mark.parametrize("name", list(TRANSPOSED))
def test_transposed_convolutions(name: str) -> None:
    """One convolution computes all phases, which are interleaved as integers."""
    module, passes = TRANSPOSED[name]
    net = network(
        lambda self, x: self.b(torch.relu(self.m(torch.relu(self.a(x))))),
        a=conv(),
        m=module,
        b=conv(),
    )
    result, report = quantized(net)
    found = types(result, X)
    if not passes:
        assert found == {"a": (U8, F32), "b": (U8, F32)}
        return
    assert found == {"a": (U8, U8), "m": (U8, U8), "b": (U8, F32)}
    assert [layer.kind for layer in report.layers] == ["Conv2d", "ConvTranspose2d", "Conv2d"]
    torch.testing.assert_close(result(X[0]), result(X)[0])
    _, report = quantized(net, activations="per_channel")
    assert report.layers[2].note == "per tensor: input: m is a ConvTranspose2d"


@pytest.mark.parametrize("dtype", [U8, I8])
def test_linear_layers(dtype: torch.dtype) -> None:
    """Of vectors and of the pixels of an image, whose channels are last then."""

    def forward(self: Any, x: Tensor) -> Any:
        pixels = self.inner(torch.relu(self.a(x)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.last(torch.flatten(self.b(pixels), 1))

    net = network(
        forward, a=conv(), inner=nn.Linear(4, 6, bias=False), b=conv(6, 2), last=nn.Linear(144, 3)
    )
    result, report = quantized(net, dtype=dtype)
    assert types(result, X) == {
        "a": (dtype, dtype),
        "inner": (dtype, dtype),
        "b": (dtype, dtype),
        "last": (dtype, F32),
    }
    assert {layer.name: layer.kind for layer in report.layers}["inner"] == "Linear"
    _, report = quantized(net, dtype=dtype, keep=["last"])
    assert became(report)["last"] == "float"


def test_linear_layers_whose_weight_is_read_stay() -> None:
    net = network(
        lambda self, x: self.fc(self.a(x)) * self.fc.weight.sum(), a=conv(), fc=nn.Linear(8, 3)
    )
    _, report = quantized(net)
    assert became(report) == {"a": "uint8 -> float32"}


class Excited(nn.Module):
    """A block of squeeze and excitation between two convolutions."""

    def __init__(self, pool: nn.Module | None) -> None:
        super().__init__()
        self.a, self.b = conv(4, 8), conv(8, 4)
        self.pool, self.first, self.second = pool, nn.Conv2d(8, 3, 1), nn.Conv2d(3, 8, 1)

    def forward(self, x: Tensor) -> Any:
        x = functional.silu(self.a(x))
        mean = x.mean((2, 3), keepdim=True) if self.pool is None else self.pool(x)
        factor = torch.sigmoid(self.second(torch.relu(self.first(mean))))
        return self.b(factor * x)


@pytest.mark.parametrize("dtype", [U8, I8])
@pytest.mark.parametrize("pool", [None, nn.AdaptiveAvgPool2d(1)])
def test_squeeze_and_excitation(pool: nn.Module | None, dtype: torch.dtype) -> None:
    """Integers are averaged and multiplied; each image has factors of its own."""
    net = Excited(pool).eval()
    result, report = quantized(net, dtype=dtype)
    assert types(result, X) == {
        "a": (dtype, dtype),
        "first": (dtype, dtype),
        "second": (dtype, F32),
        "b": (dtype, F32),
    }
    assert {layer.kind: layer.became for layer in report.layers}["Product"] == (
        f"{str(dtype)[6:]} -> {str(dtype)[6:]}"
    )
    assert [type(part) for part in result.modules()].count(QuantizedMean) == 1
    for one, both in zip((result(X[:1]), result(X[1:])), result(X).split(1), strict=True):
        torch.testing.assert_close(one, both)
    if pool is not None:
        torch.testing.assert_close(result(X[0]), result(X)[0])


def test_what_a_product_computes() -> None:
    product = Product(mt.Conv2d(4, 8, 1))
    x, factor = integers(2, 8, 5, 3, dtype=U8), draw(2, 8, 1, 1)
    before, after = Quantization(0.25, 7, "uint8"), Quantization(0.5, 11, "int8")
    values = product((x.double() - 7) * 0.25, factor.double())
    wanted = (values / 0.5).round().add(11).clamp(-128, 127)
    off = (QuantizedProduct(product, before, after)(x, factor) - wanted).abs()
    # Where float32 rounds to the other side of a half.
    assert off.max() <= 1 and off.mean() < 0.02
    torch.testing.assert_close(QuantizedProduct(product, before, None)(x, factor), values.float())


def test_other_ranks() -> None:
    for rank, kind, pool in ((1, nn.Conv1d, nn.MaxPool1d), (3, nn.Conv3d, nn.MaxPool3d)):
        batches = [draw(2, 4, *(8,) * rank, seed=seed) for seed in (1, 2)]
        net = nn.Sequential(kind(4, 6, 3), pool(2, ceil_mode=True), nn.ReLU(), kind(6, 2, 2))
        result, report = quantize(net.eval(), batches, dtype=I8)
        assert types(result, batches[0]) == {"0": (I8, I8), "3": (I8, F32)}
        assert report.error is not None and report.error < 0.05
        # Without a batch.
        torch.testing.assert_close(result(batches[0][0]), result(batches[0])[0])


def test_joined_tensors_share_a_scale() -> None:
    """And floats that are joined with integers become integers before."""

    def joined(self: Any, x: Tensor) -> Any:
        a = torch.relu(self.a(x))
        b = functional.max_pool2d(self.b(x) * 3, 3, 1, 1)
        return self.d(torch.cat([a, b, self.c(x)], dim=1))

    net = network(joined, a=conv(), b=conv(), c=conv(), d=conv(12, 4))
    result, report = quantized(net)
    assert types(result, X) == {"a": (U8, U8), "b": (U8, F32), "c": (U8, U8), "d": (U8, F32)}
    scales = {layer.name: layer.output_scale for layer in report.layers}
    assert scales["a"] == scales["c"] == report.layers[3].input_scale
    both = [torch.relu(net.a(X)).max(), net.c(X).max(), (3 * net.b(X)).max()]
    assert scales["a"] is not None
    assert scales["a"] * 255 >= 0.8 * max(map(float, both))


def test_floats_that_others_read_stay() -> None:
    """A tensor that a sigmoid reads too is one of floats, made integers once for two readers."""
    net = network(
        lambda self, x: self.b(y := self.a(x)) + self.c(y) + torch.sigmoid(y),
        a=conv(),
        b=conv(),
        c=conv(),
    )
    result, _ = quantized(net)
    assert types(result, X) == {"a": (U8, F32), "b": (U8, F32), "c": (U8, F32, F32)}
    assert sum(isinstance(part, Quantize) for part in result.modules()) == 2


def test_what_is_written_to_becomes_integers_for_each_reader() -> None:
    def written(self: Any, x: Tensor) -> Any:
        y = x * 1
        first = self.a(y)
        y.mul_(-20)
        return first + self.b(y)

    result, report = quantized(network(written, a=conv(), b=conv()))
    assert sum(isinstance(part, Quantize) for part in result.modules()) == 2
    assert report.layers[0].input_scale == report.layers[1].input_scale


def test_parts_that_nobody_reads() -> None:
    def divided(self: Any, x: Tensor) -> Any:
        first, _ = torch.relu(self.a(x)).chunk(2, dim=1)
        return self.b(first[:, :, 1:])

    result, _ = quantized(network(divided, a=conv(), b=conv(2, 4)))
    assert types(result, X) == {"a": (U8, U8), "b": (U8, F32)}


def test_what_is_no_tensor_is_no_part_of_one() -> None:
    def largest(self: Any, x: Tensor) -> Any:
        return self.b(torch.cat([self.a(x), torch.max(x, 1, keepdim=True)[0]], 1))

    result, _ = quantized(network(largest, a=conv(), b=conv(5, 4)))
    assert types(result, X) == {"a": (U8, U8), "b": (U8, F32)}


def test_a_sum_of_floats_reads_no_integers() -> None:
    """The residual of a convolution that gives floats is not rounded for it alone."""
    net = network(lambda self, x: self.a(x) + self.b(x), a=conv(), b=conv())
    result, _ = quantized(net)
    assert types(result, X) == {"a": (U8, F32), "b": (U8, F32, F32)}
    assert not any(isinstance(part, Dequantize) for part in result.modules())


def test_enlarging_convolutions() -> None:
    """``convert`` makes the enlargement a part of the convolution, which integers take apart."""
    net = network(
        lambda self, x: self.b(functional.interpolate(self.a(x), scale_factor=2)),
        a=conv(),
        b=conv(),
    )
    result, _ = quantized(net)
    assert layers(result)["b"].upsample != 1
    assert types(result, X) == {"a": (U8, U8), "b": (U8, F32)}


def test_borders_that_repeat() -> None:
    for mode in ("reflect", "replicate", "circular"):
        net = network(
            lambda self, x: self.b(self.a(x)), a=conv(padding_mode=mode), b=conv(padding_mode=mode)
        )
        result, _ = quantized(net, dtype=I8)
        assert types(result, X) == {"a": (I8, I8), "b": (I8, F32)}


def test_normalizations_groups_and_activations() -> None:
    net = network(
        lambda self, x: functional.silu(
            self.n(self.b(functional.hardswish(functional.leaky_relu(self.a(x), 0.2))))
        ),
        a=conv(4, 8, groups=2),
        b=conv(8, 8, groups=8, stride=2),
        n=nn.BatchNorm2d(8),
    )
    result, _ = quantized(net)
    assert types(result, X)["b"] == (U8, F32)
