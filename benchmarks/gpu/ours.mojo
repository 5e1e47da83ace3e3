"""Times maxconv's convolutions on a GPU, through the dispatch that the op uses.

    ours PROBLEMS

A line of the file PROBLEMS is what benchmarks/gpu/lines.py writes. bfloat16,
channels last, filters in the kernels' order. A graph of 32 launches over input
sets that together exceed the L2 is replayed (`ms`), and the launches are
enqueued one by one (`launch_ms`); medians of 7 after a pause, as peers.py
takes them. `ours` is the convolution alone, `ours_fused` has bias, SiLU and a
residual as arguments. One JSON object a line.
"""

from max.gpu import block_dim, block_idx, grid_dim, thread_idx
from max.gpu.host import (
    DeviceBuffer,
    DeviceContext,
    DeviceGraph,
    DeviceGraphBuilder,
)
from std.sys import argv
from std.time import sleep
from std.utils import IndexList

from operations.conv.access import MemoryActivation, MemoryOutput
from operations.conv.epilogue import Activation, Epilogue
from operations.conv.fields import (
    ACTIVATION_NONE,
    ACTIVATION_SILU,
    KERNEL_AUTO,
    LAYOUT_KRSC,
)
from operations.conv.memory import Reads, Writes
from operations.conv.problem import SPATIAL, ConvProblem
from operations.gpu.dispatch import convolve

comptime TYPE = DType.bfloat16
comptime BLOCKS = 132 * 8
comptime THREADS = 256
comptime LAUNCHES = 32
comptime ROTATED_BYTES = 256 << 20
comptime REPLAYS = 3
comptime ROUNDS = 7
comptime PAUSE = 0.25

comptime FIELDS = 22
"""Integers of a line."""


@fieldwise_init
struct Case(Copyable, Movable):
    """A named problem."""

    var name: String
    var problem: ConvProblem


def parse(line: String) raises -> Case:
    """Reads a line of input."""
    var words = line.split()
    if len(words) != FIELDS + 1:
        raise Error(t"{len(words)} words, {FIELDS + 1} expected: {line}")
    var v = List[Int]()
    for i in range(1, len(words)):
        v.append(Int(words[i]))

    def three(first: Int) {imm v} -> IndexList[SPATIAL]:
        return IndexList[SPATIAL](v[first], v[first + 1], v[first + 2])

    var problem = ConvProblem(
        spatial_rank=3,
        batch=v[0],
        channels=v[1],
        filters=v[2],
        groups=v[3],
        input=three(4),
        filter=three(7),
        output=IndexList[SPATIAL](fill=1),
        stride=three(10),
        dilation=three(13),
        pad_before=three(16),
        pad_after=three(19),
    )
    for axis in range(SPATIAL):
        problem.output[axis] = problem.expected_output(axis)
    problem.validate(LAYOUT_KRSC, problem.filter_length(LAYOUT_KRSC))
    return Case(String(words[0]), problem)


def fill(to: Writes[TYPE], count: Int64, seed: Int32):
    """Kernel: random values between -1 and 1 (a multiplicative hash)."""
    var i = Int64(block_idx.x) * Int64(block_dim.x) + Int64(thread_idx.x)
    while i < count:
        var hash = UInt32(i + Int64(seed) * 7919) * 2654435761
        hash = (hash ^ (hash >> 15)) * 2246822519
        hash ^= hash >> 13
        to[unsafe_offset=Int(i)] = (
            Float32(hash & 0xFFFF) / 32768.0 - 1.0
        ).cast[TYPE]()
        i += Int64(grid_dim.x) * Int64(block_dim.x)


def filled(
    ctx: DeviceContext, count: Int, seed: Int
) raises -> DeviceBuffer[TYPE]:
    """A buffer of random values."""
    var buffer = ctx.enqueue_create_buffer[TYPE](count)
    ctx.enqueue_function[fill](
        data_of(buffer),
        Int64(count),
        Int32(seed),
        grid_dim=BLOCKS,
        block_dim=THREADS,
    )
    return buffer^


def data_of(buffer: DeviceBuffer[TYPE]) -> Writes[TYPE]:
    """The elements of a buffer."""
    return (
        buffer.unsafe_ptr()
        .unsafe_mut_cast[True]()
        .unsafe_origin_cast[MutUntrackedOrigin]()
    )


