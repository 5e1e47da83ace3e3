"""Runs CPU kernels on interleaved tensors, of integers and of 16 bits, and
compares every output with its exact value.

A line of input is one of cases.mojo's and four integers: the channels of a block
of the activation, or 0 for channels last, whether its images are neighbours, and
the same of residual and output. What each kernel printed ends with a line DONE.
"""

from std.utils import IndexList
from check_integers import (
    BETA,
    BYTES,
    HIGH,
    LOW,
    POISONS,
    IntegerCase,
    bias_of,
    lowest,
    scale_of,
)
from cases import (
    ACTIVATION_MODULUS,
    FIELDS,
    FILTER_MODULUS,
    GUARD,
    Case,
    expected_sum,
    fill,
    parse,
    poison,
)

from operations.conv.access import (
    ActivationSource,
    MemoryActivation,
    MemoryOutput,
    OutputTarget,
)
from operations.conv.blocks import BlockedActivation, BlockedOutput
from operations.conv.epilogue import Activation, Epilogue
from operations.conv.fields import (
    ACTIVATION_CLAMP,
    ACTIVATION_NONE,
    ACTIVATION_RELU,
    KERNEL_MMLA,
    KERNEL_WIDENING,
    LAYOUT_PACKED,
)
from operations.conv.interleave import BlockLayout, Interleaved
from operations.conv.known import UNKNOWN_FILTER
from operations.conv.memory import HostBuffer, Writes
from operations.conv.operands import Arguments, Device
from operations.conv.problem import ConvProblem
from operations.conv.quantization import Quantization, filter_dtype
from operations.conv.kernel import kernel_name
from operations.conv.registry import ALL_KERNELS
from operations.cpu.convolve import convolve
from operations.cpu.dot.amx import Amx
from operations.cpu.dot.arm import MatrixUnit
from operations.cpu.dot.candidates import Cuts
from operations.cpu.dot.launch import DotPlan, DotProduct
from operations.cpu.dot.mma import DotUnit
from operations.cpu.dot.vectors import Avx512Bf16, Avx512Vnni, AvxVnni
from operations.cpu.dot.widening import Widening
from operations.cpu.packing import pack_filter
from operations.cpu.pool import CpuContext, MaxPool
from operations.cpu.registry import CPU_REGISTRY


@fieldwise_init
struct Layouts(ImplicitlyCopyable, Movable):
    """Those of a case."""

    var input: BlockLayout
    var output: BlockLayout


