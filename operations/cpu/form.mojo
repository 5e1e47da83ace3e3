"""What an epilogue does to sums, and which loop its work fits."""

from std.collections import Optional
from std.utils.numerics import inf

from ..conv.access import OutputTarget
from ..conv.epilogue import Activation, Epilogue, clamped
from ..conv.fields import (
    ACTIVATION_CLAMP,
    ACTIVATION_NONE,
    ACTIVATION_RELU,
    ACTIVATION_SILU,
)
from ..conv.operands import Arguments
from ..conv.quantization import Quantization, Steps
from .pixel import Pixel
from .rounding import rounded

comptime FORM_IDENTITY = 0
"""Nothing is done to a sum."""

comptime FORM_LIMITS = 1
"""A bias, then limits: no branch for each vector. Of integers a scale is in front,
and either may be missing."""

comptime FORM_RESIDUAL = 2
"""What `FORM_LIMITS` has, a residual and limits again."""

comptime FORM_SILU = 3
"""A bias, then SiLU, and of integers a scale as `FORM_LIMITS` has it: what
networks with SiLU have behind most of their convolutions."""

comptime FORM_STEPS = 4
"""Anything, in steps: each is a loop over the whole tile, so that what an
activation is is asked, and its constants are loaded, once a tile."""


@fieldwise_init
struct Limits(ImplicitlyCopyable, Movable):
    """An activation that is a pair of comparisons."""

    var low: Float32
    var high: Float32

    @staticmethod
    def none() -> Limits:
        """No limits."""
        comptime infinity = inf[DType.float32]()
        return Limits(-infinity, infinity)

    @staticmethod
    def of(activation: Activation) -> Optional[Limits]:
        """The limits that an activation is, if it is.

        Args:
            activation: The activation.

        Returns:
            The limits, infinite ones for no activation.
        """
        if activation.code == ACTIVATION_NONE:
            return Limits.none()
        if activation.code == ACTIVATION_RELU:
            return Limits(0, inf[DType.float32]())
        if activation.code == ACTIVATION_CLAMP:
            return Limits(activation.p0, activation.p1)
        return None


struct Form[
    bias_type: DType, residual_type: DType, integers: Bool, output: DType
](ImplicitlyCopyable, Movable):
    """An epilogue, and which of the loops of epilogue.mojo its work fits.

    Parameters:
        bias_type: Of the bias.
        residual_type: Of the residual.
        integers: Whether operands are integers, which have a scale as a rule.
        output: Type of the output. One of integers has limits of its own, so
            that the last ones of the epilogue are part of them.
    """

    var kind: Int
    var epilogue: Epilogue[Self.bias_type, Self.residual_type]
    var quantization: Quantization
    var limits: Limits
    var final_limits: Limits
    var steps: Steps
    """To an output of integers."""

    def __init__(
        out self,
        epilogue: Epilogue[Self.bias_type, Self.residual_type],
        quantization: Quantization,
    ):
        """Finds the loop.

        Args:
            epilogue: The epilogue.
            quantization: What belongs to it.
        """
        self.epilogue = epilogue
        self.quantization = quantization
        self.limits = Limits(0, 0)
        self.final_limits = Limits(0, 0)
        self.steps = Self._steps(quantization, Limits.none())
        self.kind = FORM_IDENTITY
        if epilogue.is_identity():
            return
        self.kind = FORM_STEPS
        var limits = Limits.of(epilogue.activation)
        var final_limits = Limits.of(epilogue.final_activation)
        comptime if not Self.integers:
            if epilogue.has_scale or not epilogue.has_bias:
                return
        # Without a residual between them either may be the only one.
        var codes = (epilogue.activation.code, epilogue.final_activation.code)
        if not epilogue.has_residual and (
            codes == (ACTIVATION_SILU, ACTIVATION_NONE)
            or codes == (ACTIVATION_NONE, ACTIVATION_SILU)
        ):
            self.kind = FORM_SILU
        if not limits or not final_limits:
            return
        self.limits = limits.value()
        self.final_limits = final_limits.value()
        if epilogue.has_residual:
            self.kind = FORM_RESIDUAL
            self.steps = Self._steps(quantization, self.final_limits)
        elif epilogue.final_activation.code == ACTIVATION_NONE:
            self.kind = FORM_LIMITS
            self.steps = Self._steps(quantization, self.limits)

    @staticmethod
    def _steps(quantization: Quantization, limits: Limits) -> Steps:
        """The steps to an output of integers behind limits."""
        comptime if Self.output.is_integral():
            return Steps.of[Self.output](quantization, limits.low, limits.high)
        return Steps(1, 0, 0, 0)

    @always_inline
    def bias[
        kind: Int, width: Int
    ](self, filter: Int) -> SIMD[DType.float32, width]:
        """What is added to the sums of neighbouring filters.

        Parameters:
            kind: `self.kind`, known to the compiler; not `FORM_STEPS`.
            width: How many filters.

        Args:
            filter: The first filter.
        """
        comptime if kind == FORM_IDENTITY:
            return SIMD[DType.float32, width](0)
        elif Self.integers:
            return self.epilogue.load_bias[width](filter)
        else:
            return self.epilogue.bias.unsafe_load[width=width](filter).cast[
                DType.float32
            ]()

    @always_inline
    def scale[
        kind: Int, width: Int
    ](self, filter: Int) -> SIMD[DType.float32, width]:
        """What the sums of neighbouring filters are multiplied with, 1 unless
        operands are integers.

        Parameters:
            kind: `self.kind`, known to the compiler; not `FORM_STEPS`.
            width: How many filters.

        Args:
            filter: The first filter.
        """
        comptime if kind != FORM_IDENTITY and Self.integers:
            return self.epilogue.scaled[width](
                SIMD[DType.float32, width](1), filter
            )
        return SIMD[DType.float32, width](1)

    @always_inline
    def stored[
        width: Int, //
    ](self, value: SIMD[DType.float32, width]) -> SIMD[Self.output, width]:
        """Values as the output has them.

        Parameters:
            width: How many.

        Args:
            value: What `apply` returned.
        """
        comptime if Self.output.is_integral():
            return self.steps.apply[Self.output](value)
        else:
            return rounded[Self.output](value)

    @always_inline
    def apply[
        kind: Int, width: Int
    ](
        self,
        v: SIMD[DType.float32, width],
        scale: SIMD[DType.float32, width],
        bias: SIMD[DType.float32, width],
        residual: SIMD[DType.float32, width],
    ) -> SIMD[DType.float32, width]:
        """`Epilogue.apply`, of the form that this one has.

        Parameters:
            kind: `self.kind`, known to the compiler; not `FORM_STEPS`.
            width: How many filters.

        Args:
            v: Their accumulators.
            scale: What `scale` returned for them.
            bias: What `bias` returned for them.
            residual: What `real_residual` returned for them, if `kind` is
                `FORM_RESIDUAL`.

        Returns:
            The values to round and store.
        """
        return limited_sum[kind, Self.integers, Self.output](
            v,
            scale,
            bias,
            residual,
            self.epilogue.beta,
            self.limits,
            self.final_limits,
        )


