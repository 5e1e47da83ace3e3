"""The library of the mean over pixels on a GPU. It runs on a CUDA stream of its
caller's, and waits for nothing.

    mojo build -I . --emit shared-lib --target-accelerator sm_90a \\
        library/mean.mojo -D dtype=bfloat16 -D scaled=False

A function that fails returns the address of the sentence that says why, which
the caller frees; others return 0.
"""

from max.gpu.host import DeviceContext
from std.memory.alloc import unsafe_alloc

from library.call import TYPE, free_sentence, reads, sentence, write
from operations.conv.access import MemoryOutput
from operations.conv.memory import Writes
from operations.conv.operands import Device
from operations.nvidia.device import device_of
from operations.nvidia.generic.mean import LOAD_BYTES
from operations.nvidia.generic.mean_launch import (
    launch_mean,
    mean_refusal,
    plan_mean,
)
from operations.nvidia.stream import Stream


@fieldwise_init
struct Opened(Movable):
    """A device that has been opened."""

    var ctx: DeviceContext
    var device: Device


comptime Handle = Pointer[Opened, MutUntrackedOrigin]


@export
def maxconv_open(index: Int64, made: Int64) abi("C") -> Int64:
    """Opens a device.

    Args:
        index: Of the GPU, among those that the process sees.
        made: The address of where to write the device's handle.
    """
    try:
        var ctx = DeviceContext(device_id=Int(index))
        var handle = unsafe_alloc[Opened](1)
        handle.unsafe_write(Opened(ctx, device_of(ctx)))
        write(made, Int64(Int(handle)))
        return 0
    except error:
        return sentence(error)


@export
def maxconv_free(text: Int64) abi("C"):
    """Frees a sentence."""
    free_sentence(text)


@export
def maxconv_mean(
    device: Int64,
    input: Int64,
    output: Int64,
    images: Int64,
    pixels: Int64,
    channels: Int64,
    stream: Int64,
) abi("C") -> Int64:
    """Enqueues the mean over each image's pixels.

    Args:
        device: What `maxconv_open` made.
        input: The address of `[images, pixels, channels]`.
        output: The address of `[images, channels]`.
        images: How many.
        pixels: Of an image.
        channels: Of a pixel.
        stream: The `CUstream` handle; 0 is the default stream.
    """
    try:
        var refusal = mean_refusal(Int(images), Int(pixels), Int(channels))
        if refusal:
            raise Error(refusal.value())
        ref opened = Handle(unsafe_from_address=Int(device))[]
        var plan = plan_mean[TYPE](
            Int(images),
            Int(pixels),
            Int(channels),
            aligned=Int(input) % LOAD_BYTES == 0,
            device=opened.device,
        )
        var queue = Stream(opened.ctx, cuda_stream=Int(stream))
        launch_mean(
            plan,
            reads[TYPE](input),
            MemoryOutput(Writes[TYPE](unsafe_from_address=Int(output))),
            queue,
        )
        return 0
    except error:
        return sentence(error)
