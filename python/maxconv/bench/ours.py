"""maxconv's contenders.

All problems of one spatial rank share a graph: every size is symbolic and the geometry an operand.
The graph calls the op that ``maxconv.conv2d`` would add for the problem, with the operands that it
would give it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops

import maxconv
from maxconv._fields import (
    GEOMETRY_LENGTH,
    SCALARS_LENGTH,
    Activation,
    Layout,
    encode_scalars,
)
from maxconv._graph import constant
from maxconv.packing import cast_array
from maxconv.problem import ConvProblem

from .workload import Float32, Workload, aligned, to_buffer, to_float32

__all__ = ["Call", "GraphKind", "OwnGraphs", "Through", "kinds", "through_functions"]

_DIMENSIONS = {1: ("w",), 2: ("h", "w"), 3: ("d", "h", "w")}


@dataclass(frozen=True)
class Call:
    """A model with its operands."""

    model: Model
    operands: tuple[Buffer, ...]

    def __call__(self) -> list[Buffer]:
        """Runs the model."""
        return self.model.execute(*self.operands)

    def output(self) -> Float32:
        """Runs the model and returns its first output's values."""
        return to_float32(self()[0])


@dataclass(frozen=True)
class GraphKind:
    """What a graph is specific to, besides the dtype."""

    rank: int
    """Spatial dimensions."""
    pointwise: bool
    """Whether it has the op for filters of one tap."""
    compiler_fuses: bool
    """Whether bias, ReLU and residual are operations of the graph, not operands of the op."""

    def __str__(self) -> str:
        """A few words, for whoever waits."""
        taps = ", one tap" if self.pointwise else ""
        return f"{self.rank}-D{taps}{', fused by the compiler' if self.compiler_fuses else ''}"


def kinds(problem: ConvProblem) -> list[GraphKind]:
    """Returns the graphs that a problem is timed with."""
    rank, pointwise = problem.spatial_rank, problem.taps == 1
    fusions = (False, True) if rank == 2 else (False,)
    return [GraphKind(rank, pointwise, fuses) for fuses in fusions]


def build(kind: GraphKind, dtype: str) -> Graph:
    """Returns the graph of a kind."""
    device, storage = DeviceRef.CPU(), DType[dtype]
    axes = _DIMENSIONS[kind.rank]
    output = ("out_n", *(f"out_{axis}" for axis in axes), "filters")
    residual = output if kind.compiler_fuses else tuple(f"add_{name}" for name in output)
    types = [
        TensorType(storage, ("n", *axes, "c"), device),
        TensorType(storage, ("filter_elements",), device),
        TensorType(storage, ("filters" if kind.compiler_fuses else "bias_elements",), device),
        TensorType(storage, residual, device),
        TensorType(DType.int64, (GEOMETRY_LENGTH,), device),
        TensorType(DType.float32, (SCALARS_LENGTH,), device),
        # Without elements: it names the output's sizes, which no other operand has.
        TensorType(DType.uint8, (*output, 0), device),
    ]
    op = "maxconv.conv_fused_input" if kind.pointwise else "maxconv.conv"
    name = f"bench_{kind.rank}d{'_pointwise' * kind.pointwise}{'_fused' * kind.compiler_fuses}"
    with Graph(name, input_types=types, kernel_library=maxconv.kernel_library()) as graph:
        x, filter, bias, added, geometry, scalars, _ = (value.tensor for value in graph.inputs)
        operands = [x, filter, bias, added, geometry, scalars]
        if kind.compiler_fuses:
            operands[2] = _nothing(1, dtype, device)
            operands[3] = _nothing(kind.rank + 2, dtype, device)
        types = [TensorType(storage, output, device)]
        y = ops.custom(op, device, operands, types)[0].tensor
        graph.output(ops.relu(y + bias) + added if kind.compiler_fuses else y)
    return graph


def _nothing(rank: int, dtype: str, device: DeviceRef) -> TensorValue:
    """Returns the operand that stands for a bias or a residual that is not there."""
    empty = cast_array(np.empty((0,) * rank, np.float32), "float32", dtype)
    return constant(empty, dtype, device)


