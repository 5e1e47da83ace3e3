"""The op and a graph with it through MAX's own bridge to PyTorch, with CUDA tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from tests.gpu import bridge  # noqa: E402

import maxconv.torch as mt  # noqa: E402

if TYPE_CHECKING:
    from max.driver import Device

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

DTYPE = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def cuda(gpu: Device) -> None:
    """Skips where PyTorch has no CUDA."""
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU on this machine")


def integers(*shape: int, seed: int) -> Any:
    """Integers so small that every sum has a bfloat16; images are channels last."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-1, 2, shape, generator=generator).to("cuda", DTYPE)
    return drawn.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else drawn


def exact(x: Any, w: Any, bias: Any) -> Any:
    return torch.nn.functional.conv2d(x.double(), w.double(), bias.double(), padding=1).relu()


def test_the_op() -> None:
    op, conv = bridge.custom_op(), bridge.operands()
    for seed in (1, 2):
        x, w = integers(*bridge.INPUT, seed=seed), integers(*bridge.WEIGHT, seed=seed + 10)
        bias = integers(bridge.FILTERS, seed=seed + 20)
        y = torch.full(conv.output_shape, float("nan"), device="cuda", dtype=DTYPE)
        residual = integers(bridge.BATCH, bridge.FILTERS, *bridge.INPUT[2:], seed=seed + 30)
        tensors = x.permute(0, 2, 3, 1), mt.pack_filter(w), bias, residual.permute(0, 2, 3, 1)
        op(*conv.arguments(y, *tensors))
        assert torch.equal(y.permute(0, 3, 1, 2), (exact(x, w, bias) - residual).to(DTYPE))


def test_a_graph() -> None:
    op = bridge.block()
    w, bias = integers(*bridge.WEIGHT, seed=1), integers(bridge.FILTERS, seed=2)
    for n, h, width in ((1, 9, 7), (3, 12, 16)):
        x = integers(n, bridge.CHANNELS, h, width, seed=h)
        residual = integers(n, bridge.FILTERS, h, width, seed=width)
        y = torch.full((n, h, width, bridge.FILTERS), float("nan"), device="cuda", dtype=DTYPE)
        op(y, x.permute(0, 2, 3, 1), w.contiguous(), bias, residual.permute(0, 2, 3, 1))
        expected = (exact(x, w, bias) + residual - 1).relu()
        assert torch.equal(y.permute(0, 3, 1, 2), expected.to(DTYPE))
