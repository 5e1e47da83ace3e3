"""The library of one kernel of a GPU. It runs on a CUDA stream of its caller's,
and waits for nothing.

    mojo build -I . -I library/kernels/sm90 --emit shared-lib \\
        --target-accelerator sm_90a library/gpu.mojo -D kernel=7 \\
        -D dtype=bfloat16 -D bias=bfloat16 -D output=bfloat16 -D scaled=False \\
        -D depth_to_space=False

The module `kernel` names the kernel, so that the compiler reads no other's
source: it takes longer to read all of them than to compile most of them.
A device is opened once. A call is prepared once for a device: it is decoded,
checked and planned. Then it is launched any number of times. A function that
fails returns the address of the sentence that says why, which the caller frees;
others return 0.
"""

from max.gpu.host import DeviceContext
from std.memory.alloc import unsafe_alloc
from std.sys.defines import get_defined_int

from kernel import Kernel
from library.call import (
    OUTPUT_TYPE,
    SCALED,
    TYPE,
    Call,
    CallArguments,
    free_sentence,
    sentence,
    write,
)
from library.device import open_device, opened
from operations.conv.fields import KERNEL_AUTO
from operations.conv.known import UNKNOWN_FILTER
from operations.conv.plans import Planned
from operations.conv.registry import Registry
from operations.nvidia.device import target_capability
from operations.nvidia.stream import Stream
from operations.nvidia.summed_output import takes_sums

comptime KERNEL = get_defined_int["kernel", KERNEL_AUTO]()
"""The `KERNEL_*` code of the kernel."""

comptime KERNELS = 1 << KERNEL

comptime REGISTRY = Registry[Stream, Kernel]
"""The kernel alone."""


@fieldwise_init
struct Prepared(Movable):
    """A call without its pointers, for a device."""

    var call: Call
    var planned: Planned
    var ctx: DeviceContext


comptime Handle = Pointer[Prepared, MutUntrackedOrigin]


@export
def maxconv_open(index: Int64, made: Int64) abi("C") -> Int64:
    """Opens a device.

    Args:
        index: Of the GPU, among those that the process sees.
        made: The address of where to write the device's handle.
    """
    return open_device(index, made)


@export
def maxconv_prepare(
    device: Int64,
    shapes: Int64,
    filter: Int64,
    geometry: Int64,
    scalars: Int64,
    aligned: Int64,
    made: Int64,
) abi("C") -> Int64:
    """Prepares a call that `maxconv_choose` answered with this kernel.

    Args:
        device: What `maxconv_open` made.
        shapes: As `Call` takes them, like the next three.
        filter: Elements of the filter.
        geometry: The address of the geometry operand.
        scalars: The address of the scalars operand.
        aligned: Whether all addresses are multiples of `COPY_BYTES`.
        made: The address of where to write the call's handle.
    """
    comptime assert Kernel.code == KERNEL, "the module is another kernel's"
    try:
        ref found = opened(device)
        var call = Call(shapes, filter, geometry, scalars)
        comptime if takes_sums(CallArguments.types(SCALED), centered=False):
            raise Error(
                t"input: {TYPE} and an output of {OUTPUT_TYPE} are not"
                t" supported by a GPU's libraries; graphs take them"
            )
        call.quantization().refuse_zero_point()
        var planned = REGISTRY.plan[CallArguments.types(SCALED), KERNELS](
            KERNEL,
            call.problem,
            call.operands(aligned=aligned != 0),
            found.device,
        )
        var handle = unsafe_alloc[Prepared](1)
        handle.unsafe_write(Prepared(call^, planned, found.ctx))
        write(made, Int64(Int(handle)))
        return 0
    except error:
        return sentence(error)


@export
def maxconv_release(handle: Int64) abi("C"):
    """Frees what `maxconv_prepare` made."""
    var prepared = Handle(unsafe_from_address=Int(handle))
    prepared.unsafe_deinit_pointee()
    prepared.unsafe_free()


@export
def maxconv_free(text: Int64) abi("C"):
    """Frees a sentence."""
    free_sentence(text)


@export
def maxconv_run(
    handle: Int64,
    x: Int64,
    filter: Int64,
    bias: Int64,
    residual: Int64,
    scale: Int64,
    output: Int64,
    stream: Int64,
) abi("C") -> Int64:
    """Enqueues the convolution.

    Args:
        handle: What `maxconv_prepare` made.
        x: The address of an operand, as `Call.arguments` takes it. The filter
            is in `LAYOUT_KRSC`.
        filter: The same.
        bias: The same.
        residual: The same.
        scale: The same.
        output: The same.
        stream: The `CUstream` handle; 0 is the default stream.
    """
    try:
        ref prepared = Handle(unsafe_from_address=Int(handle))[]
        var queue = Stream(prepared.ctx, cuda_stream=Int(stream))
        REGISTRY.launch[
            capability=target_capability(),
            kernels=KERNELS,
            known=UNKNOWN_FILTER,
            scaled=SCALED,
        ](
            prepared.planned,
            prepared.call.problem,
            prepared.call.arguments(x, filter, bias, residual, scale, output),
            queue,
        )
        return 0
    except error:
        return sentence(error)
