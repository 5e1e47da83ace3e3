"""Checks and times pooling on the problems of a file.

    pooling check pooling_check.txt    every element, of every type, with fused work and without;
                                       ends with 1 if one is wrong
    pooling time pooling_time.txt      milliseconds of a launch, and of a copy of as many bytes

A line is what problems.mojo reads, of one channel a group. Parts of its name,
joined by a dash, say what is wanted: `mean`, or else the largest; `up` for ceil
mode; `alone` for means that do not count the padding; `whole` for a window that
the op knows to be the image.

Elements are small integers, some of which are not finite, so that sums are exact
in float32 in any order. Outputs are poisoned before each launch and lie between
guards. Times are medians of replays of a graph of launches on random data, over
several input sets that together exceed the L2.
"""

from max.gpu import block_idx, grid_dim, thread_idx
from max.gpu.host import DeviceBuffer, DeviceContext
from std.sys import argv
from std.sys.info import size_of
from std.utils import IndexList
from std.utils.numerics import inf, nan

from operations.conv.access import ComputedOutput, MemoryOutput, OutputTarget
from operations.conv.known import UNKNOWN
from operations.conv.memory import Reads, Writes
from operations.conv.pooling import PoolProblem, Reduction
from operations.conv.problem import SPATIAL
from operations.nvidia.generic.pooling_launch import pool
from operations.nvidia.stream import Stream
from buffers import (
    BLOCKS,
    GUARD,
    data_of,
    elements_of,
    poison,
    put_integers,
    put_random,
    reads_of,
)
from epilogues import AddFilter
from kernels import THREADS, compare, compare_closely
from problems import Case, read_cases
from timing import LAUNCHES, input_sets, time_captured, time_graph

comptime TYPES = [
    DType.float32,
    DType.bfloat16,
    DType.float16,
    DType.float8_e4m3fn,
    DType.int8,
]
"""Types that are checked."""

comptime TIMED = [DType.bfloat16, DType.float32]
"""Types that are timed."""

comptime REPEATS = 3
"""Launches of a checked pooling."""


def pool_naively[
    dtype: DType, average: Bool
](
    input: Reads[dtype],
    output: Writes[dtype],
    pooling: PoolProblem,
    unit: Int32,
):
    """The definition, one output element a thread; `unit` times the channel's
    number modulo 4 is added."""
    ref p = pooling.window
    comptime Values = Reduction[dtype, average]
    var step = Int(grid_dim.x) * THREADS
    for i in range(
        Int(block_idx.x) * THREADS + Int(thread_idx.x),
        p.gemm_m() * p.filters,
        step,
    ):
        var pixel, c = divmod(i, p.filters)
        var row, x = divmod(pixel, p.output[2])
        var plane, y = divmod(row, p.output[1])
        var n, z = divmod(plane, p.output[0])
        var held = Float32(0)
        comptime if not average:
            held = Values.neutral[1]().cast[DType.float32]()
        var counted = 0
        for t in range(p.filter[0]):
            for r in range(p.filter[1]):
                for s in range(p.filter[2]):
                    var d = z * p.stride[0] - p.pad_before[0]
                    var h = y * p.stride[1] - p.pad_before[1]
                    var w = x * p.stride[2] - p.pad_before[2]
                    d += t * p.dilation[0]
                    h += r * p.dilation[1]
                    w += s * p.dilation[2]
                    var inside = (
                        0 <= d < p.input[0]
                        and 0 <= h < p.input[1]
                        and 0 <= w < p.input[2]
                    )
                    var in_padding = (
                        d < p.input[0] + pooling.counted_after[0]
                        and h < p.input[1] + pooling.counted_after[1]
                        and w < p.input[2] + pooling.counted_after[2]
                    )
                    if inside or (pooling.counts_padding and in_padding):
                        counted += 1
                    if inside:
                        var at = (n * p.input[0] + d) * p.input[1] + h
                        var value = input[
                            unsafe_offset=(at * p.input[2] + w) * p.channels + c
                        ].cast[DType.float32]()
                        comptime if average:
                            held += value
                        else:
                            if value > held or value != value:
                                held = value
        comptime if average:
            # A factor, as the kernels have it.
            if pooling.counts_every_tap():
                counted = p.taps()
            held *= 1 / Float32(counted)
        var result = Reduction[dtype, True].rounded[1](held)
        result += (Int32(c) % 4 * unit).cast[dtype]()
        output[unsafe_offset=i] = result


