"""Transposed convolutions: the phases they are split into, and the graph that runs them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.interop.graphs import Source
from tests.reference import Floats, conv_reference, conv_transpose_reference

import maxconv
from maxconv._phases import split_axis

if TYPE_CHECKING:
    from max.engine import Model
    from max.graph import Graph, Module

Array = npt.NDArray[Any]


def by_phases(x: Floats, w: Floats, **arguments: int) -> Floats:
    """A one-dimensional transposed convolution ``[W]`` by what ``split_axis`` says."""
    stride = arguments["stride"]
    split = split_axis(taps=len(w), **arguments)
    outputs = []
    for phase in split.phases:
        taps = w[list(phase.taps)] if phase.taps else np.zeros(1)
        y = conv_reference(
            x[None, :, None],
            taps[None, :, None],
            stride=(1,),
            dilation=(phase.dilation,),
            pad_before=(max(phase.pad_before, 0),),
            pad_after=(max(phase.pad_after, 0),),
        )[0, :, 0]
        y = y[max(-phase.pad_before, 0) : len(y) - max(-phase.pad_after, 0)]
        assert len(y) == len(x) + split.growth
        outputs.append(y)
    whole = np.stack(outputs, axis=1).reshape(-1)
    assert 0 <= split.surplus < stride
    result: Floats = whole[: len(whole) - split.surplus]
    return result


@settings(deadline=None, max_examples=400)
@given(
    size=st.integers(1, 7),
    taps=st.integers(1, 6),
    stride=st.integers(1, 5),
    dilation=st.integers(1, 4),
    pad_before=st.integers(0, 6),
    pad_after=st.integers(0, 6),
    output_padding=st.integers(0, 4),
)
def test_the_phases_make_up_the_transposed_convolution(
    size: int, taps: int, stride: int, dilation: int, pad_before: int, pad_after: int,
    output_padding: int,
) -> None:  # fmt: skip
    assume(output_padding < max(stride, dilation))
    full = (size - 1) * stride + dilation * (taps - 1) + 1 + output_padding
    assume(full - pad_before - pad_after >= 1)
    x: Floats = np.arange(1, 1 + size, dtype=np.float64)
    w: Floats = np.float64(10) ** np.arange(taps, dtype=np.float64)
    expected = conv_transpose_reference(
        x[None, :, None], w[None, :, None], stride=(stride,), dilation=(dilation,),
        pad_before=(pad_before,), pad_after=(pad_after,), output_padding=(output_padding,),
    )[0, :, 0]  # fmt: skip
    actual = by_phases(
        x, w, stride=stride, dilation=dilation, pad_before=pad_before, pad_after=pad_after,
        output_padding=output_padding,
    )  # fmt: skip
    np.testing.assert_array_equal(actual, expected)


def test_the_reference_is_torchs() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    for stride, dilation, pads, extra, groups in (
        ((1, 1), (1, 1), (0, 0), (0, 0), 1),
        ((2, 3), (1, 2), (1, 2), (1, 2), 1),
        ((3, 2), (2, 1), (0, 1), (2, 0), 2),
    ):
        x = rng.standard_normal((2, 5, 6, 4))
        w = rng.standard_normal((4, 3, 2, 3))
        theirs = torch.nn.functional.conv_transpose2d(
            torch.tensor(x).permute(0, 3, 1, 2), torch.tensor(w).permute(0, 3, 1, 2),
            stride=stride, padding=pads, output_padding=extra, groups=groups, dilation=dilation,
        ).permute(0, 2, 3, 1).numpy()  # fmt: skip
        ours = conv_transpose_reference(
            x, w, stride=stride, dilation=dilation, pad_before=pads, pad_after=pads,
            output_padding=extra, groups=groups,
        )  # fmt: skip
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


RNG = np.random.default_rng(11)
X = RNG.standard_normal((2, 5, 6, 4)).astype(np.float32)
BIAS = RNG.standard_normal(3).astype(np.float32)


def taps(rows: int, columns: int, filters: int = 3) -> Array:
    """Draws ``[C, R, S, K / groups]``."""
    return RNG.standard_normal((4, rows, columns, filters)).astype(np.float32)


# Name: filter, and arguments as the graph function takes them. A graph compiles each phase for some
# seconds, so most cases have few; the property above has all kinds of them.
USUAL: dict[str, tuple[Array, dict[str, Any]]] = {
    "upsample 4x4": (taps(4, 4), {"stride": 2, "padding": 1}),
    "upsample 2x2, merged": (taps(2, 2), {"stride": (2, 2), "bias": BIAS, "activation": "relu"}),
    "weight, merged": (taps(2, 2), {"stride": 2}),
    "input": (taps(3, 3, 2), {"stride": (2, 1), "groups": 2}),
    "channels first": (taps(3, 3), {"stride": 1, "padding": 1, "bias": BIAS}),
}
FURTHER: dict[str, tuple[Array, dict[str, Any]]] = {
    "padding, dilation": (taps(3, 2), {"padding": (1, 0, 0, 1), "dilation": (2, 3)}),
    "cut phases": (taps(2, 2), {"stride": (2, 1), "padding": (3, 0, 0, 1)}),
    "groups": (taps(3, 3, 2), {"stride": (1, 2), "groups": 2, "padding": 1}),
    "weight": (taps(3, 3), {"stride": (2, 1), "padding": 1}),
    "input with empty phases": (taps(1, 1), {"stride": (1, 2)}),
}
CASES = USUAL | FURTHER
LAYOUTS = {"KRSC": (0, 1, 2, 3), "RSCF": (1, 2, 3, 0), "FCRS": (0, 3, 1, 2)}


def expected(name: str, x: Array) -> Floats:
    w, arguments = CASES[name]
    padding = arguments.get("padding", 0)
    before_h, after_h, before_w, after_w = padding if isinstance(padding, tuple) else (padding,) * 4

    def pair(key: str, default: int) -> tuple[int, int]:
        value = arguments.get(key, default)
        return value if isinstance(value, tuple) else (value, value)

    result = conv_transpose_reference(
        x, w, stride=pair("stride", 1), dilation=pair("dilation", 1),
        pad_before=(before_h, before_w), pad_after=(after_h, after_w),
        output_padding=pair("output_paddings", 0), groups=arguments.get("groups", 1),
        bias=arguments.get("bias"),
    )  # fmt: skip
    return np.maximum(result, 0) if arguments.get("activation") == "relu" else result


# The filter of each case, as it is passed.
LAID_OUT: dict[str, tuple[str, Array]] = {}
for _i, (_name, (_w, _)) in enumerate(CASES.items()):
    _layout = list(LAYOUTS)[_i % 3]
    LAID_OUT[_name] = _layout, np.ascontiguousarray(_w.transpose(LAYOUTS[_layout]))


class Transposed:
    """A graph of cases, and what it computes."""

    def __init__(self, cases: Iterable[str]) -> None:
        self.cases = list(cases)
        self.inputs = [case for case in self.cases if case.startswith("input")]

    def weights(self) -> dict[str, Array]:
        """By the names that they have in the graph."""
        names = (case for case in self.cases if case.startswith("weight"))
        return {case.replace(", ", "_"): LAID_OUT[case][1] for case in names}

    def build(self, name: str, module: Module) -> Graph:
        from max.dtype import DType
        from max.graph import DeviceRef, Graph, TensorType, Weight, ops

        cpu = DeviceRef.CPU()
        types = [TensorType(DType.float32, ("n", "h", "w", 4), cpu)]
        types += [TensorType(DType.float32, LAID_OUT[case][1].shape, cpu) for case in self.inputs]
        library = maxconv.kernel_library()
        with Graph(name, input_types=types, kernel_library=library, module=module) as graph:
            x, *filters = (value.tensor for value in graph.inputs)
            outputs = []
            for case in self.cases:
                layout, array = LAID_OUT[case]
                filter: Any = array
                if case in self.inputs:
                    filter = filters[self.inputs.index(case)]
                elif case.startswith("weight"):
                    filter = Weight(case.replace(", ", "_"), DType.float32, array.shape, cpu)
                first = case == "channels first"
                y = maxconv.conv2d_transpose(
                    ops.permute(x, [0, 3, 1, 2]) if first else x, filter, filter_layout=layout,
                    input_layout="NCHW" if first else "NHWC", **CASES[case][1],
                )  # fmt: skip
                outputs.append(ops.permute(y, [0, 2, 3, 1]) if first else y)
            graph.output(*outputs)
        return graph

    def check(self, model: Model) -> None:
        for image in (X, RNG.standard_normal((1, 3, 9, 4)).astype(np.float32)):
            results = model.execute(image, *(LAID_OUT[name][1] for name in self.inputs))
            for name, result in zip(self.cases, results, strict=True):
                reference = expected(name, image)
                assert result.shape == reference.shape, name
                # At most 60 products a sum, of numbers of size about 1; each rounds once.
                bound = 60 * 4 * math.sqrt(60) * 2.0**-24
                np.testing.assert_allclose(result.to_numpy(), reference, atol=bound, err_msg=name)


usual, further = Transposed(USUAL), Transposed(FURTHER)
GRAPHS = {"transpose": Source(usual.build, usual.weights)}
EXTENDED = {"transpose_further": Source(further.build, further.weights)}


def test_graphs(models: dict[str, Model]) -> None:
    usual.check(models["transpose"])


@pytest.mark.extended
def test_further_graphs(further_models: dict[str, Model]) -> None:
    further.check(further_models["transpose_further"])


@pytest.fixture(scope="module")
def graph() -> Graph:
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType

    types = [
        TensorType(DType.float32, shape, DeviceRef.CPU()) for shape in ((1, 5, 5, 4), (1, 5, 4))
    ]
    return Graph("bad", input_types=types, kernel_library=maxconv.kernel_library())


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"stride": 0}, ValueError, ["stride: (0, 0)", "at least 1"]),
        ({"dilation": (1, -1)}, ValueError, ["dilation: (1, -1)", "at least 1"]),
        ({"padding": (0, 0, -1, 0)}, ValueError, ["padding: (0, 0, -1, 0)", "at least 0"]),
        ({"padding": "same"}, ValueError, ["padding: 'same'", "integer"]),
        ({"padding": 9}, ValueError, ["padding: cuts", "h extent down to -11", "at least 1"]),
        ({"output_paddings": 1}, ValueError, ["output_paddings: (1, 1)", "stride (1, 1)"]),
        ({"output_paddings": (0, -1)}, ValueError, ["output_paddings: (0, -1)", "at least 0"]),
        ({"output_paddings": (0, 0.0)}, TypeError, ["output_paddings: (0, 0.0)", "integers"]),
        ({"groups": 3}, ValueError, ["filter: 4 filters are not divisible by groups=3"]),
        ({"groups": 0}, ValueError, ["groups: 0", "at least 1"]),
        ({"filter": np.ones((5, 3, 3, 2), np.float32)}, ValueError, ["filter: 5 filters", "4"]),
        ({"filter": np.ones((4, 3, 3), np.float32)}, ValueError, ["filter", "rank 3", "rank 4"]),
        ({"filter": [1.0]}, TypeError, ["filter: a list", "numpy"]),
        (
            {"filter": maxconv.pack_filter(np.ones((4, 3, 3, 2)), "KRSC")},
            TypeError,
            ["filter: a PackedFilter", "array"],
        ),
        ({"filter_layout": "CFRS"}, ValueError, ["filter_layout: 'CFRS'", "KRSC, RSCF, FCRS"]),
        ({"bias": np.ones(3)}, ValueError, ["bias: 3 elements, but there are 2 filters"]),
        ({"x": "x3"}, ValueError, ["input", "rank 3", "rank 4"]),
    ],
)
def test_bad_arguments(
    graph: Graph, changes: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    x4, x3 = (value.tensor for value in graph.inputs)
    good = {"x": x4, "filter": np.ones((4, 3, 3, 2), np.float32), "filter_layout": "KRSC"}
    arguments: dict[str, Any] = good | changes
    if changes.get("x") == "x3":
        arguments["x"] = x3
    with graph, pytest.raises(error) as caught:
        maxconv.conv2d_transpose(**arguments)
    for word in words:
        assert word in str(caught.value)
