"""What an epilogue has to do, as far as it takes time: for the models that
choose configurations."""

from ...conv.epilogue import Activation
from ...conv.operands import Operands, OperandTypes
from .activations import FAST, DeviceActivation
from .callbacks import EpilogueVisitor


@fieldwise_init
struct FusedWork(ImplicitlyCopyable, Movable):
    """What of an epilogue takes time."""

    var visits: Bool
    """Whether anything is made of the values."""
    var residual: Bool
    """Whether one is added."""
    var looped: Bool
    """Whether the activation is none of `FAST`."""

    def __init__(out self):
        """Nothing is fused."""
        self = Self(visits=False, residual=False, looped=False)

    @staticmethod
    def of(operands: Operands) -> Self:
        """Of an op's epilogue.

        Args:
            operands: Of the op.
        """
        var formula = DeviceActivation.of(
            Activation(operands.activation, 0, 0)
        ).formula
        var looped = formula != DeviceActivation.NONE
        for fast in materialize[FAST]():
            looped = looped and formula != fast
        return Self(
            visits=operands.visits(),
            residual=operands.residual,
            looped=looped,
        )


def visited_types(in_type: DType, out_type: DType) -> OperandTypes:
    """The types whose candidates visitors are compiled with: those that work
    of the graph compiler's is, too. They are few, as a visitor compiles them
    anew."""
    return OperandTypes.unfused(in_type, out_type, fused_output=True)


def visited_operands(
    visitor: Some[EpilogueVisitor], types: OperandTypes
) -> Operands:
    """What a plan for a visitor is made of.

    Args:
        visitor: The visitor.
        types: `visited_types`.
    """
    var operands = Operands.bare(types)
    # Something is made of the values, as of an op's with a bias.
    operands.bias = True
    operands.residual = visitor.reads_residual()
    return operands
