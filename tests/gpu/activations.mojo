"""The Hopper epilogue's activations against float64 on the host."""

from max.gpu.host import DeviceContext
from std.math import erf, exp, tanh

from operations.nvidia.epilogue.activations import DeviceActivation
from epilogues import activate
from kernels import THREADS

comptime ARGUMENTS = 1 << 16
"""Of an activation that is compared."""


def reference(formula: Int32, slope: Float32, v: Float64) -> Float64:
    """An activation in float64."""
    if formula == DeviceActivation.SILU:
        return v / (1 + exp(-v))
    if formula == DeviceActivation.SIGMOID:
        return 1 / (1 + exp(-v))
    if formula == DeviceActivation.RAMP:
        var ramp = min(max(v + 3, 0), 6) / 6
        # Hard swish, or hard sigmoid.
        return v * ramp if slope != 0 else ramp
    if formula == DeviceActivation.GELU:
        return 0.5 * v * (1 + erf(v * 0.70710678118654752440))
    if formula == DeviceActivation.GELU_TANH:
        var u = 0.79788456080286535588 * (v + 0.044715 * v * v * v)
        # (1 + tanh(u)) / 2, without the difference that loses digits.
        return v / (1 + exp(-2 * u))
    return tanh(v)


def tolerance_of(formula: Int32, exact: Bool, expected: Float64) -> Float64:
    """What a formula may be off."""
    var relative = 4e-6 * abs(expected)
    if not exact and (
        formula == DeviceActivation.SILU
        or formula == DeviceActivation.GELU_TANH
    ):
        return relative + 1.1e-5
    return relative


def check_activations[exact: Bool](ctx: DeviceContext) raises -> Int:
    """Compares the formulas with float64; returns how many are wrong.

    Parameters:
        exact: Of `DeviceActivation.apply`.
    """
    var wrong = 0
    var arguments = ctx.enqueue_create_buffer[DType.float32](ARGUMENTS)
    var values = ctx.enqueue_create_buffer[DType.float32](ARGUMENTS)
    with arguments.map_to_host() as host:
        for i in range(ARGUMENTS):
            # Dense around 0, then out to 40.
            var t = Float32(i - ARGUMENTS // 2) / Float32(ARGUMENTS // 2)
            host[i] = 40 * t * t * t
    comptime last = Int(DeviceActivation.TANH)
    for choice in range(Int(DeviceActivation.SILU), last + 2):
        var formula = Int(DeviceActivation.RAMP) if choice > last else choice
        var slope = Float32(0 if choice > last else 1)
        ctx.enqueue_function[activate[exact]](
            arguments,
            values,
            Int64(ARGUMENTS),
            Int32(formula),
            slope,
            grid_dim=32,
            block_dim=THREADS,
        )
        var largest = Float64(0)
        var place = Float32(0)
        with arguments.map_to_host() as v:
            with values.map_to_host() as found:
                for i in range(ARGUMENTS):
                    var x = v[i].cast[DType.float64]()
                    var expected = reference(Int32(formula), slope, x)
                    # erfc's approximation is an absolute one, of the gate.
                    var unit = abs(expected)
                    if Int32(formula) == DeviceActivation.GELU:
                        unit = max(unit, abs(x) / 16)
                    unit = max(unit, 1e-11)
                    var error = abs(
                        found[i].cast[DType.float64]() - expected
                    ) / tolerance_of(Int32(formula), exact, unit)
                    if not error <= largest:
                        largest = error
                        place = v[i]
        print(
            "formula",
            formula,
            "of slope",
            slope,
            "exact" if exact else "for 16 bits",
            "error",
            largest,
            "of what it may be, at",
            place,
        )
        if not largest <= 1:
            wrong += 1
    return wrong


def check_nan[exact: Bool](ctx: DeviceContext) raises -> Int:
    """NaN stays NaN, and stays where it is; returns how many formulas fail.

    Parameters:
        exact: Of `DeviceActivation.apply`.
    """
    var wrong = 0
    var arguments = ctx.enqueue_create_buffer[DType.float32](2)
    var values = ctx.enqueue_create_buffer[DType.float32](2)
    with arguments.map_to_host() as host:
        host[0] = Float32(0) / Float32(0)
        host[1] = 1
    for formula in range(
        Int(DeviceActivation.NONE), Int(DeviceActivation.LEAKY_RELU) + 1
    ):
        ctx.enqueue_function[activate[exact]](
            arguments,
            values,
            Int64(2),
            Int32(formula),
            Float32(1),
            grid_dim=1,
            block_dim=THREADS,
        )
        with values.map_to_host() as found:
            if found[0] == found[0] or found[1] != found[1]:
                print("formula", formula, "of NaN, 1:", found[0], found[1])
                wrong += 1
    return wrong
