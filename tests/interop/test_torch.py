"""``maxconv.torch``'s functions against PyTorch in float64."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from tests.interop.torch_tensors import CONVOLVE, REFERENCE, check, close, draw, last
from torch import Tensor
from torch.nn import functional

import maxconv.torch as mt
from maxconv import _native
from maxconv._problem import ConvProblem
from maxconv._problems import load_problems
from maxconv.activations import clamp, leaky_relu

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """Keeps PyTorch's remark about "same" with even filters out of the summary."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using padding='same' with even")
        yield


def symmetric(problem: ConvProblem) -> bool:
    return problem.pad_before == problem.pad_after


SMALL = [
    name
    for name, entry in load_problems().items()
    if symmetric(entry.problem) and entry.problem.flops < 40_000_000
]


def operands(
    problem: ConvProblem, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    n, *spatial, c = cast("tuple[int, ...]", problem.input_shape)
    weight = cast(
        "tuple[int, ...]", problem.filter_shape({1: "FCS", 2: "FCRS", 3: "FCQRS"}[len(spatial)])
    )
    x = draw(n, c, *spatial, dtype=dtype, seed=1)
    return x, draw(*weight, dtype=dtype, seed=2), draw(weight[0], dtype=dtype, seed=3)


# Functions --------------------------------------------------------------------------------------


def test_there_are_small_problems_of_every_rank() -> None:
    assert {load_problems()[name].problem.spatial_rank for name in SMALL} == {1, 2, 3}
    assert len(SMALL) >= 20


@pytest.mark.parametrize("name", SMALL)
def test_named_problems(name: str) -> None:
    problem = load_problems()[name].problem
    x, w, b = operands(problem)
    geometry = (problem.stride, problem.pad_before, problem.dilation, problem.groups)
    for input, weight in ((x, w), (last(x), w), (x, last(w))):
        actual = CONVOLVE[problem.spatial_rank](input, weight, b, *geometry)
        check(problem.spatial_rank, actual, x, w, b, *geometry)


def test_scale_and_output_dtype() -> None:
    x, w, b, scale = draw(2, 6, 9, 8), draw(8, 6, 3, 3), draw(8), draw(8, seed=1)
    factors = scale[:, None, None, None]
    for given, scaled in ((scale, w * factors), (0.25, w * 0.25), (scale[:1], w * scale[0])):
        y = mt.conv2d(x, w, b, padding=1, scale=given, out_dtype=torch.bfloat16)
        assert y.dtype == torch.bfloat16
        # The reference's filter is scaled, and rounded: one unit more.
        check(2, y, x, scaled, b, 1, 1)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(
    "geometry",
    [
        pytest.param((), id="defaults"),
        pytest.param((2, 1, 1, 2), id="ints"),
        pytest.param(((2,), [1], (2,), 1), id="sequences-of-one"),
        pytest.param((1, "same", 2, 2), id="same"),
        pytest.param((2, "valid", 1, 1), id="valid"),
    ],
)
def test_arguments_are_those_of_torch(rank: int, geometry: tuple[Any, ...]) -> None:
    groups = geometry[3] if geometry else 1
    x, w = draw(2, 6, 9, 8, 7, seed=1), draw(4, 6 // groups, 2, 3, 4, seed=2)
    for _ in range(3 - rank):
        x, w = x[..., 0], w[..., 0]
    check(rank, CONVOLVE[rank](x, w, None, *geometry), x, w, None, *geometry)
    check(rank, CONVOLVE[rank](x[0], w, None, *geometry), x[0], w, None, *geometry)


def test_keywords() -> None:
    x, w, b = draw(1, 4, 8, 9), draw(6, 2, 3, 3), draw(6)
    actual = mt.conv2d(
        input=x, weight=w, bias=b, stride=(2, 1), padding=(0, 2), dilation=(1, 2), groups=2
    )
    check(2, actual, x, w, b, (2, 1), (0, 2), (1, 2), 2)


ACTIVATIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    None: lambda t: t,
    "relu": torch.relu,
    "relu6": functional.relu6,
    "leaky_relu": functional.leaky_relu,
    ("leaky_relu", 0.3): lambda t: functional.leaky_relu(t, 0.3),
    leaky_relu(-0.5): lambda t: functional.leaky_relu(t, -0.5),
    ("clamp", -0.5, 0.25): lambda t: t.clamp(-0.5, 0.25),
    clamp(0.1, float("inf")): lambda t: t.clamp(min=0.1),
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "hardswish": functional.hardswish,
    "hardsigmoid": functional.hardsigmoid,
    "gelu": functional.gelu,
    "gelu_tanh": lambda t: functional.gelu(t, approximate="tanh"),
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_epilogue(activation: Any) -> None:
    x, w, b = last(draw(2, 16, 9, 7, seed=1)), draw(20, 16, 3, 3, seed=2) / 12, draw(20, seed=3)
    exact = functional.conv2d(x.double(), w.double(), b.double(), padding=1)
    size = functional.conv2d(x.double().abs(), w.double().abs(), b.double().abs(), padding=1)
    function = ACTIVATIONS[activation]
    residual = last(draw(*exact.shape, seed=4))
    close(mt.conv2d(x, w, b, padding=1, activation=activation), function(exact), size, 150)
    actual = mt.conv2d(
        x, w, b, padding=1, residual=residual, beta=-0.5, final_activation=activation
    )
    close(actual, function(exact - 0.5 * residual.double()), size + residual.abs(), 150)
    actual = mt.conv2d(
        x, w, b, padding=1, activation="relu", residual=residual, final_activation=activation
    )
    expected = function(exact.relu() + residual.double())
    close(actual, expected, size + residual.abs(), 150)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.extended)]
)
def test_half_precision(dtype: torch.dtype) -> None:
    x, w, b = (t.to(dtype) for t in (draw(2, 24, 9, 8, seed=1), draw(17, 24, 3, 3) / 8, draw(17)))
    for input, bias in ((x, b), (last(x), None)):
        actual = mt.conv2d(input, w, bias, 1, 1)
        assert actual.dtype == dtype
        check(2, actual, x, w, bias, 1, 1)
    module = mt.Conv2d(24, 17, 3, padding=1, dtype=dtype, activation="relu")
    module.load_state_dict({"weight": w, "bias": b})
    residual = draw(2, 17, 9, 8, dtype=dtype, seed=5)
    exact = functional.conv2d(x.double(), w.double(), b.double(), 1, 1).relu() + residual.double()
    size = functional.conv2d(x.double().abs(), w.double().abs(), b.double().abs(), 1, 1)
    close(module(x, residual), exact, size + residual.abs(), 220)


