"""``mt.global_avg_pool`` with CUDA tensors: values, formats, streams, captured and compiled."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import maxconv.torch as mt  # noqa: E402
from maxconv.torch._means import MeanPlan  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU"),
]

DTYPE = torch.bfloat16


def image(*shape: int, seed: int = 0, dtype: Any = DTYPE) -> Any:
    """``[N, C, *spatial]``, channels last."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator).to("cuda", dtype)
    return drawn.movedim(1, -1).contiguous().movedim(-1, 1)


def check(actual: Any, x: Any) -> None:
    """Compares with float64: one rounding, and float32 sums of a mean's pixels."""
    exact = x.double().mean(tuple(range(2, x.dim())), keepdim=True)
    size = x.double().abs().mean(tuple(range(2, x.dim())), keepdim=True)
    assert actual.shape == exact.shape and actual.dtype == x.dtype
    unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}[x.dtype]
    error = (actual.double() - exact).abs()
    assert bool((error <= unit * exact.abs() + 2.0**-20 * size + 2.0**-24).all())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts launches of maxconv's kernel."""
    counted: list[int] = []
    run = MeanPlan.run

    def counting(self: MeanPlan, input: Any) -> Any:
        counted.append(1)
        return run(self, input)

    monkeypatch.setattr(MeanPlan, "run", counting)
    return counted


@pytest.mark.parametrize(
    "shape",
    [
        *((1, 72, 28, 28), (1, 960, 7, 7), (3, 5, 9, 4), (64, 240, 28, 28), (64, 2048, 7, 7)),
        *((1, 32, 112, 112), (2, 33, 100, 90), (2, 24, 50), (1, 16, 5, 6, 7), (2, 8, 1, 1)),
    ],
)
def test_shapes(shape: tuple[int, ...], calls: list[int]) -> None:
    x = image(*shape, seed=sum(shape))
    check(mt.global_avg_pool(x), x)
    assert calls


def test_others_are_pytorchs(calls: list[int]) -> None:
    contiguous = torch.randn(2, 16, 9, 9, device="cuda")
    strided = image(2, 16, 9, 9)[:, :, ::2]
    trained = image(2, 16, 9, 9, dtype=torch.float32).requires_grad_()
    for x in (contiguous, strided, trained, contiguous.double()):
        actual = mt.global_avg_pool(x)
        assert torch.equal(actual, x.mean((2, 3), keepdim=True))
    total: Any = mt.global_avg_pool(trained).sum()
    total.backward()
    assert trained.grad is not None
    batched = torch.vmap(mt.global_avg_pool)(torch.stack([image(2, 8, 5, 5)] * 2))
    assert batched.shape == (2, 2, 8, 1, 1)
    assert not calls


def test_streams_and_capture() -> None:
    x = image(4, 96, 14, 14)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = mt.global_avg_pool(x * 2)
    torch.cuda.current_stream().wait_stream(stream)
    check(y, x * 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # What is read was written by the launch before.
        captured = mt.global_avg_pool(
            mt.global_avg_pool(x).expand(-1, -1, 3, 3).contiguous(memory_format=torch.channels_last)
        )
    x.copy_(image(4, 96, 14, 14, seed=1))
    graph.replay()
    torch.cuda.synchronize()
    check(captured, x)


def test_who_watches_sees_the_operator() -> None:
    x = image(2, 16, 9, 9)
    with torch.profiler.profile() as profile:
        mt.global_avg_pool(x)
    assert "maxconv::global_avg_pool" in {event.key for event in profile.key_averages()}
    torch.compiler.reset()
    compiled = torch.compile(lambda x: mt.global_avg_pool(x) + 1, fullgraph=True)
    # One rounding more, of a value of about 1.
    assert torch.allclose(compiled(x).float(), mt.global_avg_pool(x).float() + 1, atol=2.0**-7)
    assert mt.global_avg_pool(x).stride() == torch.ops.maxconv.global_avg_pool(x).stride()


def test_a_converted_model_uses_it(calls: list[int]) -> None:
    nn = torch.nn

    class Gate(nn.Module):  # type: ignore[name-defined, misc] # torch is imported by pytest
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(16, 32, 3, padding=1)
            self.pool = nn.AdaptiveAvgPool2d(1)
            self.fc = nn.Conv2d(32, 32, 1)
            self.gate = nn.Hardsigmoid()

        def forward(self, x: Any) -> Any:
            y = self.conv(x)
            return (y * self.gate(self.fc(self.pool(y)))).mean((2, 3))

    torch.manual_seed(0)
    model = Gate().eval().to("cuda", DTYPE)
    fast, report = mt.convert(model)
    x = image(2, 16, 12, 12)
    with torch.inference_mode():
        actual = fast(x)
    assert len(calls) == 2
    assert report.replaced[1].fused == ("hard_sigmoid",)
    exact = model.double()(x.double())
    # Each of five tensors on the way is rounded by 2^-9 of its values.
    assert (actual.double() - exact).abs().max() <= 2e-2 * exact.abs().max()
