"""Runs every CPU kernel of integers on problems read from standard input and
compares each output, exactly, with sums of 64-bit integers and the formula of
quantization.mojo.

Ends each problem with a line `DONE name wrong`, the number of wrong runs. The
input is that of cases.mojo; a clamp is between `LOW` and `HIGH`. Activations and
filters take every value of their types. Factors are powers of two, so that the
only roundings are those of the sum to float32 and of the output. Outputs are
poisoned, with another value each time, and lie between guards.
"""

from cases import (
    GUARD,
    Case,
    expected_sum,
    fill,
    parse,
    pattern,
    poison,
)
from std.utils.numerics import max_finite, min_finite

from operations.conv.access import MemoryActivation, MemoryOutput
from operations.conv.epilogue import Activation, Epilogue
from operations.conv.fields import (
    ACTIVATION_CLAMP,
    ACTIVATION_NONE,
    ACTIVATION_RELU,
    KERNEL_MMLA,
    KERNEL_WIDENING,
    KERNEL_WINOGRAD,
    LAYOUT_PACKED,
)
from operations.conv.known import UNKNOWN_FILTER
from operations.conv.memory import HostBuffer, Writes
from operations.conv.operands import Arguments, Device
from operations.conv.problem import SPATIAL, ConvProblem
from operations.conv.quantization import Quantization
from operations.conv.kernel import kernel_name
from operations.conv.registry import ALL_KERNELS
from operations.conv.search import cheapest
from operations.cpu.convolve import convolve
from operations.cpu.dot.amx import Amx
from operations.cpu.dot.arm import MatrixUnit
from operations.cpu.dot.candidates import Cuts
from operations.cpu.dot.launch import DotPlan, DotProduct
from operations.cpu.dot.mma import DotUnit
from operations.cpu.dot.vectors import Avx512Vnni, AvxVnni
from operations.cpu.dot.widening import Widening
from operations.cpu.packing import pack_filter
from operations.cpu.pool import CpuContext, MaxPool
from operations.cpu.registry import CPU_REGISTRY
from operations.cpu.winograd.candidates import Cuts as WinogradCuts
from operations.cpu.winograd.launch import Winograd
from operations.cpu.winograd.scheduler import WinogradPlan

comptime LOW = -50
comptime HIGH = 60
"""Limits of a clamp."""

comptime BYTES = 256
"""The modulus of patterns that take every value of 8 bits."""

comptime RESIDUALS = 251
"""The modulus of the residual's pattern."""

comptime POISONS = [85, 42]
"""What outputs are filled with before a kernel runs, in turn: a kernel that
leaves an element is wrong with one of them."""

comptime BETA = Float32(0.5)
comptime OUTPUT_FACTOR = Float32(2.0)


def scale_of(filter: Int) -> Float32:
    """The scale of a filter: small, so that outputs are not all limits."""
    return Float32(1.0) / Float32(1 << (13 + filter % 3))


def bias_of(filter: Int) -> Float32:
    """The bias of a filter."""
    return Float32(pattern(filter, 41))


def lowest[dtype: DType]() -> Int:
    """The least integer of a type."""
    return Int(min_finite[dtype]())


