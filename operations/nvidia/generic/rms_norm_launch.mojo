"""The host side of normalization by the root mean square: plan and launch."""

from std.collections import Optional
from std.math import ceildiv
from std.sys.info import size_of
from std.utils import IndexList

from ...conv.access import OutputTarget
from ...conv.memory import Reads
from ...conv.operands import Device
from ...conv.problem import SPATIAL
from ..epilogue.activations import DeviceActivation
from ..limits import MAX_INDEX, WARP
from ..stream import LaunchGrid, Stream
from .mean import LOAD_BYTES
from .norm import PixelSizes
from .rms_norm import (
    MAX_VECTORS,
    RESIDENT,
    THREADS,
    RmsGeometry,
    RmsNormKernel,
)

comptime LANES = [4, 8, 16, WARP]
"""Threads that share a pixel, for which kernels are compiled."""


@fieldwise_init
struct RmsProblem(ImplicitlyCopyable, Movable):
    """A normalization of images, `[N, D, H, W, C]`."""

    var images: Int
    var size: IndexList[SPATIAL]
    """`[D, H, W]`."""
    var channels: Int
    var epsilon: Float32
    """Added to the mean of squares."""

    def pixels(self) -> Int:
        """Pixels of all images."""
        return self.images * self.size[0] * self.size[1] * self.size[2]

    def refusal(self) -> Optional[String]:
        """Why the kernel cannot normalize, or None."""
        if self.pixels() < MAX_INDEX and 0 < self.channels < MAX_INDEX:
            return None
        return String(
            t"input: {self.pixels()} pixels of {self.channels} channels; fewer"
            t" than {MAX_INDEX} of each, and at least one channel, are allowed"
        )


@fieldwise_init
struct RmsShape(ImplicitlyCopyable, Movable):
    """How threads share a pixel."""

    var width: Int
    """Channels of one load."""
    var lanes: Int
    """Of `LANES`."""
    var vectors: Int
    """Loads of a thread, or 0: any number."""

    @staticmethod
    def of[dtype: DType](channels: Int, *, aligned: Bool) -> RmsShape:
        """As few threads as hold a pixel, of those without idle ones if there
        are such: sums are exchanged least.

        Parameters:
            dtype: Of the input.

        Args:
            channels: Of a pixel.
            aligned: Whether all addresses are multiples of `LOAD_BYTES`.
        """
        comptime width = LOAD_BYTES // size_of[dtype]()
        if not aligned or channels % width != 0:
            return RmsShape(1, WARP, 0)
        var loads = channels // width
        var found = RmsShape(1, WARP, 0)
        comptime for lanes in LANES:
            var vectors = ceildiv(loads, lanes)
            if vectors <= MAX_VECTORS and (
                found.vectors == 0
                or vectors * lanes < found.vectors * found.lanes
            ):
                found = RmsShape(width, lanes, vectors)
        return found


def launch_rms_norm[
    dtype: DType,
    Output: OutputTarget,
    //,
    channels: Int,
](
    problem: RmsProblem,
    input: Reads[dtype],
    weight: Reads[DType.float32],
    activation: DeviceActivation,
    output: Output,
    mut queue: Stream,
    *,
    aligned: Bool,
    device: Device,
) raises:
    """Enqueues the kernel.

    Parameters:
        dtype: Of input and output.
        Output: How the output is reached.
        channels: Of a pixel: kernels are compiled for these alone.

    Args:
        problem: What `refusal` allows, with at least one pixel.
        input: `[N, D, H, W, C]`.
        weight: `[C]`.
        activation: What follows the normalization.
        output: `[N, D, H, W, C]`.
        queue: Where to; nothing is waited for.
        aligned: Whether all addresses are multiples of `LOAD_BYTES`.
        device: The GPU.

    Raises:
        What the driver refused.
    """
    var geometry = RmsGeometry(
        UInt32(problem.pixels()),
        UInt32(channels),
        1 / Float32(channels),
        problem.epsilon,
        PixelSizes.of(problem.size),
    )
    comptime for vectors in [False, True]:
        if aligned == vectors:
            comptime shape = RmsShape.of[dtype](channels, aligned=vectors)
            comptime Kernel = RmsNormKernel[
                dtype, shape.width, shape.lanes, shape.vectors, Output
            ]
            var most = ceildiv(problem.pixels(), Kernel.rows * Kernel.held)
            queue.enqueue[Kernel.run](
                LaunchGrid(min(most, RESIDENT * device.units), THREADS),
                input,
                weight,
                output,
                activation,
                geometry,
            )
