"""Where a block's shared memory is: the scheduler's answers, barriers, input
tiles, output and residual buffers, other blocks' partial sums."""

from max.gpu.memory import external_memory
from std.sys.info import size_of

from ..pipeline.barrier import BARRIER_BYTES, Barrier
from ..pipeline.ring import Ring
from ..tma.copy import SharedAddress
from ..limits import PATTERN_BYTES
from .config import CLC_RESPONSE_BYTES, Conv2dConfig


@fieldwise_init
struct SharedStorage[
    config: Conv2dConfig,
](TrivialRegisterPassable):
    """A block's shared memory."""

    comptime InputRing = Ring[
        Self.config.num_group_pipeline_stages(),
        Self.config.k_group_size * Self.config.step_bytes(),
    ]
    comptime AccumRing = Ring[Self.config.num_accum_pipeline_stages, 0]
    comptime ClcRing = Ring[
        Self.config.num_clc_pipeline_stages, CLC_RESPONSE_BYTES
    ]
    comptime ThrottleRing = Ring[Self.config.num_clc_pipeline_stages, 0]
    comptime OUTPUT_BYTES = Self.config.src_expected_bytes()
    comptime residual_stages = max(1, Self.config.num_epi_load_stages)
    """Of the residual ring's type; where there is no ring it has no memory."""
    comptime ResidualRing = Ring[Self.residual_stages, Self.OUTPUT_BYTES]

    comptime ExchangeRing = Ring[1, Self.config.exchange_bytes()]

    comptime clc_offset = (
        Self.config.num_clc_pipeline_stages * CLC_RESPONSE_BYTES
    )
    comptime throttle_offset = (Self.clc_offset + Self.ClcRing.barrier_bytes())
    comptime input_offset = (
        Self.throttle_offset + Self.ThrottleRing.barrier_bytes()
    )
    comptime accum_offset = Self.input_offset + Self.InputRing.barrier_bytes()
    comptime residual_offset = (
        Self.accum_offset + Self.AccumRing.barrier_bytes()
    )
    comptime exchange_offset = Self.residual_offset + (
        Self.ResidualRing.barrier_bytes() if Self.config.num_epi_load_stages
        > 0 else 0
    )
    comptime dealloc_offset = Self.exchange_offset + (
        Self.ExchangeRing.barrier_bytes() if Self.config.split_k() > 1 else 0
    )
    comptime tmem_offset = Self.dealloc_offset + BARRIER_BYTES
    comptime header_end = Self.tmem_offset + size_of[DType.uint32]()
    comptime tiles_offset = (
        (Self.header_end + PATTERN_BYTES - 1) // PATTERN_BYTES * PATTERN_BYTES
    )
    comptime outputs_offset = (
        Self.tiles_offset
        + Self.config.num_group_pipeline_stages()
        * Self.config.k_group_size
        * Self.config.step_bytes()
    )
    comptime residuals_offset = (
        Self.outputs_offset + Self.config.num_output_stages * Self.OUTPUT_BYTES
    )
    comptime partials_offset = (
        Self.residuals_offset
        + Self.config.num_epi_load_stages * Self.OUTPUT_BYTES
    )
    comptime BYTES = Self.partials_offset + Self.config.exchange_bytes()
    """All of it."""

    var base: SharedAddress

    @always_inline
    def __init__(out self):
        """The block's dynamic shared memory."""
        comptime assert (
            Self.BYTES == Self.config.shared_bytes()
        ), "the configuration's budget is not what the storage takes"
        var memory = external_memory[
            UInt8, address_space=AddressSpace.SHARED, alignment=PATTERN_BYTES
        ]()
        self.base = SharedAddress(Int(memory))

    @always_inline
    def inputs(self) -> Self.InputRing:
        """Groups of steps of the sum: of each step the activations, then the
        filters."""
        return Self.InputRing(
            self.base + UInt32(Self.input_offset),
            self.base + UInt32(Self.tiles_offset),
        )

    @always_inline
    def accumulators(self) -> Self.AccumRing:
        """Of the accumulators in tensor memory."""
        return Self.AccumRing(self.base + UInt32(Self.accum_offset), self.base)

    @always_inline
    def answers(self) -> Self.ClcRing:
        """The scheduler's answers."""
        return Self.ClcRing(self.base + UInt32(Self.clc_offset), self.base)

    @always_inline
    def throttle(self) -> Self.ThrottleRing:
        """Tiles that the load warp has begun."""
        return Self.ThrottleRing(
            self.base + UInt32(Self.throttle_offset), self.base
        )

    @always_inline
    def residuals(self) -> Self.ResidualRing:
        """Sub-tiles of the residual; only if the configuration has stages."""
        return Self.ResidualRing(
            self.base + UInt32(Self.residual_offset),
            self.base + UInt32(Self.residuals_offset),
        )

    @always_inline
    def exchange(self) -> Self.ExchangeRing:
        """Of other blocks' partial sums of this block's sub-tiles; only with
        split-K."""
        return Self.ExchangeRing(
            self.base + UInt32(Self.exchange_offset),
            self.base + UInt32(Self.partials_offset),
        )

    @always_inline
    def outputs(self) -> SharedAddress:
        """The output buffers."""
        return self.base + UInt32(Self.outputs_offset)

    @always_inline
    def visitors(self) -> SharedAddress:
        """The visitor's memory, behind all else."""
        return self.base + UInt32(Self.BYTES)

    @always_inline
    def dealloc(self) -> Barrier:
        """Completes when nobody reads the tensor memory any more."""
        return Barrier(self.base + UInt32(Self.dealloc_offset))

    @always_inline
    def tmem_address(self) -> SharedAddress:
        """Where the allocation writes the tensor memory's address."""
        return self.base + UInt32(Self.tmem_offset)
