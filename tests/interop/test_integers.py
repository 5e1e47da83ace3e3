"""Convolutions of 8-bit integers in a MAX graph on a CPU, exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tests.interop.graphs import Source, input_type
from tests.reference import conv_reference

import maxconv

if TYPE_CHECKING:
    from max.engine import Model
    from max.graph import Graph, Module

Integers = npt.NDArray[Any]

C, K = 20, 33
ZERO, OUT_ZERO, RESIDUAL_ZERO = 131, 40, 7

#: Powers of two: products with them are exact.
SCALES = np.float32(2.0) ** -np.arange(12, 12 + K, dtype=np.float32).clip(12, 15)
OUT_SCALE, BETA = 0.5, 0.25

FILTER = np.random.default_rng(5).integers(-128, 128, (3, 3, C, K)).astype(np.int8)
DEPTHWISE = np.random.default_rng(6).integers(-128, 128, (3, 3, 1, C)).astype(np.int8)
#: So many taps that float32 does not hold every sum.
LARGE = np.random.default_rng(9).integers(-128, 128, (23, 23, 1, C)).astype(np.int8)
#: Groups of 4 channels and filters, which share panels.
NARROW = np.random.default_rng(8).integers(-128, 128, (3, 3, 4, 4 * C)).astype(np.int8)
BIAS = np.random.default_rng(7).integers(-40, 40, K).astype(np.float32)


def build(name: str, module: Module | None = None) -> Graph:
    """Filters that are known, loaded and computed; integers and floats out."""
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType, Weight, ops

    types = [
        input_type(("n", "h", "w", C), "uint8"),
        input_type(("n", "h", "w", C), "int8"),
        input_type(("n", "p", "q", K), "int8"),
        TensorType(DType.int8, FILTER.shape, DeviceRef.CPU()),
    ]
    library = maxconv.kernel_library()
    with Graph(name, input_types=types, kernel_library=library, module=module) as graph:
        x, signed, residual, computed = (value.tensor for value in graph.inputs)
        loaded = graph.add_weight(Weight("integers", DType.int8, FILTER.shape, DeviceRef.CPU()))
        narrow = graph.add_weight(
            Weight("narrow_integers", DType.int8, NARROW.shape, DeviceRef.CPU())
        )
        fourfold = ops.concat([x] * 4, axis=-1)
        wide: dict[str, Any] = {"padding": 1, "out_dtype": DType.float32}
        graph.output(
            *(
                maxconv.conv2d(x, filter, zero_point=ZERO, **wide)
                for filter in (FILTER, loaded, computed)
            ),
            maxconv.conv2d(
                signed,
                FILTER,
                padding=1,
                bias=BIAS,
                scale=SCALES,
                activation="relu",
                residual=residual,
                beta=BETA,
                residual_zero_point=RESIDUAL_ZERO,
                out_dtype=DType.int8,
                out_scale=OUT_SCALE,
                out_zero_point=OUT_ZERO,
            ),
            maxconv.conv2d(x, DEPTHWISE, groups=C, zero_point=ZERO, **wide),
            maxconv.conv2d(
                x, LARGE, groups=C, zero_point=ZERO, padding=11, out_dtype=DType.float32
            ),
            maxconv.quantize_linear(
                maxconv.conv2d(x, FILTER, zero_point=ZERO, scale=SCALES, **wide),
                OUT_SCALE,
                OUT_ZERO,
                dtype="uint8",
            ),
            *(
                maxconv.conv2d(fourfold, filter, groups=C, zero_point=ZERO, **wide)
                for filter in (NARROW, narrow)
            ),
        )
    return graph


GRAPHS = {"integers": Source(build, lambda: {"integers": FILTER, "narrow_integers": NARROW})}


def sums_of(x: Integers, filter: Integers, groups: int = 1) -> npt.NDArray[np.float64]:
    """Exact sums, with as many output pixels as there are of the activation."""
    one, half = (1, 1), (filter.shape[0] // 2, filter.shape[1] // 2)
    last = np.moveaxis(filter, -1, 0).astype(np.float64)
    return conv_reference(
        x.astype(np.float64),
        last,
        stride=one,
        dilation=one,
        pad_before=half,
        pad_after=half,
        groups=groups,
    )


def test_integers(models: dict[str, Model], rng: np.random.Generator) -> None:
    x = rng.integers(0, 256, (2, 9, 7, C)).astype(np.uint8)
    signed = rng.integers(-128, 128, (2, 9, 7, C)).astype(np.int8)
    residual = rng.integers(-128, 128, (2, 9, 7, K)).astype(np.int8)
    known, loaded, computed, small, depthwise, large, fused, *shared = (
        output.to_numpy() for output in models["integers"].execute(x, signed, residual, FILTER)
    )
    wanted = sums_of(x.astype(np.int64) - ZERO, FILTER)
    for output in (known, loaded, computed):
        np.testing.assert_array_equal(output, wanted)
    values = np.maximum(sums_of(signed, FILTER) * SCALES + BIAS, 0)
    values += BETA * (residual.astype(np.float64) - RESIDUAL_ZERO)
    np.testing.assert_array_equal(small, np.clip(np.rint(values / OUT_SCALE) + OUT_ZERO, -128, 127))
    assert small.dtype == np.int8
    assert len(np.unique(small)) > 100
    np.testing.assert_array_equal(
        depthwise, sums_of(x.astype(np.int64) - ZERO, DEPTHWISE, groups=C)
    )
    exact = sums_of(x.astype(np.int64) - ZERO, LARGE, groups=C)
    np.testing.assert_array_equal(large, exact.astype(np.float32))
    steps = np.clip(np.rint(wanted * SCALES / OUT_SCALE) + OUT_ZERO, 0, 255)
    np.testing.assert_array_equal(fused, steps)
    assert fused.dtype == np.uint8
    fourfold = np.concatenate([x.astype(np.int64) - ZERO] * 4, axis=-1)
    for output in shared:
        np.testing.assert_array_equal(output, sums_of(fourfold, NARROW, groups=C))
