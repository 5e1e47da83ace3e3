"""Where the register tiles of a direct kernel leave their sums: in L1, for the
epilogue, or in the output, behind the bias and the limits of an activation."""

from std.collections import Optional

from ...conv.memory import CACHE_LINE, Reads, Writes
from ...conv.operands import Arguments
from ...conv.epilogue import clamped
from ..form import FORM_IDENTITY, FORM_LIMITS, Form, Limits
from .image_row import Span


trait SumTarget(ImplicitlyCopyable):
    """Takes the sums of an image row's pixels."""

    def bias[width: Int](self, filter: Int) -> SIMD[DType.float32, width]:
        """What belongs to neighbouring filters, for `store`.

        Parameters:
            width: How many filters.

        Args:
            filter: The first filter.
        """
        ...

    def store[
        width: Int
    ](
        self,
        column: Int,
        filter: Int,
        sum: SIMD[DType.float32, width],
        bias: SIMD[DType.float32, width],
    ):
        """Takes the sums of neighbouring filters of one pixel.

        Parameters:
            width: How many filters.

        Args:
            column: The pixel's column.
            filter: The first filter.
            sum: The sums.
            bias: What `bias` returned for the filters.
        """
        ...


@fieldwise_init
struct ScratchSums(SumTarget):
    """Sums of a span, in memory."""

    var elements: Writes[DType.float32]
    var span: Span

    @always_inline
    def bias[width: Int](self, filter: Int) -> SIMD[DType.float32, width]:
        return SIMD[DType.float32, width](0)

    @always_inline
    def store[
        width: Int
    ](
        self,
        column: Int,
        filter: Int,
        sum: SIMD[DType.float32, width],
        bias: SIMD[DType.float32, width],
    ):
        ref span = self.span
        var at = (column - span.q) * span.filters() + filter - span.begin
        self.elements.unsafe_store(at, sum)


@fieldwise_init
struct DirectOutput(SumTarget):
    """Float32 outputs in memory, of an epilogue that is a bias and limits."""

    var elements: Writes[DType.float32]
    """Of the first pixel that is stored."""
    var filters: Int
    """Elements between two pixels."""
    var has_bias: Bool
    var _bias: Reads[DType.float32]
    var limits: Limits

    @staticmethod
    def of(arguments: Arguments, filters: Int) -> Optional[DirectOutput]:
        """The output of an op, if its epilogue and its types are such.

        Args:
            arguments: The op's operands.
            filters: Of all groups.
        """
        comptime Call = type_of(arguments)
        comptime Output = Call.Output
        comptime if (
            Output.dtype != DType.float32
            or Output.stores
            or Output.computes
            or Output.interleaved != 0
            or Call.Source.dtype.is_integral()
        ):
            return None
        else:
            var form = Form[
                Call.bias_type, Call.residual_type, False, Output.dtype
            ](arguments.epilogue, arguments.quantization)
            var elements = rebind[Writes[DType.float32]](
                arguments.output.data()
            )
            if form.kind == FORM_IDENTITY:
                # Nothing at this address is read.
                var nothing = Reads[DType.float32](
                    unsafe_from_address=CACHE_LINE
                )
                return DirectOutput(
                    elements, filters, False, nothing, Limits.none()
                )
            comptime if Call.bias_type == DType.float32:
                if form.kind == FORM_LIMITS:
                    return DirectOutput(
                        elements,
                        filters,
                        True,
                        rebind[Reads[DType.float32]](arguments.epilogue.bias),
                        form.limits,
                    )
            return None

    @always_inline
    def behind(self, pixels: Int) -> Self:
        """What later pixels are stored in.

        Args:
            pixels: How many lie in front.
        """
        var rest = self
        rest.elements = self.elements.unsafe_offset(pixels * self.filters)
        return rest

    @always_inline
    def bias[width: Int](self, filter: Int) -> SIMD[DType.float32, width]:
        if self.has_bias:
            return self._bias.unsafe_load[width=width](filter)
        # The number that changes no sum, not even a zero.
        return SIMD[DType.float32, width](-0.0)

    @always_inline
    def store[
        width: Int
    ](
        self,
        column: Int,
        filter: Int,
        sum: SIMD[DType.float32, width],
        bias: SIMD[DType.float32, width],
    ):
        self.elements.unsafe_store(
            column * self.filters + filter,
            clamped(sum + bias, self.limits.low, self.limits.high),
        )
