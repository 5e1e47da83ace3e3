"""The graph functions against float64 references.

A graph takes long to compile, and MAX compiles the op once for each rank, type and fusion; so one
graph holds all plain convolutions as its outputs, with symbolic sizes, and every test reads its own
output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.interop.graphs import Source
from tests.reference import Floats, conv_reference

import maxconv
from maxconv._arguments import ConvArguments
from maxconv._emit import convolution
from maxconv._operands import read_call, with_zeros
from maxconv._problem import ConvProblem
from maxconv.activations import clamp, leaky_relu

if TYPE_CHECKING:
    from max.engine import Model
    from max.graph import Graph, Module, TensorValue

Array = npt.NDArray[Any]

RNG = np.random.default_rng(7)


def draw(*shape: int) -> npt.NDArray[np.float32]:
    return RNG.standard_normal(shape).astype(np.float32)


def rscf(krsc: Array) -> Array:
    return np.ascontiguousarray(np.moveaxis(krsc, 0, -1))


def fcrs(krsc: Array) -> Array:
    return np.ascontiguousarray(np.moveaxis(krsc, -1, 1))


# Filters, ``[K, *taps, C / groups]``.
W = draw(20, 3, 3, 6)
W_EVEN = draw(7, 4, 2, 6)
W_GROUPED = draw(12, 3, 3, 3)
W_GROUPED_PANELS = draw(38, 2, 3, 3)
W_DEPTHWISE = draw(6, 3, 3, 1)
W_MULTIPLIER = draw(12, 3, 3, 1)
W_POINTWISE = draw(18, 1, 1, 6)
W_1D, W_3D = draw(9, 5, 6), draw(5, 2, 3, 3, 6)
W_SMALL = draw(20, 2, 2, 6)
BIAS, BIAS_12 = draw(20), draw(12)
SCALE = draw(20)
RESIDUAL_SHAPE = (2, 9, 11, 20)

# Activations; the sizes of the last axis are fixed, all others symbolic.
X, X_1D, X_3D = draw(2, 9, 11, 6), draw(3, 17, 6), draw(1, 5, 6, 7, 6)
RESIDUAL = draw(*RESIDUAL_SHAPE)


def gelu(v: Floats) -> Floats:
    erf = np.vectorize(math.erf)
    result: Floats = 0.5 * v * (1 + erf(v / math.sqrt(2)))
    return result


def sigmoid(v: Floats) -> Floats:
    result: Floats = 1 / (1 + np.exp(-v))
    return result


ACTIVATIONS: dict[str, tuple[Any, Callable[[Floats], Floats]]] = {
    "relu": ("relu", lambda v: np.maximum(v, 0)),
    "relu6": ("relu6", lambda v: np.clip(v, 0, 6)),
    "clamp": (clamp(-0.5, 2.5), lambda v: np.clip(v, -0.5, 2.5)),
    "leaky_relu": (leaky_relu(0.25), lambda v: np.where(v > 0, v, 0.25 * v)),
    "sigmoid": ("sigmoid", sigmoid),
    "silu": ("silu", lambda v: v * sigmoid(v)),
    "hard_swish": ("hard_swish", lambda v: v * np.clip(v + 3, 0, 6) / 6),
    "hard_sigmoid": ("hard_sigmoid", lambda v: np.clip(v + 3, 0, 6) / 6),
    "gelu": ("gelu", gelu),
    "gelu_tanh": (
        "gelu_tanh",
        lambda v: 0.5 * v * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
    ),
    "tanh": ("tanh", np.tanh),
}


@dataclass(frozen=True)
class Case:
    """An output of the graph: how it is built, and what it must be."""

    build: Callable[[dict[str, TensorValue]], TensorValue]
    expected: Callable[[dict[str, Array]], Floats]
    depth: int


def plain(
    w: Array, *, x: str = "x", filter: Any = None, padding: Any = 0, epilogue: Any = None,
    **arguments: Any,
) -> Case:  # fmt: skip
    """A convolution of input ``x`` with ``[K, *taps, C / groups]``; ``filter`` is how it is
    passed."""
    rank = w.ndim - 2
    functions: list[Callable[..., TensorValue]] = [maxconv.conv1d, maxconv.conv2d, maxconv.conv3d]
    function = functions[rank - 1]
    layout = {1: "KSC", 2: "KRSC", 3: "KTRSC"}[rank]

    def build(values: dict[str, TensorValue]) -> TensorValue:
        passed = {"filter_layout": layout, **arguments, "padding": padding}
        operand = filter(values) if callable(filter) else w if filter is None else filter
        return function(values[x], operand, **passed)

    def expected(inputs: dict[str, Array]) -> Floats:
        geometry = {key: arguments[key] for key in ("stride", "dilation") if key in arguments}
        p = ConvProblem.from_arguments(
            inputs[x].shape, w.shape, filter_layout=layout, padding=padding, rank=rank,
            groups=w_groups(w, inputs[x]), **geometry,
        )  # fmt: skip
        return conv_reference(
            inputs[x], w, stride=p.stride, dilation=p.dilation, pad_before=p.pad_before,
            pad_after=p.pad_after, groups=p.groups, **(epilogue(inputs) if epilogue else {}),
        )  # fmt: skip

    return Case(build, expected, int(np.prod(w.shape[1:])))


def w_groups(w: Array, x: Array) -> int:
    return int(x.shape[-1] // w.shape[-1])


def weight(name: str, array: Array, dtype: str = "float32") -> Callable[[Any], TensorValue]:
    def make(_: Any) -> TensorValue:
        from max.dtype import DType
        from max.graph import DeviceRef, TensorValue, Weight

        return TensorValue(Weight(name, DType[dtype], array.shape, DeviceRef.CPU()))

    return make


def constant(array: Array) -> Callable[[Any], TensorValue]:
    def make(_: Any) -> TensorValue:
        from max.graph import DeviceRef, ops

        return ops.constant(array, device=DeviceRef.CPU())

    return make


def channels_first(case: Case, *, residual: bool = False) -> Case:
    """The same convolution on permuted tensors; its output is permuted back to be compared."""

    def build(values: dict[str, TensorValue]) -> TensorValue:
        from max.graph import ops

        turned = dict(values)
        turned["x"] = ops.permute(values["x"], [0, 3, 1, 2])
        turned["residual"] = ops.permute(values["residual"], [0, 3, 1, 2])
        return ops.permute(case.build(turned), [0, 2, 3, 1])

    return Case(build, case.expected, case.depth)


# Weights that the session is given at load time, by name.
WEIGHTS: dict[str, Array] = {
    "w_rscf": rscf(W),
    "w_fcrs": fcrs(W_GROUPED_PANELS),
    "w_depthwise": fcrs(W_DEPTHWISE),
    "w_3d": W_3D.copy(),
    "control": np.zeros(4, np.float32),
}

CASES: dict[str, Case] = {
    # Where the filter comes from, and in which layout.
    "array krsc": plain(W, padding=1),
    "array rscf": plain(W, filter=rscf(W), filter_layout=maxconv.FilterLayout.RSCF, padding=1),
    "array fcrs": plain(W, filter=fcrs(W), filter_layout=maxconv.FilterLayout.FCRS, padding=1),
    "packed": plain(W, filter=maxconv.pack_filter(fcrs(W), "FCRS"), padding=1),
    "packed knows groups": plain(
        W_GROUPED, filter=maxconv.pack_filter(W_GROUPED, "KRSC", groups=2), padding=1
    ),
    "constant": plain(W, filter=constant(rscf(W)), filter_layout="RSCF", padding=1),
    "weight rscf": plain(W, filter=weight("w_rscf", rscf(W)), filter_layout="RSCF", padding=1),
    "weight fcrs, groups": plain(
        W_GROUPED_PANELS, filter=weight("w_fcrs", fcrs(W_GROUPED_PANELS)), filter_layout="FCRS",
        groups=2,
    ),
    "weight depthwise": plain(
        W_DEPTHWISE, filter=weight("w_depthwise", fcrs(W_DEPTHWISE)), filter_layout="FCRS",
        groups=6,
    ),
    "weight 3-D": plain(
        W_3D, x="x3", filter=weight("w_3d", W_3D), padding=1
    ),
    "input rscf": plain(
        W, filter=lambda v: v["w_rscf_in"], filter_layout="RSCF", padding=1
    ),
    "input krsc": plain(W, filter=lambda v: v["w_krsc_in"], padding=1),
    "input depthwise": plain(
        W_DEPTHWISE, filter=lambda v: v["w_depthwise_in"], filter_layout="FCRS", groups=6
    ),
    # Geometry.
    "stride": plain(W, stride=(2, 3), padding=1),
    "dilation": plain(W, dilation=(2, 3), padding=(2, 1, 3, 0)),
    "asymmetric": plain(W_EVEN, padding=(0, 3, 2, 1), stride=(1, 2)),
    "same": plain(W_EVEN, padding="same"),
    "valid": plain(W_EVEN, padding="valid"),
    "groups": plain(W_GROUPED, groups=2, padding=1),
    "depthwise": plain(W_DEPTHWISE, groups=6, padding=1, stride=2),
    "multiplier": plain(W_MULTIPLIER, groups=6, padding=1),
    "pointwise": plain(W_POINTWISE),
    "pointwise, stride": plain(W_POINTWISE, stride=2),
    "pointwise, padding": plain(W_POINTWISE, padding=(1, 0, 0, 2)),
    "1-D": plain(W_1D, x="x1", stride=2, padding=(3, 1)),
    "3-D": plain(W_3D, x="x3", stride=(1, 2, 1), padding=(1, 0, 1, 1, 0, 2)),
    # Epilogue.
    "bias float64": plain(
        W_GROUPED, padding=1, groups=2, bias=BIAS_12.astype(np.float64),
        epilogue=lambda _: {"bias": BIAS_12},
    ),
    **{
        f"{first}, {last}": plain(
            W, padding=1, bias=BIAS, activation=ACTIVATIONS[first][0],
            final_activation=ACTIVATIONS[last][0],
            epilogue=lambda _, first=first, last=last: {
                "bias": BIAS,
                "activation": ACTIVATIONS[first][1],
                "final_activation": ACTIVATIONS[last][1],
            },
        )
        for first, last in zip(
            [*ACTIVATIONS][::2], [*ACTIVATIONS][1::2] + [*ACTIVATIONS][:1], strict=True
        )
    },
    # A scale is a factor of its filter.
    "scale": plain(
        W * SCALE[:, None, None, None], filter=W, padding=1, scale=SCALE, bias=BIAS,
        activation="relu",
        epilogue=lambda _: {"bias": BIAS, "activation": ACTIVATIONS["relu"][1]},
    ),
    "scale, one for all": plain(W * np.float32(0.375), filter=W, padding=1, scale=0.375),
    # Kernels by name.
    "reference": plain(W_GROUPED, groups=2, padding=1, config="reference"),
    "pointwise by name": plain(W_POINTWISE, config="pointwise"),
    "winograd by name": plain(W, padding=(1, 1, 0, 2), config="winograd"),
    "winograd, two taps": plain(
        W_SMALL * SCALE[:, None, None, None], filter=W_SMALL, padding=(1, 0, 0, 2),
        config="winograd", scale=SCALE, bias=BIAS, activation="silu",
        epilogue=lambda _: {"bias": BIAS, "activation": ACTIVATIONS["silu"][1]},
    ),
    "winograd, two taps, volumes": plain(
        draw(9, 3, 2, 2, 6), x="x3", padding=1, config="winograd"
    ),
}  # fmt: skip


def with_residual(first: bool) -> Case:
    def build(values: dict[str, TensorValue]) -> TensorValue:
        return maxconv.conv2d(
            values["x"], W, padding=(1, 1, 1, 1), bias=BIAS, filter_layout="KRSC",
            input_layout=maxconv.ConvInputLayout.NCHW if first else "NHWC",
            activation="silu", residual=values["residual"], beta=0.5, final_activation="relu",
        )  # fmt: skip

    def expected(inputs: dict[str, Array]) -> Floats:
        return conv_reference(
            inputs["x"], W, stride=(1, 1), dilation=(1, 1), pad_before=(1, 1), pad_after=(1, 1),
            bias=BIAS, activation=ACTIVATIONS["silu"][1], residual=inputs["residual"], beta=0.5,
            final_activation=ACTIVATIONS["relu"][1],
        )  # fmt: skip

    case = Case(build, expected, 54)
    return channels_first(case) if first else case


def with_zeros_behind(values: dict[str, TensorValue]) -> TensorValue:
    """What a GPU does with a number of filters that its tensor cores do not store."""
    arguments = ConvArguments.read(2, padding=1, activation="relu")
    x, filter = values["x"], values["w_krsc_in"]
    call = read_call(x, filter, arguments, BIAS, None, SCALE, "NHWC", "KRSC")
    whole = with_zeros(call, 4)
    assert whole.problem.filters == 24
    wide = convolution(
        whole.problem, arguments, whole.tensors, kernel=whole.kernel, out_dtype="float32"
    )
    return wide[..., :20]


CASES["zeros behind the filters"] = Case(
    with_zeros_behind,
    plain(
        W * SCALE[:, None, None, None], padding=1,
        epilogue=lambda _: {"bias": BIAS, "activation": ACTIVATIONS["relu"][1]},
    ).expected,
    54,
)  # fmt: skip
CASES["residual"] = with_residual(first=False)
CASES["residual, channels first"] = with_residual(first=True)

INPUTS: dict[str, Array] = {
    "x": X,
    "x1": X_1D,
    "x3": X_3D,
    "residual": RESIDUAL,
    "w_rscf_in": rscf(W),
    "w_krsc_in": W,
    "w_depthwise_in": fcrs(W_DEPTHWISE),
}
SHAPES: dict[str, Sequence[str | int]] = {
    "x": ("n", "h", "w", 6),
    "x1": ("n1", "w1", 6),
    "x3": ("n3", "d3", "h3", "w3", 6),
    "residual": ("nr", "hr", "wr", 20),
    **{name: INPUTS[name].shape for name in INPUTS if name.endswith("_in")},
}


def build(name: str, module: Module) -> Graph:
    """The graph of all cases, and of a control."""
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType, TensorValue, Weight, ops

    cpu = DeviceRef.CPU()
    types = [TensorType(DType.float32, SHAPES[name], cpu) for name in INPUTS]
    library = maxconv.kernel_library()
    with Graph(name, input_types=types, kernel_library=library, module=module) as graph:
        values = dict(zip(INPUTS, (value.tensor for value in graph.inputs), strict=True))
        outputs = [case.build(values) for case in CASES.values()]
        control = TensorValue(Weight("control", DType.float32, (4,), cpu))
        outputs.append(ops.add(control, values["w_krsc_in"][0, 0, 0, 0]))
        graph.output(*outputs)
    return graph


GRAPHS = {"plain": Source(build, lambda: WEIGHTS)}


class Network:
    """The compiled graph, its results for ``INPUTS``, and a way to run it again."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.results = self.run()

    def run(self, **changes: Array) -> dict[str, Array]:
        inputs = {**INPUTS, **changes}
        outputs = self.model.execute(*(np.ascontiguousarray(inputs[name]) for name in INPUTS))
        return dict(
            zip([*CASES, "control"], (output.to_numpy() for output in outputs), strict=True)
        )


