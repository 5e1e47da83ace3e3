"""Interleaved images in graphs: the layouts, the packed filters, and what is refused."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.interop.graphs import Source, input_type

import maxconv
from maxconv import _interleave
from maxconv._blocked_filter import array_of_krsc
from maxconv._graph import constant_array

if TYPE_CHECKING:
    from max.engine import Model
    from max.graph import Graph, Module, TensorValue

Array = npt.NDArray[Any]

#: Integers, ``[R, S, C, K]``, of whole blocks and of 3 channels.
RNG = np.random.default_rng(7)
WHOLE = RNG.integers(-128, 128, (3, 2, 8, 12)).astype(np.int8)
COLOURS = RNG.integers(-128, 128, (3, 2, 3, 12)).astype(np.int8)


def interleaved(x: Array, block: int) -> Array:
    """``[N, H, W, C]`` as ``[N, C / block, H, W, block]``, element by element."""
    n, h, w, c = x.shape
    result = np.zeros((n, c // block, h, w, block), x.dtype)
    for channel in range(c):
        result[:, channel // block, :, :, channel % block] = x[..., channel]
    return result


def packed(filter: Array) -> Array:
    """``[R, S, C, K]`` as ``[C / 4, R, S, K, 4]``, flat, element by element."""
    r, s, c, k = filter.shape
    result = np.zeros((-(-c // 4), r, s, k, 4), filter.dtype)
    for channel in range(c):
        result[channel // 4, ..., channel % 4] = filter[:, :, channel]
    return result.reshape(-1)


def build(name: str, module: Module | None = None) -> Graph:
    """To the layout and back, of several blocks; a filter that a graph packs."""
    from max.graph import Graph

    types = [input_type(("n", "h", "w", 12)), input_type((12, 8, 3, 2))]
    library = maxconv.kernel_library()
    with Graph(name, input_types=types, kernel_library=library, module=module) as graph:
        x, filter = (value.tensor for value in graph.inputs)
        y = maxconv.interleave(x, 4)
        graph.output(
            y,
            maxconv.deinterleave(y * 2),
            maxconv.interleave(x, 3),
            maxconv.interleave(x, 12),
            _interleave._packed_in_graph(filter, "FCRS"),
        )
    return graph


GRAPHS = {"interleave": Source(build)}


def test_the_layout(models: dict[str, Model]) -> None:
    x = np.arange(2 * 3 * 5 * 12, dtype=np.float32).reshape(2, 3, 5, 12)
    filter = np.moveaxis(WHOLE, (2, 3), (1, 0)).astype(np.float32)
    fours, back, threes, all_of_them, filters = (
        output.to_numpy()
        for output in models["interleave"].execute(x, np.ascontiguousarray(filter))
    )
    np.testing.assert_array_equal(fours, interleaved(x, 4))
    np.testing.assert_array_equal(back, 2 * x)
    np.testing.assert_array_equal(threes, interleaved(x, 3))
    np.testing.assert_array_equal(all_of_them, x[:, None])
    np.testing.assert_array_equal(filters, packed(WHOLE))


INPUTS: dict[str, tuple[str, tuple[int | str, ...]]] = {
    "x": ("int8", (2, 2, 6, 7, 4)),
    "symbolic": ("int8", ("n", "c", "h", "w", 4)),
    "colours": ("int8", (2, 1, 6, 7, 4)),
    "last": ("int8", (2, 6, 7, 8)),
    "eights": ("int8", (2, 1, 6, 7, 8)),
    "half": ("bfloat16", (2, 2, 6, 7, 4)),
    "host": ("int8", (2, 2, 6, 7, 4)),
    "host_wide": ("float32", (2, 2, 6, 7, 4)),
    "w": ("int8", (3, 2, 8, 12)),
    "w_colours": ("int8", (3, 2, 3, 12)),
    "w_symbolic": ("int8", (3, 2, 8, "k")),
    "batch_last": ("int8", (2, 6, 7, 2, 4)),
    "wide": ("int8", (2, 1, 6, 7, 32)),
    "residual": ("float32", (2, 3, 4, 6, 4)),
    "residual_last": ("float32", (2, 4, 6, 12)),
}


def graph_of_inputs() -> tuple[Graph, dict[str, TensorValue]]:
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType

    types = [
        TensorType(DType[dtype], shape, DeviceRef.CPU() if "host" in name else DeviceRef.GPU())
        for name, (dtype, shape) in INPUTS.items()
    ]
    graph = Graph("interleaved", input_types=types, kernel_library=maxconv.kernel_library())
    return graph, {name: value.tensor for name, value in zip(INPUTS, graph.inputs, strict=True)}


def convolve(values: dict[str, TensorValue], **given: Any) -> TensorValue:
    """A convolution; a value that is the name of an input stands for that input."""
    from max.dtype import DType

    whole: dict[str, Any] = {"x": "x", "filter": WHOLE, "out_dtype": DType.float32, **given}
    named: dict[str, Any] = {
        n: values[v] if isinstance(v, str) and v in values else v for n, v in whole.items()
    }
    return maxconv.conv2d(**{"input_layout": "NC/4HW4", **named})


def test_types_of_results() -> None:
    from max.dtype import DType
    from max.graph import DeviceRef, TensorType

    graph, values = graph_of_inputs()
    gpu = DeviceRef.GPU()
    with graph:
        plain = convolve(values, bias=np.ones(12), scale=0.5, residual="residual")
        assert plain.type == TensorType(DType.float32, (2, 3, 4, 6, 4), gpu)
        strided = convolve(values, stride=(2, 3), padding=(1, 0, 2, 1), out_dtype="bfloat16")
        assert strided.type == TensorType(DType.bfloat16, (2, 3, 3, 3, 4), gpu)
        symbolic = convolve(values, x="symbolic", padding="same", config="dp4a")
        assert symbolic.shape[:2] == ["n", 3]
        rounded = maxconv.quantize_linear(symbolic, 0.5)
        assert maxconv.deinterleave(rounded).shape[3] == 12
        wide = maxconv.deinterleave(values["symbolic"])
        assert wide.rank == 4


@pytest.mark.parametrize(
    "given", ["RSCF", "FCRS", "KRSC", "blocks", "packed", "packed blocks", "constant", "float"]
)
@pytest.mark.parametrize("filter", [WHOLE, COLOURS], ids=["whole", "colours"])
def test_filters_are_packed_when_the_graph_is_built(
    filter: Array, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from max.dtype import DType
    from max.graph import DeviceRef, ops

    taken: list[Any] = []
    emit = vars(_interleave)["emit"]

    def watched(operands: Any, *arguments: Any, **named: Any) -> Any:
        taken.append(operands.filter)
        return emit(operands, *arguments, **named)

    monkeypatch.setattr(_interleave, "emit", watched)
    fcrs, krsc = filter.transpose(3, 2, 0, 1), filter.transpose(3, 0, 1, 2)
    in_blocks = array_of_krsc(krsc, 4)
    # Of floats -128 is no value of int8's: their magnitudes go up to 127.
    small = np.maximum(filter, -127)
    graph, values = graph_of_inputs()
    with graph:
        arguments: dict[str, Any] = {
            "RSCF": {"filter": filter},
            "FCRS": {"filter": fcrs, "filter_layout": "FCRS"},
            "KRSC": {"filter": krsc, "filter_layout": "KRSC"},
            "blocks": {"filter": in_blocks, "filter_layout": "C/4RSK4"},
            "packed": {"filter": maxconv.pack_filter(fcrs, "FCRS")},
            "packed blocks": {"filter": maxconv.pack_filter(in_blocks, "C/4RSK4")},
            "constant": {"filter": ops.constant(filter, DType.int8, DeviceRef.GPU())},
            "float": {"filter": small.astype(np.float32)},
        }[given]
        convolve(values, x="x" if filter is WHOLE else "colours", **arguments)
    elements = constant_array(taken[0])
    assert elements is not None
    np.testing.assert_array_equal(elements, packed(small if given == "float" else filter))


#: What is changed of a call that is right, and the message.
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": WHOLE}, TypeError, "input: a ndarray is not a graph value; maxconv.interleave gives"),
    (
        {"x": "half"},
        ValueError,
        "input: dtype bfloat16 does not match; int8 or uint8 is allowed in",
    ),
    (
        {"x": "host_wide"},
        ValueError,
        "input: dtype float32 does not match; int8 or uint8 or bfloat16 or float16 is allowed in",
    ),
    (
        {"x": "last"},
        ValueError,
        "input: shape (2, 6, 7, 8) is not in NC/4HW4; [batch, channels / 4, h, w, 4] is allowed",
    ),
    ({"x": "eights"}, ValueError, "input: shape (2, 1, 6, 7, 8) is not in NC/4HW4"),
    ({"x": "colours"}, ValueError, "filter: 8 channels a group do not match the input's 4 chann"),
    ({"groups": 2}, ValueError, "groups: 2 is not supported in NC/4HW4; 1 is allowed"),
    ({"upsample": 2}, ValueError, "upsample: (2, 2) is not supported in NC/4HW4; 1 is allowed"),
    (
        {"filter": WHOLE[..., :6]},
        ValueError,
        "filter: 6 filters are not supported in NC/4HW4; multiples of 4 are allowed",
    ),
    ({"filter": COLOURS}, ValueError, "filter: 3 channels a group do not match the input's 8"),
    (
        {"x": "colours", "filter": "w_colours"},
        ValueError,
        "filter: 3 channels of a filter that is computed are not supported in NC/4HW4; multiples",
    ),
    ({"filter": "w_symbolic"}, ValueError, "filter: k filters and 8 channels; in NC/4HW4 numbers"),
    ({"filter": WHOLE * 1.5}, ValueError, "filter: a value of magnitude"),
    (
        {"residual": "residual_last"},
        ValueError,
        "residual: shape (2, 4, 6, 12) must equal the output's shape (2, 3, 4, 6, 4)",
    ),
    ({"out_dtype": None}, ValueError, "out_dtype: None stands for the input's int8"),
    (
        {"config": "sm80"},
        ValueError,
        "config: 'sm80' is not a kernel of device gpu:0 for NC/4HW4; auto, dp4a are allowed",
    ),
    (
        {"x": "last", "config": "dp4a", "input_layout": "NHWC"},
        ValueError,
        "config: 'dp4a' is not a kernel of device gpu:0; auto, gemv, stem, window, diagonal, ",
    ),
    (
        {"x": "last", "input_layout": "NC/8HW8"},
        ValueError,
        "input_layout: 'NC/8HW8' is not an input layout; NHWC, NCHW, NC/4HW4, NC/16HW16, NC/32HW32",
    ),
    (
        {"output_layout": "NC/8HW8"},
        ValueError,
        "output_layout: 'NC/8HW8' is no layout; NHWC, NCHW, NC/4HW4, NC/16HW16, NC/32HW32, C/4HWN4",
    ),
    ({"output_layout": 4}, TypeError, "output_layout: 4 is a int; a ConvInputLayout or one of"),
    (
        {"x": "last", "input_layout": "NHWC", "output_layout": "NCHW"},
        ValueError,
        "output_layout: 'NCHW' beside input_layout='NHWC' is not supported; the same is allowed",
    ),
    (
        {"filter_layout": "C/16RSK16"},
        ValueError,
        "filter: shape (3, 2, 8, 12) is not in layout C/16RSK16; [channels / 16, r, s, filters, 16",
    ),
    (
        {"filter_layout": "C/8RSK8"},
        ValueError,
        "filter_layout: 'C/8RSK8' is not a layout of a filter with 2 spatial dimensions; KRSC, RSC",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD)
def test_what_is_not_allowed(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    graph, values = graph_of_inputs()
    with graph, pytest.raises(error, match=re.escape(message)):
        convolve(values, **changes)


#: The pairings of the operands' layouts that MegEngine's CUTLASS kernels have, with the unit that
#: multiplies, and what a GPU says of it here.
PAIRINGS = [
    ("NC/4HW4", "NC/4HW4", None),
    ("C/4HWN4", "C/4HWN4", "no kernel reads neighbouring images"),
    ("NC/32HW32", "NC/32HW32", "dp4a reads blocks of 4, and no kernel of tensor cores reads"),
    ("NC/4HW4", "NC/32HW32", "no kernel stores another layout than it reads"),
    ("NC/32HW32", "NC/4HW4", "no kernel stores another layout than it reads"),
]


@pytest.mark.parametrize(("source", "target", "reason"), PAIRINGS)
def test_pairings_of_a_gpu(source: str, target: str, reason: str | None) -> None:
    """One runs, the others are refused; ``test_integers_in_blocks`` runs them all on a CPU."""
    graph, values = graph_of_inputs()
    shapes = {"NC/4HW4": "x", "C/4HWN4": "batch_last", "NC/32HW32": "wide"}
    wide = {} if source != "NC/32HW32" else {"filter": np.tile(WHOLE, (1, 1, 4, 1))}
    given = {"x": shapes[source], "input_layout": source, "output_layout": target, **wide}
    with graph:
        if reason is None:
            assert [int(n) for n in convolve(values, **given).shape] == [2, 3, 4, 6, 4]
            return
        message = f"input_layout: from {source} to {target} is not supported on a GPU: {reason}"
        with pytest.raises(ValueError, match=re.escape(message)):
            convolve(values, **given)


def test_signals_and_volumes_have_no_such_layout() -> None:
    from max.dtype import DType

    graph, values = graph_of_inputs()
    with graph, pytest.raises(ValueError, match="input_layout: 'NC/4HW4' is not an input layout"):
        maxconv.conv3d(values["x"], WHOLE[None], input_layout="NC/4HW4", out_dtype=DType.float32)


@pytest.mark.parametrize(
    ("name", "channels", "message"),
    [
        ("last", 3, "x: 8 channels; a multiple of channels=3 is needed"),
        ("last", 0, "channels: 0 is not positive; it must be at least 1"),
        ("x", 4, "x: shape (2, 2, 6, 7, 4) has rank 5; rank 4 is allowed"),
    ],
)
def test_what_is_not_interleaved(name: str, channels: int, message: str) -> None:
    graph, values = graph_of_inputs()
    with graph:
        with pytest.raises(ValueError, match=re.escape(message)):
            maxconv.interleave(values[name], channels)
        with pytest.raises(ValueError, match=r"x: shape \(2, 6, 7, 8\) has rank 4; rank 5 is"):
            maxconv.deinterleave(values["last"])
