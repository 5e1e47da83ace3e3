"""The library of a GPU's kernel is built, and says what is wrong, on a machine without a GPU."""

from __future__ import annotations

import ctypes

import pytest

from maxconv import _native
from maxconv._fields import Kernel
from maxconv._library_files import Family, beside_file, kernel_file
from maxconv.activations import NAMES

FAMILY = Family("bfloat16", "float32", "float32", scaled=True)


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize(
    ("kernel", "architecture"),
    [(Kernel.DEPTHWISE, "sm_80"), (Kernel.DIAGONAL, "sm_90a"), (Kernel.SM100, "sm_100a")],
)
def test_a_kernel_is_built_without_a_gpu(kernel: Kernel, architecture: str) -> None:
    family = FAMILY if kernel is not Kernel.DIAGONAL else FAMILY._replace(output="bfloat16")
    library = _native.GpuKernel(kernel_file(kernel, family, architecture))
    with pytest.raises(ValueError, match=r"CUDA|cuda|device"):
        library.made(library.function("open", 2), 0)
    assert library.function("run", 8).restype is ctypes.c_void_p


@pytest.mark.slow
@pytest.mark.extended
def test_group_normalization_is_built_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    library = _native.GroupNorm(beside_file("group_norm", "bfloat16", "sm_90a"))
    with pytest.raises(ValueError, match=r"CUDA|cuda|device"):
        library.device(0)
    monkeypatch.setattr(library, "device", lambda index: 0)

    def run(images: int, groups: int, epsilon: float = 0.5, bias: int = 0) -> None:
        activation = NAMES["relu6"]
        library.run(0, 16, 0, bias, 32, 48, images, 7, 8, groups, epsilon, activation, 0, wide=True)

    for refused, message in (
        (lambda: run(0, 4), "input: 0 images of 7 pixels; at least one of each is needed"),
        (lambda: run(6, 3), "groups: 3 does not divide the 8 channels"),
        (lambda: run(6, 4, epsilon=-1.5), "epsilon: -1.5 is not allowed; 0 and above"),
        (lambda: run(6, 4, bias=64), "weight, bias: one is missing; both or none"),
        (lambda: library.workspace(0, 16, 32, 6, 7, 8, 3), "groups: 3 does not divide the 8"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            refused()
