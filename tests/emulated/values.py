"""Values of the types that kernels read and write, as the emulator's memory holds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from tests.emulated.convolution import Array, bfloat16, floats

__all__ = ["loaded", "stored"]


def stored(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.generic]:
    """The values' bits: of int8 rounded, halves to even, and clamped."""
    if dtype == "int8":
        clamped: npt.NDArray[np.int8] = np.clip(np.rint(values), -128, 127).astype(np.int8)
        return clamped
    if dtype == "bfloat16":
        return bfloat16(values)
    bits: npt.NDArray[np.generic] = values
    return bits.astype(np.float16).view(np.uint16) if dtype == "float16" else bits


def loaded(bits: npt.NDArray[np.generic], dtype: str) -> Array:
    """The values of bits."""
    if dtype == "bfloat16":
        return floats(bits.astype(np.uint16))
    if dtype == "float16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float32)
    return bits.astype(np.float32)
