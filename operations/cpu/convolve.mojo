"""A convolution on the CPU: the filter's layout, the plan that is kept, the
launch."""

from max.gpu.host import DeviceContext
from std.collections import Optional
from std.sys.info import size_of

from ..conv.fields import (
    GEOMETRY_FILTER_LAYOUT,
    GEOMETRY_KERNEL,
    GEOMETRY_PRECISION,
    LAYOUT_PACKED,
    PRECISION_FLOAT32,
)
from ..conv.known import UNKNOWN_FILTER, KnownProblem
from ..conv.memory import HostBuffer
from ..conv.operands import Arguments, Device
from ..conv.plans import Planned
from ..conv.problem import ConvProblem, Geometry
from ..conv.target import Target
from .packing import pack_filter
from .pages import ask_for_large_pages
from .pool import CpuContext, MaxPool, Pool
from .registry import CPU_REGISTRY, CpuRegistry


def convolve[
    P: Pool,
    //,
    kernels: Int,
    scaled: Bool,
](
    mut pool: P,
    problem: ConvProblem,
    arguments: Arguments,
    *,
    layout: Int,
    requested: Int,
    exact: Bool = True,
    named: Optional[Planned] = None,
) raises:
    """Runs a convolution, packing its filter first if it is not packed.

    Parameters:
        P: The pool's type.
        kernels: Which kernels to compile, a bit each.
        scaled: Whether each filter has a scale.

    Args:
        pool: The threads that run it.
        problem: The convolution, valid.
        arguments: Its operands.
        layout: The filter's `LAYOUT_*` code.
        requested: A `KERNEL_*` code; `KERNEL_AUTO` leaves the choice here.
        exact: Whether products are asked to be exact.
        named: How to run it, if somebody says so; then nothing is planned.

    Raises:
        If the requested kernel, or every one, cannot take the problem: why.
    """
    comptime Call = type_of(arguments)
    comptime types = Call.types(scaled)
    var planned = named.value() if named else CpuRegistry[P].find_plan[
        types, kernels
    ](
        requested,
        problem,
        arguments.operands(exact=exact),
        Device(0, pool.threads()),
    )
    if not problem.has_outputs():
        return
    ask_for_large_pages(
        arguments.output.addresses(),
        problem.gemm_m() * problem.filters * size_of[Call.Output.dtype](),
    )
    var memory = Optional[HostBuffer[Call.Source.dtype]]()
    var packed = arguments
    if layout != LAYOUT_PACKED:
        memory = HostBuffer[Call.Source.dtype](
            problem.packed_length(Call.Source.dtype)
        )
        var elements = memory.value().elements
        pack_filter(pool, problem, layout, arguments.filter, elements)
        packed.filter = elements.as_imm()
    CpuRegistry[P].launch[
        capability=0, kernels=kernels, known=UNKNOWN_FILTER, scaled=scaled
    ](planned, problem, packed, pool)
    _ = memory^


struct Cpu(Target):
    """The CPU that MAX runs on, with the threads of its runtime."""

    @staticmethod
    def convolve[
        known: KnownProblem, scaled: Bool
    ](
        problem: ConvProblem,
        arguments: Arguments,
        geometry: Geometry,
        ctx: DeviceContext,
    ) raises:
        comptime types = type_of(arguments).types(scaled)
        var pool = MaxPool(rebind[CpuContext](ctx))
        convolve[CPU_REGISTRY.needed(types, 0, known), scaled](
            pool,
            problem,
            arguments,
            layout=geometry[GEOMETRY_FILTER_LAYOUT],
            requested=geometry[GEOMETRY_KERNEL],
            exact=geometry[GEOMETRY_PRECISION] == PRECISION_FLOAT32,
        )
