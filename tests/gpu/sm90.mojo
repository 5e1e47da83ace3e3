"""Checks and times the Hopper kernel's candidates.

    sm90 check|graph|graph+|stream|stream+ PROBLEMS [CANDIDATE...]
    sm90 graph/int8|graph/float8_e4m3fn|graph/float8_e5m2|graph/float32 PROBLEMS [CANDIDATE...]
    sm90 error PROBLEMS

The lines of the file PROBLEMS are described in problems.mojo.

`check` compares every output element, exactly, with a naive convolution:
activations and filters are small integers, so that products and sums are exact
in float32 in any order, and only the rounding to the output's type is left.
Outputs are poisoned before each of several launches and lie between guards.
Every candidate runs, with the whole sum, in relays where it can keep a pace, and with tiles that blocks share where it can cut
tiles, the choice, and sm80, which any GPU has. `graph` replays a graph of launches on random data, over
several input sets that together exceed the L2; `stream` enqueues them one by
one; + lets a launch begin before the last has ended; / names the type of the
operands, bfloat16 if nothing does. `error` says how far float32 outputs of
random operands of each type are from float32 sums: the norm of the difference
over that of the outputs.
"""

from max.gpu.host import DeviceAttribute, DeviceBuffer, DeviceContext
from std.math import sqrt
from std.sys import argv
from std.sys.info import size_of

from operations.conv.epilogue import Activation, Epilogue
from operations.conv.access import MemoryActivation, MemoryOutput
from operations.conv.fields import (
    ACTIVATION_NONE,
    KERNEL_SM80,
    KERNEL_SM90,
    KERNEL_UNALIGNED,
)
from operations.conv.memory import Reads, element_bytes
from operations.conv.problem import ConvProblem
from operations.nvidia.im2col.traversal import Traversal
from operations.conv.known import UNKNOWN_FILTER
from operations.conv.operands import Arguments, Device, Operands, OperandTypes
from operations.nvidia.convolve import convolve as convolve_chosen
from operations.nvidia.device import device_of
from operations.nvidia.legality import takes_mma_types
from operations.nvidia.sm80.geometry import mma_geometry_refusal
from operations.nvidia.sm90.gemm.candidates import CANDIDATES, TABLE, candidate
from operations.nvidia.sm90.gemm.legality import problem_refusal
from operations.nvidia.epilogue.conv_visitor import ConvVisitor
from operations.nvidia.sm90.gemm.launch import GemmOperands
from operations.nvidia.sm90.gemm.plan import (
    GemmCandidates,
    gemm_refusal,
    plan_gemm,
)
from operations.nvidia.sm90.gemm.config import SPLIT_COUNTS
from operations.nvidia.sm90.gemm.split_k import split_refusal
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
from kernels import THREADS, compare, convolve
from problems import Case, read_cases
from prepared import Prepared, whole_pieces
from timing import input_sets, time_captured, time_stream

comptime TIMED = DType.bfloat16
"""The type of timed outputs."""

comptime MEASURED = 3
"""The candidate whose error is measured."""

comptime LARGE = 1 << 28
"""Elements of an operand from which a check launches but twice."""

comptime REPEATS = 20
"""Launches of a candidate on a checked problem."""


def operations_of(problem: ConvProblem) -> Float64:
    """Multiplications and additions."""
    var outputs = problem.gemm_m() * problem.filters
    return 2.0 * Float64(outputs) * Float64(problem.gemm_k())


def nothing_fused[dtype: DType]() -> Epilogue[dtype, dtype]:
    """An epilogue that only rounds."""
    var nothing = Reads[dtype](unsafe_from_address=16)
    var activation = Activation(ACTIVATION_NONE, 0, 0)
    return Epilogue[dtype, dtype](
        has_bias=False,
        has_residual=False,
        has_scale=False,
        scale=Reads[DType.float32](unsafe_from_address=16),
        bias=nothing,
        residual=nothing,
        beta=1,
        activation=activation,
        final_activation=activation,
    )


