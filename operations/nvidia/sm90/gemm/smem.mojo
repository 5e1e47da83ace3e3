"""Where a block's shared memory is: rings, then rows that threads copy, then output
buffers."""

from max.gpu.memory import external_memory

from ...im2col.traversal import ROW_BYTES
from ...pipeline.barrier import BARRIER_BYTES, Barrier
from ...pipeline.chunks import clear_rows
from ...pipeline.ring import Ring
from ...tma.copy import SharedAddress
from ...limits import PATTERN_BYTES
from .config import Sm90Config
from .split_k import SplitExchange


@fieldwise_init
struct SharedStorage[config: Sm90Config](TrivialRegisterPassable):
    """A block's shared memory."""

    comptime ActivationRing = Ring[
        Self.config.num_act_pipeline_stages, Self.config.act_stage_bytes()
    ]
    comptime FilterRing = Ring[
        Self.config.num_filter_pipeline_stages, Self.config.filter_tile_bytes()
    ]

    var activation: Self.ActivationRing
    var filter: Self.FilterRing
    """Its barriers are those of `activation` where rings are joined."""
    var residual_barriers: SharedAddress
    """Of each consumer's residual ring, consumer by consumer."""
    var first_tile: Barrier
    """Completes when TMA has been asked for the activations of the block's first
    tile."""
    var exchange: SplitExchange[Self.config]
    """Of blocks that share a tile, in the rings' memory."""
    var buffers: SharedAddress
    """Each consumer's `EpilogueConfig.buffers`, consumer by consumer."""
    var copied_pixels: SharedAddress
    """Rows of activations that threads copy."""
    var copied_filters: SharedAddress
    """Rows of filters that threads copy."""

    @always_inline
    def __init__(out self):
        """The block's dynamic shared memory."""
        var base = external_memory[
            UInt8, address_space=AddressSpace.SHARED, alignment=PATTERN_BYTES
        ]()
        var address = SharedAddress(Int(base))
        comptime header_bytes = Self.config.header_bytes()
        var activation = address + UInt32(header_bytes)
        comptime activation_bytes = (
            Self.config.num_act_pipeline_stages * Self.config.act_stage_bytes()
        )
        var filter = activation + UInt32(activation_bytes)
        comptime filter_bytes = (
            Self.config.num_filter_pipeline_stages
            * Self.config.filter_tile_bytes()
        )
        self.activation = Self.ActivationRing(address, activation)
        var filter_barriers = address
        comptime if not Self.config.joins_rings():
            filter_barriers += UInt32(Self.ActivationRing.barrier_bytes())
        self.filter = Self.FilterRing(filter_barriers, filter)
        self.residual_barriers = address + UInt32(
            Self.ActivationRing.barrier_bytes()
            + Self.FilterRing.barrier_bytes()
        )
        comptime ring_barriers = Self.config.ring_barriers()
        comptime first_tile = ring_barriers + Self.config.exchange_barriers()
        self.first_tile = Barrier(address + UInt32(first_tile) * BARRIER_BYTES)
        self.exchange = SplitExchange[Self.config](
            address + UInt32(ring_barriers) * BARRIER_BYTES, activation
        )
        self.copied_pixels = filter + UInt32(filter_bytes)
        comptime pixels_bytes = Self.config.copied_bytes(
            Self.config.block_tile_shape[0]
        )
        self.copied_filters = self.copied_pixels + UInt32(pixels_bytes)
        comptime copied_bytes = Self.config.gather_bytes()
        self.buffers = self.copied_pixels + UInt32(copied_bytes)

    @always_inline
    def clear_rows(self, loaded: UInt32):
        """Clears what loads leave of the rings' rows, which the multiply reads
        too; every thread, and all wait for each other before the first load.

        Args:
            loaded: Bytes that a load brings of each row, a multiple of 16.
        """
        comptime rows = (
            Self.config.num_act_pipeline_stages * Self.config.act_stage_pixels()
            + Self.config.num_filter_pipeline_stages
            * Self.config.block_tile_shape[1]
        )
        clear_rows[ROW_BYTES, rows, Self.config.threads()](
            self.activation.data, loaded
        )
