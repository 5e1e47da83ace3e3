"""The dot-product GEMM in the registry: what it takes, how it is planned and
launched."""

from std.collections import Optional
from std.math import ceildiv
from std.sys.info import size_of

from ...conv.access import ActivationSource
from ...conv.known import KnownFilter, KnownProblem
from ...conv.fields import ROW_BYTES
from ...conv.memory import Writes, element_bytes
from ...conv.operands import Arguments, Device, Operands, OperandTypes
from ...conv.problem import ConvProblem
from ...conv.quantization import sums_refusal
from ...conv.kernel import kernel_name
from ..epilogue import TileStore
from ..features import feature_refusal, has_feature, may_have, must_have
from ..gemm.launch import panels_refusal
from ..gemm.scheduler import gathered_stride
from ..kernel import CpuKernel
from ..named import checked_cut, raise_refusal
from ..pool import Pool
from ..register_output import RegisterOutput
from ..scheduler import Schedule, Tasks
from .block_diagonal import (
    BlockDiagonal,
    joins_groups,
    multiplied_problem,
)
from .candidates import choose_blocking
from .cut import DotCut
from .kernel import run_task
from .mma import DotUnit
from .params import DotParams, DotScratch
from .pipeline import stages, tile_sums, widened_elements
from .scheduler import ACCESS_IMAGE, Block, Blocking


@fieldwise_init
struct DotPlan(ImplicitlyCopyable, Movable, Writable):
    """A cut into tasks, and their schedule."""

    var blocking: Blocking
    var schedule: Schedule
    var threads: Int
    var widened: Int
    """Float32 values of a worker's memory that widened panels take."""

    @staticmethod
    def of[
        U: DotUnit
    ](
        problem: ConvProblem,
        types: OperandTypes,
        device: Device,
        wake_cycles: Float64,
    ) -> DotPlan:
        """Searches for the cut.

        Parameters:
            U: The instructions.

        Args:
            problem: The convolution, with at least one output.
            types: Of its operands.
            device: The CPU.
            wake_cycles: Of the pool.
        """
        var chosen = choose_blocking[U](
            multiplied_problem[U](problem, types.input),
            types,
            device.units,
            wake_cycles,
        )
        return Self.of_blocking[U](
            problem, types, chosen.blocking, chosen.threads
        )

    @staticmethod
    def of_blocking[
        U: DotUnit
    ](
        problem: ConvProblem,
        types: OperandTypes,
        blocking: Blocking,
        threads: Int,
    ) -> DotPlan:
        """The plan of a cut.

        Parameters:
            U: The instructions.

        Args:
            problem: The convolution, with at least one output.
            types: Of its operands.
            blocking: A cut of the problem as the unit multiplies it.
            threads: That run it.
        """
        var rows = 0
        # Blocks with infinities are copied row by row, then group by group.
        var joined = joins_groups[U](problem, types.input)
        if blocking.cut.access == ACCESS_IMAGE or joined:
            var stride = gathered_stride(
                blocking.depth, element_bytes(types.input)
            )
            rows = (2 if joined else 1) * U.rows * stride
        var elements = max(
            blocking.copied_elements(), blocking.rows_offset() + rows
        )
        var widened = _floats[DType.uint8](
            widened_elements[U](problem, types.input, blocking)
            * element_bytes(types.input)
        )
        var scratch = (
            stages[U]() * tile_sums[U]()
            + _floats[DType.int32](blocking.chunks)
            + _floats[DType.uint8](
                U.spread(types.input)
                * (elements * element_bytes(types.input) + ROW_BYTES)
            )
            + widened
        )
        return DotPlan(
            blocking,
            Schedule(
                problem,
                blocking.tasks(multiplied_problem[U](problem, types.input)),
                threads,
                scratch,
                task_products=1,
            ),
            threads,
            widened,
        )

    def write_to(self, mut writer: Some[Writer]):
        """Writes how the kernel runs.

        Args:
            writer: Where to.
        """
        writer.write(t"{self.blocking}; {self.threads} threads")


def _register_output[
    U: DotUnit
](arguments: Arguments, filters: Int) -> Optional[
    RegisterOutput[type_of(arguments).Source.dtype]
]:
    """The output, if register tiles or their sums may be stored in it."""
    comptime dtype = type_of(arguments).Source.dtype
    comptime feature = U.sum_store_feature(dtype)
    comptime if Bool(feature):
        if not has_feature(feature.value()):
            return None
    return RegisterOutput[dtype].of(arguments, filters)


def _floats[dtype: DType](elements: Int) -> Int:
    """Float32 values that take as much memory, in whole cache lines."""
    return ceildiv(elements * size_of[dtype](), 64) * 16


