"""What the libraries of all targets share: the types that they are built for, a
call without its pointers, and how an error crosses to C.

A library is built for a family of types:

    mojo build -I . --emit shared-lib library/host.mojo \\
        -D dtype=float32 -D bias=float32 -D output=float32 -D scaled=False \\
        -D depth_to_space=False

With `-D features=N` a CPU's has the kernels alone that dispatch chooses from where the
CPU has the instructions N.
"""

from std.collections import Optional
from std.ffi import external_call
from std.sys.defines import (
    get_defined_dtype,
    get_defined_int,
    get_defined_string,
)

from operations.conv.access import (
    MemoryActivation,
    MemoryOutput,
    OutputTarget,
)
from operations.conv.depth_to_space import (
    DepthToSpace,
    DepthToSpaceOutput,
    validate_single_pixels,
)
from operations.conv.epilogue import Epilogue
from operations.conv.fields import (
    COPY_BYTES,
    GEOMETRY_FILTER_LAYOUT,
    GEOMETRY_LENGTH,
    GEOMETRY_PRECISION,
    GEOMETRY_RESIDUAL_ZERO_POINT,
    PRECISION_FLOAT32,
    SCALARS_LENGTH,
)
from operations.conv.known import UNKNOWN_FEATURES
from operations.conv.memory import Reads, Writes
from operations.conv.operands import Arguments, Operands
from operations.conv.problem import RANK, ConvProblem, Geometry
from operations.conv.quantization import Quantization
from std.utils import IndexList

comptime TYPE = get_defined_dtype["dtype", DType.float32]()
"""Of activation and filter."""
comptime BIAS_TYPE = get_defined_dtype["bias", DType.float32]()
comptime OUTPUT_TYPE = get_defined_dtype["output", DType.float32]()
"""Of residual and output."""
comptime SCALED = get_defined_string["scaled"]() == "True"
"""Whether each filter has a scale."""
comptime DEPTH_TO_SPACE = get_defined_string["depth_to_space"]() == "True"
"""Whether filters are pixels of a larger image, which the output then is."""

comptime FEATURES = get_defined_int["features", UNKNOWN_FEATURES]()
"""Instructions that the CPU has, as `KnownProblem` has them."""

comptime Image = MemoryOutput[OUTPUT_TYPE]

comptime Output: OutputTarget = DepthToSpaceOutput[
    Image
] if DEPTH_TO_SPACE else Image
"""The output of a call."""

comptime CallArguments = Arguments[
    MemoryActivation[TYPE], Output, BIAS_TYPE, OUTPUT_TYPE
]
"""The operands of a call."""


def reads[type: DType](address: Int64) -> Reads[type]:
    """Memory of a caller's that is only read.

    Parameters:
        type: Of the elements.

    Args:
        address: Of the first.
    """
    return Reads[type](unsafe_from_address=Int(address))


def write(address: Int64, value: Int64):
    """Hands a number to a caller.

    Args:
        address: Where the caller wants it.
        value: The number.
    """
    Writes[DType.int64](unsafe_from_address=Int(address))[
        unsafe_offset=0
    ] = value


def sentence(error: Error) -> Int64:
    """The address of an error's text, see `text_of`.

    Args:
        error: The error.
    """
    return text_of(String(error))


def text_of(message: String) -> Int64:
    """The address of a text, which ends with a zero. `free_sentence` takes it
    back.

    Args:
        message: The text.
    """
    var bytes = message.as_bytes()
    var text = external_call["malloc", Writes[DType.uint8]](len(bytes) + 1)
    for i in range(len(bytes)):
        text[unsafe_offset=i] = bytes[i]
    text[unsafe_offset=len(bytes)] = 0
    return Int64(Int(text))


def free_sentence(text: Int64):
    """Frees what `sentence` returned.

    Args:
        text: The address.
    """
    _ = external_call["free", NoneType](
        Writes[DType.uint8](unsafe_from_address=Int(text))
    )


