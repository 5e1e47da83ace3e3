"""Runs every CPU kernel on problems read from standard input and compares each
output element, exactly, with sums of integers.

Ends each problem with a line `DONE name wrong`, the number of wrong runs. The
input is that of cases.mojo; a clamp is between `LOW` and `HIGH`. Activations and
filters are small integers, so that every product and sum is exact in float32, whatever
order a kernel adds in; only the rounding to the output's type is left, and
that is the same for both sides. Outputs are poisoned and lie between guards.
"""

from cases import (
    ACTIVATION_MODULUS,
    FILTER_MODULUS,
    GUARD,
    Case,
    expected_sum,
    fill,
    parse,
    pattern,
    poison,
)
from std.math import isnan
from std.sys.info import size_of
from std.utils.numerics import inf, nan

from operations.conv.access import MemoryActivation, MemoryOutput
from operations.conv.epilogue import Activation, Epilogue
from operations.conv.fields import (
    ACTIVATION_CLAMP,
    ACTIVATION_NONE,
    ACTIVATION_RELU,
    KERNEL_AMX,
    KERNEL_AVX512_BF16,
    KERNEL_IMPLICIT_GEMM,
    KERNEL_REFERENCE,
    KERNEL_WINOGRAD,
    LAYOUT_PACKED,
)
from operations.conv.known import UNKNOWN_FILTER
from operations.conv.memory import CACHE_LINE, HostBuffer, Writes
from operations.conv.operands import Arguments, Device, Operands, OperandTypes
from operations.conv.problem import SPATIAL, ConvProblem
from operations.conv.kernel import kernel_name
from operations.conv.registry import ALL_KERNELS
from operations.cpu.convolve import convolve
from operations.cpu.dot.amx import Amx
from operations.cpu.dot.arm import MatrixUnit
from operations.cpu.dot.block_diagonal import multiplied_problem
from operations.cpu.dot.candidates import Cuts as DotCuts
from operations.cpu.dot.launch import DotPlan, DotProduct
from operations.cpu.dot.mma import DotUnit
from operations.cpu.dot.vectors import Avx512Bf16
from operations.cpu.gemm.launch import ImplicitGemm
from operations.cpu.packing import pack_filter
from operations.cpu.pool import Counter, CpuContext, MaxPool
from operations.cpu.registry import CPU_REGISTRY
from operations.cpu.winograd.candidates import Cuts
from operations.cpu.winograd.launch import Winograd
from operations.cpu.winograd.scheduler import WinogradPlan

comptime POISON = 777.0
"""Not a value that any check expects, in any type."""

comptime LOW = -6
comptime HIGH = 25


def expected_value(
    spec: Case, scaled: Bool, row: Int, filter: Int, exact: Int
) -> Float32:
    """What the epilogue makes of an exact sum."""
    var value = exact
    if scaled:
        value *= pattern(filter, 4)
    if spec.has_bias:
        value += pattern(filter, 5)
    if spec.activation == ACTIVATION_RELU:
        value = max(value, 0)
    if spec.activation == ACTIVATION_CLAMP:
        value = min(max(value, LOW), HIGH)
    if spec.has_residual:
        value += 2 * pattern(row * spec.problem.filters + filter, 11)
        if spec.activation == ACTIVATION_CLAMP:
            value = min(max(value, LOW), HIGH)
    return Float32(value)


