"""Which convolutions of a graph become ops that take no fused work; no graph is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.interop.graphs import input_type

import maxconv
from maxconv._fields import Op

if TYPE_CHECKING:
    from max.graph import Graph, TensorValue


@pytest.fixture
def graph() -> Iterator[Graph]:
    """A graph with an image."""
    from max.graph import Graph

    types = [input_type(("n", "h", "w", 8))]
    with Graph("unfused", input_types=types, kernel_library=maxconv.kernel_library()) as made:
        yield made


def conv(x: TensorValue, **given: Any) -> TensorValue:
    filter = np.ones((3, 3, 8, 8), np.float32)
    return maxconv.conv2d(x, filter, padding=1, **given)


def op_of(value: TensorValue) -> str:
    owner: Any = value._mlir_value.owner
    return str(owner.symbol)


def test_what_goes_to_convolutions_and_outputs(graph: Graph) -> None:
    """Also as a residual, to a pooling, and through what changes the shape alone."""
    from max.graph import ops

    first = conv(graph.inputs[0].tensor)
    second = conv(first, residual=first)
    third = conv(second)
    assert op_of(first) == Op.CONV_CPU
    rebound = ops.rebind(third, ("n", "height", "w", 8))
    graph.output(rebound, maxconv.max_pool(second, 2), ops.reshape(third, (-1, 8)))
    for value in (first, second, third):
        assert op_of(value) == Op.CONV_UNFUSED_CPU


def test_what_the_call_of_output_makes(graph: Graph) -> None:
    made: list[TensorValue] = []

    def kept(value: TensorValue) -> TensorValue:
        made.append(value)
        return value

    graph.output(kept(conv(kept(conv(graph.inputs[0].tensor)))))
    assert [op_of(value) for value in made] == [Op.CONV_UNFUSED_CPU] * 2


def test_what_elementwise_work_follows(graph: Graph) -> None:
    """Beside a convolution too, and behind a reshape."""
    from max.graph import ops

    first = conv(graph.inputs[0].tensor)
    second = conv(first)
    third = conv(first)
    graph.output(ops.relu(first), second, ops.reshape(third, (-1, 8)) * 2)
    assert op_of(first) == Op.CONV_CPU
    assert op_of(second) == Op.CONV_UNFUSED_CPU
    assert op_of(third) == Op.CONV_CPU


def test_branches_and_loops(graph: Graph) -> None:
    """What they use, and what is in them and leaves them or not."""
    from max.dtype import DType
    from max.graph import DeviceRef, ops

    x, host = graph.inputs[0].tensor, DeviceRef.CPU()
    first, second = conv(x), conv(x)
    inner: list[TensorValue] = []

    def kept(value: TensorValue) -> TensorValue:
        inner.append(value)
        return value

    chosen = ops.cond(
        ops.constant(True, DType.bool, host),
        [first.type],
        lambda: ops.relu(first),
        lambda: kept(conv(second)),
    )
    _, last = ops.while_loop(
        [ops.constant(0, DType.int64, host), chosen[0]],
        lambda count, _: count < 3,
        lambda count, value: [count + 1, kept(conv(ops.relu(kept(conv(value.tensor)))))],
    )
    graph.output(last)
    assert op_of(first) == Op.CONV_CPU
    assert op_of(second) == Op.CONV_UNFUSED_CPU
    unfused, fused = Op.CONV_UNFUSED_CPU, Op.CONV_CPU
    assert [op_of(value) for value in inner] == [unfused, fused, unfused]


def test_what_a_softmax_reads(graph: Graph) -> None:
    from max.graph import ops

    first = conv(graph.inputs[0].tensor)
    graph.output(ops.softmax(ops.reshape(first, (-1, 8))))
    assert op_of(first) == Op.CONV_UNFUSED_CPU


def test_what_is_on_a_gpu() -> None:
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType, ops

    image = TensorType(DType.bfloat16, ("n", "h", "w", 64), DeviceRef.GPU())
    filter = np.ones((3, 3, 64, 64), np.float32)
    with Graph("gpu", input_types=[image], kernel_library=maxconv.kernel_library()) as graph:
        first = maxconv.conv2d(graph.inputs[0].tensor, filter, padding=1)
        second = maxconv.conv2d(first, filter, padding=1)
        graph.output(ops.cast(second, DType.float32))
    assert op_of(first) == Op.CONV_UNFUSED_GPU
    assert op_of(second) == Op.CONV_GPU


def test_a_subgraph(graph: Graph) -> None:
    """It has outputs of its own, and what is called with a value fuses nothing behind it."""
    from max.graph import ops

    x = graph.inputs[0].tensor
    inner: list[TensorValue] = []
    subgraph = graph.add_subgraph(
        "block", input_types=[x.type], custom_extensions=[maxconv.library_path()]
    )
    with subgraph:
        inner.append(conv(subgraph.inputs[0].tensor))
        subgraph.output(inner[0])
    assert op_of(inner[0]) == Op.CONV_UNFUSED_CPU
    first = conv(x)
    (result,) = ops.call(subgraph, first)
    graph.output(result)
    assert op_of(first) == Op.CONV_UNFUSED_CPU
