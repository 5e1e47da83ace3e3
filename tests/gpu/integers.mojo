"""Checks convolutions of 8-bit integers with zero points, and outputs and residuals
of integers, on the problems of a file: every kernel that takes them, every candidate
of Hopper's implicit GEMM, each element exactly.

    integers integers_check.txt    ends with 1 if one is wrong

The file is that of problems.mojo. Activations and filters take every value of
their types. Factors are powers of two, so that the only roundings are those of
the sum to float32 and of the output. Outputs are poisoned first, and lie between
guards.
"""

from max.gpu import block_idx, grid_dim, thread_idx
from max.gpu.host import DeviceBuffer, DeviceContext
from std.math import floor
from std.sys import argv
from std.utils import IndexList
from std.utils.numerics import max_finite, min_finite

from operations.conv.access import MemoryActivation, MemoryOutput
from operations.conv.epilogue import Activation, Epilogue
from operations.conv.fields import (
    ACTIVATION_NONE,
    ACTIVATION_RELU,
    KERNEL_DEPTHWISE,
    KERNEL_GEMV,
    KERNEL_GROUPED,
    KERNEL_IMPLICIT_GEMM,
    KERNEL_REFERENCE,
    KERNEL_SM80,
    KERNEL_SM90,
    KERNEL_UNALIGNED,
)
from operations.conv.known import UNKNOWN_FILTER
from operations.conv.memory import Reads, Writes
from operations.conv.operands import Arguments
from operations.conv.problem import SPATIAL, ConvProblem
from operations.conv.quantization import Quantization, filter_dtype
from operations.conv.kernel import kernel_name
from operations.conv.search import Found
from operations.nvidia.convolve import convolve
from operations.nvidia.device import device_of
from operations.nvidia.registry import GPU_REGISTRY
from operations.nvidia.sm90.gemm.launch import GemmKernels
from operations.nvidia.sm90.gemm.plan import GemmCandidates
from operations.nvidia.stream import Stream
from operations.nvidia.summed_output import with_sums
from operations.nvidia.zero_point import (
    ZeroPointTable,
    fill_zero_point_table,
    zero_point_elements,
)
from buffers import BLOCKS, GUARD, data_of, elements_of, reads_of
from kernels import THREADS, compare
from problems import Case, read_cases

comptime KERNELS = [
    KERNEL_REFERENCE,
    KERNEL_IMPLICIT_GEMM,
    KERNEL_GROUPED,
    KERNEL_DEPTHWISE,
    KERNEL_GEMV,
    KERNEL_SM80,
]
"""Kernels that a problem is offered to, beside Hopper's."""

comptime TYPES = [
    (DType.uint8, DType.uint8),
    (DType.int8, DType.int8),
    (DType.uint8, DType.float32),
]
"""Of activations and outputs."""

comptime BETA = Float32(0.5)
comptime FACTOR = Float32(2.0)
"""Steps of an output of integers in 1."""


@fieldwise_init
struct Kind(ImplicitlyCopyable, Movable):
    """What a check has besides scale and bias."""

    var zero_point: Int
    """Counted from the least integer; -1 is none."""
    var residual: Bool


comptime KINDS = [Kind(-1, True), Kind(131, True), Kind(255, False)]


def fill_bytes(data: Writes[DType.uint8], count: Int64, seed: Int32):
    """Every value of 8 bits."""
    var first = Int(block_idx.x) * THREADS + Int(thread_idx.x)
    for i in range(first, Int(count), Int(grid_dim.x) * THREADS):
        var h = (UInt32(i) + 1) * 0x9E3779B9 ^ UInt32(seed) * 0x85EBCA6B
        h ^= h >> 15
        h *= 0xC2B2AE35
        data.unsafe_store(i, (h >> 24).cast[DType.uint8]())


def fill_factors(scale: Writes[DType.float32], bias: Writes[DType.float32]):
    """A scale a filter, a power of two, and a bias; a thread each."""
    var k = Int(block_idx.x)
    scale.unsafe_store(k, Float32(1) / Float32(1 << (11 + k % 4)))
    bias.unsafe_store(k, Float32(k * 7 % 41 - 20))


