"""PyTorch's CUDA tensors through ``maxconv.torch``: functions, modules, compiled, two streams."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import maxconv.torch as mt  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU"),
]

DTYPE = torch.bfloat16
FILTERS, CHANNELS = 24, 16


def integers(*shape: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to("cuda", DTYPE)


def exact(x: Any, w: Any, bias: Any = None, **arguments: Any) -> Any:
    """The convolution in float64, which is exact for small integers."""
    bias = None if bias is None else bias.double()
    return torch.nn.functional.conv2d(x.double(), w.double(), bias, **arguments)


def test_functions() -> None:
    w, bias = integers(FILTERS, CHANNELS, 3, 3, seed=1), integers(FILTERS, seed=2)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = integers(2, CHANNELS, 13, 11, seed=3).contiguous(memory_format=memory_format)
        y = mt.conv2d(x, w, bias, stride=2, padding=1)
        assert y.device == x.device and y.dtype == DTYPE
        assert y.is_contiguous(memory_format=memory_format)
        assert torch.equal(y, exact(x, w, bias, stride=2, padding=1).to(DTYPE))
    residual = integers(2, FILTERS, 13, 11, seed=4)
    y = mt.conv2d(x, w, None, padding=1, activation="relu", residual=residual, beta=-1.0)
    assert torch.equal(y, (exact(x, w, padding=1).relu() - residual).to(DTYPE))
    # An address that is no multiple of 16 bytes.
    odd = integers(2 * CHANNELS * 8 * 8 + 1, seed=5)[1:].view(2, 8, 8, CHANNELS).permute(0, 3, 1, 2)
    assert torch.equal(mt.conv2d(odd, w), exact(odd, w).to(DTYPE))


def test_modules_see_new_weights() -> None:
    conv = torch.nn.Conv2d(CHANNELS, FILTERS, 3, padding=1).to("cuda", DTYPE)
    ours = mt.Conv2d.from_torch(conv)
    x = integers(2, CHANNELS, 9, 9, seed=6)
    with torch.no_grad():
        for seed in (7, 8):
            ours.weight.copy_(integers(FILTERS, CHANNELS, 3, 3, seed=seed))
            torch.nn.init.constant_(ours.get_parameter("bias"), seed)
            wanted = exact(x, ours.weight, ours.bias, padding=1).to(DTYPE)
            assert torch.equal(ours(x), wanted)


@pytest.mark.parametrize("mode", ["aot_eager", "default", "reduce-overhead", "max-autotune"])
def test_compiled(mode: str) -> None:
    how: dict[str, Any] = {"backend": mode} if mode == "aot_eager" else {"mode": mode}
    conv = torch.nn.Conv2d(CHANNELS, FILTERS, 3).to("cuda", DTYPE)
    with torch.no_grad():
        conv.weight.copy_(integers(FILTERS, CHANNELS, 3, 3, seed=9))
        conv.bias.copy_(integers(FILTERS, seed=10))
        ours = mt.Conv2d.from_torch(conv, activation="relu")
        compiled = torch.compile(lambda x: ours(x) * 2, fullgraph=True, **how)
        # A mode that captures runs twice first.
        for seed in (11, 12, 13, 14):
            x = integers(2, CHANNELS, 9, 9, seed=seed)
            wanted = exact(x, conv.weight, conv.bias).relu() * 2
            assert torch.equal(compiled(x), wanted.to(DTYPE))


def test_two_streams() -> None:
    w = integers(FILTERS, CHANNELS, 3, 3, seed=12)
    inputs = [integers(8, CHANNELS, 65, 65, seed=seed) for seed in (13, 14)]
    wanted = [exact(x, w, padding=1).to(DTYPE) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(20):
        results = []
        for x, stream in zip(inputs, streams, strict=True):
            with torch.cuda.stream(stream):
                # The operand is written on this stream, just before, and takes a while.
                fresh = torch.zeros_like(x)
                for _ in range(10):
                    fresh.add_(x)
                fresh.div_(10)
                results.append(mt.conv2d(fresh, w, padding=1) + 0)
        torch.cuda.synchronize()
        for result, want in zip(results, wanted, strict=True):
            assert torch.equal(result, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="PyTorch finds one GPU")
def test_a_second_gpu() -> None:
    w, bias = integers(FILTERS, CHANNELS, 3, 3, seed=12), integers(FILTERS, seed=13)
    for index in (1, 0, 1):
        x, there, offset = (
            tensor.to(f"cuda:{index}") for tensor in (integers(2, CHANNELS, 9, 9), w, bias)
        )
        y = mt.conv2d(x, there, offset, padding=1)
        assert y.device == x.device
        assert torch.equal(y, exact(x, there, offset, padding=1).to(DTYPE))
        assert torch.cuda.current_device() == 0


@pytest.mark.parametrize(
    ("images", "side", "channels", "stride"),
    # Whole sums; sums that the blocks of a cluster share; a stride.
    [(8, 56, 64, 1), (1, 14, 256, 1), (4, 28, 128, 2)],
)
def test_a_thousand_repeats(images: int, side: int, channels: int, stride: int) -> None:
    generator = torch.Generator("cuda").manual_seed(15)
    shapes = ((images, channels, side, side), (channels, channels, 3, 3))
    x, w = (torch.randn(s, generator=generator, device="cuda", dtype=DTYPE) for s in shapes)
    x, w = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, w))
    first = mt.conv2d(x, w, stride=stride, padding=1)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        again = mt.conv2d(x, w, stride=stride, padding=1)
        different += (again.view(torch.int16) != first.view(torch.int16)).sum()
    assert int(different) == 0
    wanted = exact(x, w, stride=stride, padding=1)
    # A sum of float32 products, rounded once to 8 bits; 2**-8 covers half a unit in the last place.
    assert torch.allclose(first.double(), wanted, rtol=2**-8, atol=2**-8 * float(wanted.std()))


@pytest.mark.parametrize("filters", [1, 3, 4, 5, 7, 12, 21, 67, 130])
@pytest.mark.parametrize("taps", [1, 3])
def test_any_number_of_filters(filters: int, taps: int) -> None:
    w, bias = integers(filters, 48, taps, taps, seed=20), integers(filters, seed=21)
    for images, height, width in ((1, 1, 1), (2, 13, 11), (1, 70, 200)):
        x = integers(images, 48, height, width, seed=22)
        # What is not written shows.
        torch.full((images, filters, height, width), math.nan, device="cuda", dtype=DTYPE)
        y = mt.conv2d(x, w, bias, padding=taps // 2, activation="relu")
        assert torch.equal(y, exact(x, w, bias, padding=taps // 2).relu().to(DTYPE))
        # TMA, which cannot load these pixels, would load the residual.
        z = mt.conv2d(x, w, padding=taps // 2, residual=y)
        assert torch.equal(z, (exact(x, w, padding=taps // 2) + y).to(DTYPE))


@pytest.mark.parametrize(
    ("channels", "groups"),
    # The Hopper kernel; channels that it does not take; depthwise; few channels.
    [(64, 1), (12, 1), (64, 64), (4, 1)],
)
def test_more_elements_than_31_bits_count(channels: int, groups: int) -> None:
    side = math.isqrt(2**31 // channels) + 64
    shape = (1, side, side, channels)
    x = torch.randint(-2, 3, shape, device="cuda", dtype=torch.int8).to(DTYPE).permute(0, 3, 1, 2)
    w = integers(channels, channels // groups, 3, 3, seed=16)
    y = mt.conv2d(x, w, padding=1, groups=groups)
    # The first rows, those around the element of this number, and the last.
    for row in (0, 2**31 // (side * channels) - 3, side - 8):
        part = x[:, :, row : row + 8]
        wanted = exact(part, w, padding=(0, 1), groups=groups).to(DTYPE)
        assert torch.equal(y[:, :, row + 1 : row + 7], wanted)


def test_precision_is_what_pytorch_is_set_to() -> None:
    x = torch.randn(2, 64, 20, 20, device="cuda").contiguous(memory_format=torch.channels_last)
    w = torch.randn(32, 64, 3, 3, device="cuda")
    wanted = exact(x, w)

    def error(precision: str | None = None) -> float:
        return float((mt.conv2d(x, w, precision=precision) - wanted).norm() / wanted.norm())

    # As in test_gpu_problems.py.
    assert 1e-4 < error() < 4e-4
    assert error("float32") < 1e-5
    allowed = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = False
        assert error() < 1e-5
        assert 1e-4 < error("tf32") < 4e-4
    finally:
        torch.backends.cudnn.allow_tf32 = allowed


def test_float8() -> None:
    x, w = integers(2, 64, 13, 11, seed=17), integers(FILTERS, 64, 3, 3, seed=18)
    scale = 2.0 ** torch.arange(FILTERS, device="cuda").remainder(5).float()
    x8, w8 = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
    residual = integers(2, FILTERS, 13, 11, seed=19)
    y = mt.conv2d(x8, w8, padding=1, scale=scale, residual=residual, out_dtype=DTYPE)
    wanted = exact(x, w, padding=1) * scale[:, None, None] + residual
    assert y.dtype == DTYPE
    assert torch.equal(y, wanted.to(DTYPE))
    with pytest.raises(TypeError, match=r"out_dtype: None stands for the input's torch.float8_e4m"):
        mt.conv2d(x8, w8)
    with pytest.raises(TypeError, match=r"bias: dtype torch.float16 does not match; the outp"):
        mt.conv2d(x8, w8, torch.ones(FILTERS, device="cuda").half(), out_dtype=DTYPE)


def test_refusals() -> None:
    x, w = integers(1, CHANNELS, 5, 5), integers(FILTERS, CHANNELS, 3, 3)
    with pytest.raises(ValueError, match="weight: device cpu is not the input's; cuda:0 is needed"):
        mt.conv2d(x, w.cpu())
    with pytest.raises(ValueError, match=r"weight: h extent 3 .* padded input has only 2"):
        mt.conv2d(x[:, :, :2], w)
    count = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"device: cuda:{count + 7}, but PyTorch finds {count} "):
        mt.prepare(2, DTYPE, f"cuda:{count + 7}")
