"""``override_max`` on the shapes of MAX's own tests of convolution and pooling.

Every run builds all of them, and reads what each op is told; it compiles some of one file, as a
graph of all takes MAX very long. The kernels compute all convolutions in
``test_torch_max_shapes.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.interop.graphs import Source, input_type
from tests.interop.max_shapes import CASES, Case

import maxconv
from maxconv._fields import GEOMETRY
from maxconv._graph import constant_array

if TYPE_CHECKING:
    from max.engine import Model
    from max.graph import Graph, Module, TensorValue

#: Those that every run compiles: odd channels, single filters, other padding behind than in front.
ALWAYS = [
    case
    for case in CASES
    if "/test_direct_conv.mojo" in case.name and not case.constants and case.entry["filters"] < 8
]


def geometry_of(result: TensorValue) -> dict[str, int]:
    """What the op behind a result is told, by the names of the fields."""
    from max._core.dialects import mo
    from max.graph import TensorValue

    owner: Any = result._mlir_value.owner
    while not isinstance(owner, mo.CustomOp):
        (first, *_) = owner.operands
        owner = getattr(first, "value", first).owner
    operands: list[Any] = [getattr(operand, "value", operand) for operand in owner.operands]
    values = constant_array(TensorValue(operands[5]))
    assert values is not None
    return dict(zip(GEOMETRY, map(int, values), strict=True))


def check_geometry(case: Case, result: TensorValue) -> None:
    """Compares what the op of a convolution is told with the case."""
    told = geometry_of(result)
    assert told["groups"] == case.entry.get("groups", 1), case.name
    for field, wanted in (
        ("stride_", case.per_axis("stride")),
        ("dilation_", case.per_axis("dilation")),
        ("pad_before_", case.padding[::2]),
        ("pad_after_", case.padding[1::2]),
        ("filter_", case.per_axis("filter")),
    ):
        axes = "trs" if field == "filter_" else "dhw"
        assert tuple(told[field + axis] for axis in axes[-case.rank :]) == wanted, case.name


def build(cases: Sequence[Case], name: str, module: Module) -> Graph:
    """Some cases, taken over."""
    from max.graph import Graph

    shapes = [case.input_shapes() for case in cases]
    types = [input_type(shape) for of_case in shapes for shape in of_case.values()]
    with (
        Graph(name, input_types=types, module=module) as graph,
        maxconv.override_max() as report,
    ):
        inputs = iter(graph.inputs)
        outputs = []
        for case, of_case in zip(cases, shapes, strict=True):
            values: dict[str, Any] = {argument: next(inputs).tensor for argument in of_case}
            values |= {argument: case.arrays[argument] for argument in case.constants}
            outputs.append(case.call(values))
        graph.output(*outputs)
    assert not report.left, str(report)
    assert len(report.taken) == len(cases)
    for case, output in zip(cases, outputs, strict=True):
        assert [int(size) for size in output.shape] == list(case.output_shape), case.name
        if case.kind == "convolutions":
            check_geometry(case, output)
    return graph


OVERRIDDEN = {"override_shapes": Source(functools.partial(build, ALWAYS))}


def check(cases: Sequence[Case], model: Model) -> None:
    given = [case.arrays[name] for case in cases for name in case.input_shapes()]
    for case, result in zip(cases, model.execute(*given), strict=True):
        case.check(np.from_dlpack(result))


def test_all_are_taken_over() -> None:
    from max.graph import Module

    build(CASES, "all_shapes", Module())


def test_results_are_right(overridden: dict[str, Model]) -> None:
    check(ALWAYS, overridden["override_shapes"])
