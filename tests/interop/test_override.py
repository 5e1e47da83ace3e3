"""``override_max``: MAX's convolutions, in graphs that others build, computed by maxconv."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.interop.graphs import Source
from tests.reference import conv_reference, conv_transpose_reference

import maxconv

if TYPE_CHECKING:
    from max.engine import Model
    from max.graph import Graph, Module, TensorValue

Array = npt.NDArray[Any]


def draw(*shape: int, seed: int) -> Array:
    values: Array = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return values


def reference(function: str, x: Array, f: Array, given: dict[str, Any]) -> Array:
    """The result of a call in float64; ``x`` is channels last, ``f`` in MAX's default layout."""
    rank = x.ndim - 2
    pads = given.get("padding", (0, 0) * rank)
    sizes: dict[str, Any] = {
        "stride": given.get("stride", (1,) * rank),
        "dilation": given.get("dilation", (1,) * rank),
        "pad_before": pads[::2],
        "pad_after": pads[1::2],
    }
    last_first = np.moveaxis(f.astype(np.float64), -1, 0)
    if function == "conv2d_transpose":
        sizes["output_padding"] = given.get("output_paddings", (0, 0))
        y = conv_transpose_reference(x.astype(np.float64), last_first, **sizes)
    else:
        groups = given.get("groups", 1)
        y = conv_reference(x.astype(np.float64), last_first, groups=groups, **sizes)
    bias = given.get("bias")
    result: Array = y if bias is None else y + bias
    return result


BIAS = draw(8, seed=9)

#: A function of ``max.graph.ops``, the shapes of input and filter, and the other arguments.
CALLS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ("conv2d", (2, 7, 9, 5), (3, 3, 5, 8), {}),
    "bias": ("conv2d", (1, 6, 5, 4), (1, 1, 4, 8), {"bias": BIAS}),
    "padded on one side": (
        "conv2d",
        (1, 8, 7, 4),
        (3, 2, 4, 8),
        {"padding": (2, 0, 0, 1), "stride": (2, 1), "bias": BIAS},
    ),
    "dilated": (
        "conv2d",
        (1, 9, 9, 3),
        (3, 3, 3, 8),
        {"dilation": (2, 3), "padding": (2, 2, 3, 3)},
    ),
    "grouped": ("conv2d", (2, 6, 6, 6), (3, 3, 2, 9), {"groups": 3, "padding": (1, 1, 1, 1)}),
    "depthwise": ("conv2d", (1, 8, 8, 8), (5, 5, 1, 8), {"groups": 8, "padding": (2, 2, 2, 2)}),
    "line": ("conv2d", (2, 1, 20, 6), (1, 4, 6, 8), {"padding": (0, 0, 3, 0), "stride": (1, 2)}),
    "volume": (
        "conv3d",
        (1, 4, 6, 5, 3),
        (3, 3, 3, 3, 8),
        {"padding": (2, 0, 1, 1, 1, 1), "stride": (1, 2, 1), "bias": BIAS},
    ),
    "transposed": ("conv2d_transpose", (1, 4, 5, 6), (3, 3, 8, 6), {"stride": (2, 2)}),
    "transposed, cut": (
        "conv2d_transpose",
        (1, 4, 5, 6),
        (4, 4, 8, 6),
        {"stride": (2, 2), "padding": (1, 1, 1, 1)},
    ),
}


def arrays(name: str) -> tuple[Array, Array]:
    """Input and filter of a call."""
    _, x, f, _ = CALLS[name]
    return draw(*x, seed=len(name)), draw(*f, seed=len(name) + 1) / np.float32(np.sqrt(f[-2]))


def call(name: str, x: TensorValue, f: TensorValue) -> TensorValue:
    from max.graph import ops

    function, _, _, given = CALLS[name]
    result: TensorValue = getattr(ops, function)(x, f, **given)
    return result


def input_type(shape: tuple[int | str, ...], kind: str = "float32") -> Any:
    from max.dtype import DType
    from max.graph import DeviceRef, TensorType

    return TensorType(DType[kind], shape, DeviceRef.CPU())


