"""Global average pooling in converted models, and what of it shows without a GPU."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from tests.interop.conversion import X, conv, convert_and_compare, network
from tests.interop.torch_tensors import draw, last
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional

import maxconv.torch as mt
from maxconv import Quantization
from maxconv.torch import _pooling
from maxconv.torch._excitation import QuantizedMean
from maxconv.torch._quantized import Quantize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [(2, 6, 9), (2, 6, 9, 4), (2, 6, 3, 4, 5), (1, 1, 7, 7), (1, 133, 1, 1), (3, 960, 7, 7)],
    ids=str,
)
def test_channels_last_tensors_of_a_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    # With an offset, sums are large: a float32 sum is off by half a unit in its last place for each
    # of 64 pixels, and for each 64 of them; then comes the rounding to the type.
    x = last(draw(*shape)).add_(3).to(dtype)
    exact = x.double().mean(tuple(range(2, x.dim())), keepdim=True)
    for actual in (mt.global_avg_pool(x), torch.ops.maxconv.global_avg_pool(x)):
        assert actual.dtype == dtype and actual.is_contiguous()
        error = ((actual.double() - exact) / exact.abs()).abs().max()
        assert error <= torch.finfo(dtype).eps / 2 + 130 * 2**-24


def test_many_pixels_and_threads() -> None:
    threads = torch.get_num_threads()
    x = last(draw(1, 70, 300, 301)) + 1
    exact = x.double().mean((2, 3), keepdim=True)
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            actual = mt.global_avg_pool(x)
            # 64 and 1,411 float32 sums, one after the other: a few of the errors add up.
            assert (actual.double() - exact).abs().max() < 64 * 2**-24
    finally:
        torch.set_num_threads(threads)


def test_nan_and_infinity_stay_in_their_channel() -> None:
    x = last(draw(1, 20, 5, 5)).clone()
    x[0, 3, 2, 2], x[0, 17, 1, 1] = math.nan, math.inf
    y = mt.global_avg_pool(x).flatten()
    assert y[3].isnan() and y[17].isinf() and y.isfinite().sum() == 18


def test_others_are_pytorchs() -> None:
    for x in (
        draw(2, 6, 9),
        draw(2, 6, 9, 4),
        draw(2, 6, 3, 4, 5),
        last(draw(2, 6, 4, 4)).double(),
    ):
        expected = x.mean(tuple(range(2, x.dim())), keepdim=True)
        assert torch.equal(mt.global_avg_pool(x), expected)
        if x.dtype != torch.float64:
            assert torch.equal(torch.ops.maxconv.global_avg_pool(x), expected)
    x = draw(1, 2, 3, 3).requires_grad_()
    cast(Any, mt.global_avg_pool(x).sum()).backward()
    assert x.grad is not None and torch.allclose(x.grad, torch.full_like(x, 1 / 9))


def test_bad_input() -> None:
    with pytest.raises(TypeError, match=r"^input: a list is not a torch.Tensor"):
        mt.global_avg_pool([1.0])  # type: ignore[arg-type] # the mistake
    for shape in ((3, 4), (1, 2, 3, 4, 5, 6)):
        with pytest.raises(ValueError, match=rf"^input: {len(shape)} dimensions; \[N, C, \*spa"):
            mt.global_avg_pool(torch.zeros(shape))


def test_the_fake_output_has_the_kernels_strides() -> None:
    with FakeTensorMode():
        made = torch.empty(2, 5, 7, 6, device="cuda").to(memory_format=torch.channels_last)
        fake = torch.ops.maxconv.global_avg_pool(made)
    assert fake.shape == (2, 5, 1, 1) and fake.stride() == (5, 1, 5, 5)
    assert fake.is_contiguous(memory_format=torch.channels_last)


def test_a_compiled_graph_has_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pooling, "_is_on", lambda input: True)

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return mt.global_avg_pool(x) + 1

    with torch.no_grad():
        program = torch.export.export(Net(), (last(X),), strict=True)
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.maxconv.global_avg_pool.default in called


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (1, 2, 3, 4, 5)])
def test_other_ranks_are_what_they_are_to_pytorch(shape: tuple[int, ...]) -> None:
    def outcome(pool: Any) -> Any:
        try:
            return pool(torch.arange(float(math.prod(shape))).view(shape)).tolist()
        except (RuntimeError, IndexError) as error:
            return str(error)

    expected = outcome(nn.AdaptiveAvgPool2d(1))
    assert isinstance(expected, str) == (len(shape) == 1)
    assert outcome(_pooling.GlobalAvgPool2d(1)) == expected
    assert outcome(lambda x: _pooling.pooled(x, 2)) == expected


FORMS: dict[str, Any] = {
    "module": lambda m, x: m.pool(m.conv(x)),
    "function": lambda m, x: functional.adaptive_avg_pool2d(m.conv(x), 1),
    "function of a pair": lambda m, x: functional.adaptive_avg_pool2d(
        m.conv(x), output_size=(1, 1)
    ),
    "method": lambda m, x: m.conv(x).mean((2, 3), keepdim=True),
    "method, no dimensions kept": lambda m, x: m.conv(x).mean([-1, -2]),
    "torch.mean": lambda m, x: torch.mean(m.conv(x), dim=(-2, -1), keepdim=True),
}

OTHERS: dict[str, Any] = {
    "larger": lambda m, x: functional.adaptive_avg_pool2d(m.conv(x), (1, 2)),
    "one dimension": lambda m, x: m.conv(x).mean(2),
    "channels": lambda m, x: m.conv(x).mean((1, 2, 3)),
    "all": lambda m, x: m.conv(x).mean(),
    "another dtype": lambda m, x: m.conv(x).mean((2, 3), dtype=torch.float64).float(),
    "twice the same": lambda m, x: m.conv(x).flatten(2).mean((-1,), keepdim=True),
}


@pytest.mark.parametrize("name", FORMS)
def test_means_over_pixels_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []
    is_ours = _pooling._is_ours

    def noting(input: Tensor) -> bool:
        seen.append(input.shape)
        return is_ours(input)

    monkeypatch.setattr(_pooling, "_is_ours", noting)
    model = network(FORMS[name], conv=conv(), pool=nn.AdaptiveAvgPool2d((1, 1)))
    convert_and_compare(model, X)
    assert set(seen) == {X.shape}


@pytest.mark.parametrize("name", OTHERS)
def test_other_means_are_right(name: str) -> None:
    convert_and_compare(network(OTHERS[name], conv=conv()), X)


def test_modules_keep_their_class_and_mode() -> None:
    pool = nn.AdaptiveAvgPool2d(1)
    model = network(lambda m, x: m.pool(m.conv(x)) + m.pool(x), conv=conv(), pool=pool)
    converted, _ = convert_and_compare(model, X)
    assert isinstance(converted.pool, nn.AdaptiveAvgPool2d) and not converted.pool.training
    assert type(converted.pool) is not nn.AdaptiveAvgPool2d
    assert torch.equal(cast(Any, converted.pool)(X[0]), pool(X[0]))


def test_modules_with_hooks_stay() -> None:
    pool = nn.AdaptiveAvgPool2d(1)
    pool.register_forward_hook(lambda module, inputs, output: output + 1)
    model = nn.Sequential(conv(), pool).eval()
    converted, _ = mt.convert(model)
    with torch.no_grad():
        assert torch.allclose(converted(X), model(X), atol=1e-5)


def test_modules_that_cannot_be_traced_are_searched() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.pool = conv(), nn.AdaptiveAvgPool2d(1)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.pool(self.conv(x))
            return y if y.sum() > 0 else -y

    converted, report = convert_and_compare(Branches().eval(), X)
    assert report.untraced
    assert isinstance(converted.pool, _pooling.GlobalAvgPool2d)


# Integers ---------------------------------------------------------------------------------------

BEFORE = Quantization(scale=0.03, zero_point=7, dtype="uint8")
AFTER = Quantization(scale=0.011, zero_point=-3, dtype="int8")


def integers(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    limits = torch.iinfo(dtype)
    drawn = torch.Generator().manual_seed(1)
    return torch.randint(limits.min, limits.max + 1, shape, generator=drawn).to(dtype)


@pytest.mark.parametrize(
    "shape", [(2, 70, 9, 8), (1, 5, 3, 4, 5), (1, 3, 11), (2, 4, 1, 1)], ids=str
)
def test_means_of_integers(shape: tuple[int, ...]) -> None:
    x = last(integers(*shape))
    places = tuple(range(2, len(shape)))
    exact = 0.03 * (x.double().mean(places, keepdim=True) - 7)
    actual = QuantizedMean(BEFORE, places, True, torch.float32)(x)
    # The sums are exact; three float32 numbers are rounded, the largest of 255 steps.
    assert actual.dtype == torch.float32
    assert (actual.double() - exact).abs().max() <= 3 * 255 * 0.03 * 2**-24
    by_pytorch = QuantizedMean(BEFORE, places, True, torch.float32)(x.contiguous())
    assert (by_pytorch - actual).abs().max() <= 3 * 255 * 0.03 * 2**-24
    again = QuantizedMean(BEFORE, places, True, torch.float32, AFTER)(x)
    steps = (exact / float(AFTER.scale)).clamp(-125, 130)
    assert again.dtype == torch.int8 and again.shape == actual.shape
    # Rounded once, of a number that is not exact.
    assert ((again.double() + 3) - steps).abs().max() <= 0.5 + 1e-4
    assert torch.equal(again, Quantize(AFTER, -1)(actual))


def test_means_of_all_other_dimensions_are_pytorchs() -> None:
    x = last(integers(2, 4, 5, 6))
    for places, kept in (((2,), True), ((1, 2, 3), True), ((2, 3), False)):
        actual = QuantizedMean(BEFORE, places, kept, torch.float32)(x)
        exact = 0.03 * (x.double().mean(places, keepdim=kept) - 7)
        assert actual.shape == exact.shape and torch.allclose(actual.double(), exact, atol=1e-5)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("order", ["first", "last", "gaps"])
def test_integers_of_floats(dtype: str, order: str) -> None:
    limits = torch.iinfo(getattr(torch, dtype))
    known = Quantization(scale=0.25, zero_point=(limits.min + limits.max) // 2, dtype=dtype)
    # Halves of steps, which go to even; what saturates; infinities; and a NaN, the least integer.
    x = torch.arange(-1200, 1200).float().view(1, 4, 20, 30) / 8
    x[0, 0, 0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    x = {"first": x, "last": last(x), "gaps": x.repeat(1, 1, 1, 2)[..., ::2]}[order]
    actual = Quantize(known, -3)(x)
    steps = (x.double() / 0.25).round() + known.zero_point
    expected = steps.nan_to_num(limits.min, math.inf, -math.inf).clamp(limits.min, limits.max)
    assert torch.equal(actual, expected.to(actual.dtype)) or order == "gaps"
    finite = x.isfinite()
    assert torch.equal(actual[finite], expected.to(actual.dtype)[finite])
    assert actual.stride() == x.stride() or order == "gaps"


def test_a_quantized_model_averages_to_integers() -> None:
    class Excitation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = conv(), nn.Conv2d(4, 4, 1)
            self.pool, self.down, self.up = (
                nn.AdaptiveAvgPool2d(1),
                nn.Conv2d(4, 2, 1),
                nn.Conv2d(2, 4, 1),
            )

        def forward(self, x: Tensor) -> Tensor:
            y = functional.relu(self.conv(x))
            factor = torch.sigmoid(self.up(functional.relu(self.down(self.pool(y)))))
            return cast(Tensor, self.last(y * factor))

    small, _ = mt.quantize(Excitation().eval(), [X])
    means = [part for part in small.modules() if isinstance(part, QuantizedMean)]
    assert len(means) == 1 and means[0].rounded is not None
    # That of the model's input is the only step that makes integers of floats.
    assert sum(isinstance(part, Quantize) for part in small.modules()) == 1
    calls = [small(X) for _ in range(3)]
    assert all(torch.equal(calls[0], later) for later in calls[1:])
