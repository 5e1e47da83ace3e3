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

from max.gpu.host import (
    DeviceAttribute,
    DeviceBuffer,
    DeviceContext,
    DeviceGraph,
    DeviceGraphBuilder,
)
from std.sys import argv
from std.time import sleep
from std.utils import IndexList

from operations.conv.access import MemoryOutput, StoredOutput
from operations.conv.epilogue import Activation, Epilogue
from operations.conv.fields import (
    ACTIVATION_LEAKY_RELU,
    ACTIVATION_NONE,
    ACTIVATION_RELU,
)
from operations.conv.memory import Reads, Writes
from operations.conv.problem import ConvProblem
from operations.sm90.candidates import CANDIDATES, offered_fused
from operations.sm90.config import Sm90Config, can_implement
from operations.sm90.epilogue_auxiliary import AuxiliaryOutput, RowOutput
from operations.sm90.epilogue_chain import Chain
from operations.sm90.epilogue_callbacks import EpilogueVisitor
from operations.sm90.epilogue_params import layout_of, visitor_refusal
from operations.sm90.epilogue_steps import (
    Activate,
    AddResidual,
    ChannelBias,
    ChannelScale,
    Discard,
    Rounded,
)
from operations.sm90.epilogue_sums import ChannelSums, sum_channels
from operations.sm90.epilogue_visitor import ConvVisitor
from operations.sm90.launch import LaunchPlan
from operations.sm90.visit import (
    choose_visited,
    convolve_visited,
    visited_candidate,
    with_room,
)
from epilogues import BIAS_TYPE, Elsewhere
from kernels import (
    POISON,
    THREADS,
    convolve,
    fill_constant,
    fill_integers,
    fill_random,
)
from problems import Case, read_cases
from sm90 import (
    BLOCKS,
    GUARD,
    LAUNCHES,
    ROTATED_BYTES,
    data_of,
    elements_of,
    nothing_fused,
)
from sm90_epilogue import configuration
from visitors import Expectation, add_up, expect, judge_tensor

comptime IN_TYPE = DType.bfloat16
"""Of activations and filters."""

comptime REPEATS = 3
"""Launches of a configuration with a chain."""

comptime CONFIGURATIONS = [
    0,
    4,
    8,
    10,
    12,
    CANDIDATES + 2,
    CANDIDATES + 4,
    CANDIDATES + 6,
]
"""Of sm90_epilogue.mojo: a halo and a cluster; small sub-tiles in a ring;
ping-pong with a halo, and without; one consumer; delayed stores, with buffers of their own and over the residual;
pixels as rows."""

comptime EXACT = Float64(1 << 24)
"""Integers below it are exact in float32."""


def roomy[Visitor: EpilogueVisitor, dtype: DType](index: Int) -> Sm90Config:
    """A configuration to test, with room for visitors.

    Parameters:
        Visitor: Of the visitors.
        dtype: Of the output.

    Args:
        index: As in sm90_epilogue.mojo.
    """
    var config = configuration(index)
    return with_room(
        config,
        config.consumers * Visitor.shared_bytes(layout_of[dtype](config)),
    )


def _reads[dtype: DType](buffer: DeviceBuffer[dtype]) -> Reads[dtype]:
    """A buffer's elements, to read."""
    return data_of(buffer).as_imm().unsafe_origin_cast[ImmUntrackedOrigin]()


def _fill[
    dtype: DType
](
    ctx: DeviceContext,
    buffer: DeviceBuffer[dtype],
    magnitude: Int,
    seed: Int,
) raises:
    """Fills a buffer with small integers."""
    ctx.enqueue_function[fill_integers[dtype]](
        buffer,
        Int64(len(buffer)),
        Int32(magnitude),
        Int32(seed),
        grid_dim=BLOCKS,
        block_dim=THREADS,
    )


def _poison[
    dtype: DType
](ctx: DeviceContext, buffer: DeviceBuffer[dtype]) raises:
    """Fills a buffer with what nobody expects."""
    ctx.enqueue_function[fill_constant[dtype]](
        buffer,
        Int64(len(buffer)),
        POISON,
        grid_dim=BLOCKS,
        block_dim=THREADS,
    )


