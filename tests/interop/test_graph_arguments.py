"""Types of the graph functions, and every argument that they refuse before anything is compiled."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.interop.graphs import Source, input_type
from tests.reference import conv_reference

import maxconv
from maxconv import _tuned
from maxconv._machine import kernel_features
from maxconv._packing import bfloat16_to_float32, float32_to_bfloat16

if TYPE_CHECKING:
    from max.driver import Buffer
    from max.engine import Model
    from max.graph import Graph, Module

Array = npt.NDArray[Any]

W = np.ones((4, 3, 3, 6), np.float32)
RSCF = np.ones((3, 3, 6, 4), np.float32)

INPUTS: dict[str, tuple[str, tuple[int | str, ...]]] = {
    "x": ("float32", (2, 8, 9, 6)),
    "symbolic": ("float32", ("n", "h", 9, "c")),
    "brain": ("bfloat16", (2, 8, 9, 6)),
    "double": ("float64", (2, 8, 9, 6)),
    "bytes": ("uint8", (2, 8, 9, 6)),
    "flat": ("float32", (8, 9, 6)),
    "gpu": ("float32", (2, 8, 9, 6)),
    "gpu_float8": ("float8_e4m3fn", (2, 8, 9, 6)),
    "float8": ("float8_e4m3fn", (2, 8, 9, 6)),
    "gpu_int8": ("int8", (2, 8, 9, 6)),
    "gpu_float8_wide": ("float8_e5m2", (2, 8, 9, 6)),
    "integers": ("int8", (2, 8, 9, 6)),
    "w": ("float32", (3, 3, 6, 4)),
    "w_brain": ("bfloat16", (3, 3, 6, 4)),
    "w_symbolic": ("float32", (3, "s", 6, 4)),
    "w_gpu": ("float32", (3, 3, 6, 4)),
    "bias": ("float32", (4,)),
    "bias_brain": ("bfloat16", (4,)),
    "bias_gpu_half": ("float16", (4,)),
    "residual": ("float32", (2, 6, 7, 4)),
    "residual_brain": ("bfloat16", (2, 6, 7, 4)),
}


@pytest.fixture(scope="module")
def graph() -> Graph:
    """A graph to which nothing is ever added: every call in this module that uses it raises."""
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType

    types = [
        TensorType(DType[dtype], shape, DeviceRef.GPU() if "gpu" in name else DeviceRef.CPU())
        for name, (dtype, shape) in INPUTS.items()
    ]
    return Graph("bad", input_types=types, kernel_library=maxconv.kernel_library())


# A value that is the name of an input stands for that input.
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": np.ones((2, 8, 9, 6))}, TypeError, "input: a ndarray is not a graph value; .*constant"),
    ({"x": "flat"}, ValueError, r"input: shape \(8, 9, 6\) has rank 3; .* rank 4: \[batch, h, w"),
    ({"x": "double"}, ValueError, "input: dtype float64 is not supported; float32, bfloat16, fl"),
    ({"x": "bytes"}, ValueError, "out_dtype: None stands for the input's uint8, which is no type"),
    ({"x": "gpu", "filter": "w"}, ValueError, "filter: device cpu:0 is not the input's; gpu:0 is"),
    ({"x": "gpu", "bias": "bias"}, ValueError, "bias: device cpu:0 is not the input's; gpu:0 is"),
    ({"x": "gpu", "residual": "residual"}, ValueError, "residual: device cpu:0 .* gpu:0 is needed"),
    ({"x": "gpu", "filter": np.ones((3, 3, 5, 4))}, ValueError, "filter: 5 channels a group .* 6"),
    ({"x": "gpu", "filter": np.ones((3, 3, 6))}, ValueError, r"filter: shape \(3, 3, 6\) has ra"),
    ({"x": "gpu", "groups": 4}, ValueError, "input: 6 channels are not divisible by groups=4|filt"),
    ({"x": "gpu", "groups": 0}, ValueError, "groups: 0 is not positive; it must be at least 1"),
    (
        {"x": "gpu", "config": "pointwise"},
        ValueError,
        "config: 'pointwise' is not a kernel of device gpu:0; auto, gemv, stem, window, diagona",
    ),
    ({"config": "sm90"}, ValueError, "config: 'sm90' is not a kernel of device cpu:0; auto, dept"),
    ({"filter": "w_gpu"}, ValueError, "filter: device gpu:0 is not the input's; cpu:0 is needed"),
    ({"filter": "w_brain"}, ValueError, "filter: dtype bfloat16 does not match; float32 is the i"),
    ({"x": "brain", "filter": "w"}, ValueError, "filter: dtype float32 does not match; bfloat16"),
    ({"filter": "w_symbolic"}, ValueError, r"filter: shape \(3, s, 6, 4\) has a symbolic spatial"),
    ({"filter": "bias"}, ValueError, r"filter: shape \(4,\) has rank 1; .* RSCF has rank 4"),
    ({"filter": [[1.0]]}, TypeError, "filter: a list is not an array; a numpy array or an object"),
    ({"filter": RSCF.astype(int)}, ValueError, "filter: dtype int64 is not floating point; float"),
    ({"filter": np.ones((3, 3, 5, 4))}, ValueError, "filter: 5 channels a group .* 6 channels"),
    ({"filter_layout": "HWIO"}, ValueError, "filter_layout: 'HWIO' .* KRSC, RSCF, FCRS, C/4RSK4"),
    ({"filter_layout": None}, TypeError, "filter_layout: None is a NoneType; a FilterLayout or"),
    ({"filter_layout": maxconv.FilterLayout.QRSCF}, ValueError, "filter_layout: 'QRSCF' .* RSCF"),
    (
        {"filter": maxconv.pack_filter(W, "KRSC"), "groups": 2},
        ValueError,
        "groups: 2 is not what the filter was packed for; 1 is allowed",
    ),
    (
        {"filter": maxconv.pack_filter(W, "KRSC", dtype="float16")},
        ValueError,
        "filter: dtype float16 does not match; float32 is the input's",
    ),
    (
        {"filter": maxconv.pack_filter(np.ones((4, 3, 6)), "KSC")},
        ValueError,
        "filter: the packed filter has 1 spatial dimensions; 2 are needed",
    ),
    (
        {"input_layout": "CHWN"},
        ValueError,
        "input_layout: 'CHWN' .*; NHWC, NCHW, NC/4HW4, NC/16HW16, NC/32HW32, C/4HWN4, C/16HWN",
    ),
    ({"input_layout": 0}, TypeError, "input_layout: 0 is a int; a ConvInputLayout or one of NHWC"),
    ({"stride": (0, 1)}, ValueError, r"stride: \(0, 1\) has a non-positive entry; every stride mu"),
    ({"stride": 1.5}, TypeError, "stride: 1.5 is a float; an integer or a tuple of 2 integers"),
    ({"dilation": (1, 1, 1)}, ValueError, r"dilation: \(1, 1, 1\) has 3 entries; 2 are allowed"),
    (
        {"padding": (1, 1)},
        ValueError,
        r"padding: \(1, 1\) has 2 entries; 4 are allowed: \(h_before",
    ),
    ({"padding": (0, -1, 0, 0)}, ValueError, r"padding: \(0, -1, 0, 0\) has a negative entry"),
    ({"padding": "full"}, ValueError, "padding: 'full' is not a name of a padding; 'same', 'valid"),
    ({"groups": 4}, ValueError, "input: 6 channels are not divisible by groups=4"),
    ({"groups": True}, TypeError, "groups: True holds a bool; integers are allowed"),
    (
        {"dilation": (4, 1)},
        ValueError,
        "filter: h extent 3 with dilation 4 spans 9 but the padded input has only 8; enlarge the",
    ),
    ({"bias": np.ones(3)}, ValueError, "bias: 3 elements, but there are 4 filters"),
    ({"bias": np.ones((1, 4))}, ValueError, r"bias: shape \(1, 4\) has rank 2; rank 1 is allowed"),
    ({"bias": "bias_brain"}, ValueError, "bias: dtype bfloat16 does not match; float32 is allowed"),
    ({"bias": 1.0}, TypeError, "bias: a float is not an array; a numpy array or an object with"),
    ({"activation": "swish"}, ValueError, "activation: 'swish' is not an activation; relu, relu6"),
    ({"final_activation": 3}, TypeError, "final_activation: 3 is a int; relu, relu6, leaky_relu"),
    ({"residual": "x"}, ValueError, r"residual: shape \(2, 8, 9, 6\) must equal .* \(2, 6, 7, 4\)"),
    ({"residual": "bias"}, ValueError, r"residual: shape \(4,\) must equal the output's shape"),
    (
        {"residual": "residual_brain"},
        ValueError,
        "residual: dtype bfloat16 does not match; float32",
    ),
    ({"residual": 1}, TypeError, "residual: a int is not an array; a numpy array or an object"),
    ({"residual": "residual", "beta": "1"}, TypeError, "beta: '1' is a str; a number is allowed"),
    ({"beta": 0.5}, ValueError, "beta: 0.5 multiplies the residual, but there is none; 1 is allo"),
    ({"out_dtype": "int8"}, ValueError, "out_scale: None beside out_dtype=int8; a positive number"),
    ({"out_dtype": "int32"}, ValueError, "out_dtype: dtype int32 is not supported; float32, bfloa"),
    ({"out_scale": 0.5}, ValueError, "out_scale: 0.5 beside an output of float32; None is allowed"),
    ({"out_dtype": "uint8", "out_scale": -1}, ValueError, "out_scale: -1.0 is not allowed; posit"),
    ({"out_dtype": "uint8", "out_scale": 1e-50}, ValueError, "out_scale: 1e-50 is not allowed"),
    ({"out_dtype": "uint8", "out_scale": "1"}, TypeError, "out_scale: '1' is a str; a number is"),
    (
        {"out_dtype": "uint8", "out_scale": 1, "out_zero_point": -1},
        ValueError,
        "out_zero_point: -1 is not allowed beside uint8; 0 to 255 are",
    ),
    ({"zero_point": 1}, ValueError, "zero_point: 1 is not allowed beside float32; 0 to 0 are"),
    ({"zero_point": 0.5}, TypeError, "zero_point: 0.5 holds a float; integers are allowed"),
    (
        {"x": "integers", "out_dtype": "float32", "zero_point": 128},
        ValueError,
        "zero_point: 128 is not allowed beside int8; -128 to 127 are",
    ),
    (
        {"x": "gpu_int8", "out_dtype": "int8"},
        ValueError,
        "out_scale: None beside out_dtype=int8; a positive number is needed",
    ),
    (
        {"config": "fast"},
        ValueError,
        "config: 'fast' is not a kernel of device cpu:0; auto, depthw",
    ),
    ({"config": 1}, TypeError, "config: 1 is a int; None or one of auto, depthwise, grouped"),
    ({"scale": np.ones(3)}, ValueError, "scale: 3 elements, but there are 4 filters"),
    ({"scale": "bias_brain"}, ValueError, "scale: dtype bfloat16 does not match; float32 is allow"),
    ({"scale": True}, TypeError, "scale: a bool is not an array; a numpy array or an object with"),
    ({"precision": "ieee"}, ValueError, "precision: 'ieee' is not a precision of float32 product"),
    ({"precision": None}, TypeError, "precision: None is a NoneType; one of tf32, float32 is all"),
    (
        {"x": "float8"},
        ValueError,
        "input: dtype float8_e4m3fn on device cpu:0 is not supported; on a CPU float32, bfloat16, "
        "float16, int8, uint8 are allowed, on a GPU float32, bfloat16, float16, float8_e4m3fn, "
        "int8 and uint8, and on one of compute capability 9.0, 10.0 or 10.3 float8_e5m2",
    ),
    ({"x": "integers"}, ValueError, "out_dtype: None stands for the input's int8, which is no typ"),
    ({"x": "gpu_int8"}, ValueError, "out_dtype: None stands for the input's int8, which is no typ"),
    (
        {"x": "gpu_int8", "filter": RSCF * 128, "out_dtype": "bfloat16"},
        ValueError,
        "filter: a value of magnitude 128 is beyond int8; values up to 127 are allowed",
    ),
    (
        {"x": "gpu_float8_wide", "filter": RSCF * 61440, "out_dtype": "bfloat16"},
        ValueError,
        "filter: a value of magnitude 61440 is beyond float8_e5m2; values up to 57344 are allowed",
    ),
    (
        {"x": "gpu_int8", "config": "winograd", "out_dtype": "bfloat16"},
        ValueError,
        "config: 'winograd' is not a kernel of device gpu:0; auto, gemv, ",
    ),
    ({"x": "gpu_float8"}, ValueError, "out_dtype: None stands for the input's float8_e4m3fn, whi"),
    (
        {"x": "gpu_float8", "filter": RSCF * 500, "out_dtype": "bfloat16"},
        ValueError,
        "filter: a value of magnitude 500 is beyond float8_e4m3fn; values up to 448 are allowed",
    ),
    (
        {"x": "gpu_float8", "filter": "w_gpu", "out_dtype": "bfloat16"},
        ValueError,
        "filter: dtype float32 does not match; float8_e4m3fn is the input's",
    ),
    (
        {"x": "gpu_float8", "bias": "bias_gpu_half", "out_dtype": "bfloat16"},
        ValueError,
        "bias: dtype float16 does not match; bfloat16 or float32 is allowed for this input",
    ),
]


@pytest.mark.parametrize(("changes", "error", "words"), BAD)
def test_bad_arguments(
    graph: Graph, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    values = dict(zip(INPUTS, (value.tensor for value in graph.inputs), strict=True))
    arguments: dict[str, Any] = {"x": "x", "filter": RSCF} | changes
    for name, value in arguments.items():
        if isinstance(value, str) and value in values:
            arguments[name] = values[value]
    with graph, pytest.raises(error, match=f"^{words}") as caught:
        maxconv.conv2d(**arguments)
    assert type(caught.value) is error


def test_a_graph_without_the_kernels() -> None:
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType

    types = [TensorType(DType.float32, (1, 4, 4, 6), DeviceRef.CPU())]
    with Graph("bare", input_types=types) as bare:
        for function in (maxconv.conv2d, maxconv.conv2d_transpose):
            with pytest.raises(
                ValueError,
                match=r"^graph: 'bare' does not know maxconv's ops; build it with Graph\(\.\.\., "
                r"kernel_library=maxconv\.kernel_library\(\)\) or .*maxconv\.library_path\(\)",
            ):
                function(bare.inputs[0].tensor, np.ones((3, 3, 6, 6), np.float32))
    with pytest.raises(LookupError, match="No graph found"):
        maxconv.conv2d(bare.inputs[0].tensor, W)


def test_the_kernels_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading what a library has takes MAX seconds, which each graph would wait for."""
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, KernelLibrary, TensorType

    types = [TensorType(DType.float32, (1, 4, 4, 6), DeviceRef.CPU())]
    read: list[str] = []
    contains = KernelLibrary.__contains__

    def counted(library: KernelLibrary, kernel: str) -> bool:
        read.append(kernel)
        return contains(library, kernel)

    for name in ("first", "second"):
        with Graph(name, input_types=types, kernel_library=maxconv.kernel_library()) as graph:
            maxconv.conv2d(graph.inputs[0].tensor, np.ones((3, 3, 6, 6), np.float32))
        monkeypatch.setattr(KernelLibrary, "__contains__", counted)
    assert not read