def convolve_exactly[
    in_type: DType, out_type: DType
](
    activation: Reads[in_type],
    filter: Reads[DType.int8],
    scale: Reads[DType.float32],
    bias: Reads[DType.float32],
    residual: Reads[out_type],
    output: Writes[out_type],
    problem: ConvProblem,
    zero_point: Int32,
    residual_zero_point: Float32,
    out_zero_point: Float32,
    has_residual: Int32,
):
    """The definition, an output a thread."""
    var first = Int(block_idx.x) * THREADS + Int(thread_idx.x)
    var count = problem.gemm_m() * problem.filters
    for i in range(first, count, Int(grid_dim.x) * THREADS):
        var k = i % problem.filters
        var sum = _sum(activation, filter, problem, i, Int(zero_point))
        var v = Float32(sum) * scale[unsafe_offset=k] + bias[unsafe_offset=k]
        v = max(v, 0)
        if has_residual != 0:
            var other = residual[unsafe_offset=i].cast[DType.float32]()
            v += BETA * (other - residual_zero_point)
        comptime if out_type.is_integral():
            var steps = Float64(v) * Float64(FACTOR)
            var whole = floor(steps)
            var rest = steps - whole
            if rest > 0.5 or (rest == 0.5 and Int(whole) % 2 != 0):
                whole += 1
            whole += Float64(out_zero_point)
            comptime low = min_finite[out_type]().cast[DType.float64]()
            comptime high = max_finite[out_type]().cast[DType.float64]()
            output.unsafe_store(i, min(max(whole, low), high).cast[out_type]())
        else:
            output.unsafe_store(i, v.cast[out_type]())


@always_inline
def _sum[
    in_type: DType
](
    activation: Reads[in_type],
    filter: Reads[DType.int8],
    problem: ConvProblem,
    index: Int,
    zero_point: Int,
) -> Int:
    """The sum of an output, whose padding counts as the zero point."""
    var pixel, k = divmod(index, problem.filters)
    var line, q = divmod(pixel, problem.output[2])
    var plane, p = divmod(line, problem.output[1])
    var n, z = divmod(plane, problem.output[0])
    var channels = problem.group_channels()
    var first_channel = k // problem.group_filters() * channels
    var origin = (
        IndexList[SPATIAL](z, p, q) * problem.stride - problem.pad_before
    )
    var sum = 0
    for tap in range(problem.taps()):
        var tr, s = divmod(tap, problem.filter[2])
        var t, r = divmod(tr, problem.filter[1])
        var at = origin + IndexList[SPATIAL](t, r, s) * problem.dilation
        var inside = True
        comptime for axis in range(SPATIAL):
            if at[axis] < 0 or at[axis] >= problem.input[axis]:
                inside = False
        if not inside:
            continue
        var x = (
            (n * problem.input[0] + at[0]) * problem.input[1] + at[1]
        ) * problem.input[2] + at[2]
        for c in range(channels):
            var a = Int(
                activation[
                    unsafe_offset=x * problem.channels + first_channel + c
                ]
            )
            var b = Int(
                filter[unsafe_offset=(k * problem.taps() + tap) * channels + c]
            )
            sum += (a - zero_point) * b
    return sum


def put_bytes[
    dtype: DType
](ctx: DeviceContext, buffer: DeviceBuffer[dtype], seed: Int) raises:
    """Fills a buffer of 8-bit integers."""
    ctx.enqueue_function[fill_bytes](
        data_of(buffer).unsafe_bitcast[UInt8](),
        Int64(len(buffer)),
        Int32(seed),
        grid_dim=BLOCKS,
        block_dim=THREADS,
    )


