"""The host side of group normalization on a GPU: plan and launch."""

from std.collections import Optional
from std.math import ceildiv
from std.sys.info import size_of
from std.utils import IndexList

from ...conv.access import OutputTarget
from ...conv.divisor import Divisor
from ...conv.known import UNKNOWN
from ...conv.memory import Reads, Writes
from ...conv.operands import Device
from ...conv.problem import SPATIAL
from ..epilogue.activations import DeviceActivation
from ..limits import MAX_BLOCKS, MAX_INDEX, WARP
from ..stream import LaunchGrid, Stream
from .group_norm import (
    COEFFICIENTS,
    MOMENTS,
    RESIDENT,
    THREADS,
    UNROLL,
    FinishKernel,
    GroupGeometry,
    MomentsKernel,
    NormalizeKernel,
    NormGeometry,
)
from .mean import LOAD_BYTES
from .norm import PixelSizes

comptime LANES = [WARP, 16, 8, 4]
"""Threads along the channels for which kernels are compiled."""

comptime IDLE = Float64(1.25)
"""Lanes with and without channels for each that has some, at most."""


@fieldwise_init
struct NormProblem(ImplicitlyCopyable, Movable):
    """A normalization of images, `[N, D, H, W, C]`."""

    var images: Int
    var size: IndexList[SPATIAL]
    """`[D, H, W]`."""
    var channels: Int
    var groups: Int
    """Of channels; they divide them."""
    var epsilon: Float32
    """Added to the variance."""

    def pixels(self) -> Int:
        """Pixels of an image."""
        return self.size[0] * self.size[1] * self.size[2]

    def refusal(self) -> Optional[String]:
        """Why the kernels cannot normalize, or None."""
        if self.channels < 1 or self.groups < 1:
            return String(
                t"groups: {self.groups} of {self.channels} channels; at least"
                t" one of each is allowed"
            )
        if self.channels % self.groups != 0:
            return String(
                t"groups: {self.groups} does not divide the {self.channels}"
                t" channels"
            )
        if self.pixels() >= MAX_INDEX or self.channels >= MAX_INDEX:
            return String(
                t"input: {self.pixels()} pixels of {self.channels} channels;"
                t" fewer than {MAX_INDEX} of each are allowed"
            )
        # A block for each channel of each image is the most there are.
        if self.images * self.channels > MAX_BLOCKS:
            return String(
                t"input: {self.images} images of {self.channels} channels; up"
                t" to {MAX_BLOCKS} channels in all are allowed"
            )
        return None


@fieldwise_init
struct NormPlan(ImplicitlyCopyable, Movable):
    """The launches of the three kernels."""

    var geometry: NormGeometry
    var group: GroupGeometry
    var width: Int
    """Channels of one load."""
    var lanes: Int
    """Of `LANES`."""
    var blocks: Int
    """Of the first kernel and of the last."""
    var finishing: Int
    """Blocks of the second."""

    def workspace(self) -> Int:
        """Float32 elements that the kernels need beside the operands."""
        return self.sums() + self.blocks_of_images() * COEFFICIENTS * Int(
            self.geometry.channels
        )

    def sums(self) -> Int:
        """Those of them that are sums; the coefficients follow."""
        return (
            self.blocks_of_images()
            * Int(self.geometry.parts.value)
            * MOMENTS
            * Int(self.geometry.channels)
        )

    def blocks_of_images(self) -> Int:
        """Images."""
        return self.finishing // Int(self.group.groups.value)


def lanes_of(channels: Int, width: Int) -> Int:
    """Threads of a block along the channels: as many as leave few idle.

    Args:
        channels: Of a pixel.
        width: Channels of one load.
    """
    var fewest = WARP
    comptime for lanes in LANES:
        var taken = ceildiv(channels, lanes * width) * lanes * width
        if Float64(taken) <= IDLE * Float64(channels):
            return lanes
        fewest = lanes
    return fewest


def width_of[dtype: DType](channels: Int, aligned: Bool) -> Int:
    """Channels of one load: as many as it takes, or one.

    Parameters:
        dtype: Of the input.

    Args:
        channels: Of a pixel.
        aligned: Whether all addresses are multiples of `LOAD_BYTES`.
    """
    comptime widest = LOAD_BYTES // size_of[dtype]()
    return widest if aligned and channels % widest == 0 else 1