@pytest.mark.parametrize(("rank", "name"), [(1, "conv1d"), (3, "conv3d")])
def test_other_ranks_name_their_own_dimensions(graph: Graph, rank: int, name: str) -> None:
    function = getattr(maxconv, name)
    x = graph.inputs[list(INPUTS).index("x")].tensor
    w = np.ones((2,) * rank + (6, 4), np.float32)
    with graph:
        expected = {1: r"rank 3: \[batch, w, channels\]", 3: r"rank 5: \[batch, d, h, w, channels"}
        with pytest.raises(ValueError, match=expected[rank]):
            function(x, w)
        with pytest.raises(ValueError, match="filter_layout: 'RSCF' is not a layout"):
            function(x, w, filter_layout=maxconv.FilterLayout.RSCF)


def test_what_symbols_may_turn_out_to_be_is_not_refused() -> None:
    from max.dtype import DType
    from max.graph import DeviceRef, Dim, Graph, TensorType

    cpu = DeviceRef.CPU()
    types = [
        TensorType(DType.float32, shape, cpu)
        for shape in (("n", "h", 9, "c"), (3, 3, "cg", "k"), ("j",), ("a", "b", 7, "k"))
    ]
    with Graph("symbols", input_types=types, kernel_library=maxconv.kernel_library()) as g:
        x, w, bias, residual = (value.tensor for value in g.inputs)
        y = maxconv.conv2d(x, w, bias=bias, residual=residual, groups=2)
        assert y.shape[0] == Dim("n")
        assert y.shape[2:] == [7, Dim("k")]
        assert y.shape[1].substitute({"h": 12}) == 10
        # MAX must not be asked for a negative size, for then it fails before the op can explain.
        assert y.shape[1].substitute({"h": 1}) == 0
        padded = maxconv.conv2d(x, w, padding=(1, 1, 1, 1), groups=2)
        assert padded.shape == [Dim("n"), Dim("h"), 9, Dim("k")]


