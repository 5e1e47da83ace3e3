"""A convolution on a GPU: the filter's layout, the plan that is kept, the
launch."""

from max.gpu.host import DeviceContext

from ..conv.fields import (
    COPY_BYTES,
    GEOMETRY_FILTER_LAYOUT,
    GEOMETRY_KERNEL,
    GEOMETRY_PRECISION,
    KERNEL_DEPTHWISE,
    KERNEL_DIAGONAL,
    KERNEL_FEW_FILTERS,
    KERNEL_SM90,
    KERNEL_SM100,
    KERNEL_UNALIGNED,
    KERNEL_WINDOW,
    LAYOUT_KRSC,
    PRECISION_FLOAT32,
)
from ..conv.known import (
    NARROW_FILTERS,
    UNKNOWN,
    UNKNOWN_FILTER,
    KnownFilter,
    KnownProblem,
)
from ..conv.memory import Reads, element_bytes
from ..conv.operands import Arguments, OperandTypes
from ..conv.problem import ConvProblem, Geometry
from ..conv.registry import has_kernel
from ..conv.target import Target
from .device import device_of, target_capability
from .legality import check_type
from .packing import pack_filter
from .patches import merged_patches
from .registry import GPU_REGISTRY
from .stream import Stream
from .summed_output import SUM_TYPE, kernel_types, takes_sums, with_sums
from .zero_point import (
    ZeroPointTable,
    fill_zero_point_table,
    zero_point_elements,
)


comptime _FEWEST_FILTERS = 8
"""Of a tile. The next ones have twice as many each."""


def convolve[
    kernels: Int,
    known: KnownFilter,
    scaled: Bool,
](
    mut stream: Stream,
    problem: ConvProblem,
    arguments: Arguments,
    *,
    requested: Int,
    exact: Bool,
) raises:
    """Enqueues a convolution.

    Parameters:
        kernels: Which kernels to compile, a bit each.
        known: What is known of the filter: which configurations to compile.
        scaled: Whether each filter has a scale.

    Args:
        stream: Where to run; nothing is waited for.
        problem: The convolution, valid.
        arguments: Its operands in device memory, the filter in the kernels'
            layout.
        requested: A `KERNEL_*` code.
        exact: Whether products of float32 must not be rounded to tf32.

    Raises:
        If the requested kernel, or every one, cannot take the problem: why;
        what the driver refused.
    """
    comptime types = type_of(arguments).types(scaled)
    var device = device_of(stream.ctx)
    check_type(types, device.capability)
    comptime if types.output != SUM_TYPE:
        arguments.quantization.refuse_zero_point()
    var merged = merged_patches(problem, types, requested)
    var planned = GPU_REGISTRY.find_plan[types, kernels](
        requested, merged, arguments.operands(exact=exact), device
    )
    if not problem.has_outputs():
        return
    GPU_REGISTRY.launch[
        capability=target_capability(),
        kernels=kernels,
        known=known,
        scaled=scaled,
    ](planned, merged, arguments, stream)


def convolve_any_layout[
    kernels: Int, known: KnownFilter, scaled: Bool, centered: Bool
](
    ctx: DeviceContext,
    problem: ConvProblem,
    arguments: Arguments,
    *,
    layout: Int,
    requested: Int,
    exact: Bool,
) raises:
    """Enqueues a convolution, and before it the transposition of a filter that
    is not in the kernels' layout.

    Parameters:
        kernels: Which kernels to compile, a bit each.
        known: What is known of the filter.
        scaled: Whether each filter has a scale.
        centered: Whether the activation has a zero point.

    Args:
        ctx: The device, in whose own queue to run; nothing is waited for.
        problem: The convolution, valid.
        arguments: Its operands in device memory.
        layout: The filter's `LAYOUT_*` code.
        requested: A `KERNEL_*` code.
        exact: Whether products of float32 must not be rounded to tf32.

    Raises:
        If the requested kernel, or every one, cannot take the problem, or the
        filter is packed for a CPU: why; what the driver refused.
    """
    comptime Call = type_of(arguments)
    comptime run = _convolve_integers[kernels, known, scaled, centered]
    var stream = Stream(ctx)
    comptime if Call.Source.interleaved > 0:
        # No other layout of a filter goes with it: `ConvProblem.validate`.
        run(stream, problem, arguments, requested=requested, exact=exact)
    else:
        if layout == LAYOUT_KRSC:
            run(stream, problem, arguments, requested=requested, exact=exact)
            return
        var elements = problem.filters * problem.gemm_k()
        var packed = ctx.enqueue_create_buffer[Call.Source.dtype](
            max(1, elements)
        )
        var data = (
            packed.unsafe_ptr()
            .unsafe_mut_cast[True]()
            .unsafe_origin_cast[MutUntrackedOrigin]()
        )
        if elements > 0:
            pack_filter(ctx, problem, layout, arguments.filter, data)
        var unpacked = arguments
        unpacked.filter = data.as_imm()
        run(stream, problem, unpacked, requested=requested, exact=exact)
        # Freed in the stream's order, after the kernel.
        _ = packed^


