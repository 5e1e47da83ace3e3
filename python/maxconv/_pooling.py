"""Pooling for MAX graphs, in one, two and three spatial dimensions.

The functions take what ``max.graph.ops.max_pool2d`` and ``avg_pool2d`` take, in the same order, and
more by name. Each adds one operation to the current graph, into which MAX fuses the elementwise
work that follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from max.graph import Dim, TensorType, TensorValue, TensorValueLike, ops
from max.graph.type import ConvInputLayout

from ._arguments import ConvArguments
from ._checks import Padding, check_at_least, check_size, renamed, show, spatial_tuple
from ._emit import output_shape
from ._fields import Counted, Op, encode_geometry
from ._graph import host_constant, smaller, to_channels_first
from ._operands import images_operand
from ._problem import ConvProblem, output_size

__all__ = ["PoolProblem", "avg_pool", "global_avg_pool", "max_pool", "pool"]

#: One integer for all spatial dimensions, or one for each.
Spatial: TypeAlias = int | Sequence[int]


def max_pool(
    x: TensorValueLike,
    kernel_size: Spatial,
    stride: Spatial = 1,
    dilation: Spatial = 1,
    padding: Padding = 0,
    ceil_mode: bool = False,
    *,
    input_layout: ConvInputLayout | str = ConvInputLayout.NHWC,
) -> TensorValue:
    """Takes the largest element of each window.

    The padding is never the largest; a window with a NaN gives NaN. A window without any element,
    which only dilation makes, gives the smallest value of the type.

    Args:
        x: The input, ``[N, *spatial, C]`` with one to three spatial dimensions, of a type that
            ``conv2d`` takes there.
        kernel_size: The window: one integer, or one a spatial dimension.
        stride: From one window to the next. The default is MAX's; PyTorch's is the window's size.
        dilation: From one element of a window to the next.
        padding: Of each spatial dimension: one integer for all, one for both sides of each,
            ``(before, after)`` of each in a row, ``"same"`` or ``"valid"``. Less than the window
            with its dilation spans.
        ceil_mode: Whether the output's size is rounded up: a last window may reach behind the
            padding, but none begins there, as in PyTorch.
        input_layout: ``NHWC``, or ``NCHW`` for ``x`` and the result, which costs a permutation of
            each.

    Returns:
        ``[N, *output, C]``, of the type of ``x``: along a spatial dimension
        ``floor((size + padding - span) / stride) + 1``. A size is symbolic where the one that it
        comes from is.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An argument has a value that is not allowed, or the graph was not given
            maxconv's kernels. What only the sizes of a call can tell is raised by that call.
    """
    value, first = images_operand(x, input_layout, "a pooling")
    problem = PoolProblem.read(value, kernel_size, stride, dilation, padding, ceil_mode)
    return _laid_out(pool(value, problem), first)


def avg_pool(
    x: TensorValueLike,
    kernel_size: Spatial,
    stride: Spatial = 1,
    dilation: Spatial = 1,
    padding: Padding = 0,
    ceil_mode: bool = False,
    count_boundary: bool = True,
    *,
    input_layout: ConvInputLayout | str = ConvInputLayout.NHWC,
) -> TensorValue:
    """Takes the mean of each window, in float32 and rounded once.

    The other arguments, the result and the errors are those of ``max_pool``.

    Args:
        x: The input.
        kernel_size: The window.
        stride: From one window to the next.
        dilation: From one element of a window to the next.
        padding: Zeros around the input.
        ceil_mode: Whether the output's size is rounded up. What a window reaches behind the padding
            is never counted.
        count_boundary: Whether the mean counts the padding's zeros (PyTorch's
            ``count_include_pad``). Without it, a window of padding alone gives NaN.
        input_layout: The order of the dimensions of input and result.
    """
    value, first = images_operand(x, input_layout, "a pooling")
    problem = PoolProblem.read(value, kernel_size, stride, dilation, padding, ceil_mode)
    return _laid_out(pool(value, problem, average=True, count_boundary=count_boundary), first)


def global_avg_pool(
    x: TensorValueLike, *, input_layout: ConvInputLayout | str = ConvInputLayout.NHWC
) -> TensorValue:
    """Takes the mean over all pixels, in float32 and rounded once.

    Args:
        x: The input, ``[N, *spatial, C]``, as ``max_pool`` has it.
        input_layout: ``NHWC``, or ``NCHW`` for ``x`` and the result.

    Returns:
        ``[N, 1, ..., 1, C]``, or ``[N, C, 1, ..., 1]`` where the channels of ``x`` are first.

    Raises:
        TypeError: An argument is of a wrong Python type.
        ValueError: An argument has a value that is not allowed, or the graph was not given
            maxconv's kernels.
    """
    value, first = images_operand(x, input_layout, "a pooling")
    return _laid_out(_whole_mean(value), first)


@dataclass(frozen=True)
class PoolProblem:
    """The geometry of one pooling, checked."""

    window: ConvProblem
    """The convolution whose filter is the window."""
    ceil_mode: bool
    """Whether the output's size is rounded up."""
    as_max: bool
    """Whether rounding up is MAX's: a window may begin behind the input, and a mean counts what
    windows reach behind the padding."""

    @classmethod
    def read(
        cls,
        x: TensorValue,
        kernel_size: object,
        stride: object,
        dilation: object,
        padding: Padding,
        ceil_mode: object,
        *,
        as_max: bool = False,
    ) -> PoolProblem:
        """Reads the arguments of a graph function.

        Args:
            x: The input, channels last.
            kernel_size: The argument, like all that follow.
            stride: The argument.
            dilation: The argument.
            padding: The argument.
            ceil_mode: The argument.
            as_max: Whether rounding up is MAX's.

        Raises:
            TypeError: An argument is of a wrong Python type.
            ValueError: An argument has a value that is not allowed.
        """
        rank = x.rank - 2
        size = spatial_tuple("kernel_size", kernel_size, rank)
        check_at_least("kernel_size", size, 1)
        arguments = ConvArguments.read(
            rank, stride=stride, dilation=dilation, padding=_both_sides(padding, rank)
        )
        channels = x.shape[-1]
        with renamed(filter="kernel_size"):
            window = ConvProblem.of(
                arguments, x.shape, filters=channels, filter_size=size, group_channels=channels
            )
        for pads in (window.pad_before, window.pad_after):
            if any(pad >= span for pad, span in zip(pads, window.span, strict=True)):
                raise ValueError(
                    f"padding: {show(pads)} is not smaller than what the window spans, "
                    f"{show(window.span)}; smaller ones are allowed"
                )
        if not isinstance(ceil_mode, bool):
            raise TypeError(
                f"ceil_mode: {ceil_mode!r} is a {type(ceil_mode).__name__}; a bool is allowed"
            )
        return cls(window, ceil_mode, as_max)

    @property
    def output_size(self) -> list[Dim]:
        """The output's spatial dimensions."""
        return [self._output_size(i) for i in range(self.window.spatial_rank)]

    def _output_size(self, i: int) -> Dim:
        window = self.window
        before, after = window.pad_before[i], window.pad_after[i]
        size, stride = window.input_size[i], window.stride[i]
        more = stride - 1 if self.ceil_mode else 0
        found = output_size(
            size,
            taps=window.filter_size[i],
            stride=stride,
            dilation=window.dilation[i],
            pad_before=before,
            pad_after=after + more,
        )
        if not self.ceil_mode or self.as_max or after + stride <= window.span[i]:
            return Dim(found)
        return smaller(found, (size + before - 1) // stride + 1)

    @property
    def is_whole(self) -> bool:
        """Whether the window is known to be the image, and nothing else."""
        window = self.window
        return (
            window.input_size == window.filter_size
            and not any((*window.pad_before, *window.pad_after))
            and all(step == 1 for step in window.dilation)
        )


def pool(
    x: TensorValue, problem: PoolProblem, *, average: bool = False, count_boundary: object = True
) -> TensorValue:
    """Adds a pooling to the current graph.

    Args:
        x: ``[N, *spatial, C]``.
        problem: The geometry.
        average: Whether means are wanted, not the largest elements.
        count_boundary: Whether a mean counts the padding.

    Returns:
        ``[N, *output, C]``.

    Raises:
        TypeError: ``count_boundary`` is no ``bool``.
    """
    if not isinstance(count_boundary, bool):
        raise TypeError(
            f"count_boundary: {count_boundary!r} is a {type(count_boundary).__name__}; a bool is "
            "allowed"
        )
    if average and problem.is_whole:
        return _whole_mean(x)
    counted = Counted.INPUT
    if count_boundary:
        counted = Counted.WINDOW if problem.as_max else Counted.PADDING
    window = problem.window
    known = {"stride": window.stride[-1]}
    if window.dilation[-1] == 1:
        known["taps"] = window.filter_size[-1]
    shape = [x.shape[0], *problem.output_size, x.shape[-1]]
    return _emit(
        x,
        output_shape(window, shape),
        window=window.filter_size,
        stride=window.stride,
        dilation=window.dilation,
        pads=(window.pad_before, window.pad_after),
        flags=(problem.ceil_mode, counted),
        parameters={"average": average, **known},
    )


def _whole_mean(x: TensorValue) -> TensorValue:
    """Adds the mean over all pixels; the op knows the window from the input's shape."""
    rank = x.rank - 2
    return _emit(
        x,
        [x.shape[0], *(Dim(1) for _ in range(rank)), x.shape[-1]],
        window=(1,) * rank,
        stride=(1,) * rank,
        dilation=(1,) * rank,
        pads=((0,) * rank, (0,) * rank),
        flags=(False, Counted.INPUT),
        parameters={"average": True, "whole": True},
    )


def _emit(
    x: TensorValue,
    shape: Sequence[Dim],
    *,
    window: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    pads: tuple[tuple[int, ...], tuple[int, ...]],
    flags: tuple[int, Counted],
    parameters: dict[str, bool | int],
) -> TensorValue:
    """Adds the op to the current graph; checks nothing.

    Args:
        x: ``[N, *spatial, C]``.
        shape: The output's.
        window: Its elements a spatial dimension.
        stride: One a spatial dimension.
        dilation: One a spatial dimension.
        pads: Before and after each spatial dimension.
        flags: The values of ``POOLING``.
        parameters: Of the op; on a GPU it is compiled for them alone.
    """
    geometry = encode_geometry(
        stride=stride,
        dilation=dilation,
        pad_before=pads[0],
        pad_after=pads[1],
        filter_size=window,
    )
    name = Op.POOL_GPU if x.device.is_gpu() else Op.POOL_CPU
    if not x.device.is_gpu():
        parameters = {key: parameters[key] for key in ("average", "whole") if key in parameters}
    elif isinstance(channels := check_size("input", x.shape[-1]), int):
        parameters = {**parameters, "channels": channels}
    values = [x, host_constant(geometry), host_constant(np.array(flags, np.int64))]
    output = TensorType(x.dtype, shape, x.device)
    return ops.custom(name.value, x.device, values, [output], parameters)[0].tensor


def _both_sides(padding: Padding, rank: int) -> Padding:
    """Returns a padding of one number a spatial dimension as one of each side."""
    if isinstance(padding, Sequence) and not isinstance(padding, str) and len(padding) == rank:
        return tuple(side for both in padding for side in (both, both))
    return padding


def _laid_out(result: TensorValue, first: bool) -> TensorValue:
    return to_channels_first(result) if first else result
