"""OpenMP runtimes, whose threads the CPU kernels run on outside MAX."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Iterator

__all__ = ["installed_parallel", "installed_runtimes", "parallel_of"]


def installed_runtimes() -> Iterator[str]:
    """Yields the OpenMP runtimes that this machine has."""
    for name in ("gomp", "omp", "iomp5"):
        path = ctypes.util.find_library(name)
        if path is not None:
            yield path


def parallel_of(path: str) -> int:
    """Returns the address of a runtime's ``GOMP_parallel``, or 0: it cannot be loaded."""
    try:
        function = ctypes.CDLL(path).GOMP_parallel
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def installed_parallel() -> int:
    """Returns the address of ``GOMP_parallel`` of a runtime that is installed.

    Raises:
        ValueError: There is none.
    """
    for path in installed_runtimes():
        if address := parallel_of(path):
            return address
    raise ValueError(
        "units: several threads need an OpenMP runtime, and this machine has none; install libgomp "
        "or libomp, or use 1"
    )
