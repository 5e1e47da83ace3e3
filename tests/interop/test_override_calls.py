"""``override_max``: which calls are taken over, for whom, and what stays as it was."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.interop.graphs import input_type

import maxconv

Array = npt.NDArray[Any]

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
    "transposed, cut to less than the image": lambda ops, v: ops.conv2d_transpose(
        v["x"], zeros(3, 3, 8, 3), (3, 2), (1, 1), (1, 1, 2, 2)
    ),
    "transposed, stride 1, cut": lambda ops, v: ops.conv2d_transpose(
        v["x"], zeros(2, 2, 8, 3), padding=(1, 1, 2, 1)
    ),
    "pooled": lambda ops, v: ops.max_pool2d(v["x"], (3, 2), 2, padding=1),
    "pooled up": lambda ops, v: ops.max_pool2d(v["x"], (2, 2), (2, 3), padding=1, ceil_mode=True),
    "means": lambda ops, v: ops.avg_pool2d(v["x"], (3, 3), 1, (2, 1), (1, 0), count_boundary=False),
    "means of all": lambda ops, v: ops.avg_pool2d(v["any_x"], (2, 2), 2, ceil_mode=True),
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
    "windows of padding": (
        lambda ops, v: ops.max_pool2d(v["x"], (2, 2), padding=2),
        "padding: (2, 2) is not smaller than what the window spans, (2, 2); ",
    ),
    "a window of nothing": (
        lambda ops, v: ops.avg_pool2d(v["x"], (0, 2)),
        "kernel_size: (0, 2) has a non-positive entry",
    ),
    "pooled float64": (
        lambda ops, v: ops.avg_pool2d(double(ops, v["x"]), (2, 2)),
        "input: dtype float64 is not supported; ",
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
    "rank of what is pooled": (
        lambda ops, v: ops.max_pool2d(v["video"], (2, 2)),
        "ValueError: input: rank 5 is not allowed; 4 is needed",
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

    pools = ["max_pool2d", "avg_pool2d"]
    norms = ["group_norm", "rms_norm"]
    assert list(EXCHANGED) == ["conv2d", "conv3d", "conv2d_transpose", *pools, *norms, "custom"]
    for function, stub in EXCHANGED.values():
        parameters = list(inspect.signature(function).parameters)
        assert list(stub.co_varnames[: stub.co_argcount]) == parameters


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


def test_one_override_in_two_threads() -> None:
    """The thread that entered it first leaves it first."""
    override = maxconv.override_max()
    entered, may_end = threading.Event(), threading.Event()
    counts: list[int] = []

    def other() -> None:
        with override:
            entered.set()
            may_end.wait(60)
            counts.append(conv_reports())

    thread = threading.Thread(target=other)
    with override:
        thread.start()
        assert entered.wait(60)
        counts.append(conv_reports())
    assert conv_reports() == 0
    may_end.set()
    thread.join()
    assert counts == [1, 1]
    assert len(override.report.taken) == 2
    assert in_thread(conv_reports) == conv_reports() == 0
    from maxconv._override import _exchange

    assert _exchange._wanted == 0


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
