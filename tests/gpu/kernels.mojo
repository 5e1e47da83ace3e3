"""The GPU's own oracle: fills, a naive convolution, an exact comparison."""

from max.gpu import block_dim, block_idx, grid_dim, thread_idx
from std.atomic import Atomic

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
    batch: Int32,
    height: Int32,
    width: Int32,
    channels: Int32,
    filters: Int32,
    taps_h: Int32,
    taps_w: Int32,
    rows: Int32,
    columns: Int32,
    stride_h: Int32,
    stride_w: Int32,
    dilation_h: Int32,
    dilation_w: Int32,
    pad_h: Int32,
    pad_w: Int32,
):
    """The direct convolution, one output element a thread, summed in
    float32; channels a multiple of 8."""
    var count = Int(batch) * Int(rows) * Int(columns) * Int(filters)
    for i in range(_first(), count, _step()):
        var pixel, k = divmod(i, Int(filters))
        var row, q = divmod(pixel, Int(columns))
        var n, p = divmod(row, Int(rows))
        var sum = SIMD[DType.float32, 8](0)
        for r in range(Int(taps_h)):
            var h = p * Int(stride_h) - Int(pad_h) + r * Int(dilation_h)
            if h < 0 or h >= Int(height):
                continue
            for s in range(Int(taps_w)):
                var w = q * Int(stride_w) - Int(pad_w) + s * Int(dilation_w)
                if w < 0 or w >= Int(width):
                    continue
                var x = ((n * Int(height) + h) * Int(width) + w) * Int(channels)
                var y = ((k * Int(taps_h) + r) * Int(taps_w) + s) * Int(
                    channels
                )
                for c in range(0, Int(channels), 8):
                    var a = activation.unsafe_load[width=8, alignment=16](x + c)
                    var b = filter.unsafe_load[width=8, alignment=16](y + c)
                    sum += a.cast[DType.float32]() * b.cast[DType.float32]()
        output[unsafe_offset=i] = Scalar[out_type](sum.reduce_add())


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
        var same = expected[unsafe_offset=i] == found[unsafe_offset=i]
        if not same:
            _ = Atomic.fetch_add(wrong, UInt32(1))
            Atomic.min(first, UInt32(i))
