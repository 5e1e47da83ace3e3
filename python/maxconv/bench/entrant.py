"""A contender as it enters a problem's measurement: what to time, and how to read what it computed.

A network runs many convolutions in one call, so a contender's call runs several of the problem: see
``convolutions`` in ``workload``. The same contender may also run one convolution a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from .workload import Float32

__all__ = ["Entrant", "Run"]


class Run(Protocol):
    """Some convolutions of one problem, in one call."""

    def __call__(self) -> Sequence[object]:
        """Convolves; returns the outputs, in the contender's own form and one a convolution."""

    def outputs(self) -> list[Float32]:
        """Convolves; returns the outputs as ``[N, *spatial, K]`` in float32."""


@dataclass(frozen=True)
class Entrant:
    """What a contender is timed with."""

    call: Run
    """As many convolutions as the problem's calls have."""
    single: Run | None = None
    """One convolution, where ``call`` has several and this is timed too."""
    fused: bool = False
    """Whether bias, ReLU and the residual are computed as well."""

    def runs(self) -> Iterator[tuple[Run, bool]]:
        """Yields what is timed, and whether it is ``single``."""
        yield self.call, False
        if self.single is not None:
            yield self.single, True