def bits(buffer: Any) -> npt.NDArray[np.float32]:
    """Reads a bfloat16 buffer."""
    from max.dtype import DType

    return bfloat16_to_float32(buffer.view(DType.uint16).to_numpy())


TYPES_RNG = np.random.default_rng(5)
# What the graph of types computes with, in float32: activation, filter, bias, residual.
TYPED = {
    name: TYPES_RNG.standard_normal(shape).astype(np.float32)
    for name, shape in {
        "x": (2, 7, 8, 12),
        "w": (20, 3, 3, 12),
        "bias": (20,),
        "r": (2, 7, 8, 20),
        # Groups of 4, whose filters share panels.
        "narrow": (48, 3, 3, 4),
    }.items()
}


def as_bfloat16(name: str) -> Buffer:
    """One of ``TYPED``, rounded."""
    from max.driver import Buffer
    from max.dtype import DType

    return Buffer.from_numpy(float32_to_bfloat16(TYPED[name])).view(DType.bfloat16)


def build(name: str, module: Module) -> Graph:
    """A graph of convolutions of bfloat16 and float16."""
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType, Weight, ops

    cpu = DeviceRef.CPU()
    w, bias = TYPED["w"], TYPED["bias"]
    types = [
        TensorType(DType.bfloat16, ("n", "h", "w", 12), cpu),
        TensorType(DType.bfloat16, TYPED["r"].shape, cpu),
        TensorType(DType.float16, ("n", "h", "w", 12), cpu),
    ]
    same: dict[str, Any] = {"filter_layout": "KRSC", "padding": "same"}
    library = maxconv.kernel_library()
    with Graph(name, input_types=types, kernel_library=library, module=module) as graph:
        xb, rb, xh = (value.tensor for value in graph.inputs)
        weight = Weight("w", DType.bfloat16, w.shape, cpu)
        narrow = Weight("narrow", DType.bfloat16, TYPED["narrow"].shape, cpu)
        graph.output(
            maxconv.conv2d(xb, w, residual=rb, beta=-0.5, **same),
            maxconv.conv2d(xb, weight, **same),
            maxconv.conv2d(xb, as_bfloat16("w"), bias=bias, out_dtype=DType.float32, **same),
            maxconv.conv2d(xh, w, activation="relu", **same),
            maxconv.conv2d(ops.concat([xb] * 4, axis=-1), narrow, groups=12, **same),
        )
    return graph


