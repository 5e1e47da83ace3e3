"""Operands whose convolution is known exactly, and the convolution.

Activations and filters are small integers: every product and partial sum is an integer that
float32 holds, so that no order of the additions rounds, and a kernel is right if every output is
the exact sum, rounded once. Outputs of 8 bits are sums times a power of two.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._dtypes import CARRIERS, INTEGERS, filter_dtype
from ..._packing import float32_to_bfloat16, pack_filter
from ..._problem import ConvProblem

__all__ = ["LARGEST", "Operands", "operands"]

#: The largest magnitude of an operand.
LARGEST = 3

_EXACT = 1 << 24
"""Up to which float32 holds every integer."""


class Operands:
    """The operands of a problem and its output, as bits.

    Args:
        problem: The convolution; all sizes known.
        dtype: Of activation and filter.
        out_dtype: Of the output.
        seed: Of the values.

    Raises:
        ValueError: Sums may be too large to be exact.
    """

    def __init__(self, problem: ConvProblem, dtype: str, out_dtype: str, seed: int) -> None:
        if problem.gemm.k * LARGEST**2 >= _EXACT:
            raise ValueError(
                f"problem: sums of {problem.gemm.k} products may be no exact float32; up to "
                f"{(_EXACT - 1) // LARGEST**2} are"
            )
        rng = np.random.default_rng(seed)
        shape = tuple(map(int, problem.input_shape))
        taps, channels = problem.filter_size, int(problem.group_channels)
        # Unsigned activations are not negative.
        least = max(-LARGEST, INTEGERS[dtype][0]) if dtype in INTEGERS else -LARGEST
        x = rng.integers(least, LARGEST + 1, shape).astype(np.float32)
        krsc = rng.integers(-LARGEST, LARGEST + 1, (int(problem.filters), *taps, channels))
        krsc = krsc.astype(np.float32)
        self.activation = _aligned(_stored(x, dtype))
        layout = {1: "KSC", 2: "KRSC", 3: "KTRSC"}[problem.spatial_rank]
        of_filter = filter_dtype(dtype)
        given = krsc.astype(np.int8) if of_filter in INTEGERS else krsc
        packed = pack_filter(given, layout, groups=problem.groups, dtype=of_filter)
        self.filter = _aligned(packed.data)
        sums = convolved(problem, x, krsc)
        self.output_factor = _factor(sums, out_dtype)
        """What sums are multiplied by, where outputs have 8 bits."""
        self.expected = _stored(sums * self.output_factor, out_dtype)
        self.output = _aligned(np.zeros_like(self.expected))

    def addresses(self, threads: int, parallel: int) -> tuple[int, ...]:
        """Returns what ``Prepared.run`` of a CPU takes, without what is not there.

        Args:
            threads: How many may run.
            parallel: The address of ``GOMP_parallel``.
        """
        inputs = (self.activation.ctypes.data, self.filter.ctypes.data, 0, 0, 0)
        return (*inputs, self.output.ctypes.data, threads, parallel)

    def poison(self) -> None:
        """Fills the output with what is wrong: a NaN of each type of floats, other integers."""
        self.output.view(np.uint8)[...] = 0xFF
        if self.output.itemsize == 1:
            self.output[...] = ~self.expected

    def wrong(self) -> str | None:
        """Says how the output differs from the exact one, or returns None."""
        bits = np.dtype(f"u{self.output.itemsize}")
        got, expected = self.output.view(bits), self.expected.view(bits)
        if self.output.itemsize > 1:
            # A float's zero may have either sign.
            got, expected = _signless(got), _signless(expected)
        different = np.flatnonzero(got.reshape(-1) != expected.reshape(-1))
        if not different.size:
            return None
        place = tuple(map(int, np.unravel_index(different[0], self.expected.shape)))
        return (
            f"wrong result: {different.size} of {self.expected.size} outputs, the first at {place}"
        )


@functools.lru_cache(maxsize=2)
def operands(problem: ConvProblem, dtype: str, out_dtype: str, seed: int) -> Operands:
    """Returns operands of a problem, those of the last two problems without computing them anew."""
    return Operands(problem, dtype, out_dtype, seed)


def convolved(
    problem: ConvProblem, x: npt.NDArray[Any], krsc: npt.NDArray[Any]
) -> npt.NDArray[np.float64]:
    """Returns the convolution in float64, ``[N, *output_size, K]``.

    Args:
        problem: The convolution.
        x: ``[N, *input_size, C]``.
        krsc: ``[K, *filter_size, C / groups]``.
    """
    padding = [(0, 0), *zip(problem.pad_before, problem.pad_after, strict=True), (0, 0)]
    image = np.pad(x.astype(np.float64), padding)
    out = tuple(map(int, problem.output_size))
    result = np.zeros((image.shape[0], *out, krsc.shape[0]))
    filters, channels = krsc.shape[0] // problem.groups, krsc.shape[-1]
    for tap in itertools.product(*map(range, problem.filter_size)):
        window = tuple(
            slice(t * d, t * d + (o - 1) * s + 1, s)
            for t, d, o, s in zip(tap, problem.dilation, out, problem.stride, strict=True)
        )
        at: tuple[Any, ...] = (slice(None), *window)
        pixels = image[at]
        for group in range(problem.groups):
            k = slice(group * filters, (group + 1) * filters)
            c = slice(group * channels, (group + 1) * channels)
            part: tuple[Any, ...] = (k, *tap)
            result[..., k] += pixels[..., c] @ krsc[part].astype(np.float64).T
    return result


def _stored(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Returns values, exact in float32, rounded once to a storage type."""
    single = values.astype(np.float32)
    if dtype == "bfloat16":
        return float32_to_bfloat16(single)
    if dtype in INTEGERS:
        return np.clip(np.rint(single), *INTEGERS[dtype]).astype(CARRIERS[dtype])
    return single.astype(CARRIERS[dtype])


def _factor(sums: npt.NDArray[np.float64], dtype: str) -> float:
    """Returns a power of two that brings most sums into the range of integers, or 1."""
    if dtype not in INTEGERS:
        return 1.0
    largest = max(float(np.abs(sums).max()), 1.0)
    return min(1.0, 2.0 ** -math.floor(math.log2(largest / INTEGERS[dtype][1]) + 1))


def _signless(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns bits in which -0 is 0."""
    sign = 1 << (8 * bits.itemsize - 1)
    return np.where(bits == sign, 0, bits)


def _aligned(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns a copy at a multiple of 64 bytes, as MAX and PyTorch allocate."""
    flat = np.empty(values.nbytes + 64, np.uint8)
    start = -flat.ctypes.data % 64
    copy = flat[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy
