"""A plan is launched on PyTorch's streams: its current one, the default one, and while it captures.

``MAXCONV_STREAMS_LIBRARY`` names the library that ``tests/gpu/run build`` makes of streams.mojo.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

#: Batch, height and width, channels, filters, filter, stride, padding.
SHAPES = {
    "3x3": (8, 28, 128, 128, 3, 1, 1),
    "1x1": (4, 14, 256, 1024, 1, 1, 0),
    "split-K": (1, 7, 512, 512, 3, 1, 1),
    "stem": (4, 56, 3, 64, 7, 2, 3),
}


@pytest.fixture(scope="module")
def library() -> Iterator[ctypes.CDLL]:
    path = os.environ.get("MAXCONV_STREAMS_LIBRARY")
    if not path or not Path(path).is_file() or not torch.cuda.is_available():
        pytest.skip("no GPU, or no library: tests/gpu/run build makes it")
    torch.cuda.init()
    yield ctypes.CDLL(path)


class Convolution:
    """Operands of a convolution, and a call of ours."""

    def __init__(self, library: ctypes.CDLL, name: str, fused: bool) -> None:
        batch, size, channels, filters, taps, stride, padding = SHAPES[name]
        generator = torch.Generator("cuda").manual_seed(len(name))

        def draw(*shape: int) -> Any:
            values = torch.randint(-2, 3, shape, generator=generator, device="cuda")
            return values.to(torch.bfloat16).contiguous(memory_format=torch.channels_last)

        self.stride, self.padding, self.fused = stride, padding, fused
        out = (size + 2 * padding - taps) // stride + 1
        self.x = draw(batch, channels, size, size)
        self.weight = draw(filters, channels, taps, taps)
        self.residual = draw(batch, filters, out, out)
        self.bias = torch.randint(-2, 3, (filters,), device="cuda").to(torch.bfloat16)
        self.y = torch.full_like(self.residual, torch.nan)
        self.library = library
        absent = not fused
        tensors = (self.x, self.weight, self.bias, self.residual, self.y)
        pointers = [t.data_ptr() * (not (absent and i in (2, 3))) for i, t in enumerate(tensors)]
        one = (1, stride, stride), (1, 1, 1), (0, padding, padding), (0, padding, padding)
        numbers = [batch, channels, filters, 1, 1, size, size, 1, taps, taps]
        numbers += [n for three in one for n in three]
        self.pointers = (ctypes.c_int64 * len(pointers))(*pointers)
        self.numbers = (ctypes.c_int64 * len(numbers))(*numbers)

    def __call__(self) -> None:
        """Enqueues on the current stream."""
        stream = ctypes.c_int64(torch.cuda.current_stream().cuda_stream)
        assert self.library.convolve_on_stream(stream, self.pointers, self.numbers) == 0

    def expected(self) -> Any:
        """The result, from float64 products of integers."""
        y = torch.nn.functional.conv2d(
            self.x.double(), self.weight.double(), None, self.stride, self.padding
        )
        if self.fused:
            y = torch.nn.functional.silu(y + self.bias.double()[:, None, None])
            y = y + self.residual.double()
        return y

    def check(self) -> None:
        torch.cuda.synchronize()
        want = self.expected()
        if self.fused:
            # One rounding to bfloat16, half a unit of 2^-8, and the approximate tanh.
            error = (self.y.double() - want).abs()
            assert bool((error <= 2**-8 * want.abs() + 2e-3).all())
        else:
            assert torch.equal(self.y, want.to(torch.bfloat16))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_on_the_default_stream(library: ctypes.CDLL, name: str, fused: bool) -> None:
    convolution = Convolution(library, name, fused)
    convolution()
    convolution.check()


@pytest.mark.parametrize("name", SHAPES)
def test_in_the_order_of_another_stream(library: ctypes.CDLL, name: str) -> None:
    convolution = Convolution(library, name, False)
    convolution()
    convolution.check()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # What follows must wait for this: the input changes late.
        torch.cuda._sleep(100_000_000)
        convolution.x.mul_(-1)
        convolution()
        negated = convolution.y.clone()
    torch.cuda.synchronize()
    assert torch.equal(negated, convolution.expected().to(torch.bfloat16))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_captured_by_a_cuda_graph(library: ctypes.CDLL, name: str, fused: bool) -> None:
    convolution = Convolution(library, name, fused)
    convolution()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        convolution()
    for sign in (-1, 1, -1):
        convolution.x.mul_(sign)
        convolution.y.fill_(torch.nan)
        graph.replay()
        convolution.check()


def test_host_time_of_a_call(library: ctypes.CDLL, record_property: Callable[..., None]) -> None:
    convolution = Convolution(library, "split-K", True)
    weight = convolution.weight

    def theirs() -> None:
        torch.nn.functional.conv2d(convolution.x, weight, None, 1, 1)

    def median(call: Callable[[], None]) -> float:
        times = []
        for _ in range(9):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                call()
            times.append((time.perf_counter() - start) / 100)
            torch.cuda.synchronize()
        return sorted(times)[4] * 1e6

    for call in (convolution, theirs):
        call()
    ours, torchs = median(convolution), median(theirs)
    print(f"host time of a call: {ours:.1f} us, torch {torchs:.1f} us")
    record_property("host_us", ours)
    assert ours < torchs