struct Operands(Movable):
    """As many sets of a problem's operands as exceed the L2 together."""

    var x: List[DeviceBuffer[TYPE]]
    var w: List[DeviceBuffer[TYPE]]
    var bias: List[DeviceBuffer[TYPE]]
    var residual: List[DeviceBuffer[TYPE]]
    var y: List[DeviceBuffer[TYPE]]

    def __init__(out self, ctx: DeviceContext, p: ConvProblem) raises:
        """Draws them.

        Args:
            ctx: The device.
            p: The problem.
        """
        var x = p.batch * p.channels
        for axis in range(SPATIAL):
            x *= p.input[axis]
        var y = p.gemm_m() * p.filters
        var w = p.filter_length(LAYOUT_KRSC)
        var sets = max(1, min(LAUNCHES, ROTATED_BYTES // (2 * (x + 2 * y)) + 1))
        self.x = List[DeviceBuffer[TYPE]]()
        self.w = List[DeviceBuffer[TYPE]]()
        self.bias = List[DeviceBuffer[TYPE]]()
        self.residual = List[DeviceBuffer[TYPE]]()
        self.y = List[DeviceBuffer[TYPE]]()
        for i in range(sets):
            self.x.append(filled(ctx, x, 5 * i))
            self.w.append(filled(ctx, w, 5 * i + 1))
            self.bias.append(filled(ctx, p.filters, 5 * i + 2))
            self.residual.append(filled(ctx, y, 5 * i + 3))
            self.y.append(filled(ctx, y, 5 * i + 4))

    def launch(
        self, ctx: DeviceContext, p: ConvProblem, fused: Bool, index: Int
    ) raises:
        """Enqueues one convolution.

        Args:
            ctx: The device.
            p: The problem.
            fused: Whether with bias, SiLU and residual.
            index: Of the set.
        """
        var epilogue = Epilogue[TYPE, TYPE](
            has_bias=fused,
            has_residual=fused,
            has_scale=False,
            scale=Reads[DType.float32].unsafe_dangling(),
            bias=data_of(self.bias[index]).as_imm(),
            residual=data_of(self.residual[index]).as_imm(),
            beta=1.0,
            activation=Activation(
                ACTIVATION_SILU if fused else ACTIVATION_NONE, 0, 0
            ),
            final_activation=Activation(ACTIVATION_NONE, 0, 0),
        )
        convolve(
            ctx,
            p,
            MemoryActivation[TYPE](data_of(self.x[index]).as_imm()),
            data_of(self.w[index]).as_imm(),
            LAYOUT_KRSC,
            KERNEL_AUTO,
            epilogue,
            MemoryOutput[TYPE](data_of(self.y[index])),
        )


def median_of[
    Run: def(DeviceContext) raises -> None
](ctx: DeviceContext, run: Run) raises -> Float64:
    """Milliseconds of a launch, `run` making `LAUNCHES`: the median."""
    sleep(PAUSE)
    _ = ctx.execution_time(run, REPLAYS)
    var times = List[Float64]()
    for _ in range(ROUNDS):
        times.append(
            Float64(ctx.execution_time(run, REPLAYS))
            / Float64(REPLAYS * LAUNCHES)
            / 1e6
        )
    sort(times)
    return times[len(times) // 2]


def time_case(
    ctx: DeviceContext, named: Case, operands: Operands, fused: Bool
) raises:
    """Times a problem both ways, and prints a line."""
    var p = named.problem
    var sets = len(operands.x)
    operands.launch(ctx, p, fused, 0)
    ctx.synchronize()

    def build(mut builder: DeviceGraphBuilder) raises {imm}:
        var recorded = builder.recording_context()
        for i in range(LAUNCHES):
            operands.launch(recorded, p, fused, i % sets)

    var graph = DeviceGraph.create(ctx, build)

    def replay(ctx: DeviceContext) raises {imm}:
        graph.replay()

    def enqueue(ctx: DeviceContext) raises {imm}:
        for i in range(LAUNCHES):
            operands.launch(ctx, p, fused, i % sets)

    var replayed = median_of(ctx, replay)
    var called = median_of(ctx, enqueue)
    var contender = "ours_fused" if fused else "ours"
    print(
        (
            t'{{"problem": "{named.name}", "contender": "{contender}", "ms":'
            t' {replayed}, "launch_ms": {called}}}'
        ),
        flush=True,
    )


def main() raises:
    var ctx = DeviceContext()
    var text: String
    with open(String(argv()[1]), "r") as file:
        text = file.read()
    for line in text.splitlines():
        var named = parse(String(line))
        var operands = Operands(ctx, named.problem)
        for fused in range(2):
            time_case(ctx, named, operands, fused == 1)
        _ = operands^
