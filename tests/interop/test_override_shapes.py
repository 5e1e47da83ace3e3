"""``override_max`` on the shapes of MAX's own tests of convolution and pooling.

A graph of all is built, which MAX would take very long to compile: each of maxconv's ops is
compiled once, with everything that it is told as an input, and runs on what the graph's ops are
told. numpy computes what MAX's operations do around them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tests.interop.graphs import Source, input_type
from tests.interop.max_shapes import CASES

import maxconv
from maxconv._fields import GEOMETRY, SEVERAL, Op
from maxconv._graph import constant_array
from maxconv._machine import kernel_features

if TYPE_CHECKING:
    from max.engine import Model
    from max.graph import Graph, Module, TensorValue

Array = npt.NDArray[Any]


def build() -> tuple[Graph, list[TensorValue]]:
    """A graph of all, taken over, and the results."""
    from max.graph import Graph

    types = [input_type(case.arrays[name].shape) for case in CASES for name in case.inputs]
    with Graph("shapes", input_types=types) as graph, maxconv.override_max() as report:
        inputs = iter(graph.inputs)
        results = []
        for case in CASES:
            values: dict[str, Any] = {name: next(inputs).tensor for name in case.inputs}
            results.append(case.call({**case.arrays, **values}))
        graph.output(*results)
    assert not report.left, str(report)
    assert len(report.taken) == len(CASES)
    for case, result in zip(CASES, results, strict=True):
        assert [int(size) for size in result.shape] == list(case.output_shape), case.name
    return graph, results


# One op ------------------------------------------------------------------------------------------


def build_op(op: Op, rank: int, parameters: dict[str, Any], name: str, module: Module) -> Graph:
    """An op, its operands, and something of its result's shape."""
    from max.graph import DeviceRef, Graph, TensorType, ops

    if op is Op.POOL_CPU:
        operands = {"x": rank, "geometry": 1, "pooling": 1}
    else:
        operands = {"x": rank, "filter": 1, "bias": 1, "residual": rank}
        operands |= {"scale": 1, "geometry": 1, "scalars": 1}
    types = [
        input_type(
            tuple(f"{operand}_{i}" for i in range(rank_of)),
            "int64" if operand in ("geometry", "pooling") else "float32",
        )
        for operand, rank_of in {**operands, "like": rank}.items()
    ]
    library = maxconv.kernel_library()
    with Graph(name, input_types=types, kernel_library=library, module=module) as graph:
        *values, like = (value.tensor for value in graph.inputs)
        result = TensorType(like.dtype, like.shape, like.device)
        graph.output(*ops.custom(op.value, DeviceRef.CPU(), values, [result], parameters))
    return graph


OVERRIDDEN = {
    "op_conv2d": Source(functools.partial(build_op, Op.CONV_UNFUSED_CPU, 4, {})),
    "op_conv3d": Source(functools.partial(build_op, Op.CONV_UNFUSED_CPU, 5, {})),
    "op_max_pool": Source(functools.partial(build_op, Op.POOL_CPU, 4, {"average": False})),
    "op_avg_pool": Source(functools.partial(build_op, Op.POOL_CPU, 4, {"average": True})),
}


def check_known(operation: Any, operands: Sequence[Array], shape: tuple[int, ...]) -> None:
    """Compares what a convolution's op is to be compiled for with what it is told."""
    x, geometry = operands[0], dict(zip(GEOMETRY, operands[5], strict=True))
    groups = geometry["groups"]
    facts = {
        "kernel": geometry["kernel"],
        "groups": groups,
        "channels": x.shape[-1] // groups,
        "filters": shape[-1] // groups,
        "features": kernel_features(),
    }
    for name, value in re.findall(r"(\w+) = (-?\d+)", str(operation.parameters)):
        assert facts[name] == int(value) or (int(value) == SEVERAL and facts[name] > 1), name


# A graph -----------------------------------------------------------------------------------------


class Values:
    """The values of a graph that is not compiled."""

    def __init__(self, models: dict[str, Model], inputs: dict[Any, Array]) -> None:
        """Makes them.

        Args:
            models: Those of ``OVERRIDDEN``.
            inputs: The graph's, by their values.
        """
        self._models = models
        self._found = inputs

    def of(self, value: Any) -> Array:
        """Returns the elements of a value."""
        if value not in self._found:
            from max.graph import TensorValue

            tensor = TensorValue(value)
            known = constant_array(tensor)
            self._found[value] = self._computed(tensor) if known is None else known
        return self._found[value]

    def _computed(self, tensor: TensorValue) -> Array:
        from max._core.dialects import mo, rmo
        from max.graph import Shape

        operation: Any = tensor._mlir_value.owner
        operands = [self.of(getattr(operand, "value", operand)) for operand in operation.operands]
        first, *others = operands
        shape = tuple(map(int, tensor.shape))
        result: Array
        if isinstance(operation, mo.CustomOp):
            result = self._by_op(operation, operands, shape)
        elif isinstance(operation, rmo.ReshapeOp | rmo.RebindTensorShapeOp):
            result = first.reshape(shape)
        elif isinstance(operation, rmo.BroadcastToOp):
            result = np.broadcast_to(first, shape)
        elif isinstance(operation, rmo.MoTransposeOp):
            result = first.transpose(others[0])
        elif isinstance(operation, rmo.MoGatherOp):
            result = first.take(others[0], operation.axis)
        elif isinstance(operation, rmo.SliceOp):
            bounds = (operation.starts, operation.stops, operation.steps)
            sizes = (map(int, Shape.from_mlir(bound)) for bound in bounds)
            result = first[tuple(map(slice, *sizes))]
        else:
            assert "rmo.concat" in str(operation)
            axis = next((i for i, size in enumerate(shape) if size != first.shape[i]), 0)
            result = np.concatenate(operands, axis)
        return result

    def _by_op(self, operation: Any, operands: list[Array], shape: tuple[int, ...]) -> Array:
        """Runs an op on what it is told."""
        if operation.symbol == Op.POOL_CPU:
            name = "avg_pool" if "average = true" in str(operation.parameters) else "max_pool"
        else:
            assert operation.symbol in (Op.CONV_CPU, Op.CONV_UNFUSED_CPU)
            check_known(operation, operands, shape)
            name = f"conv{len(shape) - 2}d"
        given = map(np.ascontiguousarray, operands)
        (result,) = self._models[f"op_{name}"].execute(*given, np.empty(shape, np.float32))
        return np.from_dlpack(result)


def test_all_are_taken_over_with_right_results(overridden: dict[str, Model]) -> None:
    graph, results = build()
    given = [case.arrays[name] for case in CASES for name in case.inputs]
    inputs = {value._mlir_value: array for value, array in zip(graph.inputs, given, strict=True)}
    values = Values(overridden, inputs)
    for case, result in zip(CASES, results, strict=True):
        case.check(values.of(result._mlir_value))
