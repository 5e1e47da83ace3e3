"""The Winograd kernel of the CPU in floating point: rounding, threads, infinities, memory.

Most tests run it with 3 x 3 and with 2 x 2 taps: all is shared but the transforms of filters and
of sums. That it is exact on integers, with every cut into tasks, is tests/host/test_kernels.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.interop.torch_tensors import UNIT, draw
from torch import Tensor
from torch.nn import functional

from maxconv import _native
from maxconv._fields import Kernel, Layout, encode_geometry, encode_scalars
from maxconv._library_files import Family
from maxconv.torch._dtypes import NAMES
from maxconv.torch._threads import parallel_function, threads

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]


def float64(*rows: tuple[int, ...]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


#: |B^T| of the kernel's transforms, and |G| and |A^T| by the taps along an axis.
INPUT = float64((1, 0, 1, 0), (0, 1, 1, 0), (0, 1, 1, 0), (0, 1, 0, 1))
FILTER = {
    3: float64((2, 0, 0), (1, 1, 1), (1, 1, 1), (0, 0, 2)) / 2,
    2: float64((2, 0), (1, 1), (1, 1), (0, 2)) / 2,
}
OUTPUT = {
    3: float64((1, 1, 1, 0), (0, 1, 1, 1)),
    2: float64((1, 1, 1, 0), (0, 1, 1, 0), (0, 1, 1, 1)),
}

Pads = tuple[int, int, int, int]


def convolve(
    x: Tensor,
    w: Tensor,
    pads: Pads = (1, 1, 1, 1),
    kernel: Kernel = Kernel.WINOGRAD,
    count: int = 0,
) -> Tensor:
    """Convolves ``[N, H, W, C]`` with ``[K, T, T, C]`` on some threads, into NaNs."""
    top, bottom, left, right = pads
    batch, height, width, _ = x.shape
    taps = w.shape[1]
    shape = (batch, height + top + bottom - taps + 1, width + left + right - taps + 1, len(w))
    geometry = encode_geometry(
        stride=(1, 1),
        dilation=(1, 1),
        pad_before=(top, left),
        pad_after=(bottom, right),
        filter_size=(taps, taps),
        filter_layout=Layout.KRSC,
        kernel=kernel,
    )
    family = Family(NAMES[x.dtype], NAMES[x.dtype], NAMES[x.dtype], scaled=False)
    call = _native.Call.of(tuple(x.shape), shape, w.numel(), geometry, encode_scalars())
    output = torch.full(shape, float("nan"), dtype=x.dtype)
    operands = (x.data_ptr(), w.data_ptr(), 0, 0, 0, output.data_ptr())
    prepared = _native.host(family, whole=True).prepare(call)
    prepared.run(*operands, count or threads(), parallel_function())
    return output


def padded(x: Tensor, pads: Pads) -> Tensor:
    """Returns ``[N, C, H, W]`` in float64, with its padding."""
    top, bottom, left, right = pads
    return functional.pad(x.double().permute(0, 3, 1, 2), (left, right, top, bottom))


def exact(x: Tensor, w: Tensor, pads: Pads) -> Tensor:
    """Returns the convolution in float64."""
    return functional.conv2d(padded(x, pads), w.double().permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def magnitude(x: Tensor, w: Tensor, pads: Pads) -> Tensor:
    """Returns what each output's sums would be if nothing cancelled: the kernel's formula with the
    absolute values of operands and transforms."""
    image = padded(x, pads).abs()
    taps = w.shape[1]
    extent = 5 - taps
    height, width = image.shape[2] - taps + 1, image.shape[3] - taps + 1
    # Tiles at the far edges read further rows or columns.
    image = functional.pad(image, (0, -width % extent, 0, -height % extent))
    patches = image.unfold(2, 4, extent).unfold(3, 4, extent)
    inputs = INPUT @ patches @ INPUT.mT
    filters = FILTER[taps] @ w.double().abs().permute(0, 3, 1, 2) @ FILTER[taps].mT
    sums = torch.einsum("ncpqij,kcij->nkpqij", inputs, filters)
    tiles = OUTPUT[taps] @ sums @ OUTPUT[taps].mT
    batch, count, p, q = tiles.shape[:4]
    outputs = tiles.permute(0, 2, 4, 3, 5, 1).reshape(batch, extent * p, extent * q, count)
    return outputs[:, :height, :width]


def check(actual: Tensor, x: Tensor, w: Tensor, pads: Pads) -> None:
    """Compares with float64.

    Two additions transform an input, four a filter or two (halvings are exact) and four a sum of C
    products, and each product is added with one rounding: C + 10 roundings, each of at most half a
    unit, of terms that ``magnitude`` adds up (Higham, "Accuracy and Stability of Numerical
    Algorithms", section 3.1). Then the output is rounded once.
    """
    want = exact(x, w, pads)
    roundings = x.shape[3] + 10
    allowed = 1.01 * roundings * 2.0**-24 * magnitude(x, w, pads)
    if actual.dtype != torch.float32:
        allowed = allowed * 1.01 + UNIT[actual.dtype] * want.abs()
    error = (actual.double() - want).abs()
    # A comparison that NaN fails.
    assert bool((error <= allowed).all()), f"{(error / allowed).max()} of what rounding explains"


SHAPES: list[tuple[tuple[int, ...], int, Pads]] = [
    ((2, 8, 8, 32), 48, (1, 1, 1, 1)),
    ((1, 14, 14, 160), 96, (1, 1, 1, 1)),
    ((1, 7, 7, 300), 130, (1, 1, 1, 1)),
    ((3, 9, 13, 21), 17, (0, 2, 1, 0)),
    ((1, 33, 1, 5), 3, (1, 1, 1, 1)),
    ((1, 1, 1, 1), 2, (4, 3, 0, 5)),
    ((1, 40, 57, 16), 20, (1, 0, 2, 2)),
]


TAPS = pytest.mark.parametrize("taps", [2, 3])


@TAPS
@pytest.mark.parametrize(("shape", "filters", "pads"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_explains_the_error(
    shape: tuple[int, ...], filters: int, pads: Pads, dtype: torch.dtype, taps: int
) -> None:
    x = draw(*shape, dtype=dtype, seed=1)
    w = draw(filters, taps, taps, shape[3], dtype=dtype, seed=2)
    check(convolve(x, w, pads), x, w, pads)
    # Neighbours of very different sizes, from which the transforms take differences.
    x = x * 10.0 ** (6 * draw(*shape, seed=3).tanh()).to(dtype)
    check(convolve(x, w, pads), x, w, pads)


@TAPS
@pytest.mark.parametrize("pads", [(1, 1, 1, 1), (0, 0, 0, 0), (2, 0, 3, 1)])
@pytest.mark.parametrize("size", [(4, 4), (9, 7), (3, 12)])
def test_each_tap_finds_its_pixel(pads: Pads, size: tuple[int, int], taps: int) -> None:
    """Filters of a single one copy inputs whose values name their coordinates, exactly: all sums
    of such integers are."""
    height, width, channels = (*size, 11)
    x = torch.arange(1.0, 2 * height * width * channels + 1).reshape(2, height, width, channels)
    w = torch.eye(taps * taps * channels).reshape(-1, taps, taps, channels)
    image = padded(x, pads).permute(0, 2, 3, 1)
    rows, columns = image.shape[1] - taps + 1, image.shape[2] - taps + 1
    read = [image[:, r : r + rows, s : s + columns] for r in range(taps) for s in range(taps)]
    assert torch.equal(convolve(x, w, pads).double(), torch.cat(read, dim=3))


@TAPS
@pytest.mark.parametrize("pads", [(0, 0, 0, 0), (1, 1, 1, 1), (0, 1, 1, 0)])
@pytest.mark.parametrize("size", [(3, 3), (3, 4), (5, 3), (4, 6), (7, 7), (8, 5), (9, 10)])
def test_integers_are_exact(pads: Pads, size: tuple[int, int], taps: int) -> None:
    """Images of less than a tile, of whole tiles, and with each rest.

    All sums are below 2^22, and float32 holds quarters of such numbers.
    """
    x = draw(2, *size, 37, seed=1).mul(5).round()
    w = draw(19, taps, taps, 37, seed=2).mul(5).round()
    assert torch.equal(convolve(x, w, pads).double(), exact(x, w, pads))


@TAPS
@pytest.mark.parametrize("shape", [(2, 40, 40, 32), (1, 14, 14, 160), (5, 7, 9, 270)])
def test_threads_change_no_bit(shape: tuple[int, ...], taps: int) -> None:
    x, w = draw(*shape, seed=1), draw(100, taps, taps, shape[3], seed=2)
    alone = convolve(x, w, count=1)
    check(alone, x, w, (1, 1, 1, 1))
    for count in (2, 3, 16):
        for _ in range(3):
            assert torch.equal(convolve(x, w, count=count), alone)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_infinities_stay_in_their_tiles(value: float) -> None:
    x, w = draw(1, 12, 12, 16, seed=1), draw(32, 3, 3, 16, seed=2)
    clean = convolve(x, w)
    x[0, 5, 6, 3] = value
    output = convolve(x, w)
    # The pixel is in windows of outputs 4 to 6 and 5 to 7, in tiles that begin at even ones.
    assert not output[0, 4:7, 5:8].isfinite().any()
    output[0, 4:8, 4:8] = clean[0, 4:8, 4:8]
    assert torch.equal(output, clean)


def test_infinities_stay_in_tiles_of_three() -> None:
    x, w = draw(1, 12, 12, 16, seed=1), draw(32, 2, 2, 16, seed=2)
    clean = convolve(x, w, (0, 0, 0, 0))
    x[0, 5, 7, 3] = float("inf")
    output = convolve(x, w, (0, 0, 0, 0))
    # The pixel is in windows of outputs 4 and 5, and 6 and 7, in tiles that begin at 3 and at 6.
    assert not output[0, 4:6, 6:8].isfinite().any()
    output[0, 3:6, 6:9] = clean[0, 3:6, 6:9]
    assert torch.equal(output, clean)


@pytest.mark.parametrize(
    ("shape", "filters", "chosen", "other"),
    [
        ((1, 56, 56, 64), 64, Kernel.WINOGRAD, Kernel.IMPLICIT_GEMM),
        ((4, 28, 28, 128), 128, Kernel.WINOGRAD, Kernel.IMPLICIT_GEMM),
        ((1, 8, 8, 512), 512, Kernel.WINOGRAD, Kernel.IMPLICIT_GEMM),
        # Too few tiles for the transform of the filter, and too few channels for the input's.
        ((1, 4, 4, 256), 256, Kernel.IMPLICIT_GEMM, Kernel.WINOGRAD),
        ((1, 56, 56, 3), 64, Kernel.IMPLICIT_GEMM, Kernel.WINOGRAD),
    ],
)
@TAPS
def test_it_runs_where_it_is_faster(
    shape: tuple[int, ...], filters: int, chosen: Kernel, other: Kernel, taps: int
) -> None:
    """The bits of the output tell the two kernels apart: they round otherwise."""
    x, w = draw(*shape, seed=1), draw(filters, taps, taps, shape[3], seed=2)
    # One thread alone may choose otherwise, and a test before this may have left one.
    output, same, another = (
        convolve(x, w, kernel=kernel, count=2) for kernel in (Kernel.AUTO, chosen, other)
    )
    assert torch.equal(output, same)
    assert not torch.equal(output, another)


def test_it_runs_where_the_gemm_gathers_rows() -> None:
    """7 x 7 pixels in register tiles of whole image rows are too many more, and a fifth of the
    products are padding."""
    x, w = draw(1, 7, 7, 512, seed=1), draw(512, 3, 3, 512, seed=2)
    output = convolve(x, w, kernel=Kernel.AUTO)
    assert torch.equal(output, convolve(x, w, kernel=Kernel.WINOGRAD))
    assert not torch.equal(output, convolve(x, w, kernel=Kernel.IMPLICIT_GEMM))


@pytest.mark.parametrize(
    ("size", "arguments", "words"),
    [
        ((5, 5), {}, r"filter \(1, 5, 5\)"),
        ((1, 1), {}, r"filter \(1, 1, 1\)"),
        ((2, 3), {}, r"filter \(1, 2, 3\)"),
        ((3, 2), {}, r"filter \(1, 3, 2\)"),
        ((2, 2), {"stride": (2, 2)}, r"stride \(1, 2, 2\)"),
        ((3, 3), {"stride": (1, 2)}, r"stride \(1, 1, 2\)"),
        ((3, 3), {"dilation": (2, 1)}, r"dilation \(1, 2, 1\)"),
    ],
)
def test_a_refusal_says_why(size: tuple[int, int], arguments: dict[str, Any], words: str) -> None:
    geometry = encode_geometry(
        **({"stride": (1, 1), "dilation": (1, 1)} | arguments),
        pad_before=(0, 0),
        pad_after=(0, 0),
        filter_size=size,
        filter_layout=Layout.KRSC,
        kernel=Kernel.WINOGRAD,
    )
    x, w = torch.ones(1, 9, 9, 4), torch.ones(20, *size, 4)
    images = functional.conv2d(x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2), **arguments)
    output = images.permute(0, 2, 3, 1).contiguous()
    call = _native.Call.of(x.shape, output.shape, w.numel(), geometry, encode_scalars())
    host = _native.host(Family("float32", "float32", "float32", scaled=False))
    operands = (x.data_ptr(), w.data_ptr(), 0, 0, 0, output.data_ptr())
    sentence = (
        r"winograd takes 2 x 2 or 3 x 3 taps, stride 1 and dilation 1 along h and w; here .*"
        + words
    )
    with pytest.raises(ValueError, match=sentence):
        host.prepare(call).run(*operands, 1, 0)


OUTSIDE = """
import ctypes, mmap, sys
import torch
from tests.interop.test_winograd import convolve, check
PAGE = mmap.PAGESIZE

def guarded(tensor, at_end):
    '''The tensor between two pages that nobody may read, next to one of them.'''
    size = tensor.numel() * tensor.element_size()
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for page in (start, start + (pages + 1) * PAGE):
        assert libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0) == 0
    offset = PAGE + (pages * PAGE - size if at_end else 0)
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    return copy.reshape(tensor.shape).copy_(tensor)

for channels, filters in ((3, 16), (8, 32), (13, 16), (64, 16)):
    for pads in ((0, 0, 0, 0), (1, 1, 1, 1), (0, 1, 2, 0)):
        for at_end, taps in ((False, 2), (False, 3), (True, 2), (True, 3)):
            x = guarded(torch.randn(2, 5, 6, channels), at_end)
            w = guarded(torch.randn(filters, taps, taps, channels), at_end)
            check(convolve(x, w, pads), x, w, pads)
print("nothing was read")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is protected with mprotect")
def test_nothing_outside_the_operands_is_read() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", OUTSIDE], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert ended.stdout == "nothing was read\n", f"{ended.returncode}\n{ended.stderr}"
