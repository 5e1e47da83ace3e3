"""``maxconv.torch.quantize``: which convolutions become integers, what they compute, the report."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.interop.conversion import conv
from tests.interop.quantized import (
    BATCHES,
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
    reference,
    types,
)
from torch import Tensor, nn
from torch.nn import functional

import maxconv
import maxconv.torch as mt
from maxconv.torch._arguments import read
from maxconv.torch._functional import convolve


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


# The convolution --------------------------------------------------------------------------------


# A library is compiled for each pair of types.
@pytest.mark.parametrize(
    ("dtype", "out"),
    [
        (U8, U8),
        (I8, F32),
        *(
            pytest.param(dtype, out, marks=pytest.mark.extended)
            for dtype in (U8, I8)
            for out in (F32, torch.bfloat16, U8, I8)
            if (dtype, out) not in ((U8, U8), (I8, F32))
        ),
    ],
)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_convolution_is_exact(rank: int, dtype: torch.dtype, out: torch.dtype) -> None:
    """Scales are powers of two: float32 holds every value, halves too, which go to even."""
    x = integers(2, 6, *(7, 6, 5)[:rank], dtype=dtype, seed=1)
    weight = integers(4, 3, *(3, 2, 2)[:rank], seed=2).clamp(min=-127)
    scale = 2.0 ** torch.tensor([-9, -10, -11, -12])
    bias = torch.tensor([1.5, -20, 0, 3.25])
    stride, padding, dilation, groups = (2,) * rank, (1,) * rank, (1,) * rank, 2
    geometry = stride, padding, dilation, groups
    integral = out in (U8, I8)
    options: dict[str, Any] = {
        "zero_point": 7,
        "out_dtype": out,
        "out_scale": 0.5 if integral else None,
        "out_zero_point": 11 if integral else 0,
    }
    shape = reference(x, weight, bias, None, scale, *geometry).shape
    residual = integers(*shape, dtype=out if integral else I8, seed=3)
    others: dict[str, Any] = {"beta": 0.25, "residual_zero_point": 5 if integral else 0}
    formula: Callable[..., Tensor] = reference
    arguments = read(
        rank,
        stride,
        padding,
        dilation,
        groups,
        "relu",
        others["beta"],
        "relu" if integral else None,
        None,
        out,
        zero_points=(7, others["residual_zero_point"], options["out_zero_point"]),
        out_scale=options["out_scale"],
    )
    further = residual if integral else residual.to(out)
    actual = convolve(x, weight, bias, further, scale, arguments)
    wanted = formula(
        *(x, weight, bias, residual, scale, *geometry),
        activation=torch.relu,
        final_activation=torch.relu if integral else lambda value: value,
        **options,
        **others,
    )
    assert actual.dtype == out
    assert len(set(wanted.flatten().tolist())) > 15
    assert torch.equal(actual.double(), wanted.to(out).double())


def test_what_a_network_of_integers_computes() -> None:
    """From the scales of the report and the filters, by the formula."""
    net = network(
        lambda self, x: self.b(torch.relu(self.a(x))),
        a=conv(bias=False),
        b=conv(4, 3),
    )
    result, report = quantize(net, BATCHES, method="minmax")
    first, second = report.layers
    low, high = (float(getattr(torch.stack(BATCHES), end)()) for end in ("min", "max"))
    assert first.input_scale == pytest.approx((high - low) / 255)
    assert first.input_zero_point == round(-low / (high - low) * 255)
    inner = torch.stack([torch.relu(net.a(x)) for x in BATCHES])
    assert first.output_scale == pytest.approx(float(inner.max()) / 255, rel=1e-5)
    assert (first.output_zero_point, second.output_scale) == (0, None)
    assert (second.input_scale, second.input_zero_point) == (first.output_scale, 0)
    filters = (maxconv.quantize_filter(part.weight.numpy()) for part in (net.a, net.b))
    (a, a_scales), (b, b_scales) = (map(torch.from_numpy, filter) for filter in filters)
    # What the rounding of a filter does to the mean of an output is taken from the bias.
    shifts = []
    for part, steps, scale, given in (
        (net.a, a, a_scales, torch.cat(BATCHES)),
        (net.b, b, b_scales, inner.flatten(0, 1)),
    ):
        errors = steps.double() * scale.double().view(-1, 1, 1, 1) - part.weight.double()
        shifts.append(-errors.sum((2, 3)) @ given.double().mean((0, 2, 3)))
    x = X.double().div(first.input_scale).round() + first.input_zero_point
    middle = reference(
        *(x.clamp(0, 255), a, shifts[0], None, a_scales.double() * first.input_scale, 1, 1),
        activation=torch.relu,
        zero_point=first.input_zero_point,
        out_dtype=U8,
        out_scale=first.output_scale,
    )
    bias = net.b.bias + shifts[1]
    wanted = reference(middle, b, bias, None, b_scales.double() * first.output_scale, 1, 1)
    # One step of one pixel where float32 rounds to the other side of a half.
    step = float(first.output_scale * b.abs().max() * b_scales.max())
    actual = result(X)
    assert (actual - wanted).abs().max() <= 1.01 * step
    assert (actual - wanted).abs().median() < 1e-6


# What stays -------------------------------------------------------------------------------------


class Branch(nn.Module):
    """A module that cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(), conv(), conv()
        self.block = nn.Sequential(conv(), nn.ReLU(), conv())

    def forward(self, x: Tensor) -> Any:
        if x.max() > 1e6:
            x = self.c(x)
        return self.block(self.b(self.a(x)))


