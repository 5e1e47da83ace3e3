"""The library of a GPU's kernel is built, and says what is wrong, on a machine without a GPU."""

from __future__ import annotations

import ctypes

import pytest

from maxconv import _native
from maxconv._fields import Kernel
from maxconv._library_files import Family, kernel_file

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
