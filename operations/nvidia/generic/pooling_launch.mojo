"""The host side of pooling on a GPU: plan and launch."""

from std.collections import Optional
from std.math import ceildiv

from ...conv.access import OutputTarget
from ...conv.known import UNKNOWN
from ...conv.memory import Reads, element_bytes
from ...conv.pooling import PoolProblem
from ..device import device_of
from ..limits import MAX_INDEX
from ..stream import LaunchGrid, Stream
from .depthwise_geometry import (
    LANES,
    THREADS,
    DepthwiseConfig,
    Phases,
    depthwise_geometry,
    items_of,
)
from .mean import LOAD_BYTES
from .mean_launch import launch_mean, mean_refusal, plan_mean
from .pooling import MAX_PIXELS, PoolGeometry, PoolKernel, pixels_of_row


comptime MAX_WIDTH = 8
"""Neighbouring channels of a thread, at most: of more, what is held would not fit
its registers."""


@fieldwise_init
struct PoolPlan(ImplicitlyCopyable, Movable):
    """A launch of the kernel."""

    var geometry: PoolGeometry
    var blocks: Int


def vector_width(dtype: DType, channels: Int) -> Int:
    """Neighbouring channels of a thread: as many as one load takes and divide
    the channels.

    Args:
        dtype: Of the input.
        channels: Of a pixel, or `UNKNOWN`: they are taken to be a multiple of
            what a load takes.
    """
    var width = min(MAX_WIDTH, LOAD_BYTES // element_bytes(dtype))
    if channels == UNKNOWN:
        return width
    while width > 1 and channels % width != 0:
        width //= 2
    return width


def pool_refusal(pooling: PoolProblem) -> Optional[String]:
    """Why the kernel cannot pool.

    Args:
        pooling: The problem, valid.

    Returns:
        The reason, or None.
    """
    ref window = pooling.window
    var threads = items_of(window, Phases.of_taps(window)) * window.channels
    if threads < MAX_INDEX and window.input[2] * window.channels < MAX_INDEX:
        return None
    return String(
        t"input: {pooling} has more outputs, or more elements a row, than"
        t" {MAX_INDEX}"
    )


def plan_pool(pooling: PoolProblem, *, width: Int) -> PoolPlan:
    """Cuts a pooling: a thread takes one item.

    Args:
        pooling: The problem, with at least one output.
        width: Neighbouring channels of a thread.
    """
    var image = depthwise_geometry(
        DepthwiseConfig(width, LANES),
        pooling.window,
        Phases.of_taps(pooling.window),
        workers=MAX_INDEX,
    )
    return PoolPlan(
        PoolGeometry(image, pooling.share(), pooling),
        ceildiv(Int(image.items), Int(image.block_items))
        * Int(image.slabs.value),
    )


def has_row_kernel(taps: Int, stride: Int) -> Bool:
    """Whether a thread can hold a row of its windows.

    Args:
        taps: Of the window along w, next to each other, or `UNKNOWN`.
        stride: Along w, or `UNKNOWN`.
    """
    return (
        taps != UNKNOWN
        and stride != UNKNOWN
        and pixels_of_row(taps, stride) <= MAX_PIXELS
    )


def pool[
    dtype: DType,
    Output: OutputTarget,
    //,
    average: Bool,
    whole: Bool,
    channels: Int,
    taps: Int,
    stride: Int,
](
    mut queue: Stream, pooling: PoolProblem, input: Reads[dtype], output: Output
) raises:
    """Enqueues a pooling.

    Parameters:
        dtype: Of input and output.
        Output: How the output is reached.
        average: Whether means are wanted, not the largest elements.
        whole: Whether the window is the image.
        channels: Of a pixel, or `UNKNOWN`.
        taps: Of the window along w, next to each other, or `UNKNOWN`.
        stride: Along w, or `UNKNOWN`.

    Args:
        queue: Where to run; nothing is waited for.
        pooling: The geometry, valid.
        input: `[N, D, H, W, C]`.
        output: `[N, Z, P, Q, C]`.

    Raises:
        If there are more elements than are counted; what the driver refused.
    """
    ref window = pooling.window
    if not window.has_outputs():
        return
    var aligned = Int(input) % LOAD_BYTES == 0
    comptime if not Output.stores:
        aligned = aligned and Int(output.data()) % LOAD_BYTES == 0
    comptime if average and whole:
        var pixels = window.taps()
        var refusal = mean_refusal(window.batch, pixels, window.channels)
        if refusal:
            raise Error(refusal.value())
        var mean = plan_mean[dtype](
            window.batch,
            pixels,
            window.channels,
            aligned=aligned,
            device=device_of(queue.ctx),
        )
        launch_mean(mean, input, output, queue)
        return
    var refusal = pool_refusal(pooling)
    if refusal:
        raise Error(refusal.value())
    comptime row = has_row_kernel(taps, stride)
    comptime widest = vector_width(dtype, channels)
    var width = widest
    if not aligned or window.channels % widest != 0:
        width = 1
    comptime for compiled in [1, widest]:
        comptime if compiled == 1 or widest > 1:
            if width == compiled:
                comptime Kernel = PoolKernel[
                    dtype,
                    average,
                    Output,
                    compiled,
                    taps if row else 0,
                    stride if row else 0,
                ]
                var plan = plan_pool(pooling, width=width)
                queue.enqueue[Kernel.run](
                    LaunchGrid(plan.blocks, THREADS),
                    input,
                    output,
                    plan.geometry,
                )
                return
