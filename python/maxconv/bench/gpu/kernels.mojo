"""Runs maxconv's convolutions on a GPU, as `maxconv bench` asks over a pipe.

Reads lines, and answers each with one line of JSON: what was asked for, or
`{"error": ...}`. `WORK` is `bare`, the convolution alone, or `fused`, with
bias, SiLU and a residual; of int8 also `interleaved` and `interleaved-fused`,
the same with all tensors of several channels in NC/4HW4.

    problem NUMBERS SETS EXPONENT FILTER_EXPONENT [SCALE_EXPONENT]
                                makes so many sets of operands
    prepare WORK LAUNCHES       captures a graph of launches, each on the next set
    sample WORK COUNT           elements of the first set's output, evenly spread
    replay WORK TIMES           ns on the device of so many replays of the graph
    launch WORK TIMES           ns on the host of as many launches, one by one

NUMBERS are those of `ConvProblem.of_numbers`. Channels are innermost, filters
in the kernels' order. Values are those of `operands.py`. Activation and filter
are of the type that the program is built for; if it has 8 bits, filters have a
scale each, and the rest is bfloat16.
"""

from max.gpu import block_dim, block_idx, grid_dim, thread_idx
from max.gpu.host import DeviceBuffer, DeviceContext
from std.memory import bitcast
from std.sys import get_defined_dtype
from std.sys.info import size_of
from std.time import perf_counter_ns

from operations.conv.access import MemoryActivation, MemoryOutput
from operations.conv.epilogue import Activation, Epilogue
from operations.conv.fields import (
    ACTIVATION_NONE,
    ACTIVATION_SILU,
    INTERLEAVED,
    KERNEL_AUTO,
)
from operations.conv.known import UNKNOWN_FILTER
from operations.conv.memory import Reads, Writes
from operations.conv.operands import Arguments
from operations.conv.problem import PROBLEM_NUMBERS, SPATIAL, ConvProblem
from operations.conv.registry import ALL_KERNELS
from operations.nvidia.convolve import convolve
from operations.nvidia.stream import Stream
from operations.nvidia.stream_graph import StreamGraph
from requests import Requests

comptime TYPE = get_defined_dtype["dtype", DType.bfloat16]()
"""Storage type of activation and filter."""

comptime SCALED = size_of[TYPE]() == 1
"""Whether each filter has a scale."""

comptime OUT_TYPE = DType.bfloat16 if SCALED else TYPE
"""Storage type of bias, residual and output."""

comptime SEEDS = 4
"""Seeds of a set of operands, as in `operands.py`."""

comptime THREADS = 256
"""Threads of a block that fills a buffer."""

comptime BLOCKS = 1024
"""Blocks of a grid that fills a buffer."""


@always_inline
def mixed(index: Int, seed: Int) -> UInt32:
    """Mixes the bits of an index (the finalizer of MurmurHash3)."""
    var h = UInt32(index) ^ (UInt32(seed) * 0x9E3779B9)
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    return h ^ (h >> 16)


@always_inline
def value_of[
    dtype: DType
](index: Int, seed: Int, scale: Float32) -> Scalar[dtype]:
    """The sum of a hash's bytes less its mean, times a power of two; of int8
    the floor of a quarter."""
    var h = mixed(index, seed)
    var sum = (h & 255) + ((h >> 8) & 255) + ((h >> 16) & 255) + (h >> 24)
    var value = Int32(sum) - 510
    comptime if dtype == DType.int8:
        return (value >> 2).cast[dtype]()
    return (Float32(value) * scale).cast[dtype]()


def power_of_two(exponent: Int) -> Float32:
    """A power of two, exactly."""
    var power = Float32(1)
    for _ in range(abs(exponent)):
        power *= Float32(2.0) if exponent > 0 else Float32(0.5)
    return power


