"""The memory that a model takes, in a process that does other things before and after.

A model holds some between calls: its weights, packed filters, compiled code, the pool of a captured
graph. A call takes some besides: activations, buffers, the output.
"""

from __future__ import annotations

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
    """Resident memory, as Linux counts it."""

    def held(self) -> int:
        """See ``Gauge``. Freed memory goes back to the system first, as far as malloc can."""
        gc.collect()
        trim()
        return status("VmRSS")

    def peak(self, call: Callable[[], object]) -> int:
        """See ``Gauge``."""
        before = self.held()
        Path("/proc/self/clear_refs").write_text("5")
        call()
        return max(0, status("VmHWM") - before)


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
