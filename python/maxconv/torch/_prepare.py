"""``prepare``: builds what the first calls would build."""

from __future__ import annotations

import torch

from .._build import build_gpu
from .._checks import check_device
from .._dtypes import INTEGERS
from .._library_files import Family
from .._native import host
from ._dtypes import CPU_DTYPES, DTYPES, NAMES, listed
from ._plan import gpu_target

__all__ = ["prepare"]


def prepare(
    rank: int = 2, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> None:
    """Builds now the libraries that the first calls would build; see ``maxconv build`` for more.

    On a CPU that is one library, half a minute on two cores. On a GPU there is one for each kernel,
    and a first call builds only those that it needs; this builds all that convolutions of ``dtype``
    may run on, which takes minutes. What is in the cache is loaded.

    Args:
        rank: Spatial dimensions: 1, 2 or 3, which share their libraries.
        dtype: ``torch.float32``, ``torch.bfloat16`` or ``torch.float16``; on a CPU also
            ``torch.int8`` and ``torch.uint8``: what ``quantize`` makes, whose convolutions give
            integers or float32.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.

    Raises:
        ValueError: Another ``rank`` or ``device``, or PyTorch finds no such GPU.
        TypeError: Another ``dtype``.
        maxconv.LibraryError: The kernels cannot be compiled.
    """
    if rank not in (1, 2, 3):
        raise ValueError(f"rank: {rank} is not a spatial rank; 1, 2 or 3 is allowed")
    place = torch.device(device)
    check_device("device", place, ("cpu", "cuda"))
    allowed = CPU_DTYPES if place.type == "cpu" else DTYPES
    if dtype not in allowed:
        raise TypeError(f"dtype: {dtype} is not supported; {listed(allowed)} are allowed")
    name = NAMES[dtype]
    family = Family(name, name, name, scaled=False)
    if name in INTEGERS:
        for output in (name, "float32"):
            host(Family(name, "float32", output, scaled=True))
    elif place.type == "cpu":
        host(family)
    else:
        target = gpu_target(place.index or 0)
        for _ in build_gpu(family, target.architecture, target.capability):
            pass
