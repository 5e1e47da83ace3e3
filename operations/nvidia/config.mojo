"""What each kernel of a GPU can take: the only statement of it. Every refusal
is a sentence."""

from max.gpu.host import DeviceContext
from std.collections import Optional

from ..conv.access import ActivationSource, OutputTarget
from ..conv.registry import kernel_name
from ..conv.epilogue import Epilogue
from ..conv.fields import (
    BLACKWELL_CAPABILITIES,
    BLACKWELL_DTYPES,
    COPY_BYTES,
    HOPPER_CAPABILITIES,
    KERNEL_DEPTHWISE,
    KERNEL_GROUPED,
    KERNEL_IMPLICIT_GEMM,
    KERNEL_REFERENCE,
    KERNEL_SM100,
    KERNEL_SM90,
    KERNEL_STEM,
)
from ..conv.memory import Reads
from ..conv.problem import ConvProblem
from .sm100.dispatch import Choice as BlackwellChoice
from .sm100.dispatch import choose as choose_sm100
from .sm90.stem import launch as stem_launch
from .sm90.gemm.dispatch import Choice
from .sm90.gemm.dispatch import choose as choose_sm90
from .sm90.gemm.model import FusedWork
from .generic import depthwise_launch
from .generic.geometry import geometry_refusal


@fieldwise_init
struct Operands(ImplicitlyCopyable, Movable):
    """What beside the problem decides whether a kernel can take it."""

    var fused_input: Bool
    """Whether the activation is computed by what stands before the op."""
    var aligned: Bool
    """Whether the addresses of all operands that lie in memory are multiples
    of `COPY_BYTES`."""
    var fused_output: Bool
    """Whether the graph compiler fused something behind the output."""
    var exact: Bool
    """Whether products of float32 must not be rounded to tf32."""
    var work: FusedWork
    """What of the epilogue takes time."""

    def __init__(
        out self,
        *,
        fused_input: Bool,
        aligned: Bool,
        fused_output: Bool,
        exact: Bool,
    ):
        """Operands with nothing to be done behind the sums.

        Args:
            fused_input: See the fields.
            aligned: See the fields.
            fused_output: See the fields.
            exact: See the fields.
        """
        self = Self(fused_input, aligned, fused_output, exact, FusedWork())


def operands_of[
    Source: ActivationSource,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
](
    activation: Source,
    filter: Reads[Source.dtype],
    epilogue: Epilogue[bias_type, residual_type],
    output: Output,
    exact: Bool,
) -> Operands:
    """Looks at the operands.

    Parameters:
        Source: The activation's type.
        Output: The output's type.
        bias_type: Of the bias.
        residual_type: Of the residual.

    Args:
        activation: The activation.
        filter: The filter in `LAYOUT_KRSC`.
        epilogue: The epilogue.
        output: The output.
        exact: Whether products of float32 must not be rounded to tf32.
    """
    var addresses = Int(filter)
    comptime if not Source.fused:
        addresses |= Int(activation.data())
    comptime if not Output.stores:
        addresses |= Int(output.data())
    if epilogue.has_scale:
        addresses |= Int(epilogue.scale)
    if epilogue.has_bias:
        addresses |= Int(epilogue.bias)
    if epilogue.has_residual:
        addresses |= Int(epilogue.residual)
    return Operands(
        fused_input=Source.fused,
        aligned=addresses % COPY_BYTES == 0,
        fused_output=Output.computes or Output.stores,
        exact=exact,
        work=FusedWork.of(epilogue),
    )


def is_hopper() -> Bool:
    """Whether this is compiled for a GPU of compute capability 9.0."""
    comptime info = DeviceContext.default_device_info
    return info.api == "cuda" and is_hopper_capability(
        capability(Float64(info.compute))
    )


def is_blackwell() -> Bool:
    """Whether this is compiled for a GPU of compute capability 10.0 or 10.3."""
    comptime info = DeviceContext.default_device_info
    return info.api == "cuda" and is_blackwell_capability(
        capability(Float64(info.compute))
    )


def capability(compute: Float64) -> Int:
    """A compute capability times ten.

    Args:
        compute: The capability, as MAX states it: 10.3.
    """
    return Int(compute * 10 + 0.5)


