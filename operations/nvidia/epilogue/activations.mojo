"""Activations in epilogues of a device, from the special-function unit's
approximations.

`ex2.approx.ftz` and `rcp.approx.ftz` (PTX ISA) are off by at most 2 and 1 units
of the last place of float32; what is made of them here stays within 4e-6 of the
function, relative to the larger of its value and its argument's part in it, far
below the rounding of 16-bit outputs (2^-9 and 2^-12).

`tanh.approx` makes SiLU and GELU of a third of the instructions. On an H200
both stay within 1.1e-5 of the function, absolutely; where that exceeds the
rounding of their value, for arguments under -4, outputs of 16 bits have it.
"""

from std.math import inf
from std.sys._assembly import inlined_assembly

from ...conv.device_value import DeviceValue
from ...conv.epilogue import Activation
from ...conv.fields import (
    ACTIVATION_CLAMP,
    ACTIVATION_GELU,
    ACTIVATION_GELU_TANH,
    ACTIVATION_HARD_SIGMOID,
    ACTIVATION_HARD_SWISH,
    ACTIVATION_LEAKY_RELU,
    ACTIVATION_NONE,
    ACTIVATION_RELU,
    ACTIVATION_SIGMOID,
    ACTIVATION_SILU,
)

comptime LOG2_E = Float32(1.4426950408889634)

comptime LARGEST_POWER = Float32(62.0)
"""Of 2 in a gate's denominator: the product of two such is finite."""

comptime SMALLEST_ARGUMENT = Float32(-128.0)
"""Below it a gated value is taken as this value's, under 1e-16."""


@always_inline
def keep_branch():
    """Keeps the compiler from computing what follows in a branch beside the
    branch, and then selecting values one by one."""
    inlined_assembly["", NoneType, constraints="~{memory}"]()


@always_inline
def _map[
    text: StaticString, size: Int
](v: SIMD[DType.float32, size]) -> SIMD[DType.float32, size]:
    """An instruction of one operand on every value."""
    var result = SIMD[DType.float32, size](0)
    comptime for i in range(size):
        result[i] = inlined_assembly[
            String(text, " $0, $1;"),
            Float32,
            constraints="=f,f",
            has_side_effect=False,
        ](v[i])
    return result


@always_inline
def _map2[
    text: StaticString, size: Int
](v: SIMD[DType.float32, size], bound: Float32) -> SIMD[DType.float32, size]:
    """An instruction of two operands on every value and a bound."""
    var result = SIMD[DType.float32, size](0)
    comptime for i in range(size):
        result[i] = inlined_assembly[
            String(text, " $0, $1, $2;"),
            Float32,
            constraints="=f,f,f",
            has_side_effect=False,
        ](v[i], bound)
    return result


@always_inline
def _power_of_two[
    size: Int
](v: SIMD[DType.float32, size]) -> SIMD[DType.float32, size]:
    """2 to the power of every value."""
    return _map["ex2.approx.ftz.f32"](v)


@always_inline
def _reciprocal[
    size: Int
](v: SIMD[DType.float32, size]) -> SIMD[DType.float32, size]:
    """One over every value."""
    return _map["rcp.approx.ftz.f32"](v)


@always_inline
def _at_most[
    size: Int
](v: SIMD[DType.float32, size], bound: Float32) -> SIMD[DType.float32, size]:
    """The smaller; the bound in place of NaN."""
    return _map2["min.f32"](v, bound)


@always_inline
def _limit_low[
    size: Int
](v: SIMD[DType.float32, size], bound: Float32) -> SIMD[DType.float32, size]:
    """The larger; NaN stays NaN."""
    return _map2["max.NaN.f32"](v, bound)


@always_inline
def _limit_high[
    size: Int
](v: SIMD[DType.float32, size], bound: Float32) -> SIMD[DType.float32, size]:
    """The smaller; NaN stays NaN."""
    return _map2["min.NaN.f32"](v, bound)


