"""Convolutions through MAX graphs on a GPU: maxconv's op and MAX's own, one by one.

The graphs are compiled where no GPU need be (``compile_graphs``, in a process of its own) and run
from files on the GPU machine, where nothing is compiled. Their sizes are symbolic: a graph serves
every problem with a 3x3 filter, stride 1, padding 1 and one group.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.dlpack import from_dlpack

from maxconv._problem import ConvProblem

from ..device import LAUNCHES
from ..entrant import BARE, FUSED, MAX, MAXCONV, Entrant, Key
from .clock import distance
from .operands import Operands

if TYPE_CHECKING:
    from max.driver import Buffer, Device
    from max.engine import Model
    from max.graph import Graph, TensorValue

__all__ = ["FOLDER", "GRAPHS", "LoadedGraphs", "compile_graphs", "takes"]

#: The graphs' folder in the folder that ``--build`` wrote.
FOLDER = "graphs"

#: Variants of maxconv and of MAX.
IN_A_GRAPH = "in a MAX graph"
BY_THE_COMPILER = "in a MAX graph, fused by its compiler"
RSCF = "filter in RSCF"

#: Why only ``call`` is timed.
_NOTE = "execute by execute: MAX replays no graph of several"

#: An execute that takes longer is timed alone, not as one of many.
_SLOW_S = 5e-3

_PADDING = (1, 1, 1, 1)


def _ours(x: TensorValue, filter: TensorValue) -> TensorValue:
    import maxconv

    return maxconv.conv2d(x, filter, padding=_PADDING, filter_layout="KRSC")


def _ours_fused(
    x: TensorValue, filter: TensorValue, bias: TensorValue, residual: TensorValue
) -> TensorValue:
    import maxconv

    fused: dict[str, Any] = {"bias": bias, "activation": "silu", "residual": residual}
    return maxconv.conv2d(x, filter, padding=_PADDING, filter_layout="KRSC", **fused)


def _max_fcrs(x: TensorValue, filter: TensorValue) -> TensorValue:
    from max.graph import ops
    from max.graph.type import FilterLayout

    y: TensorValue = ops.conv2d(x, filter, padding=_PADDING, filter_layout=FilterLayout.FCRS)
    return y


def _max_rscf(x: TensorValue, filter: TensorValue) -> TensorValue:
    from max.graph import ops

    y: TensorValue = ops.conv2d(x, filter, padding=_PADDING)
    return y


def _followed(convolve: Callable[..., TensorValue]) -> Callable[..., TensorValue]:
    """Returns the convolution with the fused work written as MAX's operations."""

    def build(
        x: TensorValue, filter: TensorValue, bias: TensorValue, residual: TensorValue
    ) -> TensorValue:
        from max.graph import ops

        y: TensorValue = ops.silu(convolve(x, filter) + bias) + residual
        return y

    return build


@dataclass(frozen=True)
class GraphKind:
    """A graph: the contender that it stands for, its filter's layout, and what it holds."""

    key: Key
    layout: str
    """Of the filter, ``KRSC``, ``FCRS`` or ``RSCF``."""
    build: Callable[..., TensorValue]

    def shapes(self) -> list[tuple[str | int, ...]]:
        """Returns the inputs' shapes: activation, filter, and if it is fused bias and residual."""
        names: dict[str, str | int] = {"K": "k", "F": "k", "C": "c", "R": 3, "S": 3}
        # In FCRS, F stands for filters; in RSCF too.
        shapes: list[tuple[str | int, ...]] = [("n", "h", "w", "c")]
        shapes.append(tuple(names[letter] for letter in self.layout))
        if self.key.work == FUSED:
            shapes += [("k",), ("n", "h", "w", "k")]
        return shapes


#: The graphs by the name of their file.
GRAPHS = {
    "maxconv": GraphKind(Key(MAXCONV, BARE, IN_A_GRAPH), "KRSC", _ours),
    "maxconv_fused": GraphKind(Key(MAXCONV, FUSED, IN_A_GRAPH), "KRSC", _ours_fused),
    "maxconv_followed": GraphKind(Key(MAXCONV, FUSED, BY_THE_COMPILER), "KRSC", _followed(_ours)),
    "max": GraphKind(Key(MAX), "FCRS", _max_fcrs),
    "max_rscf": GraphKind(Key(MAX, BARE, RSCF), "RSCF", _max_rscf),
    "max_fused": GraphKind(Key(MAX, FUSED), "FCRS", _followed(_max_fcrs)),
}


def takes(problem: ConvProblem) -> bool:
    """Returns whether the graphs compute a problem."""
    return (problem.filter_size, problem.stride, problem.dilation, problem.groups) == (
        (3, 3),
        (1, 1),
        (1, 1),
        1,
    ) and problem.pad_before == problem.pad_after == (1, 1)