@pytest.mark.extended
def test_float32_bias_of_bfloat16() -> None:
    x, w, b = draw(2, 6, 20).bfloat16(), draw(5, 6, 3).bfloat16(), draw(5) / 3
    check(1, mt.conv1d(x, w, b, 2), x, w, b, 2)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_empty_batch(rank: int, compiled: list[str]) -> None:
    x, w = torch.empty(0, 4, *(8,) * rank), draw(6, 4, *(3,) * rank)
    for input in (x, last(x)):
        actual = CONVOLVE[rank](input, w, None, 2, activation="relu")
        assert actual.shape == REFERENCE[rank](x, w, None, 2).shape
        assert actual.dtype == torch.float32
    assert not compiled


def test_every_element_is_written() -> None:
    # A buffer of MAX's pool that held NaN is what an unwritten element would show.
    x, w = last(draw(1, 5, 33, 17)), draw(19, 5, 3, 3)
    for _ in range(3):
        mt.conv2d(x, w, padding=1).fill_(float("nan"))
        assert mt.conv2d(x, w, padding=1).isfinite().all()


#: What an activation may be off by, as a share of the larger of its argument and 1: the rounding
#: of float32 is 6e-8, and each of these takes a few.
ACTIVATION_ERRORS = {
    "sigmoid": 2e-7,
    "silu": 3e-7,
    "hardswish": 2e-7,
    "hardsigmoid": 1e-7,
    "gelu": 2e-7,
    "gelu_tanh": 3e-7,
    "tanh": 2e-7,
}


