"""Checks kernels that overlap: convolutions that read what the one before them
has written.

    chain PROBLEMS    ends with 1 if an element is wrong

The lines of the file PROBLEMS are described in problems.mojo; the output of
each has its input's shape. For every two kernels that take a problem, a chain
of launches, the two in turns, is captured in a graph, in which a launch begins
before the last has ended (programmatic dependent launch). Each replay finds
the outputs poisoned, and every one is compared, exactly, with what the same
launches give when each waits for the last to end. Operands are random.
"""

from max.gpu.host import DeviceBuffer, DeviceContext
from std.sys import argv

from operations.conv.access import MemoryActivation, MemoryOutput
from operations.conv.fields import (
    KERNEL_DEPTHWISE,
    KERNEL_DIAGONAL,
    KERNEL_FEW_FILTERS,
    KERNEL_GROUPED,
    KERNEL_IMPLICIT_GEMM,
    KERNEL_REFERENCE,
    KERNEL_SM80,
    KERNEL_SM90,
    KERNEL_STEM,
    KERNEL_UNALIGNED,
    KERNEL_WINDOW,
)
from operations.conv.known import UNKNOWN_FILTER
from operations.conv.operands import Arguments, Operands, OperandTypes
from operations.conv.problem import ConvProblem
from operations.conv.kernel import kernel_name
from operations.conv.registry import ALL_KERNELS
from operations.nvidia.convolve import convolve
from operations.nvidia.device import device_of
from operations.nvidia.registry import GPU_REGISTRY
from operations.nvidia.stream import Stream
from operations.nvidia.stream_graph import StreamGraph
from buffers import (
    BLOCKS,
    data_of,
    elements_of,
    poison,
    put_random,
    reads_of,
)
from kernels import THREADS, compare
from problems import read_cases
from sm90 import nothing_fused

comptime TYPE = DType.bfloat16

comptime LINKS = 8
"""Launches of a chain."""

comptime REPLAYS = 20

comptime KERNELS: List[Int] = [
    KERNEL_SM90,
    KERNEL_UNALIGNED,
    KERNEL_SM80,
    KERNEL_STEM,
    KERNEL_WINDOW,
    KERNEL_DIAGONAL,
    KERNEL_FEW_FILTERS,
    KERNEL_DEPTHWISE,
    KERNEL_GROUPED,
    KERNEL_IMPLICIT_GEMM,
    KERNEL_REFERENCE,
]


struct Chain:
    """A problem's filter, and the values between the launches."""

    var problem: ConvProblem
    var filter: DeviceBuffer[TYPE]
    var values: List[DeviceBuffer[TYPE]]
    """The input, then each launch's output."""

    def __init__(out self, ctx: DeviceContext, problem: ConvProblem) raises:
        """Allocates, and fills filter and input.

        Args:
            ctx: The device.
            problem: The convolution.

        Raises:
            If output and input differ in shape.
        """
        var x, w, y = elements_of(problem)
        if problem.output != problem.input or x != y:
            raise Error(t"{problem}: output and input differ in shape")
        self.problem = problem
        self.filter = ctx.enqueue_create_buffer[TYPE](w)
        self.values = List[DeviceBuffer[TYPE]]()
        for _ in range(LINKS + 1):
            self.values.append(ctx.enqueue_create_buffer[TYPE](x))
        put_random(ctx, self.values[0], 1)
        put_random(ctx, self.filter, 2)

    def spoil(self, ctx: DeviceContext) raises:
        """Poisons all outputs."""
        for i in range(LINKS):
            poison(ctx, self.values[i + 1])
        ctx.synchronize()

    def launch(self, mut stream: Stream, kernel: Int, link: Int) raises:
        """Enqueues a launch of the chain.

        Args:
            stream: Where.
            kernel: Which kernel.
            link: Which launch.
        """
        convolve[kernels=ALL_KERNELS, known=UNKNOWN_FILTER, scaled=False](
            stream,
            self.problem,
            Arguments(
                MemoryActivation(reads_of(self.values[link])),
                reads_of(self.filter),
                nothing_fused[TYPE](),
                MemoryOutput(data_of(self.values[link + 1])),
            ),
            requested=kernel,
            exact=False,
        )

    def wrong(self, ctx: DeviceContext, expected: Chain) raises -> Int:
        """How many elements of the outputs are not as expected.

        Args:
            ctx: The device.
            expected: A chain of the same problem, each launch of which has
                waited.
        """
        var counts = ctx.enqueue_create_buffer[DType.uint32](2)
        counts.enqueue_fill(0)
        for i in range(LINKS):
            ctx.enqueue_function[compare[TYPE]](
                expected.values[i + 1],
                self.values[i + 1],
                Int64(len(self.values[i + 1])),
                counts,
                counts.create_sub_buffer[DType.uint32](1, 1),
                grid_dim=BLOCKS,
                block_dim=THREADS,
            )
        with counts.map_to_host() as found:
            return Int(found[0])


def check_pair(
    ctx: DeviceContext, problem: ConvProblem, first: Int, second: Int
) raises -> Int:
    """Checks a chain of two kernels in turns; returns how many elements of all
    replays are wrong."""
    var expected = Chain(ctx, problem)
    var found = Chain(ctx, problem)
    expected.spoil(ctx)
    var stream = Stream(ctx)
    stream.overlaps = False
    for i in range(LINKS):
        expected.launch(stream, first if i % 2 == 0 else second, i)
        ctx.synchronize()

    def enqueue(mut captured: Stream) raises {imm}:
        for i in range(LINKS):
            found.launch(captured, first if i % 2 == 0 else second, i)

    var graph = StreamGraph(ctx, enqueue)
    var wrong = 0
    for _ in range(REPLAYS):
        found.spoil(ctx)
        _ = graph.seconds(1)
        wrong += found.wrong(ctx, expected)
    return wrong


def main() raises:
    var ctx = DeviceContext()
    var device = device_of(ctx)
    comptime types = OperandTypes.unfused(TYPE, TYPE)
    var ran = 0
    var failed = 0
    for named in read_cases(String(argv()[1])):
        var taking = List[Int]()
        for kernel in materialize[KERNELS]():
            if not GPU_REGISTRY.refusal[types](
                kernel, named.problem, Operands.bare(types), device
            ):
                taking.append(kernel)
        for first in taking:
            for second in taking:
                var wrong = check_pair(ctx, named.problem, first, second)
                ran += 1
                if wrong > 0:
                    failed += 1
                    print(
                        named.name,
                        kernel_name(first),
                        kernel_name(second),
                        "WRONG:",
                        wrong,
                        "elements",
                    )
        print(named.name, len(taking), "kernels")
    if failed > 0:
        raise Error(t"{failed} of {ran} chains wrong")
    print(ran, "chains, END")
