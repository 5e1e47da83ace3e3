"""What a launch passes to the Hopper kernel's epilogue, beside descriptors."""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.collections import Optional
from std.sys.info import size_of

from ....conv.access import OutputTarget
from ....conv.problem import ConvProblem
from ...im2col.tiles import OutputShape
from ...limits import MAX_SHARED_BYTES
from .config import Sm90Config, residual_refusal
from .epilogue_callbacks import EpilogueVisitor, VisitLayout
from .epilogue_config import SUBTILE_FILTERS


struct EpilogueParams[Output: OutputTarget, Visitor: EpilogueVisitor](
    DevicePassable, ImplicitlyCopyable, TrivialRegisterPassable
):
    """The epilogue's operands as the device sees them.

    Parameters:
        Output: The output, and what the graph compiler fused behind it.
        Visitor: What is made of the values.
    """

    var output: Self.Output
    var visitor: Self.Visitor
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
        visitor: Self.Visitor,
        output: Self.Output,
    ):
        """Brings an op's operands into the device's form.

        Args:
            problem: The convolution; `can_implement` has agreed.
            visitor: What is fused, `prepared`.
            output: The output.
        """
        self.output = output
        self.visitor = visitor
        self.shape = OutputShape(problem)


def layout_of[out_type: DType](config: Sm90Config) -> VisitLayout:
    """How a consumer's values are cut up.

    Parameters:
        out_type: Of output and residual.

    Args:
        config: The configuration.
    """
    return VisitLayout(
        swapped=config.swapped,
        parts=config.consumer_filters() // SUBTILE_FILTERS,
        pixels=config.epilogue.pixels(size_of[out_type]()),
        residual_type=out_type,
        delayed=config.epilogue.delay_store,
    )


def visitor_refusal[
    Visitor: EpilogueVisitor, //, out_type: DType
](visitor: Visitor, config: Sm90Config, problem: ConvProblem) -> Optional[
    String
]:
    """Why a configuration cannot run with a visitor.

    Parameters:
        Visitor: Of the visitor.
        out_type: Of the output.

    Args:
        visitor: The visitor.
        config: The configuration, which `can_implement` the problem.
        problem: The convolution.

    Returns:
        The reason, or None if it can.
    """
    if visitor.reads_residual():
        var refusal = residual_refusal(config)
        if refusal:
            return refusal
    var bytes = config.consumers * Visitor.shared_bytes(
        layout_of[out_type](config)
    )
    if config.shared_bytes() + bytes > MAX_SHARED_BYTES:
        return String(
            t"the epilogue's visitors need {bytes} bytes of shared memory, and"
            t" the configuration leaves"
            t" {MAX_SHARED_BYTES - config.shared_bytes()}"
        )
    return visitor.can_implement(config, problem)
