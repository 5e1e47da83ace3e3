"""The library of group normalization on a GPU. It runs on a CUDA stream of its
caller's, and waits for nothing.

    mojo build -I . --emit shared-lib --target-accelerator sm_90a \\
        library/group_norm.mojo -D dtype=bfloat16 -D scaled=False \\
        -D depth_to_space=False

A function that fails returns the address of the sentence that says why, which
the caller frees; others return 0.
"""

from std.utils import IndexList

from library.call import TYPE, free_sentence, reads, sentence, write
from library.device import open_device, opened
from operations.conv.access import MemoryOutput
from operations.conv.epilogue import Activation
from operations.conv.memory import Writes
from operations.conv.problem import SPATIAL
from operations.nvidia.epilogue.activations import DeviceActivation
from operations.nvidia.generic.group_norm_launch import (
    NormOperands,
    NormPlan,
    NormProblem,
    launch_group_norm,
    plan_group_norm,
)
from operations.nvidia.generic.mean import LOAD_BYTES
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
def maxconv_group_norm_workspace(
    device: Int64,
    input: Int64,
    output: Int64,
    images: Int64,
    pixels: Int64,
    channels: Int64,
    groups: Int64,
    made: Int64,
) abi("C") -> Int64:
    """Tells how much memory a normalization needs beside its operands.

    Args:
        device: As `maxconv_group_norm` takes it, like the next six.
        input: The same.
        output: The same.
        images: The same.
        pixels: The same.
        channels: The same.
        groups: The same.
        made: The address of where to write the number of float32 elements.
    """
    try:
        var problem = _problem(images, pixels, channels, groups, 0)
        write(made, Int64(_plan(device, input, output, problem).workspace()))
        return 0
    except error:
        return sentence(error)


@export
def maxconv_group_norm(
    device: Int64,
    input: Int64,
    weight: Int64,
    bias: Int64,
    wide: Int64,
    output: Int64,
    workspace: Int64,
    images: Int64,
    pixels: Int64,
    channels: Int64,
    groups: Int64,
    epsilon: Float64,
    activation: Int64,
    p0: Float64,
    p1: Float64,
    stream: Int64,
) abi("C") -> Int64:
    """Enqueues the normalization of each image's groups of channels.

    Args:
        device: What `maxconv_open` made.
        input: The address of `[images, pixels, channels]`.
        weight: The address of `[channels]`, or 0, as `bias` then is.
        bias: The same.
        wide: Whether weight and bias are float32, and not of the input's type.
        output: The address of `[images, pixels, channels]`.
        workspace: The address of as many float32 elements as
            `maxconv_group_norm_workspace` says; a multiple of 16.
        images: How many.
        pixels: Of an image.
        channels: Of a pixel.
        groups: Of channels; they divide them.
        epsilon: Added to the variance.
        activation: The `ACTIVATION_*` code of what follows.
        p0: Its first parameter.
        p1: Its second.
        stream: The `CUstream` handle; 0 is the default stream.
    """
    try:
        var problem = _problem(images, pixels, channels, groups, epsilon)
        if (weight == 0) != (bias == 0):
            raise Error("weight, bias: one is missing; both or none are needed")
        var plan = _plan(device, input, output, problem)
        var behind = DeviceActivation.of(
            Activation(Int(activation), Float32(p0), Float32(p1))
        )
        var queue = Stream(opened(device).ctx, cuda_stream=Int(stream))
        # A pointer is never null.
        var absent = workspace if weight == 0 else Int64(0)
        comptime for all_wide in [False, True]:
            comptime weight_type = DType.float32 if all_wide else TYPE
            if (wide != 0) == all_wide:
                launch_group_norm(
                    plan,
                    NormOperands(
                        reads[TYPE](input),
                        reads[weight_type](weight + absent),
                        reads[weight_type](bias + absent),
                        weight != 0,
                        behind,
                        MemoryOutput(
                            Writes[TYPE](unsafe_from_address=Int(output))
                        ),
                        Writes[DType.float32](
                            unsafe_from_address=Int(workspace)
                        ),
                    ),
                    queue,
                )
        return 0
    except error:
        return sentence(error)


def _problem(
    images: Int64,
    pixels: Int64,
    channels: Int64,
    groups: Int64,
    epsilon: Float64,
) raises -> NormProblem:
    """The normalization of a call.

    Raises:
        Why the kernels cannot do it.
    """
    if images < 1 or pixels < 1:
        raise Error(
            t"input: {images} images of {pixels} pixels; at least one of each"
            t" is needed"
        )
    if not epsilon >= 0:
        raise Error(
            t"epsilon: {epsilon} is not allowed; 0 and above are allowed"
        )
    var problem = NormProblem(
        Int(images),
        IndexList[SPATIAL](1, 1, Int(pixels)),
        Int(channels),
        Int(groups),
        Float32(epsilon),
    )
    var refusal = problem.refusal()
    if refusal:
        raise Error(refusal.value())
    return problem


def _plan(
    device: Int64, input: Int64, output: Int64, problem: NormProblem
) -> NormPlan:
    """The launches of a call."""
    return plan_group_norm[TYPE](
        problem,
        aligned=Int(input) % LOAD_BYTES == 0 and Int(output) % LOAD_BYTES == 0,
        device=opened(device).device,
    )