def plant[dtype: DType](data: Writes[dtype], count: Int64):
    """Makes some elements infinite, and some no number."""
    var step = Int(grid_dim.x) * THREADS
    for i in range(
        Int(block_idx.x) * THREADS + Int(thread_idx.x), Int(count), step
    ):
        if i % 1009 == 17:
            data[unsafe_offset=i] = nan[dtype]()
        elif i % 1013 == 4:
            data[unsafe_offset=i] = -inf[dtype]()


def mark[dtype: DType](data: Writes[dtype], count: Int64):
    """Has those that are no number, which equal nothing, equal each other."""
    var step = Int(grid_dim.x) * THREADS
    for i in range(
        Int(block_idx.x) * THREADS + Int(thread_idx.x), Int(count), step
    ):
        var value = data[unsafe_offset=i].cast[DType.float32]()
        if value != value:
            data[unsafe_offset=i] = 99


def _each[
    dtype: DType, //, kernel: def(Writes[dtype], Int64) thin -> None
](ctx: DeviceContext, buffer: DeviceBuffer[dtype], offset: Int) raises:
    """Runs a kernel on a buffer's elements, without `offset` on both sides."""
    ctx.enqueue_function[kernel](
        data_of(buffer, offset),
        Int64(len(buffer) - 2 * offset),
        grid_dim=BLOCKS,
        block_dim=THREADS,
    )


def pooling_of(case_: Case) -> PoolProblem:
    """The problem of a line."""
    return PoolProblem.of_window(
        case_.problem,
        ceil="up" in case_.name,
        counts_padding="alone" not in case_.name,
    )


def launch[
    dtype: DType, Output: OutputTarget, //, average: Bool
](
    mut stream: Stream,
    name: String,
    pooling: PoolProblem,
    input: Reads[dtype],
    output: Output,
) raises:
    """Enqueues, as an op does that knows window and stride along w."""
    ref window = pooling.window
    comptime if average:
        if "whole" in name:
            pool[average, True, UNKNOWN, UNKNOWN, UNKNOWN](
                stream, pooling, input, output
            )
            return
    comptime for taps in [2, 3, 5]:
        comptime for stride in [1, 2]:
            if (
                window.filter[2] == taps
                and window.stride[2] == stride
                and window.dilation[2] == 1
                and "any" not in name
            ):
                pool[average, False, UNKNOWN, taps, stride](
                    stream, pooling, input, output
                )
                return
    pool[average, False, UNKNOWN, UNKNOWN, UNKNOWN](
        stream, pooling, input, output
    )


def check[
    dtype: DType, average: Bool, fused: Bool
](ctx: DeviceContext, case_: Case) raises -> String:
    """Pools, and compares with the definition.

    Returns:
        "ok", or what is wrong.
    """
    var pooling = pooling_of(case_)
    var x, _, y = elements_of(pooling.window)
    var input = ctx.enqueue_create_buffer[dtype](x)
    var expected = ctx.enqueue_create_buffer[dtype](y + 2 * GUARD)
    var found = ctx.enqueue_create_buffer[dtype](y + 2 * GUARD)
    put_integers(ctx, input, 40, 1)
    comptime if not fused and (dtype == DType.float32 or dtype.is_half_float()):
        _each[plant[dtype]](ctx, input, 0)
    poison(ctx, expected)
    ctx.enqueue_function[pool_naively[dtype, average]](
        reads_of(input),
        data_of(expected, GUARD),
        pooling,
        Int32(1 if fused else 0),
        grid_dim=BLOCKS,
        block_dim=THREADS,
    )
    _each[mark[dtype]](ctx, expected, GUARD)
    var counts = ctx.enqueue_create_buffer[DType.uint32](2)
    counts.enqueue_fill(0)
    counts.create_sub_buffer[DType.uint32](1, 1).enqueue_fill(UInt32.MAX)
    var stream = Stream(ctx)
    for _ in range(REPEATS):
        poison(ctx, found)
        var data = data_of(found, GUARD)
        comptime if fused:
            launch[average](
                stream,
                case_.name,
                pooling,
                reads_of(input),
                ComputedOutput[dtype, 5, AddFilter](data, AddFilter(1)),
            )
        else:
            launch[average](
                stream,
                case_.name,
                pooling,
                reads_of(input),
                MemoryOutput[dtype](data),
            )
        _each[mark[dtype]](ctx, found, GUARD)
        comptime if fused and average and dtype == DType.float32:
            # A mean and what is added to it may be rounded once.
            ctx.enqueue_function[compare_closely[dtype]](
                expected,
                found,
                Int64(len(found)),
                Float32(1e-6),
                counts,
                counts.create_sub_buffer[DType.uint32](1, 1),
                grid_dim=BLOCKS,
                block_dim=THREADS,
            )
        else:
            ctx.enqueue_function[compare[dtype]](
                expected,
                found,
                Int64(len(found)),
                counts,
                counts.create_sub_buffer[DType.uint32](1, 1),
                grid_dim=BLOCKS,
                block_dim=THREADS,
            )
    with counts.map_to_host() as host:
        if host[0] == 0:
            return "ok"
        return String(
            t"{host[0]} of {REPEATS * y} wrong, first {Int(host[1]) - GUARD}"
        )