def fill[
    dtype: DType
](
    data: Pointer[Scalar[dtype], MutAnyOrigin],
    count: Int64,
    seed: Int32,
    scale: Float32,
):
    """Fills a buffer."""
    var first = Int(block_idx.x) * THREADS + Int(thread_idx.x)
    for i in range(first, Int(count), Int(grid_dim.x) * THREADS):
        data[unsafe_offset=i] = value_of[dtype](i, Int(seed), scale)


def fill_scale(
    data: Pointer[Float32, MutAnyOrigin], count: Int64, scale: Float32
):
    """Fills a buffer with a scale, its half and its quarter in turn."""
    var first = Int(block_idx.x) * THREADS + Int(thread_idx.x)
    for i in range(first, Int(count), Int(grid_dim.x) * THREADS):
        data[unsafe_offset=i] = scale / Float32(1 << (i % 3))


def gather(
    data: Pointer[Scalar[OUT_TYPE], MutAnyOrigin],
    values: Pointer[Float32, MutAnyOrigin],
    step: Int64,
    count: Int64,
):
    """Copies each `step`-th element."""
    var first = Int(block_idx.x) * THREADS + Int(thread_idx.x)
    for i in range(first, Int(count), Int(grid_dim.x) * THREADS):
        values[unsafe_offset=i] = data[unsafe_offset=i * Int(step)].cast[
            DType.float32
        ]()


def filled[
    dtype: DType
](
    ctx: DeviceContext, count: Int, seed: Int, scale: Float32
) raises -> DeviceBuffer[dtype]:
    """A buffer of random values."""
    var buffer = ctx.enqueue_create_buffer[dtype](count)
    ctx.enqueue_function[fill[dtype]](
        buffer,
        Int64(count),
        Int32(seed),
        scale,
        grid_dim=BLOCKS,
        block_dim=THREADS,
    )
    return buffer^


def data_of[dtype: DType](buffer: DeviceBuffer[dtype]) -> Writes[dtype]:
    """A buffer's elements."""
    return (
        buffer.unsafe_ptr()
        .unsafe_mut_cast[True]()
        .unsafe_origin_cast[MutUntrackedOrigin]()
    )


def reads_of[dtype: DType](buffer: DeviceBuffer[dtype]) -> Reads[dtype]:
    """A buffer's elements, to read."""
    return data_of(buffer).as_imm().unsafe_origin_cast[ImmUntrackedOrigin]()


@fieldwise_init
struct Work(ImplicitlyCopyable, Movable):
    """What is computed."""

    comptime KINDS = 4
    """How many there are."""

    var fused: Bool
    """Whether with bias, SiLU and residual."""
    var interleaved: Bool
    """Whether tensors lie in NC/4HW4."""

    @staticmethod
    def of(word: String) raises -> Self:
        """The work of a word.

        Args:
            word: Behind the request.
        """
        var fused = word.endswith("fused")
        var interleaved = word.startswith("interleaved")
        if (
            word != "bare"
            and word != "fused"
            and word != "interleaved"
            and word != "interleaved-fused"
        ):
            raise Error(t"{word} is no work")
        return Self(fused, interleaved)

    def place(self) -> Int:
        """Its number, below `KINDS`."""
        return Int(self.fused) + 2 * Int(self.interleaved)