struct Call(Movable):
    """A call without its pointers."""

    var problem: ConvProblem
    var geometry: Geometry
    var scalars: Array[Float32, SCALARS_LENGTH]
    var arrangement: DepthToSpace
    """Read where filters are pixels of a larger image."""

    def __init__(
        out self,
        shapes: Int64,
        filter: Int64,
        geometry: Int64,
        scalars: Int64,
    ) raises:
        """Decodes and checks a call.

        Args:
            shapes: The address of ten int64: `[N, D, H, W, C]` of the
                activation and of the output.
            filter: Elements of the filter.
            geometry: The address of the geometry operand; see fields.mojo.
            scalars: The address of the scalars operand; see fields.mojo.

        Raises:
            Naming the argument, its value and what is allowed.
        """
        self.geometry = Geometry(reads[DType.int64](geometry), GEOMETRY_LENGTH)
        var sizes = reads[DType.int64](shapes)
        self.problem = ConvProblem(
            self.geometry, sizes, sizes.unsafe_offset(RANK)
        )
        comptime if not DEPTH_TO_SPACE:
            validate_single_pixels(self.geometry)
        self.scalars = Array[Float32, SCALARS_LENGTH](fill=0)
        for i in range(SCALARS_LENGTH):
            self.scalars[i] = reads[DType.float32](scalars)[unsafe_offset=i]
        self.problem.validate(
            self.geometry[GEOMETRY_FILTER_LAYOUT], Int(filter), TYPE
        )
        var out_shape = IndexList[RANK](fill=0)
        for i in range(RANK):
            out_shape[i] = Int(sizes[unsafe_offset=RANK + i])
        self.arrangement = DepthToSpace(self.geometry, self.problem, out_shape)
        self.quantization().validate[TYPE, OUTPUT_TYPE](
            Float32(self.geometry[GEOMETRY_RESIDUAL_ZERO_POINT])
        )

    def output(self, address: Int64) -> Output:
        """The output of a call.

        Args:
            address: Of the output.
        """
        var image = Image(Writes[OUTPUT_TYPE](unsafe_from_address=Int(address)))
        comptime if DEPTH_TO_SPACE:
            return rebind[Output](DepthToSpaceOutput(image, self.arrangement))
        else:
            return rebind[Output](image)

    def arguments(
        self,
        x: Int64,
        filter: Int64,
        bias: Int64,
        residual: Int64,
        scale: Int64,
        output: Int64,
    ) -> CallArguments:
        """The operands of a call.

        Args:
            x: The address of the activation, `[N, D, H, W, C]`.
            filter: The address of the filter.
            bias: The address of one value a filter; not read if there is none.
            residual: The address of the residual; not read if there is none.
            scale: The address of one factor a filter; not read if there is
                none.
            output: The address of the output, `[N, Z, P, Q, K]`.
        """
        var factors = Optional[Reads[DType.float32]]()
        comptime if SCALED:
            factors = reads[DType.float32](scale)
        return Arguments(
            MemoryActivation[TYPE](reads[TYPE](x)),
            reads[TYPE](filter),
            Epilogue(
                self.geometry,
                reads[DType.float32](Int64(Int(Pointer(to=self.scalars)))),
                reads[BIAS_TYPE](bias),
                reads[OUTPUT_TYPE](residual),
                factors,
            ),
            self.output(output),
            self.quantization(),
        )

    def quantization(self) -> Quantization:
        """Zero points, and the rounding to 8 bits."""
        return Quantization(
            self.geometry,
            reads[DType.float32](Int64(Int(Pointer(to=self.scalars)))),
        )

    def exact(self) -> Bool:
        """Whether products are asked to be exact."""
        return self.geometry[GEOMETRY_PRECISION] == PRECISION_FLOAT32

    def operands(self, *, aligned: Bool) -> Operands:
        """What a plan may know of the operands.

        Args:
            aligned: Whether all addresses are multiples of `COPY_BYTES`.
        """
        # A pointer is never null.
        comptime anywhere = Int64(COPY_BYTES)
        var operands = self.arguments(
            anywhere, anywhere, anywhere, anywhere, anywhere, anywhere
        ).operands(exact=self.exact())
        operands.alignment = COPY_BYTES if aligned else 1
        return operands