def build_calls(name: str, module: Module) -> Graph:
    """Every call, taken over. MAX's own take half a minute each to compile."""
    from max.graph import Graph

    types = [input_type(shape) for _, x, f, _ in CALLS.values() for shape in (x, f)]
    with (
        Graph(name, input_types=types, module=module) as graph,
        maxconv.override_max() as report,
    ):
        inputs = [value.tensor for value in graph.inputs]
        graph.output(*map(call, CALLS, inputs[::2], inputs[1::2]))
    assert len(report.taken) == len(CALLS)
    assert not report.left
    return graph


LAYOUT_SHAPES: list[tuple[int | str, ...]] = [
    # Input and filter of a convolution, and a bias for all.
    *((2, 5, 7, 9), (8, 5, 3, 3), (8,)),
    # Input and filter of a transposed one.
    *((1, 6, 4, 5), (6, 8, 3, 3)),
    # A residual, and the filter of the convolution that it is added to.
    *((1, 8, 4, 5), (8, 6, 3, 3)),
]


def build_layouts(name: str, module: Module) -> Graph:
    """What MAX compiles for a GPU only: channels first, and an operator with a residual."""
    from max.graph import Graph, ops
    from max.graph.type import ConvInputLayout, FilterLayout

    with (
        Graph(name, input_types=list(map(input_type, LAYOUT_SHAPES)), module=module) as graph,
        maxconv.override_max() as report,
    ):
        x, f, bias, y, g, residual, h = (value.tensor for value in graph.inputs)
        first = ConvInputLayout.NCHW
        convolved = ops.conv2d(x, f, bias=bias, input_layout=first, filter_layout=FilterLayout.FCRS)
        transposed = ops.conv2d_transpose(
            y, g, (2, 1), bias=bias, input_layout=first, filter_layout=FilterLayout.CFRS
        )
        ahead, residual = (ops.permute(value, [0, 2, 3, 1]) for value in (y, residual))
        added = ops.custom(
            "conv2d_residual_add",
            device=x.device,
            values=[ahead, h, residual, bias],
            out_types=[residual.type],
            parameters={
                **{"stride_h": 1, "stride_w": 1, "pad_top": 1, "pad_bottom": 1},
                **{"pad_left": 1, "pad_right": 1, "has_bias": True},
            },
        )[0]
        graph.output(convolved, transposed, added)
    functions = [entry.function for entry in report.taken]
    assert functions == ["conv2d", "conv2d_transpose", "conv2d_residual_add"]
    return graph


def layers() -> list[Any]:
    """Modules of ``max.nn``."""
    from max import nn
    from max.dtype import DType
    from max.graph import DeviceRef

    place: dict[str, Any] = {"dtype": DType.float32, "device": DeviceRef.CPU(), "has_bias": True}
    last_first: dict[str, Any] = {"permute": True, **place}
    return [
        nn.Conv2d(3, 4, 6, padding=1, name="override.a", **last_first),
        nn.Conv2d((3, 2), 4, 6, stride=(2, 1), padding=(1, 0, 2, 1), name="override.b", **place),
        nn.Conv1D(3, 4, 6, padding=(2, 0), dilation=2, name="override.c", **last_first),
        nn.Conv3D(3, 1, 2, 4, 6, padding=(2, 0, 0, 0, 1, 1), name="override.d", **place),
        # MAX builds no graph of it with a bias, and compiles none whose filter is a weight.
        nn.ConvTranspose1d(
            4, 4, 6, stride=2, padding=1, name="override.e", **(place | {"has_bias": False})
        ),
    ]


LAYER_INPUTS: list[tuple[int | str, ...]] = [
    (1, 4, 7, 8),
    (1, 9, 8, 4),
    (2, 4, 12),
    (1, 4, 3, 5, 4),
    (2, 7, 4),
]


def weights() -> dict[str, Array]:
    return {
        name: draw(*map(int, weight.shape), seed=100 + 10 * i + j)
        for i, layer in enumerate(layers())
        for j, (name, weight) in enumerate(layer.raw_state_dict().items())
    }


