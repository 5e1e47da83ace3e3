"""Integers of 8 bits for the next convolution, from what one computed.

MAX fuses the function into the convolution in front of it, so that the kernel stores one byte an
element, and the wide values are never in memory.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from max.dtype import DType
from max.graph import TensorValue, TensorValueLike, ops

from ._checks import check_dtype, check_number, check_zero_point, reciprocals, show
from ._dtypes import INT8, INTEGERS
from ._graph import constant

__all__ = ["quantize_linear"]


def quantize_linear(
    x: TensorValueLike,
    scale: float | npt.ArrayLike,
    zero_point: int = 0,
    dtype: DType | str = INT8,
) -> TensorValue:
    """Divides by a scale, rounds and clamps to integers, as ONNX's ``QuantizeLinear``.

    Computes, in float32 and with halves rounded to even::

        clamp(round(x * (1 / scale)) + zero_point, lowest, highest)

    where ``1 / scale`` is the float32 nearest to it. Behind ``conv2d(..., out_dtype=float32)`` it
    is a part of the convolution: for int8 operands, whose sums are int32, the result is exact but
    for that one float32 product, and the epilogue's.

    Args:
        x: float32, bfloat16 or float16, of any shape; channels last where ``scale`` has several.
        scale: What a step of the integers stands for: a positive number, or one for each element of
            the last dimension.
        zero_point: The integer that stands for 0. On a GPU a convolution takes integers as they
            are, and pads with 0: what one reads must have 0 here. On a CPU it is told so.
        dtype: int8, whose integers are -128 to 127, or uint8, 0 to 255.

    Returns:
        ``dtype``, of the shape of ``x``.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An argument has a value that is not allowed.
    """
    value = TensorValue(x)
    if not value.dtype.is_float():
        raise ValueError(f"x: dtype {value.dtype.name} is not allowed; floats are")
    factors = _reciprocals(scale, value)
    kind = check_dtype("dtype", dtype, dict.fromkeys(INTEGERS, 1))
    lowest, highest = INTEGERS[kind]
    shift = check_zero_point("zero_point", zero_point, kind)
    factor = constant(factors, "float32", value.device)
    steps = ops.round(ops.cast(value, DType.float32) * factor) + float(shift)
    return ops.cast(ops.min(ops.max(steps, float(lowest)), float(highest)), DType[kind])


def _reciprocals(scale: float | npt.ArrayLike, x: TensorValue) -> npt.NDArray[np.float32]:
    """The float32 nearest to ``1 / scale``, of each."""
    if isinstance(scale, np.ndarray | list | tuple):
        scales = np.asarray(scale, dtype=np.float64)
        last = x.shape[-1] if x.rank else 1
        if scales.ndim != 1 or str(len(scales)) != str(last):
            raise ValueError(
                f"scale: shape {show(scales.shape)} does not match; a number is allowed, or one "
                f"for each of the {last} elements of the last dimension"
            )
    else:
        scales = np.asarray(check_number("scale", scale))
    return reciprocals("scale", scales)
