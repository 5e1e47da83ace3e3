"""What of a GPU's kernels a convolution may need: an op is compiled with that alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._dtypes import BLACKWELL_BYTES, DTYPE_BYTES, FLOAT8, HALF_DTYPES, INPUT_BYTES
from ._fields import (
    COPY_BYTES,
    DIAGONAL_CHANNELS,
    DIAGONAL_TAPS,
    STEM_CHANNELS,
    TILE_FILTERS,
    Kernel,
    Precision,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .problem import ConvProblem

__all__ = ["gpu_kernels", "known_filter"]


def gpu_kernels(
    problem: ConvProblem,
    kernel: Kernel = Kernel.AUTO,
    *,
    dtype: str,
    out_dtype: str,
    precision: Precision = Precision.TF32,
) -> tuple[Kernel, ...]:
    """Returns the kernels that a problem may need on a GPU, whatever its symbolic sizes are.

    Every work that is fused behind an op compiles its kernels anew, so what cannot be chosen is
    left out: what ``operations/gpu/config.mojo`` would refuse.

    Args:
        problem: The convolution.
        kernel: What was asked for.
        dtype: Of activation and filter.
        out_dtype: Of the output.
        precision: Of the products of float32.
    """
    if kernel is not Kernel.AUTO:
        return (kernel,)
    if dtype in BLACKWELL_BYTES:
        return (Kernel.SM100,)
    channels, filters = _per_group(problem.channels, problem), _per_group(problem.filters, problem)
    dense = problem.groups == 1
    exact = dtype == "float32" and precision is Precision.FLOAT32
    # What the stem's kernel takes, and the diagonal one.
    half = dtype in HALF_DTYPES and out_dtype in HALF_DTYPES
    diagonal = (
        half
        and (channels is None or channels <= DIAGONAL_CHANNELS)
        and (None in (channels, filters) or channels == filters)
        and problem.filter_size[-1] in DIAGONAL_TAPS
    )
    tiled = (
        not exact
        and _copied(channels, INPUT_BYTES[dtype])
        and _copied(filters, DTYPE_BYTES[out_dtype])
    )
    wanted = {
        Kernel.STEM: dense and half and (channels is None or channels <= STEM_CHANNELS),
        Kernel.DEPTHWISE: dtype != FLOAT8 and channels in (None, 1),
        Kernel.SM90: tiled,
        Kernel.SM100: tiled,
        Kernel.GROUPED: not dense and (filters is None or filters < TILE_FILTERS or diagonal),
        Kernel.IMPLICIT_GEMM: dense or filters is None or filters >= TILE_FILTERS,
    }
    return tuple(kernel for kernel, needed in wanted.items() if needed)


def known_filter(problem: ConvProblem, kernels: Iterable[Kernel]) -> dict[str, int]:
    """Returns what is known of a filter, as the op's parameters: ``KnownFilter`` of the kernels.

    What is not known until the call is left out, and so is everything where none of the kernels has
    configurations for filters of one size: ops that differ in it alone share what they compile.

    Args:
        problem: The convolution.
        kernels: Those that ``gpu_kernels`` returned.
    """
    if not {Kernel.DEPTHWISE, Kernel.GROUPED} & set(kernels):
        return {}
    channels = _per_group(problem.channels, problem)
    known = {"taps": problem.filter_size[-1], "stride": problem.stride[-1]}
    return known if channels is None else known | {"group_channels": channels}


def _per_group(count: object, problem: ConvProblem) -> int | None:
    """Returns how many channels or filters a group has, ``None`` where that is not known."""
    return count // problem.groups if isinstance(count, int) else None


def _copied(elements: int | None, size: int) -> bool:
    """Whether the copy engine may take pixels of a group's elements."""
    return elements is None or elements * size % COPY_BYTES == 0
