"""Convolutions of 8-bit integers on a CPU, as maxconv and torch's quantized operators compute them.

Activations are uint8 with a zero point, filters int8 with a scale each, results uint8. The fused
work is a residual block's: bias, residual, ReLU.
"""

from __future__ import annotations

import math
import platform
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from max.driver import CPU, Buffer
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, Module
from torch import Tensor

import maxconv
from maxconv._checks import LAYOUTS
from maxconv._dtypes import UINT8
from maxconv._emit import emit, operand_types, shape_carrier, symbolic_output
from maxconv._fields import Activation, Layout, encode_scalars
from maxconv._library import library_path
from maxconv._machine import cpu_features
from maxconv._packing import Array
from maxconv._problem import ConvProblem
from maxconv._problems import NamedProblem
from maxconv.torch._arguments import read
from maxconv.torch._functional import convolve

from ..entrant import BARE, FUSED, MAXCONV, TORCH, WORKS, Entrant, Float32, HostRun, Key
from . import peers_torch
from .ours import Call
from .peers_torch import IN_TORCH, Loop, tensor
from .workload import Workload, aligned, convolutions

__all__ = ["IntegerGraphs", "IntegerWorkload", "contenders", "reference"]

#: Of activation, residual and output: their values, of about 1, use most of the steps.
ZERO_POINT, SCALE = 128, 1 / 32

#: Of an output behind a ReLU, which has only one side.
RELU_ZERO_POINT = 0

#: CPU features with which torch's engines add products exactly. An x86 CPU that has none of them
#: adds two products of 8 bits in 16, where they saturate: times are right, numbers are not.
EXACT_SUMS = {"amx_int8", "avx512_vnni", "avx_vnni"}

#: What a record says of such numbers.
SATURATES = "adds two products in 16 bits, where they saturate, on a CPU without VNNI"


@dataclass(frozen=True)
class IntegerWorkload:
    """Operands of a problem: integers, and the float32 that they stand for."""

    real: Workload
    """``x``, ``filter`` and ``residual`` are what the integers stand for."""
    x: Array
    """``[N, *spatial, C]``, uint8."""
    filter: Array
    """``[K, *taps, C / groups]``, int8."""
    residual: Array
    """``[N, *output, K]``, uint8."""
    filter_scales: Float32
    """``[K]``."""

    @classmethod
    def make(cls, named: NamedProblem) -> IntegerWorkload:
        """Makes the operands; they depend on the problem's name and nothing else."""
        work = Workload.make(named, "float32")
        axes = tuple(range(1, work.filter.ndim))
        scales = np.max(np.abs(work.filter), axis=axes) / np.float32(127)
        column = scales.reshape(-1, *(1,) * len(axes))
        filter = np.rint(work.filter / column).astype(np.int8)
        x, residual = (_quantized(values) for values in (work.x, work.residual))
        real = replace(
            work, x=_real(x), filter=filter.astype(np.float32) * column, residual=_real(residual)
        )
        return cls(real, x, filter, residual, scales.astype(np.float32))

    @property
    def problem(self) -> ConvProblem:
        """The convolution."""
        return self.real.named.problem


def _quantized(values: Float32) -> Array:
    steps: Array = np.clip(np.rint(values / SCALE) + ZERO_POINT, 0, 255).astype(np.uint8)
    return steps


def _real(integers: Array, zero_point: int = ZERO_POINT) -> Float32:
    values: Float32 = (integers.astype(np.float32) - zero_point) * np.float32(SCALE)
    return values


def _zero_point(work: str) -> int:
    """Returns that of the output."""
    return RELU_ZERO_POINT if work == FUSED else ZERO_POINT


def reference(work: IntegerWorkload) -> dict[str, Float32]:
    """Returns what all are compared with, in float32 and not rounded, by work."""
    real = work.real
    plain = peers_torch.reference(real)[BARE]
    fused = np.maximum(plain + real.bias + real.residual, 0)
    return {
        kind: np.clip(values, _least(kind), _least(kind) + 255 * SCALE)
        for kind, values in ((BARE, plain), (FUSED, fused))
    }


def _least(work: str) -> float:
    return -_zero_point(work) * SCALE


