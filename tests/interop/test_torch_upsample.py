"""Convolutions of enlarged images in PyTorch: functions, modules, ``convert``, the backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.interop.backend import called, compare, reported
from tests.interop.conversion import convert_and_compare, fused, network
from tests.interop.torch_tensors import CONVOLVE, REFERENCE, close, draw, last
from torch import Tensor, nn
from torch.nn import functional

import maxconv.torch as mt

pytestmark = pytest.mark.torch


def exact(x: Tensor, w: Tensor, b: Tensor | None, factors: Any, *geometry: Any) -> Tensor:
    """What PyTorch computes in float64, the enlarged image in memory."""
    rank = w.dim() - 2
    whole = (factors,) * rank if isinstance(factors, int) else factors
    large = functional.interpolate(x.double(), scale_factor=tuple(map(float, whole)))
    bias = None if b is None else b.double()
    return REFERENCE[rank](large, w.double(), bias, *geometry)


def check(actual: Tensor, x: Tensor, w: Tensor, b: Tensor | None, *given: Any) -> None:
    """Compares with PyTorch's; summed taps have one rounding more."""
    expected = exact(x, w, b, *given)
    size = exact(x.abs(), w.abs(), None if b is None else b.abs(), *given)
    unit = {torch.float32: 0.0, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}[actual.dtype]
    close(actual, expected, size * (1 + unit * 2.0**24 / (w[0].numel() + 5)), w[0].numel() + 1)


GEOMETRIES: dict[str, tuple[int, int, Any, int, int, int]] = {
    "as decoders have it": (2, 3, 2, 1, 1, 1),
    "without padding": (2, 3, 2, 0, 1, 1),
    "five taps": (2, 5, 2, 2, 1, 1),
    "dilation": (2, 3, 2, 2, 2, 1),
    "groups": (2, 3, 2, 1, 1, 2),
    "along one axis": (2, 3, (1, 3), 1, 1, 1),
    "signals": (1, 3, 2, 1, 1, 1),
    "volumes": (3, 3, (1, 2, 2), 1, 1, 1),
}


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("order", [torch.clone, last])
def test_functions(name: str, order: Callable[[Tensor], Tensor]) -> None:
    rank, taps, factors, padding, dilation, groups = GEOMETRIES[name]
    x, b = draw(2, 6, *(5, 7, 4)[:rank]), draw(8)
    w = draw(8, 6 // groups, *(taps,) * rank)
    geometry = (1, padding, dilation, groups)
    y = CONVOLVE[rank](order(x), w, b, *geometry, upsample=factors)
    check(y, x, w, b, factors, *geometry)
    assert y.stride() == order(torch.zeros(y.shape)).stride()


def test_images_of_few_filters_and_without_a_batch() -> None:
    x, w = draw(6, 9, 5), draw(3, 6, 3, 3)
    check(mt.conv2d(x, w, None, 1, 1, upsample=2)[None], x[None], w, None, 2, 1, 1)
    assert mt.conv2d(x[None][:0], w, None, 1, 1, upsample=2).shape == (0, 3, 18, 10)


@pytest.mark.extended
def test_16_bits() -> None:
    dtype = torch.bfloat16
    x, w, b = draw(1, 6, 5, 7, dtype=dtype), draw(8, 6, 3, 3, dtype=dtype), draw(8, dtype=dtype)
    check(mt.conv2d(last(x), w, b, 1, 1, upsample=2), x, w, b, 2, 1, 1)


def test_what_is_behind() -> None:
    x, w, b = draw(1, 6, 5, 7), draw(8, 6, 3, 3), draw(8)
    y = mt.conv2d(x, w, b, 1, 1, upsample=2, activation="relu")
    z = exact(x, w, b, 2, 1, 1).relu()
    torch.testing.assert_close(y.double(), z, rtol=1e-5, atol=1e-4)


def test_a_module_sums_its_weight_once_and_again_after_a_change() -> None:
    x = last(draw(1, 6, 5, 7))
    module = mt.Conv2d(6, 8, 3, padding=1, upsample=2)
    assert "upsample=2" in repr(module)
    for _ in range(2):
        for _ in range(2):
            check(module(x), x, module.weight, module.bias, 2, 1, 1)
        with torch.no_grad():
            module.weight.mul_(2)
            assert module.bias is not None
            module.bias.add_(1)


def test_a_padding_that_repeats_the_enlarged_image() -> None:
    x = draw(1, 6, 5, 7)
    module = mt.Conv2d(6, 8, 3, padding=1, upsample=(2, 1), padding_mode="reflect")
    large = functional.interpolate(x, scale_factor=(2.0, 1.0))
    padded = functional.pad(large, (1, 1, 1, 1), mode="reflect")
    for given, expected in ((x, padded), (x[0], padded[0])):
        z = functional.conv2d(expected, module.weight, module.bias)
        torch.testing.assert_close(module(given), z, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"upsample": 0}, r"upsample: \(0, 0\) has a non-positive entry"),
        ({"upsample": (2, 2, 2)}, r"upsample: \(2, 2, 2\) has 3 entries; 2 are allowed"),
        ({"upsample": 2, "stride": 2}, r"upsample: \(2, 2\) with stride \(2, 2\) is not supported"),
        ({"upsample": 2, "residual": draw(1, 8, 10, 14)}, "residual: given beside upsample"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(arguments: dict[str, Any], sentence: str) -> None:
    x, w = draw(1, 6, 5, 7), draw(8, 6, 3, 3)
    with pytest.raises(ValueError, match=sentence):
        mt.conv2d(x, w, padding=1, **arguments)
    with pytest.raises(TypeError, match=r"upsample: 2\.5 is a float"):
        mt.Conv2d(6, 8, 3, upsample=2.5)  # type: ignore[arg-type] # a type that is refused
    with pytest.raises(TypeError, match="upsample: True is a bool"):
        mt.conv2d(x, w, padding=1, upsample=True)


def test_opcheck() -> None:
    x, w, b = last(draw(2, 6, 4, 5)), draw(8, 3, 3, 3), draw(8)
    scalars = (1.0, 0.0, 0.0, 0.0, 0.0)
    others = (
        (1, 1),
        (1, 1),
        (1, 1),
        2,
        (1, 0),
        scalars,
        None,
        None,
        (2, 3),
        (0, 0, 0),
        None,
        True,
        False,
    )
    operator = torch.ops.maxconv.conv.default
    for input in (x, x[:0]):
        torch.library.opcheck(operator, (input, w, b, None, None, *others))
    with pytest.raises(ValueError, match="residual: given beside upsample"):
        operator(x, w, b, torch.zeros(2, 8, 8, 15), None, *others)


# Models -----------------------------------------------------------------------------------------


def conv(taps: int = 3, groups: int = 1, channels: int = 4, **others: Any) -> nn.Conv2d:
    return nn.Conv2d(4, channels, taps, padding=taps // 2, groups=groups, **others)


X = draw(2, 4, 6, 5)

#: Models whose enlargement becomes part of the convolution ``conv``.
TAKEN: dict[str, nn.Module] = {
    "a module": nn.Sequential(nn.Upsample(scale_factor=2), conv()),
    "with what follows": nn.Sequential(
        nn.Upsample(scale_factor=2, mode="nearest-exact"), conv(), nn.BatchNorm2d(4), nn.SiLU()
    ),
    "UpsamplingNearest2d": nn.Sequential(nn.UpsamplingNearest2d(scale_factor=2), conv()),
    "a function": network(
        lambda m, x: m.conv(functional.interpolate(x, scale_factor=2.0)).relu(), conv=conv()
    ),
    "along one axis": network(
        lambda m, x: m.conv(functional.interpolate(x, None, (1.0, 3.0), "nearest")), conv=conv()
    ),
    "an addition stays behind": network(
        lambda m, x: m.conv(functional.interpolate(x, scale_factor=2)) + 1 * m.skip(x).mean(),
        conv=conv(), skip=conv(),
    ),
    "groups": nn.Sequential(nn.Upsample(scale_factor=2), conv(groups=2)),
}  # fmt: skip

#: Models whose enlargement stays, though the backend need not leave all that ``convert`` leaves.
LEFT: dict[str, nn.Module] = {
    "another mode": nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), conv()),
    "no integer": nn.Sequential(nn.Upsample(scale_factor=1.5), conv()),
    "one tap": nn.Sequential(nn.Upsample(scale_factor=2), conv(1)),
    "depthwise": nn.Sequential(nn.Upsample(scale_factor=2), conv(groups=4)),
    "a stride": nn.Sequential(nn.Upsample(scale_factor=2), conv(stride=2)),
}


