"""maxconv's contenders.

All problems of one spatial rank share a graph: every size is symbolic and the geometry an operand.
The graph has the op that ``maxconv.conv2d`` would add for the problem, with the operands that it
would give it, once or several times: each on an input of its own, so that the graph compiler sees
no two of one result. A call gives all of them the same buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, Module, TensorType, TensorValue, ops

import maxconv
from maxconv._emit import emit, operand_types, shape_carrier, symbolic_output
from maxconv._fields import Activation, Layout, encode_scalars
from maxconv._library import library_path
from maxconv._problem import ConvProblem

from ..entrant import FUSED, MAXCONV, Entrant, Float32, HostRun, Key
from .workload import Workload, aligned, convolutions, to_buffer, to_float32

__all__ = ["Call", "GraphKind", "Kinds", "OwnGraphs", "Through", "kinds", "through_functions"]

#: Variants of maxconv beside its main one.
PACKED_EACH_CALL = "filter packed in each call"
BY_THE_COMPILER = "fused by the graph compiler"


@dataclass(frozen=True)
class Call(HostRun):
    """A model with its operands, and how many convolutions it makes."""

    model: Model
    operands: tuple[Buffer, ...]
    convolutions: int = 1

    def __call__(self) -> list[Buffer]:
        """Runs the model."""
        return self.model.execute(*self.operands)

    def outputs(self) -> list[Float32]:
        """Runs the model and returns its outputs' values."""
        return [to_float32(output) for output in self()]


@dataclass(frozen=True)
class GraphKind:
    """What a graph is specific to, besides the dtype."""

    rank: int
    """Spatial dimensions."""
    pointwise: bool
    """Whether it has the op for filters of one tap."""
    compiler_fuses: bool
    """Whether bias, ReLU and residual are operations of the graph, not operands of the op."""
    convolutions: int
    """How many it has."""

    def __str__(self) -> str:
        """A few words, for whoever waits."""
        taps = ", one tap" if self.pointwise else ""
        fused = ", fused by the compiler" if self.compiler_fuses else ""
        return f"{self.rank}-D{taps}{fused}, {self.convolutions} in a call"


#: Graphs that are compiled together: those that a problem is timed with.
Kinds = tuple[GraphKind, ...]


def kinds(problem: ConvProblem) -> Kinds:
    """Returns the graphs that a problem is timed with."""
    rank, count = problem.spatial_rank, convolutions(problem)
    counts = dict.fromkeys((count, 1))
    by_compiler = (False, True) if rank == 2 else (False,)
    return tuple(
        GraphKind(rank, problem.taps == 1, compiler_fuses, several)
        for several in counts
        for compiler_fuses in by_compiler
    )


def build(kind: GraphKind, dtype: str, module: Module) -> Graph:
    """Adds the graph of a kind: activations, then the operands that they share."""
    device = DeviceRef.CPU()
    output = symbolic_output(kind.rank, dtype, device)
    operands = operand_types(kind.rank, dtype, device)
    if kind.compiler_fuses:
        operands.bias = TensorType(output.dtype, output.shape[-1:], device)
        operands.residual = output
    types = [*[operands.x] * (kind.convolutions - 1), *operands, shape_carrier(output)]
    library = maxconv.kernel_library()
    with Graph(_symbol(kind), input_types=types, kernel_library=library, module=module) as graph:
        values = [value.tensor for value in graph.inputs]
        shared = operands.with_values(values[kind.convolutions - 1 : -1])
        bias, residual = shared.bias, shared.residual
        assert bias is not None
        assert residual is not None
        if kind.compiler_fuses:
            shared.bias = shared.residual = None
        outputs = [
            emit(replace(shared, x=x), output, fused_input=kind.pointwise)
            for x in values[: kind.convolutions]
        ]
        if kind.compiler_fuses:
            outputs = [ops.relu(y + bias) + residual for y in outputs]
        graph.output(*outputs)
    return graph


def _symbol(kind: GraphKind) -> str:
    """Returns what a kind's graph is called."""
    name = f"bench_{kind.rank}d{'_pointwise' * kind.pointwise}{'_fused' * kind.compiler_fuses}"
    return f"{name}_{kind.convolutions}"


