"""Checks and times epilogues of the Hopper kernel that are composed of visitors.

    sm90_visitors check PROBLEMS
    sm90_visitors time PROBLEMS

`check` runs chains of visitors, each on configurations that reach every way of
storing: output, auxiliary output and each filter's sums are compared exactly
with what a naive convolution's sums become (operands are small integers); all
are poisoned, guarded, and launched `REPEATS` times. Then sums of random values
must agree bit by bit between `LAUNCHES` launches, and with float64.
`time` replays graphs of launches: nothing fused, and with visitors. PROBLEMS as
in sm90.mojo.
"""

from max.gpu.host import DeviceAttribute, DeviceBuffer, DeviceContext
from std.sys import argv
from std.utils import IndexList

from operations.conv.access import MemoryOutput, StoredOutput
from operations.conv.epilogue import Activation, Epilogue
from operations.conv.fields import (
    ACTIVATION_LEAKY_RELU,
    ACTIVATION_NONE,
    ACTIVATION_RELU,
)
from operations.conv.problem import ConvProblem
from operations.nvidia.sm90.gemm.candidates import CANDIDATES, TABLE
from operations.nvidia.im2col.traversal import Traversal
from operations.nvidia.sm90.gemm.legality import problem_refusal
from operations.nvidia.device import device_of
from operations.nvidia.epilogue.auxiliary import (
    AuxiliaryOutput,
    RowOutput,
)
from operations.nvidia.epilogue.callbacks import EpilogueVisitor
from operations.nvidia.epilogue.steps import (
    Activate,
    AddResidual,
    ChannelBias,
    ChannelScale,
    Discard,
    Rounded,
)
from operations.nvidia.epilogue.sums import sum_channels
from operations.nvidia.epilogue.conv_visitor import ConvVisitor
from operations.nvidia.sm90.gemm.launch import GemmOperands
from operations.nvidia.sm90.gemm.visit import (
    plan_visited,
    convolve_visited,
    visited_config,
)
from operations.nvidia.stream import Stream
from buffers import (
    GUARD,
    data_of,
    elements_of,
    poison,
    put_integers,
    put_random,
    reads_of,
)
from epilogues import BIAS_TYPE, Elsewhere
from problems import Case, read_cases
from sm90 import nothing_fused
from prepared import Prepared
from timing import LAUNCHES, input_sets, time_captured
from visitors import Expectation
from visitors_check import Check, IN_TYPE, roomy


def check_chains[
    dtype: DType, auxiliary_type: DType, few: Bool
](ctx: DeviceContext, named: Case) raises -> Int:
    """Checks chains of what there is, the whole and parts of it."""
    var check = Check[dtype, auxiliary_type](ctx, named.problem)
    var wrong = check.run_all[few](
        ctx,
        Expectation("all", True, True, 0, 2, True, 1, True),
        check.scaled_bias()
        .then(AuxiliaryOutput[auxiliary_type](check.second()))
        .then(Activate[ACTIVATION_RELU]())
        .then(AddResidual(2))
        .then(Rounded[dtype]())
        .then(check.adding()),
    )
    wrong += check.run_all[few](
        ctx,
        Expectation("sums_only", False, True, 0, 0, False, 0, True),
        ChannelBias(reads_of(check.bias))
        .then(Activate[ACTIVATION_RELU]())
        .then(Rounded[dtype]())
        .then(check.adding())
        .then(Discard()),
    )
    wrong += check.run_all[few](
        ctx,
        Expectation("auxiliary_only", True, True, 0.5, -1, False, 1, False),
        check.scaled_bias()
        .then(AuxiliaryOutput[auxiliary_type](check.second()))
        .then(AddResidual(-1))
        .then(Discard()),
    )
    return wrong


def check_op[dtype: DType](ctx: DeviceContext, named: Case) raises -> Int:
    """Checks the op's own visitor: with a scale, and in a chain."""
    var check = Check[dtype, dtype](ctx, named.problem)
    var none = Activation(ACTIVATION_NONE, 0, 0)
    var fused = Epilogue[BIAS_TYPE, dtype](
        has_bias=True,
        has_residual=True,
        has_scale=True,
        scale=reads_of(check.scale),
        bias=reads_of(check.bias),
        residual=reads_of(check.residual),
        beta=2,
        activation=Activation(ACTIVATION_RELU, 0, 0),
        final_activation=none,
    )
    var wrong = check.run_all(
        ctx,
        Expectation("scaled", True, True, 0, 2, True, 0, False),
        ConvVisitor[BIAS_TYPE, True].of(fused),
    )
    fused.has_bias = False
    fused.activation = Activation(ACTIVATION_LEAKY_RELU, 0.5, 0)
    wrong += check.run_all(
        ctx,
        Expectation("scaled_leaky", True, False, 0.5, 2, True, 0, False),
        ConvVisitor[BIAS_TYPE, True].of(fused),
    )
    fused.has_scale = False
    fused.has_bias = True
    fused.activation = Activation(ACTIVATION_RELU, 0, 0)
    wrong += check.run_all(
        ctx,
        Expectation("op_sums", False, True, 0, 2, True, 0, True),
        ConvVisitor[BIAS_TYPE]
        .of(fused)
        .then(Rounded[dtype]())
        .then(check.adding()),
    )
    # Leaky ReLU of slope 1 changes nothing, in the form that is looped.
    fused.activation = Activation(ACTIVATION_LEAKY_RELU, 1, 0)
    wrong += check.run_all(
        ctx,
        Expectation("op_looped_sums", False, True, 1, 2, True, 0, True),
        ConvVisitor[BIAS_TYPE]
        .of(fused)
        .then(Rounded[dtype]())
        .then(check.adding()),
    )
    return wrong