@always_inline
def _limited[
    width: Int, //, in_steps: Bool
](v: SIMD[DType.float32, width], limits: Limits) -> SIMD[DType.float32, width]:
    """Values within limits, unless the steps to integers have them."""
    comptime if in_steps:
        return v
    else:
        return clamped(v, limits.low, limits.high)


@always_inline
def limited_sum[
    width: Int, //, kind: Int, integers: Bool, output: DType
](
    v: SIMD[DType.float32, width],
    scale: SIMD[DType.float32, width],
    bias: SIMD[DType.float32, width],
    residual: SIMD[DType.float32, width],
    beta: Float32,
    limits: Limits,
    final_limits: Limits,
) -> SIMD[DType.float32, width]:
    """`Epilogue.apply` of a form.

    Parameters:
        width: How many filters.
        kind: The form, not `FORM_STEPS`.
        integers: Whether sums are of integers, which have a scale.
        output: Type of the output; the last limits of one of integers are left
            to `Steps`.

    Args:
        v: The accumulators.
        scale: What they are multiplied with, if they are of integers.
        bias: What is added.
        residual: What is added behind `limits`, if `kind` is `FORM_RESIDUAL`.
        beta: The residual's factor.
        limits: Of the activation.
        final_limits: Of the final activation.

    Returns:
        The values to round and store.
    """
    comptime if kind == FORM_IDENTITY:
        return v
    else:
        comptime in_steps = output.is_integral()
        var sum = v + bias
        comptime if integers:
            sum = v.fma(scale, bias)
        comptime if kind == FORM_SILU:
            return Activation(ACTIVATION_SILU, 0, 0).apply[width](sum)
        comptime if kind == FORM_LIMITS:
            return _limited[in_steps](sum, limits)
        var first = _limited[False](sum, limits)
        var result = residual.fma(SIMD[DType.float32, width](beta), first)
        return _limited[in_steps](result, final_limits)


@always_inline
def real_residual[
    width: Int
](
    epilogue: Epilogue,
    output: Some[OutputTarget],
    pixel: Pixel,
    filter: Int,
    offset: Int,
) -> SIMD[DType.float32, width]:
    """The residual of neighbouring filters of one pixel, less its zero point.

    Parameters:
        width: How many filters.

    Args:
        epilogue: The epilogue, which has a residual.
        output: The output, which says how the residual is laid out.
        pixel: The pixel.
        filter: The first filter.
        offset: The first element's row-major offset in the output.
    """
    return epilogue.real_residual(
        output.load_beside[width=width](
            epilogue.residual, pixel.n, pixel.at, filter, offset
        )
    )


def finished[
    dtype: DType
](
    arguments: Arguments, sum: Float32, pixel: Pixel, filter: Int, offset: Int
) -> Scalar[dtype]:
    """An output of a sum: the definition that those loops are held against.

    Parameters:
        dtype: Of the output.

    Args:
        arguments: The op's operands.
        sum: The sum.
        pixel: The output's pixel.
        filter: The filter.
        offset: The output's row-major offset.
    """
    ref epilogue = arguments.epilogue
    var v: SIMD[DType.float32, 1] = epilogue.scaled[1](
        sum, filter
    ) + epilogue.load_bias[1](filter)
    v = epilogue.activation.apply[1](v)
    if epilogue.has_residual:
        var other = real_residual[1](
            epilogue,
            arguments.output,
            pixel,
            filter,
            offset,
        )
        v = other.fma(epilogue.beta, v)
    v = epilogue.final_activation.apply[1](v)
    comptime if dtype.is_integral():
        var all = Limits.none()
        return Steps.of[dtype](arguments.quantization, all.low, all.high).apply[
            width=1, dtype
        ](v)
    else:
        return rounded[width=1, dtype](v)
