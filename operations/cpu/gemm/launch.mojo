"""The implicit GEMM in the registry: what it takes, how it is planned and
launched."""

from std.collections import Optional

from ...conv.access import ActivationSource
from ...conv.fields import KERNEL_IMPLICIT_GEMM, KERNEL_POINTWISE, PANEL
from ...conv.known import KnownFilter, KnownProblem
from ...conv.memory import Writes
from ...conv.operands import Arguments, Device, Operands, OperandTypes
from ...conv.problem import ConvProblem
from ...conv.kernel import kernel_name
from ..config import (
    fused_input_refusal,
    integer_refusal,
    reads_in_place,
)
from ..epilogue import TileStore
from ..kernel import CpuKernel
from ..named import checked_cut, raise_refusal
from ..pool import Pool
from ..register_output import RegisterOutput
from ..scheduler import Schedule, Tasks
from .candidates import choose_blocking
from .cut import NamedCut
from .kernel import GemmParams, GemmScratch, run_task
from .scheduler import ACCESS_MATRIX, Blocking, Task


@fieldwise_init
struct GemmPlan(ImplicitlyCopyable, Movable, Writable):
    """A cut into tasks, and their schedule."""

    var blocking: Blocking
    var schedule: Schedule
    var threads: Int

    def __init__(
        out self, problem: ConvProblem, types: OperandTypes, device: Device
    ):
        """Searches for the cut.

        Args:
            problem: The convolution, with at least one output.
            types: Of its operands.
            device: The CPU.
        """
        self = Self(
            problem, choose_blocking(problem, types, device.units), device
        )

    def __init__(
        out self, problem: ConvProblem, blocking: Blocking, device: Device
    ):
        """Schedules a cut.

        Args:
            problem: The convolution, with at least one output.
            blocking: The cut.
            device: The CPU.
        """
        self.threads = device.units
        self.blocking = blocking
        self.schedule = Schedule(
            problem,
            self.blocking.tasks(),
            device.units,
            self.blocking.activations() + self.blocking.sums(),
        )

    def write_to(self, mut writer: Some[Writer]):
        """Writes how the kernel runs.

        Args:
            writer: Where to.
        """
        if self.blocking.access == ACCESS_MATRIX:
            writer.write(
                "one tap, stride 1, no padding: activations are read where"
                " they lie; "
            )
        writer.write(
            t"register tile {self.blocking.tiling.rows} pixels x"
            t" {self.blocking.tile_panels() * PANEL} filters;"
            t" {self.blocking}; {self.threads} threads"
        )


@fieldwise_init
struct GemmTasks[Source: ActivationSource](Tasks):
    """The tasks of a plan.

    Parameters:
        Source: How the activation is reached.
    """

    var params: GemmParams[Self.Source]

    def run(self, task: Int, scratch: Writes[DType.float32]):
        ref params = self.params
        run_task(
            params,
            Task(params.problem, params.blocking, task),
            GemmScratch(
                scratch, scratch.unsafe_offset(params.blocking.activations())
            ),
        )


def _params[
    Source: ActivationSource, //
](
    plan: GemmPlan, problem: ConvProblem, ref arguments: Arguments[Source, ...]
) -> GemmParams[Source]:
    """What the tasks of a launch read."""
    return GemmParams(
        arguments.activation,
        arguments.filter,
        problem.panel_layout(Source.dtype),
        TileStore(arguments),
        _register_output(problem, arguments),
        problem,
        plan.blocking,
    )


def _register_output(
    problem: ConvProblem, ref arguments: Arguments
) -> Optional[RegisterOutput[DType.float32]]:
    """The output, if register tiles may store it: float32, behind an
    epilogue of `REGISTER_FORMS`."""
    comptime if type_of(arguments).Source.dtype == DType.float32:
        return RegisterOutput[DType.float32].of(arguments, problem.filters)
    else:
        return None


def panels_refusal(kernel: Int, problem: ConvProblem) -> Optional[String]:
    """Why a kernel cannot multiply by the panels of a problem's packed filter,
    or None.

    Args:
        kernel: Its `KERNEL_*` code.
        problem: The convolution.
    """
    if problem.is_depthwise():
        return String(
            t"{kernel_name(kernel)} reads filters in panels, which depthwise"
            t" filters are not packed into"
        )
    if problem.panel_groups() > 1:
        return String(
            t"{kernel_name(kernel)} multiplies a panel by one group's channels,"
            t" but here {problem.panel_groups()} groups share a panel"
        )
    return None


