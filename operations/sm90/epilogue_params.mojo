"""What a launch passes to the Hopper kernel's epilogue, beside descriptors."""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.utils import IndexList

from ..conv.access import OutputTarget
from ..conv.divisor import Divisor
from ..conv.epilogue import Epilogue
from ..conv.problem import SPATIAL, ConvProblem
from .epilogue_visitor import ConvVisitor


struct OutputShape(ImplicitlyCopyable, TrivialRegisterPassable):
    """The output's spatial extents, to find an index from a pixel's."""

    var width: Divisor
    var height: Divisor
    var depth: Divisor

    def __init__(out self, problem: ConvProblem):
        """The output's shape.

        Args:
            problem: The convolution.
        """
        self.width = Divisor(problem.output[2])
        self.height = Divisor(problem.output[1])
        self.depth = Divisor(problem.output[0])

    @always_inline
    def index(self, pixel: UInt32) -> Tuple[Int, IndexList[SPATIAL]]:
        """Image and position of a pixel.

        Args:
            pixel: Its row of the output `[N*Z*P*Q, K]`.
        """
        var row, w = self.width.split(pixel)
        var plane, h = self.height.split(row)
        var image, d = self.depth.split(plane)
        return Int(image), IndexList[SPATIAL](Int(d), Int(h), Int(w))


struct EpilogueParams[Output: OutputTarget, bias_type: DType](
    DevicePassable, ImplicitlyCopyable, TrivialRegisterPassable
):
    """The epilogue's operands as the device sees them.

    Parameters:
        Output: The output, and what the graph compiler fused behind it.
        bias_type: Of the bias.
    """

    var output: Self.Output
    var visitor: ConvVisitor[Self.bias_type]
    var shape: OutputShape

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """The name in messages."""
        return "EpilogueParams"

    def __init__(
        out self,
        problem: ConvProblem,
        epilogue: Epilogue[Self.bias_type, Self.Output.dtype],
        output: Self.Output,
    ):
        """Brings an op's operands into the device's form.

        Args:
            problem: The convolution; `can_implement` has agreed.
            epilogue: What is fused; its operands in device memory.
            output: The output.
        """
        self.output = output
        self.visitor = ConvVisitor[Self.bias_type].of(epilogue)
        self.shape = OutputShape(problem)