struct Check[in_type: DType, out_type: DType](Movable):
    """The operands of a problem, filled with integers, and what a kernel
    should make of them.

    Parameters:
        in_type: Of activation and filter.
        out_type: Of the output.
    """

    var problem: ConvProblem
    var activation: DeviceBuffer[Self.in_type]
    var filter: DeviceBuffer[Self.in_type]
    var expected: DeviceBuffer[Self.out_type]
    var found: DeviceBuffer[Self.out_type]
    var repeats: Int
    var counts: DeviceBuffer[DType.uint32]

    def __init__(out self, ctx: DeviceContext, problem: ConvProblem) raises:
        """Fills the operands and convolves naively.

        Args:
            ctx: The device.
            problem: The convolution.
        """
        var x, w, y = elements_of(problem)
        self.problem = problem
        self.repeats = 2 if max(x, y) >= LARGE else REPEATS
        self.activation = ctx.enqueue_create_buffer[Self.in_type](x)
        self.filter = ctx.enqueue_create_buffer[Self.in_type](w)
        self.expected = ctx.enqueue_create_buffer[Self.out_type](y + 2 * GUARD)
        self.found = ctx.enqueue_create_buffer[Self.out_type](y + 2 * GUARD)
        self.counts = ctx.enqueue_create_buffer[DType.uint32](2)
        put_integers(ctx, self.activation, 3, 1)
        put_integers(ctx, self.filter, 2, 2)
        poison(ctx, self.expected)
        self.expect(ctx)

    def expect(self, ctx: DeviceContext) raises:
        """Convolves naively.

        Args:
            ctx: The device.
        """
        var y = elements_of(self.problem)[2]
        ctx.enqueue_function[convolve[Self.in_type, Self.out_type]](
            self.activation,
            self.filter,
            self.expected.create_sub_buffer[Self.out_type](GUARD, y),
            self.problem,
            grid_dim=BLOCKS,
            block_dim=THREADS,
        )

    def run[
        index: Int, kernel: Int = KERNEL_SM90
    ](
        self, ctx: DeviceContext, split_k: Int, relays: Bool = False
    ) raises -> String:
        """Runs a candidate.

        Parameters:
            index: Of the candidate, or `CANDIDATES` for the one that is
                chosen.
            kernel: Which kernel chooses.

        Args:
            ctx: The device.
            split_k: Blocks that share a tile.
            relays: As of `Prepared`.

        Returns:
            "ok", or what is wrong.
        """
        self.counts.enqueue_fill(0)
        self.counts.create_sub_buffer[DType.uint32](1, 1).enqueue_fill(
            UInt32.MAX
        )
        for _ in range(self.repeats):
            poison(ctx, self.found)
            self._launch[index, kernel](ctx, split_k, relays)
            self._compare(ctx)
        with self.counts.map_to_host() as counts:
            if counts[0] == 0:
                return "ok"
            var at = Int(counts[1]) - GUARD
            var pixel, filter = divmod(at, self.problem.filters)
            return String(
                t"WRONG: {counts[0]} elements of {self.repeats} launches, the"
                t" first of pixel {pixel}, filter {filter}"
            )

    def _launch[
        index: Int, kernel: Int = KERNEL_SM90
    ](self, ctx: DeviceContext, split_k: Int, relays: Bool = False) raises:
        """Launches a candidate, or the one that is chosen."""
        var nothing = nothing_fused[Self.out_type]()
        var output = MemoryOutput(data_of(self.found, GUARD))
        var stream = Stream(ctx)
        comptime if index == CANDIDATES:
            convolve_chosen[
                kernels=1 << kernel, known=UNKNOWN_FILTER, scaled=False
            ](
                stream,
                self.problem,
                Arguments(
                    MemoryActivation(reads_of(self.activation)),
                    reads_of(self.filter),
                    nothing,
                    output,
                ),
                requested=kernel,
                exact=False,
            )
        else:
            Prepared[candidate(index)](
                ctx,
                self.problem,
                GemmOperands[Self.in_type, MemoryOutput[Self.out_type]](
                    reads_of(self.activation),
                    reads_of(self.filter),
                    nothing.residual,
                    output,
                ),
                ConvVisitor[Self.out_type].of(nothing),
                split_k,
                relays,
            ).launch(ctx)

    def _compare(self, ctx: DeviceContext) raises:
        """Counts what is wrong, guards included."""
        ctx.enqueue_function[compare[Self.out_type]](
            self.expected,
            self.found,
            Int64(len(self.found)),
            self.counts,
            self.counts.create_sub_buffer[DType.uint32](1, 1),
            grid_dim=BLOCKS,
            block_dim=THREADS,
        )


