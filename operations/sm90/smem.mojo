"""Where a block's shared memory is: rings, then output buffers."""

from max.gpu.memory import external_memory

from ..pipeline.ring import Ring
from ..tma.copy import SharedAddress
from .config import PATTERN_BYTES, Sm90Config


@fieldwise_init
struct SharedStorage[config: Sm90Config](TrivialRegisterPassable):
    """A block's shared memory.

    Parameters:
        config: The configuration.
    """

    comptime ActivationRing = Ring[
        Self.config.activation_stages, Self.config.activation_stage_bytes()
    ]
    comptime FilterRing = Ring[
        Self.config.filter_stages, Self.config.filter_stage_bytes()
    ]

    var activation: Self.ActivationRing
    var filter: Self.FilterRing
    var residual_barriers: SharedAddress
    """Of each consumer's residual ring, consumer by consumer."""
    var buffers: SharedAddress
    """Each consumer's `EpilogueConfig.buffers`, consumer by consumer."""

    @always_inline
    def __init__(out self):
        """The block's dynamic shared memory."""
        var base = external_memory[
            UInt8, address_space=AddressSpace.SHARED, alignment=PATTERN_BYTES
        ]()
        var address = SharedAddress(Int(base))
        var activation = address + UInt32(Self.config.barrier_bytes())
        comptime activation_bytes = (
            Self.config.activation_stages * Self.config.activation_stage_bytes()
        )
        var filter = activation + UInt32(activation_bytes)
        comptime filter_bytes = (
            Self.config.filter_stages * Self.config.filter_stage_bytes()
        )
        self.activation = Self.ActivationRing(address, activation)
        self.filter = Self.FilterRing(
            address + UInt32(Self.ActivationRing.barrier_bytes()), filter
        )
        self.residual_barriers = address + UInt32(
            Self.ActivationRing.barrier_bytes()
            + Self.FilterRing.barrier_bytes()
        )
        self.buffers = filter + UInt32(filter_bytes)