def check_graph[dtype: DType](ctx: DeviceContext, named: Case) raises -> Int:
    """Checks what the graph compiler made of a second consumer, as a visitor,
    and the configuration that is chosen."""
    var p = named.problem
    if p.output[0] != 1:
        return 0
    var check = Check[dtype, dtype](ctx, p)
    var shape = IndexList[4](p.batch, p.output[1], p.output[2], p.filters)
    comptime Stored = StoredOutput[dtype, 4, Elsewhere[dtype]]
    var visitor = (
        ChannelBias(reads_of(check.bias))
        .then(
            RowOutput(
                Stored(
                    data_of(check.found, GUARD),
                    Elsewhere[dtype](shape, data_of(check.auxiliary, GUARD)),
                )
            )
        )
        .then(Activate[ACTIVATION_RELU]())
    )
    var what = Expectation("graph", False, True, 0, 0, True, 2, False)
    var wrong = check.run_all(ctx, what, visitor)
    check.clear(ctx)
    check.wrong.enqueue_fill(0)
    convolve_visited(
        ctx,
        p,
        GemmOperands[IN_TYPE, MemoryOutput[dtype]](
            reads_of(check.activation),
            reads_of(check.filter),
            reads_of(check.residual),
            check.output(),
        ),
        visitor,
    )
    check.judge(ctx, what)
    with check.wrong.map_to_host() as found:
        if found[0] + found[1] + found[2] != 0:
            print("   WRONG graph, chosen", found[0], found[1], found[2])
            wrong += 1
    return wrong


def check_order[index: Int](ctx: DeviceContext, named: Case) raises -> Int:
    """Sums of random values: the same bits from every launch, and near to
    float64."""
    comptime dtype = DType.bfloat16
    var check = Check[dtype, dtype](ctx, named.problem)
    var k = named.problem.filters
    put_random(ctx, check.scale, 7)
    var what = Expectation("order", True, True, 1, 0, False, 0, False)
    check.expect(ctx, what)
    var visitor = check.scaled_bias().then(check.adding()).then(Discard())
    comptime config = roomy[type_of(visitor), dtype](index)
    if problem_refusal(config, Traversal(named.problem, IN_TYPE), dtype):
        return 0
    var prepared = Prepared[config](
        ctx,
        named.problem,
        GemmOperands[IN_TYPE, MemoryOutput[dtype]](
            reads_of(check.activation),
            reads_of(check.filter),
            reads_of(check.residual),
            check.output(),
        ),
        visitor,
    )
    var wrong = 0
    var first = List[Float32]()
    for launch in range(LAUNCHES):
        poison(ctx, check.channels)
        prepared.launch(ctx)
        with check.channels.map_to_host() as channels:
            for i in range(2 * k):
                if launch == 0:
                    first.append(channels[GUARD + i])
                elif channels[GUARD + i] != first[i]:
                    wrong += 1
    var largest = Float64(0)
    with check.after.map_to_host() as after:
        for filter in range(0, k, 7):
            var sum = Float64(0)
            var squares = Float64(0)
            for pixel in range(named.problem.gemm_m()):
                var v = after[pixel * k + filter].cast[DType.float64]()
                sum += v
                squares += v * v
            # The values' own rounding, times the root of their number.
            largest = max(
                largest,
                abs(first[filter].cast[DType.float64]() - sum)
                / max(squares, 1e-9) ** 0.5,
            )
            largest = max(
                largest,
                abs(first[k + filter].cast[DType.float64]() - squares)
                / max(squares, 1e-9),
            )
    print("  ", named.name, "order", index, wrong, "error", largest)
    return wrong + Int(not largest < 1e-4)


