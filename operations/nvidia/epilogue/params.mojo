"""What a launch passes to a kernel's epilogue, beside descriptors."""

from std.collections import Optional

from ...conv.device_value import DeviceValue
from ...conv.access import OutputTarget
from ...conv.memory import CACHE_LINE, Reads
from ...conv.problem import ConvProblem
from ..im2col.tiles import OutputShape
from ..limits import MAX_SHARED_BYTES
from .callbacks import EpilogueVisitor
from .layout import VisitLayout


struct EpilogueParams[Output: OutputTarget, Visitor: EpilogueVisitor](
    DeviceValue, ImplicitlyCopyable, TrivialRegisterPassable
):
    """The epilogue's operands as the device sees them.

    Parameters:
        Output: The output, and what the graph compiler fused behind it.
        Visitor: What is made of the values.
    """

    var output: Self.Output
    var visitor: Self.Visitor
    var shape: OutputShape
    var residual: Reads[Self.Output.dtype]
    """`[N, *output, K]`, for kernels whose threads load it. Not to be read
    unless the visitor does."""

    def __init__(
        out self,
        problem: ConvProblem,
        visitor: Self.Visitor,
        output: Self.Output,
        residual: Reads[Self.Output.dtype] = Reads[Self.Output.dtype](
            unsafe_from_address=CACHE_LINE
        ),
    ):
        """Brings an op's operands into the device's form.

        Args:
            problem: The convolution; the configuration does not refuse it.
            visitor: What is fused, `prepared`.
            output: The output.
            residual: The residual, if threads load it.
        """
        self.output = output
        self.visitor = visitor
        self.shape = OutputShape(problem)
        self.residual = residual


def visitor_refusal[
    Visitor: EpilogueVisitor, //
](
    visitor: Visitor,
    layout: VisitLayout,
    problem: ConvProblem,
    *,
    consumers: Int,
    shared_bytes: Int,
    epi_load_stages: Int,
) -> Optional[String]:
    """Why a configuration cannot run with a visitor.

    Args:
        visitor: The visitor.
        layout: How the configuration cuts up a consumer's values.
        problem: The convolution; the configuration does not refuse it.
        consumers: Of a block.
        shared_bytes: That the configuration takes.
        epi_load_stages: Its `num_epi_load_stages`.

    Returns:
        The reason, or None if it can.
    """
    if visitor.reads_residual():
        var refused = residual_refusal(epi_load_stages)
        if refused:
            return refused
    var bytes = consumers * Visitor.shared_bytes(layout)
    if shared_bytes + bytes > MAX_SHARED_BYTES:
        return String(
            t"the epilogue's visitors need {bytes} bytes of shared memory, and"
            t" the configuration leaves {MAX_SHARED_BYTES - shared_bytes}"
        )
    return visitor.refusal(layout, problem)


def residual_refusal(epi_load_stages: Int) -> Optional[String]:
    """Why a configuration cannot add a residual, or None.

    Args:
        epi_load_stages: Its `num_epi_load_stages`.
    """
    if epi_load_stages == 0:
        return String("num_epi_load_stages: 0 stages, but there is a residual")
    return None
