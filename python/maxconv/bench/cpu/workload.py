"""The data that a problem is timed on: random, and the same for every contender and every run."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from maxconv._packing import Array, bfloat16_to_float32, cast_array, float32_to_bfloat16
from maxconv._problem import ConvProblem
from maxconv._problems import NamedProblem

from ..entrant import Float32

if TYPE_CHECKING:
    from max.driver import Buffer

__all__ = [
    "SEVERAL",
    "SMALL_FLOPS",
    "SMALL_NBYTES",
    "Workload",
    "aligned",
    "convolutions",
    "to_buffer",
    "to_float32",
]

#: Convolutions of a call where they are small, ...
SEVERAL = 8

#: ... which takes fewer floating-point operations than this, ...
SMALL_FLOPS = 500_000_000

#: ... and fewer bytes of activation, filter and output in float32.
SMALL_NBYTES = 16 << 20

_ALIGNMENT = 64


def convolutions(problem: ConvProblem) -> int:
    """Returns how many convolutions of a problem each contender's call runs.

    A call has a cost of its own, which a network shares among its convolutions: beside a small
    convolution it would be a large part of what is timed, beside a large one it is none.
    Depends on the problem alone: not on dtype, machine or contender.
    """
    small = problem.flops < SMALL_FLOPS and problem.nbytes() < SMALL_NBYTES
    return SEVERAL if small else 1


@dataclass(frozen=True)
class Workload:
    """Operands of a problem in float32, each element a value of the storage type.

    ``x`` is ``[N, *spatial, C]``, ``filter`` ``[K, *taps, C / groups]``, ``bias`` ``[K]`` and
    ``residual`` ``[N, *output, K]``.
    """

    named: NamedProblem
    dtype: str
    x: Float32
    filter: Float32
    bias: Float32
    residual: Float32

    @classmethod
    def make(cls, named: NamedProblem, dtype: str) -> Workload:
        """Makes the operands; they depend on the problem's name and nothing else.

        The filter is scaled so that outputs have about the variance of the input.
        """
        problem = named.problem
        rng = np.random.default_rng(zlib.crc32(named.name.encode()))
        own = (problem.filters, *problem.filter_size, problem.group_channels)
        taps = _normal(rng, own)
        taps *= np.float32(np.prod(taps.shape[1:], dtype=np.int64) ** -0.5)
        x, bias, residual = (
            _normal(rng, shape)
            for shape in (problem.input_shape, (problem.filters,), problem.output_shape)
        )
        return cls(named, dtype, *(_rounded(values, dtype) for values in (x, taps, bias, residual)))

    @property
    def convolutions(self) -> int:
        """Convolutions of a contender's call."""
        return convolutions(self.named.problem)

    @property
    def torch_filter(self) -> Float32:
        """The filter as ``[K, C / groups, *taps]``, a view."""
        return np.moveaxis(self.filter, -1, 1)

    @property
    def max_filter(self) -> Float32:
        """The filter as ``[*taps, C / groups, K]``, in this order in memory."""
        return np.ascontiguousarray(np.moveaxis(self.filter, 0, -1))


def _normal(rng: np.random.Generator, shape: Sequence[object]) -> Float32:
    return rng.standard_normal(cast("tuple[int, ...]", tuple(shape)), dtype=np.float32)


def _rounded(values: Float32, dtype: str) -> Float32:
    if dtype == "bfloat16":
        return bfloat16_to_float32(float32_to_bfloat16(values))
    return cast_array(values, "float32", dtype).astype(np.float32)


def aligned(values: Array) -> Array:
    """Returns a copy that begins at a multiple of 64 bytes, as in MAX's and torch's own memory."""
    memory = np.empty(values.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copy = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def to_buffer(values: Float32, dtype: str) -> Buffer:
    """Returns MAX's buffer with these values in a storage type."""
    from max.driver import Buffer
    from max.dtype import DType

    buffer = Buffer.from_numpy(aligned(cast_array(values, "float32", dtype)))
    return buffer.view(DType.bfloat16) if dtype == "bfloat16" else buffer


def to_float32(buffer: Buffer) -> Float32:
    """Returns the values of MAX's buffer."""
    from max.dtype import DType

    if buffer.dtype == DType.bfloat16:
        return bfloat16_to_float32(buffer.view(DType.uint16).to_numpy())
    return np.asarray(buffer.to_numpy(), dtype=np.float32)
