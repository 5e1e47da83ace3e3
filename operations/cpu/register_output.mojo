"""Outputs that register tiles store themselves, of epilogues that need no branch for
each vector: in memory, channels last, of the activation's own type."""

from std.collections import Optional
from std.memory import bitcast
from std.sys.info import size_of
from std.sys.intrinsics import PrefetchOptions, masked_load, prefetch

from ..conv.memory import CACHE_LINE, Reads, Writes, bits_type
from ..conv.operands import Arguments
from ..conv.quantization import Steps
from .form import (
    FORM_IDENTITY,
    FORM_LIMITS,
    FORM_RESIDUAL,
    Form,
    Limits,
    limited_sum,
)
from .rounding import ByteSteps, rounded

comptime REGISTER_FORMS = [FORM_IDENTITY, FORM_LIMITS, FORM_RESIDUAL]
"""Forms that a register tile has a store of. Of integers the first one is not used:
they are scaled and rounded whatever the epilogue is."""


def register_bias_type(dtype: DType) -> DType:
    """The type of the bias beside outputs of a type.

    Args:
        dtype: Of the outputs.

    Returns:
        That of floats beside integers; otherwise the outputs'.
    """
    return DType.float32 if dtype.is_integral() else dtype


@always_inline
def _load[
    dtype: DType, //, width: Int, partial: Bool
](elements: Reads[dtype], at: Int, mask: SIMD[DType.bool, width]) -> SIMD[
    DType.float32, width
]:
    """Neighbouring elements, with `partial` those of a mask alone."""
    comptime if partial:
        comptime bits = bits_type(dtype)
        return bitcast[dtype, width](
            masked_load[width](
                elements.unsafe_offset(at).unsafe_bitcast[Scalar[bits]](),
                mask,
                SIMD[bits, width](0),
            )
        ).cast[DType.float32]()
    else:
        return elements.unsafe_load[width=width, alignment=1](at).cast[
            DType.float32
        ]()


