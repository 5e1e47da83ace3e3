"""Values of the types that kernels read and write, as the emulator's memory holds them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tests.emulated.convolution import Array, bfloat16, floats

__all__ = ["FLOAT8_EXPONENT_BITS", "float8", "loaded", "stored"]

#: Of the types of 8 bits that are floats.
FLOAT8_EXPONENT_BITS: Final = {"float8_e4m3fn": 4, "float8_e5m2": 5}


def float8(exponent_bits: int, values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Bits of small integers in a float of 8 bits."""
    mantissa_bits = 7 - exponent_bits
    magnitude = np.abs(values)
    exponent = np.floor(np.log2(np.maximum(magnitude, 1)))
    fraction = (magnitude / 2**exponent - 1) * 2**mantissa_bits
    assert (fraction == np.floor(fraction))[magnitude > 0].all(), "not exact"
    bias = 2 ** (exponent_bits - 1) - 1
    bits = (exponent + bias) * 2**mantissa_bits + fraction
    code = (np.where(magnitude > 0, bits, 0) + 128 * (values < 0)).astype(np.uint8)
    return np.asarray(code)


def stored(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.generic]:
    """The values' bits: of int8 rounded, halves to even, and clamped."""
    if dtype == "int8":
        clamped: npt.NDArray[np.int8] = np.clip(np.rint(values), -128, 127).astype(np.int8)
        return clamped
    if dtype == "bfloat16":
        return bfloat16(values)
    if dtype in FLOAT8_EXPONENT_BITS:
        return float8(FLOAT8_EXPONENT_BITS[dtype], values)
    bits: npt.NDArray[np.generic] = values
    return bits.astype(np.float16).view(np.uint16) if dtype == "float16" else bits


def loaded(bits: npt.NDArray[np.generic], dtype: str) -> Array:
    """The values of bits."""
    if dtype == "bfloat16":
        return floats(bits.astype(np.uint16))
    if dtype == "float16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float32)
    return bits.astype(np.float32)
