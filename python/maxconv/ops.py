"""Convolutions for MAX graphs.

``conv1d``, ``conv2d`` and ``conv3d`` take what ``max.graph.ops.conv2d`` takes, in the same order,
and more by name. Each adds one operation to the current graph, ``maxconv.conv``, into which MAX
fuses the elementwise work that follows::

    with Graph("net", input_types=[...], kernel_library=maxconv.kernel_library()) as graph:
        x = graph.inputs[0].tensor
        y = ops.silu(maxconv.conv2d(x, w, padding=(1, 1, 1, 1), bias=b)) + x   # one kernel
        graph.output(y)

Activations have the channels last: ``[N, W, C]``, ``[N, H, W, C]`` or ``[N, D, H, W, C]``, of
float32, bfloat16 or float16, on GPUs float8_e4m3fn too, on GPUs of compute capability 10.0 and 10.3
also float8_e5m2 and int8; sums are float32 (of int8, int32) and are rounded once. A GPU with tensor
cores rounds float32 operands to tf32 unless ``precision`` says otherwise. Every size of an
activation may be symbolic.

A bad argument raises ``ValueError``, or ``TypeError`` for a wrong Python type, before anything is
compiled; the message names the argument, the value and what is allowed.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from max.driver import DLPackArray
from max.dtype import DType
from max.graph import DeviceRef, Dim, Graph, TensorType, TensorValue, TensorValueLike, ops
from max.graph.type import ConvInputLayout, FilterLayout

from ._fields import CPU_KERNELS, GPU_KERNELS, Kernel, Precision, encode_scalars
from ._gpu import gpu_kernels, known_filter
from ._graph import (
    constant,
    host_constant,
    is_computed,
    not_negative,
    repeat,
    require_kernels,
)
from ._operands import (
    FilterOperand,
    bias_operand,
    filter_operand,
    input_operand,
    residual_operand,
    scale_operand,
    to_channels_first,
)
from ._transpose import split_phases
from .activations import NONE, ActivationLike, ActivationSpec, parse
from .arguments import BLACKWELL_BYTES, DTYPE_BYTES, Padding, check_dtype, check_precision
from .packing import PackedFilter, cast_array
from .problem import ConvProblem

__all__ = ["conv1d", "conv2d", "conv2d_transpose", "conv3d"]

#: A filter: a graph value, an array (numpy or anything with ``__dlpack__``), or a packed filter.
FilterLike: TypeAlias = TensorValueLike | DLPackArray | PackedFilter

#: What sums are multiplied with: a number, or one float32 for each filter.
ScaleLike: TypeAlias = float | TensorValueLike | DLPackArray | None

_OP = "maxconv.conv"
# This one lets MAX fuse what stands before it, at the price of computing it anew for every tap.
_OP_FUSED_INPUT = "maxconv.conv_fused_input"


def conv1d(
    x: TensorValueLike,
    filter: FilterLike,
    stride: int | tuple[int] = (1,),
    dilation: int | tuple[int] = (1,),
    padding: Padding = (0, 0),
    groups: int = 1,
    bias: TensorValueLike | DLPackArray | None = None,
    input_layout: ConvInputLayout | str = ConvInputLayout.NHWC,
    filter_layout: FilterLayout | str = "SCF",
    *,
    activation: ActivationLike = None,
    residual: TensorValueLike | DLPackArray | None = None,
    beta: float = 1.0,
    final_activation: ActivationLike = None,
    out_dtype: DType | None = None,
    config: str | None = None,
    precision: str = "tf32",
    scale: ScaleLike = None,
) -> TensorValue:
    """Convolves a signal.

    Args:
        x: The signal, ``[N, W, C]``.
        filter: The filter in ``filter_layout``; see ``conv2d``.
        stride: Output sample ``q`` reads from input sample ``q * stride - padding`` on.
        dilation: Input samples from one tap to the next.
        padding: ``(before, after)``, one integer for both, ``"same"`` or ``"valid"``.
        groups: See ``conv2d``.
        bias: See ``conv2d``.
        input_layout: ``NHWC`` (or ``"NWC"``), or ``NCHW`` (or ``"NCW"``) for channels first.
        filter_layout: ``"SCF"``, ``"FCS"`` (PyTorch's) or ``"KSC"``.
        activation: See ``conv2d``.
        residual: See ``conv2d``.
        beta: See ``conv2d``.
        final_activation: See ``conv2d``.
        out_dtype: See ``conv2d``.
        config: See ``conv2d``.
        precision: See ``conv2d``.
        scale: See ``conv2d``.

    Returns:
        ``[N, Q, K]``, or ``[N, K, Q]`` where the channels of ``x`` are first.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An argument has a value that is not allowed, or the graph was not given
            maxconv's kernels.
    """
    return _convolve(
        1, x, filter, stride, dilation, padding, groups, bias, input_layout, filter_layout,
        activation, residual, beta, final_activation, out_dtype, config, precision, scale,
    )  # fmt: skip


def conv2d(
    x: TensorValueLike,
    filter: FilterLike,
    stride: int | tuple[int, int] = (1, 1),
    dilation: int | tuple[int, int] = (1, 1),
    padding: Padding = (0, 0, 0, 0),
    groups: int = 1,
    bias: TensorValueLike | DLPackArray | None = None,
    input_layout: ConvInputLayout | str = ConvInputLayout.NHWC,
    filter_layout: FilterLayout | str = FilterLayout.RSCF,
    *,
    activation: ActivationLike = None,
    residual: TensorValueLike | DLPackArray | None = None,
    beta: float = 1.0,
    final_activation: ActivationLike = None,
    out_dtype: DType | None = None,
    config: str | None = None,
    precision: str = "tf32",
    scale: ScaleLike = None,
) -> TensorValue:
    """Convolves an image.

    Computes, in float32 and with one rounding at the end::

        final_activation(activation(scale * conv(x, filter) + bias) + beta * residual)

    Args:
        x: The image, ``[N, H, W, C]``: float32, bfloat16 or float16; on a GPU also float8_e4m3fn
            (MAX has no such tensors on CPUs); on one of compute capability 10.0 or 10.3 also
            float8_e5m2 and int8, of ``C / groups`` channels that are a multiple of 16.
        filter: The filter in ``filter_layout``, with ``C / groups`` channels. An array or a
            constant is packed when the graph is built, a weight when the model is loaded, any other
            value in each call; a ``PackedFilter`` is packed already, knows its ``groups`` and
            disregards ``filter_layout``. An array is converted to the type of ``x`` (for int8 it is
            rounded to integers); a graph value must have it.
        stride: One integer, or ``(h, w)``.
        dilation: Input elements from one tap to the next: one integer, or ``(h, w)``.
        padding: Zeros around the image: ``(h_before, h_after, w_before, w_after)``, one integer for
            all sides, ``"valid"`` for none, or ``"same"`` for an output of the input's size (stride
            1 only; an odd zero goes after, as in PyTorch).
        groups: Both channels and filters are divided into so many independent groups.
        bias: ``[K]``, of the type of ``x`` (of the result where ``x`` has 8 bits) or float32.
        input_layout: ``NHWC``, or ``NCHW`` for ``x``, ``residual`` and the result, which costs a
            permutation of each.
        filter_layout: ``RSCF`` (MAX's default), ``FCRS`` (PyTorch's) or ``"KRSC"`` (the kernels').
        activation: ``"relu"``, ``"relu6"``, ``"leaky_relu"``, ``"sigmoid"``, ``"silu"``,
            ``"hard_swish"``, ``"gelu"``, ``"gelu_tanh"``, ``"tanh"``, or ``clamp(min, max)`` or
            ``leaky_relu(slope)`` of ``maxconv.activations``.
        residual: Added to the result, of its shape and type.
        beta: What the residual is multiplied with.
        final_activation: As ``activation``, but applied last.
        out_dtype: Type of the result: float32, bfloat16 or float16. By default that of ``x``; where
            ``x`` has 8 bits it must be given.
        config: The kernel that must run: ``"reference"``, ``"implicit_gemm"``, ``"grouped"``; on
            a CPU also ``"pointwise"``, ``"depthwise"``, ``"few_filters"``; on a GPU also
            ``"depthwise"``, on one of compute capability 9.0 ``"sm90"`` and ``"stem"``, on one of
            10.0 or 10.3 ``"sm100"``. On a GPU ``"grouped"`` and ``"depthwise"`` multiply on the
            tensor cores what these take, and the rest on CUDA cores. It raises in the call
            where it cannot; ``"auto"`` or ``None`` leaves the choice to the op.
        precision: What is left of float32 operands when they are multiplied: ``"tf32"`` lets a GPU
            round them to tf32 (10 bits of mantissa, float32's exponent), which its tensor cores
            take; the norm of the result's error is then about 3e-4 of the result's. With
            ``"float32"`` nothing is rounded, and a GPU's CUDA cores multiply, many times more
            slowly. A CPU rounds nothing either way; other types are not rounded.
        scale: What the sums are multiplied with, in float32: a number, or one float32 for each
            filter, ``[K]``. With types of 8 bits it is the product of the scales by which
            activation and filter were divided.

    Returns:
        ``[N, P, Q, K]``, or ``[N, K, P, Q]`` where the channels of ``x`` are first. A size is
        symbolic where the one that it comes from is.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An argument has a value that is not allowed, or the graph was not given
            maxconv's kernels. What only the sizes of a call can tell is raised by that call.
    """
    return _convolve(
        2, x, filter, stride, dilation, padding, groups, bias, input_layout, filter_layout,
        activation, residual, beta, final_activation, out_dtype, config, precision, scale,
    )  # fmt: skip


def conv3d(
    x: TensorValueLike,
    filter: FilterLike,
    stride: int | tuple[int, int, int] = (1, 1, 1),
    dilation: int | tuple[int, int, int] = (1, 1, 1),
    padding: Padding = (0, 0, 0, 0, 0, 0),
    groups: int = 1,
    bias: TensorValueLike | DLPackArray | None = None,
    input_layout: ConvInputLayout | str = ConvInputLayout.NHWC,
    filter_layout: FilterLayout | str = FilterLayout.QRSCF,
    *,
    activation: ActivationLike = None,
    residual: TensorValueLike | DLPackArray | None = None,
    beta: float = 1.0,
    final_activation: ActivationLike = None,
    out_dtype: DType | None = None,
    config: str | None = None,
    precision: str = "tf32",
    scale: ScaleLike = None,
) -> TensorValue:
    """Convolves a volume or a video.

    Args:
        x: The volume, ``[N, D, H, W, C]``.
        filter: The filter in ``filter_layout``; see ``conv2d``.
        stride: One integer, or ``(d, h, w)``.
        dilation: One integer, or ``(d, h, w)``.
        padding: ``(d_before, d_after, h_before, h_after, w_before, w_after)``, one integer for all
            sides, ``"same"`` or ``"valid"``.
        groups: See ``conv2d``.
        bias: See ``conv2d``.
        input_layout: ``NHWC`` (or ``"NDHWC"``), or ``NCHW`` (or ``"NCDHW"``) for channels first.
        filter_layout: ``QRSCF`` (MAX's default), ``FCQRS`` (PyTorch's) or ``"KTRSC"``.
        activation: See ``conv2d``.
        residual: See ``conv2d``.
        beta: See ``conv2d``.
        final_activation: See ``conv2d``.
        out_dtype: See ``conv2d``.
        config: See ``conv2d``.
        precision: See ``conv2d``.
        scale: See ``conv2d``.

    Returns:
        ``[N, Z, P, Q, K]``, or ``[N, K, Z, P, Q]`` where the channels of ``x`` are first.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An argument has a value that is not allowed, or the graph was not given
            maxconv's kernels.
    """
    return _convolve(
        3, x, filter, stride, dilation, padding, groups, bias, input_layout, filter_layout,
        activation, residual, beta, final_activation, out_dtype, config, precision, scale,
    )  # fmt: skip


def conv2d_transpose(
    x: TensorValueLike,
    filter: TensorValueLike | DLPackArray,
    stride: int | tuple[int, int] = (1, 1),
    dilation: int | tuple[int, int] = (1, 1),
    padding: Padding = (0, 0, 0, 0),
    output_paddings: int | tuple[int, int] = (0, 0),
    bias: TensorValueLike | DLPackArray | None = None,
    input_layout: ConvInputLayout | str = ConvInputLayout.NHWC,
    filter_layout: FilterLayout | str = FilterLayout.RSCF,
    *,
    groups: int = 1,
    activation: ActivationLike = None,
    out_dtype: DType | None = None,
    config: str | None = None,
    precision: str = "tf32",
    scale: ScaleLike = None,
) -> TensorValue:
    """Computes the transposed convolution of an image.

    The result is ``activation(scale * conv_t(x, filter) + bias)``. It takes what
    ``max.graph.ops.conv2d_transpose`` takes, in the same order, and computes what
    ``torch.nn.functional.conv_transpose2d`` does. A stride above 1 becomes one convolution of
    stride 1 for each phase of the output, so that no product with a zero is computed.

    Args:
        x: The image, ``[N, H, W, C]``.
        filter: The filter of the convolution of which this is the transpose, in ``filter_layout``:
            its filters are the channels of ``x``, its channels those of the result. In ``RSCF``:
            ``[R, S, K / groups, C]``.
        stride: One integer, or ``(h, w)``: output elements from one input element to the next.
        dilation: Output elements from one tap to the next: one integer, or ``(h, w)``.
        padding: Rows and columns cut off the result: ``(h_before, h_after, w_before, w_after)``, or
            one integer for all sides.
        output_paddings: Rows and columns of which ``padding`` cuts less at the end, each below the
            stride or the dilation: one integer, or ``(h, w)``.
        bias: ``[K]``, of the type of ``x`` or float32.
        input_layout: ``NHWC``, or ``NCHW`` for ``x`` and the result.
        filter_layout: ``RSCF``, ``FCRS`` (which is PyTorch's ``[C, K / groups, R, S]``) or
            ``"KRSC"``.
        groups: Both channels and filters are divided into so many independent groups.
        activation: See ``conv2d``.
        out_dtype: Type of the result; by default that of ``x``.
        config: See ``conv2d``.
        precision: See ``conv2d``.
        scale: See ``conv2d``.

    Returns:
        ``[N, P, Q, K]``, or ``[N, K, P, Q]`` where the channels of ``x`` are first, with
        ``P = (H - 1) * stride - pad_before - pad_after + dilation * (R - 1) + output_padding + 1``.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An argument has a value that is not allowed, or the graph was not given
            maxconv's kernels.
    """
    require_kernels(Graph.current, _OP)
    value, first = input_operand(x, input_layout, 2)
    dtype = check_dtype("input", value.dtype)
    split = split_phases(
        value.shape,
        filter,
        filter_layout,
        stride=stride,
        dilation=dilation,
        padding=padding,
        output_paddings=output_paddings,
        groups=groups,
        dtype=dtype,
        device=value.device,
    )
    function = parse("activation", activation)
    target = _out_dtype(out_dtype, dtype)
    kernel, rounding = _kernel(config, value.device, dtype), check_precision(precision)
    added = bias_operand(bias, split.filters, dtype=dtype, device=value.device)
    factors = scale_operand(scale, split.filters, value.device)
    if split.merged:
        times = math.prod(split.stride)
        added = None if added is None else repeat(added, times)
        factors = None if factors is None else repeat(factors, times)
    outputs = []
    for phase in split.phases:
        operand = filter_operand(
            phase.filter, "KRSC", split.groups, rank=2, dtype=dtype, device=value.device
        )
        problem = ConvProblem.from_parts(
            value.shape,
            filters=operand.filters,
            filter_size=operand.filter_size,
            group_channels=operand.group_channels,
            dilation=phase.dilation,
            padding=phase.padding,
            groups=operand.groups,
        )
        outputs.append(
            _emit(
                problem,
                value,
                operand,
                added,
                function,
                out_dtype=target,
                kernel=kernel,
                precision=rounding,
                scale=factors,
            )
        )
    result = split.assemble(outputs)
    return to_channels_first(result) if first else result


def _convolve(
    rank: int,
    x: TensorValueLike,
    filter: FilterLike,
    stride: object,
    dilation: object,
    padding: Padding,
    groups: int,
    bias: object,
    input_layout: object,
    filter_layout: object,
    activation: ActivationLike,
    residual: object,
    beta: float,
    final_activation: ActivationLike,
    out_dtype: DType | None,
    config: str | None,
    precision: str,
    scale: ScaleLike,
) -> TensorValue:
    """Checks the arguments of a convolution of any rank and adds it to the current graph."""
    require_kernels(Graph.current, _OP)
    value, first = input_operand(x, input_layout, rank)
    target = _out_dtype(out_dtype, value.dtype.name)
    dtype = value.dtype.name
    operand = filter_operand(
        filter, filter_layout, groups, rank=rank, dtype=dtype, device=value.device
    )
    problem = ConvProblem.from_parts(
        value.shape,
        filters=operand.filters,
        filter_size=operand.filter_size,
        group_channels=operand.group_channels,
        stride=stride,
        dilation=dilation,
        padding=padding,
        groups=operand.groups,
    )
    beside = dtype if dtype in DTYPE_BYTES else target
    result = _emit(
        problem,
        value,
        operand,
        bias_operand(bias, problem.filters, dtype=beside, device=value.device),
        parse("activation", activation),
        out_dtype=target,
        kernel=_kernel(config, value.device, dtype),
        precision=check_precision(precision),
        scale=scale_operand(scale, problem.filters, value.device),
        residual=residual_operand(
            residual, problem.output_shape, dtype=target, device=value.device, first=first
        ),
        beta=_beta(beta, residual),
        final=parse("final_activation", final_activation),
    )
    return to_channels_first(result) if first else result


def _emit(
    problem: ConvProblem,
    x: TensorValue,
    filter: FilterOperand,
    bias: TensorValue | None,
    activation: ActivationSpec,
    *,
    out_dtype: str,
    kernel: Kernel,
    precision: Precision,
    scale: TensorValue | None = None,
    residual: TensorValue | None = None,
    beta: float = 1.0,
    final: ActivationSpec | None = None,
) -> TensorValue:
    """Adds the op to the current graph; everything is checked."""
    last = final or NONE
    geometry = problem.geometry(
        filter_layout=filter.layout,
        kernel=kernel,
        activation=activation.kind,
        final_activation=last.kind,
        has_bias=bias is not None,
        has_residual=residual is not None,
        precision=precision,
    )
    scalars = encode_scalars(
        beta=beta,
        activation_parameters=activation.parameters,
        final_parameters=last.parameters,
    )
    target = DType[out_dtype]
    bias_type = x.dtype if x.dtype.name in DTYPE_BYTES else DType.float32
    values = [
        x,
        filter.value,
        _absent(bias_type, 1, x.device) if bias is None else bias,
        _absent(target, x.rank, x.device) if residual is None else residual,
        _absent(DType.float32, 1, x.device) if scale is None else scale,
        host_constant(geometry),
        host_constant(scalars),
    ]
    exact = x.dtype == DType.float32 and precision is Precision.FLOAT32
    # These kernels read the input where it lies, so nothing can be fused before them; what runs on
    # a GPU's tensor cores is the one for Hopper or Blackwell, if it can.
    reads = kernel in (Kernel.POINTWISE, Kernel.SM90, Kernel.SM100) or (
        x.device.is_gpu() and not exact
    )
    fuse = problem.taps == 1 and not reads and is_computed(x)
    op = _OP_FUSED_INPUT if fuse else _OP
    result = TensorType(target, _result_shape(problem), x.device)
    parameters: dict[str, bool | int | str | DType] = {}
    if scale is not None:
        parameters["scaled"] = True
    if x.device.is_gpu():
        wanted = gpu_kernels(
            problem, kernel, dtype=x.dtype.name, out_dtype=out_dtype, precision=precision
        )
        parameters["kernels"] = sum(1 << k for k in wanted)
        parameters |= known_filter(problem, wanted)
    return ops.custom(op, x.device, values, [result], parameters)[0].tensor


def _result_shape(problem: ConvProblem) -> list[Dim]:
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
    empty = cast_array(np.empty((0,) * rank, np.float32), "float32", dtype.name)
    return constant(empty, dtype.name, device)


def _out_dtype(out_dtype: DType | None, dtype: str) -> str:
    if out_dtype is not None:
        return check_dtype("out_dtype", out_dtype)
    if dtype not in DTYPE_BYTES:
        raise ValueError(
            f"out_dtype: None stands for the input's {dtype}, which is no type of outputs; "
            f"{', '.join(DTYPE_BYTES)} are allowed"
        )
    return dtype


def _kernel(config: str | None, device: DeviceRef, dtype: str) -> Kernel:
    if config is None:
        return Kernel.AUTO
    known, whose = GPU_KERNELS if device.is_gpu() else CPU_KERNELS, ""
    if dtype in BLACKWELL_BYTES:
        known, whose = (Kernel.AUTO, Kernel.SM100), f" for {dtype}"
    kernels = {k.name.lower(): k for k in known}
    names = ", ".join(kernels)
    if not isinstance(config, str):
        raise TypeError(
            f"config: {config!r} is a {type(config).__name__}; None or one of {names} is allowed"
        )
    if config.lower() not in kernels:
        raise ValueError(
            f"config: {config!r} is not a kernel of device {device}{whose}; {names} are allowed"
        )
    return kernels[config.lower()]


def _beta(beta: float, residual: object) -> float:
    if isinstance(beta, bool) or not isinstance(beta, int | float):
        raise TypeError(f"beta: {beta!r} is a {type(beta).__name__}; a number is allowed")
    if residual is None and beta != 1.0:
        raise ValueError(f"beta: {beta} multiplies the residual, but there is none; 1 is allowed")
    return float(beta)
