"""``override_max``: what is computed in graphs that others build."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tests.interop.graphs import Source, input_type
from tests.reference import conv_reference, conv_transpose_reference, pool_reference

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


#: A pooling of ``max.graph.ops``, its arguments, the output's size, and the padding behind that a
#: mean counts: MAX counts whatever a window covers.
POOLS: list[tuple[str, dict[str, Any], tuple[int, int], tuple[int, int]]] = [
    ("max_pool2d", {"stride": 2, "padding": 1}, (4, 4), (1, 1)),
    ("max_pool2d", {"stride": (2, 3), "padding": (0, 1), "ceil_mode": True}, (3, 4), (0, 1)),
    ("avg_pool2d", {"stride": 2, "padding": 1, "ceil_mode": True}, (4, 5), (1, 3)),
    ("avg_pool2d", {"dilation": (2, 1), "padding": 1, "count_boundary": False}, (5, 8), (1, 1)),
]
POOLED = (2, 7, 8, 6)


def build_pools(name: str, module: Module) -> Graph:
    """Poolings, taken over."""
    from max.graph import Graph, ops

    with (
        Graph(name, input_types=[input_type(POOLED)], module=module) as graph,
        maxconv.override_max() as report,
    ):
        x = graph.inputs[0].tensor
        graph.output(*(getattr(ops, name)(x, (3, 3), **given) for name, given, *_ in POOLS))
    assert [entry.function for entry in report.taken] == [name for name, *_ in POOLS]
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
    "override_pools": Source(build_pools),
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


def test_pools(overridden: dict[str, Model]) -> None:
    # Below zero for the most part: a zero of padding would be the largest.
    x = draw(*POOLED, seed=70) - 1.5

    def both(value: Any) -> tuple[int, int]:
        return value if isinstance(value, tuple) else (value, value)

    for actual, (name, given, output, behind) in zip(
        executed(overridden["override_pools"], x), POOLS, strict=True
    ):
        expected = pool_reference(
            x, (3, 3), stride=both(given.get("stride", 1)),
            dilation=both(given.get("dilation", 1)), pad_before=both(given["padding"]),
            pad_after=behind, output=output, average=name == "avg_pool2d",
            count_boundary=given.get("count_boundary", True),
        )  # fmt: skip
        close(actual, expected)


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