struct ImplicitGemm[P: Pool](CpuKernel):
    """Register tiles of pixels by filters, of any convolution whose filter is
    packed in panels.

    Parameters:
        P: The threads that it runs on.
    """

    comptime code = KERNEL_IMPLICIT_GEMM
    comptime takes_cuts = True
    comptime Plan = GemmPlan
    comptime Queue = Self.P

    @staticmethod
    def device_refusal(capability: Int) -> Optional[String]:
        """None: it runs on every CPU."""
        return None

    @staticmethod
    def type_refusal(types: OperandTypes) -> Optional[String]:
        """See `ConvKernel`: it takes all floats."""
        return integer_refusal(Self.code, types)

    @staticmethod
    def may_run(known: KnownProblem, types: OperandTypes) -> Bool:
        return not known.is_depthwise()

    @staticmethod
    def refusal(
        problem: ConvProblem, operands: Operands, device: Device
    ) -> Optional[String]:
        return panels_refusal(Self.code, problem)

    @staticmethod
    def suits(problem: ConvProblem, operands: Operands, device: Device) -> Bool:
        return True

    @staticmethod
    def named_plan(
        problem: ConvProblem,
        operands: Operands,
        device: Device,
        numbers: List[Int],
    ) raises -> GemmPlan:
        var cut = checked_cut[NamedCut](numbers)
        raise_refusal(cut.shape_refusal(problem, operands.types))
        return GemmPlan(problem, cut.blocking(problem, operands.types), device)

    @staticmethod
    def plan(
        problem: ConvProblem, operands: Operands, device: Device
    ) raises -> GemmPlan:
        return GemmPlan(problem, operands.types, device)

    @staticmethod
    def launch[
        known: KnownFilter, scaled: Bool
    ](
        plan: GemmPlan,
        problem: ConvProblem,
        arguments: Arguments,
        mut queue: Self.P,
    ) raises:
        plan.schedule.run(GemmTasks(_params(plan, problem, arguments)), queue)


struct Pointwise[P: Pool](CpuKernel):
    """The implicit GEMM of a convolution whose activation is its matrix.

    Parameters:
        P: The threads that it runs on.
    """

    comptime code = KERNEL_POINTWISE
    comptime Plan = GemmPlan
    comptime Queue = Self.P

    @staticmethod
    def device_refusal(capability: Int) -> Optional[String]:
        """None: it runs on every CPU."""
        return None

    @staticmethod
    def type_refusal(types: OperandTypes) -> Optional[String]:
        var refusal = fused_input_refusal(Self.code, types)
        if refusal or reads_in_place(types.input, types.fused_input):
            return refusal
        return String(
            "pointwise reads the activation where it lies, as float32 and with"
            " nothing fused in front"
        )

    @staticmethod
    def may_run(known: KnownProblem, types: OperandTypes) -> Bool:
        return not known.is_depthwise() and known.filter().may_have(
            taps=1, stride=1
        )

    @staticmethod
    def refusal(
        problem: ConvProblem, operands: Operands, device: Device
    ) -> Optional[String]:
        var refusal = panels_refusal(Self.code, problem)
        if refusal or problem.is_pointwise():
            return refusal
        return String(
            t"pointwise takes one tap, stride 1 and no padding; here filter"
            t" {problem.filter}, stride {problem.stride}, padding"
            t" {problem.pad_before}/{problem.pad_after}"
        )

    @staticmethod
    def suits(problem: ConvProblem, operands: Operands, device: Device) -> Bool:
        return problem.is_pointwise()

    @staticmethod
    def plan(
        problem: ConvProblem, operands: Operands, device: Device
    ) raises -> GemmPlan:
        return GemmPlan(problem, operands.types, device)

    @staticmethod
    def launch[
        known: KnownFilter, scaled: Bool
    ](
        plan: GemmPlan,
        problem: ConvProblem,
        arguments: Arguments,
        mut queue: Self.P,
    ) raises:
        plan.schedule.run(GemmTasks(_params(plan, problem, arguments)), queue)
