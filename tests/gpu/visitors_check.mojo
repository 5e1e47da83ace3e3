"""A problem on which chains of visitors are checked, on the configurations that
reach every way of storing."""

from max.gpu.host import DeviceBuffer, DeviceContext

from operations.conv.access import MemoryOutput
from operations.conv.problem import ConvProblem
from operations.nvidia.sm90.gemm.candidates import CANDIDATES
from operations.nvidia.im2col.traversal import Traversal
from operations.nvidia.sm90.gemm.config import Sm90Config
from operations.nvidia.sm90.gemm.legality import problem_refusal
from operations.nvidia.epilogue.callbacks import EpilogueVisitor
from operations.nvidia.epilogue.chain import Chain
from operations.nvidia.sm90.gemm.legality import layout_of, visitor_refusal
from operations.nvidia.epilogue.steps import ChannelBias, ChannelScale
from operations.nvidia.epilogue.sums import ChannelSums, sum_channels
from operations.nvidia.sm90.gemm.launch import GemmOperands
from operations.nvidia.sm90.gemm.visit import with_room
from buffers import (
    BLOCKS,
    GUARD,
    data_of,
    elements_of,
    poison,
    put_integers,
    reads_of,
)
from epilogues import BIAS_TYPE
from kernels import POISON, THREADS, convolve
from sm90_epilogue import configuration
from prepared import Prepared
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
        config.consumers * Visitor.shared_bytes(layout_of(config, dtype)),
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
        put_integers(ctx, self.activation, 1, 1)
        put_integers(ctx, self.filter, 1, 2)
        put_integers(ctx, self.scale, 1, 6)
        put_integers(ctx, self.bias, 3, 3)
        put_integers(ctx, self.residual, 2, 4)
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
        return ChannelScale(reads_of(self.scale)).then(
            ChannelBias(reads_of(self.bias))
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
        poison(ctx, self.found)
        poison(ctx, self.auxiliary)
        poison(ctx, self.channels)

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
        var refusal = problem_refusal(
            config, Traversal(self.problem, IN_TYPE), Self.dtype
        )
        if not refusal:
            refusal = visitor_refusal(visitor, config, self.problem, Self.dtype)
        if refusal:
            return 0
        self.wrong.enqueue_fill(0)
        var prepared = Prepared[config](
            ctx,
            self.problem,
            GemmOperands[IN_TYPE, MemoryOutput[Self.dtype]](
                reads_of(self.activation),
                reads_of(self.filter),
                reads_of(self.residual),
                self.output(),
            ),
            visitor,
        )
        for _ in range(REPEATS):
            self.clear(ctx)
            prepared.launch(ctx)
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