def is_hopper_capability(capability: Int) -> Bool:
    """Whether the Hopper kernels run on a GPU.

    Args:
        capability: Its compute capability, times ten.
    """
    comptime for known in HOPPER_CAPABILITIES:
        if capability == known:
            return True
    return False


def is_blackwell_capability(capability: Int) -> Bool:
    """Whether the Blackwell kernel runs on a GPU.

    Args:
        capability: Its compute capability, times ten.
    """
    comptime for known in BLACKWELL_CAPABILITIES:
        if capability == known:
            return True
    return False


def has_sm90_types[in_type: DType, out_type: DType]() -> Bool:
    """Whether the sm90 kernel is built for these types.

    Parameters:
        in_type: Of activation and filter.
        out_type: Of the output.
    """
    comptime takes = (
        in_type.is_half_float()
        or in_type == DType.float32
        or in_type == DType.float8_e4m3fn
    )
    return takes and (out_type.is_half_float() or out_type == DType.float32)


def has_sm100_types[in_type: DType, out_type: DType]() -> Bool:
    """Whether the sm100 kernel is built for these types: the sm90 kernel's,
    and those that need it.

    Parameters:
        in_type: Of activation and filter.
        out_type: Of the output.
    """
    comptime gives = out_type.is_half_float() or out_type == DType.float32
    return (
        has_sm90_types[in_type, out_type]() or needs_sm100[in_type]() and gives
    )


def needs_sm100[in_type: DType]() -> Bool:
    """Whether no other kernel than sm100 is built for a type.

    Parameters:
        in_type: Of activation and filter.
    """
    comptime for known in BLACKWELL_DTYPES:
        comptime if in_type == known:
            return True
    return False


def has_stem_types[in_type: DType, out_type: DType]() -> Bool:
    """Whether the stem kernel is built for these types.

    Parameters:
        in_type: Of activation and filter.
        out_type: Of the output.
    """
    return in_type.is_half_float() and out_type.is_half_float()


def has_depthwise_types[in_type: DType]() -> Bool:
    """Whether the depthwise kernel is built for this type.

    Parameters:
        in_type: Of activation and filter.
    """
    return in_type.is_half_float() or in_type == DType.float32


def _type_refusal[
    in_type: DType, out_type: DType
](kernel: Int, operands: Operands) -> Optional[String]:
    """Why a kernel is not for these types, or not for the precision that was
    asked for."""
    if kernel == KERNEL_STEM:
        comptime if not has_stem_types[in_type, out_type]():
            return String(
                t"stem takes and gives bfloat16 or float16; here {in_type} and"
                t" {out_type}"
            )
    elif kernel == KERNEL_DEPTHWISE:
        comptime if not has_depthwise_types[in_type]():
            return String(
                t"depthwise takes float32, bfloat16 and float16; here {in_type}"
            )
    elif kernel == KERNEL_SM100 and has_sm100_types[in_type, out_type]():
        return _precision_refusal[in_type](kernel, operands)
    elif kernel == KERNEL_SM90 or kernel == KERNEL_SM100:
        var name = kernel_name(kernel)
        comptime if not has_sm90_types[in_type, out_type]():
            var further = ""
            if kernel == KERNEL_SM100:
                further = ", float8_e5m2 and int8"
            return String(
                t"{name} takes float32, bfloat16, float16 and"
                t" float8_e4m3fn{further} and gives float32, bfloat16 or"
                t" float16; here {in_type} and {out_type}"
            )
        else:
            return _precision_refusal[in_type](kernel, operands)
    return None


def _precision_refusal[
    in_type: DType
](kernel: Int, operands: Operands) -> Optional[String]:
    """Why a kernel of tensor cores does not keep the precision that was asked
    for."""
    comptime if in_type == DType.float32:
        if operands.exact:
            return String(
                t"{kernel_name(kernel)} rounds float32 operands to tf32, but"
                t" precision='float32' was asked for"
            )
    return None


