"""The storage types as PyTorch's dtypes."""

from __future__ import annotations

from typing import Final

import torch

from .. import _fields
from .._dtypes import (
    BIT_CARRIED,
    CPU_BYTES,
    DTYPE_BYTES,
    FILTER_BYTES,
    INPUT_BYTES,
    INTEGERS,
    OUTPUT_BYTES,
)
from .._dtypes import FLOAT8 as _FLOAT8

__all__ = [
    "BYTES",
    "BY_NAME",
    "CPU_DTYPES",
    "CPU_FILTERS",
    "DTYPES",
    "FLOAT8",
    "GPU_DTYPES",
    "GPU_FILTERS",
    "HOPPER_DTYPES",
    "INTEGER_NAMES",
    "NAMES",
    "OUTPUTS",
    "TENSOR_CORES",
    "listed",
]

#: By the package's name.
BY_NAME: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in INPUT_BYTES}

#: The package's name of each.
NAMES: Final = {dtype: name for name, dtype in BY_NAME.items()}

#: The dtypes of inputs, filters and outputs.
DTYPES: Final = tuple(BY_NAME[name] for name in DTYPE_BYTES)

#: The dtypes of inputs on a CPU, and those of outputs there.
CPU_DTYPES: Final = tuple(BY_NAME[name] for name in CPU_BYTES)
OUTPUTS: Final = tuple(BY_NAME[name] for name in OUTPUT_BYTES)

#: Those of filters.
CPU_FILTERS: Final = tuple(dtype for dtype in CPU_DTYPES if NAMES[dtype] in FILTER_BYTES)
GPU_FILTERS: Final = tuple(BY_NAME[name] for name in FILTER_BYTES)

#: The package's names of the integers.
INTEGER_NAMES: Final = {BY_NAME[name]: name for name in INTEGERS}

#: The 8-bit float of any GPU.
FLOAT8: Final = BY_NAME[_FLOAT8]

#: Compute capabilities of GPUs that take more.
TENSOR_CORES: Final = tuple(
    divmod(value, 10) for value in (*_fields.HOPPER_CAPABILITIES, *_fields.BLACKWELL_CAPABILITIES)
)

#: What inputs and filters on a GPU may also have: on any, and on these.
GPU_DTYPES: Final = tuple(
    BY_NAME[name] for name in _fields.GPU_DTYPES if name not in _fields.HOPPER_DTYPES
)
HOPPER_DTYPES: Final = tuple(BY_NAME[name] for name in _fields.HOPPER_DTYPES)

#: Those of 8 bits that numpy lacks: they cross to MAX as bytes.
BYTES: Final = frozenset(BY_NAME[name] for name in BIT_CARRIED if INPUT_BYTES[name] == 1)


def listed(dtypes: tuple[torch.dtype, ...] = DTYPES) -> str:
    """Writes dtypes as they stand in a message."""
    return ", ".join(map(str, dtypes))