def test_what_stays_as_it_is() -> None:
    net = nn.Sequential(
        conv(), nn.ReLU(), nn.ConvTranspose2d(4, 4, 4, 2, 1), nn.Sequential(conv(), conv())
    ).eval()
    result, report = quantized(net, keep=["3.1"])
    assert became(report) == {
        "0": "uint8 -> float32",
        "2": "float",
        "3.0": "uint8 -> float32",
        "3.1": "float",
    }
    notes = {layer.name: layer.note for layer in report.layers}
    assert notes["3.1"] == "keep names it"
    assert notes["2"] == "no convolution of integers does what it does"
    assert list(layers(result)) == ["0", "3.0"]
    _, report = quantized(net, keep=["3"])
    assert became(report)["3.0"] == became(report)["3.1"] == "float"


def test_layers_with_large_errors_stay_as_they_are() -> None:
    """Here because of one large value, which leaves the others no steps."""
    net = network(lambda self, x: self.b(self.a(x) * 2.0), a=conv(), b=conv())
    net.a.weight[0] *= 3000
    net.a.bias[0] = 0
    net.b.weight[:, 0] = 0
    _, report = quantize(net, BATCHES)
    large = {layer.name: layer.error for layer in report.layers}
    assert large["b"] > 0.1 > large["a"]
    result, report = quantized(net, max_error=0.1)
    assert became(report) == {"a": "uint8 -> float32", "b": "float"}
    assert report.layers[1].error == pytest.approx(large["b"])
    assert report.layers[1].note == "its error is above 0.1"
    assert list(layers(result)) == ["a"]


def test_weights_that_are_not_finite_stay() -> None:
    net = network(lambda self, x: self.b(self.a(x)), a=conv(), b=conv())
    net.b.weight[0, 0, 0, 0] = torch.inf
    _, report = quantize(net, BATCHES)
    assert became(report) == {"a": "uint8 -> float32", "b": "float"}
    assert report.layers[1].note == "its weight holds NaN or infinity"


