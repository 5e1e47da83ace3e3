"""The op of a convolution, one for each target: its operands, what they hold, and its parameters.

Nothing else adds the op to a graph. ``emit`` does; ``convolution`` says what it takes for a problem
that a graph knows, ``operand_types`` for one that is known when the graph runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, Dim, TensorType, TensorValue, ops

from ._arguments import ConvArguments
from ._dtypes import CARRIERS, DTYPE_BYTES
from ._fields import (
    GEOMETRY_LENGTH,
    SCALARS_LENGTH,
    SEVERAL,
    Kernel,
    Layout,
    Precision,
)
from ._graph import constant, host_constant, is_computed, not_negative, op_name
from ._problem import ConvProblem, encode

__all__ = [
    "Operands",
    "Tensors",
    "convolution",
    "emit",
    "known_problem",
    "known_to_cpu",
    "operand_types",
    "shape_carrier",
    "symbolic_output",
]

_AXES = ("d", "h", "w")

S = TypeVar("S")
T = TypeVar("T")


@dataclass(slots=True)
class Operands(Generic[T]):
    """What stands for each operand of the op, in its order: types, graph values or buffers."""

    x: T
    """The activation, ``[N, *spatial, C]``."""
    filter: T
    """The filter's elements, flat."""
    bias: T | None
    """``[K]``, of the activation's type or float32."""
    residual: T | None
    """``[N, *spatial, K]``, of the output's type."""
    scale: T | None
    """``[K]``, float32."""
    geometry: T
    """``encode``'s, in host memory; so is the next one."""
    scalars: T

    def __iter__(self) -> Iterator[T]:
        """Goes through those that are there."""
        inputs = (self.x, self.filter, self.bias, self.residual, self.scale)
        every = (*inputs, self.geometry, self.scalars)
        return iter([operand for operand in every if operand is not None])

    def with_values(self, values: Iterable[S]) -> Operands[S]:
        """Returns operands of which the same are there, with these values in the op's order."""
        rest = iter(values)
        return Operands(
            x=next(rest),
            filter=next(rest),
            bias=None if self.bias is None else next(rest),
            residual=None if self.residual is None else next(rest),
            scale=None if self.scale is None else next(rest),
            geometry=next(rest),
            scalars=next(rest),
        )


@dataclass(frozen=True)
class Tensors:
    """The tensors of a convolution in a graph."""

    x: TensorValue
    """``[N, *spatial, C]``."""
    filter: TensorValue
    """The elements, flat."""
    filter_layout: Layout
    """Their order."""
    bias: TensorValue | None
    """``[K]``."""
    residual: TensorValue | None
    """Of the output's shape and type."""
    scale: TensorValue | None
    """``[K]``, float32."""


def emit(
    operands: Operands[TensorValue],
    output: TensorType,
    *,
    known: Mapping[str, bool | int] | None = None,
    fused_input: bool = False,
) -> TensorValue:
    """Adds the op to the current graph; checks nothing.

    Args:
        operands: Its operands; ``None`` where there is no bias, residual or scale.
        output: The type of the result, ``[N, *spatial, K]``.
        known: Facts of ``KnownProblem``: the op is compiled for that alone.
        fused_input: Whether MAX may fuse into the op what computes the activation.
    """
    x, device = operands.x, operands.x.device
    of_bias = x.dtype if x.dtype.name in DTYPE_BYTES else DType.float32
    whole = replace(
        operands,
        bias=_absent(of_bias, 1, device) if operands.bias is None else operands.bias,
        residual=_absent(output.dtype, x.rank, device)
        if operands.residual is None
        else operands.residual,
        scale=_absent(DType.float32, 1, device) if operands.scale is None else operands.scale,
    )
    parameters: dict[str, bool | int | str | DType] = dict(known or {})
    # An op without a scale is spared the multiplication.
    if operands.scale is not None:
        parameters["scaled"] = True
    name = op_name(device, fused_input=fused_input)
    return ops.custom(name, device, list(whole), [output], parameters)[0].tensor


def convolution(
    problem: ConvProblem,
    arguments: ConvArguments,
    tensors: Tensors,
    *,
    kernel: Kernel,
    out_dtype: str,
) -> TensorValue:
    """Adds a convolution to the current graph; checks nothing.

    Args:
        problem: The convolution.
        arguments: Those that it was built from.
        tensors: Its tensors.
        kernel: What must run.
        out_dtype: The output's type.

    Returns:
        ``[N, *spatial, K]``.
    """
    x, device, dtype = tensors.x, tensors.x.device, tensors.x.dtype.name
    geometry, scalars = encode(
        problem,
        arguments,
        filter_layout=tensors.filter_layout,
        has_bias=tensors.bias is not None,
        has_residual=tensors.residual is not None,
        kernel=kernel,
    )
    precision = Precision(arguments.precision or Precision.TF32)
    exact = dtype == "float32" and precision is Precision.FLOAT32
    # These kernels read the input where it lies, so nothing can be fused before them; what runs on
    # a GPU's tensor cores is the one for Hopper or Blackwell, if it can.
    reads = kernel in (Kernel.POINTWISE, Kernel.SM90, Kernel.SM100) or (
        device.is_gpu() and not exact
    )
    return emit(
        Operands(
            x=x,
            filter=tensors.filter,
            bias=tensors.bias,
            residual=tensors.residual,
            scale=tensors.scale,
            geometry=host_constant(geometry),
            scalars=host_constant(scalars),
        ),
        TensorType(DType[out_dtype], _output_shape(problem), device),
        known=known_problem(problem, kernel, precision)
        if device.is_gpu()
        else known_to_cpu(problem, kernel),
        fused_input=problem.taps == 1 and not reads and is_computed(x),
    )


