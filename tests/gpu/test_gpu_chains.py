"""Chains of a converted model on a GPU: values, streams, capture, addresses and memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import maxconv.torch as mt  # noqa: E402
from maxconv.bench.resnet import ResNet, randomize  # noqa: E402
from maxconv.torch import _chains  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU"),
]


def image(seed: int = 0, batch: int = 2) -> Any:
    drawn = torch.randn((batch, 3, 64, 64), generator=torch.Generator().manual_seed(seed))
    return drawn.to("cuda", torch.bfloat16).to(memory_format=torch.channels_last)


def model() -> Any:
    """A small ResNet, converted."""
    torch.manual_seed(0)
    net = randomize(ResNet((2, 1, 1, 1), 10)).eval().to("cuda", torch.bfloat16)
    return mt.convert(net)[0]


def settled(net: Any, x: Any) -> Any:
    """Returns the output of a model that was never called; calls a model until chains run."""
    expected = copy.deepcopy(net)(x)
    for _ in range(3):
        net(x)
    return expected


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each program that is asked has run."""
    ran: list[bool] = []
    run = _chains._Program.run

    def counting(self: Any, inputs: Any) -> Any:
        results = run(self, inputs)
        ran.append(results is not None)
        return results

    monkeypatch.setattr(_chains._Program, "run", counting)
    return ran


def test_values(programs: list[bool]) -> None:
    net = model()
    with torch.inference_mode():
        for batch in (2, 1):
            inputs = [image(seed, batch) for seed in range(4)]
            expected = [copy.deepcopy(net)(x) for x in inputs]
            for _ in range(3):
                programs.clear()
                actual = [net(x) for x in inputs]
            assert programs and all(programs)
            assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_streams(programs: list[bool]) -> None:
    net, x = model(), image()
    with torch.inference_mode():
        expected = settled(net, x)
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(3)]
        outputs = []
        for _ in range(10):
            for stream in streams:
                with torch.cuda.stream(stream):
                    outputs.append(net(x))
        torch.cuda.synchronize()
    assert all(torch.equal(y, expected) for y in outputs)


def test_a_captured_graph_outlives_programs(programs: list[bool]) -> None:
    net, x = model(), image()
    with torch.inference_mode():
        expected = settled(net, x)
        programs.clear()
        graph: Any = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = net(x)
        assert not programs
        # A change drops what programs keep.
        net.conv1.stride = tuple(net.conv1.stride)
        net(x)
        net(x)
        torch.cuda.empty_cache()
        filling = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(64)]
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(y, expected) and filling


def test_an_address_that_no_vector_has(programs: list[bool]) -> None:
    net, x = model(), image()
    with torch.inference_mode():
        expected = settled(net, x)
        memory = torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)
        odd = memory[1:].as_strided(x.shape, x.stride()).copy_(x)
        programs.clear()
        y = net(odd)
    assert False in programs
    assert torch.allclose(
        y.float(), expected.float(), rtol=0.05, atol=0.05 * float(expected.abs().max())
    )


def test_a_changed_weight_is_seen(programs: list[bool]) -> None:
    net, x = model(), image()
    with torch.inference_mode():
        for _ in range(3):
            net(x)
    with torch.no_grad():
        net.conv1.weight.mul_(2)
        expected = copy.deepcopy(net)(x)
        for _ in range(3):
            assert torch.equal(net(x), expected)
