"""``maxconv.torch``'s functions and modules against PyTorch in float64."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from max.engine import InferenceSession
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional

import maxconv.torch as mt
from maxconv.activations import clamp, leaky_relu
from maxconv.library import kernel_library
from maxconv.problem import ConvProblem
from maxconv.problems import load_problems
from maxconv.torch import _engine
from maxconv.torch._filters import OPERANDS

pytestmark = pytest.mark.torch

CONVOLVE = {1: mt.conv1d, 2: mt.conv2d, 3: mt.conv3d}
REFERENCE: dict[int, Callable[..., Tensor]] = {
    1: functional.conv1d,
    2: functional.conv2d,
    3: functional.conv3d,
}
MODULES: dict[int, tuple[Any, Any]] = {
    1: (mt.Conv1d, nn.Conv1d),
    2: (mt.Conv2d, nn.Conv2d),
    3: (mt.Conv3d, nn.Conv3d),
}
#: Unit roundoffs: what one rounding to the dtype costs at most, relative to the value.
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """Keeps PyTorch's remark about "same" with even filters out of the summary."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using padding='same' with even")
        yield


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the graphs that are compiled while a test runs."""
    names: list[str] = []
    load = InferenceSession.load

    def counted(self: InferenceSession, model: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(str(getattr(model, "name", model)))
        return load(self, model, *args, **kwargs)

    monkeypatch.setattr(InferenceSession, "load", counted)
    return names


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def last(tensor: Tensor) -> Tensor:
    """The same values, the channels innermost in memory."""
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


def close(actual: Tensor, exact: Tensor, magnitude: Tensor | float, terms: int) -> None:
    """Compares with a float64 result.

    The kernels multiply and add ``terms`` products in float32, which costs at most ``terms`` units
    of the sum of their absolute values, and round to the output's type once.
    """
    assert actual.shape == exact.shape
    units = UNIT[actual.dtype] * exact.abs() + (terms + 4) * 2.0**-24 * magnitude
    # The smallest step of float16, and functions such as exp, are not relative to the sum.
    error = (actual.double() - exact).abs() - 1.2 * units - 2.0**-22
    assert error.numel() == 0 or error.max() <= 0, f"{error.max()} beyond what rounding explains"


def check(
    rank: int, actual: Tensor, x: Tensor, w: Tensor, b: Tensor | None, *geometry: Any
) -> None:
    """Compares a convolution without an epilogue with PyTorch's."""
    convolve = REFERENCE[rank]
    bias = None if b is None else b.double()
    exact = convolve(x.double(), w.double(), bias, *geometry)
    size = convolve(
        x.double().abs(), w.double().abs(), None if b is None else b.double().abs(), *geometry
    )
    close(actual, exact, size, w[0].numel() + 1)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
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


