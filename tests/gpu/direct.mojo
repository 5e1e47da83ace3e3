"""Checks and times Hopper's kernels for few input channels, for few filters, for
depthwise convolutions, for groups of few channels and for few pixels, of windows, and
the implicit GEMM of any GPU, on the problems of a file.

    direct check direct_check.txt    every element of every problem, each on every kernel that takes it, with an
                                     epilogue, without, and with fused work; ends with 1 if one is wrong
    direct time direct_time.txt      milliseconds of a launch, bare and with bias, SiLU and residual
    direct windows window_time.txt 1.3   of the tilings of Hopper's window kernel of which its model says no more than
                                     1.3 times the least, bare, with what it says

A line is a name, then batch, depth, height, width, channels, filters, groups,
filter (t, r, s), strides, dilations (d, h, w each), padding (before and after
along d, then h, then w). Empty lines and those that begin with # are skipped.

Activations, filters, biases and residuals are small integers when checked, so
that the sums are exact in float32 in any order, and only the rounding to the
output's type is left. All also get infinities and not-a-numbers, which must stay in
their groups and pixels, and SiLU, which is compared within the rounding of the output's type. Outputs are poisoned before each of several launches and
lie between guards. Times are medians of replays of a graph of launches on
random data, over several input sets that together exceed the L2.
"""

from max.gpu.host import DeviceAttribute, DeviceBuffer, DeviceContext
from std.builtin.device_passable import DeviceTypeEncoder
from std.collections import Optional
from std.sys import argv
from std.sys.info import size_of
from std.utils import IndexList

from operations.conv.access import (
    ComputedOutput,
    MemoryActivation,
    MemoryOutput,
    OutputTarget,
)
from operations.conv.epilogue import Activation, Epilogue
from operations.conv.fields import (
    ACTIVATION_LEAKY_RELU,
    ACTIVATION_NONE,
    ACTIVATION_RELU,
    ACTIVATION_SILU,
    KERNEL_AUTO,
    KERNEL_DEPTHWISE,
    KERNEL_DIAGONAL,
    KERNEL_GEMV,
    KERNEL_SM80,
    KERNEL_STEM,
    KERNEL_WINDOW,
)
from operations.conv.memory import Reads, Writes
from operations.conv.problem import SPATIAL, ConvProblem
from operations.conv.known import UNKNOWN_FILTER
from operations.conv.operands import Arguments, Operands as Facts, OperandTypes
from operations.conv.kernel import kernel_name
from operations.nvidia.convolve import convolve
from operations.nvidia.device import device_of
from operations.nvidia.registry import GPU_REGISTRY
from operations.nvidia.sm90.window.launch import Window, WindowPlan
from operations.nvidia.sm90.window.model import (
    all_tilings,
    fastest_tiling,
    tiled,
)
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
from direct_oracle import convolve_naively, mark_not_numbers, plant
from epilogues import AddFilter
from kernels import THREADS, compare, compare_closely
from timing import input_sets, time_captured

comptime REPEATS = 5
"""Launches of a checked kernel."""

comptime KERNELS = [
    KERNEL_DEPTHWISE,
    KERNEL_GEMV,
    KERNEL_STEM,
    KERNEL_DIAGONAL,
    KERNEL_WINDOW,
    KERNEL_SM80,
]
"""Kernels that a problem is offered to."""

comptime BARE = 0
comptime FUSED = 1
comptime LAMBDA = 2
comptime NOT_FINITE = 3
comptime SMOOTH = 4
comptime KINDS = 5
"""Without an epilogue; with one; with one and work of the graph; without, of
activations some of which are not finite; with bias, SiLU and residual, within
the rounding of the output's type."""


@fieldwise_init
struct Case(Copyable, Movable):
    """A named problem."""

    var name: String
    var problem: ConvProblem


def parse(line: String) raises -> Case:
    """Reads a line of input."""
    var words = line.split()
    if len(words) != 23:
        raise Error(t"{len(words)} words, 23 expected: {line}")
    var v = List[Int]()
    for i in range(1, len(words)):
        v.append(Int(words[i]))
    var problem = ConvProblem(
        spatial_rank=3,
        batch=v[0],
        channels=v[4],
        filters=v[5],
        groups=v[6],
        input=IndexList[SPATIAL](v[1], v[2], v[3]),
        filter=IndexList[SPATIAL](v[7], v[8], v[9]),
        output=IndexList[SPATIAL](fill=1),
        stride=IndexList[SPATIAL](v[10], v[11], v[12]),
        dilation=IndexList[SPATIAL](v[13], v[14], v[15]),
        pad_before=IndexList[SPATIAL](v[16], v[18], v[20]),
        pad_after=IndexList[SPATIAL](v[17], v[19], v[21]),
    )
    for axis in range(SPATIAL):
        problem.output[axis] = problem.expected_output(axis)
    problem.validate(1, problem.filters * problem.gemm_k(), DType.float32)
    return Case(String(words[0]), problem)


