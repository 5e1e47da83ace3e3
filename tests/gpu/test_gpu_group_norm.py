"""``mt.group_norm`` with CUDA tensors: values, formats, streams, captured and compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import maxconv.torch as mt  # noqa: E402
from maxconv import _native  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU"),
]

DTYPE = torch.bfloat16
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def image(*shape: int, seed: int = 0, dtype: Any = DTYPE) -> Any:
    """``[N, C, *spatial]``, channels last, with a mean of its own in each channel."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn((1, shape[1], *(1 for _ in shape[2:])), generator=generator)
    drawn = (torch.randn(shape, generator=generator) + means).to("cuda", dtype)
    return drawn.movedim(1, -1).contiguous().movedim(-1, 1)


def vectors(channels: int, dtype: Any = DTYPE) -> tuple[Any, Any]:
    """A weight and a bias."""
    generator = torch.Generator().manual_seed(channels)
    drawn = torch.randn((2, channels), generator=generator).to("cuda", dtype)
    return drawn[0].clone(), drawn[1].clone()


def check(
    actual: Any,
    x: Any,
    groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    apply: Callable[[Any], Any] = lambda exact: exact,
) -> None:
    """Compares with float64: half a unit of the output's type, and float32 arithmetic before it.

    The scale and the shift are rounded to 2^-24, so that a result has an error of 2^-23 of what
    they are made of; a reciprocal root of 2^-22, an activation for 16 bits of 1.1e-5.
    """
    grouped = x.double().unflatten(1, (groups, -1)).flatten(2)
    rate = (grouped.var(2, correction=0) + eps).rsqrt()
    parts = x.double().unflatten(1, (groups, -1)).abs().flatten(3) * rate[:, :, None, None]
    size = parts.reshape(x.shape)
    one = (1, -1, *(1 for _ in x.shape[2:]))
    if weight is not None:
        weight, bias = weight.double(), bias.double()
        size = size * weight.abs().view(one) + bias.abs().view(one)
    exact = apply(torch.nn.functional.group_norm(x.double(), groups, weight, bias, eps))
    assert actual.shape == exact.shape and actual.dtype == x.dtype
    assert actual.movedim(1, -1).is_contiguous()
    allowed = 1.01 * UNIT[x.dtype] * exact.abs() + 2.0**-20 * size + 2e-5
    error = (actual.double() - exact).abs()
    assert bool((error <= allowed).all()), float((error - allowed).max())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts launches of maxconv's kernels."""
    counted: list[int] = []
    run = _native.GroupNorm.run

    def counting(*arguments: Any, **named: Any) -> None:
        counted.append(1)
        run(*arguments, **named)

    monkeypatch.setattr(_native.GroupNorm, "run", counting)
    return counted


@pytest.mark.parametrize("dtype", list(UNIT))
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        *(((1, 512, 64, 64), 32), ((1, 128, 256, 256), 32), ((2, 320, 32, 32), 32)),
        *(((3, 30, 9, 5), 5), ((2, 33, 10, 9), 3), ((2, 24, 50), 24), ((1, 16, 5, 6, 7), 1)),
        *(((2, 64, 1, 1), 4), ((4, 1, 40, 40), 1)),
    ],
)
def test_shapes(shape: tuple[int, ...], groups: int, dtype: Any, calls: list[int]) -> None:
    x = image(*shape, seed=sum(shape), dtype=dtype)
    for weight, bias in ((None, None), vectors(shape[1], dtype), vectors(shape[1], torch.float32)):
        actual = mt.group_norm(x, groups, weight, bias)
        check(actual, x, groups, weight, bias)
    assert len(calls) == 3


@pytest.mark.parametrize("name", ["relu", "relu6", "silu", "gelu", "tanh", "hardswish"])
def test_activations(name: str) -> None:
    x, (weight, bias) = image(2, 64, 20, 20), vectors(64)
    actual = mt.group_norm(x, 8, weight, bias, activation=name)
    check(actual, x, 8, weight, bias, apply=getattr(torch.nn.functional, name))


