"""Checks and times the Hopper kernel's candidates.

    sm90 check|graph|graph+|stream|stream+ PROBLEMS [CANDIDATE...]

The lines of the file PROBLEMS are described in problems.mojo.

`check` compares every output element, exactly, with a naive convolution:
activations and filters are small integers, so that products and sums are exact
in float32 in any order, and only the rounding to the output's type is left.
Outputs are poisoned before each of several launches and lie between guards. `graph` replays a graph of launches
on random data, over several input sets that together exceed the L2; `stream`
enqueues them one by one; + lets a launch begin before the last has ended.
"""

from max.gpu.host import (
    DeviceAttribute,
    DeviceBuffer,
    DeviceContext,
    DeviceGraph,
    DeviceGraphBuilder,
)
from std.sys import argv
from std.time import sleep

from operations.conv.memory import Writes
from operations.conv.problem import SPATIAL, ConvProblem
from operations.sm90.config import can_implement
from operations.sm90.dispatch import (
    CANDIDATES,
    candidate,
    choose,
    convolve as launch_chosen,
)
from operations.sm90.launch import LaunchPlan
from kernels import (
    POISON,
    THREADS,
    compare,
    convolve,
    fill_constant,
    fill_integers,
    fill_random,
)
from problems import Case, read_cases

comptime TIMED = DType.bfloat16
"""The type of timed operands."""

comptime GUARD = 4096
"""Elements in front of and behind an output that no kernel may touch."""

comptime BLOCKS = 132 * 8
"""Blocks of the auxiliary kernels."""

comptime ROTATED_BYTES = 256 << 20
"""Bytes that the input sets of a timing have together, at least."""

comptime REPEATS = 20
"""Launches of a candidate on a checked problem."""

comptime LAUNCHES = 32
"""Launches of a graph."""


def elements_of(problem: ConvProblem) -> Tuple[Int, Int, Int]:
    """Elements of activation, filter and output."""
    var pixels = problem.batch
    for axis in range(SPATIAL):
        pixels *= problem.input[axis]
    return (
        pixels * problem.channels,
        problem.filters * problem.gemm_k(),
        problem.gemm_m() * problem.filters,
    )


def data_of[
    dtype: DType
](buffer: DeviceBuffer[dtype], offset: Int = 0) -> Writes[dtype]:
    """A buffer's elements, behind `offset`."""
    return (
        buffer.unsafe_ptr()
        .unsafe_mut_cast[True]()
        .unsafe_origin_cast[MutUntrackedOrigin]()
        .unsafe_offset(offset)
    )