def refusal_of[
    dtype: DType
](ctx: DeviceContext, kernel: Int, problem: ConvProblem) raises -> Optional[
    String
]:
    """Why a kernel cannot take a problem."""
    comptime types = OperandTypes.unfused(dtype, dtype)
    return GPU_REGISTRY.refusal[types](
        kernel, problem, Facts.bare(types), device_of(ctx)
    )


def launch[
    dtype: DType, Output: OutputTarget, //, kernel: Int
](
    mut stream: Stream,
    problem: ConvProblem,
    activation: Reads[dtype],
    filter: Reads[dtype],
    epilogue: Epilogue[DType.float32, dtype],
    output: Output,
) raises:
    """Enqueues a kernel."""
    convolve[kernels=1 << kernel, known=UNKNOWN_FILTER, scaled=False](
        stream,
        problem,
        Arguments(
            MemoryActivation[dtype](activation), filter, epilogue, output
        ),
        requested=kernel,
        exact=False,
    )


struct Operands[dtype: DType](Copyable, Movable):
    """A problem's operands on the device.

    Parameters:
        dtype: Of all but scale and bias.
    """

    var activation: DeviceBuffer[Self.dtype]
    var filter: DeviceBuffer[Self.dtype]
    var scale: DeviceBuffer[DType.float32]
    var bias: DeviceBuffer[DType.float32]
    var residual: DeviceBuffer[Self.dtype]
    var output: DeviceBuffer[Self.dtype]

    def __init__(out self, ctx: DeviceContext, problem: ConvProblem) raises:
        """Allocates, the output between guards."""
        var x, w, y = elements_of(problem)
        self.activation = ctx.enqueue_create_buffer[Self.dtype](x)
        self.filter = ctx.enqueue_create_buffer[Self.dtype](w)
        self.scale = ctx.enqueue_create_buffer[DType.float32](problem.filters)
        self.bias = ctx.enqueue_create_buffer[DType.float32](problem.filters)
        self.residual = ctx.enqueue_create_buffer[Self.dtype](y)
        self.output = ctx.enqueue_create_buffer[Self.dtype](y + 2 * GUARD)

    def fill_integers(self, ctx: DeviceContext) raises:
        """Fills the inputs with small integers."""
        put_integers(ctx, self.activation, 3, 1)
        put_integers(ctx, self.filter, 2, 2)
        put_integers(ctx, self.bias, 9, 3)
        put_integers(ctx, self.residual, 8, 4)
        put_integers(ctx, self.scale, 2, 5)

    def fill_random(self, ctx: DeviceContext, seed: Int) raises:
        """Fills the inputs at random."""
        put_random(ctx, self.activation, seed)
        put_random(ctx, self.filter, seed + 100)
        put_random(ctx, self.bias, seed + 200)
        put_random(ctx, self.residual, seed + 300)

    def epilogue(
        self,
        fused: Bool,
        activation: Int,
        final_activation: Int,
        scaled: Bool = False,
    ) -> Epilogue[DType.float32, Self.dtype]:
        """Scale if `scaled`, bias, activation, half the residual, final
        activation; or nothing."""
        return Epilogue[DType.float32, Self.dtype](
            has_bias=fused,
            has_residual=fused,
            has_scale=scaled,
            scale=reads_of(self.scale),
            bias=reads_of(self.bias),
            residual=reads_of(self.residual),
            beta=0.5,
            activation=Activation(
                activation if fused else ACTIVATION_NONE, 0.5, 0.0
            ),
            final_activation=Activation(
                final_activation if fused else ACTIVATION_NONE, 0.0, 0.0
            ),
        )


def _each[
    dtype: DType, //, kernel: def(Writes[dtype], Int64) thin -> None
](ctx: DeviceContext, buffer: DeviceBuffer[dtype]) raises:
    """Runs a kernel on a buffer's elements."""
    ctx.enqueue_function[kernel](
        data_of(buffer),
        Int64(len(buffer)),
        grid_dim=BLOCKS,
        block_dim=THREADS,
    )