def build_layers(name: str, module: Module) -> Graph:
    """Modules whose filters are weights."""
    from max.graph import Graph

    with (
        Graph(name, input_types=list(map(input_type, LAYER_INPUTS)), module=module) as graph,
        maxconv.override_max() as report,
    ):
        inputs = [value.tensor for value in graph.inputs]
        graph.output(*(layer(x) for layer, x in zip(layers(), inputs, strict=True)))
    functions = [entry.function for entry in report.taken]
    assert functions == ["conv2d", "conv2d", "conv2d", "conv3d", "conv2d_transpose"]
    assert report.taken[0].where.startswith("max/nn/conv.py:")
    return graph


#: Input and filters of a block that is called twice.
BLOCK_SHAPES: list[tuple[int | str, ...]] = [(1, 8, 9, 4), (3, 3, 4, 4), (3, 3, 4, 4)]


def build_block(name: str, module: Module) -> Graph:
    """A subgraph, whose filter is an input of its own."""
    from max.graph import Graph, ops

    with (
        maxconv.override_max() as report,
        Graph(name, input_types=list(map(input_type, BLOCK_SHAPES)), module=module) as graph,
    ):
        with graph.add_subgraph(
            "override_inner", input_types=list(map(input_type, BLOCK_SHAPES[:2]))
        ) as block:
            x, f = (value.tensor for value in block.inputs)
            block.output(ops.relu(ops.conv2d(x, f, padding=(1, 1, 1, 1))))
        value, *filters = graph.inputs
        for filter in filters:
            [value] = ops.call(block, value, filter)
        graph.output(value)
    assert len(report.taken) == 1, str(report)
    return graph


OVERRIDDEN = {
    "override_calls": Source(build_calls),
    "override_layouts": Source(build_layouts),
    "override_layers": Source(build_layers, weights),
    "override_block": Source(build_block),
}


def executed(model: Model, *given: Array) -> list[Array]:
    return [np.from_dlpack(output) for output in model.execute(*given)]


def close(actual: Array, expected: Array) -> None:
    """Sums of some hundred products of order one, in float32."""
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-5)


def test_calls_are_right(overridden: dict[str, Model]) -> None:
    given = [array for name in CALLS for array in arrays(name)]
    for name, actual in zip(CALLS, executed(overridden["override_calls"], *given), strict=True):
        function, _, _, others = CALLS[name]
        close(actual, reference(function, *arrays(name), others))


def test_layouts_of_gpus(overridden: dict[str, Model]) -> None:
    x, f, bias, y, g, residual, h = (
        draw(*map(int, shape), seed=40 + i) for i, shape in enumerate(LAYOUT_SHAPES)
    )
    given = (x, f, bias, y, g, residual, h)
    convolved, transposed, added = executed(overridden["override_layouts"], *given)
    x, y, residual = (array.transpose(0, 2, 3, 1) for array in (x, y, residual))
    f, h = (array.transpose(2, 3, 1, 0) for array in (f, h))
    # Of a transposed convolution: [in, out, R, S] becomes [R, S, out, in].
    g = g.transpose(2, 3, 1, 0)
    close(convolved, reference("conv2d", x, f, {"bias": bias}))
    expected = reference("conv2d_transpose", y, g, {"stride": (2, 1), "bias": bias})
    close(transposed, expected.transpose(0, 3, 1, 2))
    close(added, reference("conv2d", y, h, {"padding": (1,) * 4, "bias": bias}) + residual)


def test_layers_are_right(overridden: dict[str, Model]) -> None:
    given = [draw(*map(int, shape), seed=60 + i) for i, shape in enumerate(LAYER_INPUTS)]
    image, other, line, volume, transposed = executed(overridden["override_layers"], *given)
    held = {name.removeprefix("override."): value for name, value in weights().items()}

    def expected(function: str, letter: str, x: Array, f: Array, **others: Any) -> Array:
        return reference(function, x, f, others | {"bias": held.get(f"{letter}.bias")})

    x, f = given[0].transpose(0, 2, 3, 1), held["a.weight"].transpose(2, 3, 1, 0)
    close(image, expected("conv2d", "a", x, f, padding=(1,) * 4).transpose(0, 3, 1, 2))
    pads = {"stride": (2, 1), "padding": (1, 0, 2, 1)}
    close(other, expected("conv2d", "b", given[1], held["b.weight"], **pads))
    x, f = given[2].transpose(0, 2, 1), held["c.weight"].transpose(2, 1, 0)
    dilated = {"padding": (2, 0), "dilation": (2,)}
    close(line, expected("conv2d", "c", x, f, **dilated).transpose(0, 2, 1))
    causal = {"padding": (2, 0, 0, 0, 1, 1)}
    close(volume, expected("conv3d", "d", given[3], held["d.weight"], **causal))
    x, f = given[4][:, None], held["e.weight"][None]
    sizes = {"stride": (1, 2), "padding": (0, 0, 1, 1)}
    close(transposed, expected("conv2d_transpose", "e", x, f, **sizes)[:, 0])


