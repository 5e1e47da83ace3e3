"""The library for this machine's CPU: the C functions that take PyTorch's
tensors to the kernels, without a graph.

    mojo build -I . --emit shared-lib library/host.mojo \\
        -D dtype=float32 -D bias=float32 -D output=float32 -D scaled=False

A call is prepared once: its geometry is decoded and checked. Then it runs any
number of times, on threads of its caller's. A function that fails returns the
address of the sentence that says why, which the caller frees; others return 0.
"""

from std.collections import Optional
from std.ffi import external_call
from std.memory.alloc import unsafe_alloc
from std.sys.defines import get_defined_dtype, get_defined_string
from std.utils import IndexList

from operations.conv.access import MemoryActivation, MemoryOutput
from operations.conv.epilogue import Epilogue
from operations.conv.fields import (
    GEOMETRY_FILTER_LAYOUT,
    GEOMETRY_KERNEL,
    GEOMETRY_LENGTH,
    SCALARS_LENGTH,
)
from operations.conv.memory import Reads, Writes
from operations.conv.operands import Arguments
from operations.conv.problem import SPATIAL, ConvProblem, Geometry
from operations.conv.registry import ALL_KERNELS
from operations.cpu.convolve import convolve
from operations.cpu.openmp import OpenMpPool, Parallel

comptime TYPE = get_defined_dtype["dtype", DType.float32]()
"""Of activation and filter."""
comptime BIAS_TYPE = get_defined_dtype["bias", DType.float32]()
comptime OUTPUT_TYPE = get_defined_dtype["output", DType.float32]()
"""Of residual and output."""
comptime SCALED = get_defined_string["scaled"]() == "True"
"""Whether each filter has a scale."""

comptime RANK = SPATIAL + 2
"""Of the shapes that a caller passes."""


@fieldwise_init
struct Prepared(Movable):
    """A call without its pointers."""

    var problem: ConvProblem
    var geometry: Geometry
    var scalars: Array[Float32, SCALARS_LENGTH]


comptime Handle = Pointer[Prepared, MutUntrackedOrigin]


def _reads[type: DType](address: Int64) -> Reads[type]:
    return Reads[type](unsafe_from_address=Int(address))


def _sentence(error: Error) -> Int64:
    """The address of an error's text, which ends with a zero."""
    var message = String(error)
    var bytes = message.as_bytes()
    var text = external_call["malloc", Writes[DType.uint8]](len(bytes) + 1)
    for i in range(len(bytes)):
        text[unsafe_offset=i] = bytes[i]
    text[unsafe_offset=len(bytes)] = 0
    return Int64(Int(text))


def _prepare(
    shapes: Int64, filter: Int64, geometry: Int64, scalars: Int64
) raises -> Prepared:
    """Decodes and checks a call."""
    var decoded = Geometry(_reads[DType.int64](geometry), GEOMETRY_LENGTH)
    var input = IndexList[RANK](fill=0)
    var output = IndexList[RANK](fill=0)
    for i in range(RANK):
        input[i] = Int(_reads[DType.int64](shapes)[unsafe_offset=i])
        output[i] = Int(_reads[DType.int64](shapes)[unsafe_offset=RANK + i])
    var problem = ConvProblem(decoded, input, output)
    problem.validate(decoded[GEOMETRY_FILTER_LAYOUT], Int(filter))
    var values = Array[Float32, SCALARS_LENGTH](fill=0)
    for i in range(SCALARS_LENGTH):
        values[i] = _reads[DType.float32](scalars)[unsafe_offset=i]
    return Prepared(problem, decoded, values^)


def _run(
    prepared: Prepared,
    x: Int64,
    filter: Int64,
    bias: Int64,
    residual: Int64,
    scale: Int64,
    output: Int64,
    mut pool: OpenMpPool,
) raises:
    """Convolves."""
    var factors = Optional[Reads[DType.float32]]()
    comptime if SCALED:
        factors = _reads[DType.float32](scale)
    convolve[ALL_KERNELS, SCALED](
        pool,
        prepared.problem,
        Arguments(
            MemoryActivation[TYPE](_reads[TYPE](x)),
            _reads[TYPE](filter),
            Epilogue(
                prepared.geometry,
                _reads[DType.float32](Int64(Int(Pointer(to=prepared.scalars)))),
                _reads[BIAS_TYPE](bias),
                _reads[OUTPUT_TYPE](residual),
                factors,
            ),
            MemoryOutput[OUTPUT_TYPE](
                Writes[OUTPUT_TYPE](unsafe_from_address=Int(output))
            ),
        ),
        layout=prepared.geometry[GEOMETRY_FILTER_LAYOUT],
        requested=prepared.geometry[GEOMETRY_KERNEL],
    )


@export
def maxconv_prepare(
    shapes: Int64, filter: Int64, geometry: Int64, scalars: Int64, made: Int64
) abi("C") -> Int64:
    """Prepares a call.

    Args:
        shapes: The address of ten int64: `[N, D, H, W, C]` of the activation
            and of the output.
        filter: Elements of the filter.
        geometry: The address of the geometry operand; see fields.mojo.
        scalars: The address of the scalars operand; see fields.mojo.
        made: The address of where to write the call's handle.
    """
    try:
        var prepared = _prepare(shapes, filter, geometry, scalars)
        var handle = unsafe_alloc[Prepared](1)
        handle.unsafe_write(prepared^)
        Writes[DType.int64](unsafe_from_address=Int(made))[
            unsafe_offset=0
        ] = Int64(Int(handle))
        return 0
    except error:
        return _sentence(error)


@export
def maxconv_release(handle: Int64) abi("C"):
    """Frees what `maxconv_prepare` made."""
    Handle(unsafe_from_address=Int(handle)).unsafe_free()


@export
def maxconv_free(text: Int64) abi("C"):
    """Frees a sentence."""
    _ = external_call["free", NoneType](
        Writes[DType.uint8](unsafe_from_address=Int(text))
    )


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
        x: The address of the activation, `[N, D, H, W, C]`.
        filter: The address of the filter.
        bias: The address of one value a filter; not read if there is none.
        residual: The address of the residual; not read if there is none.
        scale: The address of one factor a filter; not read if there is none.
        output: The address of the output, `[N, Z, P, Q, K]`.
        threads: How many threads may run.
        parallel: See `Parallel`; not called for a single thread.
    """
    try:
        ref prepared = Handle(unsafe_from_address=Int(handle))[]
        var pool = OpenMpPool(parallel, Int(threads))
        _run(prepared, x, filter, bias, residual, scale, output, pool)
        return 0
    except error:
        return _sentence(error)
