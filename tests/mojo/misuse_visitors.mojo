"""Chains of visitors that mean nothing, which must not compile: `-D CHAIN=` 1,
a discarded output that is looked at; 2, two visitors of several forms; 3, an
auxiliary output of a type that is not stored."""

from std.sys import get_defined_int

from operations.conv.access import MemoryOutput
from operations.conv.memory import Writes
from operations.nvidia.sm90.gemm.candidates import candidate
from operations.nvidia.sm90.gemm.config import layout_of
from operations.nvidia.epilogue.auxiliary import AuxiliaryOutput
from operations.nvidia.epilogue.callbacks import EpilogueVisitor
from operations.nvidia.epilogue.steps import Discard, Rounded
from operations.nvidia.epilogue.conv_visitor import ConvVisitor
from emit_visitors import epilogue, problem, writes

comptime CHAIN = get_defined_int["CHAIN"]()


def ask[Visitor: EpilogueVisitor, //](visitor: Visitor):
    """Asks a chain whether it can run."""
    print(
        visitor.refusal(
            layout_of(candidate(0), DType.bfloat16), problem(64)
        ).or_else("yes")
    )


def main() raises:
    comptime if CHAIN == 0:
        ask(Rounded[DType.bfloat16]().then(Discard()))
    comptime if CHAIN == 1:
        ask(Discard().then(Rounded[DType.bfloat16]()))
    comptime if CHAIN == 2:
        var visitor = ConvVisitor[DType.bfloat16].of(epilogue(False))
        ask(visitor.then(visitor))
    comptime if CHAIN == 3:
        ask(AuxiliaryOutput[DType.int32](MemoryOutput(writes[DType.int32]())))
