"""What an epilogue has to do, as far as it takes time: for the models that
choose configurations."""

from ...conv.epilogue import Activation
from ...conv.fields import ACTIVATION_NONE
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
    def of(
        visits: Bool, residual: Bool, activation: Int, final_activation: Int
    ) -> Self:
        """Of an op's epilogue.

        Args:
            visits: Whether there is a scale or a bias.
            residual: Whether a residual is read.
            activation: An `ACTIVATION_*` code.
            final_activation: An `ACTIVATION_*` code.
        """
        var formula = DeviceActivation.of(Activation(activation, 0, 0)).formula
        var looped = formula != DeviceActivation.NONE
        for fast in materialize[FAST]():
            looped = looped and formula != fast
        return Self(
            visits=visits
            or residual
            or activation != ACTIVATION_NONE
            or final_activation != ACTIVATION_NONE,
            residual=residual,
            looped=looped,
        )
