"""The graph of convolutions in NC/4HW4 that the GPU tests run, and the others only compile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import maxconv

if TYPE_CHECKING:
    from max.graph import Graph

Integers = npt.NDArray[np.int8]


def _integers(*shape: int) -> Integers:
    generator = np.random.default_rng(sum(shape))
    return generator.integers(-128, 128, shape).astype(np.int8)


#: Filters, ``[R, S, C, K]``, and scale, one a filter, and bias of the first.
FIRST, SECOND, STEM = _integers(3, 3, 32, 64), _integers(3, 3, 64, 48), _integers(7, 7, 3, 24)
SCALE = np.float32(2.0) ** (np.arange(64) % 3 - 13).astype(np.float32)
BIAS = np.arange(64, dtype=np.float32) - 32

#: Shape of the filter that is an input, ``[K, C, R, S]``.
GIVEN = (68, 32, 1, 1)


def graph(dtype: str) -> Graph:
    """Returns a graph of convolutions of int8: with work behind them, and with none.

    Inputs: images of 32 channels, channels last; a residual of 48, interleaved; images of 4
    channels, interleaved; a filter ``GIVEN``. Outputs: int8 of the first convolution, interleaved,
    with a scale a filter, bias and ReLU; int8 of the second, of the first's, with the residual,
    channels last; the stem's, of 3 channels, as bfloat16; the given filter's, as float32.
    """
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType

    gpu, kind = DeviceRef.GPU(), DType[dtype]
    types = [
        TensorType(kind, ("n", "h", "w", 32), gpu),
        TensorType(DType.float32, ("n", 12, "h", "w", 4), gpu),
        TensorType(kind, ("m", 1, "y", "x", 4), gpu),
        TensorType(kind, GIVEN, gpu),
    ]
    library = maxconv.kernel_library()
    with Graph(f"interleaved_{dtype}", input_types=types, kernel_library=library) as g:
        images, residual, few, filter = (value.tensor for value in g.inputs)
        wide: dict[str, Any] = {"input_layout": "NC/4HW4", "out_dtype": DType.float32}
        x = maxconv.interleave(images, 4)
        first = maxconv.conv2d(
            x, FIRST, padding=1, scale=SCALE, bias=BIAS, activation="relu", **wide
        )
        rounded = maxconv.quantize_linear(first, 0.5)
        second = maxconv.conv2d(
            rounded,
            SECOND,
            padding=1,
            dilation=(1, 1),
            scale=2.0**-15,
            residual=residual,
            **wide,
        )
        stem = maxconv.conv2d(
            few, STEM, stride=2, padding=(3, 2, 3, 1), **wide | {"out_dtype": DType.bfloat16}
        )
        g.output(
            rounded,
            maxconv.deinterleave(maxconv.quantize_linear(second, 0.25, -20)),
            stem,
            maxconv.conv2d(x, filter, filter_layout="FCRS", stride=(2, 1), **wide),
        )
    return g
