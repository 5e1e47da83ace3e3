"""Pooling in graphs against a float64 reference: one graph, with symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from tests.interop.graphs import Source, input_type
from tests.reference import Floats, pool_reference

import maxconv

if TYPE_CHECKING:
    from max.engine import Model
    from max.graph import Graph, Module, TensorValue

Array = npt.NDArray[Any]

RNG = np.random.default_rng(11)


def draw(*shape: int) -> npt.NDArray[np.float32]:
    """Below zero for the most part, so that a zero of padding would be the largest."""
    return (RNG.standard_normal(shape) - 1.5).astype(np.float32)


#: Channels of every path: whole vectors of any CPU's, a few, and single ones.
INPUTS: dict[str, Array] = {
    "x": draw(2, 9, 23, 22),
    "x1": draw(3, 17, 6),
    "x3": draw(1, 5, 6, 7, 5),
}
SHAPES: dict[str, tuple[int | str, ...]] = {
    "x": ("n", "h", "w", 22),
    "x1": ("n1", "w1", 6),
    "x3": ("n3", "d3", "h3", "w3", 5),
}


@dataclass(frozen=True)
class Case:
    """A pooling, and what is to become of it."""

    average: bool
    window: tuple[int, ...] = ()
    """Or the whole image."""
    x: str = "x"
    stride: tuple[int, ...] | None = None
    dilation: tuple[int, ...] | None = None
    padding: tuple[int, ...] | None = None
    """Before and after each dimension."""
    ceil_mode: bool = False
    count_boundary: bool = True
    behind: Callable[[TensorValue], TensorValue] | None = None
    behind_reference: Callable[[Floats], Floats] = field(default=lambda v: v)
    given: dict[str, Any] = field(default_factory=dict)
    """Arguments in another form."""

    def build(self, x: TensorValue) -> TensorValue:
        if not self.window:
            result: TensorValue = maxconv.global_avg_pool(x, **self.given)
        else:
            arguments: dict[str, Any] = {"ceil_mode": self.ceil_mode}
            for name in ("stride", "dilation", "padding"):
                if getattr(self, name) is not None:
                    arguments[name] = getattr(self, name)
            if self.average:
                arguments["count_boundary"] = self.count_boundary
            function: Any = maxconv.avg_pool if self.average else maxconv.max_pool
            result = function(x, self.window, **{**arguments, **self.given})
        return result if self.behind is None else self.behind(result)

    def expected(self, x: Array) -> Floats:
        sizes = x.shape[1:-1]
        window = self.window or sizes
        one, none = (1,) * len(window), (0,) * (2 * len(window))
        stride, dilation, pads = self.stride or one, self.dilation or one, self.padding or none
        output = []
        for i, size in enumerate(sizes):
            room = size + pads[2 * i] + pads[2 * i + 1] - dilation[i] * (window[i] - 1) - 1
            count = room // stride[i] + 1
            if self.ceil_mode:
                count = -(-room // stride[i]) + 1
                # As PyTorch: no window begins behind the input.
                count -= (count - 1) * stride[i] >= size + pads[2 * i]
            output.append(count)
        found = pool_reference(
            x, window, stride=stride, dilation=dilation, pad_before=pads[0::2],
            pad_after=pads[1::2], output=output, average=self.average,
            count_boundary=self.count_boundary,
        )  # fmt: skip
        return self.behind_reference(found)


def halved_relu(value: TensorValue) -> TensorValue:
    from max.graph import ops

    result: TensorValue = ops.mul(ops.relu(value + 1.0), 0.5)
    return result


def as_bfloat16(value: TensorValue) -> TensorValue:
    from max.dtype import DType
    from max.graph import ops

    return ops.cast(ops.cast(value, DType.bfloat16), DType.float32)


def bfloat16(values: Floats) -> Floats:
    """Rounded as a cast of float32 is: to nearest, halves to even."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


