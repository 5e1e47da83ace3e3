"""PyTorch's own threads, for the kernels: two pools on the same cores would fight for them.

PyTorch splits its operators' work by an OpenMP runtime, whose threads spin for a while after each.
The kernels split theirs by the same runtime, through the one function that all of them have:
``GOMP_parallel`` of GCC's interface, which LLVM's and Intel's runtimes implement too.
"""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

__all__ = ["parallel_function", "threads"]

_RUNTIMES = re.compile(r"lib(gomp|omp|iomp5)\b[^/]*\.(so|dylib)[^/]*$")


@functools.cache
def parallel_function() -> int:
    """Returns the address of ``GOMP_parallel`` of PyTorch's runtime, or 0: PyTorch has none."""
    openmp: Any = torch.backends.openmp
    if not openmp.is_available():
        return 0
    for path in _loaded_runtimes():
        try:
            function = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


def threads() -> int:
    """Returns how many threads a call may use: 1 if PyTorch has no OpenMP."""
    return torch.get_num_threads() if parallel_function() else 1


def _loaded_runtimes() -> Iterator[str]:
    """Yields the OpenMP runtimes that the process may have loaded, PyTorch's first."""
    folder = Path(torch.__file__).parent / "lib"
    files = [path for path in folder.iterdir() if _RUNTIMES.search(path.name)]
    if sys.platform == "linux":
        maps = Path("/proc/self/maps").read_text(errors="replace").splitlines()
        loaded = dict.fromkeys(line.split(maxsplit=5)[-1] for line in maps if "/" in line)
        own = {str(path) for path in files}
        yield from sorted(
            (path for path in loaded if _RUNTIMES.search(path)), key=lambda path: path not in own
        )
    else:
        yield from map(str, files)