def _graph(name: str, dtype: str) -> Graph:
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType

    import maxconv

    kind = GRAPHS[name]
    types = [TensorType(DType[dtype], shape, DeviceRef.GPU()) for shape in kind.shapes()]
    library = maxconv.kernel_library()
    with Graph(f"bench_{name}", input_types=types, kernel_library=library) as graph:
        graph.output(kind.build(*(value.tensor for value in graph.inputs)))
    return graph


def compile_graphs(architecture: str, dtype: str, folder: Path, names: Collection[str]) -> None:
    """Compiles graphs for a GPU that need not be here, and ends the process.

    Args:
        architecture: The GPU's, ``sm_90a`` say.
        dtype: Storage type.
        folder: Where the graphs are written, one file ``NAME.mef`` each.
        names: Of ``GRAPHS``.
    """
    from max import driver

    # Before MAX looks for a device.
    driver.set_virtual_device_api("cuda")
    driver.set_virtual_device_target_arch(architecture)
    driver.set_virtual_device_count(1)
    from max.engine import InferenceSession

    session = InferenceSession(devices=[driver.Accelerator()], export_mefs=str(folder))
    for name in names:
        session.load(_graph(name, dtype))
    manifest = folder / "manifest.json"
    for entry in json.loads(manifest.read_text(encoding="utf-8"))["graphs"]:
        (folder / entry["key"]).rename(folder / f"{entry['name'].removeprefix('bench_')}.mef")
    manifest.unlink()
    # A virtual device cannot be taken down.
    os._exit(0)


class LoadedGraphs:
    """The graphs of a folder, on this machine's GPU.

    ``missing`` says why each is not there that was asked for.
    """

    def __init__(self, folder: Path, names: Collection[str]) -> None:
        self.missing: dict[Key, str] = {}
        self._models: dict[str, Model] = {}
        if not names:
            return
        try:
            from max.driver import Accelerator
            from max.engine import InferenceSession

            self._device: Device = Accelerator()
            session = InferenceSession(devices=[self._device])
        # Whatever keeps MAX from its GPU, the others are still worth timing.
        except Exception as error:
            self.missing = {GRAPHS[name].key: f"not here: {_words(error)}" for name in names}
            return
        for name in names:
            path = folder / f"{name}.mef"
            try:
                if not path.is_file():
                    raise FileNotFoundError(f"{path} was not built")
                self._models[name] = session.load(path)
            except Exception as error:
                self.missing[GRAPHS[name].key] = f"not here: {_words(error)}"

    def entrants(self, operands: Operands) -> tuple[dict[Key, Entrant], dict[Key, str]]:
        """Returns what is timed of a problem, and why the rest is not."""
        if not takes(operands.named.problem):
            why = "the graphs take 3x3 filters with stride 1, padding 1 and one group"
            return {}, {GRAPHS[name].key: why for name in self._models}
        entrants: dict[Key, Entrant] = {}
        missing: dict[Key, str] = {}
        for name, model in self._models.items():
            key = GRAPHS[name].key
            try:
                entrants[key] = Entrant(call=self._run(name, model, operands), note=_NOTE)
            except Exception as error:
                missing[key] = _words(error)
        return entrants, missing

    def _run(self, name: str, model: Model, operands: Operands) -> ExecuteRun:
        """Returns a run that is warm, and has as many executes a call as their time allows."""
        sets = [_buffers(GRAPHS[name], operands, index) for index in range(operands.sets)]
        # torch may still be making them, in a stream of its own.
        operands.clock.synchronize()
        run = ExecuteRun(self._device, model, sets, 1)
        run.burst(1)
        (seconds,) = run.burst(1)
        run.convolutions = 1 if seconds > _SLOW_S else LAUNCHES
        return run


@dataclass
class ExecuteRun:
    """Executes of a graph, enqueued one after the other and waited for together."""

    device: Device
    model: Model
    operands: list[list[Buffer]]
    convolutions: int

    def burst(self, calls: int) -> list[float]:
        """Returns the mean seconds of ``calls`` calls."""
        self.device.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            for index in range(self.convolutions):
                self.model.execute(*self.operands[index % len(self.operands)])
        self.device.synchronize()
        return [(time.perf_counter() - begin) / calls]

    def error(self, expected: Tensor, tolerance: float) -> float:
        """See ``Run.error``."""
        output = self.model.execute(*self.operands[0])[0]
        self.device.synchronize()
        return distance(from_dlpack(output).movedim(-1, 1), expected, tolerance)


def _buffers(kind: GraphKind, operands: Operands, index: int) -> list[Buffer]:
    """Returns a set's operands as MAX's buffers; only filters are copied, where they must be."""
    from max.driver import Buffer

    order = {"KRSC": (0, 2, 3, 1), "FCRS": (0, 1, 2, 3), "RSCF": (2, 3, 1, 0)}[kind.layout]
    tensors = [operands.x[index].movedim(1, -1), operands.filter[index].permute(order)]
    if kind.key.work == FUSED:
        tensors += [operands.bias[index], operands.residual[index].movedim(1, -1)]
    return [Buffer.from_dlpack(tensor.contiguous()) for tensor in tensors]


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__
