"""PyTorch's own threads, for the kernels: two pools on the same cores would fight for them.

PyTorch splits its operators' work by an OpenMP runtime, whose threads spin for a while after each.
The kernels split theirs by the same runtime, through the one function that all of them have:
``GOMP_parallel`` of GCC's interface, which LLVM's and Intel's runtimes implement too.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .._openmp import installed_runtimes, parallel_of

__all__ = ["parallel_function", "threads"]

_RUNTIMES = re.compile(r"lib(gomp|omp|iomp5)\b[^/]*\.(so|dylib)[^/]*$")


@functools.cache
def parallel_function() -> int:
    """Returns the address of ``GOMP_parallel``, or 0: this machine has no OpenMP.

    It is that of PyTorch's runtime. A PyTorch that was built without OpenMP has a pool whose
    threads sleep, so that any runtime will do.
    """
    openmp: Any = torch.backends.openmp
    for path in _loaded_runtimes() if openmp.is_available() else installed_runtimes():
        if address := parallel_of(path):
            return address
    return 0


def threads() -> int:
    """Returns how many threads a call may use: 1 on a machine without OpenMP."""
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