struct Operands(Movable):
    """Sets of a problem's operands, which launches take in turn."""

    var problem: ConvProblem
    var x: List[DeviceBuffer[TYPE]]
    var filter: List[DeviceBuffer[TYPE]]
    var scale: DeviceBuffer[DType.float32]
    var bias: List[DeviceBuffer[OUT_TYPE]]
    var residual: List[DeviceBuffer[OUT_TYPE]]
    var y: List[DeviceBuffer[OUT_TYPE]]

    def __init__(out self, ctx: DeviceContext, words: List[Int]) raises:
        """Makes them.

        Args:
            ctx: The device.
            words: The numbers of the line `problem`.
        """
        var numbers = List[Int]()
        for i in range(PROBLEM_NUMBERS):
            numbers.append(words[i])
        var p = ConvProblem.of_numbers(numbers)
        var pixels = p.batch
        for axis in range(SPATIAL):
            pixels *= p.input[axis]
        var outputs = p.gemm_m() * p.filters
        var scale = power_of_two(words[PROBLEM_NUMBERS + 1])
        var filter_scale = power_of_two(words[PROBLEM_NUMBERS + 2])
        self.problem = p
        self.x = List[DeviceBuffer[TYPE]]()
        self.filter = List[DeviceBuffer[TYPE]]()
        self.bias = List[DeviceBuffer[OUT_TYPE]]()
        self.residual = List[DeviceBuffer[OUT_TYPE]]()
        self.y = List[DeviceBuffer[OUT_TYPE]]()
        self.scale = ctx.enqueue_create_buffer[DType.float32](p.filters)
        comptime if SCALED:
            ctx.enqueue_function[fill_scale](
                self.scale,
                Int64(p.filters),
                power_of_two(words[PROBLEM_NUMBERS + 3]),
                grid_dim=1,
                block_dim=THREADS,
            )
        for i in range(words[PROBLEM_NUMBERS]):
            var seed = SEEDS * i
            var taps = p.filters * p.gemm_k()
            self.x.append(filled[TYPE](ctx, pixels * p.channels, seed, scale))
            self.filter.append(filled[TYPE](ctx, taps, seed + 1, filter_scale))
            self.bias.append(filled[OUT_TYPE](ctx, p.filters, seed + 2, scale))
            self.residual.append(
                filled[OUT_TYPE](ctx, outputs, seed + 3, scale)
            )
            self.y.append(ctx.enqueue_create_buffer[OUT_TYPE](outputs))

    def launch(self, mut stream: Stream, work: Work, index: Int) raises:
        """Enqueues one convolution.

        Args:
            stream: Where.
            work: What is computed.
            index: Of the launch; the sets take turns.
        """
        comptime if TYPE == DType.int8:
            if work.interleaved:
                self._launch[INTERLEAVED](stream, work.fused, index)
                return
        if work.interleaved:
            raise Error(t"NC/4HW4 takes int8, not {TYPE}")
        self._launch[0](stream, work.fused, index)

    def _launch[
        block: Int
    ](self, mut stream: Stream, fused: Bool, index: Int) raises:
        """Enqueues one convolution, in blocks of so many channels or with
        channels last."""
        var set = index % len(self.x)
        convolve[kernels=ALL_KERNELS, known=UNKNOWN_FILTER, scaled=SCALED](
            stream,
            self.problem,
            Arguments(
                MemoryActivation[TYPE, block](reads_of(self.x[set])),
                reads_of(self.filter[set]),
                self.epilogue(fused, set),
                MemoryOutput[OUT_TYPE](data_of(self.y[set])),
            ),
            requested=KERNEL_AUTO,
            exact=False,
        )

    def epilogue(self, fused: Bool, set: Int) -> Epilogue[OUT_TYPE, OUT_TYPE]:
        """What is done to sums.

        Args:
            fused: Whether bias, SiLU and residual are.
            set: Of operands.
        """
        return Epilogue[OUT_TYPE, OUT_TYPE](
            has_bias=fused,
            has_residual=fused,
            has_scale=SCALED,
            scale=reads_of(self.scale),
            bias=reads_of(self.bias[set]),
            residual=reads_of(self.residual[set]),
            beta=1.0,
            activation=Activation(
                ACTIVATION_SILU if fused else ACTIVATION_NONE, 0, 0
            ),
            final_activation=Activation(ACTIVATION_NONE, 0, 0),
        )


def captured(
    ctx: DeviceContext, operands: Operands, work: Work, launches: Int
) raises -> StreamGraph:
    """A graph of launches, captured as PyTorch captures one.

    Args:
        ctx: The device.
        operands: Their operands.
        work: What is computed.
        launches: How many.
    """
    var first = Stream(ctx)
    operands.launch(first, work, 0)

    def enqueue(mut stream: Stream) raises {imm}:
        for i in range(launches):
            operands.launch(stream, work, i)

    var graph = StreamGraph(ctx, enqueue)
    # The first replay uploads it, which no estimate should contain.
    _ = graph.seconds(1)
    return graph^