def error_of[in_type: DType](ctx: DeviceContext, named: Case) raises:
    """Prints the error of a type's products and sums.

    Parameters:
        in_type: Of activation and filter.

    Args:
        ctx: The device.
        named: The problem.
    """
    comptime out_type = DType.float32
    comptime config = candidate(MEASURED)
    if problem_refusal(config, Traversal(named.problem, in_type), out_type):
        return
    var check = Check[in_type, out_type](ctx, named.problem)
    var y = elements_of(named.problem)[2]
    put_random(ctx, check.activation, 1)
    put_random(ctx, check.filter, 2)
    check.expect(ctx)
    poison(ctx, check.found)
    check._launch[MEASURED](ctx, 1)
    var difference = Float64(0)
    var norm = Float64(0)
    with check.expected.map_to_host() as expected:
        with check.found.map_to_host() as found:
            for i in range(GUARD, GUARD + y):
                var e = Float64(expected[i])
                difference += (Float64(found[i]) - e) ** 2
                norm += e**2
    print(named.name, in_type, "error", sqrt(difference / norm))


def time_of[
    in_type: DType, index: Int
](
    ctx: DeviceContext, problem: ConvProblem, mode: String, split_k: Int
) raises -> Float64:
    """The time of a launch of a candidate, in milliseconds: the median of
    graph replays.

    Parameters:
        in_type: Of activation and filter.
        index: Of the candidate.

    Args:
        ctx: The device.
        problem: The convolution.
        mode: Of the command line.
        split_k: Blocks that share a tile.
    """
    comptime config = candidate(index)
    var x, w, y = elements_of(problem)
    var set_bytes = (x + w) * size_of[in_type]() + y * size_of[TIMED]()
    var sets = input_sets(set_bytes)
    var operands = List[DeviceBuffer[in_type]]()
    var outputs = List[DeviceBuffer[TIMED]]()
    comptime Launch = Prepared[
        in_type=in_type,
        Output=MemoryOutput[TIMED],
        Visitor=ConvVisitor[TIMED],
        config,
    ]
    var nothing = nothing_fused[TIMED]()
    var launches = List[Launch]()
    for i in range(sets):
        var activation = ctx.enqueue_create_buffer[in_type](x)
        var filter = ctx.enqueue_create_buffer[in_type](w)
        var output = ctx.enqueue_create_buffer[TIMED](y)
        put_random(ctx, activation, 2 * i)
        put_random(ctx, filter, 2 * i + 1001)
        launches.append(
            Launch(
                ctx,
                problem,
                GemmOperands[in_type, MemoryOutput[TIMED]](
                    reads_of(activation),
                    reads_of(filter),
                    nothing.residual,
                    MemoryOutput(data_of(output)),
                ),
                ConvVisitor[TIMED].of(nothing),
                split_k,
            )
        )
        operands.append(activation)
        operands.append(filter)
        outputs.append(output)
    var overlap = mode.endswith("+")

    def launch(target: DeviceContext, index: Int) raises {imm}:
        launches[index % sets].launch(target, overlap)

    def enqueue(mut stream: Stream, index: Int) raises {imm}:
        launches[index % sets].enqueue(stream, overlap)

    var ms: Float64
    if mode.startswith("stream"):
        ms = time_stream(ctx, launch)
    else:
        ms = time_captured(ctx, enqueue)
    _ = operands^
    _ = outputs^
    return ms


def selected(index: Int) raises -> Bool:
    """Whether the command line asks for a candidate."""
    var words = argv()
    if len(words) <= 3:
        return True
    for i in range(3, len(words)):
        if Int(String(words[i])) == index:
            return True
    return False


def is_unaligned(problem: ConvProblem, types: OperandTypes) -> Bool:
    """Whether pixels of activation or output are no multiples of 16 bytes."""
    var traversal = Traversal(problem, types.input)
    var refusal = traversal.channel_refusal()
    if not refusal:
        refusal = traversal.output_refusal(element_bytes(types.output))
    return Bool(refusal) and problem.groups == 1