def check[
    dtype: DType, kernel: Int, kind: Int
](ctx: DeviceContext, problem: ConvProblem) raises -> String:
    """Runs a kernel, and compares with the naive convolution.

    Returns:
        "ok", or what is wrong.
    """
    var operands = Operands[dtype](ctx, problem)
    operands.fill_integers(ctx)
    comptime if kind == NOT_FINITE:
        _each[plant[dtype]](ctx, operands.activation)
    var epilogue = operands.epilogue(
        kind == FUSED or kind == LAMBDA or kind == SMOOTH,
        ACTIVATION_SILU if kind == SMOOTH else ACTIVATION_LEAKY_RELU,
        ACTIVATION_NONE if kind == SMOOTH else ACTIVATION_RELU,
        scaled=kind == FUSED or kind == LAMBDA,
    )
    var expected = ctx.enqueue_create_buffer[dtype](len(operands.output))
    poison(ctx, expected)
    ctx.enqueue_function[convolve_naively[dtype, DType.float32, dtype]](
        reads_of(operands.activation),
        reads_of(operands.filter),
        epilogue,
        data_of(expected, GUARD),
        problem,
        Int32(1 if kind == LAMBDA else 0),
        grid_dim=BLOCKS,
        block_dim=THREADS,
    )
    comptime if kind == NOT_FINITE:
        _each[mark_not_numbers[dtype]](ctx, expected)
    var counts = ctx.enqueue_create_buffer[DType.uint32](2)
    counts.enqueue_fill(0)
    counts.create_sub_buffer[DType.uint32](1, 1).enqueue_fill(UInt32.MAX)
    var stream = Stream(ctx)
    for _ in range(REPEATS):
        poison(ctx, operands.output)
        var data = data_of(operands.output, GUARD)
        comptime if kind == LAMBDA:
            launch[kernel](
                stream,
                problem,
                reads_of(operands.activation),
                reads_of(operands.filter),
                epilogue,
                ComputedOutput[dtype, 5, AddFilter](data, AddFilter(1)),
            )
        else:
            launch[kernel](
                stream,
                problem,
                reads_of(operands.activation),
                reads_of(operands.filter),
                epilogue,
                MemoryOutput[dtype](data),
            )
        comptime if kind == NOT_FINITE:
            _each[mark_not_numbers[dtype]](ctx, operands.output)
        comptime if kind == SMOOTH:
            # Both are rounded; SiLU of 16 bits may be off by 1.1e-5.
            comptime place = 1 << (
                7 if dtype
                == DType.bfloat16 else 10 if dtype
                == DType.float16 else 16
            )
            ctx.enqueue_function[compare_closely[dtype]](
                expected,
                operands.output,
                Int64(len(operands.output)),
                Float32(1.0 / Float64(place) + 2e-4),
                counts,
                counts.create_sub_buffer[DType.uint32](1, 1),
                grid_dim=BLOCKS,
                block_dim=THREADS,
            )
        else:
            ctx.enqueue_function[compare[dtype]](
                expected,
                operands.output,
                Int64(len(operands.output)),
                counts,
                counts.create_sub_buffer[DType.uint32](1, 1),
                grid_dim=BLOCKS,
                block_dim=THREADS,
            )
    with counts.map_to_host() as found:
        if found[0] == 0:
            return "ok"
        var pixel, filter = divmod(Int(found[1]) - GUARD, problem.filters)
        return String(
            t"WRONG: {found[0]} elements of {REPEATS} launches, the first of"
            t" pixel {pixel}, filter {filter}"
        )


def check_case[
    dtype: DType, kernel: Int
](ctx: DeviceContext, named: Case) raises -> Tuple[Int, Int]:
    """Checks a problem on a kernel.

    Returns:
        How many checks ran, and how many were wrong.
    """
    var ran = 0
    var wrong = 0
    if not refusal_of[dtype](ctx, kernel, named.problem):
        comptime for kind in range(KINDS):
            comptime half = dtype == DType.bfloat16
            comptime if kind != LAMBDA or half:
                var result = check[dtype, kernel, kind](ctx, named.problem)
                ran += 1
                if result != "ok":
                    wrong += 1
                    print(named.name, kernel_name(kernel), dtype, kind, result)
    return ran, wrong