class OwnGraphs:
    """The compiled graphs of one dtype, each compiled when it is first needed."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self._session = InferenceSession(devices=[CPU()])
        self._models: dict[GraphKind, Model] = {}

    def model(self, kind: GraphKind) -> Model:
        """Returns the compiled graph of a kind."""
        if kind not in self._models:
            self._models[kind] = self._session.load(build(kind, self.dtype))
        return self._models[kind]

    def contenders(self, work: Workload) -> dict[str, Call]:
        """Returns the calls that a problem is timed with, by name.

        ``ours`` has a packed filter; ``ours_raw`` a filter in MAX's order, which each call packs;
        ``ours_fused`` is ``ours`` with bias, ReLU and residual as operands, and ``ours_lambda``
        (two dimensions only) with these as operations that the graph compiler fuses.
        """
        problem = work.named.problem
        packed = maxconv.pack_filter(
            work.filter,
            {1: "KSC", 2: "KRSC", 3: "KTRSC"}[problem.spatial_rank],
            groups=problem.groups,
            dtype=self.dtype,
        )
        filter = Buffer.from_numpy(aligned(packed.data))
        if self.dtype == "bfloat16":
            filter = filter.view(DType.bfloat16)
        raw = to_buffer(work.max_filter.reshape(-1), self.dtype)
        x, bias, residual = (
            to_buffer(values, self.dtype) for values in (work.x, work.bias, work.residual)
        )
        absent = to_buffer(np.zeros((0,) * work.residual.ndim, np.float32), self.dtype)
        no_bias = to_buffer(np.zeros(0, np.float32), self.dtype)
        scalars = Buffer.from_numpy(encode_scalars())
        shape = Buffer.from_numpy(np.zeros((*work.residual.shape, 0), np.uint8))
        plain, *fusing = (self.model(kind) for kind in kinds(problem))

        def call(
            model: Model,
            filter: Buffer,
            bias: Buffer,
            residual: Buffer,
            layout: Layout = Layout.PACKED,
            fused: bool = False,
        ) -> Call:
            geometry = problem.geometry(
                filter_layout=layout,
                activation=Activation.RELU if fused else Activation.NONE,
                has_bias=fused,
                has_residual=fused,
            )
            operands = (x, filter, bias, residual, Buffer.from_numpy(geometry), scalars, shape)
            return Call(model, operands)

        calls = {
            "ours": call(plain, filter, no_bias, absent),
            "ours_raw": call(plain, raw, no_bias, absent, Layout.RSCF),
            "ours_fused": call(plain, filter, bias, residual, fused=True),
        }
        for model in fusing:
            calls["ours_lambda"] = call(model, filter, bias, residual)
        return calls


@dataclass(frozen=True)
class Through:
    """A graph of several problems, built with ``maxconv.conv1d``, ``conv2d`` and ``conv3d``."""

    names: tuple[str, ...]
    call: Call

    def outputs(self) -> dict[str, Float32]:
        """Runs the graph and returns the problems' outputs."""
        outputs = map(to_float32, self.call())
        return dict(zip(self.names, outputs, strict=True))


def through_functions(works: Sequence[Workload], dtype: str) -> Through:
    """Compiles one graph of several problems, with constant filters, one output each."""
    device, storage = DeviceRef.CPU(), DType[dtype]
    functions: dict[int, tuple[Callable[..., TensorValue], str]] = {
        1: (maxconv.conv1d, "KSC"),
        2: (maxconv.conv2d, "KRSC"),
        3: (maxconv.conv3d, "KTRSC"),
    }
    types = [TensorType(storage, work.x.shape, device) for work in works]
    with Graph("functions", input_types=types, kernel_library=maxconv.kernel_library()) as graph:
        outputs = []
        for value, work in zip(graph.inputs, works, strict=True):
            problem = work.named.problem
            function, layout = functions[problem.spatial_rank]
            padding = [
                size
                for pair in zip(problem.pad_before, problem.pad_after, strict=True)
                for size in pair
            ]
            outputs.append(
                function(
                    value.tensor,
                    work.filter,
                    stride=problem.stride,
                    dilation=problem.dilation,
                    padding=tuple(padding),
                    groups=problem.groups,
                    filter_layout=layout,
                )
            )
        graph.output(*outputs)
    model = InferenceSession(devices=[CPU()]).load(graph)
    operands = tuple(to_buffer(work.x, dtype) for work in works)
    return Through(tuple(work.named.name for work in works), Call(model, operands))
