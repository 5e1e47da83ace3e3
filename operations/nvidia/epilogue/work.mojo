"""What an epilogue has to do, as far as it takes time: for the models that
choose configurations."""

from ...conv.epilogue import Activation
from ...conv.operands import Operands
from .activations import FAST, DeviceActivation


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
