"""Descriptors of a convolution's operands, for tiles whose rows are as long as
the 128-byte swizzle's span."""

from max.gpu.host import DeviceContext
from max.gpu.host.nvidia.tma import TensorMapDataType, TensorMapSwizzle
from std.sys.info import size_of
from std.utils import IndexList

from ...conv.memory import Reads
from ...conv.problem import SPATIAL, ConvProblem
from .traversal import Traversal
from ..tma.descriptor import (
    TFLOAT32,
    PixelBox,
    TensorMap,
    TensorView,
    encode_im2col,
    encode_tiled,
)


def operand_type[dtype: DType]() -> TensorMapDataType:
    """The data type of a descriptor. The multiply ignores the last bits of
    float32, so TMA rounds to tf32; 8-bit types are bytes.

    Parameters:
        dtype: Of activation and filter.
    """
    comptime if dtype == DType.float32:
        return TFLOAT32
    elif size_of[dtype]() == 1:
        return TensorMapDataType.from_dtype[DType.uint8]()
    return TensorMapDataType.from_dtype[dtype]()


def activation_map[
    dtype: DType, //
](
    ctx: DeviceContext,
    traversal: Traversal,
    data: Reads[dtype],
    pixels: Int,
    channels: Int,
    halo: Int,
) raises -> TensorMap:
    """The traversal over an activation's pixels, of the rank that it needs.

    Parameters:
        dtype: Of the activation.

    Args:
        ctx: The device.
        traversal: The problem's.
        data: `[N, *input, C]` in device memory.
        pixels: Pixels of one load.
        channels: Channels of each of them.
        halo: Pixels that a stage holds beyond its tile's.

    Returns:
        The descriptor.

    Raises:
        What the driver refused.
    """
    if traversal.rank == 3:
        return _im2col_map[dtype, 3](
            ctx, traversal, data, pixels, channels, halo
        )
    if traversal.rank == 4:
        return _im2col_map[dtype, 4](
            ctx, traversal, data, pixels, channels, halo
        )
    return _im2col_map[dtype, 5](ctx, traversal, data, pixels, channels, halo)


def _im2col_map[
    dtype: DType, rank: Int
](
    ctx: DeviceContext,
    traversal: Traversal,
    data: Reads[dtype],
    pixels: Int,
    channels: Int,
    halo: Int,
) raises -> TensorMap:
    """`activation_map` for a traversal of one rank."""
    return encode_im2col[dtype, rank](
        ctx,
        data,
        activation_view[rank](traversal),
        activation_box[rank - 2](traversal, halo),
        channels,
        pixels,
        TensorMapSwizzle.SWIZZLE_128B,
        operand_type[dtype](),
    )


def activation_view[rank: Int](traversal: Traversal) -> TensorView[rank]:
    """An activation as its descriptor sees it.

    Parameters:
        rank: The traversal's.
    """
    var extents = IndexList[rank](fill=traversal.channels)
    var steps = IndexList[rank](fill=1)
    var step = traversal.pixel_step
    for i in range(rank - 2):
        var axis = SPATIAL - 1 - i
        extents[1 + i] = traversal.input[axis]
        steps[1 + i] = step
        step *= traversal.input[axis]
    extents[rank - 1] = traversal.images * traversal.groups
    steps[rank - 1] = traversal.channels if traversal.groups > 1 else step
    return TensorView[rank](extents, steps)


def activation_box[
    spatial: Int
](traversal: Traversal, halo: Int) -> PixelBox[spatial]:
    """The traversal over an activation's pixels: one step an output pixel,
    plus, with a halo, the steps between the rows' ends.

    Parameters:
        spatial: Spatial dimensions of the traversal's descriptor.

    Args:
        traversal: The problem's.
        halo: Pixels that a stage holds beyond its tile's.
    """
    var lower = IndexList[spatial](fill=0)
    var upper = IndexList[spatial](fill=0)
    var strides = IndexList[spatial](fill=1)
    for i in range(spatial):
        var axis = SPATIAL - 1 - i
        lower[i] = -traversal.pad_before[axis]
        upper[i] = traversal.upper(axis, halo)
        strides[i] = traversal.stride[axis]
    return PixelBox[spatial](lower, upper, strides)


def filter_map[
    dtype: DType, //
](
    ctx: DeviceContext,
    problem: ConvProblem,
    data: Reads[dtype],
    filters: Int,
    channels: Int,
) raises -> TensorMap:
    """A filter as `[K, T*R*S, C/groups]`, one tap of some filters a box.

    Parameters:
        dtype: Of the filter.

    Args:
        ctx: The device.
        problem: The convolution.
        data: `[K, *filter, C / groups]` in device memory.
        filters: Of a box.
        channels: Of a box.

    Returns:
        The descriptor.

    Raises:
        What the driver refused.
    """
    return encode_tiled[dtype, 3](
        ctx,
        data,
        filter_view(problem),
        IndexList[3](channels, 1, filters),
        TensorMapSwizzle.SWIZZLE_128B,
        operand_type[dtype](),
    )


def filter_view(problem: ConvProblem) -> TensorView[3]:
    """A filter as its descriptor sees it: `[K, T*R*S, C/groups]`."""
    return TensorView[3](
        IndexList[3](problem.group_channels(), problem.taps(), problem.filters)
    )


def output_map[
    dtype: DType, //
](
    ctx: DeviceContext,
    problem: ConvProblem,
    data: Reads[dtype],
    pixels: Int,
    filters: Int,
    swizzle: TensorMapSwizzle,
    *,
    group_filters: Int,
) raises -> TensorMap:
    """An output, or a tensor of its shape, as a matrix `[N*Z*P*Q, K/groups]` of
    each group, so that a box ends with its group.

    Parameters:
        dtype: Of the output.

    Args:
        ctx: The device.
        problem: The convolution.
        data: `[N, *output, K]` in device memory.
        pixels: Of a box.
        filters: Of a box, the span of the swizzle.
        swizzle: How a box's rows are swizzled.
        group_filters: Where a box ends: the filters of a group, or of a tile.

    Returns:
        The descriptor.

    Raises:
        What the driver refused.
    """
    return encode_tiled[dtype, 3](
        ctx,
        data,
        output_view(problem, group_filters),
        IndexList[3](filters, pixels, 1),
        swizzle,
    )


def output_view(problem: ConvProblem, group_filters: Int) -> TensorView[3]:
    """An output as its descriptor sees it: `[groups, N*Z*P*Q, K/groups]`.

    Args:
        problem: The convolution.
        group_filters: Of each such group: a divisor of all filters.
    """
    var groups = problem.filters // group_filters
    return TensorView[3](
        IndexList[3](group_filters, problem.gemm_m(), groups),
        IndexList[3](1, problem.filters, group_filters),
    )