@pytest.mark.parametrize("activation", ACTIVATION_ERRORS)
def test_smooth_activations_are_exact(activation: str) -> None:
    """Of every argument, as vectors of 16 and 4 filters and as single ones."""
    steps = torch.linspace(-1, 1, 40001)
    x = torch.cat((40 * steps**3, 6 * steps, steps.sign() * 10 ** (-30 * steps.abs())))
    ones = torch.ones(21, 1, 1, 1)
    y = mt.conv2d(x.view(1, 1, 1, -1), ones, activation=activation)
    expected = ACTIVATIONS[activation](x.double())
    errors = (y.double() - expected).abs() / x.double().abs().clamp_min(1)
    assert errors.max() < ACTIVATION_ERRORS[activation], x[errors.amax((0, 1, 2)).argmax()]
    assert torch.equal(y, y[:, :1].expand(y.shape))


@pytest.mark.parametrize(
    "activation",
    [
        None,
        "relu",
        "relu6",
        "leaky_relu",
        *ACTIVATION_ERRORS,
    ],
)
def test_nan_and_infinity_pass_through(activation: str | None) -> None:
    x, w = last(draw(1, 3, 6, 6)), draw(4, 3, 3, 3)
    x[0, 1, 2, 2] = float("nan")
    x[0, 2, 5, 5] = float("inf")
    actual = mt.conv2d(x, w, activation=activation)
    exact = ACTIVATIONS[activation](functional.conv2d(x, w))
    assert torch.equal(actual.isnan(), exact.isnan())
    assert torch.equal(actual.isinf(), exact.isinf())


def test_views_of_larger_memory() -> None:
    whole = draw(3, 12, 11, 10)
    w = draw(8, 5, 3, 3)
    for x in (whole[1:, 1:6], last(whole)[1:, 1:6], whole[:, 1:6, ::2, 1:], whole[:, 1:6].mT):
        check(2, mt.conv2d(x, w), x, w, None)
    # One float past an aligned address.
    x = last(draw(1, 5, 6, 6)).permute(0, 2, 3, 1).flatten()
    shifted = torch.empty(x.numel() + 1)[1:].copy_(x).view(1, 6, 6, 5).permute(0, 3, 1, 2)
    check(2, mt.conv2d(shifted, w), shifted, w, None)
    negated = torch.complex(draw(1, 5, 6, 6), draw(1, 5, 6, 6, seed=1)).conj().imag
    assert negated.is_neg()
    check(2, mt.conv2d(negated, w), negated.resolve_neg(), w, None)


# Memory formats ---------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 2, 5])
@pytest.mark.parametrize("size", [(1, 1), (1, 6), (6, 1), (5, 6)], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_memory_format_is_that_of_torch(batch: int, channels: int, size: tuple[int, int]) -> None:
    x, w = draw(batch, channels, *size), draw(3, channels, 1, 1)
    formats = (torch.contiguous_format, torch.channels_last)
    for input in (x.contiguous(memory_format=f) for f in formats):
        for weight in (w.contiguous(memory_format=f) for f in formats):
            assert mt.conv2d(input, weight).stride() == functional.conv2d(input, weight).stride()


@pytest.mark.parametrize("rank", [1, 3])
def test_channels_last_in_channels_last_out(rank: int) -> None:
    x, w = draw(2, 4, *(6,) * rank), draw(5, 4, *(3,) * rank)
    assert CONVOLVE[rank](x, w).is_contiguous()
    assert CONVOLVE[rank](last(x), w).movedim(1, -1).is_contiguous()
    assert CONVOLVE[rank](last(x)[0], w).movedim(0, -1).is_contiguous()


def copies(call: Callable[[], Tensor]) -> int:
    """How often PyTorch or the library copied a tensor during a call."""
    call()
    own: list[tuple[int, ...]] = []
    transpose = _native.Host.transpose

    def counted(self: _native.Host, *arguments: int) -> None:
        own.append(arguments)
        transpose(self, *arguments)

    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        pytest.MonkeyPatch.context() as patch,
        torch.profiler.profile(activities=activities) as profile,
    ):
        patch.setattr(_native.Host, "transpose", counted)
        call()
    events = [event.name for event in profile.events() or []]
    assert "maxconv::conv" in events
    return events.count("aten::copy_") + len(own)