struct Check[in_type: DType, out_type: DType]:
    """A problem's operands and exact outputs on the device.

    Parameters:
        in_type: Of the activation.
        out_type: Of residual and output.
    """

    comptime filter_type = filter_dtype(Self.in_type)

    var ctx: DeviceContext
    var named: Case
    var kind: Kind
    var activation: DeviceBuffer[Self.in_type]
    var filter: DeviceBuffer[DType.int8]
    var scale: DeviceBuffer[DType.float32]
    var bias: DeviceBuffer[DType.float32]
    var residual: DeviceBuffer[Self.out_type]
    var expected: DeviceBuffer[Self.out_type]
    var output: DeviceBuffer[Self.out_type]
    var table: DeviceBuffer[DType.int32]
    var quantization: Quantization
    var residual_zero: Float32
    var wrong: Int

    def __init__(out self, ctx: DeviceContext, named: Case, kind: Kind) raises:
        """Fills the operands, and computes the outputs."""
        var x, w, y = elements_of(named.problem)
        var filters = named.problem.filters
        self.ctx = ctx
        self.named = named.copy()
        self.kind = kind
        self.activation = ctx.enqueue_create_buffer[Self.in_type](x)
        self.filter = ctx.enqueue_create_buffer[DType.int8](w)
        self.scale = ctx.enqueue_create_buffer[DType.float32](filters)
        self.bias = ctx.enqueue_create_buffer[DType.float32](filters)
        self.residual = ctx.enqueue_create_buffer[Self.out_type](y)
        self.expected = ctx.enqueue_create_buffer[Self.out_type](y + 2 * GUARD)
        self.output = ctx.enqueue_create_buffer[Self.out_type](y + 2 * GUARD)
        self.table = ctx.enqueue_create_buffer[DType.int32](
            zero_point_elements(named.problem)
        )
        var zero = 0
        if kind.zero_point >= 0:
            zero = Int(min_finite[Self.in_type]()) + kind.zero_point
        self.residual_zero = 0
        var out_zero = Float32(0)
        comptime if Self.out_type.is_integral():
            comptime low = min_finite[Self.out_type]().cast[DType.float32]()
            self.residual_zero = low + 77
            out_zero = low + 93
        self.quantization = Quantization(
            Int32(zero),
            out_zero,
            FACTOR if Self.out_type.is_integral() else Float32(1),
        )
        self.wrong = 0
        put_bytes(ctx, self.activation, 1)
        put_bytes(ctx, self.filter, 2)
        comptime if Self.out_type.is_integral():
            put_bytes(ctx, self.residual, 3)
        else:
            self.residual.enqueue_fill(3)
        ctx.enqueue_function[fill_factors](
            data_of(self.scale),
            data_of(self.bias),
            grid_dim=filters,
            block_dim=1,
        )
        self._poison(self.expected)
        ctx.enqueue_function[convolve_exactly[Self.in_type, Self.out_type]](
            reads_of(self.activation),
            reads_of(self.filter),
            reads_of(self.scale),
            reads_of(self.bias),
            reads_of(self.residual),
            data_of(self.expected, GUARD),
            named.problem,
            Int32(zero),
            self.residual_zero,
            out_zero,
            Int32(1 if kind.residual else 0),
            grid_dim=BLOCKS,
            block_dim=THREADS,
        )

    def _poison(self, buffer: DeviceBuffer[Self.out_type]) raises:
        """Fills an output."""
        buffer.enqueue_fill(85)

    def arguments(
        self,
    ) -> Arguments[
        MemoryActivation[Self.in_type],
        MemoryOutput[Self.out_type],
        DType.float32,
        Self.out_type,
    ]:
        """The operands of a call."""
        return Arguments(
            MemoryActivation[Self.in_type](reads_of(self.activation)),
            reads_of(self.filter).unsafe_bitcast[Scalar[Self.in_type]](),
            Epilogue[DType.float32, Self.out_type](
                has_bias=True,
                has_residual=self.kind.residual,
                has_scale=True,
                scale=reads_of(self.scale),
                bias=reads_of(self.bias),
                residual=reads_of(self.residual),
                beta=BETA,
                activation=Activation(ACTIVATION_RELU, 0, 0),
                final_activation=Activation(ACTIVATION_NONE, 0, 0),
                residual_zero_point=self.residual_zero,
            ),
            MemoryOutput[Self.out_type](data_of(self.output, GUARD)),
            self.quantization,
        )

    def zero_points(self, stream: Stream) raises -> ZeroPointTable:
        """What the zero point takes from the sums."""
        if self.quantization.zero_point == 0:
            return ZeroPointTable.nothing()
        return fill_zero_point_table(
            stream,
            self.named.problem,
            reads_of(self.filter),
            self.quantization.zero_point,
            data_of(self.table),
            interleaved=False,
        )

    def compare(mut self, what: String) raises:
        """Compares the output of a kernel."""
        var counts = self.ctx.enqueue_create_buffer[DType.uint32](2)
        counts.enqueue_fill(0)
        counts.create_sub_buffer[DType.uint32](1, 1).enqueue_fill(UInt32.MAX)
        self.ctx.enqueue_function[compare[Self.out_type]](
            self.expected,
            self.output,
            Int64(len(self.output)),
            counts,
            counts.create_sub_buffer[DType.uint32](1, 1),
            grid_dim=BLOCKS,
            block_dim=THREADS,
        )
        with counts.map_to_host() as found:
            if found[0] != 0:
                self.wrong += 1
                var at = Int(found[1]) - GUARD
                var pixel, filter = divmod(at, self.named.problem.filters)
                print(
                    self.named.name,
                    what,
                    Self.in_type,
                    Self.out_type,
                    self.kind.zero_point,
                    "WRONG:",
                    found[0],
                    "elements, the first of pixel",
                    pixel,
                    "filter",
                    filter,
                )

    def check[kernel: Int](mut self) raises -> Int:
        """Checks a kernel, if it takes the problem; returns how many ran."""
        ref problem = self.named.problem
        var stream = Stream(self.ctx)
        var arguments = with_sums(self.arguments(), self.zero_points(stream))
        comptime types = type_of(arguments).types(False)
        if GPU_REGISTRY.refusal[types](
            kernel,
            problem,
            arguments.operands(exact=False),
            device_of(self.ctx),
        ):
            return 0
        self._poison(self.output)
        convolve[kernels=1 << kernel, known=UNKNOWN_FILTER, scaled=False](
            stream, problem, arguments, requested=kernel, exact=False
        )
        self.compare(String(kernel_name(kernel)))
        return 1

    def check_candidates[unaligned: Bool](mut self) raises -> Int:
        """Checks every candidate of Hopper's implicit GEMM that takes the
        problem; returns how many ran."""
        comptime Kernel = GemmKernels[unaligned=unaligned]
        ref problem = self.named.problem
        var stream = Stream(self.ctx)
        var arguments = with_sums(self.arguments(), self.zero_points(stream))
        var operands = arguments.operands(exact=False)
        var device = device_of(self.ctx)
        if Kernel.refusal(problem, operands, device):
            return 0
        var table = GemmCandidates(
            problem, operands, device, unaligned=unaligned
        )
        var ran = 0
        for index in range(table.count()):
            if table.refusal(index):
                continue
            var plan = table.plan(Found(index, 0, String()))
            self._poison(self.output)
            Kernel.launch[known=UNKNOWN_FILTER, scaled=False](
                plan, problem, arguments, stream
            )
            self.compare(String(plan))
            ran += 1
        return ran


def main() raises:
    var ctx = DeviceContext()
    var ran = 0
    var wrong = 0
    for named in read_cases(String(argv()[1])):
        var before = ran
        comptime for i in range(len(TYPES)):
            comptime in_type = TYPES[i][0]
            comptime out_type = TYPES[i][1]
            comptime for j in range(len(KINDS)):
                var kind = materialize[KINDS[j]]()
                var check = Check[in_type, out_type](ctx, named, kind)
                comptime for kernel in KERNELS:
                    ran += check.check[kernel]()
                ran += check.check_candidates[False]()
                ran += check.check_candidates[True]()
                wrong += check.wrong
        print(named.name, ran - before, "checks")
    if wrong > 0:
        raise Error(t"{wrong} of {ran} checks wrong")
    print(ran, "checks, END")