def test_epsilon_and_parameters() -> None:
    x = image(2, 64, 20, 20, dtype=torch.float32)
    leaky = mt.group_norm(x, 8, eps=0.5, activation=("leaky_relu", 0.25))
    apply = functools.partial(torch.nn.functional.leaky_relu, negative_slope=0.25)
    check(leaky, x, 8, eps=0.5, apply=apply)
    clamped = mt.group_norm(x, 8, eps=0.5, activation=("clamp", -0.5, 1.25))
    check(clamped, x, 8, eps=0.5, apply=functools.partial(torch.clamp, min=-0.5, max=1.25))


def test_operands_that_are_not_aligned() -> None:
    x, (weight, bias) = image(2, 64, 20, 20), vectors(64)
    held = torch.empty(x.numel() + 1, device="cuda", dtype=DTYPE)
    shifted = held[1:].view(2, 20, 20, 64).copy_(x.movedim(1, -1)).movedim(-1, 1)
    assert shifted.data_ptr() % 16
    check(mt.group_norm(shifted, 8, weight, bias), x, 8, weight, bias)


def test_others_are_pytorchs(calls: list[int]) -> None:
    contiguous = torch.randn(2, 16, 9, 9, device="cuda")
    strided = image(2, 16, 9, 9)[:, :, ::2]
    trained = image(2, 16, 9, 9, dtype=torch.float32).requires_grad_()
    for x in (contiguous, strided, trained, contiguous.double()):
        expected = torch.nn.functional.group_norm(x, 4)
        assert torch.equal(mt.group_norm(x, 4), expected)
    total: Any = mt.group_norm(trained, 4, activation="silu").sum()
    total.backward()
    assert trained.grad is not None
    with torch.autocast("cuda", DTYPE):
        assert mt.group_norm(image(2, 16, 9, 9), 4).dtype == torch.float32
    assert not calls


def test_streams_and_capture() -> None:
    x, (weight, bias) = image(4, 96, 14, 14), vectors(96)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        doubled = x * 2
        y = mt.group_norm(doubled, 8, weight, bias)
    torch.cuda.current_stream().wait_stream(stream)
    check(y, doubled, 8, weight, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # What is read was written by the launch before.
        first = mt.group_norm(x, 8, weight, bias)
        second = mt.group_norm(first, 4)
    x.copy_(image(4, 96, 14, 14, seed=1))
    graph.replay()
    torch.cuda.synchronize()
    check(first, x, 8, weight, bias)
    check(second, first, 4)


def test_who_watches_sees_the_operator() -> None:
    x, (weight, bias) = image(2, 16, 9, 9), vectors(16)
    with torch.profiler.profile() as profile:
        mt.group_norm(x, 4, weight, bias)
    assert "maxconv::group_norm" in {event.key for event in profile.key_averages()}
    torch.compiler.reset()

    def add(x: Any) -> Any:
        return mt.group_norm(x, 4, weight, bias, activation="relu") + 1

    # One rounding more, of values below 16.
    assert torch.allclose(torch.compile(add, fullgraph=True)(x), add(x), atol=2.0**-4)


def test_a_converted_model_uses_it(calls: list[int]) -> None:
    nn, functional = torch.nn, torch.nn.functional

    class Block(nn.Module):  # type: ignore[name-defined, misc] # torch is imported by pytest
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.conv1 = nn.GroupNorm(8, 64), nn.Conv2d(64, 64, 3, padding=1)
            self.norm2, self.conv2 = nn.GroupNorm(8, 64), nn.Conv2d(64, 64, 3, padding=1)
            self.act = nn.SiLU()

        def forward(self, x: Any) -> Any:
            y = self.conv1(self.act(self.norm1(x)))
            y = self.conv2(functional.silu(self.norm2(y)))
            return functional.group_norm(x + y, 4)

    torch.manual_seed(0)
    model = Block().eval().to("cuda", DTYPE)
    fast, _ = mt.convert(model)
    x = image(2, 64, 12, 12)
    with torch.inference_mode():
        actual = fast(x)
    assert len(calls) == 3
    assert not any(isinstance(part, nn.SiLU) for part in fast.modules())
    exact = model.double()(x.double())
    # Each of six tensors on the way is rounded by 2^-9 of its values.
    assert (actual.double() - exact).abs().max() <= 2e-2 * exact.abs().max()
