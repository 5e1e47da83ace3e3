"""Normalization by the root mean square of each pixel's channels (Zhang and
Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019), on the CUDA
cores of any GPU: memory decides how long it takes.

Some threads share a pixel. They hold its channels in registers, add up squares
by shuffles, and store what is scaled: memory is read once.
"""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.primitives.warp import shuffle_xor
from std.math import rsqrt
from std.sys.info import size_of
from std.utils import StaticTuple

from ...conv.access import OutputTarget
from ...conv.device_value import DeviceValue
from ...conv.memory import Reads
from ..epilogue.activations import DeviceActivation
from ..overlap import wait_for_earlier_kernels
from .norm import PixelSizes, activated

comptime THREADS = 256
"""Threads of a block."""

comptime RESIDENT = 3
"""Blocks of a multiprocessor for which registers suffice."""

comptime MAX_VECTORS = 4
"""Loads of a pixel that a thread holds, at most."""


@fieldwise_init
struct RmsGeometry(DeviceValue, TrivialRegisterPassable):
    """The shape of a normalization, for the kernel."""

    var pixels: UInt32
    """Of all images."""
    var channels: UInt32
    var share: Float32
    """One over the channels."""
    var epsilon: Float32
    var sizes: PixelSizes


@fieldwise_init
struct RmsNormKernel[
    dtype: DType, width: Int, lanes: Int, vectors: Int, Output: OutputTarget
]:
    """The kernel for one shape of blocks.

    Parameters:
        dtype: Of input and output.
        width: Channels of one load: 1, or a power of two that divides the
            channels.
        lanes: Threads that share a pixel: a power of two up to `WARP`.
        vectors: Loads of a thread that a pixel takes, or 0: any number, and
            memory is read twice.
        Output: How the output is reached.
    """

    comptime rows = THREADS // Self.lanes
    """Pixels of a block at once."""
    comptime held = max(
        1, MAX_VECTORS // Self.vectors
    ) if Self.vectors > 0 else 1
    """Pixels of a thread at once."""
    comptime Vector = SIMD[DType.float32, Self.width]
    comptime Loaded = SIMD[Self.dtype, Self.width]
    comptime alignment = Self.width * size_of[Self.dtype]()

    @staticmethod
    @__llvm_metadata(
        MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
        `nvvm.minctasm`=SIMDLength(RESIDENT),
    )
    def run(
        input: Reads[Self.dtype],
        weight: Reads[DType.float32],
        output: Self.Output,
        activation: DeviceActivation,
        geometry: RmsGeometry,
    ):
        """Normalizes some pixels.

        Args:
            input: `[N, D, H, W, C]`.
            weight: `[C]`.
            output: `[N, D, H, W, C]`.
            activation: What follows the normalization.
            geometry: The shape.
        """
        var row, lane = divmod(UInt32(thread_idx.x), UInt32(Self.lanes))
        wait_for_earlier_kernels()
        comptime step = UInt32(Self.rows * Self.held)
        # All threads take as many turns: they exchange sums.
        for first in range(
            UInt32(block_idx.x) * step,
            geometry.pixels,
            UInt32(grid_dim.x) * step,
        ):
            comptime if Self.vectors > 0:
                Self._of_registers(
                    input,
                    weight,
                    output,
                    activation,
                    geometry,
                    first + row,
                    lane,
                )
            else:
                Self._of_memory(
                    input,
                    weight,
                    output,
                    activation,
                    geometry,
                    first + row,
                    lane,
                )

    @staticmethod
    @always_inline
    def _channel(geometry: RmsGeometry, vector: Int, lane: UInt32) -> UInt32:
        """The first channel of a thread's load, maybe behind the last one."""
        return (UInt32(vector * Self.lanes) + lane) * UInt32(Self.width)

    @staticmethod
    @always_inline
    def _of_registers(
        input: Reads[Self.dtype],
        weight: Reads[DType.float32],
        output: Self.Output,
        activation: DeviceActivation,
        geometry: RmsGeometry,
        pixel: UInt32,
        lane: UInt32,
    ):
        """Normalizes pixels that registers hold."""
        comptime loads = Self.held * Self.vectors
        var loaded = StaticTuple[Self.Loaded, loads](fill=Self.Loaded(0))
        comptime for i in range(Self.held):
            # No load is behind a branch, where the next would wait for it.
            var at = min(pixel + UInt32(i * Self.rows), geometry.pixels - 1)
            var data = input.unsafe_offset(Int(at) * Int(geometry.channels))
            comptime for j in range(Self.vectors):
                var channel = min(
                    Self._channel(geometry, j, lane),
                    geometry.channels - UInt32(Self.width),
                )
                loaded[i * Self.vectors + j] = data.unsafe_load[
                    width=Self.width, alignment=Self.alignment
                ](Int(channel))
        comptime for i in range(Self.held):
            var squares = Self.Vector(0)
            comptime for j in range(Self.vectors):
                if Self._channel(geometry, j, lane) < geometry.channels:
                    var value = loaded[i * Self.vectors + j].cast[
                        DType.float32
                    ]()
                    squares = value.fma(value, squares)
            var rate = Self._rate(geometry, squares.reduce_add())
            var at = pixel + UInt32(i * Self.rows)
            if at < geometry.pixels:
                comptime for j in range(Self.vectors):
                    var channel = Self._channel(geometry, j, lane)
                    if channel < geometry.channels:
                        Self._store(
                            loaded[i * Self.vectors + j],
                            rate,
                            weight,
                            output,
                            activation,
                            geometry,
                            at,
                            channel,
                        )

    @staticmethod
    @always_inline
    def _of_memory(
        input: Reads[Self.dtype],
        weight: Reads[DType.float32],
        output: Self.Output,
        activation: DeviceActivation,
        geometry: RmsGeometry,
        pixel: UInt32,
        lane: UInt32,
    ):
        """Normalizes a pixel that is read twice."""
        comptime step = UInt32(Self.lanes * Self.width)
        var at = min(pixel, geometry.pixels - 1)
        var data = input.unsafe_offset(Int(at) * Int(geometry.channels))
        var squares = Self.Vector(0)
        for channel in range(
            lane * UInt32(Self.width), geometry.channels, step
        ):
            var value = data.unsafe_load[
                width=Self.width, alignment=Self.alignment
            ](Int(channel)).cast[DType.float32]()
            squares = value.fma(value, squares)
        var rate = Self._rate(geometry, squares.reduce_add())
        if pixel >= geometry.pixels:
            return
        for channel in range(
            lane * UInt32(Self.width), geometry.channels, step
        ):
            var value = data.unsafe_load[
                width=Self.width, alignment=Self.alignment
            ](Int(channel))
            Self._store(
                value,
                rate,
                weight,
                output,
                activation,
                geometry,
                pixel,
                channel,
            )

    @staticmethod
    @always_inline
    def _rate(geometry: RmsGeometry, own: Float32) -> Float32:
        """What a pixel is multiplied with, of a thread's sum of squares."""
        var squares = own
        comptime for i in range(5):
            comptime distance = 1 << i
            comptime if distance < Self.lanes:
                squares += shuffle_xor(squares, UInt32(distance))
        return rsqrt(squares * geometry.share + geometry.epsilon)

    @staticmethod
    @always_inline
    def _store(
        value: Self.Loaded,
        rate: Float32,
        weight: Reads[DType.float32],
        output: Self.Output,
        activation: DeviceActivation,
        geometry: RmsGeometry,
        pixel: UInt32,
        channel: UInt32,
    ):
        """Stores some channels of a pixel."""
        var scale = weight.unsafe_load[
            width=Self.width, alignment=4 * min(Self.width, 4)
        ](Int(channel))
        var normal = value.cast[DType.float32]() * (scale * rate)
        comptime exact = Self.dtype == DType.float32
        var image, at = geometry.sizes.of_all[Self.Output](pixel)
        output.store[Self.width](
            image,
            at,
            Int(channel),
            Int(pixel) * Int(geometry.channels) + Int(channel),
            activated[exact=exact](activation, normal).cast[
                Self.Output.dtype
            ](),
        )