def plan_group_norm[
    dtype: DType
](problem: NormProblem, *, aligned: Bool, device: Device) -> NormPlan:
    """Cuts images so that every multiprocessor has its blocks, and every thread
    of a block some pixels.

    Parameters:
        dtype: Of the input.

    Args:
        problem: What `refusal` allows, with at least one pixel.
        aligned: Whether all addresses are multiples of `LOAD_BYTES`.
        device: The GPU.
    """
    var width = width_of[dtype](problem.channels, aligned)
    var lanes = lanes_of(problem.channels, width)
    var columns = ceildiv(problem.channels, lanes * width)
    var pixels = problem.pixels()
    var most = ceildiv(pixels, THREADS // lanes * UNROLL)
    var busy = RESIDENT * device.units // (problem.images * columns)
    var parts = max(1, min(most, busy))
    var part_pixels = ceildiv(pixels, parts)
    # Rounding up may leave nothing for the last ones.
    parts = ceildiv(pixels, part_pixels)
    var group_channels = problem.channels // problem.groups
    var beside = 1
    while beside < min(group_channels, THREADS):
        beside *= 2
    return NormPlan(
        NormGeometry(
            UInt32(pixels),
            UInt32(problem.channels),
            Divisor(parts),
            Divisor(columns),
            UInt32(part_pixels),
            PixelSizes.of(problem.size),
        ),
        GroupGeometry(
            UInt32(pixels),
            UInt32(problem.channels),
            Divisor(problem.groups),
            UInt32(group_channels),
            UInt32(parts),
            UInt32(part_pixels),
            Divisor(beside),
            problem.epsilon,
        ),
        width,
        lanes,
        problem.images * columns * parts,
        problem.images * problem.groups,
    )


@fieldwise_init
struct NormOperands[dtype: DType, weight_type: DType, Output: OutputTarget](
    Copyable, Movable
):
    """What a normalization reads and writes.

    Parameters:
        dtype: Of input and output.
        weight_type: Of weight and bias.
        Output: How the output is reached.
    """

    var input: Reads[Self.dtype]
    """`[N, D, H, W, C]`."""
    var weight: Reads[Self.weight_type]
    """`[C]`; not read unless `affine`."""
    var bias: Reads[Self.weight_type]
    """The same."""
    var affine: Bool
    """Whether there are a weight and a bias."""
    var activation: DeviceActivation
    """What follows the normalization."""
    var output: Self.Output
    """`[N, D, H, W, C]`."""
    var workspace: Writes[DType.float32]
    """`NormPlan.workspace()` elements."""


def launch_group_norm[
    dtype: DType,
    weight_type: DType,
    Output: OutputTarget,
    //,
    channels: Int = UNKNOWN,
](
    plan: NormPlan,
    operands: NormOperands[dtype, weight_type, Output],
    mut queue: Stream,
) raises:
    """Enqueues the kernels for the plan's blocks.

    Parameters:
        dtype: Of input and output.
        weight_type: Of weight and bias.
        Output: How the output is reached.
        channels: Of a pixel, or `UNKNOWN`: kernels are compiled for these alone.

    Args:
        plan: What `plan_group_norm` made for this GPU.
        operands: The operands.
        queue: Where to; nothing is waited for.

    Raises:
        What the driver refused.
    """
    comptime widest = LOAD_BYTES // size_of[dtype]()
    comptime for width in [1, widest]:
        comptime for lanes in LANES:
            comptime if _is_needed(channels, width, lanes):
                if plan.width == width and plan.lanes == lanes:
                    _enqueue[width, lanes](plan, operands, queue)
                    return


def _enqueue[
    dtype: DType,
    weight_type: DType,
    Output: OutputTarget,
    //,
    width: Int,
    lanes: Int,
](
    plan: NormPlan,
    operands: NormOperands[dtype, weight_type, Output],
    mut queue: Stream,
) raises:
    """Enqueues the three kernels."""
    comptime First = MomentsKernel[dtype, width, lanes]
    comptime Second = FinishKernel[dtype, weight_type]
    comptime Last = NormalizeKernel[dtype, width, lanes, Output]
    var sums = operands.workspace
    var coefficients = sums.unsafe_offset(plan.sums())
    queue.enqueue[First.run](
        LaunchGrid(plan.blocks, THREADS, shared_bytes=First.shared_bytes),
        operands.input,
        sums,
        plan.geometry,
    )
    queue.enqueue[Second.run](
        LaunchGrid(
            plan.finishing,
            THREADS,
            shared_bytes=Second.shared_bytes,
        ),
        operands.input,
        sums.as_imm(),
        operands.weight,
        operands.bias,
        UInt32(1) if operands.affine else UInt32(0),
        coefficients,
        plan.group,
    )
    queue.enqueue[Last.run](
        LaunchGrid(plan.blocks, THREADS),
        operands.input,
        coefficients.as_imm(),
        operands.output,
        operands.activation,
        plan.geometry,
    )


def _is_needed(channels: Int, width: Int, lanes: Int) -> Bool:
    """Whether a plan for so many channels may have such blocks."""
    return channels == UNKNOWN or (
        channels % width == 0 and lanes_of(channels, width) == lanes
    )