CASES: dict[str, Case] = {
    "max 2x2": Case(False, (2, 2), stride=(2, 2)),
    "max 3x3, as a stem has it": Case(False, (3, 3), stride=(2, 2), padding=(1, 1, 1, 1)),
    "max 3x3": Case(False, (3, 3), padding=(1, 1, 1, 1)),
    "max 5x5": Case(False, (5, 5), padding=(2, 2, 2, 2)),
    "max, same": Case(False, (3, 5), given={"padding": "same"}, padding=(1, 1, 2, 2)),
    "max, sides given once": Case(False, (3, 5), given={"padding": (1, 2)}, padding=(1, 1, 2, 2)),
    "max, all different": Case(
        False, (2, 3), stride=(1, 3), dilation=(3, 2), padding=(1, 0, 2, 1)
    ),
    "max, up": Case(False, (3, 3), stride=(2, 2), ceil_mode=True),
    "max, up, begins in no padding": Case(
        False, (2, 2), stride=(2, 2), padding=(1, 1, 1, 1), ceil_mode=True
    ),
    "max, stride above the window": Case(False, (1, 2), stride=(3, 5), ceil_mode=True),
    "max 1-D": Case(False, (4,), x="x1", stride=(3,), padding=(1, 2)),
    "max 3-D": Case(False, (2, 3, 2), x="x3", stride=(2, 1, 2), padding=(1, 0, 1, 1, 0, 1)),
    "max, relu": Case(
        False, (3, 3), stride=(2, 2), behind=halved_relu,
        behind_reference=lambda v: np.maximum(v + 1, 0) * 0.5,
    ),
    "max, bfloat16": Case(
        False, (2, 2), stride=(2, 2), behind=as_bfloat16, behind_reference=bfloat16
    ),
    "mean 2x2": Case(True, (2, 2), stride=(2, 2)),
    "mean 3x3": Case(True, (3, 3), padding=(1, 1, 1, 1)),
    "mean 3x3, of the image alone": Case(
        True, (3, 3), stride=(2, 2), padding=(1, 1, 1, 1), count_boundary=False
    ),
    "mean, all different": Case(
        True, (2, 3), stride=(1, 3), dilation=(3, 2), padding=(1, 0, 2, 1)
    ),
    "mean, all different, of the image alone": Case(
        True, (2, 3), stride=(1, 3), dilation=(3, 2), padding=(1, 0, 2, 1), count_boundary=False
    ),
    "mean, up": Case(
        True, (3, 3), stride=(2, 2), padding=(1, 1, 1, 1), ceil_mode=True
    ),
    "mean, up, not behind the padding": Case(True, (4, 4), stride=(3, 3), ceil_mode=True),
    "mean, up, of the image alone": Case(
        True, (4, 4), stride=(3, 3), padding=(1, 0, 0, 1), ceil_mode=True, count_boundary=False
    ),
    "mean 1-D": Case(True, (4,), x="x1", stride=(3,), padding=(1, 2)),
    "mean 3-D": Case(
        True, (2, 3, 2), x="x3", stride=(2, 1, 2), padding=(1, 0, 1, 1, 0, 1),
        count_boundary=False,
    ),
    "global": Case(True),
    "global 3-D": Case(True, x="x3"),
}  # fmt: skip


def in_channels_first(case: Case) -> Callable[[TensorValue], TensorValue]:
    """A case of permuted tensors, permuted back to be compared."""

    def build(x: TensorValue) -> TensorValue:
        from max.graph import ops

        turned = Case(**{**vars(case), "given": {"input_layout": "NCHW"}})
        return ops.permute(turned.build(ops.permute(x, [0, 3, 1, 2])), [0, 2, 3, 1])

    return build


def build(name: str, module: Module) -> Graph:
    """The graph of all cases; its last outputs have the channels first, or 16 bits."""
    from max.dtype import DType
    from max.graph import Graph, ops

    types = [input_type(SHAPES[x]) for x in INPUTS]
    library = maxconv.kernel_library()
    with Graph(name, input_types=types, kernel_library=library, module=module) as graph:
        values = dict(zip(INPUTS, (value.tensor for value in graph.inputs), strict=True))
        outputs = [case.build(values[case.x]) for case in CASES.values()]
        outputs += [in_channels_first(CASES[case])(values["x"]) for case in CHANNELS_FIRST]
        for kind, case in HALVES.items():
            half = ops.cast(values["x"], DType[kind])
            outputs.append(ops.cast(CASES[case].build(half), DType.float32))
        graph.output(*outputs)
    return graph