def taken(report: mt.ConversionReport) -> list[bool]:
    return [entry.fused[:1] == ("upsample",) for entry in report.replaced]


@pytest.mark.parametrize("name", TAKEN)
def test_convert_takes_it(name: str) -> None:
    converted, report = convert_and_compare(TAKEN[name].eval(), X)
    assert any(taken(report)) and not report.left
    kinds = {type(module) for module in converted.modules()}
    assert kinds.isdisjoint((nn.Upsample, nn.UpsamplingNearest2d))
    if name == "with what follows":
        assert fused(report)["1"] == ("upsample", "BatchNorm2d 2", "silu")


OTHER_LEFT: dict[str, nn.Module] = {
    "another size": network(lambda m, x: m.conv(functional.interpolate(x, (12, 10))), conv=conv()),
    "another padding": nn.Sequential(nn.Upsample(scale_factor=2), conv(padding_mode="reflect")),
    "two readers": network(
        lambda m, x: (lambda y: m.conv(y) + y)(functional.interpolate(x, scale_factor=2)),
        conv=conv(),
    ),
    "a write in between": network(
        lambda m, x: (lambda z: (lambda y: (z.add_(1), m.conv(y))[1])(
            functional.interpolate(z, scale_factor=2)
        ))(x * 1),
        conv=conv(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*LEFT, *OTHER_LEFT])
def test_convert_leaves_it(name: str) -> None:
    _, report = convert_and_compare((LEFT | OTHER_LEFT)[name].eval(), X)
    assert taken(report) == [False]


@pytest.mark.parametrize("name", TAKEN)
def test_the_backend_takes_it(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = TAKEN[name].eval()
    count = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    run = compare(model, X, count=count)
    with torch.no_grad():
        assert not any("upsample" in name for name in called(run, X)[1])
    assert "upsample" in reported(caplog, model, X)


@pytest.mark.parametrize("name", LEFT)
def test_the_backend_leaves_it(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = LEFT[name].eval()
    compare(model, X, count=1)
    assert "upsample" not in reported(caplog, model, X)


def test_the_backend_takes_it_with_any_sizes() -> None:
    model = TAKEN["a function"].eval()
    run = compare(model, X, count=1, dynamic=True)
    with torch.no_grad():
        result, calls = called(run, draw(2, 4, 9, 11))
    assert result.shape == (2, 4, 18, 22)
    assert not any("upsample" in name for name in calls)