def time_of[
    Visitor: EpilogueVisitor, //
](
    ctx: DeviceContext,
    problem: ConvProblem,
    sets: Int,
    visitors: List[Visitor],
    buffers: List[DeviceBuffer[IN_TYPE]],
) raises -> Float64:
    """The time of a launch with visitors, in milliseconds: the median of graph
    replays, input sets rotated. `buffers` has four of each set: activation,
    filter, residual, output.

    Args:
        ctx: The device.
        problem: The convolution.
        sets: Of operands.
        visitors: A set's each.
        buffers: Their operands.
    """
    var plan = plan_visited[IN_TYPE, IN_TYPE](
        problem, visitors[0], device_of(ctx)
    )
    comptime for i in range(CANDIDATES):
        comptime if TABLE[i].other_outputs:
            if plan.candidate == i:
                return _time_on[i](ctx, problem, sets, visitors, buffers)
    raise Error("no candidate")


def _time_on[
    Visitor: EpilogueVisitor, //, index: Int
](
    ctx: DeviceContext,
    problem: ConvProblem,
    sets: Int,
    visitors: List[Visitor],
    buffers: List[DeviceBuffer[IN_TYPE]],
) raises -> Float64:
    """`time_of` on a candidate."""
    comptime Launch = Prepared[
        in_type=IN_TYPE,
        Output=MemoryOutput[IN_TYPE],
        Visitor=Visitor,
        visited_config[Visitor](index, IN_TYPE),
    ]
    var launches = List[Launch]()
    for i in range(sets):
        launches.append(
            Launch(
                ctx,
                problem,
                GemmOperands[IN_TYPE, MemoryOutput[IN_TYPE]](
                    reads_of(buffers[4 * i]),
                    reads_of(buffers[4 * i + 1]),
                    reads_of(buffers[4 * i + 2]),
                    MemoryOutput(data_of(buffers[4 * i + 3])),
                ),
                visitors[i],
            )
        )

    def enqueue(mut stream: Stream, index: Int) raises {imm}:
        launches[index % sets].enqueue(stream)

    return time_captured(ctx, enqueue)


def time_case(ctx: DeviceContext, named: Case) raises:
    """Times a problem: nothing fused; scale, bias and ReLU; also the values in
    front of the ReLU as a second output; bias and sums; sums and no output."""
    var p = named.problem
    var x, w, y = elements_of(p)
    var sets = input_sets(2 * (x + w + 2 * y))
    var buffers = List[DeviceBuffer[IN_TYPE]]()
    var second = List[DeviceBuffer[IN_TYPE]]()
    var sizes: List[Int] = [x, w, y, y]
    for _ in range(sets):
        for size in sizes:
            var buffer = ctx.enqueue_create_buffer[IN_TYPE](size)
            put_random(ctx, buffer, len(buffers))
            buffers.append(buffer)
        second.append(ctx.enqueue_create_buffer[IN_TYPE](y))
    var bias = ctx.enqueue_create_buffer[IN_TYPE](p.filters)
    var scale = ctx.enqueue_create_buffer[DType.float32](p.filters)
    var sums = ctx.enqueue_create_buffer[DType.float32](2 * p.filters)
    put_integers(ctx, bias, 3, 1)
    put_integers(ctx, scale, 3, 2)
    var nothing = nothing_fused[IN_TYPE]()
    var biased = ChannelBias(reads_of(bias))
    var scaled = ChannelScale(reads_of(scale)).then(biased)
    var adding = sum_channels(data_of(sums), data_of(sums, p.filters))
    var bare = [ConvVisitor[IN_TYPE].of(nothing) for _ in range(sets)]
    var relu = [scaled.then(Activate[ACTIVATION_RELU]()) for _ in range(sets)]
    var both = [
        scaled.then(
            AuxiliaryOutput[IN_TYPE](MemoryOutput(data_of(second[i])))
        ).then(Activate[ACTIVATION_RELU]())
        for i in range(sets)
    ]
    var summed = [
        biased.then(Rounded[IN_TYPE]()).then(adding) for _ in range(sets)
    ]
    var only = [biased.then(adding).then(Discard()) for _ in range(sets)]
    print(
        named.name,
        "bare",
        time_of(ctx, p, sets, bare, buffers),
        "scale, bias, relu",
        time_of(ctx, p, sets, relu, buffers),
        "and auxiliary",
        time_of(ctx, p, sets, both, buffers),
        "bias, sums",
        time_of(ctx, p, sets, summed, buffers),
        "sums only",
        time_of(ctx, p, sets, only, buffers),
    )
    _ = second^


def main() raises:
    var mode = String(argv()[1])
    var ctx = DeviceContext()
    var wrong = 0
    for named in read_cases(String(argv()[2])):
        if mode == "time":
            time_case(ctx, named)
            continue
        print(named.name)
        wrong += check_chains[DType.bfloat16, DType.bfloat16, False](ctx, named)
        wrong += check_chains[DType.float32, DType.float32, True](ctx, named)
        wrong += check_op[DType.bfloat16](ctx, named)
        wrong += check_graph[DType.bfloat16](ctx, named)
        wrong += check_order[0](ctx, named)
        wrong += check_order[8](ctx, named)
    if wrong > 0:
        raise Error(t"{wrong} wrong")
    print("END")