@pytest.fixture(scope="module")
def network(models: dict[str, Model]) -> Network:
    return Network(models["plain"])


def check(actual: Array, expected: Floats, depth: int) -> None:
    """Compares a float32 result with the exact one.

    A float32 sum of ``depth`` products of numbers of size about 1 strays by at most ``depth``
    roundings of a partial sum of size at most about ``sqrt(depth)`` times 4; an activation's own
    approximation adds a few units in the last place. No activation here has a slope above 1.2.
    """
    assert actual.dtype == np.float32
    assert actual.shape == expected.shape
    bound = 1.2 * depth * 4 * math.sqrt(depth) * 2.0**-24 + 4e-6
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=bound)


@pytest.mark.parametrize("name", CASES)
def test_results(network: Network, name: str) -> None:
    check(network.results[name], CASES[name].expected(INPUTS), CASES[name].depth)


def test_other_sizes_through_the_same_graph(network: Network) -> None:
    x, x1 = draw(3, 6, 21, 6), draw(1, 40, 6)
    x3, residual = draw(2, 3, 4, 9, 6), draw(3, 6, 21, 20)
    changed = {**INPUTS, "x": x, "x1": x1, "x3": x3, "residual": residual}
    results = network.run(x=x, x1=x1, x3=x3, residual=residual)
    for name, case in CASES.items():
        check(results[name], case.expected(changed), case.depth)


