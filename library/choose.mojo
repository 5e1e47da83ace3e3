"""The library that chooses a GPU's kernel. It is built for this machine's CPU,
and runs no kernel: one that runs is built for each (gpu.mojo)."""

from library.call import (
    SCALED,
    Call,
    CallArguments,
    free_sentence,
    sentence,
    write,
)
from operations.conv.fields import GEOMETRY_KERNEL, KERNEL_AUTO
from operations.conv.known import KnownProblem
from operations.conv.operands import Device
from operations.conv.registry import ALL_KERNELS
from operations.nvidia.legality import check_type
from operations.nvidia.registry import GPU_REGISTRY


@export
def maxconv_choose(
    shapes: Int64,
    filter: Int64,
    geometry: Int64,
    scalars: Int64,
    aligned: Int64,
    capability: Int64,
    units: Int64,
    l2_bytes: Int64,
    made: Int64,
) abi("C") -> Int64:
    """Chooses the kernel of a call.

    Args:
        shapes: As `Call` takes them, like the next three.
        filter: Elements of the filter.
        geometry: The address of the geometry operand.
        scalars: The address of the scalars operand.
        aligned: Whether all addresses are multiples of `COPY_BYTES`.
        capability: The GPU's compute capability, times ten.
        units: Its multiprocessors.
        l2_bytes: Of its L2 cache; 0 where it is not known.
        made: The address of where to write the `KERNEL_*` code.
    """
    try:
        var call = Call(shapes, filter, geometry, scalars)
        comptime types = CallArguments.types(SCALED)
        check_type(types, Int(capability))
        var planned = GPU_REGISTRY.find_plan[types, ALL_KERNELS](
            call.geometry[GEOMETRY_KERNEL],
            call.problem,
            call.operands(aligned=aligned != 0),
            Device(Int(capability), Int(units), Int(l2_bytes)),
        )
        write(made, Int64(planned.kernel))
        return 0
    except error:
        return sentence(error)


@export
def maxconv_kernels(capability: Int64) abi("C") -> Int64:
    """The kernels that `maxconv_choose` may answer, a bit each.

    Args:
        capability: The GPU's compute capability, times ten.
    """
    var known = KnownProblem.nothing()
    known.kernel = KERNEL_AUTO
    return Int64(
        GPU_REGISTRY.needed(CallArguments.types(SCALED), Int(capability), known)
    )


@export
def maxconv_free(text: Int64) abi("C"):
    """Frees a sentence."""
    free_sentence(text)
