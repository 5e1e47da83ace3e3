"""The descriptors of a forward convolution: its activation by im2col, its filter by boxes.

A tile of the implicit GEMM is ``pixels_per_column`` output pixels times ``channels_per_pixel``
input channels of one tap. An im2col load (PTX ISA 9.0, 5.5.4) traverses those pixels if in each
spatial dimension, with ``R`` taps::

    lower corner = -pad_before                      where the first output pixel's first tap reads
    upper corner = pad_after - (R - 1) * dilation   so that the last output pixel is the last read
    element stride = stride
    filter offset of tap r = r * dilation
    coordinate of output pixel q = q * stride + lower corner
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TypeVar

from ._checks import check_integer, check_integers
from ._descriptor import (
    DataType,
    Im2colDescriptor,
    L2Promotion,
    Swizzle,
    TiledDescriptor,
    packed_strides,
)
from ._validation import CORNER_RANGE, OFFSET_MAXIMUM, validate

__all__ = [
    "Fprop",
    "activation_descriptor",
    "filter_descriptor",
    "filter_offsets",
    "pixel_coordinates",
    "refusals",
]

_D = TypeVar("_D", Im2colDescriptor, TiledDescriptor)


@dataclass(frozen=True)
class Fprop:
    """A forward convolution of one to three spatial dimensions, as far as TMA sees it.

    Attributes:
        input_shape: ``N[D]HWC``.
        filter_shape: ``K[T]RSC``, ``C`` of one group.
        stride: A spatial dimension, outermost first, as all that follow; 1 by default.
        dilation: Likewise; 1 by default.
        pad_before: Zeros before each; none by default.
        pad_after: Zeros behind each; none by default.
        groups: Of channels and filters.

    Raises:
        TypeError: A field is no integer, or no sequence of integers.
        ValueError: The fields do not fit each other.
    """

    input_shape: tuple[int, ...]
    filter_shape: tuple[int, ...]
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    pad_before: tuple[int, ...] = ()
    pad_after: tuple[int, ...] = ()
    groups: int = 1

    def __post_init__(self) -> None:
        """Checks the fields, and fills in what was left out."""
        for name in ("input_shape", "filter_shape"):
            object.__setattr__(self, name, check_integers(name, getattr(self, name)))
        if not 3 <= len(self.input_shape) <= 5:
            raise ValueError(f"input_shape: {self.input_shape}; 3 to 5 sizes are allowed")
        for name, least in (("stride", 1), ("dilation", 1), ("pad_before", 0), ("pad_after", 0)):
            values = getattr(self, name)
            values = check_integers(name, values) or (least,) * self.spatial_rank
            if len(values) != self.spatial_rank or min(values) < least:
                raise ValueError(
                    f"{name}: {values}; {self.spatial_rank} numbers from {least} on are allowed"
                )
            object.__setattr__(self, name, values)
        check_integer("groups", self.groups)
        own = self.filter_shape[-1] * self.groups
        if len(self.filter_shape) != len(self.input_shape) or own != self.input_shape[-1]:
            raise ValueError(
                f"filter_shape: {self.filter_shape}; {len(self.input_shape)} sizes are allowed, of "
                f"which the last times {self.groups} groups is {self.input_shape[-1]}, the input's"
            )

    @property
    def spatial_rank(self) -> int:
        """Spatial dimensions."""
        return len(self.input_shape) - 2

    @property
    def taps(self) -> int:
        """Taps of the filter."""
        return math.prod(self.filter_shape[1:-1])

    @property
    def offsets(self) -> tuple[int, ...]:
        """From the first tap to the last, a spatial dimension."""
        return tuple(
            (r - 1) * d for r, d in zip(self.filter_shape[1:-1], self.dilation, strict=True)
        )

    @property
    def output_size(self) -> tuple[int, ...]:
        """Output pixels, a spatial dimension."""
        return tuple(
            (size + before + after - offset - 1) // stride + 1
            for size, before, after, offset, stride in zip(
                self.input_shape[1:-1],
                self.pad_before,
                self.pad_after,
                self.offsets,
                self.stride,
                strict=True,
            )
        )


def refusals(
    problem: Fprop,
    data_type: DataType,
    *,
    channels_per_pixel: int,
    pixels_per_column: int = 128,
    swizzle: Swizzle = Swizzle.B128,
) -> list[str]:
    """Returns why TMA cannot load a problem's activation and filter; empty if it can.

    Args:
        problem: The convolution.
        data_type: The elements of both.
        channels_per_pixel: Input channels of a tile.
        pixels_per_column: Output pixels of a tile.
        swizzle: The order of the chunks in shared memory.
    """
    reasons = [*_channel_reasons(problem, data_type, channels_per_pixel), *_axis_reasons(problem)]
    if reasons:
        return reasons
    activation = _activation(problem, data_type, channels_per_pixel, pixels_per_column, swizzle)
    reasons = [f"activation: {violation}" for violation in validate(activation)]
    farthest = max(activation.global_dim)
    if farthest > 1 << 31:
        reasons.append(f"input: a size of {farthest}; coordinates have 32 bits with their sign")
    filters = _filter(problem, data_type, 1, channels_per_pixel, swizzle)
    return reasons + [f"filter: {violation}" for violation in validate(filters)]


def activation_descriptor(
    problem: Fprop,
    data_type: DataType,
    *,
    channels_per_pixel: int,
    pixels_per_column: int = 128,
    swizzle: Swizzle = Swizzle.B128,
    l2_promotion: L2Promotion = L2Promotion.NONE,
    global_address: int = 0,
) -> Im2colDescriptor:
    """Returns the im2col descriptor of a problem's activation ``N[D]HWC``.

    Args:
        problem: The convolution.
        data_type: The activation's elements.
        channels_per_pixel: Input channels that one load moves.
        pixels_per_column: Output pixels for which one load moves them.
        swizzle: The order of the chunks in shared memory.
        l2_promotion: See ``L2Promotion``.
        global_address: Where the activation lies, in bytes.

    Raises:
        ValueError: TMA cannot take the problem; the message says why.
    """
    reasons = refusals(
        problem,
        data_type,
        channels_per_pixel=channels_per_pixel,
        pixels_per_column=pixels_per_column,
        swizzle=swizzle,
    )
    _raise(problem, reasons)
    return _checked(
        problem,
        _activation(
            problem,
            data_type,
            channels_per_pixel,
            pixels_per_column,
            swizzle,
            l2_promotion,
            global_address,
        ),
    )


def filter_descriptor(
    problem: Fprop,
    data_type: DataType,
    *,
    filters: int,
    channels: int,
    swizzle: Swizzle = Swizzle.B128,
    l2_promotion: L2Promotion = L2Promotion.NONE,
    global_address: int = 0,
) -> TiledDescriptor:
    """Returns the tiled descriptor of a problem's filter ``K[T]RSC``, contiguous.

    Its dimensions are ``C / groups``, ``T * R * S`` and ``K``, so that one load moves one tap of
    several filters and channels beyond the last are zero. Coordinates ``(c, tap, k)``, taps in
    the order of ``filter_offsets``.

    Args:
        problem: The convolution.
        data_type: The filter's elements.
        filters: Filters that one load moves.
        channels: Channels of each that one load moves.
        swizzle: The order of the chunks in shared memory.
        l2_promotion: See ``L2Promotion``.
        global_address: Where the filter lies, in bytes.

    Raises:
        ValueError: TMA cannot take the problem; the message says why.
    """
    reasons = refusals(problem, data_type, channels_per_pixel=channels, swizzle=swizzle)
    _raise(problem, reasons)
    return _checked(
        problem,
        _filter(problem, data_type, filters, channels, swizzle, l2_promotion, global_address),
    )


def filter_offsets(problem: Fprop) -> list[tuple[int, ...]]:
    """Returns the filter offsets of every tap in the filter's order, ``T, R, S``.

    The offsets of one tap are ``W, [H, [D]]``, as ``load`` and the instruction take them.
    """
    taps = itertools.product(*(range(size) for size in problem.filter_shape[1:-1]))
    return [
        tuple(r * d for r, d in zip(reversed(tap), reversed(problem.dilation), strict=True))
        for tap in taps
    ]


def pixel_coordinates(problem: Fprop, pixel: int, channel: int = 0) -> tuple[int, ...]:
    """Returns the coordinates ``C, W, [H, [D,]] N`` at which the load of an output pixel starts.

    Args:
        problem: The convolution.
        pixel: The output pixel: a row of the implicit GEMM, ``((n * Z + z) * P + p) * Q + q``.
        channel: The first input channel.
    """
    where = [channel]
    for size, stride, pad in zip(
        reversed(problem.output_size),
        reversed(problem.stride),
        reversed(problem.pad_before),
        strict=True,
    ):
        pixel, at = divmod(pixel, size)
        where.append(at * stride - pad)
    return (*where, pixel)


def _raise(problem: Fprop, reasons: list[str]) -> None:
    if reasons:
        raise ValueError(f"problem: {problem} cannot be loaded by TMA: {'; '.join(reasons)}")


def _checked(problem: Fprop, descriptor: _D) -> _D:
    _raise(problem, [str(violation) for violation in validate(descriptor)])
    return descriptor


def _activation(
    problem: Fprop,
    data_type: DataType,
    channels_per_pixel: int,
    pixels_per_column: int,
    swizzle: Swizzle,
    l2_promotion: L2Promotion = L2Promotion.NONE,
    global_address: int = 0,
) -> Im2colDescriptor:
    shape = tuple(reversed(problem.input_shape))
    lower, upper = _corners(problem)
    return Im2colDescriptor(
        data_type=data_type,
        global_address=global_address,
        global_dim=shape,
        global_strides=packed_strides(shape, data_type),
        pixel_box_lower_corner=lower,
        pixel_box_upper_corner=upper,
        channels_per_pixel=channels_per_pixel,
        pixels_per_column=pixels_per_column,
        element_strides=(1, *reversed(problem.stride), 1),
        swizzle=swizzle,
        l2_promotion=l2_promotion,
    )


def _filter(
    problem: Fprop,
    data_type: DataType,
    filters: int,
    channels: int,
    swizzle: Swizzle,
    l2_promotion: L2Promotion = L2Promotion.NONE,
    global_address: int = 0,
) -> TiledDescriptor:
    shape = (problem.filter_shape[-1], problem.taps, problem.filter_shape[0])
    return TiledDescriptor(
        data_type=data_type,
        global_address=global_address,
        global_dim=shape,
        global_strides=packed_strides(shape, data_type),
        box_dim=(channels, 1, filters),
        element_strides=(1, 1, 1),
        swizzle=swizzle,
        l2_promotion=l2_promotion,
    )


def _corners(problem: Fprop) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lower and upper corner, ``W, [H, [D]]``."""
    lower = tuple(-pad for pad in reversed(problem.pad_before))
    upper = tuple(
        pad - offset
        for pad, offset in zip(reversed(problem.pad_after), reversed(problem.offsets), strict=True)
    )
    return lower, upper


