"""Times maxconv's convolutions on a GPU, through the dispatch that the op uses.

    ours PROBLEMS

A line of the file PROBLEMS is what benchmarks/gpu/lines.py writes. bfloat16,
channels last, filters in the kernels' order. A graph of 32 launches over input
sets that together exceed the L2 is replayed (`ms`), and the launches are
enqueued one by one (`launch_ms`); medians of 7, each after a pause, as peers.py
takes them. `ours` is the convolution alone, `ours_fused` has bias, SiLU and a
residual as arguments. One JSON object a line.
"""

from max.gpu.host import DeviceBuffer, DeviceContext
from std.sys import argv

from operations.conv.access import MemoryActivation, MemoryOutput
from operations.conv.epilogue import Activation, Epilogue
from operations.conv.fields import (
    ACTIVATION_NONE,
    ACTIVATION_SILU,
    KERNEL_AUTO,
    LAYOUT_KRSC,
)
from operations.conv.memory import Reads
from operations.conv.problem import PROBLEM_NUMBERS, ConvProblem
from operations.conv.known import UNKNOWN_FILTER
from operations.conv.operands import Arguments
from operations.conv.registry import ALL_KERNELS
from operations.nvidia.convolve import convolve
from operations.nvidia.stream import Stream
from buffers import data_of, elements_of, put_random, reads_of
from timing import input_sets, time_graph, time_stream

comptime TYPE = DType.bfloat16


@fieldwise_init
struct Case(Copyable, Movable):
    """A named problem."""

    var name: String
    var problem: ConvProblem


def parse(line: String) raises -> Case:
    """Reads a line of input."""
    var words = line.split()
    if len(words) != PROBLEM_NUMBERS + 1:
        raise Error(
            t"{len(words)} words, {PROBLEM_NUMBERS + 1} expected: {line}"
        )
    return Case(
        String(words[0]),
        ConvProblem.of_numbers([Int(word) for word in words[1:]]),
    )


def filled(
    ctx: DeviceContext, count: Int, seed: Int
) raises -> DeviceBuffer[TYPE]:
    """A buffer of random values."""
    var buffer = ctx.enqueue_create_buffer[TYPE](count)
    put_random(ctx, buffer, seed)
    return buffer^


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
        var x, w, y = elements_of(p)
        var sets = input_sets(2 * (x + 2 * y))
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
            bias=reads_of(self.bias[index]),
            residual=reads_of(self.residual[index]),
            beta=1.0,
            activation=Activation(
                ACTIVATION_SILU if fused else ACTIVATION_NONE, 0, 0
            ),
            final_activation=Activation(ACTIVATION_NONE, 0, 0),
        )
        var stream = Stream(ctx)
        convolve[
            kernels=ALL_KERNELS, known=UNKNOWN_FILTER, scaled=False
        ](
            stream,
            p,
            Arguments(
                MemoryActivation[TYPE](reads_of(self.x[index])),
                reads_of(self.w[index]),
                epilogue,
                MemoryOutput[TYPE](data_of(self.y[index])),
            ),
            requested=KERNEL_AUTO,
            exact=False,
        )


def time_case(
    ctx: DeviceContext, named: Case, operands: Operands, fused: Bool
) raises:
    """Times a problem both ways, and prints a line."""
    var p = named.problem
    var sets = len(operands.x)

    def enqueue(target: DeviceContext, index: Int) raises {imm}:
        operands.launch(target, p, fused, index % sets)

    var replayed = time_graph[every_round=True](ctx, enqueue)
    var called = time_stream[every_round=True](ctx, enqueue)
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
