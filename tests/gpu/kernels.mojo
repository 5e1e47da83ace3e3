"""The GPU's own oracle: fills, a naive convolution, an exact comparison."""

from max.gpu import block_dim, block_idx, grid_dim, thread_idx
from std.atomic import Atomic
from std.sys.info import size_of

from operations.conv.problem import ConvProblem

comptime THREADS = 256
"""Threads of a block of these kernels."""

comptime POISON = Float32(777.0)
"""Not a value that any check expects, in any type."""


@always_inline
def _first() -> Int:
    """This thread's index in the grid."""
    return Int(block_idx.x) * THREADS + Int(thread_idx.x)


@always_inline
def _step() -> Int:
    """Threads of the grid."""
    return Int(grid_dim.x) * THREADS


@always_inline
def _hash(index: Int, seed: Int32) -> UInt32:
    """Mixes the bits of an index (the finalizer of MurmurHash3)."""
    var h = UInt32(index) ^ (UInt32(seed) * 0x9E3779B9)
    h ^= UInt32(index >> 32) * 0x85EBCA6B
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    return h ^ (h >> 16)


def fill_integers[
    dtype: DType
](
    data: Pointer[Scalar[dtype], MutAnyOrigin],
    count: Int64,
    magnitude: Int32,
    seed: Int32,
):
    """Integers from -magnitude to magnitude."""
    for i in range(_first(), Int(count), _step()):
        var value = Int32(_hash(i, seed) % UInt32(2 * magnitude + 1))
        data[unsafe_offset=i] = Scalar[dtype](Float32(value - magnitude))


def fill_random[
    dtype: DType
](data: Pointer[Scalar[dtype], MutAnyOrigin], count: Int64, seed: Int32):
    """Values around 0 with the spread of a normal distribution: the sum of
    four uniform ones."""
    for i in range(_first(), Int(count), _step()):
        var h = _hash(i, seed)
        var sum = (h & 255) + ((h >> 8) & 255) + ((h >> 16) & 255) + (h >> 24)
        var low = Float32(_hash(i, seed + 1) & 0xFFFF) / 65536.0
        data[unsafe_offset=i] = Scalar[dtype](
            (Float32(sum) + low - 510.5) / 148.0
        )


def fill_constant[
    dtype: DType
](data: Pointer[Scalar[dtype], MutAnyOrigin], count: Int64, value: Float32):
    """One value everywhere."""
    for i in range(_first(), Int(count), _step()):
        data[unsafe_offset=i] = Scalar[dtype](value)


def convolve[
    in_type: DType, out_type: DType
](
    activation: Pointer[Scalar[in_type], MutAnyOrigin],
    filter: Pointer[Scalar[in_type], MutAnyOrigin],
    output: Pointer[Scalar[out_type], MutAnyOrigin],
    problem: ConvProblem,
):
    """The direct convolution, one output element a thread, summed in float32.
    """
    var p = problem
    for i in range(_first(), p.gemm_m() * p.filters, _step()):
        var pixel, k = divmod(i, p.filters)
        var row, x = divmod(pixel, p.output[2])
        var plane, y = divmod(row, p.output[1])
        var n, z = divmod(plane, p.output[0])
        var first = k // p.group_filters() * p.group_channels()
        var sum = Float32(0)
        for t in range(p.filter[0]):
            var d = z * p.stride[0] - p.pad_before[0] + t * p.dilation[0]
            if d < 0 or d >= p.input[0]:
                continue
            for r in range(p.filter[1]):
                var h = y * p.stride[1] - p.pad_before[1] + r * p.dilation[1]
                if h < 0 or h >= p.input[1]:
                    continue
                for s in range(p.filter[2]):
                    var w = (
                        x * p.stride[2] - p.pad_before[2] + s * p.dilation[2]
                    )
                    if w < 0 or w >= p.input[2]:
                        continue
                    var at = (n * p.input[0] + d) * p.input[1] + h
                    var tap = (k * p.filter[0] + t) * p.filter[1] + r
                    sum += _product(
                        activation,
                        (at * p.input[2] + w) * p.channels + first,
                        filter,
                        (tap * p.filter[2] + s) * p.group_channels(),
                        p.group_channels(),
                    )
        output[unsafe_offset=i] = Scalar[out_type](sum)


@always_inline
def _product[
    in_type: DType
](
    activation: Pointer[Scalar[in_type], MutAnyOrigin],
    a: Int,
    filter: Pointer[Scalar[in_type], MutAnyOrigin],
    b: Int,
    channels: Int,
) -> Float32:
    """The sum of products of one tap."""
    comptime width = 16 // size_of[in_type]()
    if channels % width != 0:
        var total = Float32(0)
        for c in range(channels):
            var x = activation[unsafe_offset=a + c].cast[DType.float32]()
            total += x * filter[unsafe_offset=b + c].cast[DType.float32]()
        return total
    var sum = SIMD[DType.float32, width](0)
    for c in range(0, channels, width):
        var x = activation.unsafe_load[width=width, alignment=16](a + c)
        var y = filter.unsafe_load[width=width, alignment=16](b + c)
        sum += x.cast[DType.float32]() * y.cast[DType.float32]()
    return sum.reduce_add()


def compare[
    dtype: DType
](
    expected: Pointer[Scalar[dtype], MutAnyOrigin],
    found: Pointer[Scalar[dtype], MutAnyOrigin],
    count: Int64,
    wrong: Pointer[UInt32, MutAnyOrigin],
    first: Pointer[UInt32, MutAnyOrigin],
):
    """Counts elements that differ, and finds the first of them."""
    for i in range(_first(), Int(count), _step()):
        # Types of 8 bits cannot be compared.
        var e = expected[unsafe_offset=i].cast[DType.float32]()
        var f = found[unsafe_offset=i].cast[DType.float32]()
        if not e == f:
            _ = Atomic.fetch_add(wrong, UInt32(1))
            Atomic.min(first, UInt32(i))


def compare_closely[
    dtype: DType
](
    expected: Pointer[Scalar[dtype], MutAnyOrigin],
    found: Pointer[Scalar[dtype], MutAnyOrigin],
    count: Int64,
    tolerance: Float32,
    wrong: Pointer[UInt32, MutAnyOrigin],
    first: Pointer[UInt32, MutAnyOrigin],
):
    """As `compare`, of elements that differ by more than `tolerance` times the
    value, and as much of 1/16."""
    for i in range(_first(), Int(count), _step()):
        var e = expected[unsafe_offset=i].cast[DType.float32]()
        var f = found[unsafe_offset=i].cast[DType.float32]()
        var close = abs(f - e) <= tolerance * (abs(e) + 0.0625)
        if not close:
            _ = Atomic.fetch_add(wrong, UInt32(1))
            Atomic.min(first, UInt32(i))
