"""Refusals that several GPU kernels share."""

from std.collections import Optional

from ..conv.fields import (
    GPU_DTYPES,
    KERNEL_SM90,
    KERNEL_UNALIGNED,
    HOPPER_DTYPES,
    COPY_BYTES,
    TILE_FILTERS,
)
from ..conv.known import UNKNOWN, KnownProblem
from ..conv.memory import element_bytes
from ..conv.operands import Operands, OperandTypes
from ..conv.kernel import kernel_name
from .summed_output import SUM_TYPE
from .device import is_blackwell, is_hopper
from .patches import may_merge_patches


def is_gpu_type(dtype: DType) -> Bool:
    """Whether only GPUs take a type.

    Args:
        dtype: Of activation and filter.
    """
    comptime for known in GPU_DTYPES:
        if dtype == known:
            return True
    return False


def check_type(types: OperandTypes, capability: Int) raises:
    """Refuses types that no kernel takes on a GPU.

    Args:
        types: Of the operands.
        capability: The GPU's compute capability, times ten.

    Raises:
        Naming the argument, its value and what is allowed.
    """
    var newer = False
    comptime for known in HOPPER_DTYPES:
        newer = newer or types.input == known
    if newer and not (is_hopper(capability) or is_blackwell(capability)):
        raise Error(
            t"input: dtype {types.input} takes a GPU of compute capability 9.0,"
            t" 10.0 or 10.3 (H100, H200, B200, B300); on this one float32,"
            t" bfloat16, float16, float8_e4m3fn and int8 are allowed"
        )


def hopper_refusal(kernel: Int, capability: Int) -> Optional[String]:
    """Why a kernel of Hopper does not run on a GPU, or None.

    Args:
        kernel: A `KERNEL_*` code.
        capability: The GPU's compute capability, times ten.
    """
    if is_hopper(capability):
        return None
    return String(
        t"{kernel_name(kernel)} runs on compute capability 9.0 only (H100,"
        t" H200)"
    )


def blackwell_refusal(kernel: Int, capability: Int) -> Optional[String]:
    """Why a kernel of Blackwell does not run on a GPU, or None.

    Args:
        kernel: A `KERNEL_*` code.
        capability: The GPU's compute capability, times ten.
    """
    if is_blackwell(capability):
        return None
    return String(
        t"{kernel_name(kernel)} runs on compute capability 10.0 and 10.3 only"
        t" (B200, B300)"
    )


def tensor_core_refusal(kernel: Int, types: OperandTypes) -> Optional[String]:
    """Why an implicit GEMM of tensor cores is not built for types, or None.

    Args:
        kernel: `KERNEL_SM90` or `KERNEL_SM100`.
        types: Of the operands.
    """
    var takes = is_output_type(types.input) or is_gpu_type(types.input)
    if (
        takes
        and is_output_type(types.output)
        and types.residual == types.output
    ):
        return None
    if kernel in (KERNEL_SM90, KERNEL_UNALIGNED) and gives_sums(types):
        return None
    return String(
        t"{kernel_name(kernel)} takes float32, bfloat16, float16,"
        t" float8_e4m3fn, float8_e5m2 and int8, and gives float32, bfloat16 or"
        t" float16, of which the residual is too; here {types.input},"
        t" {types.output} and {types.residual}"
    )


def takes_mma_types(types: OperandTypes) -> Bool:
    """Whether the multiply that all GPUs' tensor cores have takes operands, if
    float32 may be rounded to tf32.

    Args:
        types: Of the operands.
    """
    if gives_sums(types):
        return True
    return (
        is_output_type(types.input) or types.input == DType.int8
    ) and is_output_type(types.output)


def gives_sums(types: OperandTypes) -> Bool:
    """Whether an op of integers stores its sums (summed_output.mojo).

    Args:
        types: Of the operands, as kernels see them.
    """
    return types.input.is_integral() and types.output == SUM_TYPE


def is_output_type(dtype: DType) -> Bool:
    """Whether a type is one that every kernel gives: float32, or of 16 bits."""
    return dtype.is_half_float() or dtype == DType.float32


def may_fill_tiles(known: KnownProblem) -> Bool:
    """Whether groups may have enough filters for the tile of an implicit GEMM.

    Args:
        known: What is known of the problem.
    """
    return (
        known.groups == 1
        or known.filters <= UNKNOWN
        or known.filters >= TILE_FILTERS
    )


def may_be_tiled(known: KnownProblem, types: OperandTypes) -> Bool:
    """Whether an implicit GEMM of tensor cores may run: TMA takes pixels of
    whole units of `COPY_BYTES`.

    Args:
        known: What is known of the problem.
        types: Of the operands.
    """
    if types.input == DType.float32 and known.exact:
        return False
    return (
        known.may_be_multiple(
            known.channels, element_bytes(types.input), COPY_BYTES
        )
        or may_merge_patches(known, types)
    ) and known.may_be_multiple(
        known.filters, element_bytes(types.output), COPY_BYTES
    )


def memory_refusal(kernel: Int, types: OperandTypes) -> Optional[String]:
    """Why a kernel that reads the activation by address cannot, or None.

    Args:
        kernel: A `KERNEL_*` code.
        types: Of the operands.
    """
    if types.fused_input:
        return String(
            t"{kernel_name(kernel)} reads the activation from memory, but here"
            t" other work is fused in front of it"
        )
    return None


def alignment_refusal(kernel: Int, operands: Operands) -> Optional[String]:
    """Why a kernel that takes aligned operands cannot take these, or None.

    Args:
        kernel: A `KERNEL_*` code.
        operands: The operands.
    """
    if operands.aligned():
        return None
    return String(
        t"{kernel_name(kernel)} takes operands at multiples of {COPY_BYTES}"
        t" bytes; here one is not"
    )


def precision_refusal(kernel: Int, operands: Operands) -> Optional[String]:
    """Why a kernel of tensor cores does not keep the precision that was asked
    for, or None.

    Args:
        kernel: A `KERNEL_*` code.
        operands: The operands.
    """
    if operands.types.input == DType.float32 and operands.exact:
        return String(
            t"{kernel_name(kernel)} rounds float32 operands to tf32, but"
            t" precision='float32' was asked for"
        )
    return None


def has_diagonal_types(types: OperandTypes) -> Bool:
    """Whether Hopper's diagonal kernel is built for types."""
    return (
        types.input.is_half_float()
        and types.output.is_half_float()
        and types.residual == types.output
    )
