"""The naive direct convolution: the oracle that the kernels are held against.
"""

from extensibility import ManagedTensorSlice
from std.utils import IndexList

from ..conv.memory import Reads
from .epilogue import store_tile
from .smem import Scratch
from .tile_io import Pixel, load_activation
from ..conv.epilogue import Epilogue
from ..conv.fields import PANEL
from ..conv.problem import SPATIAL, ConvProblem


def packed_offset(
    problem: ConvProblem, filter: Int, tap: Int, channel: Int
) -> Int:
    """Where a filter value lies in the packed filter.

    Args:
        problem: The convolution.
        filter: The output channel, over all groups.
        tap: `(t * R + r) * S + s`.
        channel: The channel within the group.

    Returns:
        The element offset.
    """
    if problem.is_depthwise():
        return tap * problem.channels + filter
    var group, within = divmod(filter, problem.packed_filters())
    var panel, lane = divmod(within, PANEL)
    var k = tap * problem.group_channels() + channel
    return (
        (group * problem.panels() + panel) * problem.gemm_k() + k
    ) * PANEL + lane


def reference_pixel[
    filter_type: DType
](
    output: ManagedTensorSlice[mut=True, ...],
    x: ManagedTensorSlice,
    filter: Reads[filter_type],
    epilogue: Epilogue,
    problem: ConvProblem,
    row: Int,
    scratch: Scratch,
):
    """Computes all filters of one output pixel, summing in float64.

    Parameters:
        filter_type: The packed filter's type.

    Args:
        output: The op's output.
        x: The activation.
        filter: The packed filter.
        epilogue: The epilogue.
        problem: The convolution.
        row: The pixel, a row of the implicit GEMM.
        scratch: The worker's own memory, a tile of it.
    """
    var pixel = Pixel(problem, row)
    var origin = pixel.at * problem.stride - problem.pad_before
    var channels = problem.group_channels()
    for k in range(problem.filters):
        var group = k // problem.gemm_n()
        var total = Float64(0)
        for tap in range(problem.taps()):
            var tr, s = divmod(tap, problem.filter[2])
            var t, r = divmod(tr, problem.filter[1])
            var at = origin + IndexList[SPATIAL](t, r, s) * problem.dilation
            var inside = True
            for axis in range(SPATIAL):
                if at[axis] < 0 or at[axis] >= problem.input[axis]:
                    inside = False
            if not inside:
                continue
            for c in range(channels):
                var a = load_activation[1](
                    x, problem, pixel.n, at, group * channels + c
                )
                var b = filter[unsafe_offset=packed_offset(problem, k, tap, c)]
                total += a[0].cast[DType.float64]() * b.cast[DType.float64]()
        scratch.accumulators[unsafe_offset=0] = total.cast[DType.float32]()
        store_tile(
            output,
            epilogue,
            problem,
            row,
            1,
            k,
            1,
            scratch.accumulators.as_imm(),
            1,
        )
