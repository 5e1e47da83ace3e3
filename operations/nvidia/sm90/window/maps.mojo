"""Descriptors of the operands of the Hopper window kernel."""

from max.gpu.host import DeviceContext
from max.gpu.host.nvidia.tma import TensorMapSwizzle
from std.sys.info import size_of
from std.utils import IndexList

from ....conv.memory import Reads
from ....conv.problem import ConvProblem
from ...im2col.descriptors import operand_type
from ...tma.descriptor import TensorMap, TensorView, encode_tiled
from .geometry import HALF_FILTERS, WindowGeometry
from .tiling import FEWEST_FILTERS, Image, neighbours, width_of


def _swizzle(row_bytes: Int) -> TensorMapSwizzle:
    """The swizzle whose span is a row."""
    if row_bytes == 32:
        return TensorMapSwizzle.SWIZZLE_32B
    if row_bytes == 64:
        return TensorMapSwizzle.SWIZZLE_64B
    return TensorMapSwizzle.SWIZZLE_128B


def activation_box(geometry: WindowGeometry) -> IndexList[5]:
    """The input pixels that a load covers, and the channels of a slice,
    innermost first.

    Args:
        geometry: The problem.
    """
    var row = geometry.box_columns // geometry.stride[2]
    var bytes = Int(geometry.pixel_chunks) * 16 * Int(row)
    return IndexList[5](
        Int(geometry.slice_channels),
        Int(geometry.box_columns),
        Int(geometry.box_bytes) // bytes,
        1,
        1,
    )


def activation_map[
    dtype: DType
](
    ctx: DeviceContext,
    problem: ConvProblem,
    geometry: WindowGeometry,
    data: Reads[dtype],
    row_bytes: Int,
) raises -> TensorMap:
    """An activation as `[N, D, H, W, C]`, of which a box is a phase of a window,
    or a part of its row.

    Parameters:
        dtype: Of the activation.

    Args:
        ctx: The device.
        problem: The convolution.
        geometry: The same, cut.
        data: The activation.
        row_bytes: Of a pixel's slice of channels.

    Returns:
        The descriptor.

    Raises:
        What the driver refused.
    """
    var image = Image(problem)
    var every = IndexList[5](fill=1)
    every[1] = Int(geometry.stride[2])
    return encode_tiled[dtype, 5](
        ctx,
        data,
        TensorView[5](
            IndexList[5](
                problem.channels,
                image.width,
                image.height,
                image.depth,
                image.count,
            )
        ),
        activation_box(geometry),
        _swizzle(row_bytes),
        operand_type[dtype](),
        every=every,
    )


def filter_view(problem: ConvProblem) -> TensorView[5]:
    """A filter `[K, T*R*S, C]` as its descriptor sees it.

    In shared memory the filters are rows. Where a thread stores neighbours,
    column `8*j + 2*t + e` of the multiply is filter `v*t + 2*j + e` of v
    neighbours, so that thread t of a pixel's four has them: the dimensions are
    e, t and j. Otherwise the filters are one dimension.

    Args:
        problem: The convolution.
    """
    var channels = problem.channels
    var taps = problem.taps()
    var filter = taps * channels
    var vector = neighbours(FEWEST_FILTERS << width_of(problem.filters))
    if problem.filters % vector == 0:
        return TensorView[5](
            IndexList[5](
                channels, 2, problem.filters // vector, vector // 2, taps
            ),
            IndexList[5](1, filter, vector * filter, 2 * filter, channels),
        )
    return TensorView[5](
        IndexList[5](channels, problem.filters, 1, 1, taps),
        IndexList[5](1, filter, filter, filter, channels),
    )


def filter_box(problem: ConvProblem, geometry: WindowGeometry) -> IndexList[5]:
    """What a load of the filter covers of `filter_view`.

    Args:
        problem: The convolution.
        geometry: The same, cut.
    """
    var width = FEWEST_FILTERS << width_of(problem.filters)
    var taps = Int(geometry.box_taps)
    var channels = Int(geometry.slice_channels)
    if geometry.together == 1:
        return IndexList[5](channels, 2, 4, neighbours(width) // 2, taps)
    return IndexList[5](channels, min(width, HALF_FILTERS), 1, 1, taps)


def filter_map[
    dtype: DType
](
    ctx: DeviceContext,
    problem: ConvProblem,
    geometry: WindowGeometry,
    data: Reads[dtype],
    row_bytes: Int,
) raises -> TensorMap:
    """A filter, of which a box is some taps of as many filters as a load takes.

    Parameters:
        dtype: Of the filter.

    Args:
        ctx: The device.
        problem: The convolution.
        geometry: The same, cut.
        data: The filter.
        row_bytes: Of a pixel's slice of channels.

    Returns:
        The descriptor.

    Raises:
        What the driver refused.
    """
    return encode_tiled[dtype, 5](
        ctx,
        data,
        filter_view(problem),
        filter_box(problem, geometry),
        _swizzle(row_bytes),
        operand_type[dtype](),
    )