struct IntegerCase[in_type: DType, out_type: DType, scaled: Bool]:
    """A case in one set of types, and its exact outputs.

    Parameters:
        in_type: Of the activation.
        out_type: Of residual and output.
        scaled: Whether filters have a scale.
    """

    var spec: Case
    var zero: Int
    """The activation's zero point."""
    var quantization: Quantization
    var residual_zero: Float32
    """The residual's."""
    var outputs: HostBuffer[Self.out_type]

    def __init__(out self, spec: Case) raises:
        """Computes the outputs from their definition."""
        self.spec = spec.copy()
        comptime low = lowest[Self.in_type]()
        # Without a zero point, with any, with the least and the largest.
        self.zero = [0, low + spec.seed() * 37 % BYTES, low, low + BYTES - 1][
            spec.seed() % 4
        ]
        var residual_zero = 0
        var output_zero = 0
        comptime if Self.out_type.is_integral():
            comptime out_low = lowest[Self.out_type]()
            residual_zero = out_low + spec.seed() * 11 % BYTES
            output_zero = out_low + spec.seed() * 29 % BYTES
        self.quantization = Quantization(
            Int32(self.zero),
            Float32(output_zero),
            OUTPUT_FACTOR if Self.out_type.is_integral() else Float32(1),
        )
        self.residual_zero = Float32(residual_zero)
        self.quantization.validate[Self.in_type, Self.out_type](
            self.residual_zero
        )
        ref p = self.spec.problem
        var count = p.gemm_m() * p.filters
        self.outputs = HostBuffer[Self.out_type](count)
        for i in range(count):
            var sum = expected_sum(
                self.spec,
                i // p.filters,
                i % p.filters,
                activations=BYTES,
                filters=BYTES,
                # What is added to the pattern goes with the zero point.
                zero=self.zero - low - BYTES // 2,
            )
            self.outputs.elements[unsafe_offset=i] = self.output(
                sum, i % p.filters, i
            )

    def residual(self, offset: Int) -> Int:
        """An element of the residual."""
        var shift = 0
        comptime if Self.out_type.is_integral():
            shift = lowest[Self.out_type]() + BYTES // 2
        return pattern(offset, RESIDUALS) + shift

    def output(
        self, sum: Int, filter: Int, offset: Int
    ) -> Scalar[Self.out_type]:
        """What the epilogue makes of an exact sum."""
        ref spec = self.spec
        var v = Float32(sum)
        comptime if Self.scaled:
            v *= scale_of(filter)
        if spec.has_bias:
            v += bias_of(filter)
        if spec.activation == ACTIVATION_RELU:
            v = max(v, 0)
        if spec.activation == ACTIVATION_CLAMP:
            v = min(max(v, LOW), HIGH)
        if spec.has_residual:
            var other = Float32(self.residual(offset))
            v += BETA * (other - self.residual_zero)
            if spec.activation == ACTIVATION_CLAMP:
                v = min(max(v, LOW), HIGH)
        comptime if Self.out_type.is_integral():
            var steps = Float64(v) * Float64(OUTPUT_FACTOR)
            var whole = Int(round(steps)) + Int(
                self.quantization.output_zero_point
            )
            comptime low = lowest[Self.out_type]()
            return Scalar[Self.out_type](min(max(whole, low), low + BYTES - 1))
        else:
            return v.cast[Self.out_type]()


