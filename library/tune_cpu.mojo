"""The library that runs the CPU's implicit GEMM by cuts that a tuner names. It
runs on threads of its caller's.

A call is prepared once, as in host.mojo. A function that fails returns the
address of the sentence that says why, which the caller frees; others return 0.
"""

from std.memory.alloc import unsafe_alloc

from library.call import SCALED, Call, free_sentence, reads, sentence, write
from operations.conv.known import UNKNOWN_FILTER
from operations.conv.memory import Writes
from operations.conv.operands import Device
from operations.cpu.gemm.cut import NamedCut
from operations.cpu.gemm.launch import GemmPlan, ImplicitGemm
from operations.cpu.openmp import OpenMpPool, Parallel
from operations.tuning_cpu import named_cut, write_cut

comptime Handle = Pointer[Call, MutUntrackedOrigin]


@export
def maxconv_prepare(
    shapes: Int64, filter: Int64, geometry: Int64, scalars: Int64, made: Int64
) abi("C") -> Int64:
    """Prepares a call.

    Args:
        shapes: As `Call` takes them, like the next three.
        filter: Elements of the filter, packed.
        geometry: The address of the geometry operand.
        scalars: The address of the scalars operand.
        made: The address of where to write the call's handle.
    """
    try:
        var call = Call(shapes, filter, geometry, scalars)
        var handle = unsafe_alloc[Call](1)
        handle.unsafe_write(call^)
        write(made, Int64(Int(handle)))
        return 0
    except error:
        return sentence(error)


@export
def maxconv_release(handle: Int64) abi("C"):
    """Frees what `maxconv_prepare` made."""
    Handle(unsafe_from_address=Int(handle)).unsafe_free()


@export
def maxconv_free(text: Int64) abi("C"):
    """Frees a sentence."""
    free_sentence(text)


@export
def maxconv_choice(handle: Int64, threads: Int64, values: Int64) abi("C"):
    """The cut that the kernel's own search chooses.

    Args:
        handle: What `maxconv_prepare` made.
        threads: How many threads may run.
        values: The address of where to write it, an int64 for each of
            `TunedCpuGemm.fields`.
    """
    ref call = Handle(unsafe_from_address=Int(handle))[]
    var types = call.operands(aligned=True).types
    var plan = GemmPlan(call.problem, types, Device(0, Int(threads)))
    write_cut(
        NamedCut.of(plan.blocking),
        Writes[DType.int64](unsafe_from_address=Int(values)),
    )


@export
def maxconv_run(
    handle: Int64,
    values: Int64,
    x: Int64,
    filter: Int64,
    output: Int64,
    threads: Int64,
    parallel: Parallel,
) abi("C") -> Int64:
    """Convolves, without an epilogue.

    Args:
        handle: What `maxconv_prepare` made.
        values: The address of the cut, as `maxconv_choice` writes it.
        x: The address of an operand, as `Call.arguments` takes it.
        filter: The same.
        output: The same.
        threads: How many threads may run.
        parallel: See `Parallel`; not called for a single thread.
    """
    try:
        ref call = Handle(unsafe_from_address=Int(handle))[]
        var types = call.operands(aligned=True).types
        var cut = named_cut(reads[DType.int64](values))
        var refusal = cut.shape_refusal(call.problem, types)
        if refusal:
            raise Error(t"configuration: {refusal.value()}")
        var plan = GemmPlan(
            call.problem,
            cut.blocking(call.problem, types),
            Device(0, Int(threads)),
        )
        var pool = OpenMpPool(parallel, Int(threads))
        ImplicitGemm[OpenMpPool].launch[known=UNKNOWN_FILTER, scaled=SCALED](
            plan,
            call.problem,
            call.arguments(x, filter, x, output, x, output),
            pool,
        )
        return 0
    except error:
        return sentence(error)
