"""The library for this machine's CPU. It runs on threads of its caller's.

A call is prepared once: its geometry is decoded and checked. Then it runs any
number of times. A function that fails returns the address of the sentence that
says why, which the caller frees; others return 0.
"""

from std.collections import Optional
from std.memory.alloc import unsafe_alloc

from library.call import (
    FEATURES,
    OUTPUT_TYPE,
    SCALED,
    TYPE,
    Call,
    CallArguments,
    free_sentence,
    reads,
    sentence,
    text_of,
    write,
)
from operations.conv.fields import (
    GEOMETRY_FILTER_LAYOUT,
    GEOMETRY_KERNEL,
    KERNEL_AUTO,
)
from operations.conv.known import UNKNOWN_FEATURES, KnownProblem
from operations.conv.memory import Writes
from operations.conv.operands import Device
from operations.conv.plans import Planned
from operations.conv.quantization import Quantization
from operations.conv.kernel import kernel_name
from operations.conv.registry import ALL_KERNELS
from operations.cpu.convolve import convolve
from operations.cpu.direct.mean import Means, compute_means
from operations.cpu.openmp import OpenMpPool, Parallel
from operations.cpu.registry import CpuRegistry
from operations.cpu.transpose import Matrices, transpose


struct HostCall(Movable):
    """A call without its pointers, and how it is run."""

    var call: Call
    var named: Optional[Planned]
    """What a tuner has named; otherwise the kernels choose."""
    var threads: Int
    """For which it has."""

    def __init__(out self, var call: Call):
        """One that is run as the kernels choose.

        Args:
            call: The call.
        """
        self.call = call^
        self.named = None
        self.threads = 0


comptime TYPES = CallArguments.types(SCALED)

comptime KERNELS = CpuRegistry[OpenMpPool].needed(
    TYPES, 0, _known()
) if FEATURES != UNKNOWN_FEATURES else ALL_KERNELS
"""What is compiled, a bit each."""


def _known() -> KnownProblem:
    """What is known of a call: dispatch chooses, and the CPU."""
    var known = KnownProblem.nothing()
    known.kernel = KERNEL_AUTO
    known.features = FEATURES
    return known


comptime Handle = Pointer[HostCall, MutUntrackedOrigin]


@export
def maxconv_prepare(
    shapes: Int64, filter: Int64, geometry: Int64, scalars: Int64, made: Int64
) abi("C") -> Int64:
    """Prepares a call.

    Args:
        shapes: As `Call` takes them, like the next three.
        filter: Elements of the filter.
        geometry: The address of the geometry operand.
        scalars: The address of the scalars operand.
        made: The address of where to write the call's handle.
    """
    try:
        var call = Call(shapes, filter, geometry, scalars)
        var handle = unsafe_alloc[HostCall](1)
        handle.unsafe_write(HostCall(call^))
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
def maxconv_run(
    handle: Int64,
    x: Int64,
    filter: Int64,
    bias: Int64,
    residual: Int64,
    scale: Int64,
    output: Int64,
    threads: Int64,
    parallel: Parallel,
) abi("C") -> Int64:
    """Convolves.

    Args:
        handle: What `maxconv_prepare` made.
        x: The address of an operand, as `Call.arguments` takes it.
        filter: The same.
        bias: The same.
        residual: The same.
        scale: The same.
        output: The same.
        threads: How many threads may run.
        parallel: See `Parallel`; not called for a single thread.
    """
    try:
        ref prepared = Handle(unsafe_from_address=Int(handle))[]
        ref call = prepared.call
        if prepared.named and Int(threads) != prepared.threads:
            raise Error(
                t"threads: {threads} are not the {prepared.threads} of the"
                t" configuration"
            )
        var pool = OpenMpPool(parallel, Int(threads))
        convolve[KERNELS, SCALED](
            pool,
            call.problem,
            call.arguments(x, filter, bias, residual, scale, output),
            layout=call.geometry[GEOMETRY_FILTER_LAYOUT],
            requested=call.geometry[GEOMETRY_KERNEL],
            exact=call.exact(),
            named=prepared.named,
        )
        return 0
    except error:
        return sentence(error)


@export
def maxconv_name(
    handle: Int64, numbers: Int64, count: Int64, threads: Int64
) abi("C") -> Int64:
    """Has later runs of a call cut the problem as a tuner says, instead of as
    the kernel, which the call must ask for, chooses.

    Args:
        handle: What `maxconv_prepare` made.
        numbers: The address of int64, the numbers of the kernel's cut.
        count: How many there are.
        threads: How many threads may run.
    """
    try:
        ref prepared = Handle(unsafe_from_address=Int(handle))[]
        ref call = prepared.call
        var cut = List[Int]()
        for i in range(Int(count)):
            cut.append(Int(reads[DType.int64](numbers)[unsafe_offset=i]))
        prepared.named = None
        prepared.named = CpuRegistry[OpenMpPool].named[TYPES, KERNELS](
            call.geometry[GEOMETRY_KERNEL],
            call.problem,
            call.operands(aligned=True),
            Device(0, Int(threads)),
            cut,
        )
        prepared.threads = Int(threads)
        return 0
    except error:
        return sentence(error)


