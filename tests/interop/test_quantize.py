"""Floats are rounded to int8 as ONNX's ``QuantizeLinear`` does."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.interop.graphs import Source, input_type
from tests.reference import conv_reference

import maxconv

if TYPE_CHECKING:
    from max.engine import Model
    from max.graph import Graph, Module

#: Exact in float32, as are their reciprocals.
SCALES = np.array([0.25, 0.5, 2.0])

#: Integers, ``[R, S, C, K]``.
FILTER = np.random.default_rng(3).integers(-128, 128, (3, 3, 16, 24)).astype(np.float32)


def build(name: str, module: Module | None = None) -> Graph:
    """One scale, one a channel, and a convolution of integers in front."""
    from max.graph import Graph

    types = [input_type(("m", 3)), input_type(("n", "h", "w", 16))]
    library = maxconv.kernel_library()
    with Graph(name, input_types=types, kernel_library=library, module=module) as graph:
        x, image = (value.tensor for value in graph.inputs)
        graph.output(
            maxconv.quantize_linear(x, 0.5),
            maxconv.quantize_linear(x, 0.5, 100),
            maxconv.quantize_linear(x, SCALES, -128),
            maxconv.quantize_linear(
                maxconv.conv2d(image, FILTER, padding=1, scale=2.0**-11, activation="relu"),
                0.5,
                -100,
            ),
        )
    return graph


GRAPHS = {"quantize": Source(build)}


def test_what_is_rounded(models: dict[str, Model], rng: np.random.Generator) -> None:
    """Halves go to even, what is beyond int8 to its ends."""
    halves = np.arange(-150, 150, dtype=np.float32) / 4
    ends = np.array([np.inf, -np.inf, 3e38, -3e38, 1e-40, -0.0], np.float32)
    x = np.resize(np.concatenate([halves, ends]), (102, 3))
    image = rng.integers(-128, 128, (2, 5, 6, 16)).astype(np.float32)
    rounded, shifted, several, convolved = (
        output.to_numpy() for output in models["quantize"].execute(x, image)
    )
    x = x.astype(np.float64)
    np.testing.assert_array_equal(rounded, np.clip(np.rint(x / 0.5), -128, 127))
    np.testing.assert_array_equal(shifted, np.clip(np.rint(x / 0.5) + 100, -128, 127))
    np.testing.assert_array_equal(several, np.clip(np.rint(x / SCALES) - 128, -128, 127))
    one = (1, 1)
    filter = np.moveaxis(FILTER, -1, 0)
    sums = conv_reference(image, filter, stride=one, dilation=one, pad_before=one, pad_after=one)
    # Sums of 144 products of up to 2^14 are exact in float32.
    wanted = np.clip(np.rint(np.maximum(sums * 2.0**-11, 0) / 0.5) - 100, -128, 127)
    assert len(np.unique(wanted)) > 50
    np.testing.assert_array_equal(convolved, wanted)
    assert {output.dtype for output in (rounded, shifted, several, convolved)} == {
        np.dtype(np.int8)
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": 0}, "scale: 0.0 is not allowed; positive numbers"),
        ({"scale": -1.0}, "scale: -1.0 is not allowed"),
        ({"scale": float("nan")}, "scale: nan is not allowed"),
        ({"scale": 1e-60}, "scale: 1e-60 is not allowed"),
        ({"scale": [1.0, 2.0]}, "scale: shape (2,) does not match; a number is allowed"),
        ({"scale": [1.0, 0.0, 2.0]}, "scale: (1.0, 0.0, 2.0) is not allowed"),
        ({"zero_point": 128}, "zero_point: 128 is no int8; -128 to 127 are allowed"),
        ({"kind": "int32"}, "x: dtype int32 is not allowed; floats are"),
    ],
)
def test_what_is_not_allowed(changes: dict[str, Any], message: str) -> None:
    from max.graph import Graph

    arguments: dict[str, Any] = {"scale": 1.0, "zero_point": 0, "kind": "float32"} | changes
    types = [input_type(("n", 3), arguments.pop("kind"))]
    with Graph("refused", input_types=types) as graph:
        x = graph.inputs[0].tensor
        with pytest.raises(ValueError, match=re.escape(message)):
            maxconv.quantize_linear(x, **arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": None}, "scale: None is a NoneType; a number is allowed"),
        ({"zero_point": 0.5}, "zero_point: 0.5 holds a float; integers are allowed"),
    ],
)
def test_what_is_of_a_wrong_type(changes: dict[str, Any], message: str) -> None:
    from max.graph import Graph

    with Graph("refused", input_types=[input_type(("n", 3))]) as graph:
        x = graph.inputs[0].tensor
        with pytest.raises(TypeError, match=re.escape(message)):
            maxconv.quantize_linear(x, **{"scale": 1.0} | changes)
