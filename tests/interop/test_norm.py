"""Group normalization in graphs on a CPU against a float64 reference: one graph, symbolic sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.interop.graphs import Source, input_type
from tests.reference import Floats

import maxconv
from maxconv.activations import clamp, leaky_relu

if TYPE_CHECKING:
    from max.engine import Model
    from max.graph import Graph, Module, TensorValue

Array = npt.NDArray[Any]

RNG = np.random.default_rng(23)
CHANNELS = 24

WEIGHT, BIAS = RNG.standard_normal((2, CHANNELS)).astype(np.float32)

#: Every channel has a mean and a deviation of its own.
INPUTS: dict[str, Array] = {
    "x": (RNG.standard_normal((2, 7, 5, CHANNELS)) * RNG.uniform(0.5, 2, CHANNELS)).astype("f4")
    + np.linspace(-3, 3, CHANNELS, dtype=np.float32),
    "x1": RNG.standard_normal((1, 9, 6)).astype(np.float32) + 1,
}
SHAPES: dict[str, tuple[int | str, ...]] = {"x": ("n", "h", "w", CHANNELS), "x1": ("n1", "w1", 6)}

#: Definitions of activations.
FUNCTIONS: dict[str, tuple[Any, Callable[[Floats], Floats]]] = {
    "none": (None, lambda v: v),
    "relu": ("relu", lambda v: np.maximum(v, 0)),
    "relu6": ("relu6", lambda v: np.clip(v, 0, 6)),
    "clamp": (clamp(-0.5, math.inf), lambda v: np.maximum(v, -0.5)),
    "leaky_relu": (leaky_relu(0.2), lambda v: np.where(v > 0, v, 0.2 * v)),
    "sigmoid": ("sigmoid", lambda v: 1 / (1 + np.exp(-v))),
    "silu": ("silu", lambda v: v / (1 + np.exp(-v))),
    "hard_swish": ("hard_swish", lambda v: v * np.clip(v + 3, 0, 6) / 6),
    "hard_sigmoid": ("hard_sigmoid", lambda v: np.clip(v + 3, 0, 6) / 6),
    "gelu": ("gelu", lambda v: v * (1 + np.vectorize(math.erf)(v / math.sqrt(2))) / 2),
    "gelu_tanh": (
        "gelu_tanh",
        lambda v: v * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) / 2,
    ),
    "tanh": ("tanh", np.tanh),
}


@dataclass(frozen=True)
class Case:
    """A normalization."""

    groups: int
    x: str = "x"
    weights: bool = True
    epsilon: float = 1e-5
    activation: str = "none"

    def build(self, x: TensorValue) -> TensorValue:
        weight, bias = (WEIGHT, BIAS) if self.weights else (None, None)
        return maxconv.group_norm(
            x, self.groups, weight, bias, self.epsilon, activation=FUNCTIONS[self.activation][0]
        )

    def expected(self, x: Array) -> Floats:
        grouped = x.astype(np.float64).reshape(
            x.shape[0], -1, self.groups, x.shape[-1] // self.groups
        )
        mean, variance = grouped.mean((1, 3), keepdims=True), grouped.var((1, 3), keepdims=True)
        normal = ((grouped - mean) / np.sqrt(variance + self.epsilon)).reshape(x.shape)
        if self.weights:
            normal = normal * WEIGHT + BIAS
        return FUNCTIONS[self.activation][1](normal)


@dataclass(frozen=True)
class ByPixel:
    """A normalization by the root mean square of each pixel."""

    epsilon: float = 1e-6
    activation: str = "none"
    x: str = "x"

    def build(self, x: TensorValue) -> TensorValue:
        return maxconv.rms_norm(x, WEIGHT, self.epsilon, activation=FUNCTIONS[self.activation][0])

    def expected(self, x: Array) -> Floats:
        wide = x.astype(np.float64)
        squares = (wide**2).mean(-1, keepdims=True)
        return FUNCTIONS[self.activation][1](wide / np.sqrt(squares + self.epsilon) * WEIGHT)


CASES: dict[str, Case | ByPixel] = {
    **{name: Case(3, activation=name) for name in FUNCTIONS},
    "one group": Case(1),
    "instances": Case(CHANNELS),
    "without weights": Case(4, weights=False, epsilon=0.5),
    "1-D": Case(3, x="x1", weights=False),
    "by pixel": ByPixel(),
    "by pixel, with an activation": ByPixel(0.5, "gelu"),
}


def in_channels_first(x: TensorValue) -> TensorValue:
    """A case of permuted tensors, permuted back to be compared."""
    from max.graph import ops

    turned = maxconv.group_norm(
        ops.permute(x, [0, 3, 1, 2]), 3, WEIGHT, BIAS, activation="silu", input_layout="NCHW"
    )
    return ops.permute(turned, [0, 2, 3, 1])


def build(name: str, module: Module) -> Graph:
    """The graph of all cases; two more outputs have the channels first, and 16 bits."""
    from max.dtype import DType
    from max.graph import Graph, ops

    types = [input_type(SHAPES[x]) for x in INPUTS]
    library = maxconv.kernel_library()
    with Graph(name, input_types=types, kernel_library=library, module=module) as graph:
        values = dict(zip(INPUTS, (value.tensor for value in graph.inputs), strict=True))
        outputs = [case.build(values[case.x]) for case in CASES.values()]
        half = CASES["silu"].build(ops.cast(values["x"], DType.bfloat16))
        graph.output(*outputs, in_channels_first(values["x"]), ops.cast(half, DType.float32))
    return graph


GRAPHS = {"norm": Source(build)}


@pytest.fixture(scope="module")
def results(models: dict[str, Model]) -> dict[str, Array]:
    outputs = models["norm"].execute(*INPUTS.values())
    names = [*CASES, "channels first", "bfloat16"]
    return dict(zip(names, (output.to_numpy() for output in outputs), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_results(results: dict[str, Array], name: str) -> None:
    """Sums of up to 280 elements of about 3, of which each is rounded to 2^-24."""
    case = CASES[name]
    np.testing.assert_allclose(results[name], case.expected(INPUTS[case.x]), rtol=2e-5, atol=2e-5)


def test_other_sizes_through_the_same_graph(models: dict[str, Model]) -> None:
    inputs = {
        "x": RNG.standard_normal((1, 3, 11, CHANNELS)).astype(np.float32),
        "x1": RNG.standard_normal((3, 4, 6)).astype(np.float32),
    }
    outputs = models["norm"].execute(*inputs.values())
    for case, output in zip(CASES.values(), outputs, strict=False):
        expected = case.expected(inputs[case.x])
        np.testing.assert_allclose(output.to_numpy(), expected, rtol=2e-5, atol=2e-5)


def test_channels_first(results: dict[str, Array]) -> None:
    np.testing.assert_allclose(results["channels first"], results["silu"], rtol=1e-6, atol=1e-6)


def test_16_bits(results: dict[str, Array]) -> None:
    """The input and the result are rounded to 8 bits."""
    expected = CASES["silu"].expected(INPUTS["x"])
    np.testing.assert_allclose(results["bfloat16"], expected, rtol=2.0**-7, atol=0.05)


# Arguments ----------------------------------------------------------------------------------------


@pytest.fixture
def x() -> Iterator[TensorValue]:
    """An input of the current graph."""
    from max.graph import Graph

    types = [input_type(SHAPES["x"])]
    with Graph("arguments", input_types=types, kernel_library=maxconv.kernel_library()) as graph:
        yield graph.inputs[0].tensor


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"num_groups": 5}, ValueError, "num_groups: 5 does not divide the 24 channels"),
        ({"num_groups": 0}, ValueError, "num_groups: 0 does not divide the 24 channels"),
        ({"num_groups": 2.0}, TypeError, "num_groups: 2.0 "),
        ({"weight": WEIGHT}, ValueError, "weight, bias: one of them is None"),
        ({"weight": WEIGHT[:5], "bias": BIAS}, ValueError, "weight: "),
        ({"weight": WEIGHT, "bias": "none"}, TypeError, "bias: "),
        ({"epsilon": -1.0}, ValueError, "epsilon: -1.0 is not allowed"),
        ({"epsilon": "small"}, TypeError, "epsilon: "),
        ({"activation": "swash"}, ValueError, "activation: 'swash' is not an activation"),
        ({"input_layout": "HWNC"}, ValueError, "input_layout: "),
    ],
)
def test_refusals(
    x: TensorValue, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    given = {"num_groups": 4, **arguments}
    with pytest.raises(error) as raised:
        maxconv.group_norm(x, given.pop("num_groups"), **given)
    assert str(raised.value).startswith(words)


def test_refused_inputs(x: TensorValue) -> None:
    from max.dtype import DType
    from max.graph import ops

    with pytest.raises(TypeError, match="input: a ndarray is not a graph value"):
        maxconv.group_norm(np.zeros((1, 2, 2, 4)), 2)
    with pytest.raises(ValueError, match="input: rank 2 is not allowed"):
        maxconv.group_norm(ops.reshape(x, (-1, CHANNELS)), 2)
    with pytest.raises(ValueError, match="input: dtype float64"):
        maxconv.group_norm(ops.cast(x, DType.float64), 2)
    with pytest.raises(ValueError, match="input: w channels; a number that is known is allowed"):
        maxconv.group_norm(ops.permute(x, [0, 3, 1, 2]), 2)


def test_rms_norm_needs_a_weight(x: TensorValue) -> None:
    with pytest.raises(TypeError, match="weight: None is not allowed"):
        maxconv.rms_norm(x, None)
    with pytest.raises(ValueError, match="epsilon: nan is not allowed"):
        maxconv.rms_norm(x, WEIGHT, math.nan)


def test_a_gpu_has_one_operation() -> None:
    """It is compiled for the number of channels; what it computes is checked on a GPU."""
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType

    image = TensorType(DType.bfloat16, SHAPES["x"], DeviceRef.GPU())
    with Graph("gpu", input_types=[image], kernel_library=maxconv.kernel_library()) as graph:
        y = maxconv.group_norm(graph.inputs[0].tensor, 4, WEIGHT, BIAS, activation="silu")
        z = maxconv.rms_norm(y, WEIGHT)
        graph.output(z)
    assert str(graph).count("maxconv_group_norm_unfused_gpu") == 1
    assert str(graph).count("maxconv_rms_norm_unfused_gpu") == 1
    assert y.type == z.type == image
    assert str(graph).count("channels = 24") == 2