@fieldwise_init
struct RegisterOutput[dtype: DType](ImplicitlyCopyable, Movable):
    """Outputs in memory, and the epilogue in front of them.

    Parameters:
        dtype: Of activation, residual and output.
    """

    comptime bias_type = register_bias_type(Self.dtype)
    """Of the bias."""

    var form: Int
    """One of `REGISTER_FORMS`."""
    var elements: Writes[Self.dtype]
    """Of the first pixel and filter that are stored."""
    var filters: Int
    """Elements between two pixels."""
    var has_bias: Bool
    var bias: Reads[Self.bias_type]
    """Of the first filter that is stored, if there is one."""
    var has_scale: Bool
    """Integers alone have one."""
    var scale: Reads[DType.float32]
    """Of the first filter that is stored, if there is one."""
    var residual: Reads[Self.dtype]
    """Of the first pixel and filter that are stored, if `form` has one."""
    var beta: Float32
    """The residual's factor."""
    var residual_zero_point: Float32
    """The residual's zero point; 0 unless it is integers."""
    var limits: Limits
    """In front of the residual, if there is one."""
    var final_limits: Limits
    """Behind it."""
    var steps: Steps
    """To integers."""
    var byte_steps: ByteSteps
    """The same, as packed integers take them."""

    @staticmethod
    def nowhere() -> Self:
        """What is neither read nor written."""
        return Self(
            FORM_IDENTITY,
            Writes[Self.dtype](unsafe_from_address=CACHE_LINE),
            0,
            False,
            Reads[Self.bias_type](unsafe_from_address=CACHE_LINE),
            False,
            Reads[DType.float32](unsafe_from_address=CACHE_LINE),
            Reads[Self.dtype](unsafe_from_address=CACHE_LINE),
            0,
            0,
            Limits.none(),
            Limits.none(),
            Steps(1, 0, 0, 0),
            ByteSteps(1, 0, 0, 0),
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
            or Call.Source.dtype != Self.dtype
            or Output.stores
            or Output.computes
            or Output.interleaved != 0
        ):
            return None
        else:
            comptime integers = Self.dtype.is_integral()
            ref epilogue = arguments.epilogue
            var form = Form[
                Call.bias_type, Call.residual_type, integers, Output.dtype
            ](epilogue, arguments.quantization)
            if form.kind not in materialize[REGISTER_FORMS]():
                return None
            var made = Self.nowhere()
            made.form = form.kind
            comptime if integers:
                made.form = max(made.form, FORM_LIMITS)
            made.elements = rebind[Writes[Self.dtype]](arguments.output.data())
            made.filters = filters
            if form.kind != FORM_IDENTITY:
                made.limits = form.limits
                made.final_limits = form.final_limits
            made.steps = form.steps
            comptime if integers:
                made.byte_steps = ByteSteps.of(form.steps)
            made.has_scale = epilogue.has_scale
            if epilogue.has_scale:
                made.scale = epilogue.scale
            made.has_bias = epilogue.has_bias
            if epilogue.has_bias:
                comptime if Call.bias_type == Self.bias_type:
                    made.bias = rebind[Reads[Self.bias_type]](epilogue.bias)
                else:
                    return None
            if form.kind == FORM_RESIDUAL:
                comptime if Call.residual_type == Self.dtype:
                    made.residual = rebind[Reads[Self.dtype]](epilogue.residual)
                    made.beta = epilogue.beta
                    comptime if integers:
                        made.residual_zero_point = epilogue.residual_zero_point[
                            0
                        ]
                else:
                    return None
            return made

    @always_inline
    def at(self, pixel: Int, filter: Int = 0) -> Self:
        """What later pixels and filters are stored in.

        Args:
            pixel: How many pixels lie in front.
            filter: How many filters do.
        """
        var rest = self
        var offset = pixel * self.filters + filter
        rest.elements = self.elements.unsafe_offset(offset)
        rest.residual = self.residual.unsafe_offset(offset)
        rest.bias = self.bias.unsafe_offset(filter)
        rest.scale = self.scale.unsafe_offset(filter)
        return rest

    @always_inline
    def prefetch[rows: Int, filters: Int](self, pixel: Int):
        """Asks for the memory that neighbouring outputs go to, and for their
        residuals: the hardware does not guess where pixels lie.

        Parameters:
            rows: Pixels.
            filters: Of each pixel; a cache line holds at least one.

        Args:
            pixel: How many pixels lie in front.
        """
        comptime to_write = PrefetchOptions().for_write().high_locality()
        comptime to_read = PrefetchOptions().for_read().high_locality()
        comptime line = CACHE_LINE // size_of[Self.dtype]()
        var first = pixel * self.filters
        comptime for i in range(rows):
            comptime for j in range(0, filters, line):
                prefetch[params=to_write](
                    self.elements.unsafe_offset(first + i * self.filters + j)
                )
        if self.form == FORM_RESIDUAL:
            comptime for i in range(rows):
                comptime for j in range(0, filters, line):
                    prefetch[params=to_read](
                        self.residual.unsafe_offset(
                            first + i * self.filters + j
                        )
                    )

    @always_inline
    def load_bias[
        form: Int, width: Int, partial: Bool = False
    ](self, filter: Int, mask: SIMD[DType.bool, width] = {fill = True}) -> SIMD[
        DType.float32, width
    ]:
        """What is added to the sums of neighbouring filters.

        Parameters:
            form: `self.form`, known to the compiler.
            width: How many filters.
            partial: Whether some of them are none.

        Args:
            filter: The first filter.
            mask: Those that there are, if they are `partial`.
        """
        comptime if form != FORM_IDENTITY:
            if self.has_bias:
                return _load[width, partial](self.bias, filter, mask)
        return 0

    @always_inline
    def load_scale[
        width: Int, partial: Bool = False
    ](self, filter: Int, mask: SIMD[DType.bool, width] = {fill = True}) -> SIMD[
        DType.float32, width
    ]:
        """What the sums of neighbouring filters are multiplied with.

        Parameters:
            width: How many filters.
            partial: Whether some of them are none.

        Args:
            filter: The first filter.
            mask: Those that there are, if they are `partial`.
        """
        if self.has_scale:
            return _load[width, partial](self.scale, filter, mask)
        return 1

    @always_inline
    def finished[
        form: Int, width: Int, partial: Bool = False
    ](
        self,
        sum: SIMD[DType.float32, width],
        scale: SIMD[DType.float32, width],
        bias: SIMD[DType.float32, width],
        offset: Int,
        mask: SIMD[DType.bool, width] = {fill = True},
    ) -> SIMD[DType.float32, width]:
        """The values of neighbouring filters of a pixel, to be rounded to the
        output's type.

        Parameters:
            form: `self.form`, known to the compiler.
            width: How many filters.
            partial: Whether some of them are none.

        Args:
            sum: Their sums.
            scale: What `load_scale` returned for them.
            bias: What `load_bias` returned for them.
            offset: The first output, counted from `elements`.
            mask: Those that there are, if they are `partial`.
        """
        comptime integers = Self.dtype.is_integral()
        var other = SIMD[DType.float32, width](0)
        comptime if form == FORM_RESIDUAL:
            other = _load[width, partial](self.residual, offset, mask)
            comptime if integers:
                other -= self.residual_zero_point
        return limited_sum[form, integers, Self.dtype](
            sum,
            scale,
            bias,
            other,
            self.beta,
            self.limits,
            self.final_limits,
        )

    @always_inline
    def stored[
        width: Int, //
    ](self, value: SIMD[DType.float32, width]) -> SIMD[Self.dtype, width]:
        """Values as the output has them.

        Parameters:
            width: How many.

        Args:
            value: What `finished` returned.
        """
        comptime if Self.dtype.is_integral():
            return self.steps.apply[Self.dtype](value)
        else:
            return rounded[Self.dtype](value)
