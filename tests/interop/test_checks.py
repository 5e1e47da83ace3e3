"""Every argument is checked once on its way in, whichever way that is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from sys import setprofile
from types import FrameType
from typing import Any

import numpy as np
import pytest

import maxconv
from maxconv import _checks as checks
from maxconv._arguments import ConvArguments
from maxconv.activations import leaky_relu

#: What writes messages or reads one entry of a shape is called for each.
PARTS = {"show", "renamed", "check_size"}


@contextmanager
def counted() -> Iterator[Counter[tuple[str, str]]]:
    """Counts the checks that the package makes, by function and argument."""
    seen: Counter[tuple[str, str]] = Counter()

    def see(frame: FrameType, event: str, _: object) -> None:
        code, caller = frame.f_code, frame.f_back
        if event != "call" or code.co_filename != checks.__file__ or code.co_name in PARTS:
            return
        if caller is not None and caller.f_code.co_filename != checks.__file__:
            seen[code.co_name, str(frame.f_locals.get("name", ""))] += 1

    setprofile(see)
    try:
        yield seen
    finally:
        setprofile(None)


def graph_inputs() -> tuple[Any, ...]:
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType

    cpu = DeviceRef.CPU()
    shapes: tuple[tuple[str | int, ...], ...] = (("n", 8, "w", 6), ("n", 8, "w", 4), (3, 3, 6, 4))
    types = [TensorType(DType.float32, shape, cpu) for shape in shapes]
    graph = Graph("checks", input_types=types, kernel_library=maxconv.kernel_library())
    return graph, *(value.tensor for value in graph.inputs)


@pytest.mark.parametrize("kind", ["array", "value", "packed"])
def test_a_graph_function_checks_once(kind: str) -> None:
    graph, x, residual, value = graph_inputs()
    array = np.ones((3, 3, 6, 4), np.float32)
    filter = {"array": array, "value": value, "packed": maxconv.pack_filter(array, "RSCF")}[kind]
    with graph, counted() as seen:
        maxconv.conv2d(
            x, filter, padding="same", bias=np.ones(4), residual=residual, beta=0.5,
            scale=value[0, 0, 0], activation="relu", out_dtype=x.dtype, config="implicit_gemm",
        )  # fmt: skip
    assert {("spatial_tuple", "stride"), ("check_at_least", "stride")} <= seen.keys()
    assert {("check_number", "beta"), ("check_bias", "bias"), ("check_residual", "")} <= seen.keys()
    assert ("check_dtype", "input") in seen
    assert set(seen.values()) == {1}, seen


def test_a_transposed_convolution_checks_once() -> None:
    graph, x, *_ = graph_inputs()
    with graph, counted() as seen:
        # One phase: each phase of several is a convolution of its own.
        maxconv.conv2d_transpose(x, np.ones((3, 3, 4, 6)), padding=1, bias=np.ones(4))
    # The phase has a geometry of its own, which is none of the caller's.
    own = {("check_at_least", name) for name in ("stride", "dilation", "groups", "padding")}
    assert all(count == 1 + (check in own) for check, count in seen.items()), seen
    assert ("check_at_least", "output_paddings") in seen


def test_a_module_checks_when_it_is_made() -> None:
    from max.driver import CPU
    from max.dtype import DType
    from max.experimental.tensor import Tensor
    from max.graph import TensorType

    from maxconv.nn import Conv2d

    with counted() as seen:
        module = Conv2d(3, 4, 6, padding=1, dtype=DType.float32, device=CPU(), activation="relu")
    assert set(seen.values()) == {1}, seen
    assert {("spatial_tuple", "stride"), ("check_at_least", "stride")} <= seen.keys()
    made = set(seen)
    with counted() as seen:
        module.trace(TensorType(DType.float32, ["n", "h", "w", 4], CPU()))
    assert ("check_dtype", "input") in seen
    assert set(seen.values()) == {1} and not made & seen.keys() - {("check_filter_layout", "")}
    assert isinstance(module.weight, Tensor)


@pytest.mark.torch
class TestTorch:
    """PyTorch's functions, modules and operator."""

    def test_a_function_checks_once(self) -> None:
        import torch

        import maxconv.torch as mt

        x, w, b = torch.ones(2, 6, 9, 8), torch.ones(5, 6, 3, 3), torch.ones(5)

        def call(x: Any) -> None:
            mt.conv2d(
                x, w, b, (2, 1), (1, 3), residual=torch.ones(x.shape[0], 5, 5, 12), beta=0.25,
                activation=leaky_relu(0.125), scale=torch.ones(5),
            )  # fmt: skip

        with counted() as seen:
            call(x)
        assert {("spatial_tuple", "stride"), ("check_at_least", "stride")} <= seen.keys()
        assert {("check_bias", "bias"), ("check_bias", "scale")} <= seen.keys()
        assert ("check_residual", "") in seen
        assert set(seen.values()) == {1}, seen
        with counted() as seen:
            call(x)
        assert not seen
        # Other sizes: what is no tensor is not looked at again.
        with counted() as seen:
            call(torch.ones(3, 6, 9, 8))
        assert set(seen) == {
            ("filter_shape_parts", ""), ("check_bias", "bias"), ("check_bias", "scale"),
            ("check_residual", ""),
        }  # fmt: skip
        assert set(seen.values()) == {1}

    def test_the_operator_checks_what_no_function_did(self) -> None:
        import torch

        import maxconv.torch  # noqa: F401

        x, w = torch.ones(2, 6, 9, 8), torch.ones(5, 6, 3, 3)
        scalars = (1.0, 0.0, 0.0, 0.0, 0.0)

        def call(stride: tuple[int, int], padding: tuple[int, ...]) -> Any:
            return torch.ops.maxconv.conv.default(
                x, w, None, None, None, stride, padding, (1, 1), 1, (0, 0), scalars, None, None,
                (), (0, 0, 0), None, False, False,
            )  # fmt: skip

        with pytest.raises(ValueError, match=r"^stride: \(0, 1\) has a non-positive entry; every"):
            call((0, 1), (0, 0))
        with pytest.raises(ValueError, match=r"^padding: \(0, -1\) has a negative entry; every"):
            call((1, 1), (0, -1))
        with pytest.raises(ValueError, match=r"^padding: 'same' with stride \(1, 2\) is undefined"):
            call((1, 2), ())
        assert call((1, 1), ()).shape == (2, 5, 9, 8)
        assert call((3, 5), (1, 0, 2, 2)).shape == (2, 5, 3, 2)
        with counted() as seen:
            call((3, 5), (1, 0, 2, 2))
        assert not seen


def test_flat_arguments_are_the_arguments() -> None:
    given = ConvArguments.read(
        2, stride=(2, 1), padding=(1, 2, 0, 3), groups=3, activation="relu6", beta=0.5,
        final_activation=("leaky_relu", 0.25), precision="float32", out_dtype="bfloat16",
    )  # fmt: skip
    again = ConvArguments.of_flat(given.flatten())
    assert again == given and again is not given
    # Once the arguments say so, they are found again, and nothing is checked.
    assert ConvArguments.of_flat(given.remembered().flatten()) is given
    same = ConvArguments.read(3, padding="same")
    assert ConvArguments.of_flat(same.flatten()) == same