@always_inline
def _gate[
    size: Int
](v: SIMD[DType.float32, size], power: SIMD[DType.float32, size]) -> SIMD[
    DType.float32, size
]:
    """`v / (1 + 2^power)`. Neighbours share a reciprocal, the special-function
    unit's being the epilogue's narrowest path: 1/a = b / (a * b)."""
    var below = 1 + _power_of_two(_at_most(power, LARGEST_POWER))
    var product = SIMD[DType.float32, size // 2](0)
    comptime for i in range(size // 2):
        product[i] = below[2 * i] * below[2 * i + 1]
    var shared = _reciprocal(product)
    var result = _limit_low(v, SMALLEST_ARGUMENT)
    comptime for i in range(size // 2):
        result[2 * i] *= shared[i] * below[2 * i + 1]
        result[2 * i + 1] *= shared[i] * below[2 * i]
    return result


@always_inline
def _half_gate[
    size: Int
](v: SIMD[DType.float32, size], argument: SIMD[DType.float32, size]) -> SIMD[
    DType.float32, size
]:
    """`v * (1 + tanh(argument)) / 2`."""
    var half = v * 0.5
    return half.fma(_map["tanh.approx.f32"](argument), half)


@always_inline
def silu_of_half[
    size: Int
](half: SIMD[DType.float32, size]) -> SIMD[DType.float32, size]:
    """SiLU for outputs of 16 bits, of values that are halved already.

    Parameters:
        size: How many.

    Args:
        half: Half the values.
    """
    # v / (1 + exp(-v)) = v / 2 * (1 + tanh(v / 2)).
    return half.fma(_map["tanh.approx.f32"](half), half)


@always_inline
def _logistic[
    size: Int
](v: SIMD[DType.float32, size]) -> SIMD[DType.float32, size]:
    """`1 / (1 + exp(-v))`; NaN stays NaN."""
    return _reciprocal(1 + _power_of_two(v * -LOG2_E))


@always_inline
def _tanh[size: Int](v: SIMD[DType.float32, size]) -> SIMD[DType.float32, size]:
    """The hyperbolic tangent: its series up to v^9 where the logistic
    function's difference from a half would lose digits."""
    var far = _logistic(v * 2) * 2 - 1
    var x = v * v
    var series = x * Float32(62.0 / 2835.0) - Float32(17.0 / 315.0)
    series = series * x + Float32(2.0 / 15.0)
    series = series * x - Float32(1.0 / 3.0)
    var near = (series * x) * v + v
    return x.lt(0.09).select(near, far)


@always_inline
def _gelu[size: Int](v: SIMD[DType.float32, size]) -> SIMD[DType.float32, size]:
    """`v * (1 + erf(v / sqrt(2))) / 2`: `max(v, 0) - |v| * erfc(|v| / sqrt(2))
    / 2`, erfc by Abramowitz and Stegun 7.1.26 (absolute error 1.5e-7)."""
    var x = _at_most(abs(v), 32.0)
    var t = _reciprocal(1 + x * Float32(0.3275911 * 0.70710678118654752440))
    var series = t * Float32(1.061405429) - Float32(1.453152027)
    series = series * t + Float32(1.421413741)
    series = series * t - Float32(0.284496736)
    series = series * t + Float32(0.254829592)
    var tail = _power_of_two(x * x * (-0.5 * LOG2_E)) * (series * t) * 0.5
    return _limit_low(v, 0) - x * tail


@fieldwise_init
struct DeviceActivation(DeviceValue, TrivialRegisterPassable):
    """An activation as the kernel evaluates it: one of few formulas, chosen
    by a branch that all threads take alike.

    ReLU and clamp are one formula, of two limits; hard swish and, with a slope of
    0, hard sigmoid are one of a ramp. NaN stays NaN in all."""

    comptime NONE = Int32(0)
    comptime LIMITS = Int32(1)
    comptime SILU = Int32(2)
    comptime GELU_TANH = Int32(3)
    comptime SIGMOID = Int32(4)
    comptime RAMP = Int32(5)
    comptime GELU = Int32(6)
    comptime TANH = Int32(7)
    comptime LEAKY_RELU = Int32(8)
    comptime FORMULAS = [
        Self.LIMITS,
        Self.SILU,
        Self.GELU_TANH,
        Self.SIGMOID,
        Self.RAMP,
        Self.GELU,
        Self.TANH,
        Self.LEAKY_RELU,
    ]
    """All but `NONE`."""

    var formula: Int32
    var slope: Float32
    var low: Float32
    var high: Float32

    @staticmethod
    def of(activation: Activation) -> DeviceActivation:
        """The formula of an activation.

        Args:
            activation: As the op has it.
        """
        var limit = inf[DType.float32]()
        var code = activation.code
        if code == ACTIVATION_NONE:
            return DeviceActivation(Self.NONE, 1, -limit, limit)
        if code == ACTIVATION_RELU:
            return DeviceActivation(Self.LIMITS, 1, 0, limit)
        if code == ACTIVATION_CLAMP:
            return DeviceActivation(
                Self.LIMITS, 1, activation.p0, activation.p1
            )
        if code == ACTIVATION_LEAKY_RELU:
            return DeviceActivation(
                Self.LEAKY_RELU, activation.p0, -limit, limit
            )
        var formula = Self.TANH
        if code == ACTIVATION_SILU:
            formula = Self.SILU
        elif code == ACTIVATION_GELU_TANH:
            formula = Self.GELU_TANH
        elif code == ACTIVATION_SIGMOID:
            formula = Self.SIGMOID
        elif code == ACTIVATION_HARD_SWISH:
            formula = Self.RAMP
        elif code == ACTIVATION_HARD_SIGMOID:
            return DeviceActivation(Self.RAMP, 0, -limit, limit)
        elif code == ACTIVATION_GELU:
            formula = Self.GELU
        return DeviceActivation(formula, 1, -limit, limit)

    def is_identity(self) -> Bool:
        """Whether `apply` returns what it is given."""
        return self.formula == Self.NONE

    @always_inline
    def apply[
        size: Int, *, exact: Bool = True
    ](self, v: SIMD[DType.float32, size]) -> SIMD[DType.float32, size]:
        """The activation of every value.

        Parameters:
            size: How many, even.
            exact: Whether float32 shall hold it; otherwise 16 bits.

        Args:
            v: The values.
        """
        var result = v
        if self.formula == Self.NONE:
            return result
        comptime for i in range(len(Self.FORMULAS)):
            comptime formula = Self.FORMULAS[i]
            if self.formula == formula:
                keep_branch()
                result = self.evaluate[formula, exact=exact](v)
        return result

    @always_inline
    def evaluate[
        formula: Int32, size: Int, *, exact: Bool = True
    ](self, v: SIMD[DType.float32, size]) -> SIMD[DType.float32, size]:
        """The activation of every value, its formula known.

        Parameters:
            formula: This activation's.
            size: How many, even.
            exact: Whether float32 shall hold it; otherwise 16 bits.

        Args:
            v: The values.
        """
        comptime if formula == Self.NONE:
            return v
        elif formula == Self.LIMITS:
            return _limit_high(_limit_low(v, self.low), self.high)
        elif formula == Self.LEAKY_RELU:
            return v.gt(0).select(v, v * self.slope)
        elif formula == Self.SILU:
            comptime if exact:
                return _gate(v, v * -LOG2_E)
            return silu_of_half(v * 0.5)
        elif formula == Self.GELU_TANH:
            comptime factor = Float32(0.79788456080286535588)
            comptime if not exact:
                return _half_gate(v, v * (v * v * (0.044715 * factor) + factor))
            # tanh(u) = 2 / (1 + exp(-2u)) - 1: v * (1 + tanh(u)) / 2 is a gate.
            comptime twice = -2 * factor * LOG2_E
            return _gate(v, v * (v * v * (0.044715 * twice) + twice))
        elif formula == Self.SIGMOID:
            return _logistic(v)
        elif formula == Self.RAMP:
            var ramp = _limit_high(_limit_low(v + 3, 0), 6) * Float32(1.0 / 6.0)
            return ramp * v if self.slope != 0 else ramp
        elif formula == Self.GELU:
            return _gelu(v)
        else:
            comptime assert formula == Self.TANH
            return _tanh(v)


comptime FAST = [DeviceActivation.LIMITS, DeviceActivation.SILU]
"""Activations that visitors have a form of their own for; without one, the
limits are infinite."""