def test_subgraphs(overridden: dict[str, Model]) -> None:
    x, *filters = given = [
        draw(*map(int, shape), seed=80 + i) for i, shape in enumerate(BLOCK_SHAPES)
    ]
    expected = x
    for f in filters:
        expected = np.maximum(reference("conv2d", expected, f, {"padding": (1,) * 4}), 0)
    [actual] = executed(overridden["override_block"], *given)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-4)


def test_eager_tensors() -> None:
    from max.driver import CPU
    from max.experimental import functional
    from max.experimental.tensor import Tensor

    x, f = arrays("plain")
    with maxconv.override_max() as report:
        result = functional.conv2d(
            Tensor.from_dlpack(x).to(CPU()), Tensor.from_dlpack(f).to(CPU()), padding=(1, 1, 1, 1)
        )
        actual = np.from_dlpack(result)
    assert len(report.taken) == 1, str(report)
    close(actual, reference("conv2d", x, f, {"padding": (1,) * 4}))


# What a graph looks like --------------------------------------------------------------------------

SHAPES: dict[str, tuple[int | str, ...]] = {
    "x": ("n", "h", "w", 3),
    "f": (3, 3, 3, 8),
    "first": ("n", 3, "h", "w"),
    "any_x": ("n", "h", "w", "c"),
    "any_f": (3, 3, "g", "k"),
    "video": ("n", "t", "h", "w", 3),
}


def compared(build: Callable[[Any, dict[str, Any]], Any]) -> tuple[str, str, Any]:
    """What a call returns in MAX and when it is taken over, and the report."""
    from max.graph import Graph, ops

    def described() -> str:
        try:
            result = build(ops, values)
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return f"{result.dtype} {list(result.shape)}"

    types = [input_type(shape) for shape in SHAPES.values()]
    with Graph("compared", input_types=types) as graph:
        values = dict(zip(SHAPES, (value.tensor for value in graph.inputs), strict=True))
        before = described()
        with maxconv.override_max() as report:
            after = described()
    return before, after, report


def zeros(*shape: int, dtype: Any = np.float32) -> Array:
    return np.zeros(shape, dtype)


TAKEN: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "smaller than the filter, perhaps": lambda ops, v: ops.conv2d(v["x"], v["f"]),
    "as large": lambda ops, v: ops.conv2d(v["x"], v["f"], padding=(1, 1, 1, 1)),
    "stride": lambda ops, v: ops.conv2d(v["x"], v["f"], (2, 3), (2, 1), (1, 2, 0, 1)),
    "lists": lambda ops, v: ops.conv2d(v["x"], v["f"], [2, 2], padding=[1, 1, 1, 1]),
    "all symbolic": lambda ops, v: ops.conv2d(v["any_x"], v["any_f"]),
    "an array": lambda ops, v: ops.conv2d(v["x"], zeros(3, 3, 3, 4, dtype=np.float64)),
    "a bias": lambda ops, v: ops.conv2d(v["x"], v["f"], bias=zeros(8)),
    "a bias of 64 bits": lambda ops, v: ops.conv2d(v["x"], v["f"], bias=zeros(8, dtype=np.float64)),
    "bfloat16": lambda ops, v: ops.conv2d(narrow(ops, v["x"]), narrow(ops, v["f"]), bias=zeros(8)),
    "a wider bias": lambda ops, v: ops.conv2d(
        narrow(ops, v["x"]), narrow(ops, v["f"]), bias=wide(ops)
    ),
    "groups": lambda ops, v: ops.conv2d(v["x"], zeros(3, 3, 1, 9), groups=3),
    "causal": lambda ops, v: ops.conv3d(
        v["video"], zeros(3, 3, 3, 3, 8), (1, 2, 2), padding=(2, 0, 1, 1, 1, 1)
    ),
    "transposed": lambda ops, v: ops.conv2d_transpose(
        v["x"], zeros(4, 4, 8, 3), (3, 2), (1, 1), (1, 0, 2, 1), (2, 1)
    ),
    "transposed, dilated": lambda ops, v: ops.conv2d_transpose(
        v["x"], zeros(3, 3, 8, 3), dilation=(3, 2)
    ),
}