def _channel_reasons(problem: Fprop, data_type: DataType, channels_per_pixel: int) -> list[str]:
    channels = problem.filter_shape[-1]
    if channels * data_type.bits % 128:
        each = f" in each of {problem.groups} groups" if problem.groups > 1 else ""
        return [
            f"input: {channels} channels{each} of {data_type.bits} bits are "
            f"{channels * data_type.bits / 8:g} bytes; multiples of 16 bytes are allowed"
        ]
    if problem.groups > 1 and channels % channels_per_pixel:
        return [
            f"groups: {channels} channels a group are no multiple of the {channels_per_pixel} "
            "that one load moves: it would read the next group's"
        ]
    return []


def _axis_reasons(problem: Fprop) -> list[str]:
    rank = problem.spatial_rank + 2
    low, high = CORNER_RANGE[rank]
    reasons = []
    for axis, stride, lower, upper, offset in zip(
        "whd",
        reversed(problem.stride),
        *_corners(problem),
        reversed(problem.offsets),
        strict=False,
    ):
        if stride > 8:
            reasons.append(f"stride: {stride} along {axis}; at most 8 is allowed")
        for side, corner in (("lower", lower), ("upper", upper)):
            if not low <= corner <= high:
                reasons.append(
                    f"padding: the {side} corner along {axis} would be {corner}; {low} to {high} "
                    f"are allowed in {problem.spatial_rank} spatial dimensions"
                )
        if offset > OFFSET_MAXIMUM[rank]:
            reasons.append(
                f"dilation: the last tap's offset along {axis} would be {offset}; at most "
                f"{OFFSET_MAXIMUM[rank]} is allowed in {problem.spatial_rank} spatial dimensions"
            )
    return reasons