GRAPHS = {"types": Source(build, lambda: {name: as_bfloat16(name) for name in ("w", "narrow")})}


def test_types(models: dict[str, Model]) -> None:
    """bfloat16 and float16 in, float32 sums, one rounding; and a wider output, and a wider bias."""
    from max.dtype import DType

    x, w, bias, *_ = TYPED.values()
    outputs = models["types"].execute(as_bfloat16("x"), as_bfloat16("r"), x.astype(np.float16))
    assert [o.dtype for o in outputs] == [
        DType.bfloat16, DType.bfloat16, DType.float32, DType.float16, DType.bfloat16
    ]  # fmt: skip

    def reference(image: Array, filters: Array, **epilogue: Any) -> Array:
        return conv_reference(
            image, filters, stride=(1, 1), dilation=(1, 1), pad_before=(1, 1), pad_after=(1, 1),
            **epilogue,
        )  # fmt: skip

    exact = {name: bfloat16_to_float32(float32_to_bfloat16(a)) for name, a in TYPED.items()}
    half = (x.astype(np.float16), w.astype(np.float16))
    plain = reference(exact["x"], exact["w"])
    expected = [
        (bits(outputs[0]), plain - 0.5 * exact["r"].astype(np.float64), 2.0**-8),
        (bits(outputs[1]), plain, 2.0**-8),
        (outputs[2].to_numpy(), plain + bias, 2.0**-24),
        (outputs[3].to_numpy(), np.maximum(reference(*half), 0), 2.0**-11),
        (
            bits(outputs[4]),
            reference(np.concatenate([exact["x"]] * 4, axis=-1), exact["narrow"], groups=12),
            2.0**-8,
        ),
    ]
    # 108 products of numbers of size about 1 are summed in float32; the output's type then rounds
    # once, by half a unit in its last place.
    sums = 108 * 4 * math.sqrt(108) * 2.0**-24
    for actual, wanted, rounding in expected:
        np.testing.assert_allclose(actual, wanted, rtol=rounding * 1.001, atol=sums)


@pytest.mark.parametrize("tuned", [None, Path("table")])
def test_an_op_is_told_of_its_cpu_unless_a_table_names_kernels(
    tuned: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table may name a kernel that dispatch does not choose on this CPU."""
    from max.graph import Graph

    monkeypatch.setattr(_tuned, "table_in_use", lambda: tuned)
    library = maxconv.kernel_library()
    types = [input_type((2, 8, 9, 6)), input_type((2, 8, 9, 6), "int8")]
    with Graph("told", input_types=types, kernel_library=library) as graph:
        x, integers = (value.tensor for value in graph.inputs)
        results = [
            maxconv.conv2d(x, RSCF),
            maxconv.conv2d(integers, RSCF.astype(np.int8), out_dtype=x.dtype),
        ]
        graph.output(*results)
    told = re.findall(r"features = (\d+)", str(graph))
    assert told == ([] if tuned else [str(kernel_features())] * len(results))
