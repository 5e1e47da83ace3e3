"""Storage types: which exist, their sizes, what carries them in numpy, and who takes them.

Everything that lists types derives its list from here, by name; this module imports neither MAX nor
PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ._fields import GPU_DTYPES

__all__ = [
    "BIT_CARRIED",
    "CARRIERS",
    "CPU_BYTES",
    "DTYPE_BYTES",
    "FILTER_BYTES",
    "FLOAT8",
    "FLOAT8_WIDE",
    "GPU_BYTES",
    "HALF_DTYPES",
    "INPUT_BYTES",
    "INT8",
    "INTEGERS",
    "OUTPUT_BYTES",
    "UINT8",
    "bias_dtype",
    "filter_dtype",
]

#: Storage types of activations, filters and outputs on every device, and their sizes in bytes.
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

#: Those of 16 bits.
HALF_DTYPES = tuple(name for name, size in DTYPE_BYTES.items() if size == 2)

#: The 8-bit type of activations and filters: a sign, 4 bits of exponent, 3 of mantissa; NaN, but no
#: infinity.
FLOAT8 = "float8_e4m3fn"

#: The other one: 5 bits of exponent, 2 of mantissa; infinities and NaN, as float16 has them.
FLOAT8_WIDE = "float8_e5m2"

#: Integers of 8 bits, the second of activations and outputs alone: filters beside it are int8.
INT8 = "int8"
UINT8 = "uint8"

#: Integers of 8 bits, their least and their largest.
INTEGERS: Mapping[str, tuple[int, int]] = {INT8: (-128, 127), UINT8: (0, 255)}

#: Storage types of activations and filters that GPUs take besides.
GPU_BYTES: Mapping[str, int] = dict.fromkeys(GPU_DTYPES, 1)

#: Storage types of activations that a CPU takes, and their sizes in bytes.
CPU_BYTES: Mapping[str, int] = {**DTYPE_BYTES, **dict.fromkeys(INTEGERS, 1)}

#: Storage types of filters, and their sizes in bytes.
FILTER_BYTES: Mapping[str, int] = {**DTYPE_BYTES, **GPU_BYTES}

#: Storage types of activations, and their sizes in bytes.
INPUT_BYTES: Mapping[str, int] = {**FILTER_BYTES, UINT8: 1}

#: Storage types of residuals and outputs, and their sizes in bytes.
OUTPUT_BYTES: Mapping[str, int] = CPU_BYTES

#: numpy's type for the elements of each storage type; for those that it lacks, of their bits.
CARRIERS: Mapping[str, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    FLOAT8: np.uint8,
    FLOAT8_WIDE: np.uint8,
    INT8: np.int8,
    UINT8: np.uint8,
}

#: Storage types that numpy lacks.
BIT_CARRIED = tuple(
    name
    for name, carrier in CARRIERS.items()
    if issubclass(carrier, np.unsignedinteger) and name not in INTEGERS
)


def filter_dtype(dtype: str) -> str:
    """Returns the storage type of the filter beside an activation of ``dtype``."""
    return INT8 if dtype == UINT8 else dtype


def bias_dtype(dtype: str, out_dtype: str) -> str:
    """Returns the storage type that a bias has, if it is not float32.

    Args:
        dtype: Of the activation.
        out_dtype: Of the output.
    """
    wide = (name for name in (dtype, out_dtype) if name in DTYPE_BYTES)
    return next(wide, "float32")
