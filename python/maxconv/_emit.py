"""The op of a convolution in a graph, one for each target; ``_signature`` says what it takes.

Nothing else adds the op to a graph. ``emit`` does; ``convolution`` says what it takes for a problem
that a graph knows, ``operand_types`` for one that is known when the graph runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, Dim, Graph, TensorType, TensorValue, ops

from ._arguments import ConvArguments
from ._dtypes import CARRIERS, filter_dtype
from ._fields import GEOMETRY_LENGTH, SCALARS_LENGTH, Kernel, Layout, Op, Precision
from ._graph import (
    constant,
    host_constant,
    is_computed,
    not_negative,
    op_name,
    unfused_when_complete,
)
from ._problem import ConvProblem, encode
from ._signature import Operands, centered, known_problem, known_to_cpu, op_parameters
from ._tuned import known_features

__all__ = [
    "Tensors",
    "convolution",
    "emit",
    "operand_types",
    "output_shape",
    "shape_carrier",
    "symbolic_output",
]

_AXES = ("d", "h", "w")


@dataclass(frozen=True)
class Tensors:
    """The tensors of a convolution in a graph."""

    x: TensorValue
    """``[N, *spatial, C]``."""
    filter: TensorValue
    """The elements, flat; of the sub-pixel form, as bias and scale, where the input is enlarged."""
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
    depth_to_space: bool = False,
    interleaved: bool = False,
) -> TensorValue:
    """Adds the op to the current graph; checks nothing.

    Args:
        operands: Its operands; ``None`` where there is no bias, residual or scale.
        output: The type of the result, ``[N, *spatial, K]``.
        known: Facts of ``KnownProblem``: the op is compiled for that alone.
        fused_input: Whether MAX may fuse into the op what computes the activation.
        depth_to_space: Whether filters are pixels of ``output``, as ``geometry`` says.
        interleaved: Whether input or output are, on a GPU both.
    """
    x, device = operands.x, operands.x.device
    whole = operands.completed(
        lambda dtype, rank: constant(np.empty((0,) * rank, CARRIERS[dtype]), dtype, device),
        dtype=x.dtype.name,
        out_dtype=output.dtype.name,
        rank=output.rank,
    )
    features = None if device.is_gpu() else known_features()
    parameters = op_parameters(
        {**(known or {}), **({} if features is None else {"features": features})},
        scaled=operands.scale is not None,
        depth_to_space=depth_to_space,
    )
    name = op_name(device, fused_input=fused_input)
    if interleaved:
        op = Op.CONV_INTERLEAVED_GPU if device.is_gpu() else Op.CONV_INTERLEAVED_CPU
        name = op.value
    unfused_when_complete(Graph.current)
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
    reads = kernel in (Kernel.POINTWISE, Kernel.SM90, Kernel.UNALIGNED, Kernel.SM100) or (
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
        TensorType(
            DType[out_dtype], output_shape(problem, [Dim(n) for n in problem.output_shape]), device
        ),
        known={**known_problem(problem, kernel, precision), **centered(arguments)}
        if device.is_gpu()
        else known_to_cpu(problem, kernel),
        fused_input=problem.taps == 1 and not reads and is_computed(x),
        depth_to_space=problem.upsamples,
    )


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
        filter=TensorType(DType[filter_dtype(dtype)], ("filter_elements",), device),
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


def output_shape(problem: ConvProblem, shape: Sequence[Dim]) -> list[Dim]:
    """Returns an output's shape, 0 where a symbolic input may turn out smaller than the filter.

    MAX allocates the output before the op can say so, and fails on a negative size.

    Args:
        problem: The convolution.
        shape: ``[N, *output, K]``, which may be negative there.
    """
    result = list(shape)
    for i, size in enumerate(problem.input_size):
        padded = problem.pad_before[i] + problem.pad_after[i]
        if not isinstance(size, int) and padded + 2 * problem.stride[i] <= problem.span[i]:
            result[1 + i] = not_negative(result[1 + i])
    return result
