"""Problem -> kernel, on the CPU."""

from extensibility import ManagedTensorSlice
from std.runtime import parallelism_level

from ..conv.memory import HostBuffer, Reads
from .launch import launch
from .scheduler import CpuContext, choose_blocking
from .config import (
    CPU_TILE,
    LANES,
    MAX_FEW_FILTERS,
    SOURCE_CONVERTED,
    SOURCE_FLOAT32,
    SOURCE_FUSED,
    can_implement,
    kernel_name,
)
from ..conv.epilogue import Epilogue
from ..conv.fields import (
    GEOMETRY_FILTER_LAYOUT,
    GEOMETRY_KERNEL,
    KERNEL_AUTO,
    KERNEL_DEPTHWISE,
    KERNEL_FEW_FILTERS,
    KERNEL_GROUPED,
    KERNEL_IMPLICIT_GEMM,
    KERNEL_POINTWISE,
    KERNEL_REFERENCE,
    KERNEL_STEM,
    LAYOUT_PACKED,
    PANEL,
)
from ..conv.packing import pack_filter
from ..conv.problem import ConvProblem, Geometry


comptime MIN_FEW_DEPTH = 9
"""Products of the smallest filter that the kernel for few of them is faster
for than a panel: adding up lanes costs the same for every depth."""

comptime MIN_FEW_COLUMNS = 4
"""Output columns of the narrowest image that it is faster for: its tiles are 8
columns wide."""


def _prefers_few_filters(problem: ConvProblem) -> Bool:
    """Whether the kernel for few filters is faster than a panel that they fill
    in part, as measured: up to a quarter of a panel nearly always, up to half
    of it if channels fill the lanes and there is depth to add up."""
    if problem.groups > 1:
        return False
    if problem.filters <= PANEL // 4:
        return (
            problem.gemm_k() >= MIN_FEW_DEPTH
            and problem.output[2] >= MIN_FEW_COLUMNS
        )
    return (
        problem.filters <= MAX_FEW_FILTERS
        and problem.group_channels() >= 2 * PANEL
        and problem.gemm_k() >= 8 * PANEL
        and problem.output[2] >= 2 * MIN_FEW_COLUMNS
    )


def choose_kernel(
    requested: Int, problem: ConvProblem, source: Int
) raises -> Int:
    """The kernel that runs a problem.

    Args:
        requested: A `KERNEL_*` code; `KERNEL_AUTO` leaves the choice here.
        problem: The convolution.
        source: A `SOURCE_*` code.

    Returns:
        A `KERNEL_*` code.

    Raises:
        If the requested kernel cannot take the problem: why.
    """
    if requested < KERNEL_AUTO or requested > KERNEL_STEM:
        raise Error(
            t"config: kernel code {requested} is not 0 to {KERNEL_STEM}"
        )
    if requested != KERNEL_AUTO:
        var refusal = can_implement(requested, problem, source)
        if refusal:
            raise Error(
                t"config: {kernel_name(requested)} cannot take this"
                t" convolution: {refusal.value()}"
            )
        return requested
    # A refusal costs more to write than a small convolution to compute: only
    # what may well be taken is asked.
    if problem.is_depthwise() and not can_implement(
        KERNEL_DEPTHWISE, problem, source
    ):
        return KERNEL_DEPTHWISE
    if problem.panel_groups() > 1 and not can_implement(
        KERNEL_GROUPED, problem, source
    ):
        return KERNEL_GROUPED
    if _prefers_few_filters(problem) and not can_implement(
        KERNEL_FEW_FILTERS, problem, source
    ):
        return KERNEL_FEW_FILTERS
    if problem.is_pointwise() and not can_implement(
        KERNEL_POINTWISE, problem, source
    ):
        return KERNEL_POINTWISE
    var refusal = can_implement(KERNEL_IMPLICIT_GEMM, problem, source)
    if refusal:
        raise Error(t"no kernel takes this convolution: {refusal.value()}")
    return KERNEL_IMPLICIT_GEMM


def explain_choice(
    kernel: Int, requested: Int, problem: ConvProblem, source: Int
) -> String:
    """Why `choose_kernel` chose a kernel, for people.

    Args:
        kernel: What it returned.
        requested: What it was asked for.
        problem: The convolution.
        source: A `SOURCE_*` code.

    Returns:
        A sentence without its full stop.
    """
    if requested != KERNEL_AUTO:
        return "asked for by config="
    if kernel == KERNEL_DEPTHWISE:
        return String(
            t"one channel and one filter a group: lanes are channels,"
            t" {LANES} at a time"
        )
    if kernel == KERNEL_GROUPED:
        return String(
            t"groups of {problem.group_channels()} channels: too narrow to"
            t" gather, so read where they lie"
        )
    if kernel == KERNEL_FEW_FILTERS:
        return String(
            t"{problem.filters} filters leave most of a panel empty: lanes are"
            t" channels, {LANES} at a time"
        )
    var cut = choose_blocking(problem, parallelism_level(), source)
    var tile = String(
        t"register tile {CPU_TILE.rows} pixels x {CPU_TILE.columns()} filters;"
        t" {cut}; {parallelism_level()} threads"
    )
    if kernel == KERNEL_POINTWISE:
        return String(
            t"one tap, stride 1, no padding: activations are read where"
            t" they lie; {tile}"
        )
    return tile


def convolve[
    filter_type: DType
](
    output: ManagedTensorSlice[mut=True, ...],
    x: ManagedTensorSlice,
    filter: Reads[filter_type],
    epilogue: Epilogue,
    problem: ConvProblem,
    geometry: Geometry,
    ctx: CpuContext,
) raises:
    """Runs a validated problem, packing its filter first if it is not packed.

    Parameters:
        filter_type: The filter's type.

    Args:
        output: The op's output.
        x: The activation.
        filter: The filter, in the layout that `geometry` names.
        epilogue: The epilogue.
        problem: The convolution.
        geometry: The decoded geometry operand.
        ctx: The CPU.

    Raises:
        If the requested kernel cannot take the problem.
    """
    comptime source = SOURCE_FUSED if x._has_input_fusion else (
        SOURCE_FLOAT32 if x.dtype == DType.float32 else SOURCE_CONVERTED
    )
    var kernel = choose_kernel(geometry[GEOMETRY_KERNEL], problem, source)
    if problem.gemm_m() == 0 or problem.filters == 0:
        return
    var layout = geometry[GEOMETRY_FILTER_LAYOUT]
    if layout == LAYOUT_PACKED:
        launch(kernel, output, x, filter, epilogue, problem, source, ctx)
        return
    var packed = HostBuffer[filter_type](problem.packed_length())
    pack_filter(problem, layout, filter, packed.elements)
    launch(
        kernel,
        output,
        x,
        packed.elements.as_imm(),
        epilogue,
        problem,
        source,
        ctx,
    )
    _ = packed^
