"""Arrays by the names of their types, those that numpy does not have included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .._numbers import bfloat16_bits, eight_codes, eight_values, exact, round_to

__all__ = ["DTYPES", "decode", "encode", "filled"]

Array = npt.NDArray[Any]

_EIGHTS = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}

#: What holds an element, by the type's name.
DTYPES: Mapping[str, Any] = {
    **{name: np.dtype(name) for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32")},
    **{name: np.dtype(name) for name in ("int64", "uint64", "float16", "float32", "float64")},
    "bfloat16": np.dtype(np.uint16),
    **dict.fromkeys(_EIGHTS, np.dtype(np.uint8)),
}

#: Every byte of a poisoned array: floats are NaN, integers easy to recognize.
_POISON_FLOAT, _POISON_INTEGER = 0xFF, 0xA5


def encode(values: npt.ArrayLike, dtype: str) -> Array:
    """Numbers as elements of a type, rounded to nearest even; 8-bit floats saturate."""
    numbers = np.asarray(values)
    if dtype == "bfloat16":
        shape = numbers.shape
        flat = round_to("bf16", numbers.astype(np.float64).reshape(-1), "rn")
        bits: Array = bfloat16_bits(flat).reshape(shape)
        return bits
    if dtype in _EIGHTS:
        codes = eight_codes(numbers.astype(np.float64), _EIGHTS[dtype])
        return codes.astype(np.uint8)
    if DTYPES[dtype].kind in "iu" and numbers.dtype.kind == "f":
        numbers = np.rint(numbers)
    converted: Array = numbers.astype(DTYPES[dtype])
    return converted


def decode(elements: Array, dtype: str) -> Array:
    """Elements of a type as numbers that numpy knows, exactly."""
    if dtype == "bfloat16":
        return exact(elements)
    if dtype in _EIGHTS:
        found: Array = eight_values(_EIGHTS[dtype])[elements].astype(np.float32)
        return found
    return elements


def filled(dtype: str, shape: Sequence[int], fill: str | Mapping[str, Any]) -> Array:
    """An array of a type as a description fills it.

    Args:
        dtype: A name of ``DTYPES``.
        shape: Elements, outermost first.
        fill: ``zeros``, ``arange``, ``poison`` (also for ``unwritten``), or an object with
            ``value``, ``uniform`` or ``integers`` (``low`` and ``high`` included).
    """
    kind, count = DTYPES[dtype], int(np.prod(shape))
    if fill in ("poison", "unwritten"):
        is_float = "float" in dtype
        byte = _POISON_FLOAT if is_float else _POISON_INTEGER
        poisoned: Array = np.full(count * kind.itemsize, byte, np.uint8).view(kind)
        return poisoned.reshape(shape)
    if fill == "zeros":
        return np.zeros(shape, kind)
    if fill == "arange":
        return encode(np.arange(count), dtype).reshape(shape)
    assert isinstance(fill, Mapping)
    if "value" in fill:
        return encode(np.full(shape, fill["value"]), dtype)
    drawn = fill.get("uniform") or fill["integers"]
    rng = np.random.default_rng(drawn.get("seed", 0))
    if "uniform" in fill:
        return encode(rng.uniform(drawn["low"], drawn["high"], tuple(shape)), dtype)
    whole = rng.integers(int(drawn["low"]), int(drawn["high"]), tuple(shape), endpoint=True)
    return encode(whole, dtype)