struct Check[dtype: DType](Movable):
    """The operands of a problem, filled with integers, and what a kernel
    should make of them.

    Parameters:
        dtype: Of activation, filter and output.
    """

    var problem: ConvProblem
    var activation: DeviceBuffer[Self.dtype]
    var filter: DeviceBuffer[Self.dtype]
    var expected: DeviceBuffer[Self.dtype]
    var found: DeviceBuffer[Self.dtype]
    var counts: DeviceBuffer[DType.uint32]

    def __init__(out self, ctx: DeviceContext, problem: ConvProblem) raises:
        """Fills the operands and convolves naively.

        Args:
            ctx: The device.
            problem: The convolution.
        """
        var x, w, y = elements_of(problem)
        self.problem = problem
        self.activation = ctx.enqueue_create_buffer[Self.dtype](x)
        self.filter = ctx.enqueue_create_buffer[Self.dtype](w)
        self.expected = ctx.enqueue_create_buffer[Self.dtype](y + 2 * GUARD)
        self.found = ctx.enqueue_create_buffer[Self.dtype](y + 2 * GUARD)
        self.counts = ctx.enqueue_create_buffer[DType.uint32](2)
        ctx.enqueue_function[fill_integers[Self.dtype]](
            self.activation,
            Int64(x),
            Int32(3),
            Int32(1),
            grid_dim=BLOCKS,
            block_dim=THREADS,
        )
        ctx.enqueue_function[fill_integers[Self.dtype]](
            self.filter,
            Int64(w),
            Int32(2),
            Int32(2),
            grid_dim=BLOCKS,
            block_dim=THREADS,
        )
        self._poison(ctx, self.expected)
        ctx.enqueue_function[convolve[Self.dtype, Self.dtype]](
            self.activation,
            self.filter,
            self.expected.create_sub_buffer[Self.dtype](GUARD, y),
            problem,
            grid_dim=BLOCKS,
            block_dim=THREADS,
        )

    def _poison(
        self, ctx: DeviceContext, buffer: DeviceBuffer[Self.dtype]
    ) raises:
        """Fills a buffer with what nobody expects."""
        ctx.enqueue_function[fill_constant[Self.dtype]](
            buffer,
            Int64(len(buffer)),
            POISON,
            grid_dim=BLOCKS,
            block_dim=THREADS,
        )

    def run[index: Int](self, ctx: DeviceContext) raises -> String:
        """Runs a candidate.

        Parameters:
            index: Of the candidate, or `CANDIDATES` for the one that is
                chosen.

        Args:
            ctx: The device.

        Returns:
            "ok", or what is wrong.
        """
        self.counts.enqueue_fill(0)
        self.counts.create_sub_buffer[DType.uint32](1, 1).enqueue_fill(
            UInt32.MAX
        )
        for _ in range(REPEATS):
            self._poison(ctx, self.found)
            self._launch[index](ctx)
            self._compare(ctx)
        with self.counts.map_to_host() as counts:
            if counts[0] == 0:
                return "ok"
            var at = Int(counts[1]) - GUARD
            var pixel, filter = divmod(at, self.problem.filters)
            return String(
                t"WRONG: {counts[0]} elements of {REPEATS} launches, the first"
                t" of pixel {pixel}, filter {filter}"
            )

    def _launch[index: Int](self, ctx: DeviceContext) raises:
        """Launches a candidate, or the one that is chosen."""
        comptime if index == CANDIDATES:
            launch_chosen(
                ctx,
                self.problem,
                data_of(self.activation),
                data_of(self.filter),
                data_of(self.found, GUARD),
            )
        else:
            LaunchPlan[Self.dtype, Self.dtype, candidate(index)](
                ctx,
                self.problem,
                data_of(self.activation),
                data_of(self.filter),
                data_of(self.found, GUARD),
            ).launch(ctx)

    def _compare(self, ctx: DeviceContext) raises:
        """Counts what is wrong, guards included."""
        ctx.enqueue_function[compare[Self.dtype]](
            self.expected,
            self.found,
            Int64(len(self.found)),
            self.counts,
            self.counts.create_sub_buffer[DType.uint32](1, 1),
            grid_dim=BLOCKS,
            block_dim=THREADS,
        )


