"""Chains of visitors: one that compiles, and three that mean nothing, which
must not.

The compiler reports every exported function that it cannot instantiate."""

from operations.conv.access import MemoryOutput
from operations.conv.memory import Writes
from operations.nvidia.sm90.gemm.candidates import candidate
from operations.nvidia.sm90.gemm.legality import layout_of
from operations.nvidia.epilogue.auxiliary import AuxiliaryOutput
from operations.nvidia.epilogue.callbacks import EpilogueVisitor
from operations.nvidia.epilogue.steps import Discard, Rounded
from operations.nvidia.epilogue.conv_visitor import ConvVisitor
from emit_visitors import epilogue, problem, writes


def ask[Visitor: EpilogueVisitor, //](visitor: Visitor):
    """Asks a chain whether it can run."""
    print(
        visitor.refusal(
            layout_of(candidate(0), DType.bfloat16), problem(64)
        ).or_else("yes")
    )


@export
def valid() abi("C"):
    """The last visitor discards the output."""
    ask(Rounded[DType.bfloat16]().then(Discard()))


@export
def looked_at() abi("C"):
    """A visitor looks at an output that is discarded."""
    ask(Discard().then(Rounded[DType.bfloat16]()))


@export
def two_of_several_forms() abi("C"):
    """Each of two visitors picks from several forms."""
    try:
        var visitor = ConvVisitor[DType.bfloat16].of(epilogue(False))
        ask(visitor.then(visitor))
    except:
        pass


@export
def auxiliary_type() abi("C"):
    """An auxiliary output is of a type that is not stored."""
    ask(AuxiliaryOutput[DType.int32](MemoryOutput(writes[DType.int32]())))