def check_all(ctx: DeviceContext, cases: List[Case]) raises -> Int:
    """Checks every problem; returns how many are wrong."""
    var wrong = 0
    for ref case_ in cases:
        comptime for dtype in TYPES:
            comptime for fused in [False, True]:
                var result: String
                if "mean" in case_.name:
                    result = check[dtype, True, fused](ctx, case_)
                else:
                    result = check[dtype, False, fused](ctx, case_)
                if result != "ok":
                    wrong += 1
                    print(case_.name, dtype, "fused:", fused, result)
    print(len(cases), "problems,", wrong, "checks failed")
    return wrong


def time_one[dtype: DType](ctx: DeviceContext, case_: Case) raises:
    """Prints the time of a launch, and of a copy of as many bytes."""
    var pooling = pooling_of(case_)
    var x, _, y = elements_of(pooling.window)
    var bytes = (x + y) * size_of[dtype]()
    var sets = input_sets(bytes)
    var inputs = List[DeviceBuffer[dtype]]()
    var outputs = List[DeviceBuffer[dtype]]()
    for i in range(sets):
        inputs.append(ctx.enqueue_create_buffer[dtype](x))
        outputs.append(ctx.enqueue_create_buffer[dtype](y))
        put_random(ctx, inputs[i], i)

    def enqueue(mut stream: Stream, index: Int) raises {imm}:
        var i = index % sets
        var output = MemoryOutput[dtype](data_of(outputs[i]))
        if "mean" in case_.name:
            launch[True](
                stream, case_.name, pooling, reads_of(inputs[i]), output
            )
        else:
            launch[False](
                stream, case_.name, pooling, reads_of(inputs[i]), output
            )

    var ms = time_captured(ctx, enqueue)
    var half = (x + y + 1) // 2
    var from_ = List[DeviceBuffer[dtype]]()
    var to = List[DeviceBuffer[dtype]]()
    for i in range(sets):
        from_.append(ctx.enqueue_create_buffer[dtype](half))
        to.append(ctx.enqueue_create_buffer[dtype](half))
        put_random(ctx, from_[i], i)

    def copy(ctx: DeviceContext, index: Int) raises {imm}:
        ctx.enqueue_copy(to[index % sets], from_[index % sets])

    var copied = time_graph(ctx, copy)
    print(
        String(
            t"{case_.name} {dtype} {ms * 1e3} us, copy {copied * 1e3} us,"
            t" {copied / ms} of it, {Float64(bytes) / ms / 1e9} TB/s"
        )
    )


def main() raises:
    var ctx = DeviceContext()
    var cases = read_cases(String(argv()[2]))
    if argv()[1] == "check":
        if check_all(ctx, cases) != 0:
            raise Error("wrong results")
        return
    for ref case_ in cases:
        comptime for dtype in TIMED:
            time_one[dtype](ctx, case_)
