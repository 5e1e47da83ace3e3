"""Convolutions of interleaved images in a MAX graph on a CPU, exactly, and what is refused."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.host.kernel_checks import dot_kernels
from tests.interop.graphs import Source, input_type
from tests.reference import conv_reference

import maxconv
from maxconv._blocked_filter import array_of_krsc
from maxconv._blocks import BLOCK_LAYOUTS
from maxconv._fields import BLOCKED_FILTERS
from maxconv._packing import float32_to_bfloat16

if TYPE_CHECKING:
    from max.engine import Model
    from max.graph import Graph, Module, TensorValue

Array = npt.NDArray[Any]

C, K = 64, 32
ZERO, OUT_ZERO, RESIDUAL_ZERO = 131, 40, 7

#: Powers of two: products with them are exact.
SCALES = np.float32(2.0) ** -np.arange(13, 13 + K, dtype=np.float32).clip(13, 16)
OUT_SCALE, BETA = 0.5, 0.25

RNG = np.random.default_rng(11)
FILTER = RNG.integers(-128, 128, (K, 3, 3, C)).astype(np.int8)
COLOURS = RNG.integers(-128, 128, (K, 3, 3, 3)).astype(np.int8)
SMALL = RNG.integers(-3, 4, (K, 3, 3, C)).astype(np.float32)
BIAS = RNG.integers(-40, 40, K).astype(np.float32)

#: From and to: the pairings of MegEngine's CUTLASS kernels that are not one layout, and others.
MIXED = [
    ("NC/4HW4", "NC/32HW32"),
    ("NC/32HW32", "NC/4HW4"),
    ("C/4HWN4", "NC/16HW16"),
    ("NHWC", "C/32HWN32"),
    ("C/16HWN16", "NHWC"),
    ("NC/16HW16", "NCHW"),
    ("NCHW", "NC/4HW4"),
]

#: How the filter is given, and its layout.
FILTERS: list[tuple[Any, str]] = [
    *((array_of_krsc(FILTER, block), name) for name, block in BLOCKED_FILTERS.items()),
    (maxconv.pack_filter(array_of_krsc(FILTER, 16), "C/16RSK16"), "RSCF"),
]


def placed(value: TensorValue, layout: str) -> TensorValue:
    """An image of channels last in a layout."""
    from max.graph import ops

    if layout == "NCHW":
        return ops.permute(value, [0, 3, 1, 2])
    if layout == "NHWC":
        return value
    of = BLOCK_LAYOUTS[layout]
    return maxconv.interleave(value, of.channels, batch_last=of.batch_last)


def last(array: Array, layout: str) -> Array:
    """What the graph gave, with the channels last."""
    if layout == "NHWC":
        return array
    if layout == "NCHW":
        return np.moveaxis(array, 1, 3)
    of = BLOCK_LAYOUTS[layout]
    order = (3, 1, 2, 0, 4) if of.batch_last else (0, 2, 3, 1, 4)
    moved: Array = array.transpose(order)
    return moved.reshape(*moved.shape[:3], -1)


def build(name: str, module: Module | None = None) -> Graph:
    """Every layout, pairs of them, and filters that are known, loaded and computed."""
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType, Weight

    blocks = array_of_krsc(FILTER, 16)
    types = [
        input_type(("n", "h", "w", C), "int8"),
        input_type(("n", "h", "w", C), "uint8"),
        input_type(("n", "h", "w", 4), "int8"),
        input_type(("n", "h", "w", K), "int8"),
        input_type(("n", "h", "w", C), "bfloat16"),
        TensorType(DType.int8, blocks.shape, DeviceRef.CPU()),
    ]
    library = maxconv.kernel_library()
    with Graph(name, input_types=types, kernel_library=library, module=module) as graph:
        x, unsigned, colours, residual, half, computed = (value.tensor for value in graph.inputs)
        loaded = graph.add_weight(Weight("blocks", DType.int8, blocks.shape, DeviceRef.CPU()))
        wide: dict[str, Any] = {"padding": 1, "out_dtype": DType.float32}
        krsc: dict[str, Any] = {"filter_layout": "KRSC", **wide}
        small: dict[str, Any] = {"input_layout": "NC/16HW16", "filter_layout": "KRSC", "padding": 1}
        outputs = [
            maxconv.conv2d(placed(x, layout), FILTER, input_layout=layout, **krsc)
            for layout in BLOCK_LAYOUTS
        ]
        outputs += [
            maxconv.conv2d(
                placed(x, source), FILTER, input_layout=source, output_layout=target, **krsc
            )
            for source, target in MIXED
        ]
        outputs += [
            maxconv.conv2d(
                placed(x, "C/4HWN4"), filter, input_layout="C/4HWN4", filter_layout=layout, **wide
            )
            for filter, layout in (*FILTERS, (loaded, "C/16RSK16"), (computed, "C/16RSK16"))
        ]
        outputs.append(maxconv.conv2d(x, computed, filter_layout="C/16RSK16", **wide))
        outputs.append(
            maxconv.conv2d(placed(colours, "NC/4HW4"), COLOURS, input_layout="NC/4HW4", **krsc)
        )
        outputs.append(
            maxconv.conv2d(
                placed(unsigned, "NC/16HW16"),
                FILTER,
                zero_point=ZERO,
                scale=SCALES,
                bias=BIAS,
                activation="relu",
                residual=placed(residual, "C/4HWN4"),
                beta=BETA,
                residual_zero_point=RESIDUAL_ZERO,
                out_dtype=DType.int8,
                out_scale=OUT_SCALE,
                out_zero_point=OUT_ZERO,
                output_layout="C/4HWN4",
                **small,
            )
        )
        # Fused behind, and a chain: the second convolution reads what the first one stored.
        rounded = maxconv.quantize_linear(
            maxconv.conv2d(
                placed(x, "NC/16HW16"), FILTER, scale=SCALES, out_dtype=DType.float32, **small
            ),
            OUT_SCALE,
        )
        outputs.append(
            maxconv.deinterleave(
                maxconv.conv2d(rounded, FILTER[..., :K], input_layout="NC/16HW16", **krsc)
            )
        )
        kernels = [None] if dot_kernels("bfloat16") else []
        outputs += [
            maxconv.conv2d(
                placed(half, "C/16HWN16"),
                SMALL,
                input_layout="C/16HWN16",
                output_layout="NC/32HW32",
                config=config,
                **krsc,
            )
            for config in ("reference", *kernels)
        ]
        graph.output(*outputs)
    return graph


EXTENDED = {"interleave_cpu": Source(build, lambda: {"blocks": array_of_krsc(FILTER, 16)})}


def sums_of(x: Array, krsc: Array) -> npt.NDArray[np.float64]:
    """Exact sums, with padding 1."""
    one = (1, 1)
    return conv_reference(
        x.astype(np.float64),
        krsc.astype(np.float64),
        stride=one,
        dilation=one,
        pad_before=one,
        pad_after=one,
        groups=1,
    )


@pytest.mark.extended
def test_integers_in_blocks(further_models: dict[str, Model], rng: np.random.Generator) -> None:
    from max.driver import Buffer
    from max.dtype import DType

    x = rng.integers(-128, 128, (3, 5, 7, C)).astype(np.int8)
    unsigned = rng.integers(0, 256, (3, 5, 7, C)).astype(np.uint8)
    colours = rng.integers(-128, 128, (3, 5, 7, 4)).astype(np.int8)
    residual = rng.integers(-128, 128, (3, 5, 7, K)).astype(np.int8)
    half = rng.integers(-4, 5, (3, 5, 7, C)).astype(np.float32)
    bits = Buffer.from_numpy(float32_to_bfloat16(half)).view(DType.bfloat16)
    found = iter(
        output.to_numpy()
        for output in further_models["interleave_cpu"].execute(
            x, unsigned, colours, residual, bits, array_of_krsc(FILTER, 16)
        )
    )
    wanted = sums_of(x, FILTER)
    for layout in BLOCK_LAYOUTS:
        np.testing.assert_array_equal(last(next(found), layout), wanted, err_msg=layout)
    for source, target in MIXED:
        np.testing.assert_array_equal(last(next(found), target), wanted, err_msg=source)
    for _ in range(len(FILTERS) + 2):
        np.testing.assert_array_equal(last(next(found), "C/4HWN4"), wanted)
    np.testing.assert_array_equal(next(found), wanted)
    filled = np.pad(COLOURS, [(0, 0)] * 3 + [(0, 1)])
    np.testing.assert_array_equal(last(next(found), "NC/4HW4"), sums_of(colours, filled))
    values = sums_of(unsigned.astype(np.int64) - ZERO, FILTER) * SCALES + BIAS
    values = np.maximum(values, 0) + BETA * (residual.astype(np.float64) - RESIDUAL_ZERO)
    small = last(next(found), "C/4HWN4")
    np.testing.assert_array_equal(small, np.clip(np.rint(values / OUT_SCALE) + OUT_ZERO, -128, 127))
    assert small.dtype == np.int8
    assert len(np.unique(small)) > 100
    steps = np.clip(np.rint(wanted * SCALES / OUT_SCALE), -128, 127)
    np.testing.assert_array_equal(next(found), sums_of(steps, FILTER[..., :K]))
    for output in found:
        np.testing.assert_array_equal(last(output, "NC/32HW32"), sums_of(half, SMALL))


INPUTS: dict[str, tuple[str, tuple[int | str, ...]]] = {
    "x": ("int8", (2, 4, 6, 7, 16)),
    "batch_last": ("uint8", (4, 6, 7, 2, 16)),
    "symbolic": ("bfloat16", ("c", "h", "w", "n", 4)),
    "last": ("int8", (2, 6, 7, 64)),
    "w": ("int8", (4, 3, 3, 32, 16)),
    "w_few": ("int8", (3, 3, 60, 32)),
    "residual": ("float32", (1, 4, 5, 2, 32)),
}


def graph_of_inputs() -> tuple[Graph, dict[str, TensorValue]]:
    from max.graph import Graph

    types = [input_type(shape, dtype) for dtype, shape in INPUTS.values()]
    graph = Graph("interleaved", input_types=types, kernel_library=maxconv.kernel_library())
    return graph, {name: value.tensor for name, value in zip(INPUTS, graph.inputs, strict=True)}


def convolve(values: dict[str, TensorValue], **given: Any) -> TensorValue:
    """A convolution; a value that is the name of an input stands for that input."""
    from max.dtype import DType

    whole: dict[str, Any] = {"x": "x", "filter": FILTER, "filter_layout": "KRSC", **given}
    named: dict[str, Any] = {
        n: values[v] if isinstance(v, str) and v in values else v for n, v in whole.items()
    }
    return maxconv.conv2d(**{"input_layout": "NC/16HW16", "out_dtype": DType.float32, **named})


def test_types_of_results() -> None:
    from max.dtype import DType
    from max.graph import DeviceRef, TensorType

    graph, values = graph_of_inputs()
    host = DeviceRef.CPU()
    with graph:
        plain = convolve(values, filter="w", filter_layout="C/16RSK16")
        assert plain.type == TensorType(DType.float32, (2, 2, 4, 5, 16), host)
        mixed = convolve(values, residual="residual", output_layout="C/32HWN32")
        assert mixed.type == TensorType(DType.float32, (1, 4, 5, 2, 32), host)
        to_first = convolve(values, output_layout="NCHW", stride=(2, 3), padding=1)
        assert [int(n) for n in to_first.shape] == [2, 32, 3, 3]
        small: dict[str, Any] = {"out_dtype": "uint8", "out_scale": 0.5, "zero_point": 9}
        images = convolve(values, x="batch_last", input_layout="C/16HWN16", **small)
        assert images.type == TensorType(DType.uint8, (2, 4, 5, 2, 16), host)
        symbolic = convolve(
            values, x="symbolic", filter=SMALL, input_layout="C/4HWN4", padding="same"
        )
        assert [symbolic.shape[i] for i in (0, 3, 4)] == [8, "n", 4]
        images = maxconv.interleave(values["last"], 32, batch_last=True)
        assert [int(n) for n in images.shape] == [2, 6, 7, 2, 32]
        back = maxconv.deinterleave(images, batch_last=True)
        assert [int(n) for n in back.shape] == [2, 6, 7, 64]


#: What is changed of a call that is right, and the message.
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"x": "last"},
        ValueError,
        "input: shape (2, 6, 7, 64) is not in NC/16HW16; [batch, channels / 16, h, w, 16] is allow",
    ),
    (
        {"input_layout": "C/32HWN32"},
        ValueError,
        "input: shape (2, 4, 6, 7, 16) is not in C/32HWN32; [channels / 32, h, w, batch, 32] is",
    ),
    ({"filter": FILTER[:8]}, ValueError, "filter: 8 filters are not supported in NC/16HW16; multi"),
    (
        {"filter": FILTER[:24], "output_layout": "C/32HWN32"},
        ValueError,
        "filter: 24 filters are not supported in C/32HWN32; multiples of 32 are allowed",
    ),
    (
        {"filter": "w_few", "filter_layout": "RSCF"},
        ValueError,
        "filter: 60 channels of a filter that is computed are not supported in NC/16HW16; multipl",
    ),
    ({"filter": FILTER[..., :48]}, ValueError, "filter: 48 channels a group do not match the inp"),
    ({"groups": 2}, ValueError, "groups: 2 is not supported in NC/16HW16; 1 is allowed"),
    (
        {"upsample": 2, "output_layout": "NHWC"},
        ValueError,
        "upsample: (2, 2) is not supported from NC/16HW16 to NHWC; 1 is allowed",
    ),
    (
        {"residual": "residual"},
        ValueError,
        "residual: shape (1, 4, 5, 2, 32) must equal the output's shape (2, 2, 4, 5, 16)",
    ),
    (
        {"config": "implicit_gemm"},
        ValueError,
        "config: 'implicit_gemm' is not a kernel of device cpu:0 for interleaved layouts; auto,",
    ),
    (
        {"filter": "w", "filter_layout": "C/4RSK4"},
        ValueError,
        "filter: shape (4, 3, 3, 32, 16) is not in layout C/4RSK4; [channels / 4, r, s, filters,",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD)
def test_what_is_not_allowed(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    graph, values = graph_of_inputs()
    with graph, pytest.raises(error, match=re.escape(message)):
        convolve(values, **changes)
