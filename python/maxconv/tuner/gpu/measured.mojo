"""The measurement of one problem, for `measure.mojo`.

Every element of a configuration's output is compared with that of what dispatch
chooses. Both round sums of the same products; tiles that blocks share, and
stages of another order, add them up in another order.
"""

from max.gpu import block_idx, grid_dim, thread_idx
from max.gpu.host import DeviceBuffer, DeviceContext
from std.atomic import Atomic
from std.collections import Optional
from std.utils.numerics import nan

from configurations import NUMBERS, ROWS
from kernels import (
    BLOCKS,
    OUT_TYPE,
    THREADS,
    TYPE,
    Operands as Sets,
    data_of,
    reads_of,
)
from operations.conv.access import MemoryActivation, MemoryOutput
from operations.conv.operands import Arguments, Operands
from operations.nvidia.device import device_of
from operations.nvidia.epilogue.conv_visitor import ConvVisitor
from operations.nvidia.im2col.traversal import Traversal
from operations.nvidia.sm90.gemm.config import Sm90Config
from operations.nvidia.sm90.gemm.launch import GemmOperands, launch_gemm
from operations.nvidia.sm90.gemm.plan import (
    GemmCandidates,
    GemmPlan,
    gemm_refusal,
    plan_gemm,
)
from operations.nvidia.stream import Stream
from operations.nvidia.stream_graph import StreamGraph
from operations.tuning_sm90 import gemm_config, gemm_numbers

comptime LAST_PLACE = Float32(2.0**-7)
"""A unit of bfloat16's last place is at most so much of a value. Two sums that
differ in the order of their terms are rounded to neighbours at the worst."""

comptime SUMS = Float32(2.0**-9)
"""How far two such sums may differ beside, where terms of about 1 cancel: the
additions of the longest sums, some 10^4, may each lose 2^-24 of about 1."""


def configurations() -> List[Sm90Config]:
    """The configurations, of their numbers."""
    var made = List[Sm90Config]()
    for numbers in materialize[NUMBERS]():
        made.append(gemm_config(numbers))
    return made^


def are_numbers() -> Bool:
    """Whether each configuration has the numbers that it was made of."""
    for numbers in materialize[NUMBERS]():
        if gemm_numbers(gemm_config(numbers)) != numbers:
            return False
    return True


comptime CONFIGURATIONS = configurations()
"""For the compiler."""

comptime COUNT = len(CONFIGURATIONS)
"""How many there are."""

comptime Launched = GemmOperands[TYPE, MemoryOutput[OUT_TYPE]]
"""The pointers of a launch."""

comptime Visitor = ConvVisitor[OUT_TYPE, False]
"""What is fused."""


def fill_poison(data: Pointer[Scalar[OUT_TYPE], MutAnyOrigin], count: Int64):
    """Fills a buffer with what equals nothing."""
    var first = Int(block_idx.x) * THREADS + Int(thread_idx.x)
    for i in range(first, Int(count), Int(grid_dim.x) * THREADS):
        data[unsafe_offset=i] = nan[OUT_TYPE]()


def compare(
    expected: Pointer[Scalar[OUT_TYPE], MutAnyOrigin],
    found: Pointer[Scalar[OUT_TYPE], MutAnyOrigin],
    count: Int64,
    wrong: Pointer[UInt32, MutAnyOrigin],
):
    """Counts elements that differ by more than the order of a sum makes."""
    var first = Int(block_idx.x) * THREADS + Int(thread_idx.x)
    for i in range(first, Int(count), Int(grid_dim.x) * THREADS):
        var e = expected[unsafe_offset=i].cast[DType.float32]()
        var f = found[unsafe_offset=i].cast[DType.float32]()
        # Nothing compares with a NaN.
        var close = abs(f - e) <= LAST_PLACE * abs(e) + SUMS
        if not close:
            _ = Atomic.fetch_add(wrong, UInt32(1))


def is_fused(word: String) raises -> Bool:
    """Whether a work is the fused one.

    Args:
        word: Its name.
    """
    if word != "bare" and word != "fused":
        raise Error(t"{word} is no work")
    return word == "fused"


