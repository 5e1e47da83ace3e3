"""The shared memory of a block of the Hopper stem kernel."""

from max.gpu.memory import external_memory

from ...limits import PATTERN_BYTES, WARP, WARPGROUP
from ...pipeline.barrier import BARRIER_BYTES, Barrier
from ...pipeline.chunks import CHUNK_BYTES
from ...tma.copy import SharedAddress
from ..wgmma import MMA_M
from .geometry import (
    GROUP_FILTERS,
    QUAD_BYTES,
    STAGES,
    STEP_QUADS,
    StemConfig,
    StemGeometry,
)

comptime BARRIERS_BYTES = PATTERN_BYTES
"""Shared memory before the filters, which are swizzled."""

comptime FACTOR_BYTES = 8
"""Of a filter: scale and bias, float32."""

comptime OUTPUT_BYTES = 2
"""Of an element of output and residual."""

comptime WARP_PIXELS = MMA_M // (WARPGROUP // WARP)
"""Pixels that a warp has the sums of."""


def run_pitch(config: StemConfig) -> Int:
    """Bytes from pixel to pixel in a warp's buffer of outputs: its filters,
    wherever in a chunk they begin."""
    return config.tile_n * OUTPUT_BYTES + CHUNK_BYTES


def run_bytes(config: StemConfig) -> Int:
    """Bytes of a warp's buffer of outputs."""
    return WARP_PIXELS * run_pitch(config)


def runs_bytes(config: StemConfig, filters: Int) -> Int:
    """Bytes of the buffers of outputs of a block's warps: none where pixels are
    aligned to groups of filters."""
    if filters % GROUP_FILTERS == 0:
        return 0
    return config.consumer_threads() // WARP * run_bytes(config)


@fieldwise_init
struct StemStorage(TrivialRegisterPassable):
    """The layout of a block's shared memory: barriers, filters, table, factors,
    buffers of outputs, stages, zeros."""

    var barriers: SharedAddress
    var filter: SharedAddress
    var table: SharedAddress
    """Offsets of quads: of thread t % 4 = 0, then of 1, 2 and 3."""
    var factors: SharedAddress
    """For each multiply's filters their scales, then their biases."""
    var runs: SharedAddress
    """A buffer of outputs for each consumer's warp, where `runs_bytes`."""
    var stages: SharedAddress
    var stage_bytes: UInt32
    var zeros: SharedAddress
    """A quad of zeros after everything else."""

    @staticmethod
    @always_inline
    def of[config: StemConfig](geometry: StemGeometry) -> StemStorage:
        """Lays out the block's dynamic shared memory.

        Parameters:
            config: The configuration.

        Args:
            geometry: The problem.
        """
        var base = external_memory[
            UInt8, address_space=AddressSpace.SHARED, alignment=PATTERN_BYTES
        ]()
        var barriers = SharedAddress(Int(base))
        var filter = barriers + UInt32(BARRIERS_BYTES)
        var table = filter + geometry.tiles_n * geometry.chunks.value * UInt32(
            config.chunk_bytes()
        )
        var factors = table + geometry.chunks.value * UInt32(
            STEP_QUADS * config.chunk_offsets() * 4
        )
        var runs = factors + geometry.tiles_n * UInt32(
            config.tile_n * FACTOR_BYTES
        )
        var stages = runs
        if geometry.filters % GROUP_FILTERS != 0:
            stages += UInt32(
                config.consumer_threads() // WARP * run_bytes(config)
            )
        var stage_bytes = (
            geometry.stage_quads() * QUAD_BYTES + UInt32(15)
        ) & ~UInt32(15)
        return StemStorage(
            barriers,
            filter,
            table,
            factors,
            runs,
            stages,
            stage_bytes,
            stages + UInt32(STAGES) * stage_bytes,
        )

    @always_inline
    def run[config: StemConfig](self, warp: UInt32) -> SharedAddress:
        """The address of a warp's buffer of outputs.

        Parameters:
            config: The configuration.

        Args:
            warp: Of the consumers.
        """
        return self.runs + warp * UInt32(run_bytes(config))

    @always_inline
    def full(self, stage: UInt32) -> Barrier:
        """The barrier that completes when a stage has its pixels.

        Args:
            stage: The stage.
        """
        return Barrier(self.barriers + stage * BARRIER_BYTES)

    @always_inline
    def empty(self, stage: UInt32) -> Barrier:
        """The barrier that completes when a stage may be overwritten.

        Args:
            stage: The stage.
        """
        return Barrier(self.barriers + (stage + UInt32(STAGES)) * BARRIER_BYTES)

    @always_inline
    def stage(self, stage: UInt32) -> SharedAddress:
        """The address of a stage's pixels.

        Args:
            stage: The stage.
        """
        return self.stages + stage * self.stage_bytes
