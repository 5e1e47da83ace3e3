"""The oracle of the direct kernels: any rank, groups, channels, and values that
are not finite."""

from max.gpu import block_idx, grid_dim, thread_idx
from std.utils import IndexList
from std.utils.numerics import inf, isnan, nan

from operations.conv.epilogue import Epilogue
from operations.conv.memory import Reads, Writes
from operations.conv.problem import SPATIAL, ConvProblem
from kernels import THREADS

comptime PLANTED = 1009
"""Elements from one that is not finite to the next: a prime number, so that
they lie in different channels."""


def plant[dtype: DType](data: Writes[dtype], count: Int64):
    """Puts not-a-numbers and infinities among the elements."""
    var first = Int(block_idx.x) * THREADS + Int(thread_idx.x)
    for i in range(first, Int(count) // PLANTED, Int(grid_dim.x) * THREADS):
        var value = nan[dtype]()
        if i % 4 > 1:
            value = inf[dtype]() if i % 4 == 2 else -inf[dtype]()
        data.unsafe_store(i * PLANTED + i % PLANTED, value)


def mark_not_numbers[dtype: DType](data: Writes[dtype], count: Int64):
    """Replaces not-a-numbers, which equal nothing, by a value that no sum has.
    """
    var first = Int(block_idx.x) * THREADS + Int(thread_idx.x)
    for i in range(first, Int(count), Int(grid_dim.x) * THREADS):
        if isnan(data[unsafe_offset=i]):
            data.unsafe_store(i, Scalar[dtype](12345.0))


def convolve_naively[
    dtype: DType, bias_type: DType, residual_type: DType
](
    activation: Reads[dtype],
    filter: Reads[dtype],
    epilogue: Epilogue[bias_type, residual_type],
    output: Writes[dtype],
    problem: ConvProblem,
    unit: Int32,
):
    """The direct convolution, one output element a thread, summed in float32,
    with its epilogue; then `unit` times the filter's number modulo 4."""
    var first = Int(block_idx.x) * THREADS + Int(thread_idx.x)
    var count = problem.gemm_m() * problem.filters
    for i in range(first, count, Int(grid_dim.x) * THREADS):
        var pixel, k = divmod(i, problem.filters)
        var line, q = divmod(pixel, problem.output[2])
        var plane, p = divmod(line, problem.output[1])
        var n, z = divmod(plane, problem.output[0])
        var sum = _sum(activation, filter, problem, n, z, p, q, k)
        var value = epilogue.apply[1](sum, k, i).cast[dtype]()
        value += (Int32(k) % 4 * unit).cast[dtype]()
        output.unsafe_store(i, value)


@always_inline
def _sum[
    dtype: DType
](
    activation: Reads[dtype],
    filter: Reads[dtype],
    problem: ConvProblem,
    n: Int,
    z: Int,
    p: Int,
    q: Int,
    k: Int,
) -> Float32:
    """The sum of an output element."""
    var channels = problem.group_channels()
    var first_channel = k // problem.group_filters() * channels
    var sum = Float32(0)
    for t in range(problem.filter[0]):
        var d = (
            z * problem.stride[0]
            - problem.pad_before[0]
            + t * problem.dilation[0]
        )
        for r in range(problem.filter[1]):
            var h = (
                p * problem.stride[1]
                - problem.pad_before[1]
                + r * problem.dilation[1]
            )
            for s in range(problem.filter[2]):
                var w = (
                    q * problem.stride[2]
                    - problem.pad_before[2]
                    + s * problem.dilation[2]
                )
                if (
                    d < 0
                    or d >= problem.input[0]
                    or h < 0
                    or h >= problem.input[1]
                    or w < 0
                    or w >= problem.input[2]
                ):
                    continue
                var x = (
                    ((n * problem.input[0] + d) * problem.input[1] + h)
                    * problem.input[2]
                    + w
                ) * problem.channels + first_channel
                var y = (
                    ((k * problem.filter[0] + t) * problem.filter[1] + r)
                    * problem.filter[2]
                    + s
                ) * channels
                for c in range(channels):
                    sum += (
                        activation[unsafe_offset=x + c].cast[DType.float32]()
                        * filter[unsafe_offset=y + c].cast[DType.float32]()
                    )
    return sum