CHANNELS_FIRST = ("max 3x3, as a stem has it",)

#: Cases in types of 16 bits.
HALVES = {
    "bfloat16": "max 3x3, as a stem has it",
    "float16": "mean 3x3, of the image alone",
}

GRAPHS = {"pooling": Source(build)}

Pools = Callable[..., dict[str, Array]]


@pytest.fixture(scope="module")
def pools(models: dict[str, Model]) -> Pools:
    """Runs the graph; returns the outputs by the name of the case."""
    names = [
        *CASES,
        *(f"{case}, channels first" for case in CHANNELS_FIRST),
        *HALVES,
    ]

    def run(**changes: Array) -> dict[str, Array]:
        inputs = {**INPUTS, **changes}
        outputs = models["pooling"].execute(*inputs.values())
        return dict(zip(names, (output.to_numpy() for output in outputs), strict=True))

    return run


@pytest.fixture(scope="module")
def results(pools: Pools) -> dict[str, Array]:
    return pools()


def check(found: Array, expected: Floats, *, average: bool) -> None:
    """Compares a result with the exact one.

    The largest of float32 elements is one of them. A mean of up to a few hundred elements of size
    about 2 strays by as many roundings of a sum that is divided after.
    """
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    if average:
        np.testing.assert_allclose(found, expected, rtol=3e-6, atol=3e-6)
    else:
        np.testing.assert_array_equal(found, expected.astype(np.float32))


@pytest.mark.parametrize("name", CASES)
def test_results(results: dict[str, Array], name: str) -> None:
    case = CASES[name]
    check(results[name], case.expected(INPUTS[case.x]), average=case.average)


def test_other_sizes_through_the_same_graph(pools: Pools) -> None:
    changes = {"x": draw(3, 6, 41, 22), "x1": draw(1, 8, 6), "x3": draw(2, 3, 4, 9, 5)}
    found = pools(**changes)
    for name, case in CASES.items():
        check(found[name], case.expected(changes[case.x]), average=case.average)


@pytest.mark.parametrize("name", CHANNELS_FIRST)
def test_channels_first(results: dict[str, Array], name: str) -> None:
    np.testing.assert_array_equal(results[f"{name}, channels first"], results[name])


def test_16_bits(results: dict[str, Array]) -> None:
    """The largest is one of the rounded elements; a mean is rounded once, from float32."""
    x = INPUTS["x"].astype(np.float64)
    expected = CASES[HALVES["bfloat16"]].expected(bfloat16(x))
    np.testing.assert_array_equal(results["bfloat16"], expected)
    expected = CASES[HALVES["float16"]].expected(x.astype(np.float16))
    np.testing.assert_allclose(results["float16"], expected, rtol=1.01 * 2.0**-11, atol=1e-6)


def test_not_a_number_is_the_largest(pools: Pools) -> None:
    """Wherever in a window it stands, and only there."""
    x = INPUTS["x"].copy()
    x[0, 4, 10, :] = np.nan
    x[1, :, :, 3] = -np.inf
    found = pools(x=x)
    for name, case in CASES.items():
        if case.x == "x" and not case.average and case.behind is None:
            np.testing.assert_array_equal(found[name], case.expected(x).astype(np.float32))
            assert np.isnan(found[name]).any() or "above the window" in name


def test_empty_batches(pools: Pools, results: dict[str, Array]) -> None:
    found = pools(x=draw(0, 9, 23, 22), x1=draw(0, 17, 6), x3=draw(0, 5, 6, 7, 5))
    for name, full in results.items():
        assert found[name].shape == (0, *full.shape[1:])


def test_sizes_are_pytorch_s(results: dict[str, Array]) -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(INPUTS["x"]).movedim(-1, 1)
    for name, case in CASES.items():
        pads = case.padding or (0, 0, 0, 0)
        if case.x == "x" and case.window and pads[0::2] == pads[1::2] and "up" in name:
            keywords: dict[str, Any] = {"padding": pads[0::2], "ceil_mode": True}
            function = torch.nn.functional.max_pool2d
            if case.average:
                function = torch.nn.functional.avg_pool2d
                keywords["count_include_pad"] = case.count_boundary
            expected = function(x, case.window, case.stride, **keywords).movedim(1, -1)
            check(results[name], expected.double().numpy(), average=case.average)


