"""The library of a GPU's kernel is built, and says what is wrong, on a machine without a GPU."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from maxconv import _native
from maxconv._fields import GPU_KERNELS, Kernel
from maxconv._library_files import SOURCE, Family, beside_file, kernel_file
from maxconv.activations import NAMES

FAMILY = Family("bfloat16", "float32", "float32", scaled=True)


def test_every_kernel_has_a_module() -> None:
    """Which names the type that the registry has: what is built for a call is what was chosen."""
    modules = {file.parent.name: file for file in SOURCE.glob("kernels/*/kernel.mojo")}
    assert set(modules) == {kernel.name.lower() for kernel in GPU_KERNELS}
    registry = (SOURCE.parent / "operations" / "nvidia" / "registry.mojo").read_text()
    imported = re.findall(r"^from \.(\S+) import (.+)$", registry, re.MULTILINE)
    types = {
        f"operations.nvidia.{module}.{name.split(' as ')[0]}"
        for module, names in imported
        if module.endswith("launch")
        for name in names.split(", ")
    }
    named = [_imported(file) for file in modules.values()]
    assert len(named) == len(types) and set(named) == types


def _imported(file: Path) -> str:
    """What a module calls ``Kernel``."""
    found = re.search(r"^from (\S+) import \(?\s*(\w+) as Kernel\b", file.read_text(), re.MULTILINE)
    assert found
    return ".".join(found.groups())


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
