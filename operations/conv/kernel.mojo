"""What a kernel of a registry says of itself: what it takes, how it is planned and
launched."""

from std.collections import Optional

from .fields import KERNEL_NAMES
from .interleave import ANY_BLOCK, activation_layout
from .known import KnownFilter, KnownProblem
from .operands import Arguments, Device, Operands, OperandTypes
from .plans import PlanValue
from .problem import ConvProblem


def kernel_name(kernel: Int) -> StaticString:
    """The name of a kernel, as the Python layer spells it.

    Args:
        kernel: A `KERNEL_*` code.
    """
    return materialize[KERNEL_NAMES]()[kernel]


trait ConvKernel:
    """A kernel of the registry. It holds nothing: its methods state what it
    takes, plan, and launch."""

    comptime code: Int
    """Its `KERNEL_*` code."""
    comptime Plan: PlanValue
    """How it runs a problem, without pointers."""
    comptime Queue: AnyType
    """Where it is launched: a stream, or threads."""
    comptime interleaved: Int = 0
    """Channels of a block in the layouts of interleave.mojo, which it takes and
    no other; 0 for channels last."""
    comptime takes_any_block: Bool = False
    """Whether it also takes layouts that a call tells, `ANY_BLOCK`."""
    comptime takes_cuts: Bool = False
    """Whether it has a `named_plan`, so that a tuner may name how it runs."""

    @staticmethod
    def device_refusal(capability: Int) -> Optional[String]:
        """Why the kernel does not run on a device, or None.

        Args:
            capability: Of the device, as in `Device`.
        """
        ...

    @staticmethod
    def type_refusal(types: OperandTypes) -> Optional[String]:
        """Why the kernel is not built for operands of these types, or None.

        Args:
            types: Of the operands, in the kernel's layout.
        """
        ...

    @staticmethod
    def may_run(known: KnownProblem, types: OperandTypes) -> Bool:
        """Whether the kernel may be chosen for a problem with these known
        facts. An op is compiled with the kernels that may be.

        Args:
            known: Of the problem.
            types: Of the operands, which `type_refusal` takes.
        """
        ...

    @staticmethod
    def takes_the_rest(types: OperandTypes) -> Bool:
        """Whether dispatch chooses this kernel where all others refuse. An op
        that leaves the choice to dispatch is compiled with it.

        Args:
            types: Of the operands, which `type_refusal` takes.
        """
        return False

    @staticmethod
    def always_runs(known: KnownProblem, types: OperandTypes) -> Bool:
        """Whether dispatch chooses this kernel for every problem with these
        known facts that it does not refuse and none in front of it in the
        registry takes. An op that leaves the choice to dispatch is compiled
        with none behind it but one that takes the rest.

        Args:
            known: Of the problem, which `may_run` takes.
            types: Of the operands, which `type_refusal` takes.
        """
        return False

    @staticmethod
    def refusal(
        problem: ConvProblem, operands: Operands, device: Device
    ) -> Optional[String]:
        """Why the kernel cannot take a problem, or None.

        Args:
            problem: The convolution, valid (`ConvProblem.validate`).
            operands: Its operands, whose types `type_refusal` takes.
            device: The device.
        """
        ...

    @staticmethod
    def suits(problem: ConvProblem, operands: Operands, device: Device) -> Bool:
        """Whether the kernel is faster than those behind it in the registry,
        where it can take the problem, but for what `predicted_seconds` of both
        says. A quick question, asked before `refusal`.

        Args:
            problem: The convolution.
            operands: Its operands.
            device: The device.
        """
        ...

    @staticmethod
    def predicted_seconds(
        problem: ConvProblem, operands: Operands, device: Device
    ) -> Optional[Float64]:
        """How long the kernel takes, by a model whose times may be compared
        with those of the device's other kernels, or None if it has none.

        Args:
            problem: The convolution; nothing refuses it.
            operands: Its operands.
            device: The device.
        """
        return None

    @staticmethod
    def named_plan(
        problem: ConvProblem,
        operands: Operands,
        device: Device,
        numbers: List[Int],
    ) raises -> Self.Plan:
        """How the kernel runs a problem by a cut that somebody names, where
        `takes_cuts`.

        Args:
            problem: The convolution, with at least one output; nothing refuses
                it.
            operands: Its operands.
            device: The device.
            numbers: Of the cut.

        Raises:
            Why the kernel cannot run the problem so.
        """
        raise Error(t"{kernel_name(Self.code)} takes no cut by name")

    @staticmethod
    def plan(
        problem: ConvProblem, operands: Operands, device: Device
    ) raises -> Self.Plan:
        """How the kernel runs a problem.

        Args:
            problem: The convolution, with at least one output; nothing refuses
                it.
            operands: Its operands.
            device: The device.

        Raises:
            If nothing can be planned, which `refusal` should have said.
        """
        ...

    @staticmethod
    def launch[
        known: KnownFilter, scaled: Bool
    ](
        plan: Self.Plan,
        problem: ConvProblem,
        arguments: Arguments,
        mut queue: Self.Queue,
    ) raises:
        """Encodes what depends on pointers, and starts the kernel. Allocates no
        device memory, waits for nothing, and asks no model.

        Parameters:
            known: What is known of the filter: which configurations to compile.
            scaled: Whether each filter has a scale.

        Args:
            plan: What `plan` returned for the problem and such operands.
            problem: The convolution.
            arguments: The operands of this call.
            queue: Where to run.

        Raises:
            What the driver refused.
        """
        ...


def built_refusal[Kernel: ConvKernel](types: OperandTypes) -> Optional[String]:
    """Why a kernel is not built for operands of these types and layouts, or
    None.

    Parameters:
        Kernel: The kernel.

    Args:
        types: Of the operands.
    """
    if types.interleaved != Kernel.interleaved and not (
        Kernel.takes_any_block and types.interleaved == ANY_BLOCK
    ):
        return String(
            t"{kernel_name(Kernel.code)} takes activations in"
            t" {activation_layout(Kernel.interleaved)}; here"
            t" {activation_layout(types.interleaved)}"
        )
    return Kernel.type_refusal(types)