def test_a_window_that_turns_out_too_large(pools: Pools) -> None:
    sentence = r"filter: w extent \d with dilation \d spans (\d) but the padded input has only (\d)"
    with pytest.raises(ValueError, match=sentence):
        pools(x1=draw(3, 0, 6))


@pytest.fixture
def x() -> Iterator[list[Any]]:
    """A graph with an input, in which nothing is compiled."""
    from max.graph import Graph

    types = [
        input_type((2, 8, "w", 6)),
        input_type((2, 6)),
        input_type((2, 8, 8, 6), "int32"),
    ]
    with Graph("refusals", input_types=types, kernel_library=maxconv.kernel_library()) as graph:
        yield [value.tensor for value in graph.inputs]


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"kernel_size": (2, 2, 2)}, ValueError, r"kernel_size: \(2, 2, 2\) has 3 entries; 2"),
        ({"kernel_size": 0}, ValueError, r"kernel_size: \(0, 0\) has a non-positive entry"),
        ({"kernel_size": 2.0}, TypeError, "kernel_size: 2.0 is a float; an integer or a tuple"),
        ({"kernel_size": 9}, ValueError, "kernel_size: h extent 9 with dilation 1 spans 9 but"),
        ({"stride": 0}, ValueError, r"stride: \(0, 0\) has a non-positive entry"),
        ({"dilation": (1, -1)}, ValueError, r"dilation: \(1, -1\) has a non-positive entry"),
        ({"padding": (1, 2, 3)}, ValueError, r"padding: \(1, 2, 3\) has 3 entries; 4 are allowed"),
        ({"padding": -1}, ValueError, "padding: .* has a negative entry"),
        (
            {"padding": 2},
            ValueError,
            r"padding: \(2, 2\) is not smaller than what the window spans, \(2, 2\)",
        ),
        ({"ceil_mode": 1}, TypeError, "ceil_mode: 1 is a int; a bool is allowed"),
        ({"input_layout": "CHWN"}, ValueError, "input_layout: 'CHWN' is not an input layout"),
    ],
)
@pytest.mark.parametrize("function", [maxconv.max_pool, maxconv.avg_pool])
def test_refusals(
    x: Sequence[Any], function: Any, arguments: dict[str, Any], error: type, sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        function(x[0], **{"kernel_size": 2, **arguments})


def test_refused_inputs(x: Sequence[Any]) -> None:
    with pytest.raises(TypeError, match="count_boundary: 0 is a int; a bool is allowed"):
        maxconv.avg_pool(x[0], 2, count_boundary=cast(bool, 0))
    functions: list[Callable[[Any], Any]] = [
        lambda v: maxconv.max_pool(v, 2),
        maxconv.global_avg_pool,
    ]
    for function in functions:
        with pytest.raises(ValueError, match="input: rank 2 is not allowed; a pooling"):
            function(x[1])
        with pytest.raises(ValueError, match="input: dtype int32 is not supported"):
            function(x[2])
        with pytest.raises(TypeError, match="input: a list is not a graph value"):
            function([1.0])


def test_a_graph_without_the_kernels_is_refused() -> None:
    from max.graph import Graph

    with (
        Graph("bare", input_types=[input_type((1, 4, 4, 2))]) as graph,
        pytest.raises(ValueError, match="graph: 'bare' does not know maxconv's ops"),
    ):
        maxconv.max_pool(graph.inputs[0].tensor, 2)


def test_known_sizes_are_known(x: Sequence[Any]) -> None:
    """Rounding up stays an integer where the input's size is one."""
    assert maxconv.max_pool(x[0], 2, stride=2, padding=1, ceil_mode=True).shape[1] == 5
    assert maxconv.max_pool(x[0], 3, stride=2, padding=1).shape[1] == 4
    assert list(maxconv.global_avg_pool(x[0]).shape) == [2, 1, 1, 6]