def known_problem(
    problem: ConvProblem, kernel: Kernel = Kernel.AUTO, precision: Precision = Precision.TF32
) -> dict[str, bool | int]:
    """Returns what a graph knows of a problem, as parameters of the op.

    The op's registry compiles a GPU's op with the kernels, and their configurations, that such a
    problem may need (``KnownProblem`` in operations/conv/known.mojo). Symbolic sizes are left out.

    Args:
        problem: The convolution.
        kernel: What was asked for.
        precision: Of the products of float32.
    """
    known: dict[str, bool | int] = {
        "kernel": int(kernel),
        "exact": precision is Precision.FLOAT32,
        "groups": problem.groups,
        "taps": problem.filter_size[-1],
        "stride": problem.stride[-1],
    }
    for name, count in (("channels", problem.channels), ("filters", problem.filters)):
        if isinstance(count, int):
            known[name] = count // problem.groups
    return known


def known_to_cpu(problem: ConvProblem, kernel: Kernel = Kernel.AUTO) -> dict[str, bool | int]:
    """Returns what a CPU's op is compiled for: a part of what ``known_problem`` returns.

    It is little, so that the convolutions of a network share what is compiled: whether there is one
    group, and whether a group has one channel and one filter. That tells depthwise convolutions,
    grouped ones and all others apart, which run on different kernels.

    Args:
        problem: The convolution.
        kernel: What was asked for.
    """
    known: dict[str, bool | int] = {"kernel": int(kernel)}
    groups, channels, filters = problem.groups, problem.channels, problem.filters
    if not isinstance(channels, int) or not isinstance(filters, int):
        return known
    if groups == 1 and (channels, filters) != (1, 1):
        return known | {"groups": 1}
    known["groups"] = _one_or_several(groups)
    known["channels"] = _one_or_several(channels // groups)
    known["filters"] = _one_or_several(filters // groups)
    return known


def _one_or_several(count: int) -> int:
    return 1 if count == 1 else SEVERAL


def operand_types(
    rank: int,
    dtype: str,
    device: DeviceRef,
    *,
    bias_dtype: str | None = None,
    out_dtype: str | None = None,
    scaled: bool = False,
) -> Operands[TensorType]:
    """Returns the operands' types of an op that serves every problem: every size is symbolic.

    Args:
        rank: Spatial dimensions.
        dtype: Of activation and filter.
        device: Of all tensors but ``geometry`` and ``scalars``.
        bias_dtype: Of the bias; by default ``dtype``.
        out_dtype: Of the residual; by default ``dtype``.
        scaled: Whether there is a scale.
    """
    axes = _AXES[3 - rank :]
    added = ("add_n", *(f"add_{axis}" for axis in axes), "add_c")
    host = DeviceRef.CPU()
    return Operands(
        x=TensorType(DType[dtype], ("n", *axes, "c"), device),
        filter=TensorType(DType[dtype], ("filter_elements",), device),
        bias=TensorType(DType[bias_dtype or dtype], ("bias_elements",), device),
        residual=TensorType(DType[out_dtype or dtype], added, device),
        scale=TensorType(DType.float32, ("scale_elements",), device) if scaled else None,
        geometry=TensorType(DType.int64, (GEOMETRY_LENGTH,), host),
        scalars=TensorType(DType.float32, (SCALARS_LENGTH,), host),
    )


def symbolic_output(rank: int, dtype: str, device: DeviceRef) -> TensorType:
    """Returns the output's type of an op that serves every problem.

    Args:
        rank: Spatial dimensions.
        dtype: Of the output.
        device: Of the output.
    """
    axes = (f"out_{axis}" for axis in _AXES[3 - rank :])
    return TensorType(DType[dtype], ("out_n", *axes, "out_c"), device)


def shape_carrier(output: TensorType) -> TensorType:
    """Returns the type of a graph input that says how large a symbolic output is.

    It has the output's sizes, which no operand has, and no elements: uint8 in host memory, of
    shape ``[*output, 0]``.
    """
    return TensorType(DType.uint8, (*output.shape, 0), DeviceRef.CPU())


def _output_shape(problem: ConvProblem) -> list[Dim]:
    """Returns the output's shape, 0 where a symbolic input may turn out smaller than the filter.

    MAX allocates the output before the op can say so, and fails on a negative size.
    """
    shape = [Dim(size) for size in problem.output_shape]
    for i, size in enumerate(problem.input_size):
        padded = problem.pad_before[i] + problem.pad_after[i]
        if not isinstance(size, int) and padded + 2 * problem.stride[i] <= problem.span[i]:
            shape[1 + i] = not_negative(shape[1 + i])
    return shape


def _absent(dtype: DType, rank: int, device: DeviceRef) -> TensorValue:
    """Returns an empty operand in the place of one that the caller left out."""
    empty = np.empty((0,) * rank, CARRIERS[dtype.name])
    return constant(empty, dtype.name, device)
