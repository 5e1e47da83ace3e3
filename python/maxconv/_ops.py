"""Convolutions for MAX graphs.

``conv1d``, ``conv2d`` and ``conv3d`` take what ``max.graph.ops.conv2d`` takes, in the same order,
and more by name. Each adds one operation to the current graph, into which MAX fuses the
elementwise work that follows::

    with Graph("net", input_types=[...], kernel_library=maxconv.kernel_library()) as graph:
        x = graph.inputs[0].tensor
        y = ops.silu(maxconv.conv2d(x, w, padding=(1, 1, 1, 1), bias=b)) + x   # one kernel
        graph.output(y)

Activations have the channels last: ``[N, W, C]``, ``[N, H, W, C]`` or ``[N, D, H, W, C]``, of
float32, bfloat16, float16, int8 or uint8, on GPUs float8_e4m3fn too, on GPUs of compute capability
9.0, 10.0 and 10.3 also float8_e5m2; sums are float32 (of integers, int32) and are rounded once. A
GPU with tensor cores rounds float32 operands to tf32 unless ``precision`` says otherwise. Every
size of an activation may be symbolic.

A bad argument raises ``ValueError``, or ``TypeError`` for a wrong Python type, before anything is
compiled; the message names the argument, the value and what is allowed.
"""

from __future__ import annotations

import math
from typing import TypeAlias

from max.driver import DLPackArray
from max.dtype import DType
from max.graph import Graph, TensorValue, TensorValueLike
from max.graph.type import ConvInputLayout, FilterLayout

from ._arguments import ConvArguments
from ._checks import Padding, spatial_tuple
from ._dtypes import DTYPE_BYTES
from ._emit import Tensors, convolution
from ._filter_operand import filter_operand
from ._graph import repeat, require_kernels, to_channels_first
from ._interleave import convolve_interleaved, is_interleaved
from ._operands import (
    bias_operand,
    in_whole_pieces,
    input_operand,
    read_call,
    scale_operand,
)
from ._packing import PackedFilter
from ._transpose import split_phases
from .activations import ActivationLike

__all__ = ["conv1d", "conv2d", "conv2d_transpose", "conv3d", "convolve", "convolve_transpose"]

#: A filter: a graph value, an array (numpy or anything with ``__dlpack__``), or a packed filter.
FilterLike: TypeAlias = TensorValueLike | DLPackArray | PackedFilter

#: A bias or a residual: a graph value or an array.
TensorLike: TypeAlias = TensorValueLike | DLPackArray | None

#: What sums are multiplied with: a number, or one float32 for each filter.
ScaleLike: TypeAlias = float | TensorLike


def conv1d(
    x: TensorValueLike,
    filter: FilterLike,
    stride: int | tuple[int] = (1,),
    dilation: int | tuple[int] = (1,),
    padding: Padding = (0, 0),
    groups: int = 1,
    bias: TensorLike = None,
    input_layout: ConvInputLayout | str = ConvInputLayout.NHWC,
    filter_layout: FilterLayout | str = "SCF",
    *,
    activation: ActivationLike = None,
    residual: TensorLike = None,
    beta: float = 1.0,
    final_activation: ActivationLike = None,
    out_dtype: DType | None = None,
    config: str | None = None,
    precision: str = "tf32",
    scale: ScaleLike = None,
    upsample: int | tuple[int] = 1,
    zero_point: int = 0,
    residual_zero_point: int = 0,
    out_scale: float | None = None,
    out_zero_point: int = 0,
) -> TensorValue:
    """Convolves a signal.

    The other arguments are those of ``conv2d``, without its second spatial dimension.

    Args:
        x: The signal, ``[N, W, C]``.
        filter: The filter in ``filter_layout``, with ``C / groups`` channels.
        stride: Output sample ``q`` reads from input sample ``q * stride - before`` on.
        dilation: Input samples from one tap to the next.
        padding: ``(before, after)``, one integer for both, ``"same"`` or ``"valid"``.
        input_layout: ``NHWC`` (or ``"NWC"``), or ``NCHW`` (or ``"NCW"``) for channels first.
        filter_layout: ``"SCF"``, ``"FCS"`` (PyTorch's) or ``"KSC"``.

    Returns:
        ``[N, Q, K]``, or ``[N, K, Q]`` where the channels of ``x`` are first.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An argument has a value that is not allowed, or the graph was not given
            maxconv's kernels.
    """
    arguments = ConvArguments.read(
        1,
        stride=stride,
        dilation=dilation,
        padding=padding,
        groups=groups,
        activation=activation,
        final_activation=final_activation,
        beta=_beta(beta, residual),
        precision=precision,
        out_dtype=out_dtype,
        config=config,
        upsample=upsample,
        zero_point=zero_point,
        residual_zero_point=residual_zero_point,
        out_scale=out_scale,
        out_zero_point=out_zero_point,
    )
    return convolve(x, filter, arguments, bias, residual, scale, input_layout, filter_layout)