def narrow(ops: Any, value: Any) -> Any:
    from max.dtype import DType

    return ops.cast(value, DType.bfloat16)


def wide(ops: Any) -> Any:
    from max.dtype import DType
    from max.graph import DeviceRef

    return ops.constant(zeros(8), DType.float32, DeviceRef.CPU())


@pytest.mark.parametrize("name", TAKEN)
def test_shapes_and_types_are_maxs(name: str) -> None:
    before, after, report = compared(TAKEN[name])
    assert "Error" not in before
    assert after == before
    assert len(report.taken) == 1, str(report)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_channels_first_is_read_as_max_does(layout: str) -> None:
    from max.graph.type import ConvInputLayout

    name = "first" if layout == "NCHW" else "x"
    given = {"input_layout": ConvInputLayout(layout)}
    for call in (
        lambda ops, v: ops.conv2d(v[name], v["f"], bias=zeros(8), **given),
        lambda ops, v: ops.conv2d_transpose(v[name], zeros(3, 3, 8, 3), (2, 2), **given),
    ):
        before, after, report = compared(call)
        assert after == before
        assert len(report.taken) == 1, str(report)


LEFT: dict[str, tuple[Callable[[Any, dict[str, Any]], Any], str]] = {
    "float64": (
        lambda ops, v: ops.conv2d(double(ops, v["x"]), double(ops, v["f"])),
        "input: dtype float64 is not supported; ",
    ),
    "two types": (
        lambda ops, v: ops.conv2d(narrow(ops, v["x"]), v["f"]),
        "filter: dtype float32 does not match; bfloat16 is the input's",
    ),
    "a bias that is broadcast": (
        lambda ops, v: ops.conv2d(v["x"], v["f"], bias=zeros(1)),
        "bias: 1 elements, but there are 8 filters",
    ),
    "negative padding": (
        lambda ops, v: ops.conv2d(v["x"], v["f"], padding=(-1, 0, 0, 0)),
        "padding: (-1, 0, 0, 0) has a negative entry; every padding must be at least 0",
    ),
}


def double(ops: Any, value: Any) -> Any:
    from max.dtype import DType

    return ops.cast(value, DType.float64)


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_max(name: str) -> None:
    call, reason = LEFT[name]
    before, after, report = compared(call)
    assert "Error" not in before
    assert after == before
    assert not report.taken
    [entry] = report.left
    assert entry.reason.startswith(reason)
    assert "0 calls taken over, 1 left to MAX" in str(report)
    assert f"{entry.where}: {reason}" in str(report)


REFUSED: dict[str, tuple[Callable[[Any, dict[str, Any]], Any], str]] = {
    "one stride": (
        lambda ops, v: ops.conv2d(v["x"], v["f"], stride=2),
        "TypeError: stride: 2 is not allowed; integers in a tuple are",
    ),
    "groups": (
        lambda ops, v: ops.conv2d(v["x"], v["f"], groups=2),
        "ValueError: input: 3 channels are not divisible by groups=2",
    ),
    "channels": (
        lambda ops, v: ops.conv2d(v["x"], zeros(3, 3, 2, 4)),
        "ValueError: filter: 2 channels a group do not match the input's 3",
    ),
    "rank": (
        lambda ops, v: ops.conv2d(v["video"], v["f"]),
        "ValueError: input: shape (n, t, h, w, 3) has rank 5; a convolution with 2 spatial",
    ),
    "rank of the bias": (
        lambda ops, v: ops.conv2d(v["x"], v["f"], bias=zeros(1, 8)),
        "ValueError: bias: rank 2 is not allowed; 1 is needed: one a filter",
    ),
    "output padding": (
        lambda ops, v: ops.conv2d_transpose(
            v["x"], zeros(3, 3, 8, 3), dilation=(3, 3), output_paddings=(2, 2)
        ),
        "ValueError: output_paddings: (2, 2) has an entry that is not below the stride (1, 1)",
    ),
    "layout of a transposed filter": (
        lambda ops, v: ops.conv2d_transpose(
            v["x"], zeros(3, 8, 3, 5), filter_layout=filter_layout("FCRS")
        ),
        "ValueError: filter_layout: FilterLayout.FCRS is not allowed; RSCF, CFRS are",
    ),
}