def time_of[
    kernel: Int
](ctx: DeviceContext, problem: ConvProblem, fused: Bool) raises -> Float64:
    """The time of a launch, in milliseconds: the median of graph replays."""
    comptime dtype = DType.bfloat16
    var x, w, y = elements_of(problem)
    var set_bytes = 2 * (x + w + (2 * y if fused else y))
    var count = input_sets(set_bytes)
    var sets = List[Operands[dtype]]()
    for i in range(count):
        sets.append(Operands[dtype](ctx, problem))
        sets[i].fill_random(ctx, 1000 * i)

    def enqueue(mut stream: Stream, index: Int) raises {imm}:
        ref operands = sets[index % count]
        launch[kernel](
            stream,
            problem,
            reads_of(operands.activation),
            reads_of(operands.filter),
            operands.epilogue(fused, ACTIVATION_SILU, ACTIVATION_NONE),
            MemoryOutput[dtype](data_of(operands.output, GUARD)),
        )

    return time_captured(ctx, enqueue)


def time_case[kernel: Int](ctx: DeviceContext, named: Case) raises:
    """Times a problem on a kernel, if it takes it."""
    comptime dtype = DType.bfloat16
    if refusal_of[dtype](ctx, kernel, named.problem):
        return
    var x, w, y = elements_of(named.problem)
    comptime types = OperandTypes.unfused(dtype, dtype)
    var operands, device = Facts.bare(types), device_of(ctx)
    var planned = GPU_REGISTRY.plan[types](
        kernel, named.problem, operands, device
    )
    var what = GPU_REGISTRY.explain[types](
        planned, kernel, named.problem, operands, device
    )
    for fused in range(2):
        var ms = time_of[kernel](ctx, named.problem, fused == 1)
        var bytes = 2 * (x + w + (2 * y if fused == 1 else y))
        print(
            named.name,
            "fused" if fused == 1 else "bare",
            round(ms * 1e4) / 1e4,
            "ms",
            round(Float64(bytes) / ms / 1e7) / 100,
            "TB/s |",
            what,
        )


def time_windows(ctx: DeviceContext, named: Case, most: Float64) raises:
    """Times a problem with the tilings of Hopper's window kernel whose model's
    time is up to `most` times the least."""
    comptime dtype = DType.bfloat16
    ref problem = named.problem
    if refusal_of[dtype](ctx, KERNEL_WINDOW, problem):
        return
    var x, w, y = elements_of(problem)
    var facts = Facts.bare(OperandTypes.unfused(dtype, dtype))
    var device = device_of(ctx)
    var count = input_sets(2 * (x + w + y))
    var sets = List[Operands[dtype]]()
    for i in range(count):
        sets.append(Operands[dtype](ctx, problem))
        sets[i].fill_random(ctx, 1000 * i)
    var least = fastest_tiling(problem, facts, device).seconds
    for tiling in all_tilings(problem, facts):
        var tried = tiled(problem, facts, device, tiling)
        if tried.seconds > most * least:
            continue
        var plan = WindowPlan(problem, tried, device.units)

        def enqueue(mut stream: Stream, index: Int) raises {imm}:
            ref operands = sets[index % count]
            Window.launch[known=UNKNOWN_FILTER, scaled=False](
                plan,
                problem,
                Arguments(
                    MemoryActivation[dtype](reads_of(operands.activation)),
                    reads_of(operands.filter),
                    operands.epilogue(False, ACTIVATION_NONE, ACTIVATION_NONE),
                    MemoryOutput[dtype](data_of(operands.output, GUARD)),
                ),
                stream,
            )

        var ms = time_captured(ctx, enqueue)
        print(named.name, round(ms * 1e4) / 10, "us |", plan)


def main() raises:
    var mode = String(argv()[1])
    var ctx = DeviceContext()
    var text: String
    with open(String(argv()[2]), "r") as file:
        text = file.read()
    var ran = 0
    var wrong = 0
    for line in text.splitlines():
        if line == "" or line.startswith("#"):
            continue
        var named = parse(String(line))
        if mode == "time":
            comptime for i in range(len(KERNELS)):
                time_case[KERNELS[i]](ctx, named)
            continue
        if mode == "windows":
            time_windows(ctx, named, Float64(String(argv()[3])))
            continue
        var before = ran
        comptime for dtype in [DType.bfloat16, DType.float16, DType.float32]:
            comptime for kernel in KERNELS:
                comptime on_tensor_cores = (
                    kernel == KERNEL_STEM or kernel == KERNEL_DIAGONAL
                )
                comptime if dtype != DType.float32 or not on_tensor_cores:
                    var checks, failures = check_case[dtype, kernel](ctx, named)
                    ran += checks
                    wrong += failures
        if ran == before:
            raise Error(t"{named.name}: no kernel takes it")
    if wrong > 0:
        raise Error(t"{wrong} of {ran} checks wrong")
    print(ran, "checks, END")