@dataclass(frozen=True)
class _Numbers(HostRun):
    """A run whose outputs are integers; it returns what they stand for."""

    run: Call | Loop
    zero_point: int
    convolutions: int

    @classmethod
    def of(cls, run: Call | Loop, work: str) -> _Numbers:
        """Returns a run's numbers in a kind of work."""
        return cls(run, _zero_point(work), run.convolutions)

    def __call__(self) -> list[Any]:
        """Convolves."""
        return self.run()

    def outputs(self) -> list[Float32]:
        """Convolves; returns what the outputs stand for."""
        made = []
        for output in self.run():
            if isinstance(output, Tensor):
                plain = output.int_repr() if output.is_quantized else output
                integers = np.ascontiguousarray(plain.movedim(1, -1).numpy())
            else:
                integers = output.to_numpy()
            made.append(_real(integers, self.zero_point))
        return made


class IntegerGraphs:
    """The compiled graphs; a problem's is compiled when one is first needed."""

    def __init__(self) -> None:
        self._session = InferenceSession(devices=[CPU()])
        self._models: dict[tuple[int, int], Model] = {}

    def model(self, problem: ConvProblem, count: int) -> Model:
        """Returns the compiled graph of so many convolutions of a problem's rank."""
        key = (problem.spatial_rank, count)
        if key not in self._models:
            module = Module()
            name = _build(*key, module)
            loaded = self._session.load_all(module, custom_extensions=[library_path()])
            self._models[key] = loaded[name]
        return self._models[key]

    def contenders(self, work: IntegerWorkload) -> dict[Key, Entrant]:
        """Returns what a problem is timed with: packed filters, and the epilogue as operands."""
        count = convolutions(work.problem)
        return {
            Key(MAXCONV, kind): Entrant(
                self._call(work, kind, count), self._call(work, kind, 1) if count > 1 else None
            )
            for kind in WORKS
        }

    def _call(self, work: IntegerWorkload, kind: str, count: int) -> HostRun:
        problem, fused = work.problem, kind == FUSED
        packed = maxconv.pack_filter(
            work.filter,
            LAYOUTS[problem.spatial_rank][0],
            groups=problem.groups,
        )
        geometry = problem.geometry(
            filter_layout=Layout.PACKED,
            final_activation=Activation.RELU if fused else Activation.NONE,
            has_bias=fused,
            has_residual=fused,
            zero_points=(ZERO_POINT, ZERO_POINT if fused else 0, _zero_point(kind)),
        )
        none = np.zeros((0,) * work.residual.ndim, np.uint8)
        operands = (
            *[work.x] * count,
            packed.data,
            work.real.bias if fused else np.zeros(0, np.float32),
            work.residual if fused else none,
            work.filter_scales * np.float32(SCALE),
            geometry,
            encode_scalars(beta=SCALE, output_factor=1 / SCALE),
            np.zeros((*work.residual.shape, 0), np.uint8),
        )
        buffers = tuple(Buffer.from_numpy(aligned(values)) for values in operands)
        return _Numbers.of(Call(self.model(problem, count), buffers, count), kind)


def _build(rank: int, count: int, module: Module) -> str:
    """Adds the graph of ``count`` convolutions; returns its name."""
    device, name = DeviceRef.CPU(), f"bench_integers_{rank}d_{count}"
    output = symbolic_output(rank, UINT8, device)
    operands = operand_types(
        rank, UINT8, device, bias_dtype="float32", out_dtype=UINT8, scaled=True
    )
    types = [*[operands.x] * (count - 1), *operands, shape_carrier(output)]
    library = maxconv.kernel_library()
    with Graph(name, input_types=types, kernel_library=library, module=module) as graph:
        values = [value.tensor for value in graph.inputs]
        shared = operands.with_values(values[count - 1 : -1])
        graph.output(*(emit(replace(shared, x=x), output) for x in values[:count]))
    return name


