"""The naive convolution: the oracle that a GPU's kernels are compared with."""

from max.gpu import block_dim, block_idx, grid_dim, thread_idx
from std.utils import IndexList

from ...conv.access import ActivationSource, OutputTarget
from ...conv.epilogue import Epilogue
from ...conv.memory import Reads
from ...conv.problem import SPATIAL, ConvProblem
from ...conv.quantization import filter_dtype
from ..overlap import wait_for_earlier_kernels


def reference_kernel[
    Source: ActivationSource,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
](
    activation: Source,
    filter: Reads[filter_dtype(Source.dtype)],
    epilogue: Epilogue[bias_type, residual_type],
    output: Output,
    problem: ConvProblem,
):
    """A thread an output element, summed in float64.

    Parameters:
        Source: The activation's type.
        Output: The output's type.
        bias_type: Of the bias.
        residual_type: Of the residual.

    Args:
        activation: The activation.
        filter: `[K, T, R, S, C / groups]`.
        epilogue: The epilogue.
        output: The output.
        problem: The convolution.
    """
    var begin = Int(block_idx.x) * Int(block_dim.x) + Int(thread_idx.x)
    var step = Int(grid_dim.x) * Int(block_dim.x)
    wait_for_earlier_kernels()
    for offset in range(begin, problem.gemm_m() * problem.filters, step):
        var pixel, k = divmod(offset, problem.filters)
        var rest, q = divmod(pixel, problem.output[2])
        var zn, p = divmod(rest, problem.output[1])
        var n, z = divmod(zn, problem.output[0])
        var at = IndexList[SPATIAL](z, p, q)
        var sum = _sum(activation, filter, problem, n, at, k)
        output.store[1](
            n, at, k, offset, epilogue.stored[Output.dtype, 1](sum, k, offset)
        )


def _sum[
    Source: ActivationSource
](
    activation: Source,
    filter: Reads[filter_dtype(Source.dtype)],
    problem: ConvProblem,
    n: Int,
    at: IndexList[SPATIAL],
    k: Int,
) -> Float64:
    """One output element's sum of products."""
    var channels = problem.group_channels()
    var first = k // problem.group_filters() * channels
    var origin = at * problem.stride - problem.pad_before
    var sum = Float64(0)
    for tap in range(problem.taps()):
        var tr, s = divmod(tap, problem.filter[2])
        var t, r = divmod(tr, problem.filter[1])
        var here = origin + IndexList[SPATIAL](t, r, s) * problem.dilation
        var inside = True
        comptime for axis in range(SPATIAL):
            if here[axis] < 0 or here[axis] >= problem.input[axis]:
                inside = False
        if not inside:
            continue
        var slice = n * problem.input[0] + here[0]
        var row = slice * problem.input[1] + here[1]
        var pixel = row * problem.input[2] + here[2]
        for c in range(channels):
            var a = activation.load[1](
                n, here, first + c, pixel * problem.channels + first + c
            ).cast[DType.float64]()
            var b = filter[
                unsafe_offset=k * problem.gemm_k() + tap * channels + c
            ].cast[DType.float64]()
            sum += a[0] * b
    return sum
