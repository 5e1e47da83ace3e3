"""Convolutions of enlarged images in graphs: one graph, with symbolic sizes, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.interop.graphs import Source, input_type
from tests.reference import Floats, conv_reference

import maxconv
from maxconv._arguments import ConvArguments
from maxconv._emit import convolution
from maxconv._operands import read_call, with_zeros

if TYPE_CHECKING:
    from max.engine import Model
    from max.graph import Graph, Module, TensorValue

Array = npt.NDArray[Any]

RNG = np.random.default_rng(23)


def draw(*shape: int) -> npt.NDArray[np.float32]:
    return RNG.standard_normal(shape).astype(np.float32)


INPUTS: dict[str, Array] = {
    "x": draw(2, 7, 10, 6),
    "x1": draw(3, 9, 6),
    "x3": draw(1, 3, 4, 5, 6),
    "w_in": draw(20, 3, 3, 6),
}
SHAPES: dict[str, tuple[int | str, ...]] = {
    "x": ("n", "h", "w", 6),
    "x1": ("n1", "w1", 6),
    "x3": ("n3", "d3", "h3", "w3", 6),
    "w_in": (20, 3, 3, 6),
}
WEIGHTS: dict[str, Array] = {
    "upsample.fcrs": draw(20, 6, 3, 3),
    "upsample.groups": draw(12, 3, 3, 3),
}


@dataclass(frozen=True)
class Case:
    """A convolution of an enlarged image."""

    filter: Array | str
    """``[K, *taps, C / groups]``, or the name of an input or a weight."""
    upsample: int | tuple[int, ...]
    padding: Any = 0
    """As ``maxconv.conv2d`` takes it."""
    dilation: int = 1
    groups: int = 1
    x: str = "x"
    arguments: dict[str, Any] = field(default_factory=dict)
    activation: Callable[[Floats], Floats] | None = None
    """What ``arguments`` or ``behind`` adds."""
    behind: Callable[[TensorValue], TensorValue] | None = None

    @property
    def rank(self) -> int:
        return {"x1": 1, "x": 2, "x3": 3}[self.x]

    @property
    def krsc(self) -> Array:
        if not isinstance(self.filter, str):
            return self.filter
        if self.filter in WEIGHTS:
            return np.moveaxis(WEIGHTS[self.filter], 1, -1)
        return INPUTS[self.filter]

    def build(self, values: dict[str, TensorValue]) -> TensorValue:
        from max.dtype import DType
        from max.graph import DeviceRef, Weight

        layout = {1: "KSC", 2: "KRSC", 3: "KTRSC"}[self.rank]
        filter: Any = self.filter
        if isinstance(filter, str) and filter in WEIGHTS:
            array, layout = WEIGHTS[filter], "FCRS"
            filter = Weight(filter, DType.float32, array.shape, DeviceRef.CPU())
        elif isinstance(filter, str):
            filter = values[filter]
        function: Any = {1: maxconv.conv1d, 2: maxconv.conv2d, 3: maxconv.conv3d}[self.rank]
        result: TensorValue = function(
            values[self.x],
            filter,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            filter_layout=layout,
            upsample=self.upsample,
            **self.arguments,
        )
        return result if self.behind is None else self.behind(result)

    def expected(self, x: Array) -> Floats:
        filter, rank = self.krsc, self.rank
        factors = (self.upsample,) * rank if isinstance(self.upsample, int) else self.upsample
        for axis, factor in enumerate(factors):
            x = np.repeat(x, factor, 1 + axis)
        arguments = ConvArguments.read(rank, dilation=self.dilation, padding=self.padding)
        before, after = arguments.pads(filter.shape[1:-1])
        return conv_reference(
            x, filter, stride=(1,) * rank, dilation=(self.dilation,) * rank, pad_before=before,
            pad_after=after, groups=self.groups, bias=self.arguments.get("bias"),
            activation=self.activation,
        )  # fmt: skip


def halved_relu(value: TensorValue) -> TensorValue:
    from max.graph import ops

    result: TensorValue = ops.mul(ops.relu(value + 1.0), 0.5)
    return result


W = draw(20, 3, 3, 6)
BIAS, BIAS_12 = draw(20), draw(12)

CASES: dict[str, Case] = {
    "as decoders have it": Case(W, 2, 1, arguments={"bias": BIAS}),
    "few filters": Case(draw(3, 3, 3, 6), 2, 1),
    "odd filters": Case(draw(7, 3, 3, 6), 2, 1, arguments={"bias": draw(7)}),
    "without padding": Case(W, 2),
    "uneven padding": Case(W, 2, (0, 1, 2, 3)),
    "same": Case(draw(8, 4, 5, 6), 2, "same"),
    "one tap": Case(draw(8, 1, 1, 6), 2),
    "five taps": Case(draw(8, 5, 5, 6), 2, 2),
    "dilation": Case(draw(8, 3, 3, 6), 2, 2, dilation=2),
    "threefold": Case(draw(8, 3, 3, 6), 3, 1),
    "along one axis": Case(draw(8, 3, 3, 6), (1, 2), 1),
    "groups": Case(draw(12, 3, 3, 3), 2, 1, groups=2, arguments={"bias": BIAS_12}),
    "signals": Case(draw(9, 3, 6), 2, 1, x="x1"),
    "volumes": Case(draw(5, 3, 3, 3, 6), (1, 2, 2), 1, x="x3"),
    "filter as an input": Case("w_in", 2, 1, arguments={"bias": BIAS}),
    "filter as a weight": Case("upsample.fcrs", 2, 1, arguments={"bias": BIAS}),
    "grouped weight": Case("upsample.groups", 2, 1, groups=2, arguments={"bias": BIAS_12}),
    "activation": Case(
        W, 2, 1, arguments={"activation": "relu"}, activation=lambda v: np.maximum(v, 0)
    ),
    "fused behind": Case(
        W, 2, 1, behind=halved_relu, activation=lambda v: np.maximum(v + 1, 0) / 2
    ),
    # What a model chooses for larger images.
    "winograd": Case(W, 2, 1, arguments={"bias": BIAS, "config": "winograd"}),
    "winograd without padding": Case(draw(7, 3, 3, 6), 2, arguments={"config": "winograd"}),
    "winograd, uneven padding": Case(W, 2, (0, 1, 2, 3), arguments={"config": "winograd"}),
    "winograd, volumes": Case(
        draw(5, 3, 3, 3, 6), (1, 2, 2), 1, x="x3", arguments={"config": "winograd"}
    ),
    "winograd, activation": Case(
        W, 2, 1, arguments={"bias": BIAS, "activation": "relu", "config": "winograd"},
        activation=lambda v: np.maximum(v, 0),
    ),
}  # fmt: skip


def packed(values: dict[str, TensorValue]) -> TensorValue:
    filter = maxconv.pack_filter(W, filter_layout="KRSC")
    return maxconv.conv2d(values["x"], filter, padding=1, upsample=2, bias=BIAS)


def in_channels_first(values: dict[str, TensorValue]) -> TensorValue:
    from max.graph import ops

    x = ops.permute(values["x"], [0, 3, 1, 2])
    result = maxconv.conv2d(
        x, W, padding=1, filter_layout="KRSC", upsample=2, bias=BIAS, input_layout="NCHW"
    )
    return ops.permute(result, [0, 2, 3, 1])


def with_zeros_behind(values: dict[str, TensorValue]) -> TensorValue:
    """What a GPU does with a number of filters that its tensor cores do not store."""
    arguments = ConvArguments.read(2, padding=1, upsample=2)
    call = read_call(values["x"], values["w_in"], arguments, BIAS, None, None, "NHWC", "KRSC")
    whole = with_zeros(call, 4)
    assert whole.problem.filters == 24
    wide = convolution(
        whole.problem, arguments, whole.tensors, kernel=whole.kernel, out_dtype="float32"
    )
    return wide[..., :20]


OTHERS = {
    "packed filter": packed,
    "channels first": in_channels_first,
    "zeros behind the filters": with_zeros_behind,
}


def build(name: str, module: Module) -> Graph:
    """The graph of all cases."""
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType

    types = [TensorType(DType.float32, SHAPES[name], DeviceRef.CPU()) for name in INPUTS]
    library = maxconv.kernel_library()
    with Graph(name, input_types=types, kernel_library=library, module=module) as graph:
        values = dict(zip(INPUTS, (value.tensor for value in graph.inputs), strict=True))
        outputs = [case.build(values) for case in CASES.values()]
        graph.output(*outputs, *(other(values) for other in OTHERS.values()))
    return graph


EXTENDED = {"upsample": Source(build, lambda: WEIGHTS)}

Run = Callable[..., dict[str, Array]]


@pytest.fixture(scope="module")
def run(further_models: dict[str, Model]) -> Run:
    """Runs the graph; returns the outputs by the name of the case."""

    def execute(**changes: Array) -> dict[str, Array]:
        inputs = {**INPUTS, **changes}
        outputs = further_models["upsample"].execute(*inputs.values())
        found = (output.to_numpy() for output in outputs)
        return dict(zip((*CASES, *OTHERS), found, strict=True))

    return execute


@pytest.fixture(scope="module")
def results(run: Run) -> dict[str, Array]:
    return run()


def check(found: Array, expected: Floats) -> None:
    """Compares a float32 result with the exact one.

    A float32 sum of 150 products of numbers of size about 1, of which summed taps are up to five
    times as large, strays by that many roundings of a sum of up to some 40. With Winograd's kernel
    it strays by at most 28 roundings of sums of up to some 200.
    """
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=150 * 40 * 2.0**-24 / 2)


@pytest.mark.extended
@pytest.mark.parametrize("name", CASES)
def test_results(results: dict[str, Array], name: str) -> None:
    case = CASES[name]
    check(results[name], case.expected(INPUTS[case.x]))


@pytest.mark.extended
def test_other_sizes_through_the_same_graph(run: Run) -> None:
    changes = {"x": draw(1, 12, 3, 6), "x1": draw(2, 4, 6), "x3": draw(2, 2, 3, 4, 6)}
    found = run(**changes)
    for name, case in CASES.items():
        check(found[name], case.expected(changes[case.x]))


@pytest.mark.extended
def test_empty_batches(run: Run, results: dict[str, Array]) -> None:
    found = run(x=draw(0, 7, 10, 6), x1=draw(0, 9, 6), x3=draw(0, 3, 4, 5, 6))
    for name, full in results.items():
        assert found[name].shape == (0, *full.shape[1:])


@pytest.mark.extended
def test_what_else_a_call_may_have(results: dict[str, Array]) -> None:
    x = INPUTS["x"]
    plain = Case(W, 2, 1, arguments={"bias": BIAS}).expected(x)
    for name in ("packed filter", "channels first"):
        check(results[name], plain)
    check(results["zeros behind the filters"], CASES["filter as an input"].expected(x))


@pytest.fixture
def x() -> Iterator[TensorValue]:
    """The input of a graph in which nothing is compiled."""
    from max.graph import Graph

    types = [input_type((2, 8, "w", 6))]
    with Graph("refusals", input_types=types, kernel_library=maxconv.kernel_library()) as graph:
        yield graph.inputs[0].tensor


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"upsample": 0}, r"upsample: \(0, 0\) .*at least 1"),
        ({"upsample": (2, -1)}, r"upsample: \(2, -1\).*at least 1"),
        ({"upsample": (2, 2, 2)}, r"upsample: \(2, 2, 2\) has 3 entries; 2 are allowed"),
        ({"upsample": 2, "stride": 2}, r"upsample: \(2, 2\) with stride \(2, 2\).*stride 1 is"),
        ({"upsample": 2, "residual": draw(2, 14, 14, 20)}, r"residual: given beside upsample"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(x: TensorValue, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        maxconv.conv2d(x, W, filter_layout="KRSC", **arguments)


@pytest.mark.parametrize("upsample", [2.0, "2", True, None], ids=str)
def test_types_that_are_refused(x: TensorValue, upsample: Any) -> None:
    with pytest.raises(TypeError, match="upsample: "):
        maxconv.conv2d(x, W, filter_layout="KRSC", upsample=upsample)


def test_a_filter_without_sizes(x: TensorValue) -> None:
    from max.graph import ops

    filter = ops.rebind(ops.constant(W), ("k", 3, 3, 6))
    with pytest.raises(ValueError, match=r"filter: shape .* is symbolic; with upsample"):
        maxconv.conv2d(x, filter * 2.0, filter_layout="KRSC", upsample=2)


def test_the_shape(x: TensorValue) -> None:
    y = maxconv.conv2d(x, W, padding=1, filter_layout="KRSC", upsample=2)
    assert [str(size) for size in y.shape] == ["2", "16", str(x.shape[2] * 2), "20"]
