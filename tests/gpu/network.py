"""The graphs that the GPU tests run, and that the tests without a GPU only compile.

A graph takes long to compile, so there is one for each type, with every size symbolic: the geometry
is an input, and a problem of a lower rank has extents of 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import maxconv
from maxconv import explain
from maxconv._fields import GEOMETRY_LENGTH, SCALARS_LENGTH
from maxconv.packing import bfloat16_to_float32, float32_to_bfloat16

if TYPE_CHECKING:
    from max.driver import Buffer, Device
    from max.graph import Graph

Floats = npt.NDArray[np.float32]


def _integers(*shape: int) -> Floats:
    generator = np.random.default_rng(sum(shape))
    return generator.integers(-2, 3, shape).astype(np.float32)


#: Filters of ``functions``, in MAX's layouts.
FILTERS = {
    "w1": _integers(5, 8, 12),
    "w2": _integers(3, 3, 8, 24),
    "p2": _integers(1, 1, 8, 16),
    "w3": _integers(2, 3, 3, 8, 6),
}

OUTPUTS = ("plain", "computed", "stored", "converted")


def every_fusion(dtype: str) -> Graph:
    """Returns a graph with a convolution of rank 3 for each kind of work behind it.

    Inputs: activation, flat filter, bias, residual, geometry, scalars for each output, a tensor
    without elements that has the output's sizes, and one factor a filter. Outputs: the convolution;
    its ReLU times the factors; the same with the channels first; the convolution as float32.
    """
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType, ops

    gpu, cpu, kind = DeviceRef.GPU(), DeviceRef.CPU(), DType[dtype]
    sizes = ("out_n", "out_d", "out_h", "out_w", "out_c")
    types = [
        TensorType(kind, ("n", "d", "h", "w", "c"), gpu),
        TensorType(kind, ("filter",), gpu),
        TensorType(kind, ("bias",), gpu),
        TensorType(kind, ("add_n", "add_d", "add_h", "add_w", "add_c"), gpu),
        TensorType(DType.int64, (GEOMETRY_LENGTH,), cpu),
        *[TensorType(DType.float32, (SCALARS_LENGTH,), cpu)] * len(OUTPUTS),
        TensorType(DType.uint8, (*sizes, 0), cpu),
        TensorType(kind, ("out_c",), gpu),
    ]
    with Graph(f"every_{dtype}", input_types=types, kernel_library=maxconv.kernel_library()) as g:
        values = [value.tensor for value in g.inputs]
        operands, scalars, factors = values[:5], values[5 : 5 + len(OUTPUTS)], values[-1]
        result = TensorType(kind, sizes, gpu)
        # Of equal operations MAX would keep one: each has scalars of its own.
        plain, computed, stored, converted = (
            ops.custom("maxconv.conv", gpu, [*operands, own], [result])[0].tensor for own in scalars
        )
        g.output(
            plain,
            ops.relu(computed) * factors,
            ops.permute(ops.relu(stored) * factors, [0, 4, 1, 2, 3]),
            ops.cast(converted, DType.float32),
        )
    return g


def functions(dtype: str) -> Graph:
    """Returns a graph of the package's functions: ranks, layouts, epilogues, fused inputs.

    Inputs: a signal, an image and a volume of 8 channels, a residual of 24, the image's filter in
    RSCF and in FCRS. Outputs: see the code.
    """
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType, ops

    gpu, kind = DeviceRef.GPU(), DType[dtype]
    types = [
        TensorType(kind, ("n1", "w1", 8), gpu),
        TensorType(kind, ("n", "h", "w", 8), gpu),
        TensorType(kind, ("n3", "d3", "h3", "w3", 8), gpu),
        TensorType(kind, ("n", "h", "w", 24), gpu),
        TensorType(kind, (3, 3, 8, 24), gpu),
        TensorType(kind, (24, 8, 3, 3), gpu),
    ]
    with Graph(
        f"functions_{dtype}", input_types=types, kernel_library=maxconv.kernel_library()
    ) as g:
        x1, x2, x3, residual, rscf, fcrs = (value.tensor for value in g.inputs)
        w2 = FILTERS["w2"]
        packed = maxconv.pack_filter(w2, "RSCF", dtype=dtype)
        bias = np.arange(24, dtype=np.float32) - 12
        epilogue: dict[str, Any] = {"padding": 1, "bias": bias, "activation": "relu"}
        g.output(
            maxconv.conv1d(x1, FILTERS["w1"], padding=2),
            maxconv.conv2d(x2, w2, residual=residual, beta=0.5, **epilogue),
            maxconv.conv2d(x2, packed, residual=residual, beta=0.5, **epilogue),
            maxconv.conv2d(x2, rscf, residual=residual, beta=0.5, **epilogue),
            maxconv.conv2d(x2, fcrs, filter_layout="FCRS", residual=residual, beta=0.5, **epilogue),
            maxconv.conv2d(ops.relu(x2) * 2, FILTERS["p2"]),
            maxconv.conv3d(x3, FILTERS["w3"], padding=1),
            maxconv.conv2d_transpose(x2, np.moveaxis(w2, 2, 3), stride=2, padding=1),
        )
    return g


def fusions(dtype: str) -> Graph:
    """Returns a small graph, only to be compiled: every op, rank and kind of fused work once."""
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType, ops

    gpu, kind = DeviceRef.GPU(), DType[dtype]
    types = [
        TensorType(kind, ("n", "h", "w", 64), gpu),
        TensorType(kind, ("n", "h", "w", 64), gpu),
        TensorType(kind, ("n", "d", "h", "w", 16), gpu),
        TensorType(DType.float32, ("n", "w", 8), gpu),
        *explain.operand_types(),
    ]
    with Graph(f"fusions_{dtype}", input_types=types, kernel_library=maxconv.kernel_library()) as g:
        image, residual, volume, signal, *asked = (value.tensor for value in g.inputs)
        dense = _integers(3, 3, 64, 64)
        depthwise = _integers(3, 3, 3, 1, 16)
        g.output(
            ops.relu(maxconv.conv2d(image, dense, padding=1, residual=residual)) * residual,
            maxconv.conv3d(volume, depthwise, groups=16).cast(DType.float32),
            maxconv.conv1d(ops.relu(signal) * 2, _integers(1, 8, 12)),
            *explain.explain_op(asked, dtype, gpu),
        )
    return g


def to_device(values: npt.NDArray[Any], dtype: str, device: Device) -> Buffer:
    """Returns a buffer of a storage type, from float32 values that the type holds exactly."""
    from max.driver import Buffer
    from max.dtype import DType

    if dtype == "bfloat16":
        bits = np.ascontiguousarray(float32_to_bfloat16(values))
        return Buffer.from_numpy(bits).view(DType.bfloat16).to(device)
    return Buffer.from_numpy(np.ascontiguousarray(values.astype(dtype))).to(device)


def to_float32(buffer: Buffer) -> Floats:
    """Returns a buffer's elements, from any device and of any storage type."""
    from max.driver import CPU
    from max.dtype import DType

    host = buffer.to(CPU())
    if host.dtype == DType.bfloat16:
        return bfloat16_to_float32(host.view(DType.uint16).to_numpy())
    return np.asarray(host.to_numpy(), dtype=np.float32)


def rounded(values: npt.NDArray[np.float64], dtype: str) -> Floats:
    """Returns values as the storage type holds them: float32 first, then once more if it is wider.

    Exact sums of integers below 2**24 lose nothing in float32.
    """
    single = values.astype(np.float32)
    if dtype == "bfloat16":
        return bfloat16_to_float32(float32_to_bfloat16(single))
    return single.astype(dtype).astype(np.float32)