struct Check[dtype: DType, auxiliary_type: DType](Movable):
    """A problem's operands, filled with integers, its sums, and the outputs
    of a launch, each between guards.

    Parameters:
        dtype: Of output and residual.
        auxiliary_type: Of the auxiliary output.
    """

    var problem: ConvProblem
    var activation: DeviceBuffer[IN_TYPE]
    var filter: DeviceBuffer[IN_TYPE]
    var scale: DeviceBuffer[DType.float32]
    var bias: DeviceBuffer[BIAS_TYPE]
    var residual: DeviceBuffer[Self.dtype]
    var sums: DeviceBuffer[DType.float32]
    var before: DeviceBuffer[DType.float32]
    var after: DeviceBuffer[DType.float32]
    var totals: DeviceBuffer[DType.float64]
    var expected_totals: DeviceBuffer[DType.float32]
    var found: DeviceBuffer[Self.dtype]
    var auxiliary: DeviceBuffer[Self.auxiliary_type]
    var channels: DeviceBuffer[DType.float32]
    """Sums, then squares."""
    var wrong: DeviceBuffer[DType.uint32]

    def __init__(out self, ctx: DeviceContext, problem: ConvProblem) raises:
        """Fills the operands and convolves naively.

        Args:
            ctx: The device.
            problem: The convolution.
        """
        var x, w, y = elements_of(problem)
        var k = problem.filters
        self.problem = problem
        self.activation = ctx.enqueue_create_buffer[IN_TYPE](x)
        self.filter = ctx.enqueue_create_buffer[IN_TYPE](w)
        self.scale = ctx.enqueue_create_buffer[DType.float32](k)
        self.bias = ctx.enqueue_create_buffer[BIAS_TYPE](k)
        self.residual = ctx.enqueue_create_buffer[Self.dtype](y)
        self.sums = ctx.enqueue_create_buffer[DType.float32](y)
        self.before = ctx.enqueue_create_buffer[DType.float32](y)
        self.after = ctx.enqueue_create_buffer[DType.float32](y)
        self.totals = ctx.enqueue_create_buffer[DType.float64](2 * k)
        self.expected_totals = ctx.enqueue_create_buffer[DType.float32](2 * k)
        self.found = ctx.enqueue_create_buffer[Self.dtype](y + 2 * GUARD)
        self.auxiliary = ctx.enqueue_create_buffer[Self.auxiliary_type](
            y + 2 * GUARD
        )
        self.channels = ctx.enqueue_create_buffer[DType.float32](
            2 * k + 2 * GUARD
        )
        self.wrong = ctx.enqueue_create_buffer[DType.uint32](3)
        _fill(ctx, self.activation, 1, 1)
        _fill(ctx, self.filter, 1, 2)
        _fill(ctx, self.scale, 1, 6)
        _fill(ctx, self.bias, 3, 3)
        _fill(ctx, self.residual, 2, 4)
        ctx.enqueue_function[convolve[IN_TYPE, DType.float32]](
            self.activation,
            self.filter,
            self.sums,
            problem,
            grid_dim=BLOCKS,
            block_dim=THREADS,
        )

    def scaled_bias(
        self,
    ) -> Chain[ChannelScale[DType.float32], ChannelBias[BIAS_TYPE]]:
        """Each filter's scale and bias."""
        return ChannelScale(_reads(self.scale)).then(
            ChannelBias(_reads(self.bias))
        )

    def output(self) -> MemoryOutput[Self.dtype]:
        """The output, behind its guard."""
        return MemoryOutput(data_of(self.found, GUARD))

    def second(self) -> MemoryOutput[Self.auxiliary_type]:
        """The auxiliary output, behind its guard."""
        return MemoryOutput(data_of(self.auxiliary, GUARD))

    def adding(self) -> ChannelSums[True]:
        """The visitor that adds up each filter's values."""
        return sum_channels(
            data_of(self.channels, GUARD),
            data_of(self.channels, GUARD + self.problem.filters),
        )

    def expect(self, ctx: DeviceContext, what: Expectation) raises:
        """Computes what a chain should leave."""
        var p = self.problem
        ctx.enqueue_function[expect[Self.dtype]](
            self.sums,
            self.scale,
            self.bias,
            self.residual,
            self.before,
            self.after,
            Int64(len(self.sums)),
            Int64(p.filters),
            Int32(Int(what.scaled)),
            Int32(Int(what.biased)),
            what.slope,
            what.beta,
            grid_dim=BLOCKS,
            block_dim=THREADS,
        )
        self.totals.enqueue_fill(0)
        ctx.enqueue_function[add_up[Self.dtype]](
            self.after,
            self.totals,
            Int64(p.gemm_m()),
            Int64(p.filters),
            grid_dim=p.filters,
            block_dim=THREADS,
        )
        with self.totals.map_to_host() as totals:
            with self.expected_totals.map_to_host() as expected:
                for i in range(2 * p.filters):
                    if what.adds and abs(totals[i]) >= EXACT:
                        raise Error(t"a sum of {totals[i]} is not exact")
                    expected[i] = totals[i].cast[DType.float32]()

    def clear(self, ctx: DeviceContext) raises:
        """Poisons what a launch writes."""
        _poison(ctx, self.found)
        _poison(ctx, self.auxiliary)
        _poison(ctx, self.channels)

    def judge(self, ctx: DeviceContext, what: Expectation) raises:
        """Counts what is wrong after a launch."""
        var y = Int64(len(self.sums))
        ctx.enqueue_function[judge_tensor[Self.dtype]](
            self.after,
            self.found,
            y,
            Int64(GUARD),
            Float32(1 if what.stores else 0),
            POISON,
            self.wrong,
            grid_dim=BLOCKS,
            block_dim=THREADS,
        )
        ctx.enqueue_function[judge_tensor[Self.auxiliary_type]](
            self.before,
            self.auxiliary,
            y,
            Int64(GUARD),
            what.auxiliary,
            POISON,
            self.wrong.create_sub_buffer[DType.uint32](1, 1),
            grid_dim=BLOCKS,
            block_dim=THREADS,
        )
        ctx.enqueue_function[judge_tensor[DType.float32]](
            self.expected_totals,
            self.channels,
            Int64(2 * self.problem.filters),
            Int64(GUARD),
            Float32(1 if what.adds else 0),
            POISON,
            self.wrong.create_sub_buffer[DType.uint32](2, 1),
            grid_dim=BLOCKS,
            block_dim=THREADS,
        )

    def run[
        Visitor: EpilogueVisitor, //, index: Int
    ](
        self, ctx: DeviceContext, what: Expectation, visitor: Visitor
    ) raises -> Int:
        """Runs a chain on a configuration, if that can, and says so.

        Returns:
            1 if anything is wrong.
        """
        comptime config = roomy[Visitor, Self.dtype](index)
        var refusal = can_implement[IN_TYPE, Self.dtype](config, self.problem)
        if not refusal:
            refusal = visitor_refusal[Self.dtype](visitor, config, self.problem)
        if refusal:
            return 0
        self.wrong.enqueue_fill(0)
        var plan = LaunchPlan[
            IN_TYPE, MemoryOutput[Self.dtype], Visitor, config
        ](
            ctx,
            self.problem,
            data_of(self.activation),
            data_of(self.filter),
            _reads(self.residual),
            visitor,
            self.output(),
        )
        for _ in range(REPEATS):
            self.clear(ctx)
            plan.launch(ctx)
            self.judge(ctx, what)
        with self.wrong.map_to_host() as wrong:
            if wrong[0] + wrong[1] + wrong[2] == 0:
                print("  ", what.name, Self.dtype, index, "ok")
                return 0
            print(
                "   WRONG",
                what.name,
                Self.dtype,
                index,
                "output",
                wrong[0],
                "auxiliary",
                wrong[1],
                "sums",
                wrong[2],
            )
        return 1

    def run_all[
        Visitor: EpilogueVisitor, //, few: Bool = False
    ](
        self, ctx: DeviceContext, what: Expectation, visitor: Visitor
    ) raises -> Int:
        """Runs a chain on every configuration that can, or on a `few`; returns
        how many are wrong."""
        self.expect(ctx, what)
        var wrong = 0
        comptime for i in range(len(CONFIGURATIONS)):
            comptime if not few or i % 3 == 1:
                comptime index = CONFIGURATIONS[i]
                wrong += self.run[index](ctx, what, visitor)
        return wrong


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
        ChannelBias(_reads(check.bias))
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
        scale=_reads(check.scale),
        bias=_reads(check.bias),
        residual=_reads(check.residual),
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
        ChannelBias(_reads(check.bias))
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
        _reads(check.activation),
        _reads(check.filter),
        visitor,
        check.output(),
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
    ctx.enqueue_function[fill_random[DType.float32]](
        check.scale, Int64(k), Int32(7), grid_dim=BLOCKS, block_dim=THREADS
    )
    var what = Expectation("order", True, True, 1, 0, False, 0, False)
    check.expect(ctx, what)
    var visitor = check.scaled_bias().then(check.adding()).then(Discard())
    comptime config = roomy[type_of(visitor), dtype](index)
    if can_implement[IN_TYPE, dtype](config, named.problem):
        return 0
    var plan = LaunchPlan[
        IN_TYPE, MemoryOutput[dtype], type_of(visitor), config
    ](
        ctx,
        named.problem,
        data_of(check.activation),
        data_of(check.filter),
        _reads(check.residual),
        visitor,
        check.output(),
    )
    var wrong = 0
    var first = List[Float32]()
    for launch in range(LAUNCHES):
        _poison(ctx, check.channels)
        plan.launch(ctx)
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
    var index = choose_visited[IN_TYPE, IN_TYPE](
        problem,
        visitors[0],
        ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT),
    )
    comptime for i in range(CANDIDATES):
        comptime if offered_fused(i):
            if index == i:
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
    comptime Plan = LaunchPlan[
        IN_TYPE,
        MemoryOutput[IN_TYPE],
        Visitor,
        visited_candidate[Visitor, IN_TYPE](index),
    ]
    var plans = List[Plan]()
    for i in range(sets):
        plans.append(
            Plan(
                ctx,
                problem,
                data_of(buffers[4 * i]),
                data_of(buffers[4 * i + 1]),
                _reads(buffers[4 * i + 2]),
                visitors[i],
                MemoryOutput(data_of(buffers[4 * i + 3])),
            )
        )
    plans[0].launch(ctx)
    ctx.synchronize()

    def build(mut builder: DeviceGraphBuilder) raises {imm}:
        var recorded = builder.recording_context()
        for i in range(LAUNCHES):
            plans[i % sets].launch(recorded, False)

    var graph = DeviceGraph.create(ctx, build)

    def replay(ctx: DeviceContext) raises {imm}:
        graph.replay()

    sleep(0.1)
    _ = ctx.execution_time(replay, 3)
    var times = List[Float64]()
    for _ in range(7):
        times.append(
            Float64(ctx.execution_time(replay, 3)) / (3 * LAUNCHES) / 1e6
        )
    sort(times)
    return times[len(times) // 2]


def time_case(ctx: DeviceContext, named: Case) raises:
    """Times a problem: nothing fused; scale, bias and ReLU; also the values in
    front of the ReLU as a second output; bias and sums; sums and no output."""
    var p = named.problem
    var x, w, y = elements_of(p)
    var sets = max(1, min(LAUNCHES, ROTATED_BYTES // (2 * (x + w + 2 * y)) + 1))
    var buffers = List[DeviceBuffer[IN_TYPE]]()
    var second = List[DeviceBuffer[IN_TYPE]]()
    var sizes: List[Int] = [x, w, y, y]
    for _ in range(sets):
        for size in sizes:
            var buffer = ctx.enqueue_create_buffer[IN_TYPE](size)
            ctx.enqueue_function[fill_random[IN_TYPE]](
                buffer,
                Int64(size),
                Int32(len(buffers)),
                grid_dim=BLOCKS,
                block_dim=THREADS,
            )
            buffers.append(buffer)
        second.append(ctx.enqueue_create_buffer[IN_TYPE](y))
    var bias = ctx.enqueue_create_buffer[IN_TYPE](p.filters)
    var scale = ctx.enqueue_create_buffer[DType.float32](p.filters)
    var sums = ctx.enqueue_create_buffer[DType.float32](2 * p.filters)
    _fill(ctx, bias, 3, 1)
    _fill(ctx, scale, 3, 2)
    var nothing = nothing_fused[IN_TYPE]()
    var biased = ChannelBias(_reads(bias))
    var scaled = ChannelScale(_reads(scale)).then(biased)
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