def check[
    in_type: DType, out_type: DType, scaled: Bool
](spec: Case, mut pool: MaxPool) raises -> Int:
    """Runs all kernels that take the case, each twice: with the filter as it
    is, and packed, with the plan that is then kept.

    Returns:
        How many runs were wrong.
    """
    var expected = IntegerCase[in_type, out_type, scaled](spec)
    var p = spec.problem
    var x_count = p.batch * p.channels
    for axis in range(SPATIAL):
        x_count *= p.input[axis]
    var count = p.gemm_m() * p.filters
    var x = HostBuffer[in_type](x_count)
    var raw = HostBuffer[DType.int8](p.filters * p.gemm_k())
    var packed = HostBuffer[DType.int8](p.packed_length(DType.int8))
    var scale = HostBuffer[DType.float32](p.filters)
    var bias = HostBuffer[DType.float32](p.filters)
    var residual = HostBuffer[out_type](count)
    var memory = HostBuffer[out_type](count + 2 * GUARD)
    fill(x.elements, x_count, BYTES, lowest[in_type]() + BYTES // 2)
    fill(raw.elements, p.filters * p.gemm_k(), BYTES)
    pack_filter(pool, p, spec.layout, raw.elements.as_imm(), packed.elements)
    for i in range(p.filters):
        scale.elements[unsafe_offset=i] = scale_of(i)
        bias.elements[unsafe_offset=i] = bias_of(i)
    for i in range(count):
        residual.elements[unsafe_offset=i] = Scalar[out_type](
            expected.residual(i)
        )
    var activation = Activation(spec.activation, Float32(LOW), Float32(HIGH))
    var ends_clamped = spec.has_residual and spec.activation == ACTIVATION_CLAMP
    var out = memory.elements.unsafe_offset(GUARD)
    var arguments = Arguments(
        MemoryActivation(x.elements.as_imm()),
        raw.elements.as_imm().unsafe_bitcast[Scalar[in_type]](),
        Epilogue[DType.float32, out_type](
            has_bias=spec.has_bias,
            has_residual=spec.has_residual,
            has_scale=scaled,
            scale=scale.elements.as_imm(),
            bias=bias.elements.as_imm(),
            residual=residual.elements.as_imm(),
            beta=BETA,
            activation=activation,
            final_activation=activation if ends_clamped else Activation(
                ACTIVATION_NONE, 0, 0
            ),
            residual_zero_point=expected.residual_zero,
        ),
        MemoryOutput(out),
        expected.quantization,
    )
    comptime types = type_of(arguments).types(scaled)
    var operands = arguments.operands(exact=True)
    var device = Device(0, pool.threads())
    var wrong = 0
    for kernel in CPU_REGISTRY.codes():
        if CPU_REGISTRY.refusal[types](kernel, p, operands, device):
            continue
        for turn in range(2):
            var layout = spec.layout if turn == 0 else LAYOUT_PACKED
            var filter = raw.elements if turn == 0 else packed.elements
            arguments.filter = filter.as_imm().unsafe_bitcast[Scalar[in_type]]()
            var value = Scalar[out_type](materialize[POISONS]()[turn])
            poison(memory.elements, count, value)
            convolve[ALL_KERNELS, scaled](
                pool, p, arguments, layout=layout, requested=kernel
            )
            wrong += Int(not is_right(expected, kernel, out, value))
        comptime if in_type == out_type:
            wrong += check_cuts[Amx, scaled](
                kernel, expected, arguments, memory, pool
            )
            wrong += check_cuts[Avx512Vnni, scaled](
                kernel, expected, arguments, memory, pool
            )
            wrong += check_cuts[AvxVnni, scaled](
                kernel, expected, arguments, memory, pool
            )
            wrong += check_cuts[Widening, scaled](
                kernel, expected, arguments, memory, pool
            )
            if kernel == KERNEL_WINOGRAD:
                wrong += check_winograd_cuts[scaled](
                    expected, arguments, memory, pool
                )
            if kernel == KERNEL_WIDENING:
                wrong += check_cuts[MatrixUnit[emulated=True], scaled](
                    KERNEL_MMLA, expected, arguments, memory, pool
                )
        print(t"RAN {spec.name} {kernel_name(kernel)} {in_type}")
    _ = x^
    _ = raw^
    _ = packed^
    _ = scale^
    _ = bias^
    _ = residual^
    _ = memory^
    return wrong


def check_cuts[
    U: DotUnit, scaled: Bool
](
    kernel: Int,
    expected: IntegerCase,
    arguments: Arguments,
    memory: HostBuffer[expected.out_type],
    mut pool: MaxPool,
) raises -> Int:
    """Runs a kernel of dot products with cuts of every access, some of those
    that some number of threads may choose from.

    Returns:
        How many runs were wrong.
    """
    comptime types = type_of(arguments).types(scaled)
    var p = expected.spec.problem
    var wrong = 0
    comptime if not U.build_refusal():
        if kernel != U.kernel or not p.has_outputs():
            return 0
        for threads in [1, 3, 16]:
            var cuts = Cuts[U](p, types, threads)
            # Another remainder for each problem.
            var step = cuts.count() // 8 + 1
            for index in range(expected.spec.seed() % step, cuts.count(), step):
                var value = Scalar[expected.out_type](
                    materialize[POISONS]()[index % 2]
                )
                poison(memory.elements, p.gemm_m() * p.filters, value)
                DotProduct[MaxPool, U].launch[
                    known=UNKNOWN_FILTER, scaled=scaled
                ](
                    DotPlan.of_blocking[U](
                        p, types, cuts.table[index], threads
                    ),
                    p,
                    arguments,
                    pool,
                )
                wrong += Int(
                    not is_right(
                        expected,
                        kernel,
                        memory.elements.unsafe_offset(GUARD),
                        value,
                    )
                )
    return wrong


def check_winograd_cuts[
    scaled: Bool
](
    expected: IntegerCase,
    arguments: Arguments,
    memory: HostBuffer[expected.out_type],
    mut pool: MaxPool,
) raises -> Int:
    """Runs the Winograd kernel with every cut that some number of threads may
    choose from.

    Returns:
        How many runs were wrong.
    """
    var p = expected.spec.problem
    var wrong = 0
    if not p.has_outputs():
        return 0
    for threads in [1, 3, 16]:
        var cuts = WinogradCuts(p, expected.in_type, threads)
        if cheapest(cuts).index < 0:
            print("winograd: no cut is legal for", threads, "threads")
            wrong += 1
        for index in range(cuts.count()):
            var value = Scalar[expected.out_type](
                materialize[POISONS]()[index % 2]
            )
            poison(memory.elements, p.gemm_m() * p.filters, value)
            Winograd[MaxPool].launch[known=UNKNOWN_FILTER, scaled=scaled](
                WinogradPlan(p, expected.in_type, cuts.table[index], threads),
                p,
                arguments,
                pool,
            )
            wrong += Int(
                not is_right(
                    expected,
                    KERNEL_WINOGRAD,
                    memory.elements.unsafe_offset(GUARD),
                    value,
                )
            )
    return wrong


def check_extremes(spec: Case, mut pool: MaxPool) raises -> Int:
    """Runs all kernels on the largest products of one sign: no sum wraps that an
    output is made of.

    Args:
        spec: A problem without padding.
        pool: The threads.

    Returns:
        How many runs were wrong.
    """
    ref p = spec.problem
    var count = p.gemm_m() * p.filters
    var x_count = p.batch * p.input[1] * p.input[2] * p.channels
    var x = HostBuffer[DType.uint8](x_count)
    var raw = HostBuffer[DType.int8](p.filters * p.gemm_k())
    var out = HostBuffer[DType.float32](count)
    for i in range(p.filters * p.gemm_k()):
        raw.elements[unsafe_offset=i] = -128
    var wrong = 0
    for zero in [0, 255]:
        for i in range(x_count):
            x.elements[unsafe_offset=i] = UInt8(255 - zero)
        var arguments = Arguments(
            MemoryActivation(x.elements.as_imm()),
            raw.elements.as_imm().unsafe_bitcast[UInt8](),
            Epilogue[DType.float32, DType.float32].identity(),
            MemoryOutput(out.elements),
            Quantization(Int32(zero), 0, 1),
        )
        comptime types = type_of(arguments).types(False)
        var operands = arguments.operands(exact=True)
        var want = Float32(p.gemm_k() * -128 * (255 - 2 * zero))
        for kernel in CPU_REGISTRY.codes():
            var device = Device(0, pool.threads())
            if CPU_REGISTRY.refusal[types](kernel, p, operands, device):
                continue
            for i in range(count):
                out.elements[unsafe_offset=i] = 0.5
            convolve[ALL_KERNELS, False](
                pool, p, arguments, layout=spec.layout, requested=kernel
            )
            for i in range(count):
                if out.elements[unsafe_offset=i] != want:
                    var got = out.elements[unsafe_offset=i]
                    print(
                        t"WRONG {spec.name} {kernel_name(kernel)}: element {i}"
                        t" is {got}, not {want}"
                    )
                    wrong += 1
                    break
            print(t"RAN {spec.name} {kernel_name(kernel)} uint8")
    _ = x^
    _ = raw^
    _ = out^
    return wrong


def is_right(
    expected: IntegerCase,
    kernel: Int,
    output: Writes[expected.out_type],
    poison: Scalar[expected.out_type],
) -> Bool:
    """Compares a kernel's output, and what lies around it, and says what is
    wrong."""
    ref p = expected.spec.problem
    var count = p.gemm_m() * p.filters
    for i in range(count):
        var want = expected.outputs.elements[unsafe_offset=i]
        if output[unsafe_offset=i] != want:
            print(
                t"WRONG {expected.spec.name} {kernel_name(kernel)} of"
                t" {expected.in_type} to {expected.out_type}: element {i} is"
                t" {output[unsafe_offset=i]}, not {want}"
            )
            return False
    for i in range(GUARD):
        for place in [-1 - i, count + i]:
            if output[unsafe_offset=place] != poison:
                print(
                    t"WRONG {expected.spec.name} {kernel_name(kernel)} to"
                    t" {expected.out_type}: wrote outside its output"
                )
                return False
    return True


def main() raises:
    var pool = MaxPool(CpuContext(api="cpu"))
    while True:
        var line: String
        try:
            line = input()
        except:
            break
        if line.byte_length() == 0:
            break
        var spec = parse(line)
        if spec.name == "extremes":
            var wrong = check_extremes(spec, pool)
            print(t"DONE {spec.name} {wrong}", flush=True)
            continue
        var wrong = check[DType.int8, DType.int8, True](spec, pool)
        wrong += check[DType.uint8, DType.uint8, True](spec, pool)
        wrong += check[DType.int8, DType.float32, False](spec, pool)
        print(t"DONE {spec.name} {wrong}", flush=True)