def test_channels_last_is_not_copied() -> None:
    x, w, b = draw(2, 8, 6, 6), draw(8, 8, 3, 3), draw(8)
    residual = draw(2, 8, 6, 6)
    module = mt.Conv2d(8, 8, 3, padding=1)
    assert copies(lambda: mt.conv2d(last(x), last(w), b, 1, 1)) == 2  # Those of last() itself.
    x_last, residual_last = last(x), last(residual)
    assert copies(lambda: mt.conv2d(x_last, w, b, 1, 1)) == 0
    assert copies(lambda: mt.conv2d(x_last, last(w), b, 1, 1)) == 1  # Of last().
    assert copies(lambda: module(x_last, residual_last)) == 0
    assert copies(lambda: mt.conv2d(x_last[0], w, b, 1, 1)) == 0
    # Converted on the way in and on the way out.
    assert copies(lambda: mt.conv2d(x, w, b, 1, 1)) == 2


# One library for every shape ---------------------------------------------------------------------


def test_new_shapes_compile_nothing(compiled: list[str]) -> None:
    mt.conv2d(draw(1, 3, 8, 8), draw(4, 3, 3, 3))
    compiled.clear()
    for n, c, h, k, r, stride, groups in (
        (1, 4, 9, 8, 3, 1, 1),
        (2, 8, 17, 8, 5, 2, 4),
        (3, 6, 5, 6, 1, 1, 6),
        (1, 16, 12, 33, 2, 3, 1),
    ):
        x, w, b = draw(n, c, h, h + 1), draw(k, c // groups, r, r), draw(k)
        y = mt.conv2d(x, w, b, stride, 1, 1, groups, activation="silu")
        mt.conv2d(last(x), w, None, stride, 1, 1, groups, residual=y, final_activation="relu")
        mt.Conv2d(c, k, r, stride, 1, groups=groups)(x)
    assert not compiled


def test_threads_that_call_first_together_compile_once(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "_libraries", {})
    threads = 6
    barrier = threading.Barrier(threads)
    inputs = [draw(1, 4, 8 + i, 9, seed=i) for i in range(threads)]
    w = draw(6, 4, 3, 3)

    def call(x: Tensor) -> Tensor:
        barrier.wait()
        return mt.conv2d(x, w)

    with ThreadPoolExecutor(threads) as pool:
        outputs = list(pool.map(call, inputs))
    assert len(compiled) == 1
    for x, y in zip(inputs, outputs, strict=True):
        check(2, y, x, w, None)


def test_threads_share_a_module() -> None:
    module = mt.Conv2d(8, 24, 3, padding=1, activation="relu")
    inputs = [last(draw(1, 8, 20 + i, 30, seed=i)) for i in range(8)]
    expected = [module(x) for x in inputs]
    module.repack()
    with ThreadPoolExecutor(4) as pool:
        actual = list(pool.map(module, inputs * 16))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected * 16, strict=True))


def test_prepare_compiles_what_the_first_call_would(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "_libraries", {})
    mt.prepare(2, torch.float32)
    assert len(compiled) == 1
    mt.conv2d(draw(1, 3, 8, 8), draw(4, 3, 3, 3))
    assert len(compiled) == 1
    with pytest.raises(ValueError, match=r"^rank: 4 is not a spatial rank; 1, 2 or 3"):
        mt.prepare(4)
    with pytest.raises(TypeError, match=r"^dtype: torch.int16 is not supported; torch.float32"):
        mt.prepare(2, torch.int16)


@pytest.mark.parametrize("width", [7, 30])
def test_taps_beside_the_image_are_not_multiplied(width: int) -> None:
    """As in an atrous pyramid: dilated beyond the image, only one tap of 3x3 meets a pixel."""
    x, w = draw(2, 24, 9, width), draw(20, 24, 3, 3)
    centre = w[:, :, 1:2, 1:2].clone()
    w[:, :, 0], w[:, :, 2], w[..., 0], w[..., 2] = (math.nan,) * 4
    w[:, :, 1:2, 1:2] = centre
    y = mt.conv2d(last(x), w, padding=(9, width), dilation=(9, width))
    assert torch.allclose(y, torch.nn.functional.conv2d(x, centre), atol=1e-5)
