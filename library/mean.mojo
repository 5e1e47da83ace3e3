"""The library of the mean over pixels on a GPU. It runs on a CUDA stream of its
caller's, and waits for nothing.

    mojo build -I . --emit shared-lib --target-accelerator sm_90a \\
        library/mean.mojo -D dtype=bfloat16 -D scaled=False

A function that fails returns the address of the sentence that says why, which
the caller frees; others return 0.
"""

from library.call import TYPE, free_sentence, reads, sentence
from library.device import open_device, opened
from operations.conv.access import MemoryOutput
from operations.conv.memory import Writes
from operations.nvidia.generic.mean import LOAD_BYTES
from operations.nvidia.generic.mean_launch import (
    launch_mean,
    mean_refusal,
    plan_mean,
)
from operations.nvidia.stream import Stream


@export
def maxconv_open(index: Int64, made: Int64) abi("C") -> Int64:
    """Opens a device.

    Args:
        index: Of the GPU, among those that the process sees.
        made: The address of where to write the device's handle.
    """
    return open_device(index, made)


@export
def maxconv_free(text: Int64) abi("C"):
    """Frees a sentence."""
    free_sentence(text)


@export
def maxconv_mean(
    device: Int64,
    images: Int64,
    pixels: Int64,
    channels: Int64,
    input: Int64,
    output: Int64,
    stream: Int64,
) abi("C") -> Int64:
    """Enqueues the mean over each image's pixels.

    Args:
        device: What `maxconv_open` made.
        images: How many.
        pixels: Of an image.
        channels: Of a pixel.
        input: The address of `[images, pixels, channels]`.
        output: The address of `[images, channels]`.
        stream: The `CUstream` handle; 0 is the default stream.
    """
    try:
        var refusal = mean_refusal(Int(images), Int(pixels), Int(channels))
        if refusal:
            raise Error(refusal.value())
        ref found = opened(device)
        var plan = plan_mean[TYPE](
            Int(images),
            Int(pixels),
            Int(channels),
            aligned=Int(input) % LOAD_BYTES == 0,
            device=found.device,
        )
        var queue = Stream(found.ctx, cuda_stream=Int(stream))
        launch_mean(
            plan,
            reads[TYPE](input),
            MemoryOutput(Writes[TYPE](unsafe_from_address=Int(output))),
            queue,
        )
        return 0
    except error:
        return sentence(error)
