"""The multiply: an accumulator in tensor memory += tile x tile, both read from
shared memory (PTX ISA, "tcgen05.mma").

Tiles are rows of 128 bytes, swizzled over 8 rows, the products' dimension
innermost ("K-major"). One thread issues; a barrier tells when all that it has
issued is done.
"""

from std.sys._assembly import inlined_assembly

from ..im2col.traversal import ROW_BYTES
from ..tma.copy import SharedAddress
from ..limits import MMA_K_BYTES, PATTERN_BYTES
from .config import Conv2dConfig

comptime MMA_STEPS = ROW_BYTES // MMA_K_BYTES
"""Instructions of a step of the sum."""


def mma_kind(dtype: DType) -> String:
    """The instruction's kind.

    Args:
        dtype: Of the activation.
    """
    if dtype.is_half_float():
        return "f16"
    if dtype == DType.float32:
        return "tf32"
    if accumulator_type(dtype) == DType.int32:
        return "i8"
    return "f8f6f4"


def accumulator_type(dtype: DType) -> DType:
    """The type of sums.

    Args:
        dtype: Of the activation.
    """
    if dtype == DType.int8 or dtype == DType.uint8:
        return DType.int32
    return DType.float32


def operand_format(dtype: DType) -> UInt32:
    """An operand's code in the instruction descriptor.

    Args:
        dtype: Of the operand.
    """
    if dtype == DType.float32:
        return 2
    if (
        dtype == DType.bfloat16
        or dtype == DType.float8_e5m2
        or dtype == DType.int8
    ):
        return 1
    return 0


def instruction_descriptor(config: Conv2dConfig) -> UInt32:
    """The instruction descriptor (PTX ISA, "Instruction descriptor"): D's type
    in bits 4-5, A's in 7-9, B's in 10-12, N/8 in 17-22, M/16 in 24-28; neither
    operand is negated or transposed."""
    var integer = accumulator_type(config.types.act) == DType.int32
    var sums = UInt32(2 if integer else 1)
    return (
        sums << 4
        | operand_format(config.types.act) << 7
        | operand_format(config.types.filter) << 10
        | UInt32(config.mma_shape[1] // 8) << 17
        | UInt32(config.mma_shape[0] // 16) << 24
    )


@always_inline
def matrix_descriptor(address: SharedAddress) -> UInt64:
    """A tile's descriptor (PTX ISA, "Shared memory descriptor"): address / 16
    in bits 0-13, the distance of 8-row groups / 16 in 32-45, a constant 1 in
    46-48, the 128-byte swizzle, 2, in 61-63.

    Args:
        address: The tile's.
    """
    comptime fixed = (
        UInt64(PATTERN_BYTES >> 4) << 32 | UInt64(1) << 46 | UInt64(2) << 61
    )
    return UInt64((address & 0x3FFFF) >> 4) | fixed


@always_inline
def multiply_step[
    config: Conv2dConfig,
](
    accumulator: UInt32,
    activations: SharedAddress,
    filters: SharedAddress,
    accumulate: Bool,
):
    """Starts multiplying a step of the sum. One thread, of a pair of blocks
    the first one's.

    Args:
        accumulator: Its address in tensor memory.
        activations: The step's, the same in both blocks of a pair.
        filters: The step's, the same in both blocks of a pair.
        accumulate: Whether to add to the accumulator, or to overwrite it.
    """
    comptime name = String(
        "{\n.reg .pred accumulate;\nsetp.ne.u32 accumulate, $4, 0;\n",
        "tcgen05.mma.cta_group::",
        config.cta_group,
        ".kind::",
        mma_kind(config.types.act),
        " [$0], $1, $2, $3, accumulate;\n}",
    )
    comptime instruction = instruction_descriptor(config)
    var a = matrix_descriptor(activations)
    var b = matrix_descriptor(filters)
    comptime for k in range(MMA_STEPS):
        # A row begins at a multiple of its bytes: nothing is carried.
        comptime passed = UInt64(k * MMA_K_BYTES >> 4)
        inlined_assembly[name, NoneType, constraints="r,l,l,r,r,~{memory}"](
            accumulator,
            a + passed,
            b + passed,
            instruction,
            UInt32(accumulate or k > 0),
        )


@always_inline
def commit_multiplies[
    cta_group: Int, multicast: Bool
](barrier: SharedAddress, blocks: UInt16):
    """Has a barrier arrived at once everything is done that this thread has
    told the tensor cores to do.

    Parameters:
        cta_group: Blocks that multiply together.
        multicast: Whether the barrier is that of several blocks.

    Args:
        barrier: Its address in this block.
        blocks: With `multicast`, a bit for each block of the cluster.
    """
    comptime name = String(
        "tcgen05.commit.cta_group::",
        cta_group,
        ".mbarrier::arrive::one.shared::cluster",
        ".multicast::cluster.b64 [$0], $1;" if multicast else ".b64 [$0];",
    )
    inlined_assembly[name, NoneType, constraints="r,h,~{memory}"](
        barrier, blocks
    )
