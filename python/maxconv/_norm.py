"""Normalizations for MAX graphs, with an activation: by groups of channels, and by each pixel.

They stand in front of convolutions in decoders and UNets. On a GPU they are operations of maxconv's
into which MAX fuses the elementwise work that follows; on a CPU they are made of MAX's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from max.dtype import DType
from max.graph import Dim, Graph, TensorType, TensorValue, TensorValueLike, ops
from max.graph.type import ConvInputLayout

from ._checks import check_integer, check_number, check_size, renamed
from ._dtypes import DTYPE_BYTES
from ._fields import Activation, Op
from ._graph import (
    constant,
    host_constant,
    is_graph_value,
    to_channels_first,
    unfused_when_complete,
)
from ._operands import images_operand, scale_operand
from .activations import ActivationLike, ActivationSpec, parse

__all__ = ["group_norm", "rms_norm"]


def group_norm(
    x: TensorValueLike,
    num_groups: int,
    weight: object = None,
    bias: object = None,
    epsilon: float = 1e-5,
    *,
    activation: ActivationLike = None,
    input_layout: ConvInputLayout | str = ConvInputLayout.NHWC,
) -> TensorValue:
    """Normalizes groups of channels of each image, and applies an activation.

    ``activation((x - mean) / sqrt(variance + epsilon) * weight + bias)``, with mean and variance of
    all pixels of a group's channels (Wu and He, "Group Normalization", ECCV 2018). As many groups
    as channels make it an instance normalization. It is computed in float32 and rounded once.

    Args:
        x: The input, ``[N, *spatial, C]`` with one to three spatial dimensions, float32, bfloat16
            or float16.
        num_groups: Groups of neighbouring channels; a divisor of ``C``.
        weight: ``[C]``: an array or a graph value, or ``None``, as ``bias`` then is.
        bias: The same.
        epsilon: Added to the variance; not negative.
        activation: What follows; see ``conv2d``.
        input_layout: ``NHWC``, or ``NCHW`` for ``x`` and the result, which costs a permutation of
            each.

    Returns:
        A tensor of the shape and type of ``x``.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An argument has a value that is not allowed, ``C`` is symbolic, or the graph was
            not given maxconv's kernels.
    """
    value, first, channels = _read_input(x, input_layout)
    groups = check_integer("num_groups", num_groups)
    if groups < 1 or channels % groups:
        raise ValueError(
            f"num_groups: {groups} does not divide the {channels} channels; a divisor is allowed"
        )
    added = _read_epsilon(epsilon)
    if (weight is None) != (bias is None):
        raise ValueError("weight, bias: one of them is None; both or none are allowed")
    factors = _vector("weight", weight, value)
    shifts = _vector("bias", bias, value)
    behind = parse("activation", activation)
    if value.device.is_gpu():
        result = _on_gpu(Op.GROUP_NORM_GPU, value, groups, factors, shifts, added, behind)
    else:
        normal = _grouped_by_max(value, groups, factors, shifts, added)
        result = _activated_by_max(normal, behind, value.dtype)
    return to_channels_first(result) if first else result


def rms_norm(
    x: TensorValueLike,
    weight: object,
    epsilon: float = 1e-6,
    *,
    activation: ActivationLike = None,
    input_layout: ConvInputLayout | str = ConvInputLayout.NHWC,
) -> TensorValue:
    """Divides each pixel by the root mean square of its channels, and applies an activation.

    ``activation(x / sqrt(mean(x * x) + epsilon) * weight)`` (Zhang and Sennrich, "Root Mean Square
    Layer Normalization", NeurIPS 2019). It is computed in float32 and rounded once.

    Args:
        x: The input, as ``group_norm`` has it.
        weight: ``[C]``: an array or a graph value.
        epsilon: Added to the mean of squares; not negative.
        activation: What follows; see ``conv2d``.
        input_layout: ``NHWC``, or ``NCHW`` for ``x`` and the result.

    Returns:
        A tensor of the shape and type of ``x``.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An argument has a value that is not allowed, ``C`` is symbolic, or the graph was
            not given maxconv's kernels.
    """
    value, first, _ = _read_input(x, input_layout)
    if (factors := _vector("weight", weight, value)) is None:
        raise TypeError("weight: None is not allowed; an array or a graph value is")
    added = _read_epsilon(epsilon)
    behind = parse("activation", activation)
    if value.device.is_gpu():
        result = _on_gpu(Op.RMS_NORM_GPU, value, 0, factors, None, added, behind)
    else:
        normal = ops.rms_norm(ops.cast(value, DType.float32), factors, added)
        result = _activated_by_max(normal, behind, value.dtype)
    return to_channels_first(result) if first else result


def _read_input(x: object, input_layout: object) -> tuple[TensorValue, bool, int]:
    """Reads the input; returns it with the channels last, if they came first, and their number."""
    value, first = images_operand(x, input_layout, "a normalization", DTYPE_BYTES)
    channels = check_size("input", value.shape[-1])
    if not isinstance(channels, int):
        raise ValueError(f"input: {channels} channels; a number that is known is allowed")
    return value, first, channels


def _read_epsilon(epsilon: object) -> float:
    added = check_number("epsilon", epsilon)
    if not 0 <= added < math.inf:
        raise ValueError(f"epsilon: {added} is not allowed; 0 and above are, but not infinity")
    return added


def _vector(name: str, given: object, x: TensorValue) -> TensorValue | None:
    """Reads ``weight`` or ``bias`` as float32."""
    if is_graph_value(given):
        value = TensorValue(cast(Any, given))
        given = value if value.dtype != x.dtype else ops.cast(value, DType.float32)
    with renamed(scale=name, filters="channels"):
        return scale_operand(given, check_size("input", x.shape[-1]), x.device)


def _on_gpu(
    op: Op,
    x: TensorValue,
    groups: int,
    weight: TensorValue | None,
    bias: TensorValue | None,
    epsilon: float,
    activation: ActivationSpec,
) -> TensorValue:
    """Adds one of maxconv's ops; it is compiled for the number of channels."""
    none = constant(np.empty(0, np.float32), "float32", x.device)
    values = [
        x,
        none if weight is None else weight,
        none if bias is None else bias,
        host_constant(np.array([groups, activation.kind], np.int64)),
        host_constant(np.array([epsilon, *activation.parameters], np.float32)),
    ]
    parameters: dict[str, Any] = {"channels": int(x.shape[-1])}
    output = TensorType(x.dtype, x.shape, x.device)
    unfused_when_complete(Graph.current)
    return ops.custom(op.value, x.device, values, [output], parameters)[0].tensor


def _grouped_by_max(
    x: TensorValue,
    groups: int,
    weight: TensorValue | None,
    bias: TensorValue | None,
    epsilon: float,
) -> TensorValue:
    """Normalizes groups by MAX's operations, in float32."""
    batch, *sizes, channels = x.shape
    pixels = math.prod(sizes, start=Dim(1))
    grouped = ops.reshape(
        ops.cast(x, DType.float32), (batch, pixels, groups, int(channels) // groups)
    )

    def mean(value: TensorValue) -> TensorValue:
        return ops.mean(ops.mean(value, axis=1), axis=3)

    difference = grouped - mean(grouped)
    normal = difference * ops.rsqrt(mean(difference * difference) + epsilon)
    if weight is not None and bias is not None:
        # The weight is not multiplied with the deviation first: MAX 26.7 gives wrong products of
        # [N, 1, groups, 1] and [1, 1, groups, channels] on a CPU.
        shape = (1, 1, groups, int(channels) // groups)
        normal = normal * ops.reshape(weight, shape) + ops.reshape(bias, shape)
    return ops.reshape(normal, x.shape)


def _activated_by_max(value: TensorValue, activation: ActivationSpec, dtype: DType) -> TensorValue:
    """Applies an activation by MAX's operations, and rounds."""
    return ops.cast(_FORMULAS[activation.kind](value, activation), dtype)


def _clamped(value: TensorValue, low: float, high: float) -> TensorValue:
    if low > -math.inf:
        value = ops.max(value, low)
    return ops.min(value, high) if high < math.inf else value


def _ramp(value: TensorValue) -> TensorValue:
    return _clamped(value + 3.0, 0.0, 6.0) * (1 / 6)


#: What MAX's operations make of each activation.
_FORMULAS: Mapping[Activation, Callable[[TensorValue, ActivationSpec], TensorValue]] = {
    Activation.NONE: lambda v, _: v,
    Activation.RELU: lambda v, _: ops.relu(v),
    Activation.CLAMP: lambda v, a: _clamped(v, a.p0, a.p1),
    Activation.LEAKY_RELU: lambda v, a: ops.where(v > 0.0, v, v * a.p0),
    Activation.SIGMOID: lambda v, _: ops.sigmoid(v),
    Activation.SILU: lambda v, _: ops.silu(v),
    Activation.HARD_SWISH: lambda v, _: v * _ramp(v),
    Activation.HARD_SIGMOID: lambda v, _: _ramp(v),
    Activation.GELU: lambda v, _: ops.gelu(v),
    Activation.GELU_TANH: lambda v, _: ops.gelu(v, approximate="tanh"),
    Activation.TANH: lambda v, _: ops.tanh(v),
}
