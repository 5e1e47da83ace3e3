"""The graphs that the GPU tests run, and that the tests without a GPU only compile.

A graph takes long to compile, so there is one for each type, with every size symbolic: the geometry
is an input, and a problem of a lower rank has extents of 1.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

import maxconv
from maxconv._fields import GEOMETRY_LENGTH, SCALARS_LENGTH, Kernel
from maxconv._graph import op_name
from maxconv._packing import cast_array

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from max.driver import Buffer, Device
    from max.graph import Graph, TensorValue

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

#: Filters ``[K, C, R, S]`` of ``layers``; those with a name that begins with ``w`` are weights.
LAYERS = {
    "u2": _integers(48, 32, 3, 3),
    "u4": _integers(64, 32, 3, 3) % 2,
    "few": _integers(3, 32, 3, 3),
    "w_many": _integers(40, 32, 3, 3),
    "w_few": _integers(3, 32, 1, 1),
}

#: The filter of ``subgraph``, and what its calls are told apart by.
BLOCK_FILTER = _integers(64, 64, 3, 3)
BLOCK_PREFIXES = ("first.", "second.")

#: Filters of ``quantized``, ``[R, S, C, K]``; scale, one a filter, and bias of the first.
QUANTIZED = {"first": _integers(3, 3, 32, 64) * 30, "second": _integers(3, 3, 64, 48) * 9}
QUANTIZED_SCALE = np.float32(2.0) ** (np.arange(64) % 3 - 9).astype(np.float32)
QUANTIZED_BIAS = np.arange(64, dtype=np.float32) - 32

#: Zero points of ``integers``: of the input, the residual and the first output.
INTEGER_ZERO, INTEGER_RESIDUAL_ZERO, INTEGER_OUT_ZERO = 101, 77, 93

OUTPUTS = ("plain", "computed", "stored", "converted")


class Types(NamedTuple):
    """What the tensors of a graph are of, and how much of it is compiled."""

    dtype: str
    """Of activation and filter."""
    out_dtype: str
    """Of output and residual; the bias is float32 where these differ."""
    outputs: tuple[str, ...]
    """Of ``OUTPUTS``."""
    known: Mapping[str, bool | int] = MappingProxyType({})
    """What the op is told of its problems: nothing lets it take any."""
    scaled: bool = False
    """Whether each filter has a factor of its own; it is the last input."""

    @property
    def bias_dtype(self) -> str:
        return self.dtype if self.dtype == self.out_dtype else "float32"


# No call names a kernel: the graph is compiled without the reference.
_UNNAMED = MappingProxyType({"kernel": int(Kernel.AUTO)})

TYPES = {
    "float32": Types("float32", "float32", OUTPUTS),
    "bfloat16": Types("bfloat16", "bfloat16", OUTPUTS),
    "float16": Types("float16", "float16", OUTPUTS),
    "fp8_bfloat16": Types("float8_e4m3fn", "bfloat16", ("computed", "stored"), _UNNAMED, True),
    "fp8_float32": Types("float8_e4m3fn", "float32", ("plain",), _UNNAMED),
    "bfloat16_float32": Types("bfloat16", "float32", ("plain",), _UNNAMED),
}


def every_fusion(name: str) -> Graph:
    """Returns a graph with a convolution of rank 3 for each kind of work behind it.

    Inputs: activation, flat filter, bias, residual, geometry, scalars for each output, a tensor
    without elements that has the output's sizes, and one factor a filter. Outputs: the convolution;
    its ReLU times the factors; the same with the channels first; the convolution as float32; those
    of them that the entry of ``TYPES`` names.
    """
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType, ops

    dtypes = TYPES[name]
    gpu, cpu = DeviceRef.GPU(), DeviceRef.CPU()
    kind, out, bias = (DType[d] for d in (dtypes.dtype, dtypes.out_dtype, dtypes.bias_dtype))
    sizes = ("out_n", "out_d", "out_h", "out_w", "out_c")
    types = [
        TensorType(kind, ("n", "d", "h", "w", "c"), gpu),
        TensorType(kind, ("filter",), gpu),
        TensorType(bias, ("bias",), gpu),
        TensorType(out, ("add_n", "add_d", "add_h", "add_w", "add_c"), gpu),
        TensorType(DType.int64, (GEOMETRY_LENGTH,), cpu),
        *[TensorType(DType.float32, (SCALARS_LENGTH,), cpu)] * len(dtypes.outputs),
        TensorType(DType.uint8, (*sizes, 0), cpu),
        TensorType(out, ("out_c",), gpu),
        *[TensorType(DType.float32, ("scale",), gpu)] * dtypes.scaled,
    ]
    with Graph(f"every_{name}", input_types=types, kernel_library=maxconv.kernel_library()) as g:
        values = [value.tensor for value in g.inputs]
        none = ops.constant(np.zeros(0, np.float32), DType.float32, gpu)
        scale = values.pop() if dtypes.scaled else none
        operands, geometry = [*values[:4], scale], values[4]
        scalars, factors = values[5:-2], values[-1]
        parameters: dict[str, Any] = {**dtypes.known, "scaled": dtypes.scaled}
        result = TensorType(out, sizes, gpu)
        # Of equal operations MAX would keep one: each has scalars of its own.
        convolved = [
            ops.custom(op_name(gpu), gpu, [*operands, geometry, own], [result], parameters)[
                0
            ].tensor
            for own in scalars
        ]
        behind: dict[str, Callable[[TensorValue], TensorValue]] = {
            "plain": lambda y: y,
            "computed": lambda y: ops.relu(y) * factors,
            "stored": lambda y: ops.permute(ops.relu(y) * factors, [0, 4, 1, 2, 3]),
            "converted": lambda y: ops.cast(y, DType.float32),
        }
        g.output(*(behind[n](y) for n, y in zip(dtypes.outputs, convolved, strict=True)))
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


def quantized(dtype: str) -> Graph:
    """Returns a graph of two convolutions of int8, the second of what the first rounds to int8.

    Inputs: images of 32 channels, and a residual of 48. Outputs: int8 of the first, with a scale a
    filter, bias and ReLU; int8 of the second, with ReLU and the residual.
    """
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType

    gpu, kind = DeviceRef.GPU(), DType[dtype]
    types = [
        TensorType(kind, ("n", "h", "w", 32), gpu),
        TensorType(DType.float32, ("n", "h", "w", 48), gpu),
    ]
    library = maxconv.kernel_library()
    with Graph(f"quantized_{dtype}", input_types=types, kernel_library=library) as g:
        x, residual = (value.tensor for value in g.inputs)
        wide: dict[str, Any] = {"padding": 1, "out_dtype": DType.float32}
        first = maxconv.quantize_linear(
            maxconv.conv2d(
                x,
                QUANTIZED["first"],
                scale=QUANTIZED_SCALE,
                bias=QUANTIZED_BIAS,
                activation="relu",
                **wide,
            ),
            0.5,
        )
        second = maxconv.conv2d(
            first,
            QUANTIZED["second"],
            scale=2.0**-9,
            activation="relu",
            residual=residual,
            **wide,
        )
        g.output(first, maxconv.quantize_linear(second, 0.25, -20))
    return g


def integers(dtype: str) -> Graph:
    """Returns a graph of two convolutions of 8-bit integers with zero points.

    Inputs: images of 32 channels, and a residual of 64. Outputs: integers of the first, with a
    scale a filter, bias, ReLU and half the residual; float32 of the second, of the first's output.
    """
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType

    gpu, kind = DeviceRef.GPU(), DType[dtype]
    types = [TensorType(kind, ("n", "h", "w", channels), gpu) for channels in (32, 64)]
    library = maxconv.kernel_library()
    with Graph(f"integers_{dtype}", input_types=types, kernel_library=library) as g:
        x, residual = (value.tensor for value in g.inputs)
        first = maxconv.conv2d(
            x,
            QUANTIZED["first"],
            padding=1,
            zero_point=INTEGER_ZERO,
            scale=QUANTIZED_SCALE,
            bias=QUANTIZED_BIAS,
            activation="relu",
            residual=residual,
            beta=0.5,
            residual_zero_point=INTEGER_RESIDUAL_ZERO,
            out_dtype=kind,
            out_scale=0.5,
            out_zero_point=INTEGER_OUT_ZERO,
        )
        second = maxconv.conv2d(
            first,
            QUANTIZED["second"],
            padding=1,
            zero_point=INTEGER_OUT_ZERO,
            scale=2.0**-9,
            out_dtype=DType.float32,
        )
        g.output(first, second)
    return g


def layers(dtype: str) -> Graph:
    """Returns a graph of enlargements, poolings, few filters, and filters that are weights.

    Inputs: an image of 32 channels, a residual of 64 for the enlarged image, and an image of 20
    channels to be pooled. Outputs: see the code. The weights are those of ``LAYERS``, float32.
    """
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType, Weight, ops

    gpu, kind = DeviceRef.GPU(), DType[dtype]
    types = [
        TensorType(kind, ("n", "h", "w", 32), gpu),
        TensorType(kind, ("n", "two_h", "two_w", 64), gpu),
        TensorType(kind, ("n", "pool_h", "pool_w", 20), gpu),
    ]
    with Graph(f"layers_{dtype}", input_types=types, kernel_library=maxconv.kernel_library()) as g:
        x, residual, pooled = (value.tensor for value in g.inputs)
        weights = {
            name: Weight(name, kind, LAYERS[name].shape, gpu)
            for name in LAYERS
            if name.startswith("w")
        }

        def convolve(filter: str, **given: Any) -> TensorValue:
            values: Any = weights.get(filter, LAYERS[filter])
            arguments: dict[str, Any] = {"filter_layout": "FCRS", **given}
            return maxconv.conv2d(x, values, **arguments)

        bias = np.arange(48, dtype=np.float32) - 24
        wide = DType.float32
        enlarged = convolve("u4", upsample=2, padding=1)
        g.output(
            convolve("u2", upsample=2, padding=1, bias=bias),
            convolve("u2", upsample=2, padding=(2, 1, 0, 1), activation="relu", out_dtype=wide),
            convolve("u2", upsample=(1, 3), padding=1),
            ops.relu(enlarged + ops.rebind(residual, enlarged.shape)) * 2,
            convolve("few", upsample=2, padding=1, bias=bias[:3]),
            convolve("few", padding=1, bias=bias[:3], out_dtype=wide),
            convolve("few", padding=1),
            convolve("w_many", padding=1),
            convolve("w_few"),
            maxconv.max_pool(pooled, 3, stride=2, padding=1),
            ops.relu(maxconv.avg_pool(pooled, 2, stride=2) - 1),
            maxconv.avg_pool(pooled, 3, padding=1, count_boundary=False).cast(wide),
            maxconv.global_avg_pool(pooled),
            maxconv.global_avg_pool(convolve("w_many", padding=1)),
            maxconv.group_norm(x, 8, bias[:32] / 8, bias[16:], activation="silu"),
            maxconv.group_norm(pooled, 5, epsilon=0.5),
            maxconv.group_norm(pooled, 20, bias[:20], bias[:20], activation="relu").cast(wide),
            maxconv.rms_norm(x, bias[:32] / 8, activation="silu"),
            ops.permute(maxconv.rms_norm(pooled, bias[:20], 0.5) * 2, [0, 3, 1, 2]),
        )
    return g


def subgraph(dtype: str) -> Graph:
    """Returns a graph of a subgraph that is called with two filters, weights of its prefixes."""
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType, Weight, ops

    gpu, kind = DeviceRef.GPU(), DType[dtype]
    image = TensorType(kind, (1, 9, 9, 64), gpu)
    kernels: Any = {"custom_extensions": [maxconv.library_path()]}
    with Graph(f"subgraph_{dtype}", input_types=[image], **kernels) as g:
        with g.add_subgraph("convolution", input_types=[image], **kernels) as block:
            filter = Weight("filter", kind, BLOCK_FILTER.shape, gpu, _placeholder=True)
            x = block.inputs[0].tensor
            block.output(maxconv.conv2d(x, filter, padding=1, filter_layout="FCRS"))
        (y,) = g.inputs
        for prefix in BLOCK_PREFIXES:
            (y,) = ops.call(block, y, prefix=prefix)
        g.output(y)
    return g


def graph_weights(name: str, dtype: str) -> dict[str, Any]:
    """Returns the weights of the graph that the function ``name`` makes, to load it with."""
    from max.driver import CPU

    if name == "subgraph":
        held = to_device(BLOCK_FILTER, dtype, CPU())
        return {f"{prefix}filter": held for prefix in BLOCK_PREFIXES}
    return layer_weights(dtype) if name == "layers" else {}


def layer_weights(dtype: str) -> dict[str, Any]:
    """Returns the weights of ``layers``, to load it with."""
    from max.driver import CPU

    return {n: to_device(w, dtype, CPU()) for n, w in LAYERS.items() if n.startswith("w")}


def attention(dtype: str) -> Graph:
    """Returns a graph of MAX's attention over wide heads, which ``override_max`` takes over.

    Inputs: queries of any images with two heads, keys and values; the same of one image with one
    head. Outputs: the attention of both, of the scale 1/16.
    """
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType
    from max.nn.attention import MHAMaskVariant
    from max.nn.kernels import flash_attention_gpu

    gpu, kind = DeviceRef.GPU(), DType[dtype]
    types = [
        TensorType(kind, ("n", "queries", 2, 264), gpu),
        *[TensorType(kind, ("n", "keys", 2, 264), gpu)] * 2,
        *[TensorType(kind, (1, "tokens", 1, 512), gpu)] * 3,
    ]
    with maxconv.override_max() as report, Graph(f"attention_{dtype}", input_types=types) as g:
        q, k, v, *one = (value.tensor for value in g.inputs)
        g.output(
            flash_attention_gpu(q, k, v, MHAMaskVariant.NULL_MASK, 0.0625),
            flash_attention_gpu(one[0], one[1], one[2], MHAMaskVariant.NULL_MASK, 0.0625),
        )
    assert len(report.taken) == 2
    return g


def fusions(dtype: str) -> Graph:
    """Returns a small graph, only to be compiled: every op, rank, type, kind of fused work once."""
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType, ops

    gpu, kind = DeviceRef.GPU(), DType[dtype]
    types = [
        TensorType(kind, ("n", "h", "w", 64), gpu),
        TensorType(kind, ("n", "h", "w", 64), gpu),
        TensorType(kind, ("n", "d", "h", "w", 16), gpu),
        TensorType(DType.float32, ("n", "w", 8), gpu),
        TensorType(DType.float8_e4m3fn, ("n", "w", 16), gpu),
    ]
    with Graph(f"fusions_{dtype}", input_types=types, kernel_library=maxconv.kernel_library()) as g:
        image, residual, volume, signal, small = (value.tensor for value in g.inputs)
        dense = _integers(3, 3, 64, 64)
        depthwise = _integers(1, 3, 3, 1, 16)
        g.output(
            ops.relu(maxconv.conv2d(image, dense, padding=1, residual=residual)) * residual,
            maxconv.conv3d(volume, depthwise, groups=16).cast(DType.float32),
            maxconv.conv1d(ops.relu(signal) * 2, _integers(1, 8, 12), precision="float32"),
            maxconv.conv1d(signal, _integers(3, 8, 16), config="sm90"),
            maxconv.conv1d(
                small, _integers(3, 16, 16), out_dtype=DType.bfloat16, config="sm90", scale=0.5
            ),
            maxconv.conv1d(
                small, _integers(3, 1, 16), groups=16, out_dtype=DType.float16, config="grouped"
            ),
        )
    return g


def to_device(values: npt.NDArray[Any], dtype: str, device: Device) -> Buffer:
    """Returns a buffer of a storage type, from float32 values that the type holds exactly."""
    from max.driver import Buffer
    from max.dtype import DType

    bits = np.ascontiguousarray(cast_array(values, "float32", dtype))
    return Buffer.from_numpy(bits).view(DType[dtype]).to(device)


def to_float32(buffer: Buffer) -> Floats:
    """Returns a buffer's elements, from any device and of any storage type."""
    from max.driver import CPU
    from max.dtype import DType

    host = buffer.to(CPU())
    bits = host.view(DType.uint16) if host.dtype == DType.bfloat16 else host
    return cast_array(bits.to_numpy(), host.dtype.name, "float32")


def rounded(values: npt.NDArray[np.float64], dtype: str) -> Floats:
    """Returns values as the storage type holds them: float32 first, then once more if it is wider.

    Exact sums of integers below 2**24 lose nothing in float32.
    """
    return cast_array(cast_array(values.astype(np.float32), "float32", dtype), dtype, "float32")
