"""``prepare``: builds what the first calls would build."""

from __future__ import annotations

import torch

from .._build import build_gpu
from .._checks import check_device
from .._library_files import Family
from .._native import host
from ._dtypes import DTYPES, NAMES, listed
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
        dtype: ``torch.float32``, ``torch.bfloat16`` or ``torch.float16``.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.

    Raises:
        ValueError: Another ``rank`` or ``device``, or PyTorch finds no such GPU.
        TypeError: Another ``dtype``.
        maxconv.LibraryError: The kernels cannot be compiled.
    """
    if rank not in (1, 2, 3):
        raise ValueError(f"rank: {rank} is not a spatial rank; 1, 2 or 3 is allowed")
    if dtype not in DTYPES:
        raise TypeError(f"dtype: {dtype} is not supported; {listed()} are allowed")
    place = torch.device(device)
    check_device("device", place, ("cpu", "cuda"))
    family = Family(NAMES[dtype], NAMES[dtype], NAMES[dtype], scaled=False)
    if place.type == "cpu":
        host(family)
    else:
        target = gpu_target(place.index or 0)
        for _ in build_gpu(family, target.architecture, target.capability):
            pass
