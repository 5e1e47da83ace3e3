"""The GPUs that the kernels are compiled for and asked about, whether or not they are here."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BLACKWELL", "HOPPER", "TARGETS", "Target", "architecture_of"]


@dataclass(frozen=True)
class Target:
    """An NVIDIA GPU, as far as the choice of a kernel looks at it."""

    architecture: str
    """What compilers call it: ``sm_90a``."""
    product: str
    """One that has it; the number of multiprocessors is this one's."""
    capability: int
    """Its compute capability, times ten."""
    multiprocessors: int


#: By architecture.
TARGETS = {
    target.architecture: target
    for target in (
        Target("sm_80", "A100", 80, 108),
        Target("sm_86", "RTX A6000", 86, 84),
        Target("sm_89", "L40S", 89, 142),
        Target("sm_90a", "H100 SXM, H200", 90, 132),
        Target("sm_100a", "B200", 100, 148),
        Target("sm_120a", "RTX PRO 6000", 120, 188),
    )
}

#: The architecture that the Hopper kernels run on.
HOPPER = "sm_90a"

#: The architecture that the Blackwell kernel runs on.
BLACKWELL = "sm_100a"


def architecture_of(capability: int) -> str:
    """Returns what compilers call the GPUs of a compute capability.

    From 9.0 on, with the instructions that only this very generation has (PTX ISA, "Directives",
    ``.target``, suffix ``a``).

    Args:
        capability: Times ten.
    """
    return f"sm_{capability}{'a' if capability >= 90 else ''}"