def conv2d(
    x: TensorValueLike,
    filter: FilterLike,
    stride: int | tuple[int, int] = (1, 1),
    dilation: int | tuple[int, int] = (1, 1),
    padding: Padding = (0, 0, 0, 0),
    groups: int = 1,
    bias: TensorLike = None,
    input_layout: ConvInputLayout | str = ConvInputLayout.NHWC,
    filter_layout: FilterLayout | str = FilterLayout.RSCF,
    *,
    activation: ActivationLike = None,
    residual: TensorLike = None,
    beta: float = 1.0,
    final_activation: ActivationLike = None,
    out_dtype: DType | None = None,
    config: str | None = None,
    precision: str = "tf32",
    scale: ScaleLike = None,
    upsample: int | tuple[int, int] = 1,
    zero_point: int = 0,
    residual_zero_point: int = 0,
    out_scale: float | None = None,
    out_zero_point: int = 0,
    output_layout: ConvInputLayout | str | None = None,
) -> TensorValue:
    """Convolves an image.

    Computes, in float32 and with one rounding at the end::

        final_activation(activation(scale * conv(x, filter) + bias) + beta * residual)

    Integers of 8 bits stand for real numbers: ``x - zero_point`` is convolved, of which sums are
    exact in int32, and what is added is ``beta * (residual - residual_zero_point)``. An output
    ``y`` of integers is ``clamp(round(y * (1 / out_scale)) + out_zero_point)``, with halves to even
    and ``1 / out_scale`` a float32.

    Args:
        x: The image, ``[N, H, W, C]``: float32, bfloat16, float16, int8 or uint8; on a GPU
            also float8_e4m3fn (MAX has no such tensors on CPUs), on one of compute capability 9.0,
            10.0 or 10.3 float8_e5m2.
        filter: The filter in ``filter_layout``, with ``C / groups`` channels. An array or a
            constant is packed when the graph is built, a weight when the model is loaded, any other
            value in each call; a ``PackedFilter`` is packed already, knows its ``groups`` and
            disregards ``filter_layout``. An array is converted to the type of ``x`` (for int8 and
            uint8 it is rounded to int8); a graph value must have it, beside uint8 int8.
        stride: One integer, or ``(h, w)``.
        dilation: Input elements from one tap to the next: one integer, or ``(h, w)``.
        padding: Zeros around the image: ``(h_before, h_after, w_before, w_after)``, one integer for
            all sides, ``"valid"`` for none, or ``"same"`` for an output of the input's size (stride
            1 only; an odd zero goes after, as in PyTorch).
        groups: Both channels and filters are divided into so many independent groups.
        bias: ``[K]``, of the type of ``x`` (of the result where ``x`` has 8 bits) or float32.
        input_layout: ``NHWC``, or ``NCHW`` for ``x``, ``residual`` and the result, which costs a
            permutation of each. Or interleaved, as ``interleave`` makes it: ``"NC/xHWx"`` is ``[N,
            C / x, H, W, x]``, ``"C/xHWNx"`` is ``[C / x, H, W, N, x]``, with 4, 16 or 32 for x. A
            CPU takes int8, uint8, bfloat16 and float16 in all of them, a GPU int8 in
            ``"NC/4HW4"``. There is one group then, ``upsample`` is 1, and filters fill the blocks
            of the result. A filter of known elements whose channels do not fill the last block of
            ``x`` is filled with zeros.
        filter_layout: ``RSCF`` (MAX's default), ``FCRS`` (PyTorch's) or ``"KRSC"`` (the kernels'),
            or ``"C/xRSKx"``, which is ``[C / x, R, S, K, x]``, with 4, 16 or 32 for x.
        activation: ``"relu"``, ``"relu6"``, ``"leaky_relu"``, ``"sigmoid"``, ``"silu"``,
            ``"hard_swish"``, ``"hard_sigmoid"``, ``"gelu"``, ``"gelu_tanh"``, ``"tanh"``, or
            ``clamp(min, max)`` or ``leaky_relu(slope)`` of ``maxconv.activations``.
        residual: Added to the result, of its shape and type.
        beta: What the residual is multiplied with.
        final_activation: As ``activation``, but applied last.
        out_dtype: Type of the result: float32, bfloat16 or float16; on a CPU also int8 and uint8.
            By default that of ``x``; where ``x`` has 8 bits it must be given.
        config: The kernel that must run: ``"reference"``, ``"implicit_gemm"``, ``"depthwise"``,
            ``"grouped"``, ``"few_filters"``; on a CPU also ``"pointwise"``, ``"winograd"``,
            ``"amx"``, ``"avx512_bf16"``, ``"avx512_vnni"``, ``"avx_vnni"``, ``"mmla"`` and
            ``"widening"``; on a GPU also ``"gemv"`` and ``"sm80"``, on one of compute capability
            9.0 ``"sm90"``, ``"unaligned"``, ``"diagonal"``, ``"stem"`` and ``"window"``, on one of
            10.0 or 10.3 ``"sm100"``; in ``"NC/4HW4"`` ``"dp4a"``. Interleaved on a CPU it is
            ``"reference"``, ``"widening"`` or one from ``"amx"`` to ``"mmla"``. It raises in the
            call where it cannot; ``"auto"`` or ``None`` leaves the choice to the op.
        precision: What is left of float32 operands when they are multiplied: ``"tf32"`` lets a GPU
            round them to tf32 (10 bits of mantissa, float32's exponent), which its tensor cores
            take; the norm of the result's error is then about 3e-4 of the result's. With
            ``"float32"`` nothing is rounded, and a GPU's CUDA cores multiply, many times more
            slowly. A CPU rounds nothing either way; other types are not rounded.
        scale: What the sums are multiplied with, in float32: a number, or one float32 for each
            filter, ``[K]``. With types of 8 bits it is the product of the scales by which
            activation and filter were divided.
        upsample: How often each pixel is repeated along h and w before the image is convolved
            (nearest-neighbour interpolation): one integer, or ``(h, w)``. Padding and dilation are
            of the enlarged image, which is never in memory: a convolution of ``x`` itself computes
            a block of pixels at a time, with filters whose taps were summed (in float32 or
            float64, then rounded to the type of ``x``). Of a 3x3 filter and a factor of 2 it has
            2.25 times fewer products. The stride must be 1, types of 8 bits are not allowed, and a
            residual is not: add it to the result.
        zero_point: The integer that stands for 0 in ``x``, and in its padding; 0 for floats, and on
            a GPU.
        residual_zero_point: The same in ``residual``.
        out_scale: What a step of a result of integers stands for; for floats ``None``.
        out_zero_point: The integer that stands for 0 in the result.
        output_layout: That of ``residual`` and the result where it is not ``input_layout``; one of
            the two is interleaved then. On a GPU both are ``"NC/4HW4"``.

    Returns:
        ``[N, P, Q, K]``, or in ``output_layout`` or ``input_layout``: ``[N, K, P, Q]``, ``[N, K /
        x, P, Q, x]`` or ``[K / x, P, Q, N, x]``. A size is symbolic where the one that it comes
        from is.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An argument has a value that is not allowed, or the graph was not given
            maxconv's kernels. What only the sizes of a call can tell is raised by that call.
    """
    arguments = ConvArguments.read(
        2,
        stride=stride,
        dilation=dilation,
        padding=padding,
        groups=groups,
        activation=activation,
        final_activation=final_activation,
        beta=_beta(beta, residual),
        precision=precision,
        out_dtype=out_dtype,
        config=config,
        upsample=upsample,
        zero_point=zero_point,
        residual_zero_point=residual_zero_point,
        out_scale=out_scale,
        out_zero_point=out_zero_point,
    )
    return convolve(
        x, filter, arguments, bias, residual, scale, input_layout, filter_layout, output_layout
    )