@fieldwise_init
struct DotTasks[Source: ActivationSource, U: DotUnit](Tasks):
    """The tasks of a plan.

    Parameters:
        Source: How the activation is reached.
        U: The instructions.
    """

    var params: DotParams[Self.Source]
    var widened: Int
    """See `DotPlan`."""

    def run(self, task: Int, scratch: Writes[DType.float32]):
        ref params = self.params
        ref blocking = params.blocking
        var offsets = scratch.unsafe_offset(
            stages[Self.U]() * tile_sums[Self.U]()
        )
        comptime dtype = Self.Source.dtype
        var filter = offsets.unsafe_offset(
            _floats[DType.int32](blocking.chunks)
        )
        var elements = filter.unsafe_offset(self.widened)
        var block = Block(params.problem, blocking, task, params.images_inside)
        var copied = elements.unsafe_bitcast[Scalar[dtype]]()
        run_task[Self.U](
            params,
            block,
            DotScratch[dtype](
                scratch,
                offsets.unsafe_bitcast[Int32](),
                copied,
                copied.unsafe_offset(blocking.rows_offset()),
                filter.unsafe_bitcast[Scalar[dtype]](),
            ),
        )


struct DotProduct[P: Pool, U: DotUnit](CpuKernel):
    """Register tiles of dot products, of any convolution of 8 or 16 bits whose
    filter is packed in panels of its own.

    Parameters:
        P: The threads that it runs on.
        U: The instructions.
    """

    comptime code = Self.U.kernel
    comptime Plan = DotPlan
    comptime Queue = Self.P
    comptime Unit = Self.U
    comptime takes_any_block = True
    comptime takes_cuts = True

    @staticmethod
    def device_refusal(capability: Int) -> Optional[String]:
        """None: `refusal` asks the CPU."""
        return None

    @staticmethod
    def type_refusal(types: OperandTypes) -> Optional[String]:
        if not Self.U.feature(types.input):
            return String(
                t"{kernel_name(Self.code)} does not multiply {types.input}"
            )
        return Self.U.build_refusal()

    @staticmethod
    def may_run(known: KnownProblem, types: OperandTypes) -> Bool:
        return not known.is_depthwise() and may_have(
            known, Self.U.feature(types.input).value()
        )

    @staticmethod
    def always_runs(known: KnownProblem, types: OperandTypes) -> Bool:
        """See `ConvKernel`: where the instructions are known to be there. The
        grouped kernel, which is in front, takes groups that share panels."""
        return must_have(known, Self.U.feature(types.input).value())

    @staticmethod
    def refusal(
        problem: ConvProblem, operands: Operands, device: Device
    ) -> Optional[String]:
        var refusal = feature_refusal(
            Self.U.feature(operands.types.input).value()
        )
        if refusal:
            return refusal
        if operands.types.input.is_integral():
            refusal = sums_refusal(problem.gemm_k())
            if refusal:
                return refusal
        return panels_refusal(
            Self.code, multiplied_problem[Self.U](problem, operands.types.input)
        )

    @staticmethod
    def suits(problem: ConvProblem, operands: Operands, device: Device) -> Bool:
        return (
            not problem.is_depthwise()
            and multiplied_problem[Self.U](
                problem, operands.types.input
            ).panel_groups()
            == 1
        )

    @staticmethod
    def named_plan(
        problem: ConvProblem,
        operands: Operands,
        device: Device,
        numbers: List[Int],
    ) raises -> DotPlan:
        var types = operands.types
        var cut = checked_cut[DotCut](numbers)
        var multiplied = multiplied_problem[Self.U](problem, types.input)
        raise_refusal(
            cut.shape_refusal[Self.U](multiplied, types, device.units)
        )
        return DotPlan.of_blocking[Self.U](
            problem, types, cut.blocking[Self.U](multiplied, types), cut.threads
        )

    @staticmethod
    def plan(
        problem: ConvProblem, operands: Operands, device: Device
    ) raises -> DotPlan:
        return DotPlan.of[Self.U](
            problem, operands.types, device, Self.P.wake_cycles
        )

    @staticmethod
    def launch[
        known: KnownFilter, scaled: Bool
    ](
        plan: DotPlan,
        problem: ConvProblem,
        arguments: Arguments,
        mut queue: Self.P,
    ) raises:
        comptime Source = type_of(arguments).Source
        var multiplied = multiplied_problem[Self.U](problem, Source.dtype)
        var params = DotParams[Source](
            arguments.activation,
            arguments.filter,
            arguments.quantization.zero_point,
            multiplied.panel_layout(Source.dtype),
            BlockDiagonal.of[Self.U](problem, Source.dtype),
            TileStore(arguments),
            _register_output[Self.U](arguments, problem.filters),
            multiplied,
            plan.blocking,
            # Else threads would write to the same cache lines.
            arguments.activation.batch_last() or arguments.output.batch_last(),
        )
        plan.schedule.run(DotTasks[Source, Self.U](params, plan.widened), queue)