def _tensor_refusal[
    hopper: Bool, blackwell: Bool
](kernel: Int, operands: Operands) -> Optional[String]:
    """Why no kernel of one generation of tensor cores can take these operands
    here."""
    var name = kernel_name(kernel)
    if kernel == KERNEL_SM100 and not blackwell:
        return String(
            t"{name} runs on compute capability 10.0 and 10.3 only (B200, B300)"
        )
    elif kernel != KERNEL_SM100 and not hopper:
        return String(
            t"{name} runs on compute capability 9.0 only (H100, H200)"
        )
    else:
        if operands.fused_input:
            return String(
                t"{name} reads the activation from memory, but here other work"
                t" is fused in front of it"
            )
        return _alignment_refusal(name, operands)


def _alignment_refusal(
    name: StaticString, operands: Operands
) -> Optional[String]:
    """Why a kernel that takes aligned operands cannot take these."""
    if operands.aligned:
        return None
    return String(
        t"{name} takes operands at multiples of {COPY_BYTES} bytes; here one"
        t" is not"
    )


@fieldwise_init
struct Verdict(Copyable, Movable):
    """Whether a kernel can take a problem, and how."""

    var refusal: Optional[String]
    """Why it cannot, or None."""
    var sm90: Choice
    """The candidate that the Hopper kernel would run with, if it was asked
    about and can."""
    var sm100: BlackwellChoice
    """As `sm90`, of the Blackwell kernel."""


def judge[
    in_type: DType, out_type: DType, hopper: Bool, blackwell: Bool
](
    kernel: Int, problem: ConvProblem, operands: Operands, multiprocessors: Int
) -> Verdict:
    """Whether a kernel can take a problem on a GPU.

    Parameters:
        in_type: Of activation and filter.
        out_type: Of the output.
        hopper: Whether the GPU has compute capability 9.0.
        blackwell: Whether it has compute capability 10.0 or 10.3.

    Args:
        kernel: A `KERNEL_*` code.
        problem: The convolution.
        operands: Its operands.
        multiprocessors: Of the GPU.
    """
    var verdict = Verdict(
        _refusal[in_type, out_type, hopper, blackwell](
            kernel, problem, operands
        ),
        Choice(-1, 1, 0.0, String()),
        BlackwellChoice.none(),
    )
    # Choosing asks for the tiles of at least one output.
    if verdict.refusal or problem.gemm_m() == 0 or problem.filters == 0:
        return verdict^
    comptime if hopper and has_sm90_types[in_type, out_type]():
        if kernel == KERNEL_SM90:
            verdict.sm90 = choose_sm90[in_type, out_type](
                problem, multiprocessors, operands.fused_output, operands.work
            )
            if verdict.sm90.index < 0:
                verdict.refusal = verdict.sm90.refusal
    comptime if blackwell and has_sm100_types[in_type, out_type]():
        if kernel == KERNEL_SM100:
            verdict.sm100 = choose_sm100[in_type, out_type](
                problem,
                multiprocessors,
                operands.fused_output,
                operands.work.residual,
            )
            if verdict.sm100.index < 0:
                verdict.refusal = verdict.sm100.reason
    return verdict^


def _refusal[
    in_type: DType, out_type: DType, hopper: Bool, blackwell: Bool
](kernel: Int, problem: ConvProblem, operands: Operands) -> Optional[String]:
    """Why a kernel cannot take a problem, but for what the Hopper kernel's
    candidates say."""
    if kernel == KERNEL_REFERENCE:
        return None
    if kernel == KERNEL_IMPLICIT_GEMM or kernel == KERNEL_GROUPED:
        return geometry_refusal(problem)
    var refusal = _type_refusal[in_type, out_type](kernel, operands)
    if refusal:
        return refusal
    if kernel == KERNEL_DEPTHWISE:
        refusal = _alignment_refusal(kernel_name(kernel), operands)
        if refusal:
            return refusal
        return depthwise_launch.can_implement[in_type](problem)
    if kernel == KERNEL_SM90 or kernel == KERNEL_STEM or kernel == KERNEL_SM100:
        refusal = _tensor_refusal[hopper, blackwell](kernel, operands)
        if not refusal and kernel == KERNEL_STEM:
            return stem_launch.can_implement[in_type, out_type](problem)
        return refusal
    return String(
        t"{kernel_name(kernel)} is a kernel of CPUs; a GPU has reference,"
        t" implicit_gemm, depthwise, grouped, sm90, stem and sm100"
    )
