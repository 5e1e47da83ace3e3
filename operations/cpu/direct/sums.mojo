"""Where the register tiles of a direct kernel leave their sums: in L1, for the
epilogue, or in the output, behind the bias and the limits of an activation."""

from std.collections import Optional


from ...conv.memory import Writes
from ...conv.epilogue import clamped
from ...conv.operands import Arguments
from ..form import FORM_LIMITS, FORM_RESIDUAL
from ..register_output import RegisterOutput
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


def direct_output(
    arguments: Arguments, filters: Int
) -> Optional[RegisterOutput[type_of(arguments).Source.dtype]]:
    """The output of an op, if sums may go there from registers: where tiles
    overlap, some do twice, so that there is no residual.

    Args:
        arguments: The op's operands.
        filters: Of all groups.
    """
    var output = RegisterOutput[type_of(arguments).Source.dtype].of(
        arguments, filters
    )
    if output and output.value().form == FORM_RESIDUAL:
        return None
    return output


@fieldwise_init
struct DirectOutput[dtype: DType](SumTarget):
    """Outputs in memory.

    Parameters:
        dtype: Theirs.
    """

    var output: RegisterOutput[Self.dtype]
    """Of the first pixel that is stored."""

    @always_inline
    def bias[
        lanes: Lanes
    ](self, filter: Int) -> SIMD[DType.float32, lanes.width]:
        if self.output.has_bias:
            return load_lanes[lanes](self.output.bias, filter)
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
        ref output = self.output
        var at = column * output.filters + filter
        comptime if Self.dtype.is_integral():
            var value = output.finished[FORM_LIMITS, lanes.width](
                sum, output.load_scale[lanes.width](filter), bias, at
            )
            output.elements.unsafe_store[alignment=1](at, output.stored(value))
        else:
            ref limits = output.limits
            var value = clamped(sum + bias, limits.low, limits.high)
            output.elements.unsafe_store[alignment=1](
                at, rounded_lanes[lanes, Self.dtype](value)
            )
