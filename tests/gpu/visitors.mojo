"""The epilogues of visitors that the GPU tests run, and what they should make
of sums."""

from max.gpu import block_idx, grid_dim, thread_idx
from std.atomic import Atomic

from kernels import THREADS
from epilogues import BIAS_TYPE


@fieldwise_init
struct Expectation(Copyable, Movable):
    """What a chain of visitors makes of a sum `v` of filter `k`:

    before = v * scale[k] + bias[k]
    after = leaky ReLU of before + beta * residual
    """

    var name: String
    var scaled: Bool
    var biased: Bool
    var slope: Float32
    """Of the leaky ReLU: 1 is none."""
    var beta: Float32
    var stores: Bool
    """Whether `after` is stored as the output."""
    var auxiliary: Float32
    """What the auxiliary output is a multiple of `before` by; 0: there is
    none."""
    var adds: Bool
    """Whether each filter's `after`, rounded, and their squares are added up.
    """


def expect[
    dtype: DType
](
    sums: Pointer[Float32, MutAnyOrigin],
    scale: Pointer[Float32, MutAnyOrigin],
    bias: Pointer[Scalar[BIAS_TYPE], MutAnyOrigin],
    residual: Pointer[Scalar[dtype], MutAnyOrigin],
    before: Pointer[Float32, MutAnyOrigin],
    after: Pointer[Float32, MutAnyOrigin],
    elements: Int64,
    filters: Int64,
    scaled: Int32,
    biased: Int32,
    slope: Float32,
    beta: Float32,
):
    """Computes an `Expectation`, element by element."""
    var first = Int(block_idx.x) * THREADS + Int(thread_idx.x)
    for i in range(first, Int(elements), Int(grid_dim.x) * THREADS):
        var k = i % Int(filters)
        var v = sums[unsafe_offset=i]
        if scaled != 0:
            v *= scale[unsafe_offset=k]
        if biased != 0:
            v += bias[unsafe_offset=k].cast[DType.float32]()
        before[unsafe_offset=i] = v
        if v < 0:
            v *= slope
        if beta != 0:
            v += beta * residual[unsafe_offset=i].cast[DType.float32]()
        after[unsafe_offset=i] = v


def judge_tensor[
    dtype: DType
](
    expected: Pointer[Float32, MutAnyOrigin],
    found: Pointer[Scalar[dtype], MutAnyOrigin],
    elements: Int64,
    guard: Int64,
    factor: Float32,
    untouched: Float32,
    wrong: Pointer[UInt32, MutAnyOrigin],
):
    """Counts elements of a guarded tensor that are not `factor` times the
    rounded expectation (with `factor` 0: not `untouched`), and guards that are
    not `untouched`."""
    var first = Int(block_idx.x) * THREADS + Int(thread_idx.x)
    var end = Int(elements) + 2 * Int(guard)
    for i in range(first, end, Int(grid_dim.x) * THREADS):
        var at = i - Int(guard)
        var want = Scalar[dtype](untouched)
        if factor != 0 and at >= 0 and at < Int(elements):
            want = expected[unsafe_offset=at].cast[dtype]() * Scalar[dtype](
                factor
            )
        if not found[unsafe_offset=i] == want:
            _ = Atomic.fetch_add(wrong, UInt32(1))


def add_up[
    dtype: DType
](
    after: Pointer[Float32, MutAnyOrigin],
    totals: Pointer[Float64, MutAnyOrigin],
    pixels: Int64,
    filters: Int64,
):
    """Adds up each filter's values, rounded to a type, and their squares, a
    block a filter; exact where they are integers.

    Args:
        after: `[pixels, filters]`.
        totals: `[2, filters]`, 0 before.
        pixels: How many.
        filters: How many.
    """
    var k = Int(block_idx.x)
    var sum = Float64(0)
    var squares = Float64(0)
    for i in range(Int(thread_idx.x), Int(pixels), THREADS):
        var v = (
            after[unsafe_offset=i * Int(filters) + k]
            .cast[dtype]()
            .cast[DType.float64]()
        )
        sum += v
        squares += v * v
    _ = Atomic.fetch_add(totals.unsafe_offset(k), sum)
    _ = Atomic.fetch_add(totals.unsafe_offset(Int(filters) + k), squares)