def test_empty_batches(network: Network) -> None:
    results = network.run(
        x=draw(0, 9, 11, 6), x1=draw(0, 17, 6), x3=draw(0, 5, 6, 7, 6),
        residual=draw(0, 9, 11, 20),
    )  # fmt: skip
    for name, full in network.results.items():
        if name != "control":
            assert results[name].shape == (0, *full.shape[1:])


def test_weights_are_packed_when_the_model_is_loaded(network: Network) -> None:
    # MAX reads the caller's arrays in each call, which the control shows; packed filters are
    # copies.
    saved = {name: array.copy() for name, array in WEIGHTS.items()}
    try:
        for array in WEIGHTS.values():
            array += 1
        results = network.run()
    finally:
        for name, array in saved.items():
            WEIGHTS[name][...] = array
    np.testing.assert_array_equal(results["control"], network.results["control"] + 1)
    for name in CASES:
        if name.startswith("weight"):
            np.testing.assert_array_equal(results[name], network.results[name])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"x": draw(2, 1, 11, 6), "residual": draw(2, 1, 11, 20)},
            r"filter: h extent \d with dilation \d spans (\d) but the padded input has only (\d); "
            "enlarge the padding or the input",
        ),
        (
            {"x1": draw(3, 0, 6)},
            r"filter: w extent 5 with dilation \d spans (\d) but the padded input has only (\d); "
            "enlarge the padding or the input",
        ),
        (
            {"residual": draw(2, 9, 10, 20)},
            r"residual: shape \(2, 9, 10, 20\) must equal the output's shape \(2, 9, 11, 20\)",
        ),
    ],
)
def test_sizes_that_turn_out_bad(
    network: Network, changes: dict[str, Array], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        network.run(**changes)
    # The model goes on working.
    for name, result in network.run().items():
        np.testing.assert_array_equal(result, network.results[name])