def _convolve_integers[
    kernels: Int, known: KnownFilter, scaled: Bool, centered: Bool
](
    mut stream: Stream,
    problem: ConvProblem,
    arguments: Arguments,
    *,
    requested: Int,
    exact: Bool,
) raises:
    """`convolve`, which of integers gets the sums where kernels do not compute
    what is made of them, and what a zero point takes from them."""
    comptime Call = type_of(arguments)
    comptime if not takes_sums(Call.types(scaled), centered):
        convolve[kernels, known, scaled](
            stream, problem, arguments, requested=requested, exact=exact
        )
    else:
        comptime run = convolve[kernels, known, False]
        var zero_point = arguments.quantization.zero_point
        var elements = zero_point_elements(problem)
        if zero_point == 0 or elements == 0:
            run(
                stream,
                problem,
                with_sums(arguments, ZeroPointTable.nothing()),
                requested=requested,
                exact=exact,
            )
            return
        var memory = stream.ctx.enqueue_create_buffer[DType.int32](elements)
        var table = fill_zero_point_table(
            stream,
            problem,
            rebind[Reads[DType.int8]](arguments.filter_elements()),
            zero_point,
            memory.unsafe_ptr()
            .unsafe_mut_cast[True]()
            .unsafe_origin_cast[MutUntrackedOrigin](),
            interleaved=Call.Source.interleaved > 0,
        )
        run(
            stream,
            problem,
            with_sums(arguments, table),
            requested=requested,
            exact=exact,
        )
        # Freed in the stream's order, after the kernels.
        _ = memory^


struct Gpu(Target):
    """The GPU that an op is compiled for, in MAX's queue."""

    @staticmethod
    def convolve[
        known: KnownProblem, scaled: Bool
    ](
        problem: ConvProblem,
        arguments: Arguments,
        geometry: Geometry,
        ctx: DeviceContext,
    ) raises:
        comptime types = kernel_types(
            type_of(arguments).types(scaled), known.centered
        )
        comptime kernels = GPU_REGISTRY.needed(
            types, target_capability(), known
        )
        comptime filter = _known_filter(kernels, known, types)
        convolve_any_layout[kernels, filter, scaled, known.centered](
            ctx,
            problem,
            arguments,
            layout=geometry[GEOMETRY_FILTER_LAYOUT],
            requested=geometry[GEOMETRY_KERNEL],
            exact=geometry[GEOMETRY_PRECISION] == PRECISION_FLOAT32,
        )


def _known_filter(
    kernels: Int, known: KnownProblem, types: OperandTypes
) -> KnownFilter:
    """What the kernels of an op look at of what is known: ops that are alike
    in that share what is compiled."""
    var filter = materialize[UNKNOWN_FILTER]()
    if has_kernel(kernels, KERNEL_DIAGONAL) or has_kernel(
        kernels, KERNEL_DEPTHWISE
    ):
        filter = known.filter()
    if has_kernel(kernels, KERNEL_SM90) or has_kernel(kernels, KERNEL_SM100):
        filter.narrow = UNKNOWN < known.filters <= NARROW_FILTERS
        filter.tiled = (
            known.filters > UNKNOWN
            and known.channels > UNKNOWN
            and known.groups > UNKNOWN
            # Else a kernel of tensor cores takes patches that are merged only.
            and known.channels * element_bytes(types.input) % COPY_BYTES == 0
        )
    if has_kernel(kernels, KERNEL_UNALIGNED) and known.channels > UNKNOWN:
        var bytes = known.channels * element_bytes(types.input)
        filter.has_chunks = bytes % COPY_BYTES == 0
        filter.lacks_chunks = not filter.has_chunks
    if known.filters > UNKNOWN and (
        has_kernel(kernels, KERNEL_FEW_FILTERS)
        or has_kernel(kernels, KERNEL_WINDOW)
    ):
        filter.filters = _FEWEST_FILTERS
        while filter.filters < known.filters:
            filter.filters *= 2
    return filter