def sample(
    ctx: DeviceContext, operands: Operands, work: Work, count: Int
) raises -> String:
    """The answer to `sample`."""
    var stream = Stream(ctx)
    operands.launch(stream, work, 0)
    var elements = len(operands.y[0])
    var step = max(1, elements // count)
    var taken = min(count, (elements + step - 1) // step)
    var found = ctx.enqueue_create_buffer[DType.float32](taken)
    ctx.enqueue_function[gather](
        operands.y[0],
        found,
        Int64(step),
        Int64(taken),
        grid_dim=BLOCKS,
        block_dim=THREADS,
    )
    var values = String()
    with found.map_to_host() as host:
        for i in range(taken):
            if i:
                values += ", "
            # As bits: Mojo's shortest decimals of float32 are not always the
            # number's own.
            values += String(bitcast[DType.int32](host[i]))
    return String(t'{{"step": {step}, "values": [{values}]}}')


def replayed(graph: StreamGraph, times: Int) raises -> String:
    """The answer to `replay`."""
    return String(t'{{"ns": {Int(graph.seconds(times) * 1e9)}}}')


def launched(
    ctx: DeviceContext, operands: Operands, work: Work, launches: Int
) raises -> String:
    """The answer to `launch`."""
    var stream = Stream(ctx)
    ctx.synchronize()
    var begin = perf_counter_ns()
    for i in range(launches):
        operands.launch(stream, work, i)
    ctx.synchronize()
    return String(t'{{"ns": {perf_counter_ns() - begin}}}')


def said(error: Error) -> String:
    """An error as an answer."""
    var words = String(error).replace("\\", "/").replace('"', "'")
    return String(t'{{"error": "{words.replace(chr(10), chr(32))}"}}')


def integers(words: List[String]) raises -> List[Int]:
    """The words behind the first as numbers."""
    var numbers = List[Int]()
    for i in range(1, len(words)):
        numbers.append(Int(words[i]))
    return numbers^


def words_of(line: String) -> List[String]:
    """A line's words."""
    var words = List[String]()
    for word in line.split():
        words.append(String(word))
    return words^


def serve(
    ctx: DeviceContext, requests: Requests, first: String
) raises -> String:
    """Answers a line `problem` and those behind it.

    Args:
        ctx: The device.
        requests: The lines behind it.
        first: The line.

    Returns:
        The next line `problem`.
    """
    var operands = Operands(ctx, integers(words_of(first)))
    ctx.synchronize()
    print("{}", flush=True)
    var graphs = List[StreamGraph]()
    var places = List[Int](length=Work.KINDS, fill=-1)
    var launches = List[Int](length=Work.KINDS, fill=0)
    while True:
        var line = requests.next()
        var words = words_of(line)
        if words[0] == "problem":
            return line
        try:
            var work = Work.of(words[1])
            var number = Int(words[2])
            if words[0] == "prepare":
                graphs.append(captured(ctx, operands, work, number))
                places[work.place()] = len(graphs) - 1
                launches[work.place()] = number
                print("{}", flush=True)
            elif words[0] == "sample":
                print(sample(ctx, operands, work, number), flush=True)
            elif words[0] == "replay":
                var place = places[work.place()]
                print(replayed(graphs[place], number), flush=True)
            elif words[0] == "launch":
                var count = number * launches[work.place()]
                print(launched(ctx, operands, work, count), flush=True)
            else:
                raise Error(t"{words[0]} is no request")
        except error:
            print(said(error), flush=True)


def main() raises:
    try:
        var ctx = DeviceContext()
        print(t'{{"device": "{ctx.name()}"}}', flush=True)
        var requests = Requests()
        var line = requests.next()
        while True:
            try:
                line = serve(ctx, requests, line)
            except error:
                print(said(error), flush=True)
                line = requests.next()
    except error:
        print(said(error), flush=True)