def filter_layout(name: str) -> Any:
    from max.graph.type import FilterLayout

    return FilterLayout(name)


@pytest.mark.parametrize("name", REFUSED)
def test_what_max_refuses_is_refused(name: str) -> None:
    call, sentence = REFUSED[name]
    before, after, report = compared(call)
    assert "Error" in before
    assert after.startswith(sentence)
    assert not report.taken
    assert not report.left


# The exchange -------------------------------------------------------------------------------------


def test_the_stubs_have_maxs_parameters() -> None:
    from maxconv._override import EXCHANGED

    for function, stub in EXCHANGED.values():
        assert list(inspect.signature(function).parameters) == list(
            inspect.signature(stub).parameters
        )


def conv_reports(count: int = 1) -> int:
    """How many calls of a new graph are taken over by whoever overrides now."""
    from max.graph import Graph, ops

    with Graph("asked", input_types=[input_type((1, 5, 5, 3))]) as graph:
        for _ in range(count):
            ops.conv2d(graph.inputs[0].tensor, zeros(3, 3, 3, 4))
        return str(graph).count("maxconv_conv_cpu")


def test_nothing_stays_changed() -> None:
    from max.graph import graph as max_graph
    from max.graph import ops

    def state() -> list[Any]:
        functions = (ops.conv2d, ops.conv3d, ops.conv2d_transpose, ops.custom)
        codes = [function.__code__ for function in functions]
        return [*codes, max_graph.default_custom_extensions()]

    before = state()
    assert conv_reports() == 0
    override = maxconv.override_max()
    with override:
        assert state() != before
        assert conv_reports() == 1
        with maxconv.override_max() as inner:
            assert conv_reports(2) == 2
        assert len(inner.taken) == 2
        assert conv_reports() == 1
    assert len(override.report.taken) == 2
    assert state() == before
    with pytest.raises(ZeroDivisionError), override:
        assert conv_reports() == 1
        raise ZeroDivisionError
    assert state() == before
    assert conv_reports() == 0


def in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_a_block_holds_for_its_thread() -> None:
    with maxconv.override_max() as report:
        assert in_thread(conv_reports) == 0
        assert conv_reports() == 1
    assert len(report.taken) == 1

    def inside() -> int:
        with maxconv.override_max():
            return conv_reports()

    assert in_thread(inside) == 1
    assert conv_reports() == 0


def test_started_for_the_process() -> None:
    override = maxconv.override_max()
    report = override.start()
    try:
        assert conv_reports() == 1
        assert in_thread(conv_reports) == 1
        with maxconv.override_max() as inner:
            assert conv_reports() == 1
        assert len(inner.taken) == 1
    finally:
        override.stop()
    assert len(report.taken) == 2
    assert conv_reports() == 0
    with pytest.raises(RuntimeError, match=r"^stop: this override was not started"):
        override.stop()


def test_a_graph_that_was_begun_before() -> None:
    from max.graph import Graph, ops

    with Graph("begun", input_types=[input_type((1, 5, 5, 3))]) as graph:
        x = graph.inputs[0].tensor
        with maxconv.override_max() as report:
            ops.conv2d(x, zeros(3, 3, 3, 4))
        inside = graph.add_subgraph("bare", input_types=[input_type((1, 5, 5, 3))])
        with inside, maxconv.override_max() as second:
            ops.conv2d(inside.inputs[0].tensor, zeros(3, 3, 3, 4))
    assert len(report.taken) == 1
    # MAX lets a subgraph have kernels only when it is made.
    assert second.left[0].reason.startswith("graph: the subgraph 'bare' does not know")
