"""What a launch passes to the Blackwell kernel's epilogue, beside descriptors."""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.collections import Optional
from std.sys.info import size_of

from ...conv.access import OutputTarget
from ..epilogue.activations import DeviceActivation
from ...conv.epilogue import Epilogue
from ...conv.memory import Reads
from ...conv.problem import ConvProblem
from ..im2col.tiles import OutputShape
from ..pipeline.chunks import CHUNK_BYTES


struct EpilogueParams[Output: OutputTarget, bias_type: DType](
    DevicePassable, ImplicitlyCopyable, TrivialRegisterPassable
):
    """The epilogue's operands as the device sees them.

    Parameters:
        Output: The output, and what the graph compiler fused behind it.
        bias_type: Of the bias.
    """

    var output: Self.Output
    var shape: OutputShape
    var pixels: UInt32
    """Of the output."""
    var has_scale: Bool
    var has_bias: Bool
    var scale: Reads[DType.float32]
    """One value a filter, if `has_scale`."""
    var bias: Reads[Self.bias_type]
    """One value a filter, if `has_bias`."""
    var beta: Float32
    var activation: DeviceActivation
    var final_activation: DeviceActivation

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """The name in messages."""
        return "EpilogueParams"

    def __init__(
        out self,
        problem: ConvProblem,
        epilogue: Epilogue[Self.bias_type, Self.Output.dtype],
        output: Self.Output,
    ):
        """Brings an op's operands into the device's form.

        Args:
            problem: The convolution; `can_implement` has agreed.
            epilogue: What is fused; its operands in device memory.
            output: The output.
        """
        self.output = output
        self.shape = OutputShape(problem)
        self.pixels = UInt32(problem.gemm_m())
        self.has_scale = epilogue.has_scale
        self.has_bias = epilogue.has_bias
        self.scale = epilogue.scale
        self.bias = epilogue.bias
        self.beta = epilogue.beta
        self.activation = DeviceActivation.of(epilogue.activation)
        self.final_activation = DeviceActivation.of(epilogue.final_activation)

    @always_inline
    def before_residual[
        size: Int
    ](
        self, v: SIMD[DType.float32, size], filter: UInt32, filters: UInt32
    ) -> SIMD[DType.float32, size]:
        """Scale and bias of neighbouring filters of one pixel.

        Parameters:
            size: How many.

        Args:
            v: The sums.
            filter: The first filter.
            filters: One beyond the last filter that there is.
        """
        var result = v
        if self.has_scale:
            result *= _load_channels[
                size=size, width=Self.load_width[DType.float32]()
            ](self.scale, filter, filters)
        if self.has_bias:
            result += _load_channels[
                size=size, width=Self.load_width[Self.bias_type]()
            ](self.bias, filter, filters)
        return result

    @staticmethod
    def load_width[dtype: DType]() -> Int:
        """Values of scale or bias that are loaded at once: up to 16 bytes, and
        no more than the output's filters come in.

        Parameters:
            dtype: Of the values.
        """
        var widest = max(size_of[dtype](), size_of[Self.Output.dtype]())
        return CHUNK_BYTES // widest

    def refusal(self) -> Optional[String]:
        """Why the kernel cannot read scale or bias, or None."""
        if self.has_scale:
            var refused = _misaligned(
                "scale", self.scale, Self.load_width[DType.float32]()
            )
            if refused:
                return refused
        if self.has_bias:
            return _misaligned(
                "bias", self.bias, Self.load_width[Self.bias_type]()
            )
        return None


def _misaligned[
    dtype: DType, //
](name: StaticString, data: Reads[dtype], width: Int) -> Optional[String]:
    """Why an operand cannot be read `width` values at a time."""
    var bytes = width * size_of[dtype]()
    if Int(data) % bytes == 0:
        return None
    return String(
        t"{name}: its address {Int(data)} is no multiple of {bytes} bytes"
    )


@always_inline
def _load_channels[
    dtype: DType, //, size: Int, width: Int
](data: Reads[dtype], filter: UInt32, filters: UInt32) -> SIMD[
    DType.float32, size
]:
    """One value a filter, `width` at a time, or each by itself at the end; 0
    beyond it."""
    var result = SIMD[DType.float32, size](0)
    comptime for chunk in range(size // width):
        var first = filter + UInt32(chunk * width)
        if first + UInt32(width) <= filters:
            var values = data.unsafe_load[
                width=width, alignment=width * size_of[dtype]()
            ](Int(first))
            comptime for i in range(width):
                result[chunk * width + i] = values[i].cast[DType.float32]()
        else:
            comptime for i in range(width):
                if first + UInt32(i) < filters:
                    result[chunk * width + i] = data[
                        unsafe_offset=Int(first) + i
                    ].cast[DType.float32]()
    return result