@pytest.mark.parametrize(
    "activation",
    [
        None,
        "relu",
        "relu6",
        "leaky_relu",
        "silu",
        "gelu",
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
    """How often PyTorch copied a tensor during a call."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    events = [event.name for event in profile.events() or []]
    assert "maxconv::conv" in events
    return events.count("aten::copy_")


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


# One graph for every shape ----------------------------------------------------------------------


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
    monkeypatch.setattr(_engine, "_models", {})
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
    monkeypatch.setattr(_engine, "_models", {})
    mt.prepare(2, torch.float32)
    assert len(compiled) == 1
    mt.conv2d(draw(1, 3, 8, 8), draw(4, 3, 3, 3))
    assert len(compiled) == 1
    with pytest.raises(ValueError, match=r"^rank: 4 is not a spatial rank; 1, 2 or 3"):
        mt.prepare(4)
    with pytest.raises(TypeError, match=r"^dtype: torch.int8 is not supported; torch.float32"):
        mt.prepare(2, torch.int8)


# Compiling and gradients ------------------------------------------------------------------------


def test_opcheck() -> None:
    x, w, b = draw(2, 6, 9, 8), draw(8, 3, 3, 3), draw(8)
    arguments = ((2, 1), (1, 1, 0, 0), (1, 2), 2, (1, 0), (1.0, 0.0, 0.0, 0.0, 0.0))
    for input, channels_last in ((x, False), (last(x), True), (x[:0], True)):
        torch.library.opcheck(
            torch.ops.maxconv.conv.default, (input, w, b, None, *arguments, channels_last, False)
        )
    # One pixel, one filter: strides that sizes of one leave open must not differ either.
    arguments = ((1, 1), (0, 0, 0, 0), (1, 1), 1, (0, 0), (1.0, 0.0, 0.0, 0.0, 0.0))
    for filters in (1, 3):
        for channels_last in (False, True):
            torch.library.opcheck(
                torch.ops.maxconv.conv.default,
                (x[:, :3, :3, :3], w[:filters], None, None, *arguments, channels_last, False),
            )


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_compile_with_fullgraph(context: Any) -> None:
    torch.compiler.reset()
    x, w, b = last(draw(1, 6, 12, 10)), draw(8, 3, 3, 3), draw(8)
    residual = draw(1, 8, 6, 5)
    module = mt.Conv2d(8, 5, 1, activation=leaky_relu(0.2))

    def network(x: Tensor, residual: Tensor) -> Tensor:
        y = mt.conv2d(
            x, w, b, 2, padding=(1, 1), groups=2, activation=("clamp", -1.0, 1.0),
            residual=residual, beta=0.5, final_activation="relu",
        )  # fmt: skip
        return cast(Tensor, module(y)).movedim(1, -1)

    network_compiled = torch.compile(network, fullgraph=True)
    with context():
        expected = network(x, residual)
        actual = network_compiled(x, residual)
    assert torch.equal(actual, expected)
    assert actual.stride() == expected.stride()


def test_compile_with_dynamic_shapes(compiled: list[str]) -> None:
    torch.compiler.reset()
    mt.prepare()
    compiled.clear()
    module = mt.Conv2d(4, 6, 3, 2, padding=1)
    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    network = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for n, h, w in ((2, 9, 8), (3, 12, 11), (5, 31, 7)):
            x = draw(n, 4, h, w)
            assert torch.equal(network(x), module(x))
    assert graphs == 1
    assert not compiled


def test_compiled_module_sees_new_weights() -> None:
    torch.compiler.reset()
    module = mt.Conv2d(3, 4, 3)
    network = torch.compile(module, fullgraph=True)
    x = draw(1, 3, 6, 6)
    with torch.no_grad():
        for seed in (1, 2):
            module.weight.copy_(draw(4, 3, 3, 3, seed=seed))
            check(2, network(x), x, module.weight, module.bias)


@pytest.mark.parametrize("name", ["input", "weight", "bias", "residual"])
def test_a_gradient_is_refused(name: str) -> None:
    tensors = {
        "input": draw(1, 4, 6, 6),
        "weight": draw(4, 4, 3, 3),
        "bias": draw(4),
        "residual": draw(1, 4, 4, 4),
    }
    expected = mt.conv2d(**cast(Any, tensors))
    tensors[name].requires_grad_()
    message = (
        rf"^{name}: requires grad, but maxconv computes no gradients .*no_grad.*inference_mode"
    )
    with pytest.raises(RuntimeError, match=message):
        mt.conv2d(**cast(Any, tensors))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(mt.conv2d(**cast(Any, tensors)), expected)
    detached = {key: tensor.detach() for key, tensor in tensors.items()}
    assert torch.equal(mt.conv2d(**cast(Any, detached)), expected)


def test_a_gradient_is_refused_under_compile() -> None:
    torch.compiler.reset()
    w = draw(4, 4, 3, 3).requires_grad_()
    network = torch.compile(mt.conv2d, fullgraph=True)
    with pytest.raises(Exception, match="weight: requires grad, but maxconv computes no gradients"):
        network(draw(1, 4, 6, 6), w)


def test_a_head_trains_on_a_frozen_backbone() -> None:
    backbone, head = mt.Conv2d(3, 4, 3), nn.Linear(4, 2)
    head(backbone(draw(2, 3, 6, 6)).mean((2, 3))).sum().backward()
    assert head.weight.grad is not None and head.weight.grad.abs().sum() > 0
    with pytest.raises(RuntimeError, match=r"^weight: requires grad"):
        backbone.requires_grad_()(draw(2, 3, 6, 6))


# Bad input --------------------------------------------------------------------------------------

X, W, B = draw(2, 6, 9, 8), draw(8, 3, 3, 3), draw(8)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input": 3}, TypeError, r"input: a int is not a tensor"),
        ({"weight": None}, TypeError, r"weight: a NoneType is not a tensor"),
        (
            {"bias": [1.0] * 8},
            TypeError,
            r"bias: a list is not a tensor; a torch.Tensor or None is",
        ),
        (
            {"input": X[0, 0]},
            ValueError,
            r"input: shape \(9, 8\) has rank 2; conv2d takes rank 4: \[",
        ),
        (
            {"weight": W[0]},
            ValueError,
            r"weight: shape \(3, 3, 3\) has rank 3; conv2d takes rank 4",
        ),
        ({"input": X[:, :5]}, ValueError, r"input: 5 channels are not divisible by groups=2"),
        ({"weight": W[:7]}, ValueError, r"weight: 7 filters are not divisible by groups=2"),
        (
            {"input": draw(2, 9, 9, 8), "groups": 3},
            ValueError,
            r"weight: 8 filters are not divisible by groups=3",
        ),
        ({"groups": 1}, ValueError, r"weight: 3 channels a group do not match the input's 6"),
        ({"groups": 0}, ValueError, r"groups: 0 is not positive; it must be at least 1"),
        ({"groups": 2.0}, TypeError, r"groups: 2.0 holds a float; integers are allowed"),
        (
            {"stride": 0},
            ValueError,
            r"stride: \(0, 0\) has a non-positive entry; every stride must",
        ),
        ({"stride": (1, -1)}, ValueError, r"stride: \(1, -1\) has a non-positive entry"),
        ({"stride": (1, 1, 1)}, ValueError, r"stride: \(1, 1, 1\) has 3 entries; 2 are allowed"),
        ({"stride": 1.5}, TypeError, r"stride: 1.5 is a float; an integer or a tuple of 2"),
        ({"stride": True}, TypeError, r"stride: True is a bool; an integer or a tuple of 2"),
        ({"dilation": [0, 1]}, ValueError, r"dilation: \(0, 1\) has a non-positive entry"),
        ({"padding": -1}, ValueError, r"padding: \(-1, -1\) has a negative entry; every padding"),
        (
            {"padding": "full"},
            ValueError,
            r"padding: 'full' is not a name of a padding; 'same', 'v",
        ),
        ({"padding": "same", "stride": 2}, ValueError, r"padding: 'same' with stride \(2, 2\)"),
        ({"padding": {}}, TypeError, r"padding: \{\} is a dict; an integer or a tuple of 2"),
        (
            {"dilation": (1, 4)},
            ValueError,
            r"weight: w extent 3 with dilation 4 spans 9 but the padded input has only 8; enlarge",
        ),
        ({"bias": B[:3]}, ValueError, r"bias: 3 elements, but there are 8 filters"),
        ({"bias": draw(8, 1)}, ValueError, r"bias: shape \(8, 1\) has rank 2; rank 1 is allowed"),
        (
            {"residual": draw(2, 8, 7, 7)},
            ValueError,
            r"residual: shape \(2, 8, 7, 7\) must equal the output's shape \(2, 8, 7, 6\)",
        ),
        (
            {"residual": draw(8, 7, 6)},
            ValueError,
            r"residual: shape \(8, 7, 6\) has rank 3; the out",
        ),
        (
            {"input": X.double()},
            TypeError,
            r"input: dtype torch.float64 is not supported; torch.flo",
        ),
        (
            {"input": X.to(torch.complex64)},
            TypeError,
            r"input: dtype torch.complex64 is not supported",
        ),
        ({"input": X.int()}, TypeError, r"input: dtype torch.int32 is not supported"),
        (
            {"weight": W.bfloat16()},
            TypeError,
            r"weight: dtype torch.bfloat16 does not match; the input's torch.float32 is allowed",
        ),
        (
            {"bias": B.half()},
            TypeError,
            r"bias: dtype torch.float16 does not match; the input's torch.float32 or torch.float32",
        ),
        (
            {"residual": draw(2, 8, 7, 6).half()},
            TypeError,
            r"residual: dtype torch.float16 does not",
        ),
        ({"activation": "swish"}, ValueError, r"activation: 'swish' is not an activation; relu, "),
        ({"final_activation": 3}, TypeError, r"final_activation: 3 is a int; relu, "),
        ({"activation": ("clamp", 1, 0)}, ValueError, r"activation: clamp\(1.0, 0.0\) is empty"),
        ({"beta": "1"}, TypeError, r"beta: '1' is a str; a number is allowed"),
        ({"input": X.to_sparse()}, ValueError, r"input: layout torch.sparse_coo is not supported"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_arguments(
    change: dict[str, Any],
    error: type[Exception],
    message: str,
    compiled: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_engine, "_models", {})
    arguments: dict[str, Any] = {"input": X, "weight": W, "bias": B, "groups": 2} | change
    with pytest.raises(error, match=f"^{message}"):
        mt.conv2d(**arguments)
    assert not compiled


def test_unsupported_device() -> None:
    with FakeTensorMode():
        x, w = torch.empty(1, 3, 8, 8, device="cuda"), torch.empty(4, 3, 3, 3, device="cuda")
        with pytest.raises(ValueError, match=r"^input: device cuda:0 is not supported; cpu is all"):
            mt.conv2d(x, w)
        with pytest.raises(
            ValueError, match=r"^weight: device cuda:0 is not supported; cpu is all"
        ):
            mt.conv2d(torch.empty(1, 3, 8, 8), w)


def test_shapes_without_data(compiled: list[str]) -> None:
    x, w = torch.empty(2, 6, 9, 8, device="meta"), torch.empty(8, 3, 3, 3, device="meta")
    y = mt.conv2d(x, w, None, 2, 1, groups=2)
    assert y.shape == (2, 8, 5, 4) and y.is_meta
    with pytest.raises(ValueError, match=r"^weight: h extent 3 with dilation 9 spans 19"):
        mt.conv2d(x, w, None, 2, 1, 9, groups=2)
    assert not compiled


# Modules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_module_is_a_drop_in(rank: int, mode: str) -> None:
    own, theirs = MODULES[rank]
    arguments = (4, 6, 3, 2, 1, 1, 2, True, mode)
    torch.manual_seed(0)
    expected = theirs(*arguments)
    torch.manual_seed(0)
    actual = own(*arguments)
    assert isinstance(actual, theirs)
    assert torch.equal(actual.weight, expected.weight) and torch.equal(actual.bias, expected.bias)
    x = draw(2, 4, *(7,) * rank)
    for input in (x, last(x), x[0]):
        with torch.no_grad():
            exact = copy.deepcopy(expected).double()(input.double())
        close(actual(input), exact, 8.0, 40)
        # PyTorch's own padding forgets the format of some inputs.
        channels_last = input.movedim(-rank - 1, -1).is_contiguous()
        assert actual(input).movedim(-rank - 1, -1).is_contiguous() is channels_last
        if mode == "zeros" and rank > 1:
            assert actual(input).stride() == expected(input).stride()


def test_state_dict_goes_both_ways() -> None:
    theirs = nn.Conv2d(4, 6, (3, 2), groups=2)
    own = mt.Conv2d(4, 6, (3, 2), groups=2, activation="relu")
    assert [(k, v.shape) for k, v in own.state_dict().items()] == [
        (k, v.shape) for k, v in theirs.state_dict().items()
    ]
    x = draw(1, 4, 8, 8)
    own(x)
    own.load_state_dict(theirs.state_dict())
    exact = functional.conv2d(x.double(), theirs.weight.double(), theirs.bias.double(), groups=2)  # type: ignore[union-attr]
    close(own(x), exact.detach().relu(), 4.0, 20)
    stream = io.BytesIO()
    torch.save(own.state_dict(), stream)
    stream.seek(0)
    theirs.load_state_dict(torch.load(stream, weights_only=True))
    assert mt.Conv2d(4, 6, 3, bias=False).state_dict().keys() == {"weight"}


def test_packed_weight_follows_the_weight() -> None:
    module, x = mt.Conv2d(3, 4, 3), draw(1, 3, 6, 6)

    def current() -> None:
        check(2, module(x), x, module.weight, module.bias)

    current()
    with torch.no_grad():
        module.weight.mul_(2.0)
        current()
        module.bias.add_(1.0)  # type: ignore[union-attr]
        current()
    with torch.inference_mode():
        module.weight.sub_(0.25)
        current()
    module.weight.data = draw(4, 3, 3, 3, seed=7)
    current()
    module.weight = nn.Parameter(draw(4, 3, 3, 3, seed=8), requires_grad=False)
    current()
    cast(Any, module).to(memory_format=torch.channels_last)
    current()
    module.half().float()
    current()
    # What PyTorch does not count, the module must be told.
    module.weight.data.mul_(3.0)
    module.repack()
    current()
    module.stride = (2, 2)
    check(2, module(x), x, module.weight, module.bias, 2)


def test_packed_weight_goes_with_the_module() -> None:
    gc.collect()
    before = len(OPERANDS)
    module = mt.Conv2d(3, 4, 3)
    for _ in range(3):
        with torch.no_grad():
            module.weight.add_(1.0)
        module(draw(1, 3, 6, 6))
    assert len(OPERANDS) == before + 2
    del module
    gc.collect()
    assert len(OPERANDS) == before


def test_weights_without_a_version_are_read_in_every_call() -> None:
    module, x = mt.Conv2d(3, 4, 3), draw(1, 3, 6, 6)
    with torch.inference_mode():
        module.weight = nn.Parameter(draw(4, 3, 3, 3), requires_grad=False)
        assert module.weight.is_inference()
        for _ in range(2):
            check(2, module(x), x, module.weight, module.bias)
            module.weight.mul_(2.0)
        # Made by the module itself, a weight has one.
        assert not mt.Conv2d(3, 4, 3).weight.is_inference()


def test_copies_of_a_module() -> None:
    module = mt.Conv2d(4, 6, 3, padding="same", activation="gelu", final_activation="relu")
    x, residual = draw(1, 4, 8, 8), draw(1, 6, 8, 8)
    expected = module(x, residual, beta=0.5)
    for other in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        mt.Conv2d.from_torch(module, activation="gelu", final_activation="relu"),
    ):
        assert torch.equal(other(x, residual, beta=0.5), expected)
        assert not other.weight.requires_grad
    other = copy.deepcopy(module).to(torch.bfloat16)
    actual = other(x.bfloat16(), residual.bfloat16(), beta=0.5)
    assert actual.dtype == torch.bfloat16
    assert (actual.float() - expected).abs().max() < 0.05
    with pytest.raises(TypeError, match=r"^conv: a Conv1d is not a Conv2d"):
        mt.Conv2d.from_torch(nn.Conv1d(1, 1, 1))


def test_repr_names_the_activations() -> None:
    module = mt.Conv2d(4, 6, 3, padding=1, activation="relu6", final_activation="silu")
    assert repr(module) == (
        "Conv2d(4, 6, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), activation=clamp, "
        "final_activation=silu)"
    )


def test_bad_module_arguments() -> None:
    with pytest.raises(ValueError, match=r"^activation: 'swish' is not an activation"):
        mt.Conv2d(3, 4, 3, activation="swish")
    module = mt.Conv2d(3, 4, 3)
    with pytest.raises(
        ValueError, match=r"^residual: shape \(1, 4, 5, 4\) must equal the output's"
    ):
        module(draw(1, 3, 6, 6), draw(1, 4, 5, 4))
    with pytest.raises(TypeError, match=r"^weight: dtype torch.float32 does not match"):
        module(draw(1, 3, 6, 6).half())


# MAX's own bridge -------------------------------------------------------------------------------


def test_the_op_works_through_graph_op() -> None:
    from max.dtype import DType
    from max.experimental.torch import graph_op
    from max.graph import DeviceRef, TensorType, TensorValue, ops

    from maxconv._fields import GEOMETRY_LENGTH, SCALARS_LENGTH, Layout, encode_scalars

    cpu = DeviceRef.CPU()
    output = TensorType(DType.float32, ("n", "p", "q", "k"), cpu)

    def convolve(
        x: TensorValue, filter: TensorValue, geometry: TensorValue, scalars: TensorValue
    ) -> TensorValue:
        none = ops.constant([], DType.float32, cpu)
        residual = ops.reshape(none, (0, 0, 0, 0))
        operands = [x, filter, none, residual, geometry, scalars]
        return ops.custom("maxconv.conv", cpu, operands, [output])[0].tensor

    op = graph_op(
        convolve,
        kernel_library=kernel_library(),
        input_types=[
            TensorType(DType.float32, ("n", "h", "w", "c"), cpu),
            TensorType(DType.float32, ("f",), cpu),
            TensorType(DType.int64, (GEOMETRY_LENGTH,), cpu),
            TensorType(DType.float32, (SCALARS_LENGTH,), cpu),
        ],
        output_types=[output],
    )
    for n, h, c, k in ((1, 6, 3, 4), (2, 9, 5, 3)):
        x, w = last(draw(n, c, h, h)), draw(k, c, 3, 3)
        problem = ConvProblem.from_arguments((n, h, h, c), w.shape, filter_layout="FCRS", padding=1)
        y = torch.empty(n, h, h, k)
        op(
            y,
            x.movedim(1, -1),
            w.flatten(),
            torch.from_numpy(problem.geometry(filter_layout=Layout.FCRS)),
            torch.from_numpy(encode_scalars()),
        )
        check(2, y.movedim(-1, 1), x, w, None, 1, 1)
