"""The shared library behind PyTorch's ops on the CPU: how it is built, loaded and called."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.interop.torch_tensors import check, draw, last
from torch import nn

import maxconv.torch as mt
from maxconv import _library, _library_files, _native
from maxconv._fields import Layout, encode_geometry, encode_scalars
from maxconv.torch._threads import parallel_function, threads

pytestmark = pytest.mark.torch

FAMILY = _library_files.Family("float32", "float32", "float32", scaled=False)


def test_a_call_starts_nothing_of_max() -> None:
    program = (
        "import sys, torch, maxconv.torch as mt\n"
        "x, w = torch.ones(1, 4, 5, 5), torch.ones(3, 4, 3, 3)\n"
        "mt.convert(torch.nn.Conv2d(4, 3, 3).eval())[0](x)\n"
        "print(mt.conv2d(x, w).unique().tolist(), 'max' in sys.modules)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert ended.stdout == "[36.0] False\n", ended.stderr


def test_the_library_cannot_start_threads_of_max() -> None:
    """A call that packs its filter started and ended some each time, 0.4 ms."""
    binary = Path(_native.host(FAMILY)._functions._name).read_bytes()
    assert b"maxconv_run" in binary
    assert b"AsyncRT_DeviceContext_create" not in binary


def test_a_sentence_crosses_the_boundary() -> None:
    library = _native.host(FAMILY)

    def prepare(groups: int, filter_elements: int) -> None:
        geometry = encode_geometry(
            stride=(1, 1),
            dilation=(1, 1),
            pad_before=(0, 0),
            pad_after=(0, 0),
            filter_size=(1, 1),
            groups=groups,
            filter_layout=Layout.KRSC,
        )
        shapes = ((1, 5, 5, 4), (1, 5, 5, 3))
        library.prepare(_native.Call.of(*shapes, filter_elements, geometry, encode_scalars()))

    prepare(1, 12)
    for _ in range(3):
        with pytest.raises(ValueError, match=r"^input: 4 channels .*3"):
            prepare(3, 12)
        with pytest.raises(ValueError, match=r"^filter: 11 elements.*12"):
            prepare(1, 11)


def test_the_threads_are_pytorchs() -> None:
    assert parallel_function()
    x, w = last(draw(2, 32, 40, 40)), draw(64, 32, 3, 3)
    before = torch.get_num_threads()
    outputs = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            outputs.append(mt.conv2d(x, w, padding=1))
    finally:
        torch.set_num_threads(before)
    check(2, outputs[0], x, w, None, 1, 1)
    for output in outputs[1:]:
        check(2, output, x, w, None, 1, 1)


def test_a_pytorch_without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any runtime of the machine's will do, and one thread if there is none."""
    x, w = last(draw(2, 32, 40, 40)), draw(64, 32, 3, 3)
    monkeypatch.setattr(torch.backends.openmp, "is_available", lambda: False)
    for installed in ("libgomp.so.1", "libno-such-runtime.so", None):
        monkeypatch.setattr("ctypes.util.find_library", lambda _, found=installed: found)
        parallel_function.cache_clear()
        try:
            assert bool(parallel_function()) == (installed == "libgomp.so.1")
            assert threads() == (torch.get_num_threads() if parallel_function() else 1)
            check(2, mt.conv2d(x, w, padding=1), x, w, None, 1, 1)
        finally:
            parallel_function.cache_clear()


def test_every_kernel_runs_on_several_threads() -> None:
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
        "implicit_gemm": ((2, 32, 40, 40), (48, 32, 5, 5), 1),
        "winograd": ((2, 32, 40, 40), (48, 32, 3, 3), 1),
        "pointwise": ((2, 64, 40, 40), (96, 64, 1, 1), 1),
        "depthwise": ((2, 64, 60, 60), (64, 1, 3, 3), 64),
        "grouped": ((2, 64, 40, 40), (64, 4, 3, 3), 16),
        "few_filters": ((2, 64, 60, 60), (3, 64, 3, 3), 1),
    }
    for shape, weight, groups in shapes.values():
        x, w = last(draw(*shape, seed=1)), draw(*weight, seed=2)
        for _ in range(3):
            mt.conv2d(x, w, groups=groups).fill_(float("nan"))
            check(2, mt.conv2d(x, w, None, 1, 0, 1, groups), x, w, None, 1, 0, 1, groups)


def test_a_full_cache_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    built = _library_files.host_file(FAMILY)
    monkeypatch.setattr(_library, "run_mojo", lambda *_: pytest.fail("Mojo ran"))
    assert _library_files.host_file(FAMILY) == built
    before = built.stat().st_mode
    built.chmod(0o500)
    built.parent.chmod(0o500)
    try:
        monkeypatch.setattr(_native, "_libraries", {})
        _native.host(FAMILY)
    finally:
        built.parent.chmod(0o700)
        built.chmod(before)