def conv3d(
    x: TensorValueLike,
    filter: FilterLike,
    stride: int | tuple[int, int, int] = (1, 1, 1),
    dilation: int | tuple[int, int, int] = (1, 1, 1),
    padding: Padding = (0, 0, 0, 0, 0, 0),
    groups: int = 1,
    bias: TensorLike = None,
    input_layout: ConvInputLayout | str = ConvInputLayout.NHWC,
    filter_layout: FilterLayout | str = FilterLayout.QRSCF,
    *,
    activation: ActivationLike = None,
    residual: TensorLike = None,
    beta: float = 1.0,
    final_activation: ActivationLike = None,
    out_dtype: DType | None = None,
    config: str | None = None,
    precision: str = "tf32",
    scale: ScaleLike = None,
    upsample: int | tuple[int, int, int] = 1,
    zero_point: int = 0,
    residual_zero_point: int = 0,
    out_scale: float | None = None,
    out_zero_point: int = 0,
) -> TensorValue:
    """Convolves a volume or a video.

    The other arguments are those of ``conv2d``, with a spatial dimension in front.

    Args:
        x: The volume, ``[N, D, H, W, C]``.
        filter: The filter in ``filter_layout``, with ``C / groups`` channels.
        stride: One integer, or ``(d, h, w)``.
        dilation: One integer, or ``(d, h, w)``.
        padding: ``(d_before, d_after, h_before, h_after, w_before, w_after)``, one integer for all
            sides, ``"same"`` or ``"valid"``.
        input_layout: ``NHWC`` (or ``"NDHWC"``), or ``NCHW`` (or ``"NCDHW"``) for channels first.
        filter_layout: ``QRSCF`` (MAX's default), ``FCQRS`` (PyTorch's) or ``"KTRSC"``.

    Returns:
        ``[N, Z, P, Q, K]``, or ``[N, K, Z, P, Q]`` where the channels of ``x`` are first.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An argument has a value that is not allowed, or the graph was not given
            maxconv's kernels.
    """
    arguments = ConvArguments.read(
        3,
        stride=stride,
        dilation=dilation,
        padding=padding,
        groups=groups,
        activation=activation,
        final_activation=final_activation,
        beta=_beta(beta, residual),
        precision=precision,
        out_dtype=out_dtype,
        config=config,
        upsample=upsample,
        zero_point=zero_point,
        residual_zero_point=residual_zero_point,
        out_scale=out_scale,
        out_zero_point=out_zero_point,
    )
    return convolve(x, filter, arguments, bias, residual, scale, input_layout, filter_layout)


