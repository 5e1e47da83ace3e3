"""Says whether Hopper's implicit GEMM takes 819 filters, whose pixels are no whole
pieces of 16 bytes in any type.

A line each: types of input and output, "plain", "fused" (by the graph compiler)
or a visitor's name, "residual" or "-", then "yes" or why not.
"""

from std.utils import IndexList

from operations.conv.memory import CACHE_LINE, Reads
from operations.conv.operands import Device, Operands, OperandTypes
from operations.conv.problem import SPATIAL, ConvProblem
from operations.nvidia.epilogue.callbacks import EpilogueVisitor
from operations.nvidia.epilogue.steps import AddResidual, ChannelBias
from operations.nvidia.sm90.gemm.plan import gemm_refusal
from operations.nvidia.sm90.gemm.visit import plan_visited

comptime DEVICE = Device(90, 132)
comptime HALF = DType.bfloat16


def problem_of() raises -> ConvProblem:
    """A head of a detector."""
    var problem = ConvProblem(
        spatial_rank=2,
        batch=1,
        channels=256,
        filters=819,
        groups=1,
        input=IndexList[SPATIAL](1, 50, 50),
        filter=IndexList[SPATIAL](1, 3, 3),
        output=IndexList[SPATIAL](1, 50, 50),
        stride=IndexList[SPATIAL](fill=1),
        dilation=IndexList[SPATIAL](fill=1),
        pad_before=IndexList[SPATIAL](0, 1, 1),
        pad_after=IndexList[SPATIAL](0, 1, 1),
    )
    problem.validate(1, problem.filters * problem.gemm_k(), DType.float32)
    return problem


def ask(types: OperandTypes, kind: String) raises:
    """Asks for an op, with and without a residual."""
    var operands = Operands.bare(types)
    for residual in [False, True]:
        operands.residual = residual
        var refusal = gemm_refusal(
            problem_of(), operands, materialize[DEVICE](), unaligned=True
        )
        print(
            types.input,
            types.output,
            kind,
            "residual" if residual else "-",
            refusal.value() if refusal else "yes",
        )


def ask_visited(visitor: Some[EpilogueVisitor], kind: String) raises:
    """Asks for a visitor."""
    var answer = String("yes")
    try:
        _ = plan_visited[HALF, HALF](
            problem_of(), visitor, materialize[DEVICE]()
        )
    except error:
        answer = String(error)
    print(HALF, HALF, kind, "-", answer)


def main() raises:
    ask(OperandTypes.unfused(HALF, HALF), "plain")
    ask(OperandTypes.unfused(HALF, HALF, fused_output=True), "fused")
    ask(OperandTypes.unfused(HALF, DType.float32), "plain")
    ask(OperandTypes.unfused(DType.float32, DType.float32), "plain")
    ask(OperandTypes.unfused(DType.float8_e4m3fn, HALF), "plain")
    ask_visited(
        ChannelBias(Reads[HALF](unsafe_from_address=CACHE_LINE)), "ChannelBias"
    )
    ask_visited(AddResidual(1), "AddResidual")
