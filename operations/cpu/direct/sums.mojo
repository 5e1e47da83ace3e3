"""Where the register tiles of a direct kernel leave their sums: in L1, for the
epilogue, or in the output, behind the bias and the limits of an activation."""

from std.collections import Optional

from ...conv.memory import CACHE_LINE, Reads, Writes
from ...conv.operands import Arguments
from ...conv.epilogue import clamped
from ..form import FORM_IDENTITY, FORM_LIMITS, Form, Limits
from .channels import ORDER_PLAIN, Lanes, load_lanes, rounded_lanes
from .image_row import Span


trait SumTarget(ImplicitlyCopyable):
    """Takes the sums of an image row's pixels."""

    def bias[
        lanes: Lanes
    ](self, filter: Int) -> SIMD[DType.float32, lanes.width]:
        """What belongs to neighbouring filters, for `store`.

        Parameters:
            lanes: The filters.

        Args:
            filter: The first filter.
        """
        ...

    def store[
        lanes: Lanes
    ](
        self,
        column: Int,
        filter: Int,
        sum: SIMD[DType.float32, lanes.width],
        bias: SIMD[DType.float32, lanes.width],
    ):
        """Takes the sums of neighbouring filters of one pixel.

        Parameters:
            lanes: The filters.

        Args:
            column: The pixel's column, counted on over the rows below.
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
    def bias[
        lanes: Lanes
    ](self, filter: Int) -> SIMD[DType.float32, lanes.width]:
        return SIMD[DType.float32, lanes.width](0)

    @always_inline
    def store[
        lanes: Lanes
    ](
        self,
        column: Int,
        filter: Int,
        sum: SIMD[DType.float32, lanes.width],
        bias: SIMD[DType.float32, lanes.width],
    ):
        comptime assert (
            lanes.order == ORDER_PLAIN
        ), "sums lie in the order of the filters"
        ref span = self.span
        var at = (column - span.q) * span.filters() + filter - span.begin
        self.elements.unsafe_store(at, sum)


@fieldwise_init
struct DirectOutput[dtype: DType](SumTarget):
    """Outputs in memory, of an epilogue that is a bias and limits.

    Parameters:
        dtype: Of activation, bias and output, a float.
    """

    var elements: Writes[Self.dtype]
    """Of the first pixel that is stored."""
    var filters: Int
    """Elements between two pixels."""
    var has_bias: Bool
    var _bias: Reads[Self.dtype]
    var limits: Limits

    @staticmethod
    def of(arguments: Arguments, filters: Int) -> Optional[Self]:
        """The output of an op, if its epilogue and its types are such.

        Args:
            arguments: The op's operands.
            filters: Of all groups.
        """
        comptime Call = type_of(arguments)
        comptime Output = Call.Output
        comptime if (
            Output.dtype != Self.dtype
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
            var elements = rebind[Writes[Self.dtype]](arguments.output.data())
            if form.kind == FORM_IDENTITY:
                # Nothing at this address is read.
                var nothing = Reads[Self.dtype](unsafe_from_address=CACHE_LINE)
                return Self(elements, filters, False, nothing, Limits.none())
            comptime if Call.bias_type == Self.dtype:
                if form.kind == FORM_LIMITS:
                    return Self(
                        elements,
                        filters,
                        True,
                        rebind[Reads[Self.dtype]](arguments.epilogue.bias),
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
    def bias[
        lanes: Lanes
    ](self, filter: Int) -> SIMD[DType.float32, lanes.width]:
        if self.has_bias:
            return load_lanes[lanes](self._bias, filter)
        # The number that changes no sum, not even a zero.
        return SIMD[DType.float32, lanes.width](-0.0)

    @always_inline
    def store[
        lanes: Lanes
    ](
        self,
        column: Int,
        filter: Int,
        sum: SIMD[DType.float32, lanes.width],
        bias: SIMD[DType.float32, lanes.width],
    ):
        var value = clamped(sum + bias, self.limits.low, self.limits.high)
        self.elements.unsafe_store[alignment=1](
            column * self.filters + filter,
            rounded_lanes[lanes, Self.dtype](value),
        )