struct Problem(Movable):
    """A problem, its operands, what is right, and the graphs that were made."""

    var sets: Sets
    var expected: DeviceBuffer[OUT_TYPE]
    """The output of the first set."""
    var is_expected: Optional[Bool]
    """Of which work, once it has been computed."""
    var wrong: DeviceBuffer[DType.uint32]
    var graphs: List[StreamGraph]

    def __init__(out self, ctx: DeviceContext, numbers: List[Int]) raises:
        """Makes the operands.

        Args:
            ctx: The device.
            numbers: Those of the line.

        Raises:
            If they do not fit the device's memory.
        """
        self.sets = Sets(ctx, numbers)
        self.expected = ctx.enqueue_create_buffer[OUT_TYPE](len(self.sets.y[0]))
        self.is_expected = None
        self.wrong = ctx.enqueue_create_buffer[DType.uint32](1)
        self.graphs = List[StreamGraph]()

    def arguments(
        self, fused: Bool, set: Int
    ) -> Arguments[
        MemoryActivation[TYPE, 0], MemoryOutput[OUT_TYPE], OUT_TYPE, OUT_TYPE
    ]:
        """The operands of a call.

        Args:
            fused: Its work.
            set: Of operands.
        """
        return Arguments(
            MemoryActivation[TYPE, 0](reads_of(self.sets.x[set])),
            reads_of(self.sets.filter[set]),
            self.sets.epilogue(fused, set),
            MemoryOutput[OUT_TYPE](data_of(self.sets.y[set])),
        )

    def operands(self, fused: Bool) -> Operands:
        """What a plan may know of the operands.

        Args:
            fused: The work.
        """
        return self.arguments(fused, 0).operands(exact=False)

    def launch(
        self,
        mut stream: Stream,
        index: Int,
        plan: GemmPlan,
        fused: Bool,
        i: Int,
    ) raises:
        """Enqueues a configuration.

        Args:
            stream: Where.
            index: Of the configuration.
            plan: Of it, for the problem.
            fused: The work.
            i: Of the launch; the sets take turns.
        """
        var set = i % len(self.sets.x)
        var arguments = self.arguments(fused, set)
        var operands = Launched(
            arguments.activation.data(),
            arguments.filter,
            arguments.epilogue.residual,
            arguments.output,
        )
        var visitor = Visitor.of(arguments.epilogue)
        comptime for known in range(COUNT):
            if index == known:
                launch_gemm[CONFIGURATIONS[known]](
                    plan, self.sets.problem, operands, visitor, stream
                )

    def choose(mut self, ctx: DeviceContext, fused: Bool) raises -> String:
        """The answer to `choose`."""
        var operands = self.operands(fused)
        var device = device_of(ctx)
        var problem = self.sets.problem
        var unaligned = Bool(gemm_refusal(problem, operands, device))
        var plan = plan_gemm(problem, operands, device, unaligned=unaligned)
        var rows = materialize[ROWS]()
        var index = -1
        for i in range(len(rows)):
            if rows[i] == plan.candidate:
                index = i
        if index < 0:
            raise Error(
                t"dispatch chooses row {plan.candidate}, which is not among the"
                t" {COUNT} configurations of this build"
            )
        var stream = Stream(ctx)
        self.poison(ctx)
        self.launch(stream, index, plan, fused, 0)
        ctx.enqueue_copy(self.expected, self.sets.y[0])
        ctx.synchronize()
        self.is_expected = fused
        return String(
            t'{{"index": {index}, "split_k": {plan.split_k}, "seconds":'
            t" {plan.seconds}}}"
        )

    def poison(self, ctx: DeviceContext) raises:
        """Poisons the first set's output."""
        ctx.enqueue_function[fill_poison](
            self.sets.y[0],
            Int64(len(self.sets.y[0])),
            grid_dim=BLOCKS,
            block_dim=THREADS,
        )

    def differing(
        self,
        ctx: DeviceContext,
        index: Int,
        plan: GemmPlan,
        fused: Bool,
    ) raises -> Int:
        """Runs a configuration once, and counts the elements that are wrong.

        Args:
            ctx: The device.
            index: Of the configuration.
            plan: Of it, for the problem.
            fused: The work.
        """
        var stream = Stream(ctx)
        self.poison(ctx)
        self.launch(stream, index, plan, fused, 0)
        self.wrong.enqueue_fill(0)
        ctx.enqueue_function[compare](
            self.expected,
            self.sets.y[0],
            Int64(len(self.expected)),
            self.wrong,
            grid_dim=BLOCKS,
            block_dim=THREADS,
        )
        with self.wrong.map_to_host() as host:
            return Int(host[0])

    def prepare(
        mut self,
        ctx: DeviceContext,
        index: Int,
        split_k: Int,
        fused: Bool,
        launches: Int,
    ) raises -> String:
        """The answer to `prepare`."""
        if not self.is_expected or self.is_expected.value() != fused:
            raise Error("prepare: what is right of this work is not known yet")
        if index < 0 or index >= COUNT:
            raise Error(t"prepare: {index} is no index below {COUNT}")
        var config = configurations()[index]
        var device = device_of(ctx)
        var problem = self.sets.problem
        var table = GemmCandidates(
            problem, self.operands(fused), device, unaligned=config.unaligned
        )
        var refusal = table.config_refusal(config, split_k)
        if refusal:
            return String(t'{{"refusal": "{refusal.value()}"}}')
        var plan = GemmPlan(
            config, Traversal(problem, TYPE), device, split_k=split_k
        )
        var wrong = self.differing(ctx, index, plan, fused)
        if wrong:
            return String(
                t'{{"wrong": {wrong}, "elements": {len(self.expected)}}}'
            )

        def enqueue(mut stream: Stream) raises {imm}:
            for i in range(launches):
                self.launch(stream, index, plan, fused, i)

        var graph = StreamGraph(ctx, enqueue)
        # The first replay uploads it, which no estimate should contain.
        _ = graph.seconds(1)
        self.graphs.append(graph^)
        return String(t'{{"graph": {len(self.graphs) - 1}}}')

    def replay(self, graph: Int, times: Int) raises -> String:
        """The answer to `replay`."""
        if graph < 0 or graph >= len(self.graphs):
            raise Error(t"replay: {graph} is no graph")
        var ns = Int(self.graphs[graph].seconds(times) * 1e9)
        return String(t'{{"ns": {ns}}}')
