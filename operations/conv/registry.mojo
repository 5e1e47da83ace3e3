"""The registry: a device's kernels, and the one way from a problem to a launch.

    problem, operands, device
        -> choose: the first kernel that suits the problem and does not refuse,
                   or one behind it that is faster, where models tell
        -> plan:   a value without pointers, which the process keeps; instead
                   of both, one that a tuner found to be faster
        -> launch: the plan, the call's pointers, and where to run
"""

from std.collections import Optional

from .fields import (
    KERNEL_AUTO,
    KERNEL_HOMES,
    KERNEL_NAMES,
)
from .kernel import ConvKernel, built_refusal, kernel_name
from .known import ANY_KERNEL, KnownFilter, KnownProblem
from .operands import Arguments, Device, Operands, OperandTypes
from .plans import PlanKey, Planned, keep_plan, kept_plan
from .problem import ConvProblem
from .trace import is_traced, trace_choice
from .tuned import tuned_row

comptime ALL_KERNELS = -1
"""The set of all kernels. Bit `k` of a set stands for the kernel of code
`k`."""


def has_kernel(kernels: Int, kernel: Int) -> Bool:
    """Whether a set holds a kernel.

    Args:
        kernels: The set, a bit each.
        kernel: A `KERNEL_*` code.
    """
    return (kernels >> kernel) & 1 == 1


