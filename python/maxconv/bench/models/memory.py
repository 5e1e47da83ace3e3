"""The memory that a model takes, in a process that does other things before and after.

A model holds some between calls: its weights, packed filters, compiled code, the pool of a captured
graph. A call takes some besides: activations, buffers, the output.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from ..cpu.memory import status, trim

__all__ = ["CudaGauge", "Gauge", "HostGauge", "NoGauge", "gauge"]


class Gauge(Protocol):
    """Measures memory in bytes, where the system tells."""

    def held(self) -> int | None:
        """Returns what this process holds now that nothing runs."""

    def peak(self, call: Callable[[], object]) -> int | None:
        """Makes a call; returns the most that it takes beyond what was held before."""


class HostGauge:
    """The memory of a process on Linux.

    What is held is what malloc has handed out. Resident memory would not do: what a compiler frees
    stays resident in pieces, and serves what comes later. It is taken where malloc is another
    library's, which the C library knows nothing of.
    """

    def __init__(self) -> None:
        before = _handed_out()
        probe = bytearray(_PROBE)
        self._counts = _handed_out() - before >= len(probe)

    def held(self) -> int:
        """See ``Gauge``."""
        gc.collect()
        return _handed_out() if self._counts else _resident()

    def peak(self, call: Callable[[], object]) -> int:
        """See ``Gauge``."""
        before = _resident()
        Path("/proc/self/clear_refs").write_text("5")
        call()
        return max(0, status("VmHWM") - before)


#: Bytes that an allocation must show with in what malloc counts.
_PROBE = 1 << 20


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _handed_out() -> int:
    """Returns the bytes that glibc's malloc has handed out, mapped ones included; 0 elsewhere."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is None:
        return 0
    function.restype = _MallInfo
    info = function()
    return int(info.uordblks + info.hblkhd)


def _resident() -> int:
    """Returns the bytes of resident memory, once malloc has given back what it can."""
    gc.collect()
    trim()
    return status("VmRSS")


class CudaGauge:
    """The memory that PyTorch's allocator has of a GPU.

    What is held is counted by the segments that the allocator keeps when it has emptied its cache:
    those of a captured graph are no live tensors. CUDA's own memory, such as loaded kernels, is not
    in it.
    """

    def held(self) -> int:
        """See ``Gauge``."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def peak(self, call: Callable[[], object]) -> int:
        """See ``Gauge``."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


class NoGauge:
    """A system that does not tell."""

    def held(self) -> None:
        """Returns nothing."""

    def peak(self, call: Callable[[], object]) -> None:
        """Makes the call; returns nothing."""
        call()


def gauge(place: str) -> Gauge:
    """Returns the gauge of ``cpu`` or ``cuda``."""
    if place == "cuda":
        return CudaGauge()
    return HostGauge() if Path("/proc/self/clear_refs").exists() else NoGauge()