def test_families_and_sources_have_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[str]] = []

    def run_mojo(*arguments: str) -> subprocess.CompletedProcess[str]:
        made.append(list(arguments))
        Path(arguments[-1]).write_bytes(b"library")
        return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setenv("MAXCONV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(_library, "run_mojo", run_mojo)
    families = [FAMILY, FAMILY._replace(bias="bfloat16"), FAMILY._replace(scaled=True)]
    files = {_library_files.host_file(family) for family in families * 2}
    assert len(files) == len(made) == 3
    assert made[1][made[1].index("bias=bfloat16") - 1 :][:2] == ["-D", "bias=bfloat16"]
    source = tmp_path / "library"
    source.mkdir()
    (source / "host.mojo").write_text("# another one\n")
    monkeypatch.setattr(_library_files, "SOURCE", source)
    assert _library_files.host_file(FAMILY) not in files


def test_a_library_that_cannot_be_built_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAXCONV_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "library"
    source.mkdir()
    (source / "host.mojo").write_text("def main():\n    no_such_function()\n")
    monkeypatch.setattr(_library_files, "SOURCE", source)
    with pytest.raises(_library.LibraryError, match="no_such_function"):
        _library_files.host_file(FAMILY)
    assert not list((tmp_path / "cache").rglob("*.so"))


def _convolved(pair: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]) -> float:
    torch.set_num_threads(1)
    x, w = map(torch.from_numpy, pair)
    return float(mt.conv2d(x, w, padding=1).double().sum())


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
def test_workers_that_were_forked() -> None:
    """What PyTorch's DataLoader does: a worker has one thread, and memory of its parent's."""
    x, w = draw(2, 32, 40, 40).numpy(), draw(16, 32, 3, 3).numpy()
    expected = float(mt.conv2d(torch.from_numpy(x), torch.from_numpy(w), padding=1).double().sum())
    with multiprocessing.get_context("fork").Pool(2) as pool:
        answers = pool.map_async(_convolved, [(x, w)] * 4).get(timeout=60)
    assert answers == pytest.approx([expected] * 4, abs=1e-2)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says how much memory a process has")
def test_memory_does_not_grow() -> None:
    weight = draw(8, 4, 3, 3)
    inputs = [draw(1, 4, 5 + i % 20, 6 + i // 20) for i in range(200)]

    def call(x: torch.Tensor) -> torch.Tensor:
        return mt.conv2d(x, weight)

    expected = [call(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, inputs))
        before = _resident()
        for _ in range(5):
            for output, right in zip(pool.map(call, inputs), expected, strict=True):
                assert torch.equal(output, right)
        assert _resident() - before < 8 << 20


@pytest.mark.parametrize("bits", [16, 32])
def test_matrices_are_transposed(bits: int) -> None:
    """Every path: whole lines, vectors, single elements, few rows, few columns, several tasks."""
    kind = {16: torch.int16, 32: torch.int32}[bits]
    library = _native.host(FAMILY)
    sizes = [1, *range(2, 10), 16, 31, 33, 48, 129]
    shapes = [(2, rows, columns) for rows in sizes for columns in sizes]
    shapes += [(3, 5, 9001), (2, 9001, 3), (1, 300, 517), (1, 1031, 130), (70, 33, 40)]
    for batch, rows, columns in shapes:
        elements = batch * rows * columns
        # Coordinates that 16 bits tell apart, but for repetitions 65,521 apart, a prime.
        source = (torch.arange(elements) % 65521).to(kind)
        target = torch.full((elements + 64,), -7, dtype=kind)
        addresses = source.data_ptr(), target[32:].data_ptr()
        library.transpose(
            *addresses, batch, rows, columns, bits // 8, threads(), parallel_function()
        )
        expected = source.view(batch, rows, columns).transpose(1, 2).reshape(-1)
        assert torch.equal(target[32:-32], expected), (batch, rows, columns)
        assert (target[:32] == -7).all(), (batch, rows, columns)
        assert (target[-32:] == -7).all(), (batch, rows, columns)
    with pytest.raises(ValueError, match=r"^bytes: 8 an element; 2 or 4 are allowed$"):
        library.transpose(*addresses, 1, 1, 1, 8, 1, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contiguous_images_are_converted_by_the_library(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Input, residual and output; the converted model's norm gets a contiguous tensor likewise."""
    calls: list[tuple[int, ...]] = []
    transpose = _native.Host.transpose

    def watched(self: _native.Host, *arguments: int) -> None:
        calls.append(arguments[2:6])
        transpose(self, *arguments)

    monkeypatch.setattr(_native.Host, "transpose", watched)
    x, w = draw(2, 24, 9, 11).to(dtype), draw(40, 24, 3, 3).to(dtype)
    residual = draw(2, 40, 9, 11).to(dtype)
    output = mt.conv2d(x, w, padding=1, residual=residual)
    size = dtype.itemsize
    assert calls == [(2, 24, 99, size), (2, 40, 99, size), (2, 99, 40, size)]
    assert output.is_contiguous()
    same = mt.conv2d(last(x), last(w), padding=1, residual=last(residual))
    assert torch.equal(output, same)
    calls.clear()
    model = nn.Sequential(nn.Conv1d(24, 32, 3), nn.GroupNorm(1, 32)).to(dtype).eval()
    converted, _ = mt.convert(model)
    line = draw(2, 24, 50).to(dtype)
    with torch.no_grad():
        norm: list[torch.Tensor] = []
        converted.get_submodule("1").register_forward_pre_hook(lambda _, given: norm.extend(given))
        torch.testing.assert_close(converted(line), model(line), rtol=0.05, atol=0.05)
    assert norm[0].is_contiguous()
    assert calls == [(2, 24, 50, size), (2, 48, 32, size)]


def test_other_strides_are_pytorchs_to_convert() -> None:
    x, w = draw(2, 9, 11, 24).transpose(1, 3), draw(40, 24, 3, 3)
    assert not x.is_contiguous()
    check(2, mt.conv2d(x[:, :, ::2], w), x[:, :, ::2], w, None, 1, 0)