def reorder[
    dtype: DType
](
    layout: BlockLayout,
    shape: IndexList[4],
    last: Writes[dtype],
    memory: Writes[dtype],
    *,
    back: Bool,
):
    """Brings a tensor from channels last into a layout, or back, in the order of
    the memory: the address map has no part in it."""
    var channels = shape[3]
    var x = layout.x if layout.x > 0 else channels
    var extents = IndexList[5](shape[0], channels // x, shape[1], shape[2], x)
    # Where image, block, row, column and place stand, outermost first.
    var order = IndexList[5](0, 1, 2, 3, 4)
    if layout.batch_last:
        order = IndexList[5](1, 2, 3, 0, 4)
    var count = shape[0] * shape[1] * shape[2] * channels
    for i in range(count):
        var at = IndexList[5](fill=0)
        var rest = i
        for j in range(4, -1, -1):
            rest, at[order[j]] = divmod(rest, extents[order[j]])
        var pixel = (at[0] * shape[1] + at[2]) * shape[2] + at[3]
        var offset = pixel * channels + at[1] * x + at[4]
        if back:
            last[unsafe_offset=offset] = memory[unsafe_offset=i]
        else:
            memory[unsafe_offset=i] = last[unsafe_offset=offset]


struct Tensors[in_type: DType, out_type: DType]:
    """The tensors of a case, in its layouts.

    Parameters:
        in_type: Of the activation.
        out_type: Of residual and output.
    """

    var layouts: Layouts
    var input_shape: IndexList[4]
    var output_shape: IndexList[4]
    var x: HostBuffer[Self.in_type]
    var residual: HostBuffer[Self.out_type]
    var residual_zero: Float32
    """The residual's zero point."""
    var memory: HostBuffer[Self.out_type]
    """The output, with what lies around it."""
    var last: HostBuffer[Self.out_type]
    """The same with the channels last."""

    def __init__(
        out self,
        problem: ConvProblem,
        layouts: Layouts,
        x: HostBuffer[Self.in_type],
        residual: HostBuffer[Self.out_type],
        residual_zero: Float32,
    ):
        """Brings tensors with the channels last into the layouts."""
        ref p = problem
        self.layouts = layouts
        self.input_shape = {p.batch, p.input[1], p.input[2], p.channels}
        self.output_shape = {p.batch, p.output[1], p.output[2], p.filters}
        var count = p.gemm_m() * p.filters
        self.x = HostBuffer[Self.in_type](
            p.batch * p.input[1] * p.input[2] * p.channels
        )
        self.residual = HostBuffer[Self.out_type](count)
        self.residual_zero = residual_zero
        self.memory = HostBuffer[Self.out_type](count + 2 * GUARD)
        self.last = HostBuffer[Self.out_type](count + 2 * GUARD)
        reorder(
            layouts.input,
            self.input_shape,
            x.elements,
            self.x.elements,
            back=False,
        )
        reorder(
            layouts.output,
            self.output_shape,
            residual.elements,
            self.residual.elements,
            back=False,
        )

    def count(self) -> Int:
        """Outputs."""
        ref s = self.output_shape
        return s[0] * s[1] * s[2] * s[3]

    def result(self) -> Writes[Self.out_type]:
        """The output with the channels last, and what lies around it."""
        var count = self.count()
        for i in range(GUARD):
            for at in [i, GUARD + count + i]:
                self.last.elements[unsafe_offset=at] = self.memory.elements[
                    unsafe_offset=at
                ]
        reorder(
            self.layouts.output,
            self.output_shape,
            self.last.elements.unsafe_offset(GUARD),
            self.memory.elements.unsafe_offset(GUARD),
            back=True,
        )
        return self.last.elements.unsafe_offset(GUARD)


def check_integers[
    in_type: DType, out_type: DType, scaled: Bool
](spec: Case, layouts: Layouts, mut pool: MaxPool) raises -> Int:
    """Runs all kernels of integers.

    Returns:
        How many runs were wrong.
    """
    var expected = IntegerCase[in_type, out_type, scaled](spec)
    ref p = spec.problem
    var count = p.gemm_m() * p.filters
    var x = HostBuffer[in_type](p.batch * p.input[1] * p.input[2] * p.channels)
    var residual = HostBuffer[out_type](count)
    fill(
        x.elements,
        p.batch * p.input[1] * p.input[2] * p.channels,
        BYTES,
        lowest[in_type]() + BYTES // 2,
    )
    for i in range(count):
        residual.elements[unsafe_offset=i] = Scalar[out_type](
            expected.residual(i)
        )
    var tensors = Tensors(p, layouts, x, residual, expected.residual_zero)
    return check[scaled=scaled, modulus=BYTES](
        spec, tensors, expected.outputs, expected.quantization, pool
    )


def check_floats[
    in_type: DType
](spec: Case, layouts: Layouts, mut pool: MaxPool) raises -> Int:
    """Runs all kernels of 16 bits, whose sums of small integers are exact.

    Returns:
        How many runs were wrong.
    """
    ref p = spec.problem
    var count = p.gemm_m() * p.filters
    var inputs = p.batch * p.input[1] * p.input[2] * p.channels
    var x = HostBuffer[in_type](inputs)
    var residual = HostBuffer[DType.float32](count)
    var outputs = HostBuffer[DType.float32](count)
    fill(x.elements, inputs, ACTIVATION_MODULUS)
    fill(residual.elements, count, BYTES)
    for i in range(count):
        var v = Float32(expected_sum(spec, i // p.filters, i % p.filters))
        if spec.has_bias:
            v += bias_of(i % p.filters)
        v = _activated(spec.activation, v)
        if spec.has_residual:
            v += BETA * residual.elements[unsafe_offset=i]
            if spec.activation == ACTIVATION_CLAMP:
                v = _activated(spec.activation, v)
        outputs.elements[unsafe_offset=i] = v
    var tensors = Tensors(p, layouts, x, residual, 0)
    return check[scaled=False, modulus=FILTER_MODULUS](
        spec, tensors, outputs, Quantization.none(), pool
    )


def _activated(code: Int, v: Float32) -> Float32:
    """An activation of the cases."""
    if code == ACTIVATION_RELU:
        return max(v, 0)
    if code == ACTIVATION_CLAMP:
        return min(max(v, LOW), HIGH)
    return v


def map_of(layout: BlockLayout, shape: IndexList[4]) -> Interleaved[]:
    """The map of a tensor; any where the channels are last."""
    if layout.x == 0:
        return Interleaved[].of_filter(1, 1, 4)
    return Interleaved[].of_layout(layout, shape)


def check[
    in_type: DType, out_type: DType, //, scaled: Bool, modulus: Int
](
    spec: Case,
    tensors: Tensors[in_type, out_type],
    outputs: HostBuffer[out_type],
    quantization: Quantization,
    mut pool: MaxPool,
) raises -> Int:
    """Runs all kernels that take the tensors' layouts.

    Returns:
        How many runs were wrong.
    """
    ref layouts = tensors.layouts
    var x = tensors.x.elements.as_imm()
    var out = tensors.memory.elements.unsafe_offset(GUARD)

    var blocked = BlockedOutput(
        MemoryOutput(out),
        map_of(layouts.output, tensors.output_shape),
    )
    if layouts.input.x == 0:
        return check_in[scaled=scaled, modulus=modulus](
            spec,
            tensors,
            outputs,
            quantization,
            MemoryActivation(x),
            blocked,
            pool,
        )
    var source = BlockedActivation(
        x, map_of(layouts.input, tensors.input_shape)
    )
    if layouts.output.x == 0:
        return check_in[scaled=scaled, modulus=modulus](
            spec,
            tensors,
            outputs,
            quantization,
            source,
            MemoryOutput(out),
            pool,
        )
    return check_in[scaled=scaled, modulus=modulus](
        spec, tensors, outputs, quantization, source, blocked, pool
    )


def check_in[
    Source: ActivationSource,
    Output: OutputTarget,
    out_type: DType,
    //,
    scaled: Bool,
    modulus: Int,
](
    spec: Case,
    tensors: Tensors[_, out_type],
    outputs: HostBuffer[out_type],
    quantization: Quantization,
    source: Source,
    output: Output,
    mut pool: MaxPool,
) raises -> Int:
    """The same, of known types."""
    ref p = spec.problem
    comptime of_filter = filter_dtype(Source.dtype)
    var raw = HostBuffer[of_filter](p.filters * p.gemm_k())
    var packed = HostBuffer[of_filter](p.packed_length(of_filter))
    var scale = HostBuffer[DType.float32](p.filters)
    var bias = HostBuffer[DType.float32](p.filters)
    fill(raw.elements, p.filters * p.gemm_k(), modulus)
    pack_filter(pool, p, spec.layout, raw.elements.as_imm(), packed.elements)
    for i in range(p.filters):
        scale.elements[unsafe_offset=i] = scale_of(i)
        bias.elements[unsafe_offset=i] = bias_of(i)
    var activation = Activation(spec.activation, Float32(LOW), Float32(HIGH))
    var ends_clamped = spec.has_residual and spec.activation == ACTIVATION_CLAMP
    var arguments = Arguments(
        source,
        raw.elements.as_imm().unsafe_bitcast[Scalar[Source.dtype]](),
        Epilogue[DType.float32, out_type](
            has_bias=spec.has_bias,
            has_residual=spec.has_residual,
            has_scale=scaled,
            scale=scale.elements.as_imm(),
            bias=bias.elements.as_imm(),
            residual=tensors.residual.elements.as_imm(),
            beta=BETA,
            activation=activation,
            final_activation=activation if ends_clamped else Activation(
                ACTIVATION_NONE, 0, 0
            ),
            residual_zero_point=tensors.residual_zero,
        ),
        output,
        quantization,
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
            arguments.filter = filter.as_imm().unsafe_bitcast[
                Scalar[Source.dtype]
            ]()
            var value = Scalar[out_type](materialize[POISONS]()[turn])
            poison(tensors.memory.elements, tensors.count(), value)
            convolve[ALL_KERNELS, scaled](
                pool, p, arguments, layout=layout, requested=kernel
            )
            wrong += Int(not is_expected(spec, kernel, tensors, outputs, value))
        wrong += check_cuts[Amx, scaled](
            kernel, spec, arguments, tensors, outputs, pool
        )
        wrong += check_cuts[Avx512Bf16, scaled](
            kernel, spec, arguments, tensors, outputs, pool
        )
        wrong += check_cuts[Avx512Vnni, scaled](
            kernel, spec, arguments, tensors, outputs, pool
        )
        wrong += check_cuts[AvxVnni, scaled](
            kernel, spec, arguments, tensors, outputs, pool
        )
        wrong += check_cuts[Widening, scaled](
            kernel, spec, arguments, tensors, outputs, pool
        )
        # On CPUs that lack the instructions, too.
        comptime if Source.dtype.is_integral():
            if kernel == KERNEL_WIDENING:
                wrong += check_cuts[MatrixUnit[emulated=True], scaled](
                    KERNEL_MMLA, spec, arguments, tensors, outputs, pool
                )
        print(t"RAN {spec.name} {kernel_name(kernel)} {Source.dtype}")
    _ = raw^
    _ = packed^
    _ = scale^
    _ = bias^
    return wrong


def check_cuts[
    out_type: DType, //, U: DotUnit, scaled: Bool
](
    kernel: Int,
    spec: Case,
    arguments: Arguments,
    tensors: Tensors[_, out_type],
    outputs: HostBuffer[out_type],
    mut pool: MaxPool,
) raises -> Int:
    """Runs a kernel of dot products with some cuts of every access.

    Returns:
        How many runs were wrong.
    """
    comptime types = type_of(arguments).types(scaled)
    ref p = spec.problem
    var wrong = 0
    comptime if not U.build_refusal() and U.feature(types.input):
        if kernel != U.kernel or not p.has_outputs():
            return 0
        for threads in [1, 16]:
            var cuts = Cuts[U](p, types, threads)
            # Another remainder for each problem.
            var step = cuts.count() // 3 + 1
            for index in range(spec.seed() % step, cuts.count(), step):
                var value = Scalar[out_type](materialize[POISONS]()[index % 2])
                poison(tensors.memory.elements, tensors.count(), value)
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
                    not is_expected(spec, kernel, tensors, outputs, value)
                )
    return wrong


def is_expected[
    out_type: DType, //
](
    spec: Case,
    kernel: Int,
    tensors: Tensors[_, out_type],
    outputs: HostBuffer[out_type],
    poison: Scalar[out_type],
) -> Bool:
    """Compares an output, and what lies around it, and says what is wrong."""
    ref layouts = tensors.layouts
    var result = tensors.result()
    var count = tensors.count()
    for i in range(-GUARD, count + GUARD):
        var inside = 0 <= i < count
        var want = outputs.elements[unsafe_offset=i] if inside else poison
        if result[unsafe_offset=i] != want:
            print(
                t"WRONG {spec.name} {kernel_name(kernel)} from"
                t" {layouts.input.name()} to {layouts.output.name()}: element"
                t" {i} of {count} is {result[unsafe_offset=i]}, not {want}"
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
        var words = line.split()
        var numbers = String()
        for i in range(FIELDS + 1):
            numbers += String(words[i]) + " "
        var n = List[Int]()
        for i in range(FIELDS + 1, len(words)):
            n.append(Int(words[i]))
        var spec = parse(numbers)
        var layouts = Layouts(
            BlockLayout(n[0], n[1] != 0), BlockLayout(n[2], n[3] != 0)
        )
        var wrong = check_integers[DType.int8, DType.int8, True](
            spec, layouts, pool
        )
        wrong += check_integers[DType.uint8, DType.uint8, True](
            spec, layouts, pool
        )
        wrong += check_integers[DType.int8, DType.float32, False](
            spec, layouts, pool
        )
        wrong += check_floats[DType.bfloat16](spec, layouts, pool)
        wrong += check_floats[DType.float16](spec, layouts, pool)
        print(t"DONE {spec.name} {wrong}", flush=True)
