"""Outputs that register tiles store themselves: in memory, behind a bias and the
limits of an activation."""

from std.collections import Optional

from ..conv.memory import CACHE_LINE, Reads, Writes
from ..conv.operands import Arguments
from .form import FORM_IDENTITY, FORM_LIMITS, Form, Limits


@fieldwise_init
struct PlainOutput[dtype: DType](ImplicitlyCopyable, Movable):
    """Outputs in memory, of an epilogue that is a bias and limits.

    Parameters:
        dtype: Of activation, bias and output, a float.
    """

    var elements: Writes[Self.dtype]
    """Of the first pixel and filter that are stored."""
    var filters: Int
    """Elements between two pixels."""
    var has_bias: Bool
    var bias: Reads[Self.dtype]
    """Of the first filter that is stored, if there is one."""
    var limits: Limits

    @staticmethod
    def nowhere() -> Self:
        """What is neither read nor written."""
        return Self(
            Writes[Self.dtype](unsafe_from_address=CACHE_LINE),
            0,
            False,
            Reads[Self.dtype](unsafe_from_address=CACHE_LINE),
            Limits.none(),
        )

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
                var bare = Self.nowhere()
                bare.elements, bare.filters = elements, filters
                return bare
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
    def at(self, pixel: Int, filter: Int = 0) -> Self:
        """What later pixels and filters are stored in.

        Args:
            pixel: How many pixels lie in front.
            filter: How many filters do.
        """
        var rest = self
        rest.elements = self.elements.unsafe_offset(
            pixel * self.filters + filter
        )
        rest.bias = self.bias.unsafe_offset(filter)
        return rest