class Reader(Branch):
    """A module whose code reads a weight."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.b.weight.sum()


def test_weights_that_code_reads_stay() -> None:
    _, report = quantized(Reader().eval())
    notes = {layer.name: (layer.became, layer.note) for layer in report.layers}
    wanted = "code that cannot be traced may call it otherwise, or read its weight"
    assert notes["a"] == ("float", wanted)
    assert notes["block.0"] == ("uint8 -> uint8", "")


def test_residuals_of_other_shapes_stay() -> None:
    net = network(lambda self, x: self.a(x) + x[:, :, :1], a=conv())
    _, report = quantized(net)
    assert became(report) == {"a": "float"}
    assert report.layers[0].note == "its residual is of another shape or dtype"


def test_modules_that_cannot_be_traced() -> None:
    """Each convolution in one is quantized alone, and what no batch reaches stays."""
    result, report = quantized(Branch().eval())
    assert became(report) == {
        "a": "uint8 -> float32",
        "b": "uint8 -> float32",
        "c": "float",
        "block.0": "uint8 -> uint8",
        "block.2": "uint8 -> float32",
    }
    assert {layer.name: layer.note for layer in report.layers}["c"] == "no batch reaches it"
    assert isinstance(result.c, mt.Conv2d)


class Padded(Branch):
    """A module whose code asks a convolution for its geometry."""

    def forward(self, x: Tensor) -> Any:
        amount = self.a.kernel_size[0] // 2 if self.a.bias is not None else 0
        return super().forward(functional.pad(x, (amount,) * 4))


def test_code_may_ask_for_the_geometry() -> None:
    result, report = quantized(Padded().eval())
    assert became(report)["a"] == "uint8 -> float32"
    assert "a.bias" not in result.state_dict()
    copied = pickle.loads(pickle.dumps(result))
    assert torch.equal(copied(X), result(X))


def test_a_convolution_alone() -> None:
    result, report = quantized(conv().eval())
    assert became(report) == {"(model)": "uint8 -> float32"}
    assert len(layers(result)) == 1


# A scale for each channel -----------------------------------------------------------------------


def test_scales_of_channels_go_into_the_filters() -> None:
    """Where channels differ, the error is smaller; a residual and a SiLU keep one scale."""
    net = network(
        lambda self, x: self.d(functional.silu(self.c(self.b(torch.relu(self.a(x)))))),
        a=conv(),
        b=conv(groups=2),
        c=conv(),
        d=conv(),
    )
    net.a.weight.mul_(torch.tensor([1.0, 30, 0.1, 5]).view(-1, 1, 1, 1))
    net.a.bias.mul_(torch.tensor([1.0, 30, 0.1, 5]))
    net.b.weight.div_(torch.tensor([[1.0, 30], [1, 30], [0.1, 5], [0.1, 5]]).view(4, 2, 1, 1))
    _, alike = quantized(net, error=1)
    result, apart = quantized(net, activations="per_channel")
    errors = [{layer.name: layer.error for layer in r.layers} for r in (alike, apart)]
    assert errors[1]["b"] < 0.5 * errors[0]["b"]
    scales = {layer.name: layer.output_scale for layer in apart.layers}
    assert isinstance(scales["a"], tuple) and isinstance(scales["b"], tuple)
    assert isinstance(scales["c"], float)
    inner = torch.relu(net.a(torch.cat(BATCHES)))
    _, exact = quantized(net, activations="per_channel", method="minmax")
    found = torch.tensor(exact.layers[0].output_scale)
    largest = inner.amax((0, 2, 3)) / 255
    torch.testing.assert_close(
        found, largest.clamp(min=float(largest.max()) / 256), rtol=1e-4, atol=0
    )
    notes = {layer.name: layer.note for layer in apart.layers}
    assert notes["b"] == "per channel"
    assert notes["d"] == "per tensor: input: scales do not pass silu of c"
    assert layers(result)["a"].out_scale == 1.0


def test_residuals_keep_one_scale() -> None:
    _, report = quantized(Residual().eval(), activations="per_channel")
    notes = {layer.name: layer.note for layer in report.layers}
    assert notes["stem"] == "per tensor: output: it is the residual of b"
    assert notes["d"] == "per channel"


# Batches and types ------------------------------------------------------------------------------


def test_batches_are_what_the_model_is_called_with() -> None:
    net = network(lambda self, x: self.b(torch.relu(self.a(x))), a=conv(), b=conv())
    reports = [
        quantize(net, batches)[1]
        for batches in (
            BATCHES,
            iter(BATCHES),
            [(x,) for x in BATCHES],
            ({"x": x} for x in BATCHES),
        )
    ]
    assert len({report.to_json() for report in reports}) == 1


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.extended)]
)
def test_types_of_16_bits(dtype: torch.dtype) -> None:
    net = network(lambda self, x: self.b(torch.relu(self.a(x))), a=conv(), b=conv()).to(dtype)
    result, report = quantize(net, [x.to(dtype) for x in BATCHES])
    assert types(result, X.to(dtype)) == {"a": (U8, U8), "b": (U8, dtype)}
    assert report.error is not None and report.error < 0.05
    assert became(report)["b"] == f"uint8 -> {str(dtype).removeprefix('torch.')}"


# The result -------------------------------------------------------------------------------------


def test_it_is_pickled_copied_and_loaded() -> None:
    result, _ = quantized(Residual().eval())
    for other in (copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        assert torch.equal(other(X), result(X))
    other, _ = quantize(Residual().eval(), [10 * x for x in BATCHES])
    assert not torch.equal(other(X), result(X))
    other.load_state_dict(result.state_dict())
    for name, part in layers(other).items():
        assert torch.equal(part.weight, layers(result)[name].weight)


def test_it_refuses_to_train_and_a_checkpoint_of_floats() -> None:
    net = Residual().eval()
    result, _ = quantized(net)
    with pytest.raises(RuntimeError, match="mode: True is not supported"):
        result.train()
    message = "stem.weight is torch.float32, of the model before maxconv.torch.quantize"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        result.load_state_dict(net.state_dict(), strict=False)


def test_scales_stay_float32() -> None:
    result, _ = quantized(Residual().eval())
    part = layers(result)["a"]
    before = part.scale.clone()
    result.half().float()
    assert torch.equal(layers(result)["a"].scale, before)


def test_the_report() -> None:
    _, report = quantized(Residual().eval())
    text = str(report)
    assert text.startswith("6 of 6 layers quantized; error of the outputs 0.0")
    assert re.search(
        r"^stem +Conv2d +uint8 -> uint8 +0\.\d+, \d+ +0\.\d+, 0 +0\.\d+ +\d+\.\d", text, re.M
    )
    stem = json.loads(report.to_json())["layers"][0]
    assert stem["name"] == "stem" and stem["error"] < 0.05
    first, *_, last, _ = report.layers
    assert first.total_error == pytest.approx(first.error)
    assert last.total_error > 1.5 * last.error
    for layer in report.layers:
        assert layer.error is not None and layer.sqnr is not None and 0 < layer.error < 0.05
        assert layer.total_error is not None and layer.total_error > 0.5 * layer.error
        assert layer.sqnr == pytest.approx(-20 * np.log10(layer.error))
        assert layer.quantized


# What is not allowed ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batches": None}, "batches: None for a model without scales"),
        ({"batches": []}, "batches: it is empty; at least one is needed"),
        ({"batches": X}, "batches: a Tensor is not allowed; an iterable of tensors"),
        ({"batches": [3]}, "batches: it holds a int; an iterable of tensors"),
        (
            {"batches": [X * torch.nan]},
            "batches: with them input_1 has values that are NaN or infinite",
        ),
        ({"batches": [X / 0]}, "batches: with them input_1 has values that are NaN or infinite"),
        ({"method": "best"}, "method: 'best' is unknown; mse, minmax, percentile are allowed"),
        ({"percentile": 20.0}, "percentile: 20.0 is not allowed; above 50, up to 100 is"),
        ({"dtype": torch.int32}, "dtype: torch.int32 is not supported; torch.int8, torch.uint8"),
        ({"dtype": "int8"}, "dtype: int8 is not supported; torch.int8, torch.uint8 are allowed"),
        ({"symmetric": None}, "symmetric: None is a NoneType; a bool is allowed"),
        ({"activations": "all"}, "activations: 'all' is unknown; per_tensor, per_channel are"),
        ({"keep": "0"}, "keep: '0' is a str; a list of names is allowed"),
        ({"keep": ["2"]}, "keep: '2' is no convolution that can be quantized, nor a module with"),
        ({"max_error": 0}, "max_error: 0 is not allowed; None or a positive number is"),
        ({"max_error": float("nan")}, "max_error: nan is not allowed"),
        ({"max_error": "1"}, "max_error: '1' is a str; a number is allowed"),
        ({"model": nn.Sequential(conv())}, "model: it is in training mode; call its eval() first"),
        ({"model": len}, "model: a builtin_function_or_method is not a torch.nn.Module"),
    ],
)
def test_arguments(changes: dict[str, Any], message: str) -> None:
    model = nn.Sequential(conv(), nn.ReLU()).eval()
    arguments: dict[str, Any] = {"model": model, "batches": BATCHES} | changes
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        mt.quantize(**arguments)


def test_a_residual_of_another_shape_is_refused() -> None:
    result, _ = quantized(Residual().eval())
    part = layers(result)["b"]
    x = integers(2, 4, 5, 4, dtype=U8)
    with pytest.raises(
        ValueError, match=r"^residual: shape \(2, 4, 5, 3\) must equal the output's"
    ):
        part(x, x[..., :3])