def check_case[
    in_type: DType, out_type: DType
](ctx: DeviceContext, named: Case) raises -> Int:
    """Checks a problem, and returns how many launches' results are wrong."""
    var ran = 0
    var wrong = 0
    var check = Check[in_type, out_type](ctx, named.problem)
    comptime types = OperandTypes.unfused(in_type, out_type)
    comptime if takes_mma_types(types):
        if selected(CANDIDATES) and not mma_geometry_refusal(named.problem):
            var result = check.run[CANDIDATES, KERNEL_SM80](ctx, 1)
            ran += 1
            if result != "ok":
                wrong += 1
                print(named.name, in_type, "sm80", result)
    var traversal = Traversal(named.problem, in_type)
    var unaligned = is_unaligned(named.problem, types)
    var refusal = gemm_refusal(
        named.problem,
        Operands.bare(types),
        device_of(ctx),
        unaligned=unaligned,
    )
    if refusal:
        print(
            named.name,
            in_type,
            "ran",
            ran,
            "wrong",
            wrong,
            "| refused:",
            refusal.value(),
        )
        return wrong
    comptime for index in range(CANDIDATES):
        comptime config = candidate(index)
        comptime if TABLE[index].offered(
            types, unaligned=candidate(index).unaligned
        ):
            if selected(index) and not problem_refusal(
                config,
                traversal,
                out_type,
                whole_pieces=whole_pieces[
                    in_type,
                    MemoryOutput[out_type],
                    ConvVisitor[out_type],
                    config,
                ](),
            ):
                for split_k in materialize[SPLIT_COUNTS]():
                    if not split_refusal(config, traversal, split_k):
                        var result = check.run[index](ctx, split_k)
                        ran += 1
                        if result != "ok":
                            wrong += 1
                            print(named.name, in_type, index, split_k, result)
                comptime if config.keeps_pace():
                    var result = check.run[index](ctx, 1, relays=True)
                    ran += 1
                    if result != "ok":
                        wrong += 1
                        print(named.name, in_type, index, "relays", result)
    if selected(CANDIDATES):
        var result: String
        if unaligned:
            result = check.run[CANDIDATES, KERNEL_UNALIGNED](ctx, 1)
        else:
            result = check.run[CANDIDATES](ctx, 1)
        ran += 1
        if result != "ok":
            wrong += 1
            print(named.name, in_type, "chosen", result)
    print(named.name, in_type, "ran", ran, "wrong", wrong)
    return wrong


def time_case[
    in_type: DType
](ctx: DeviceContext, named: Case, mode: String) raises:
    """Times a problem."""
    comptime types = OperandTypes.unfused(in_type, TIMED)
    var p = named.problem
    var device = device_of(ctx)
    var operands = Operands.bare(types)
    var unaligned = is_unaligned(p, types)
    var table = GemmCandidates(p, operands, device, unaligned=unaligned)
    var chosen = plan_gemm(p, operands, device, unaligned=unaligned)
    print(named.name, in_type, "chooses", chosen.candidate, chosen)
    for i in range(table.count()):
        var split_k = table.split_k(i)
        var row = table.row(i)
        var is_chosen = chosen.candidate == row and chosen.split_k == split_k
        if table.refusal(i) or not (selected(row) or is_chosen):
            continue
        comptime for index in range(CANDIDATES):
            comptime if TABLE[index].offered(
                types, unaligned=candidate(index).unaligned
            ):
                if row == index:
                    var ms = time_of[in_type, index](ctx, p, mode, split_k)
                    print(
                        named.name,
                        in_type,
                        index,
                        split_k,
                        round(ms * 1e5) / 1e5,
                        "ms",
                        round(operations_of(p) / ms / 1e9),
                        "TFLOP/s |",
                        candidate(index),
                        "| chosen" if is_chosen else "",
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
        if mode == "error":
            error_of[DType.bfloat16](ctx, named)
            error_of[DType.float8_e4m3fn](ctx, named)
            error_of[DType.float32](ctx, named)
        elif mode == "check":
            wrong += check_case[DType.bfloat16, DType.bfloat16](ctx, named)
            wrong += check_case[DType.float16, DType.float16](ctx, named)
            wrong += check_case[DType.float8_e4m3fn, DType.bfloat16](ctx, named)
            wrong += check_case[DType.float8_e5m2, DType.bfloat16](ctx, named)
            wrong += check_case[DType.int8, DType.bfloat16](ctx, named)
            wrong += check_case[DType.float32, DType.bfloat16](ctx, named)
        elif mode.endswith("/float8_e4m3fn"):
            time_case[DType.float8_e4m3fn](ctx, named, mode)
        elif mode.endswith("/float8_e5m2"):
            time_case[DType.float8_e5m2](ctx, named, mode)
        elif mode.endswith("/int8"):
            time_case[DType.int8](ctx, named, mode)
        elif mode.endswith("/float32"):
            time_case[DType.float32](ctx, named, mode)
        else:
            time_case[DType.bfloat16](ctx, named, mode)
    if wrong > 0:
        raise Error(t"{wrong} wrong")
    print("END")