struct Registry[Queue: AnyType, *Kernels: ConvKernel]:
    """A device's kernels, in the order in which they are asked.

    Parameters:
        Queue: Where they are launched: a stream, or threads.
        Kernels: The kernels.
    """

    @staticmethod
    def codes() -> List[Int]:
        """The `KERNEL_*` codes, in order."""
        var codes = List[Int]()
        comptime for i in range(Self.Kernels.length):
            codes.append(Self.Kernels[i].code)
        return codes^

    @staticmethod
    def names() -> String:
        """The names, in order, for messages."""
        var names = String()
        comptime for i in range(Self.Kernels.length):
            comptime if i > 0:
                names += ", "
            names += kernel_name(Self.Kernels[i].code)
        return names^

    @staticmethod
    def needed(
        types: OperandTypes, capability: Int, known: KnownProblem
    ) -> Int:
        """The kernels that an op is compiled with, a bit each.

        Args:
            types: Of the operands.
            capability: Of the device, as in `Device`.
            known: What is known of the problem.
        """
        var kernels = 0
        var decided = False
        comptime for i in range(Self.Kernels.length):
            comptime Kernel = Self.Kernels[i]
            if (
                _is_asked(Kernel.code, known.kernel)
                and not Kernel.device_refusal(capability)
                and not built_refusal[Kernel](types)
            ):
                if known.kernel == Kernel.code or Kernel.takes_the_rest(types):
                    kernels |= 1 << Kernel.code
                elif not decided and Kernel.may_run(known, types):
                    kernels |= 1 << Kernel.code
                    decided = known.kernel == KERNEL_AUTO and (
                        Kernel.always_runs(known, types)
                    )
        return kernels

    @staticmethod
    @no_inline
    def refusal[
        types: OperandTypes, kernels: Int = ALL_KERNELS
    ](
        kernel: Int, problem: ConvProblem, operands: Operands, device: Device
    ) -> Optional[String]:
        """Why a kernel cannot take a problem, or None.

        Parameters:
            types: Of the operands.
            kernels: What the op is compiled with; it asks no other.

        Args:
            kernel: A `KERNEL_*` code.
            problem: The convolution, valid.
            operands: Its operands.
            device: The device.
        """
        comptime for i in range(Self.Kernels.length):
            comptime Kernel = Self.Kernels[i]
            if kernel == Kernel.code:
                comptime if has_kernel(kernels, Kernel.code):
                    return _refusal_of[Kernel, types](problem, operands, device)
                else:
                    return String("the op was compiled without it")
        var name = kernel_name(kernel)
        var home = materialize[KERNEL_HOMES]()[kernel]
        return String(t"{name} runs on {home} only; here {Self.names()} do")

    @staticmethod
    def choose[
        types: OperandTypes, kernels: Int = ALL_KERNELS
    ](
        requested: Int,
        problem: ConvProblem,
        operands: Operands,
        device: Device,
    ) raises -> Int:
        """The kernel that runs a problem.

        Parameters:
            types: Of the operands.
            kernels: What the op is compiled with.

        Args:
            requested: A `KERNEL_*` code; `KERNEL_AUTO` leaves the choice here.
            problem: The convolution, valid.
            operands: Its operands.
            device: The device.

        Returns:
            A `KERNEL_*` code.

        Raises:
            Why the requested kernel, or every one, cannot take the problem.
        """
        comptime count = len(KERNEL_NAMES)
        if requested < KERNEL_AUTO or requested >= count:
            raise Error(
                t"config: kernel code {requested} is not 0 to {count - 1}"
            )
        if requested != KERNEL_AUTO:
            var refusal = Self.refusal[types, kernels](
                requested, problem, operands, device
            )
            if refusal:
                raise Error(
                    t"config: {kernel_name(requested)} cannot take this"
                    t" convolution: {refusal.value()}"
                )
            return requested
        var reason = String(t"none is built for {types.input} on this device")
        var chosen = Optional[Int]()
        var least = 0.0
        comptime for i in range(Self.Kernels.length):
            comptime Kernel = Self.Kernels[i]
            comptime built = has_kernel(
                kernels, Kernel.code
            ) and not built_refusal[Kernel](types)
            comptime if built:
                # Formatting a refusal takes time: only ask what suits.
                if Kernel.suits(
                    problem, operands, device
                ) and not Kernel.device_refusal(device.capability):
                    var refusal = Self.refusal[types, kernels](
                        Kernel.code, problem, operands, device
                    )
                    if refusal:
                        reason = refusal.value()
                        continue
                    var seconds = Kernel.predicted_seconds(
                        problem, operands, device
                    )
                    if not chosen and not seconds:
                        return Kernel.code
                    if seconds and (not chosen or seconds.value() < least):
                        chosen = Kernel.code
                        least = seconds.value()
        if chosen:
            return chosen.value()
        raise Error(
            t"no kernel takes this convolution of {types.input}: {reason}"
        )

    @staticmethod
    def plan[
        types: OperandTypes, kernels: Int = ALL_KERNELS
    ](
        requested: Int,
        problem: ConvProblem,
        operands: Operands,
        device: Device,
    ) raises -> Planned:
        """Which kernel runs a problem, and how.

        Parameters:
            types: Of the operands.
            kernels: What the op is compiled with.

        Args:
            requested: A `KERNEL_*` code; `KERNEL_AUTO` leaves the choice here.
            problem: The convolution, valid.
            operands: Its operands.
            device: The device.

        Returns:
            The plan; of a problem without outputs, one that is not launched.

        Raises:
            Why the requested kernel, or every one, cannot take the problem.
        """
        if requested == KERNEL_AUTO and problem.has_outputs():
            var tuned = Self._tuned[types, kernels](problem, operands, device)
            if tuned:
                return tuned.value()
        var kernel = Self.choose[types, kernels](
            requested, problem, operands, device
        )
        if not problem.has_outputs():
            return Planned(kernel, 0)
        comptime for i in range(Self.Kernels.length):
            comptime Kernel = Self.Kernels[i]
            comptime built = has_kernel(
                kernels, Kernel.code
            ) and not built_refusal[Kernel](types)
            comptime if built:
                if kernel == Kernel.code:
                    return Planned(
                        kernel, Kernel.plan(problem, operands, device)
                    )
        raise _compiled_without(kernel)

    @staticmethod
    @no_inline
    def named[
        types: OperandTypes, kernels: Int = ALL_KERNELS
    ](
        kernel: Int,
        problem: ConvProblem,
        operands: Operands,
        device: Device,
        numbers: List[Int],
    ) raises -> Planned:
        """How a kernel runs a problem by a cut that somebody names.

        Parameters:
            types: Of the operands.
            kernels: What the op is compiled with.

        Args:
            kernel: A `KERNEL_*` code.
            problem: The convolution, valid, with at least one output.
            operands: Its operands.
            device: The device.
            numbers: Of the cut.

        Raises:
            Why the kernel cannot run the problem, or not so.
        """
        if kernel == KERNEL_AUTO:
            raise Error("config: auto has no cut; name the kernel whose it is")
        var refusal = Self.refusal[types, kernels](
            kernel, problem, operands, device
        )
        if refusal:
            raise Error(refusal.value())
        comptime for i in range(Self.Kernels.length):
            comptime Kernel = Self.Kernels[i]
            comptime built = (
                has_kernel(kernels, Kernel.code)
                and Kernel.takes_cuts
                and not built_refusal[Kernel](types)
            )
            comptime if built:
                if kernel == Kernel.code:
                    return Planned(
                        kernel,
                        Kernel.named_plan(problem, operands, device, numbers),
                        tuned=True,
                    )
        raise Error(t"{kernel_name(kernel)} takes no cut by name")

    @staticmethod
    def _tuned[
        types: OperandTypes, kernels: Int
    ](problem: ConvProblem, operands: Operands, device: Device) -> Optional[
        Planned
    ]:
        """How a tuner measured a problem to run faster than what would be
        chosen otherwise, if it has, and it can run so."""
        comptime for i in range(Self.Kernels.length):
            comptime if Self.Kernels[i].takes_cuts:
                var row = tuned_row(problem, operands.types, device.units)
                if not row:
                    return None
                try:
                    return Self.named[types, kernels](
                        row.value().kernel,
                        problem,
                        operands,
                        device,
                        row.value().numbers,
                    )
                except:
                    return None
        return None

    @staticmethod
    def find_plan[
        types: OperandTypes, kernels: Int
    ](
        requested: Int,
        problem: ConvProblem,
        operands: Operands,
        device: Device,
    ) raises -> Planned:
        """`plan`, or what it returned when it was last asked: the process keeps
        it. `MAXCONV_LOG=dispatch` prints what is planned.

        Parameters:
            types: Of the operands.
            kernels: What the op is compiled with.

        Args:
            requested: A `KERNEL_*` code; `KERNEL_AUTO` leaves the choice here.
            problem: The convolution, valid.
            operands: Its operands.
            device: The device.

        Returns:
            The plan; of a problem without outputs, one that is not launched.

        Raises:
            Why the requested kernel, or every one, cannot take the problem.
        """
        var key = PlanKey(problem, operands, device, requested, kernels)
        var kept = kept_plan(key)
        if kept:
            return kept.value()
        var planned = Self.plan[types, kernels](
            requested, problem, operands, device
        )
        if is_traced():
            trace_choice(
                problem,
                types,
                kernel_name(planned.kernel),
                Self.explain[types, kernels](
                    planned, requested, problem, operands, device
                ),
            )
        keep_plan(key, planned)
        return planned

    @staticmethod
    def explain[
        types: OperandTypes, kernels: Int = ALL_KERNELS
    ](
        planned: Planned,
        requested: Int,
        problem: ConvProblem,
        operands: Operands,
        device: Device,
    ) raises -> String:
        """Why a kernel was chosen, for people.

        Parameters:
            types: Of the operands.
            kernels: What the op is compiled with.

        Args:
            planned: What `plan` returned.
            requested: What was asked for.
            problem: The convolution.
            operands: Its operands.
            device: The device.

        Returns:
            How it runs, and why no kernel in front of it does: a sentence
            without its full stop.

        Raises:
            If the op was compiled without the kernel.
        """
        if not problem.has_outputs():
            return String("there is no output to compute")
        var refusals = String()
        comptime for i in range(Self.Kernels.length):
            comptime Kernel = Self.Kernels[i]
            comptime built = has_kernel(
                kernels, Kernel.code
            ) and not built_refusal[Kernel](types)
            if planned.kernel == Kernel.code:
                comptime if built:
                    var plan = String(planned.get[Kernel.Plan]())
                    if requested != KERNEL_AUTO:
                        return "asked for by config=; " + plan
                    if planned.tuned:
                        return "tuned: " + plan
                    return plan + refusals
            elif (
                has_kernel(kernels, Kernel.code)
                and requested == KERNEL_AUTO
                and Kernel.suits(problem, operands, device)
            ):
                var refusal = Self.refusal[types, kernels](
                    Kernel.code, problem, operands, device
                )
                if not refusal:
                    refusal = _slower[Kernel](problem, operands, device)
                if refusal:
                    refusals += "; " + refusal.value()
        raise _compiled_without(planned.kernel)

    @staticmethod
    def launch[
        capability: Int,
        kernels: Int,
        known: KnownFilter,
        scaled: Bool,
    ](
        planned: Planned,
        problem: ConvProblem,
        arguments: Arguments,
        mut queue: Self.Queue,
    ) raises:
        """Starts a kernel.

        Parameters:
            capability: Of the device that this is compiled for.
            kernels: What to compile.
            known: What is known of the filter.
            scaled: Whether each filter has a scale.

        Args:
            planned: What `plan` returned for the problem and such operands.
            problem: The convolution.
            arguments: The operands of this call.
            queue: Where to run.

        Raises:
            What the driver refused.
        """
        comptime types = type_of(arguments).types(scaled)
        comptime for i in range(Self.Kernels.length):
            comptime Kernel = Self.Kernels[i]
            comptime if has_kernel(kernels, Kernel.code):
                comptime built = not Kernel.device_refusal(
                    capability
                ) and not built_refusal[Kernel](types)
                comptime if built:
                    if planned.kernel == Kernel.code:
                        Kernel.launch[known=known, scaled=scaled](
                            planned.get[Kernel.Plan](),
                            problem,
                            arguments,
                            rebind[Kernel.Queue](queue),
                        )
                        return
        raise _compiled_without(planned.kernel)