def time_of[
    index: Int
](ctx: DeviceContext, problem: ConvProblem, mode: String) raises -> Float64:
    """The time of a launch of a candidate, in milliseconds: the median of
    graph replays.

    Parameters:
        index: Of the candidate.

    Args:
        ctx: The device.
        problem: The convolution.
        mode: Of the command line.
    """
    comptime config = candidate(index)
    var x, w, y = elements_of(problem)
    var set_bytes = 2 * (x + w + y)
    var sets = max(1, min(LAUNCHES, ROTATED_BYTES // set_bytes + 1))
    var buffers = List[DeviceBuffer[TIMED]]()
    var plans = List[LaunchPlan[TIMED, TIMED, config]]()
    for i in range(sets):
        var activation = ctx.enqueue_create_buffer[TIMED](x)
        var filter = ctx.enqueue_create_buffer[TIMED](w)
        var output = ctx.enqueue_create_buffer[TIMED](y)
        ctx.enqueue_function[fill_random[TIMED]](
            activation,
            Int64(x),
            Int32(2 * i),
            grid_dim=BLOCKS,
            block_dim=THREADS,
        )
        ctx.enqueue_function[fill_random[TIMED]](
            filter,
            Int64(w),
            Int32(2 * i + 1001),
            grid_dim=BLOCKS,
            block_dim=THREADS,
        )
        plans.append(
            LaunchPlan[TIMED, TIMED, config](
                ctx,
                problem,
                data_of(activation),
                data_of(filter),
                data_of(output),
            )
        )
        buffers.append(activation)
        buffers.append(filter)
        buffers.append(output)
    plans[0].launch(ctx)
    ctx.synchronize()

    var overlap = mode.endswith("+")
    var streamed = mode.startswith("stream")

    def build(mut builder: DeviceGraphBuilder) raises {imm}:
        var recorded = builder.recording_context()
        for i in range(LAUNCHES):
            plans[i % sets].launch(recorded, overlap)

    var graph = DeviceGraph.create(ctx, build)

    def replay(ctx: DeviceContext) raises {imm}:
        if streamed:
            for i in range(LAUNCHES):
                plans[i % sets].launch(ctx, overlap)
        else:
            graph.replay()

    sleep(0.25)
    _ = ctx.execution_time(replay, 3)
    var times = List[Float64]()
    for _ in range(7):
        times.append(
            Float64(ctx.execution_time(replay, 3)) / (3 * LAUNCHES) / 1e6
        )
    sort(times)
    _ = buffers^
    return times[len(times) // 2]


def selected(index: Int) raises -> Bool:
    """Whether the command line asks for a candidate."""
    var words = argv()
    if len(words) <= 3:
        return True
    for i in range(3, len(words)):
        if Int(String(words[i])) == index:
            return True
    return False


def check_case[dtype: DType](ctx: DeviceContext, named: Case) raises -> Int:
    """Checks a problem, and returns how many candidates are wrong."""
    var wrong = 0
    var check = Check[dtype](ctx, named.problem)
    comptime for index in range(CANDIDATES + 1):
        if selected(index):
            var result: String
            comptime if index == CANDIDATES:
                result = check.run[index](ctx)
            else:
                var refusal = can_implement[dtype, dtype](
                    candidate(index), named.problem
                )
                result = (
                    "refused: "
                    + refusal.value() if refusal else check.run[index](ctx)
                )
            print(named.name, dtype, index, result)
            if result.startswith("WRONG"):
                wrong += 1
    return wrong


def time_case(ctx: DeviceContext, named: Case, mode: String) raises:
    """Times a problem."""
    var p = named.problem
    var operations = (
        2.0 * Float64(p.gemm_m()) * Float64(p.filters) * Float64(p.gemm_k())
    )
    var choice = choose[TIMED, TIMED](
        p, ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)
    )
    print(named.name, "chooses", choice.index, choice)
    comptime for index in range(CANDIDATES):
        if (selected(index) or choice.index == index) and not can_implement[
            TIMED, TIMED
        ](candidate(index), p):
            var ms = time_of[index](ctx, p, mode)
            print(
                named.name,
                index,
                round(ms * 1e4) / 1e4,
                "ms",
                round(operations / ms / 1e9),
                "TFLOP/s |",
                candidate(index),
                "| chosen" if choice.index == index else "",
            )


def main() raises:
    var mode = String(argv()[1])
    var ctx = DeviceContext()
    comptime for index in range(CANDIDATES):
        var refusal = candidate(index).refusal()
        if refusal:
            raise Error(t"candidate {index}: {refusal.value()}")
    var wrong = 0
    for named in read_cases(String(argv()[2])):
        if mode == "check":
            wrong += check_case[DType.bfloat16](ctx, named)
            wrong += check_case[DType.float16](ctx, named)
        else:
            time_case(ctx, named, mode)
    if wrong > 0:
        raise Error(t"{wrong} wrong")
    print("END")