@export
def maxconv_explain(
    handle: Int64, threads: Int64, made: Int64
) abi("C") -> Int64:
    """Says which kernel runs a call, and why, without running it.

    Args:
        handle: What `maxconv_prepare` made.
        threads: How many threads may run.
        made: The address of where to write the address of a text: the kernel's
            name, a colon, the reason.
    """
    try:
        ref call = Handle(unsafe_from_address=Int(handle))[].call
        var operands = call.operands(aligned=True)
        var requested = call.geometry[GEOMETRY_KERNEL]
        var device = Device(0, Int(threads))
        var planned = CpuRegistry[OpenMpPool].plan[TYPES, KERNELS](
            requested, call.problem, operands, device
        )
        var reason = CpuRegistry[OpenMpPool].explain[TYPES, KERNELS](
            planned, requested, call.problem, operands, device
        )
        write(made, text_of(String(t"{kernel_name(planned.kernel)}: {reason}")))
        return 0
    except error:
        return sentence(error)


@export
def maxconv_mean(
    images: Int64,
    pixels: Int64,
    channels: Int64,
    scalars: Int64,
    rounds: Int64,
    input: Int64,
    output: Int64,
    threads: Int64,
    parallel: Parallel,
) abi("C") -> Int64:
    """Computes the mean over each image's pixels. A mean of one pixel makes
    integers of floats.

    Args:
        images: How many.
        pixels: Of an image.
        channels: Of a pixel.
        scalars: The address of four float32: what a sum is multiplied with,
            what is then added, and, of integers that come out, their steps in 1
            and their zero point.
        rounds: Whether the input is float32, not of the library's type;
            integers come out.
        input: The address of `[images, pixels, channels]`.
        output: The address of `[images, channels]`.
        threads: How many threads may run.
        parallel: See `Parallel`; not called for a single thread.
    """
    try:
        var pool = OpenMpPool(parallel, Int(threads))
        comptime if OUTPUT_TYPE.is_integral():
            if rounds != 0:
                compute_means(
                    _means[DType.float32](
                        images, pixels, channels, scalars, input, output
                    ),
                    pool,
                )
                return 0
        if rounds != 0:
            raise Error(
                t"rounds: {rounds} is not allowed in a library whose outputs"
                t" are {OUTPUT_TYPE}; 0 is"
            )
        compute_means(
            _means[TYPE](images, pixels, channels, scalars, input, output), pool
        )
        return 0
    except error:
        return sentence(error)


def _means[
    dtype: DType
](
    images: Int64,
    pixels: Int64,
    channels: Int64,
    scalars: Int64,
    input: Int64,
    output: Int64,
) -> Means[dtype, OUTPUT_TYPE]:
    """The means of `maxconv_mean`, of elements of a type."""
    var numbers = reads[DType.float32](scalars)
    return Means(
        reads[dtype](input),
        Writes[OUTPUT_TYPE](unsafe_from_address=Int(output)),
        Int(images),
        Int(pixels),
        Int(channels),
        numbers[unsafe_offset=0],
        numbers[unsafe_offset=1],
        Quantization(0, numbers[unsafe_offset=3], numbers[unsafe_offset=2]),
    )


@export
def maxconv_transpose(
    source: Int64,
    target: Int64,
    batch: Int64,
    rows: Int64,
    columns: Int64,
    bytes: Int64,
    threads: Int64,
    parallel: Parallel,
) abi("C") -> Int64:
    """Transposes matrices `[rows, columns]`.

    Args:
        source: The address of the first.
        target: The address of the first that is transposed.
        batch: How many there are.
        rows: Of a matrix.
        columns: Of a matrix.
        bytes: Of an element: 2 or 4.
        threads: How many threads may run.
        parallel: See `Parallel`; not called for a single thread.
    """
    try:
        var pool = OpenMpPool(parallel, Int(threads))
        if bytes == 4:
            _transpose[DType.uint32](pool, source, target, batch, rows, columns)
        elif bytes == 2:
            _transpose[DType.uint16](pool, source, target, batch, rows, columns)
        else:
            raise Error(t"bytes: {bytes} an element; 2 or 4 are allowed")
        return 0
    except error:
        return sentence(error)


def _transpose[
    dtype: DType
](
    mut pool: OpenMpPool,
    source: Int64,
    target: Int64,
    batch: Int64,
    rows: Int64,
    columns: Int64,
) raises:
    """`maxconv_transpose` for elements of a size."""
    transpose(
        pool,
        Matrices[dtype](
            reads[dtype](source),
            Writes[dtype](unsafe_from_address=Int(target)),
            Int(batch),
            Int(rows),
            Int(columns),
        ),
    )
