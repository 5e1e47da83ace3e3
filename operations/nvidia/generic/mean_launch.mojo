"""The host side of the mean over pixels: plan and launch."""

from std.collections import Optional
from std.math import ceildiv
from std.sys.info import size_of

from ...conv.access import OutputTarget
from ...conv.memory import Reads
from ...conv.operands import Device
from ...conv.divisor import Divisor
from ..limits import MAX_BLOCKS, MAX_CLUSTER, MAX_INDEX, WARP
from ..stream import LaunchGrid, Stream
from .mean import (
    FIRST_CLUSTERS,
    LOAD_BYTES,
    THREADS,
    UNROLL,
    MeanGeometry,
    MeanKernel,
)

comptime LANES = [WARP, 16, 8, 4]
"""Threads along the channels for which kernels are compiled. The more there are,
the fewer blocks, and the less there is to add up among a block's threads."""

comptime BUSY = Float64(1.5)
"""Blocks of a multiprocessor below which lanes are fewer."""

comptime IDLE = Float64(1.25)
"""Lanes with and without channels for each that has some, at most."""

comptime SHARED = 2
"""Blocks of a multiprocessor up to which an image is shared by more of them."""


@fieldwise_init
struct MeanPlan(ImplicitlyCopyable, Movable):
    """A launch of the kernel."""

    var geometry: MeanGeometry
    var width: Int
    """Channels of one load."""
    var lanes: Int
    """Of `LANES`."""
    var blocks: Int


def mean_refusal(images: Int, pixels: Int, channels: Int) -> Optional[String]:
    """Why the kernel cannot average images of such a shape.

    Args:
        images: How many.
        pixels: Of an image.
        channels: Of a pixel.

    Returns:
        The reason, or None.
    """
    if images < 1 or pixels < 1 or channels < 1:
        return String(
            t"input: {images} images of {pixels} pixels and {channels}"
            t" channels; at least one of each is needed"
        )
    if pixels >= MAX_INDEX or channels >= MAX_INDEX:
        return String(
            t"input: {pixels} pixels of {channels} channels; fewer than"
            t" {MAX_INDEX} of each are allowed"
        )
    # With a block for every channel of every image there are at most as many.
    if images * channels > MAX_BLOCKS:
        return String(
            t"input: {images} images of {channels} channels; up to"
            t" {MAX_BLOCKS} outputs are allowed"
        )
    return None


def plan_mean[
    dtype: DType
](
    images: Int,
    pixels: Int,
    channels: Int,
    *,
    aligned: Bool,
    device: Device,
) -> MeanPlan:
    """The widest loads that channels and addresses allow; as many lanes as keep
    multiprocessors busy; and more blocks an image while multiprocessors have
    none and every thread has work.

    Parameters:
        dtype: Of the input.

    Args:
        images: How many, of a shape that `mean_refusal` allows.
        pixels: Of an image.
        channels: Of a pixel.
        aligned: Whether the input's address is a multiple of `LOAD_BYTES`.
        device: The GPU.
    """
    var width = LOAD_BYTES // size_of[dtype]()
    if not aligned or channels % width != 0:
        width = 1
    var lanes = _lanes(images, channels, width, device.units)
    var columns = ceildiv(channels, lanes * width)
    var parts = 1
    if device.capability >= FIRST_CLUSTERS:
        while (
            parts < MAX_CLUSTER
            and images * columns * parts < SHARED * device.units
            and pixels > THREADS // lanes * UNROLL * 2 * parts
        ):
            parts *= 2
    return MeanPlan(
        MeanGeometry(
            UInt32(pixels),
            UInt32(channels),
            Divisor(parts),
            Divisor(columns),
            1 / Float32(pixels),
        ),
        width,
        lanes,
        images * columns * parts,
    )


def _lanes(images: Int, channels: Int, width: Int, units: Int) -> Int:
    """Threads of a block along the channels."""
    # Elements by whole warps.
    if width == 1:
        return WARP
    var fewest = WARP
    comptime for lanes in LANES:
        var columns = ceildiv(channels, lanes * width)
        var idle = Float64(columns * lanes * width) / Float64(channels)
        var blocks = Float64(images * columns)
        if idle <= IDLE and blocks >= BUSY * Float64(units):
            return lanes
        fewest = lanes
    return fewest


def launch_mean[
    dtype: DType, Output: OutputTarget
](
    plan: MeanPlan,
    input: Reads[dtype],
    output: Output,
    mut queue: Stream,
) raises:
    """Enqueues the kernel.

    Parameters:
        dtype: Of input and output.
        Output: How the output is reached.

    Args:
        plan: What `plan_mean` made for this GPU.
        input: `[N, pixels, C]`.
        output: `[N, 1, 1, 1, C]`.
        queue: Where to.

    Raises:
        What the driver refused.
    """
    comptime for width in [1, LOAD_BYTES // size_of[dtype]()]:
        comptime for lanes in LANES:
            comptime if width > 1 or lanes == WARP:
                if plan.width == width and plan.lanes == lanes:
                    comptime Kernel = MeanKernel[dtype, width, lanes, Output]
                    queue.enqueue[Kernel.run](
                        LaunchGrid(
                            plan.blocks,
                            THREADS,
                            shared_bytes=Kernel.shared_bytes,
                            cluster=Int(plan.geometry.parts.value),
                        ),
                        input,
                        output,
                        plan.geometry,
                    )