def conv2d_transpose(
    x: TensorValueLike,
    filter: TensorValueLike | DLPackArray,
    stride: int | tuple[int, int] = (1, 1),
    dilation: int | tuple[int, int] = (1, 1),
    padding: Padding = (0, 0, 0, 0),
    output_paddings: int | tuple[int, int] = (0, 0),
    bias: TensorLike = None,
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
        activation: What ``conv2d`` takes, like the rest.
        out_dtype: Type of the result; by default that of ``x``.
        config: The kernel that must run each of the convolutions.
        precision: What is left of float32 operands when they are multiplied.
        scale: What the sums are multiplied with.

    Returns:
        ``[N, P, Q, K]``, or ``[N, K, P, Q]`` where the channels of ``x`` are first, with
        ``P = (H - 1) * stride - pad_before - pad_after + dilation * (R - 1) + output_padding + 1``.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An argument has a value that is not allowed, or the graph was not given
            maxconv's kernels.
    """
    if isinstance(padding, str):
        raise ValueError(
            f"padding: {padding!r} is not defined for a transposed convolution; an integer or 4 "
            "integers are allowed"
        )
    arguments = ConvArguments.read(
        2,
        stride=stride,
        dilation=dilation,
        padding=padding,
        groups=groups,
        activation=activation,
        precision=precision,
        out_dtype=out_dtype,
        config=config,
    )
    extra = spatial_tuple("output_paddings", output_paddings, 2)
    return convolve_transpose(x, filter, arguments, extra, bias, scale, input_layout, filter_layout)


def _beta(beta: float, residual: object) -> float:
    if residual is None and beta != 1.0 and isinstance(beta, int | float):
        raise ValueError(f"beta: {beta} multiplies the residual, but there is none; 1 is allowed")
    return beta


def convolve(
    x: TensorValueLike,
    filter: FilterLike,
    arguments: ConvArguments,
    bias: TensorLike,
    residual: TensorLike,
    scale: ScaleLike,
    input_layout: ConvInputLayout | str,
    filter_layout: FilterLayout | str,
    output_layout: ConvInputLayout | str | None = None,
) -> TensorValue:
    """Adds a convolution of any rank to the current graph.

    Args:
        x: The input.
        filter: The filter.
        arguments: What is no tensor; ``beta`` counts only beside a residual.
        bias: The bias.
        residual: The residual.
        scale: The scale.
        input_layout: The order of the dimensions of the input.
        filter_layout: The order of the filter's dimensions.
        output_layout: That of residual and result; ``None`` is the input's.

    Returns:
        The result, in its layout.

    Raises:
        TypeError: A tensor or a layout is of a wrong Python type.
        ValueError: A tensor or a layout is not allowed, the sizes are those of no convolution, or
            the graph was not given maxconv's kernels.
    """
    require_kernels(Graph.current)
    if is_interleaved(input_layout, output_layout, arguments.rank):
        return convolve_interleaved(
            x, filter, arguments, bias, residual, scale, input_layout, filter_layout, output_layout
        )
    if output_layout is not None and output_layout != input_layout:
        raise ValueError(
            f"output_layout: {output_layout!r} beside input_layout={input_layout!r} is not "
            "supported; the same is allowed, or an interleaved one of images for either"
        )
    call = read_call(x, filter, arguments, bias, residual, scale, input_layout, filter_layout)
    whole = in_whole_pieces(call)
    result = convolution(
        whole.problem, arguments, whole.tensors, kernel=call.kernel, out_dtype=call.out_dtype
    )
    if whole is not call:
        result = result[..., : call.problem.filters]
    return to_channels_first(result) if call.channels_first else result


def convolve_transpose(
    x: TensorValueLike,
    filter: TensorValueLike | DLPackArray,
    arguments: ConvArguments,
    output_paddings: tuple[int, ...],
    bias: TensorLike,
    scale: ScaleLike,
    input_layout: ConvInputLayout | str,
    filter_layout: FilterLayout | str,
) -> TensorValue:
    """Adds the convolutions that make up a transposed one to the current graph.

    Args:
        x: The input.
        filter: The filter of the convolution of which this is the transpose.
        arguments: What is no tensor; the padding has a size, and there is no residual.
        output_paddings: Rows and columns of which the padding cuts less at the end.
        bias: The bias.
        scale: The scale.
        input_layout: The order of the dimensions of input and result.
        filter_layout: The order of the filter's dimensions.

    Returns:
        The result, laid out as the input is.

    Raises:
        TypeError: A tensor or a layout is of a wrong Python type.
        ValueError: A tensor, a layout or ``output_paddings`` is not allowed, the sizes are those of
            no transposed convolution, or the graph was not given maxconv's kernels.
    """
    require_kernels(Graph.current)
    value, first = input_operand(x, input_layout, arguments.rank, DTYPE_BYTES)
    dtype, device = value.dtype.name, value.device
    out_dtype, kernel = arguments.output_dtype(dtype), arguments.kernel(device)
    split = split_phases(
        value.shape, filter, filter_layout, arguments, output_paddings, dtype=dtype, device=device
    )
    added = bias_operand(bias, split.filters, dtype=dtype, device=device)
    factors = scale_operand(scale, split.filters, device)
    if split.merged:
        times = math.prod(split.stride)
        added = None if added is None else repeat(added, times)
        factors = None if factors is None else repeat(factors, times)
    outputs = []
    for phase in split.phases:
        part = phase.filter
        elements, layout = filter_operand(part, arguments.groups, dtype=dtype, device=device)
        problem = part.problem(value, phase.arguments, arguments.groups)
        tensors = Tensors(
            x=value,
            filter=elements,
            filter_layout=layout,
            bias=added,
            residual=None,
            scale=factors,
        )
        outputs.append(
            convolution(problem, phase.arguments, tensors, kernel=kernel, out_dtype=out_dtype)
        )
    result = split.assemble(outputs)
    return to_channels_first(result) if first else result
