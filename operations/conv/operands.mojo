"""The operands of a convolution: what a plan may know of them, and the pointers
that a launch passes on."""


from .access import ActivationSource, OutputTarget
from .epilogue import Epilogue
from .fields import ACTIVATION_NONE, COPY_BYTES
from .memory import Reads
from .quantization import Quantization, filter_dtype


struct Device(Equatable, ImplicitlyCopyable, Movable):
    """What a plan depends on of a device."""

    var capability: Int
    """A GPU's compute capability times ten; 0 for a CPU."""
    var units: Int
    """A GPU's multiprocessors; a CPU's threads."""
    var l2_bytes: Int
    """Of a GPU's L2 cache, by which devices with as many multiprocessors are
    told apart; 0 where it is not known."""

    def __init__(out self, capability: Int, units: Int, l2_bytes: Int = 0):
        """A device.

        Args:
            capability: A GPU's compute capability times ten; 0 for a CPU.
            units: A GPU's multiprocessors; a CPU's threads.
            l2_bytes: Of a GPU's L2 cache; 0 where it is not known.
        """
        self.capability = capability
        self.units = units
        self.l2_bytes = l2_bytes


@fieldwise_init
struct OperandTypes(Equatable, ImplicitlyCopyable, Movable):
    """What is known of the operands when an op is compiled."""

    var input: DType
    """Of activation and filter."""
    var output: DType
    """Of the output, before what the graph compiler fused behind the op."""
    var residual: DType
    """Of the residual."""
    var fused_input: Bool
    """Whether loads compute what the graph compiler fused in front of the
    op."""
    var fused_output: Bool
    """Whether stores compute what the graph compiler fused behind the op."""
    var scaled: Bool
    """Whether each filter has a scale."""
    var interleaved: Int
    """Channels of a block in the layouts of interleave.mojo, `ANY_BLOCK` where a
    call tells the layouts of activation and output, or 0: channels last."""

    @staticmethod
    def unfused(
        input: DType,
        output: DType,
        *,
        fused_output: Bool = False,
        interleaved: Int = 0,
    ) -> OperandTypes:
        """Types of an op without a scale and with nothing fused in front of it.

        Args:
            input: Of activation and filter.
            output: Of output and residual.
            fused_output: Whether something is fused behind it.
            interleaved: Channels of a block, `ANY_BLOCK`, or 0: channels last.
        """
        return OperandTypes(
            input, output, output, False, fused_output, False, interleaved
        )

    @staticmethod
    def of[
        Source: ActivationSource, Output: OutputTarget
    ](residual: DType, scaled: Bool) -> OperandTypes:
        """Types of an op's operands.

        Args:
            residual: Of the residual.
            scaled: Whether each filter has a scale.
        """
        return OperandTypes(
            Source.dtype,
            Output.dtype,
            residual,
            Source.fused,
            Output.computes or Output.stores,
            scaled,
            Source.interleaved if Source.interleaved
            != 0 else Output.interleaved,
        )


def alignment_of(addresses: Int) -> Int:
    """The largest power of two, up to `COPY_BYTES`, of which addresses are
    multiples.

    Args:
        addresses: One, or the bitwise or of several.
    """
    var alignment = COPY_BYTES
    while addresses % alignment != 0:
        alignment //= 2
    return alignment


@fieldwise_init
struct Operands(Equatable, ImplicitlyCopyable, Movable):
    """Everything beside the problem and the device that a plan depends on; no
    pointer."""

    var types: OperandTypes
    var alignment: Int
    """The largest power of two, up to `COPY_BYTES`, of which the addresses of
    all operands in memory are multiples."""
    var exact: Bool
    """Whether products of float32 must not be rounded to tf32."""
    var bias: Bool
    """Whether there is a bias."""
    var residual: Bool
    """Whether a residual is read: one that is multiplied with 0 is not."""
    var activation: Int
    """An `ACTIVATION_*` code."""
    var final_activation: Int
    """An `ACTIVATION_*` code."""

    @staticmethod
    def bare(types: OperandTypes, *, exact: Bool = False) -> Operands:
        """Aligned operands without an epilogue.

        Args:
            types: Of the operands.
            exact: Whether products of float32 must not be rounded to tf32.
        """
        return Operands(
            types,
            alignment=COPY_BYTES,
            exact=exact,
            bias=False,
            residual=False,
            activation=ACTIVATION_NONE,
            final_activation=ACTIVATION_NONE,
        )

    def aligned(self) -> Bool:
        """Whether all addresses are multiples of `COPY_BYTES`."""
        return self.alignment == COPY_BYTES

    def visits(self) -> Bool:
        """Whether the op's own epilogue changes sums."""
        return (
            self.types.scaled
            or self.bias
            or self.residual
            or self.activation != ACTIVATION_NONE
            or self.final_activation != ACTIVATION_NONE
        )


struct Arguments[
    Source: ActivationSource,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
](ImplicitlyCopyable, Movable):
    """The operands of one call.

    Parameters:
        Source: How the activation is reached: in memory, or computed.
        Output: How the output is reached: in memory, or through what is fused.
        bias_type: Of the bias.
        residual_type: Of the residual.
    """

    var activation: Self.Source
    """`[N, D, H, W, C]`."""
    var filter: Reads[Self.Source.dtype]
    """In the layout that the target's kernels read; beside uint8 the bits of
    int8."""
    var epilogue: Epilogue[Self.bias_type, Self.residual_type]
    var output: Self.Output
    """`[N, Z, P, Q, K]`."""
    var quantization: Quantization
    """Zero points, and the rounding to 8 bits."""

    def __init__(
        out self,
        activation: Self.Source,
        filter: Reads[Self.Source.dtype],
        epilogue: Epilogue[Self.bias_type, Self.residual_type],
        output: Self.Output,
        quantization: Quantization = Quantization.none(),
    ):
        """Gathers the operands.

        Args:
            activation: See the fields, like the others.
            filter: The same.
            epilogue: The same.
            output: The same.
            quantization: The same.
        """
        self.activation = activation
        self.filter = filter
        self.epilogue = epilogue
        self.output = output
        self.quantization = quantization

    def filter_elements(self) -> Reads[filter_dtype(Self.Source.dtype)]:
        """The filter, in its own type."""
        return rebind[Reads[filter_dtype(Self.Source.dtype)]](
            self.filter.unsafe_bitcast[
                Scalar[filter_dtype(Self.Source.dtype)]
            ]()
        )

    @staticmethod
    def types(scaled: Bool) -> OperandTypes:
        """The types of the operands.

        Args:
            scaled: Whether each filter has a scale.
        """
        return OperandTypes.of[Self.Source, Self.Output](
            Self.residual_type, scaled
        )

    def operands(self, *, exact: Bool) -> Operands:
        """What a plan may know.

        Args:
            exact: Whether products of float32 must not be rounded to tf32.
        """
        ref epilogue = self.epilogue
        var addresses = Int(self.filter)
        comptime if not Self.Source.fused:
            addresses |= Int(self.activation.data())
        addresses |= self.output.addresses()
        if epilogue.has_scale:
            addresses |= Int(epilogue.scale)
        if epilogue.has_bias:
            addresses |= Int(epilogue.bias)
        if epilogue.has_residual:
            addresses |= Int(epilogue.residual)
        return Operands(
            Self.types(epilogue.has_scale),
            alignment=alignment_of(addresses),
            exact=exact,
            bias=epilogue.has_bias,
            residual=epilogue.has_residual and epilogue.beta != 0,
            activation=epilogue.activation.code,
            final_activation=epilogue.final_activation.code,
        )
