"""What a tuner may ask a kernel: which numbers make a configuration, which it
refuses, what follows from one, and the limits that its refusals read."""

from std.collections import Optional

from .conv.memory import Reads, Writes
from .conv.operands import Device, Operands
from .conv.problem import ConvProblem

comptime Values = Reads[DType.int64]
"""A configuration: a number for each of `TunedKernel.fields`, in their order."""

comptime Counts = Writes[DType.float64]
"""What follows from one: a number for each of `TunedKernel.counts`."""


struct Facts(Movable):
    """Numbers by their names, as a text: a line each."""

    var text: String

    def __init__(out self):
        """None."""
        self.text = String()

    def add(mut self, name: StaticString, value: Int):
        """Adds a number.

        Args:
            name: Its name, without spaces.
            value: The number.
        """
        self.text += String(t"{name} {value}\n")

    def add(mut self, name: StaticString, values: List[Int]):
        """Adds several numbers.

        Args:
            name: Their name, without spaces.
            values: The numbers.
        """
        self.text += name
        for value in values:
            self.text += String(t" {value}")
        self.text += "\n"


trait TunedKernel(Deinitable, Movable):
    """A kernel whose configurations a tuner may search, for one problem."""

    comptime code: Int
    """Its `KERNEL_*` code."""
    comptime is_built: Bool = True
    """Whether the compiler's target can run it: spaces of others take time to
    compile, too."""

    @staticmethod
    def fields() -> List[StaticString]:
        """The names of a configuration's numbers: of the structs' fields, and of
        what the plan adds."""
        ...

    @staticmethod
    def counts() -> List[StaticString]:
        """The names of what follows from a configuration. The first is the
        model's time."""
        ...

    def __init__(
        out self, problem: ConvProblem, operands: Operands, device: Device
    ):
        """Of a problem.

        Args:
            problem: The convolution, valid, with at least one output.
            operands: Its operands.
            device: The device.
        """
        ...

    def problem_refusal(self) -> Optional[String]:
        """Why no configuration can run the problem, or None."""
        ...

    def facts(self, mut facts: Facts):
        """Adds the limits that refusals read, and what they read of the problem.

        Args:
            facts: Where to.
        """
        ...

    def refusal(self, values: Values) -> Optional[String]:
        """Why the kernel cannot run the problem so, or None.

        Args:
            values: A configuration.
        """
        ...

    def choice(self) -> List[Int]:
        """The configuration that the kernel's own search chooses, which may be
        one that `refusal` refuses where nothing else fits its caches; empty
        where it is not asked.
        """
        return List[Int]()

    def count(self, values: Values, counts: Counts):
        """Writes what follows from a configuration.

        Args:
            values: One that `refusal` does not refuse.
            counts: Where to.
        """
        ...