def contenders(
    work: IntegerWorkload, names: Collection[str]
) -> tuple[dict[Key, Entrant], dict[Key, str]]:
    """Returns what PyTorch times a problem with, and why others are missing.

    ``torch`` is ``torch.ops.quantized.conv*``, the operators of its quantized models, with oneDNN
    and a filter packed before; maxconv's variant is ``maxconv.torch.conv*``.

    Args:
        work: The problem's operands.
        names: The contenders that are wanted.
    """
    entrants: dict[Key, Entrant] = {}
    missing: dict[Key, str] = {}
    inexact = saturates(cpu_features(), platform.machine())
    for kind in WORKS:
        for key, make in ((Key(TORCH, kind), _torch), (Key(MAXCONV, kind, IN_TORCH), _ours)):
            if key.contender not in names:
                continue
            try:
                # Writes to a weight that is made within are not counted: it would be packed anew.
                with torch.inference_mode(False):
                    function = make(work, kind)
                function()
            # Operators refuse what they do not take in many ways; the others are worth timing.
            except Exception as error:
                missing[key] = (str(error).strip() or type(error).__name__).splitlines()[0]
                continue
            count = convolutions(work.problem)
            single = _Numbers.of(Loop(function, 1), kind) if count > 1 else None
            entrant = Entrant(_Numbers.of(Loop(function, count), kind), single)
            if key.contender == TORCH and inexact:
                entrant = replace(entrant, note=SATURATES, tolerance=math.inf)
            entrants[key] = entrant
    return entrants, missing


def saturates(features: Collection[str], machine: str) -> bool:
    """Returns whether torch's quantized operators give wrong sums on a CPU.

    Args:
        features: The CPU's, as ``doctor`` names them.
        machine: As ``platform.machine`` names it.
    """
    return machine == "x86_64" and not EXACT_SUMS.intersection(features)


def _ours(work: IntegerWorkload, kind: str) -> Callable[[], Tensor]:
    problem, rank = work.problem, work.problem.spatial_rank
    if problem.pad_before != problem.pad_after:
        raise ValueError("torch's functions take the same padding before and after")
    x, residual = (tensor(values, torch.uint8, rank) for values in (work.x, work.residual))
    weight = torch.from_numpy(np.ascontiguousarray(np.moveaxis(work.filter, -1, 1)))
    scale = torch.from_numpy(work.filter_scales * np.float32(SCALE))
    bias, fused = torch.from_numpy(work.real.bias), kind == FUSED
    arguments = read(
        rank,
        problem.stride,
        problem.pad_before,
        problem.dilation,
        problem.groups,
        None,
        SCALE,
        "relu" if fused else None,
        None,
        torch.uint8,
        zero_points=(ZERO_POINT, ZERO_POINT if fused else 0, _zero_point(kind)),
        out_scale=SCALE,
    )
    added, further = (bias, residual) if fused else (None, None)
    # As a module calls it, which packs its weight once.
    return lambda: convolve(x, weight, added, further, scale, arguments, constant=True)


def _torch(work: IntegerWorkload, kind: str) -> Callable[[], Tensor]:
    problem, rank = work.problem, work.problem.spatial_rank
    if problem.pad_before != problem.pad_after:
        raise ValueError("torch's quantized operators take the same padding before and after")
    quantized: Any = torch.ops.quantized
    backends: Any = torch.backends
    backends.quantized.engine = "onednn"
    make: Any = torch._make_per_tensor_quantized_tensor
    channels: Any = torch._make_per_channel_quantized_tensor
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x, residual = (
            make(tensor(values, torch.uint8, rank), SCALE, ZERO_POINT)
            for values in (work.x, work.residual)
        )
        weight = channels(
            torch.from_numpy(np.ascontiguousarray(np.moveaxis(work.filter, -1, 1))),
            torch.from_numpy(work.filter_scales.astype(np.float64)),
            torch.zeros(len(work.filter), dtype=torch.int64),
            0,
        )
    fused = kind == FUSED
    bias = torch.from_numpy(work.real.bias) if fused else torch.zeros(len(work.filter))
    sizes = [list(sizes) for sizes in (problem.stride, problem.pad_before, problem.dilation)]
    packed = getattr(quantized, f"conv{rank}d_prepack")(weight, bias, *sizes, problem.groups)
    if not fused:
        plain = getattr(quantized, f"conv{rank}d")
        return lambda: plain(x, packed, SCALE, ZERO_POINT)
    if rank == 2:
        # It writes to the residual, which a network reads no more.
        return lambda: quantized.conv2d_add_relu(
            x, residual.clone(), packed, SCALE, RELU_ZERO_POINT
        )
    # Of what lies between them the range is twice as large.
    run = getattr(quantized, f"conv{rank}d")
    return lambda: quantized.add_relu(
        run(x, packed, 2 * SCALE, ZERO_POINT), residual, SCALE, RELU_ZERO_POINT
    )