def check[
    in_type: DType, out_type: DType, scaled: Bool
](spec: Case, exact: List[Int], mut pool: MaxPool) raises -> Int:
    """Runs all kernels that take the case, each twice: with the filter as it
    is, and packed, with the plan that is then kept.

    Returns:
        How many runs were wrong.
    """
    var p = spec.problem
    var x_count = p.batch * p.channels
    for axis in range(SPATIAL):
        x_count *= p.input[axis]
    var count = p.gemm_m() * p.filters
    var x = HostBuffer[in_type](x_count)
    var raw = HostBuffer[in_type](p.filters * p.gemm_k())
    var packed = HostBuffer[in_type](p.packed_length(in_type))
    var scale = HostBuffer[DType.float32](p.filters)
    var bias = HostBuffer[in_type](p.filters)
    var residual = HostBuffer[out_type](count)
    var memory = HostBuffer[out_type](count + 2 * GUARD)
    fill(x.elements, x_count, ACTIVATION_MODULUS)
    fill(raw.elements, p.filters * p.gemm_k(), FILTER_MODULUS)
    fill(scale.elements, p.filters, 4)
    fill(bias.elements, p.filters, 5)
    fill(residual.elements, count, 11)
    pack_filter(pool, p, spec.layout, raw.elements.as_imm(), packed.elements)
    var activation = Activation(spec.activation, Float32(LOW), Float32(HIGH))
    var ends_clamped = spec.has_residual and spec.activation == ACTIVATION_CLAMP
    var epilogue = Epilogue[in_type, out_type](
        has_bias=spec.has_bias,
        has_residual=spec.has_residual,
        has_scale=scaled,
        scale=scale.elements.as_imm(),
        bias=bias.elements.as_imm(),
        residual=residual.elements.as_imm(),
        beta=2.0,
        activation=activation,
        final_activation=activation if ends_clamped else Activation(
            ACTIVATION_NONE, 0, 0
        ),
    )
    var out = memory.elements.unsafe_offset(GUARD)
    var arguments = Arguments(
        MemoryActivation(x.elements.as_imm()),
        raw.elements.as_imm(),
        epilogue,
        MemoryOutput(out),
    )
    comptime types = type_of(arguments).types(scaled)
    var operands = arguments.operands(exact=True)
    var device = Device(0, pool.threads())
    var wrong = 0
    for kernel in CPU_REGISTRY.codes():
        if CPU_REGISTRY.refusal[types](kernel, p, operands, device):
            continue
        for layout in [spec.layout, LAYOUT_PACKED]:
            arguments.filter = (
                packed.elements if layout == LAYOUT_PACKED else raw.elements
            ).as_imm()
            poison(memory.elements, count, POISON)
            convolve[ALL_KERNELS, scaled](
                pool, p, arguments, layout=layout, requested=kernel
            )
            wrong += Int(not is_right(spec, scaled, exact, kernel, out))
        comptime if in_type == DType.float32 and not scaled:
            if kernel == KERNEL_WINOGRAD:
                wrong += check_cuts(spec, exact, arguments, memory, pool)
        comptime if in_type == DType.bfloat16 and not scaled:
            comptime if not Amx.build_refusal():
                if kernel == KERNEL_AMX:
                    wrong += check_dot_cuts[Amx](
                        spec, exact, arguments, memory, pool
                    )
            comptime if not Avx512Bf16.build_refusal():
                if kernel == KERNEL_AVX512_BF16:
                    wrong += check_dot_cuts[Avx512Bf16](
                        spec, exact, arguments, memory, pool
                    )
            if kernel == KERNEL_IMPLICIT_GEMM:
                wrong += check_dot_cuts[MatrixUnit[emulated=True]](
                    spec, exact, arguments, memory, pool
                )
        print(t"RAN {spec.name} {kernel_name(kernel)} {in_type}")
    wrong += check_infinities(spec, x, arguments, memory, pool)
    _ = x^
    _ = raw^
    _ = packed^
    _ = scale^
    _ = bias^
    _ = residual^
    _ = memory^
    return wrong


def check_cuts(
    spec: Case,
    exact: List[Int],
    arguments: Arguments,
    memory: HostBuffer[type_of(arguments).Output.dtype],
    mut pool: MaxPool,
) raises -> Int:
    """Runs the Winograd kernel with every cut that some number of threads may
    choose from.

    Returns:
        How many runs were wrong.
    """
    comptime dtype = type_of(arguments).Source.dtype
    var p = spec.problem
    var wrong = 0
    if not p.has_outputs():
        return 0
    for threads in [1, 3, 16]:
        var cuts = Cuts(p, dtype, threads)
        for index in range(cuts.count()):
            poison(memory.elements, p.gemm_m() * p.filters, POISON)
            Winograd[MaxPool].launch[known=UNKNOWN_FILTER, scaled=False](
                WinogradPlan(p, dtype, cuts.table[index], threads),
                p,
                arguments,
                pool,
            )
            wrong += Int(
                not is_right(
                    spec,
                    False,
                    exact,
                    KERNEL_WINOGRAD,
                    memory.elements.unsafe_offset(GUARD),
                )
            )
    return wrong


def check_dot_cuts[
    U: DotUnit
](
    spec: Case,
    exact: List[Int],
    arguments: Arguments,
    memory: HostBuffer[type_of(arguments).Output.dtype],
    mut pool: MaxPool,
) raises -> Int:
    """Runs a kernel of dot products with cuts of every access, some of those
    that some number of threads may choose from.

    Returns:
        How many runs were wrong.
    """
    comptime types = type_of(arguments).types(False)
    var p = spec.problem
    var wrong = 0
    if not p.has_outputs():
        return 0
    for threads in [1, 3, 16]:
        var cuts = DotCuts[U](
            multiplied_problem[U](p, types.input), types, threads
        )
        # Another remainder for each problem.
        var step = cuts.count() // 8 + 1
        for index in range(spec.seed() % step, cuts.count(), step):
            poison(memory.elements, p.gemm_m() * p.filters, POISON)
            DotProduct[MaxPool, U].launch[known=UNKNOWN_FILTER, scaled=False](
                DotPlan.of_blocking[U](p, types, cuts.table[index], threads),
                p,
                arguments,
                pool,
            )
            wrong += Int(
                not is_right(
                    spec,
                    False,
                    exact,
                    U.kernel,
                    memory.elements.unsafe_offset(GUARD),
                )
            )
    return wrong


