"""The library that says which kernel a convolution runs on, and why. It is
built for this machine's CPU, and runs no kernel."""

from max.gpu.host import DeviceAttribute, DeviceContext
from std.sys.info import num_physical_cores

from library.call import (
    TYPE,
    free_sentence,
    reads,
    sentence,
    text_of,
    write,
)
from operations.conv.fields import (
    GEOMETRY_FILTER_LAYOUT,
    GEOMETRY_KERNEL,
    GEOMETRY_LENGTH,
    GEOMETRY_PRECISION,
    LAYOUT_INTERLEAVED,
    LAYOUT_KRSC,
    PRECISION_FLOAT32,
)
from operations.conv.kernel import kernel_name
from operations.conv.operands import Device
from operations.conv.problem import RANK, ConvProblem, Geometry
from operations.explain import explain


@export
def maxconv_explain(
    shapes: Int64,
    geometry: Int64,
    capability: Int64,
    units: Int64,
    l2_bytes: Int64,
    fused_output: Int64,
    made: Int64,
) abi("C") -> Int64:
    """Chooses.

    Args:
        shapes: The address of ten int64: `[N, D, H, W, C]` of the activation
            and `[N, Z, P, Q, K]` of the output.
        geometry: The address of the geometry operand, see fields.mojo;
            `LAYOUT_INTERLEAVED` is of activation and output too, any other
            layout is channels last.
        capability: A GPU's compute capability, times ten; 0 for this CPU.
        units: The GPU's multiprocessors; not read for a CPU, where MAX's
            runtime starts a thread for each core.
        l2_bytes: Of the GPU's L2 cache; 0 where it is not known.
        fused_output: Whether the graph compiler fuses something behind.
        made: The address of where to write the address of a text: the kernel's
            name, a colon, the reason.
    """
    try:
        var decoded = Geometry(reads[DType.int64](geometry), GEOMETRY_LENGTH)
        var sizes = reads[DType.int64](shapes)
        var problem = ConvProblem(decoded, sizes, sizes.unsafe_offset(RANK))
        problem.validate(
            LAYOUT_KRSC, problem.filters * problem.gemm_k(), DType.float32
        )
        var answer = explain[TYPE](
            problem,
            requested=decoded[GEOMETRY_KERNEL],
            exact=decoded[GEOMETRY_PRECISION] == PRECISION_FLOAT32,
            fused_output=fused_output != 0,
            interleaved=decoded[GEOMETRY_FILTER_LAYOUT] == LAYOUT_INTERLEAVED,
            device=Device(
                Int(capability),
                Int(units) if capability != 0 else num_physical_cores(),
                Int(l2_bytes),
            ),
        )
        write(
            made,
            text_of(String(t"{kernel_name(answer.kernel)}: {answer.reason}")),
        )
        return 0
    except error:
        return sentence(error)


@export
def maxconv_gpu(
    capability: Int64, units: Int64, l2_bytes: Int64
) abi("C") -> Int64:
    """Describes the first GPU.

    Args:
        capability: The address of where to write its compute capability, times
            ten.
        units: The address of where to write its multiprocessors.
        l2_bytes: The address of where to write the bytes of its L2 cache.
    """
    try:
        var ctx = DeviceContext(0, api="cuda")
        write(capability, Int64(ctx.compute_capability()))
        write(
            units,
            Int64(ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)),
        )
        write(l2_bytes, Int64(ctx.get_attribute(DeviceAttribute.L2_CACHE_SIZE)))
        return 0
    except error:
        return sentence(error)


@export
def maxconv_free(text: Int64) abi("C"):
    """Frees a sentence."""
    free_sentence(text)
