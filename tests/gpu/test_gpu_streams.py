"""``maxconv.torch`` on PyTorch's streams: the default one, others, several at once, captured."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import maxconv.torch as mt  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU"),
]

#: Batch, height and width, channels, filters, filter, stride, padding.
SHAPES = {
    "3x3": (8, 28, 128, 128, 3, 1, 1),
    "1x1": (4, 14, 256, 1024, 1, 1, 0),
    "split-K": (1, 7, 512, 512, 3, 1, 1),
    "stem": (4, 56, 3, 64, 7, 2, 3),
    "depthwise": (4, 28, 64, 64, 3, 1, 1),
}


class Convolution:
    """Operands of a convolution, and a call of ours."""

    def __init__(self, name: str, fused: bool = False, seed: int = 0) -> None:
        batch, size, channels, filters, taps, stride, padding = SHAPES[name]
        groups = channels if name == "depthwise" else 1
        generator = torch.Generator("cuda").manual_seed(seed + len(name))

        def draw(*shape: int) -> Any:
            values = torch.randint(-2, 3, shape, generator=generator, device="cuda")
            return values.to(torch.bfloat16).contiguous(memory_format=torch.channels_last)

        out = (size + 2 * padding - taps) // stride + 1
        self.x = draw(batch, channels, size, size)
        self.weight = draw(filters, channels // groups, taps, taps)
        self.geometry: dict[str, Any] = {"stride": stride, "padding": padding, "groups": groups}
        self.epilogue: dict[str, Any] = {}
        if fused:
            bias = torch.randint(-2, 3, (filters,), generator=generator, device="cuda")
            self.epilogue = {"bias": bias.to(torch.bfloat16), "activation": "silu"}
            self.epilogue["residual"] = draw(batch, filters, out, out)

    def __call__(self) -> Any:
        """Enqueues on the current stream."""
        return mt.conv2d(self.x, self.weight, **self.geometry, **self.epilogue)

    def expected(self) -> Any:
        """The result, from float64 products of integers."""
        y = torch.nn.functional.conv2d(self.x.double(), self.weight.double(), **self.geometry)
        if self.epilogue:
            y = torch.nn.functional.silu(y + self.epilogue["bias"].double()[:, None, None])
            y = y + self.epilogue["residual"].double()
        return y

    def check(self, y: Any) -> None:
        torch.cuda.synchronize()
        want = self.expected()
        if self.epilogue:
            # One rounding to bfloat16, half a unit of 2^-8, and the approximate tanh.
            error = (y.double() - want).abs()
            assert bool((error <= 2**-8 * want.abs() + 2e-3).all())
        else:
            assert torch.equal(y, want.to(torch.bfloat16))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_on_the_default_stream(name: str, fused: bool) -> None:
    convolution = Convolution(name, fused)
    for _ in range(2):
        convolution.check(convolution())


@pytest.mark.parametrize("name", SHAPES)
def test_in_the_order_of_another_stream(name: str) -> None:
    convolution = Convolution(name)
    convolution.check(convolution())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # What follows must wait for this: the input changes late.
        torch.cuda._sleep(100_000_000)
        convolution.x.mul_(-1)
        y = convolution()
    convolution.check(y)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_captured_by_a_cuda_graph(name: str, fused: bool) -> None:
    convolution = Convolution(name, fused)
    convolution()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = convolution()
    for sign in (-1, 1, -1):
        convolution.x.mul_(sign)
        y.fill_(torch.nan)
        graph.replay()
        convolution.check(y)


def test_captured_by_a_first_call() -> None:
    # No call like it came before: its kernel is loaded while PyTorch captures.
    x = torch.ones(3, 72, 17, 17, dtype=torch.float16, device="cuda")
    x = x.contiguous(memory_format=torch.channels_last)
    w = torch.ones(40, 72, 3, 3, dtype=torch.float16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = mt.conv2d(x, w)
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, torch.full_like(y, 72 * 9))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_graph_sees_new_weights_and_outlives_them(memory_format: Any) -> None:
    """Whatever a captured call derives from a weight is derived anew in each replay."""
    module: Any = mt.Conv2d(32, 24, 3, padding=1).to("cuda", torch.bfloat16)
    module.to(memory_format=memory_format)
    x = torch.randint(-2, 3, (2, 32, 9, 9), device="cuda").to(torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        module(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = module(x)
        for seed in (1, 2):
            module.weight.copy_(torch.randint(-2, 3, module.weight.shape).to("cuda"))
            torch.nn.init.constant_(module.get_parameter("bias"), seed)
            graph.replay()
            module(x)
            torch.cuda.synchronize()
            weight, bias = module.weight.double(), module.get_parameter("bias").double()
            want = torch.nn.functional.conv2d(x.double(), weight, bias, padding=1)
            assert torch.equal(y, want.to(torch.bfloat16))


def test_threads_with_streams_of_their_own() -> None:
    wrong: list[str] = []

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for name in (*SHAPES, *SHAPES):
                convolution = Convolution(name, seed=seed)
                y = convolution()
                want = convolution.expected().to(torch.bfloat16)
                torch.cuda.current_stream().synchronize()
                if not torch.equal(y, want):
                    wrong.append(f"{name}, {seed}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_memory_does_not_grow() -> None:
    w = torch.randn(24, 16, 3, 3, device="cuda").bfloat16()
    inputs = [torch.randn(1, 16, 5 + i % 20, 6 + i // 20, device="cuda") for i in range(200)]

    def call() -> None:
        for x in inputs:
            mt.conv2d(x.bfloat16(), w)
        torch.cuda.synchronize()

    call()
    held, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    for _ in range(5):
        call()
    assert torch.cuda.memory_allocated() == held
    assert torch.cuda.mem_get_info()[0] >= free


def test_host_time_of_a_call(record_property: Callable[..., None]) -> None:
    convolution = Convolution("split-K", True)

    def theirs() -> None:
        x, epilogue = convolution.x, convolution.epilogue
        y = torch.nn.functional.conv2d(x, convolution.weight, epilogue["bias"], 1, 1)
        torch.nn.functional.silu(y).add_(epilogue["residual"])

    def median(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(9):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                call()
            times.append((time.perf_counter() - start) / 100)
            torch.cuda.synchronize()
        return sorted(times)[4] * 1e6

    with torch.inference_mode():
        for call in (convolution, theirs):
            call()
        ours, torchs = median(convolution), median(theirs)
    print(f"host time of a call: {ours:.1f} us, torch {torchs:.1f} us")
    record_property("host_us", ours)
    assert ours < torchs


def test_a_transposed_convolution_is_captured() -> None:
    module = mt.ConvTranspose2d(16, 24, 3, 2, 1).to("cuda", torch.bfloat16)
    x = torch.randint(-2, 3, (2, 16, 9, 9), device="cuda").to(torch.bfloat16)
    with torch.no_grad():
        module(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = module(x)
        for seed in (1, 2):
            module.weight.copy_(torch.randint(-2, 3, module.weight.shape).to("cuda"))
            torch.nn.init.constant_(module.get_parameter("bias"), seed)
            graph.replay()
            torch.cuda.synchronize()
            weight, bias = module.weight.double(), module.get_parameter("bias").double()
            want = torch.nn.functional.conv_transpose2d(x.double(), weight, bias, 2, 1)
            assert torch.equal(y, want.to(torch.bfloat16))
            assert torch.equal(module(x), y)