def check_infinities[
    in_type: DType
](
    spec: Case,
    x: HostBuffer[in_type],
    arguments: Arguments,
    memory: HostBuffer[type_of(arguments).Output.dtype],
    mut pool: MaxPool,
) raises -> Int:
    """Runs all kernels with some activations that are infinite or NaN, and
    compares with the reference. Winograd's transforms spread them.

    Returns:
        How many runs were wrong.
    """
    comptime types = type_of(arguments).types(False)
    comptime out_type = type_of(arguments).Output.dtype
    comptime scaled = False
    var p = spec.problem
    var x_count = p.batch * p.channels * p.input[0] * p.input[1] * p.input[2]
    var count = p.gemm_m() * p.filters
    if arguments.epilogue.has_scale or count == 0:
        return 0
    for i in range(x_count):
        if i % 211 == 5:
            x.elements[unsafe_offset=i] = inf[in_type]()
        if i % 509 == 7:
            x.elements[unsafe_offset=i] = nan[in_type]()
    var operands = arguments.operands(exact=True)
    var device = Device(0, pool.threads())
    var expected = HostBuffer[out_type](count)
    var out = memory.elements.unsafe_offset(GUARD)
    var wrong = 0
    convolve[ALL_KERNELS, scaled](
        pool, p, arguments, layout=LAYOUT_PACKED, requested=KERNEL_REFERENCE
    )
    for i in range(count):
        expected.elements[unsafe_offset=i] = out[unsafe_offset=i]
    for kernel in CPU_REGISTRY.codes():
        if kernel == KERNEL_WINOGRAD or CPU_REGISTRY.refusal[types](
            kernel, p, operands, device
        ):
            continue
        poison(memory.elements, count, POISON)
        convolve[ALL_KERNELS, scaled](
            pool, p, arguments, layout=LAYOUT_PACKED, requested=kernel
        )
        for i in range(count):
            var want = expected.elements[unsafe_offset=i]
            var got = out[unsafe_offset=i]
            if got != want and not (isnan(got) and isnan(want)):
                print(
                    t"WRONG {spec.name} {kernel_name(kernel)} with infinities:"
                    t" element {i} is {got}, not {want}"
                )
                wrong += 1
                break
    _ = expected^
    return wrong


def is_right[
    out_type: DType
](
    spec: Case,
    scaled: Bool,
    exact: List[Int],
    kernel: Int,
    output: Writes[out_type],
) -> Bool:
    """Compares a kernel's output, and what lies around it, and says what is
    wrong."""
    var filters = spec.problem.filters
    var count = spec.problem.gemm_m() * filters
    var right = True
    for i in range(count):
        var want = expected_value(
            spec, scaled, i // filters, i % filters, exact[i]
        ).cast[out_type]()
        if right and output[unsafe_offset=i] != want:
            print(
                t"WRONG {spec.name} {kernel_name(kernel)} to {out_type}:"
                t" element {i} is {output[unsafe_offset=i]}, not {want}"
            )
            right = False
    for i in range(GUARD):
        for place in [-1 - i, count + i]:
            if output[unsafe_offset=place] != Scalar[out_type](POISON):
                print(
                    t"WRONG {spec.name} {kernel_name(kernel)} to {out_type}:"
                    t" wrote outside its output"
                )
                return False
    return right


def check_smallest_task() raises:
    """A problem whose sums leave L2 however it is cut is cut all the same.

    Raises:
        If its plan has no task.
    """
    comptime types = OperandTypes.unfused(DType.float32, DType.float32)
    var numbers: List[Int] = [1, 2048, 33280, 2]
    numbers += [1, 8, 8, 1, 3, 3, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 1, 1]
    var plan = ImplicitGemm[MaxPool].plan(
        ConvProblem.of_numbers(numbers),
        Operands.bare(types, exact=True),
        Device(0, 1),
    )
    if plan.schedule.tasks == 0:
        raise Error(t"no tasks: {plan}")


def check_counter() raises:
    """Checks that a counter counts, and lies two lines behind the beginning of its
    memory, and as many in front of its end."""
    var counter = Counter()
    for number in range(3):
        if counter.take() != number:
            raise Error("a counter skips a number")
    var pair = 2 * CACHE_LINE // size_of[DType.int64]()
    counter.memory.elements[unsafe_offset=pair] = 7
    if counter.take() != 7 or Counter.PAIR < pair:
        raise Error("a counter shares a pair of cache lines")
    _ = counter^


def main() raises:
    check_smallest_task()
    check_counter()
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
        var exact = List[Int]()
        for row in range(spec.problem.gemm_m()):
            for filter in range(spec.problem.filters):
                exact.append(expected_sum(spec, row, filter))
        var wrong = 0
        comptime for scaled in [False, True]:
            wrong += check[DType.float32, DType.float32, scaled](
                spec, exact, pool
            )
            wrong += check[DType.bfloat16, DType.bfloat16, scaled](
                spec, exact, pool
            )
            wrong += check[DType.float16, DType.float32, scaled](
                spec, exact, pool
            )
        print(t"DONE {spec.name} {wrong}", flush=True)