def _slower[
    Kernel: ConvKernel
](problem: ConvProblem, operands: Operands, device: Device) -> Optional[String]:
    """Why a kernel that could take a problem does not, for people: what its
    model says, if it has one."""
    var seconds = Kernel.predicted_seconds(problem, operands, device)
    if not seconds:
        return None
    var microseconds = round(seconds.value() * 1e7) / 10
    return String(
        t"{kernel_name(Kernel.code)} takes {microseconds} us by its model"
    )


def _compiled_without(kernel: Int) -> Error:
    """What is raised for a kernel that an op does not have."""
    return Error(t"config: the op was compiled without {kernel_name(kernel)}")


def _is_asked(kernel: Int, asked: Int) -> Bool:
    """Whether a call that asks for `asked` may run a kernel."""
    return asked == KERNEL_AUTO or asked == ANY_KERNEL or asked == kernel


def _refusal_of[
    Kernel: ConvKernel, types: OperandTypes
](problem: ConvProblem, operands: Operands, device: Device) -> Optional[String]:
    """Why a kernel cannot take a problem, its device and types included, or
    None."""
    var refusal = Kernel.device_refusal(device.capability)
    if refusal:
        return refusal
    refusal = built_refusal[Kernel](types)
    if refusal:
        return refusal
    comptime if built_refusal[Kernel](types):
        return None
    else:
        return Kernel.refusal(problem, operands, device)
