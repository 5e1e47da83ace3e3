"""What graphs for a GPU are built of, read from graphs that are not compiled.

The results are checked on a GPU; here it is the operands that must be what they should.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

import maxconv
from maxconv._arguments import ConvArguments
from maxconv._fields import Layout
from maxconv._graph import constant_array, loaded_from_host
from maxconv._operands import GraphCall, in_whole_pieces, read_call

if TYPE_CHECKING:
    from max.graph import Graph, TensorValue

Array = npt.NDArray[Any]


def tensor_type(shape: tuple[int | str, ...], dtype: str = "bfloat16") -> Any:
    from max.dtype import DType
    from max.graph import DeviceRef, TensorType

    return TensorType(DType[dtype], shape, DeviceRef.GPU())


@pytest.fixture
def graph() -> Iterator[Graph]:
    """A graph with an image of 32 channels and one of 8."""
    from max.graph import Graph

    types = [tensor_type(("n", "h", "w", 32)), tensor_type((1, 9, 9, 8))]
    library = maxconv.kernel_library()
    with Graph("on_gpu", input_types=types, kernel_library=library) as made:
        yield made


def weight(*shape: int, placeholder: bool = False) -> TensorValue:
    from max.dtype import DType
    from max.graph import DeviceRef, TensorValue, Weight

    name = f"filter_{shape[0]}"
    held = Weight(name, DType.bfloat16, shape, DeviceRef.GPU(), _placeholder=placeholder)
    return TensorValue(held)


def call_of(x: TensorValue, filter: Any, **given: Any) -> GraphCall:
    """A call of ``conv2d`` with a filter ``[K, C, R, S]``, read."""
    tensors = {name: given.pop(name, None) for name in ("bias", "residual", "scale")}
    return read_call(
        x, filter, ConvArguments.read(2, **given), tensors["bias"], tensors["residual"],
        tensors["scale"], "NHWC", "FCRS",
    )  # fmt: skip


def draw(*shape: int) -> Array:
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


def test_filters_of_zeros_fill_the_last_piece(graph: Graph) -> None:
    """What was there stays in front of them, for filters are the outermost dimension."""
    x = graph.inputs[0].tensor
    filter, bias, scale = draw(3, 32, 3, 3), draw(3), draw(3)
    call = call_of(x, filter, bias=bias, scale=scale, padding=1, out_dtype="float32")
    whole = in_whole_pieces(call)
    assert whole.problem.filters == 4
    assert whole.problem.output_shape[:3] == call.problem.output_shape[:3]
    for name, values, more in (
        ("filter", filter.transpose(0, 2, 3, 1).ravel(), 9 * 32),
        ("bias", bias, 1),
        ("scale", scale, 1),
    ):
        found = constant_array(getattr(whole.tensors, name))
        before = constant_array(getattr(call.tensors, name))
        assert found is not None
        assert before is not None
        assert len(found) == len(values) + more
        assert not found[len(values) :].any()
        np.testing.assert_array_equal(found[: len(values)], before)


def test_results_are_cut(graph: Graph) -> None:
    x = graph.inputs[0].tensor
    result = maxconv.conv2d(x, draw(3, 32, 3, 3), padding=1, filter_layout="FCRS")
    assert list(result.shape) == [*x.shape[:3], 3]
    assert re.search(r"filters = 8 : index", str(graph))
    first = maxconv.conv2d(
        graph.inputs[1].tensor, draw(5, 9, 3, 3), filter_layout="FCRS", input_layout="NCHW"
    )
    assert list(first.shape) == [1, 5, 7, 6]


@pytest.mark.parametrize(
    ("image", "filter", "given"),
    [
        (0, (8, 32, 3, 3), {}),
        (0, (4, 32, 3, 3), {"out_dtype": "float32"}),
        (0, (6, 16, 3, 3), {"groups": 2}),
        (0, (3, 32, 3, 3), {"config": "implicit_gemm"}),
        # The stem's kernel takes it.
        (1, (3, 8, 3, 3), {}),
        # As fast to read as to multiply.
        (0, (3, 32, 1, 1), {}),
    ],
)
def test_others_stay_as_they_are(
    graph: Graph, image: int, filter: tuple[int, ...], given: dict[str, Any]
) -> None:
    call = call_of(graph.inputs[image].tensor, draw(*filter), **given)
    assert in_whole_pieces(call) is call


def test_a_residual_is_not_widened(graph: Graph) -> None:
    residual = np.zeros((1, 7, 7, 3), np.float32)
    x = graph.inputs[1].tensor
    call = call_of(x, draw(3, 8, 3, 3), residual=residual)
    assert in_whole_pieces(call) is call


def test_a_weight_is_packed_before_it_is_copied_to_the_gpu(graph: Graph) -> None:
    """MAX does that once, when it loads the model: what a GPU computes is in every call."""
    from max.graph import DeviceRef

    x = graph.inputs[0].tensor
    call = call_of(x, weight(40, 32, 3, 3))
    assert call.tensors.filter_layout is Layout.KRSC
    packed = loaded_from_host(call.tensors.filter)
    assert packed is not None
    assert packed.device == DeviceRef.CPU()
    assert list(packed.shape) == [40 * 9 * 32]
    # So are the zeros behind it.
    whole = in_whole_pieces(call_of(x, weight(3, 32, 3, 3)))
    packed = loaded_from_host(whole.tensors.filter)
    assert packed is not None
    assert list(packed.shape) == [8 * 9 * 32]


@pytest.mark.parametrize("placeholder", [False, True])
def test_a_subgraphs_weight_is_packed_before_it_is_copied_too(
    graph: Graph, placeholder: bool
) -> None:
    """MAX does it at load time for every call: ``tests/host/test_gpu_graphs.py``."""
    from max.graph import DeviceRef

    with graph.add_subgraph(
        "block", input_types=[graph.inputs[0].type], custom_extensions=[maxconv.library_path()]
    ) as block:
        call = call_of(block.inputs[0].tensor, weight(40, 32, 3, 3, placeholder=placeholder))
        packed = loaded_from_host(call.tensors.filter)
    assert call.tensors.filter_layout is Layout.KRSC
    assert packed is not None
    assert packed.device == DeviceRef.CPU()
    assert list(packed.shape) == [40 * 9 * 32]


def test_only_a_copy_of_what_is_loaded_is_one(graph: Graph) -> None:
    from max.graph import DeviceRef, ops

    held = weight(40, 32, 3, 3)
    source = loaded_from_host(held)
    assert source is not None
    assert source.device == DeviceRef.CPU()
    assert source.shape == held.shape
    x = graph.inputs[0].tensor
    assert loaded_from_host(x) is None
    assert loaded_from_host(ops.permute(held, [1, 0, 2, 3])) is None
    back = ops.transfer_to(x, DeviceRef.CPU())
    assert loaded_from_host(ops.transfer_to(back, DeviceRef.GPU())) is None
