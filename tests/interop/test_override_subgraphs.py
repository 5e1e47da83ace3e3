"""Filters of subgraphs that are weights: packed once, when the model is loaded.

The packing is graph operations on weights. MAX computes these at load time for every call of the
subgraph, with the weights that the call's prefix names, and keeps the results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tests.interop.graphs import Source, input_type
from tests.reference import conv_reference

import maxconv

if TYPE_CHECKING:
    from max.engine import Model
    from max.graph import Graph, Module, TensorValue

Array = npt.NDArray[Any]

IMAGE = (1, 6, 5, 4)
BLOCKS = 2
SHARED = "subgraphs.shared"


def draw(*shape: int, seed: int) -> Array:
    values: Array = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return values


def make_weights() -> dict[str, Array]:
    """Returns the weights: those of each block, and one that the blocks share."""
    made = {SHARED: draw(4, 4, 1, 1, seed=1) / 2}
    for i in range(BLOCKS):
        made |= {
            f"subgraphs.{i}.conv.weight": draw(4, 4, 3, 3, seed=10 + i) / 4,
            f"subgraphs.{i}.conv.bias": draw(4, seed=20 + i),
            f"subgraphs.{i}.large": draw(3, 3, 4, 8, seed=30 + i) / 4,
        }
    return made


#: What the graph is loaded with. MAX reads what it does not compute from where it lies.
WEIGHTS = make_weights()


def make_block() -> Any:
    """Returns a module of ``max.nn``, with the first block's weights."""
    from max import nn
    from max.dtype import DType
    from max.graph import DeviceRef, Weight, ops

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            place: dict[str, Any] = {"dtype": DType.float32, "device": DeviceRef.CPU()}
            self.conv = nn.Conv2d(
                3, 4, 4, padding=1, permute=True, has_bias=True, name="subgraphs.0.conv", **place
            )
            self.large = Weight("subgraphs.0.large", shape=(3, 3, 4, 8), **place)
            self.shared = Weight(SHARED, shape=(4, 4, 1, 1), **place)

        def __call__(self, x: TensorValue) -> tuple[TensorValue, TensorValue]:
            y = ops.relu(self.conv(ops.permute(x, [0, 3, 1, 2])))
            y = ops.permute(y, [0, 2, 3, 1])
            large = maxconv.conv2d(y, self.large, padding=1, upsample=2)
            return maxconv.conv2d(y, self.shared, filter_layout="FCRS"), large

    return Block()


def build(name: str, module: Module) -> Graph:
    """A block as a subgraph, called with two prefixes."""
    from max.graph import Graph, ops

    with (
        maxconv.override_max() as report,
        Graph(name, input_types=[input_type(IMAGE)], module=module) as graph,
    ):
        (y,) = graph.inputs
        block = make_block().build_subgraph("subgraphs_block", [y], weight_prefix="subgraphs.0.")
        outputs = []
        for i in range(BLOCKS):
            y, large = ops.call(block, y, prefix=f"subgraphs.{i}.")
            outputs.append(large)
        graph.output(y, *outputs)
    assert len(report.taken) == 1, str(report)
    return graph


OVERRIDDEN = {"override_subgraphs": Source(build, lambda: WEIGHTS)}


def expected(x: Array, weights: dict[str, Array]) -> list[Array]:
    """What the graph computes, in float64."""

    def convolve(x: Array, f: Array, pad: int) -> Array:
        """``f`` is ``[K, R, S, C]``."""
        sizes: dict[str, Any] = {"stride": (1, 1), "dilation": (1, 1)}
        pads = (pad, pad)
        y: Array = conv_reference(
            x.astype(np.float64), f.astype(np.float64), pad_before=pads, pad_after=pads, **sizes
        )
        return y

    outputs = []
    for i in range(BLOCKS):
        conv, bias, large = (
            weights[f"subgraphs.{i}.{name}"] for name in ("conv.weight", "conv.bias", "large")
        )
        y = np.maximum(convolve(x, conv.transpose(0, 2, 3, 1), 1) + bias, 0)
        enlarged = y.repeat(2, axis=1).repeat(2, axis=2)
        outputs.append(convolve(enlarged, large.transpose(3, 0, 1, 2), 1))
        x = convolve(y, weights[SHARED].transpose(0, 2, 3, 1), 0)
    return [x, *outputs]


def check(model: Model, x: Array, weights: dict[str, Array]) -> None:
    """Executes the graph and compares all outputs, of order one, sums of some hundred products."""
    actual = [np.from_dlpack(output) for output in model.execute(x)]
    for found, wanted in zip(actual, expected(x, weights), strict=True):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


@contextmanager
def overwritten() -> Iterator[None]:
    """Has other values where the weights lie."""
    kept = {name: array.copy() for name, array in WEIGHTS.items()}
    try:
        for array in WEIGHTS.values():
            array += 1
        yield
    finally:
        for name, array in WEIGHTS.items():
            array[...] = kept[name]


def test_every_call_has_its_own_filters(overridden: dict[str, Model]) -> None:
    model = overridden["override_subgraphs"]
    for seed in (2, 3):
        check(model, draw(*IMAGE, seed=seed), make_weights())


def test_filters_are_packed_when_the_model_is_loaded(overridden: dict[str, Model]) -> None:
    """A bias is read in every call, which sees what was written since; a packed filter is not."""
    model, x = overridden["override_subgraphs"], draw(*IMAGE, seed=4)
    weights = make_weights()
    with overwritten():
        now = {name: WEIGHTS[name] if name.endswith("bias") else weights[name] for name in weights}
        check(model, x, now)