class OwnGraphs:
    """The compiled graphs of one dtype; a problem's are compiled when one is first needed."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self._session = InferenceSession(devices=[CPU()])
        self._models: dict[Kinds, dict[GraphKind, Model]] = {}

    def models(self, wanted: Kinds) -> dict[GraphKind, Model]:
        """Returns the compiled graphs of a problem's kinds.

        They are compiled in one go, and always the same ones: MAX finds them in its cache again.
        """
        if wanted not in self._models:
            module = Module()
            for kind in wanted:
                build(kind, self.dtype, module)
            loaded = self._session.load_all(module, custom_extensions=[library_path()])
            self._models[wanted] = {kind: loaded[_symbol(kind)] for kind in wanted}
        return self._models[wanted]

    def single(self, work: Workload) -> Call:
        """Returns a call of one convolution with a packed filter, whatever the problem's size."""
        wanted = kinds(work.named.problem)
        kind = replace(wanted[0], convolutions=1)
        return _Operands.make(work).plain(self.models(wanted)[kind], 1)

    def contenders(self, work: Workload) -> dict[Key, Entrant]:
        """Returns what a problem is timed with.

        The main variant has a packed filter, and where the work is fused bias, ReLU and residual as
        operands. In the others a filter in MAX's order is packed by each convolution; and (two
        dimensions only) bias, ReLU and residual are operations that the graph compiler fuses.
        """
        operands, count = _Operands.make(work), work.convolutions
        models = self.models(kinds(work.named.problem))
        calls: dict[Key, dict[int, Call]] = {}
        for kind, model in models.items():
            number = kind.convolutions
            if kind.compiler_fuses:
                made = {Key(MAXCONV, FUSED, BY_THE_COMPILER): operands.compiler_fused}
            else:
                made = {
                    Key(MAXCONV): operands.plain,
                    Key(MAXCONV, variant=PACKED_EACH_CALL): operands.raw_filter,
                    Key(MAXCONV, FUSED): operands.fused,
                }
            for key, make in made.items():
                calls.setdefault(key, {})[number] = make(model, number)
        return {
            key: Entrant(made[count], made[1] if count > 1 else None)
            for key, made in sorted(calls.items())
        }


@dataclass(frozen=True)
class _Operands:
    """A problem's operands as buffers."""

    problem: ConvProblem
    x: Buffer
    packed: Buffer
    """The filter, packed."""
    raw: Buffer
    """The filter in MAX's order."""
    bias: Buffer
    residual: Buffer
    no_bias: Buffer
    no_residual: Buffer
    shape: Buffer
    """Names the output's sizes."""

    @classmethod
    def make(cls, work: Workload) -> _Operands:
        """Returns a problem's operands."""
        problem, dtype = work.named.problem, work.dtype
        packed = maxconv.pack_filter(
            work.filter,
            {1: "KSC", 2: "KRSC", 3: "KTRSC"}[problem.spatial_rank],
            groups=problem.groups,
            dtype=dtype,
        )
        filter = Buffer.from_numpy(aligned(packed.data))
        return cls(
            problem=problem,
            x=to_buffer(work.x, dtype),
            packed=filter.view(DType.bfloat16) if dtype == "bfloat16" else filter,
            raw=to_buffer(work.max_filter.reshape(-1), dtype),
            bias=to_buffer(work.bias, dtype),
            residual=to_buffer(work.residual, dtype),
            no_bias=to_buffer(np.zeros(0, np.float32), dtype),
            no_residual=to_buffer(np.zeros((0,) * work.residual.ndim, np.float32), dtype),
            shape=Buffer.from_numpy(np.zeros((*work.residual.shape, 0), np.uint8)),
        )

    def plain(self, model: Model, count: int) -> Call:
        """Returns a call of ``count`` convolutions."""
        return self._call(model, count, self.packed, self.no_bias, self.no_residual)

    def raw_filter(self, model: Model, count: int) -> Call:
        """Returns the same with a filter that each convolution packs."""
        none = self.no_bias, self.no_residual
        return self._call(model, count, self.raw, *none, layout=Layout.RSCF)

    def fused(self, model: Model, count: int) -> Call:
        """Returns the same with bias, ReLU and residual as the op's operands."""
        return self._call(model, count, self.packed, self.bias, self.residual, fused=True)

    def compiler_fused(self, model: Model, count: int) -> Call:
        """Returns the same for a graph that has bias, ReLU and residual as its operations."""
        return self._call(model, count, self.packed, self.bias, self.residual)

    def _call(
        self,
        model: Model,
        count: int,
        filter: Buffer,
        bias: Buffer,
        residual: Buffer,
        *,
        layout: Layout = Layout.PACKED,
        fused: bool = False,
    ) -> Call:
        geometry = self.problem.geometry(
            filter_layout=layout,
            activation=Activation.RELU if fused else Activation.NONE,
            has_bias=fused,
            has_residual=fused,
        )
        fields = (Buffer.from_numpy(geometry), Buffer.from_numpy(encode_scalars()))
        operands = (*[self.x] * count, filter, bias, residual, *fields, self.shape)
        return Call(model, operands, count)


@dataclass(frozen=True)
class Through:
    """A graph of several problems, built with ``maxconv.conv1d``, ``conv2d`` and ``conv3d``."""

    names: tuple[str, ...]
    call: Call

    def outputs(self) -> dict[str, Float32]:
        """Runs the graph and returns the problems' outputs."""
        return dict(zip(self.names, self.call.outputs(), strict=True))


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
