"""Checks and times what the Hopper kernel fuses behind its sums.

    sm90_epilogue activations
    sm90_epilogue check PROBLEMS [CONFIGURATION...]
    sm90_epilogue time PROBLEMS [CONFIGURATION...]

`activations` compares the kernel's formulas with float64 on the host. `check`
runs every configuration (the candidates, then those of `variant`) with every
epilogue of epilogues.mojo: what is exact is compared exactly with
`Epilogue.apply` of the sums of a naive convolution, the rest within the output's
rounding; outputs are poisoned, guarded, and launched `REPEATS` times, which must
agree bit by bit. `time` replays graphs of launches: bare, and with bias, SiLU and
a residual. PROBLEMS as in sm90.mojo; without configurations `time` takes the one
that is chosen.
"""

from max.gpu.host import DeviceAttribute, DeviceBuffer, DeviceContext
from std.sys import argv
from std.utils import IndexList

from operations.conv.access import (
    ComputedOutput,
    MemoryOutput,
    OutputTarget,
    StoredOutput,
)
from operations.conv.epilogue import Epilogue
from operations.conv.fields import ACTIVATION_SILU
from operations.conv.memory import Reads
from operations.conv.operands import Operands, OperandTypes
from operations.conv.problem import ConvProblem
from operations.nvidia.im2col.traversal import Traversal
from operations.nvidia.device import device_of
from operations.nvidia.epilogue.params import residual_refusal
from operations.nvidia.sm90.gemm.candidates import CANDIDATES, candidate
from operations.nvidia.sm90.gemm.config import Sm90Config
from operations.nvidia.sm90.gemm.legality import problem_refusal
from operations.nvidia.sm90.gemm.plan import plan_gemm
from operations.nvidia.sm90.gemm.epilogue_config import (
    SUBTILE_FILTERS,
    EpilogueConfig,
)
from operations.nvidia.epilogue.conv_visitor import ConvVisitor
from operations.nvidia.sm90.gemm.launch import GemmOperands
from operations.nvidia.epilogue.work import FusedWork
from operations.nvidia.sm90.gemm.split_k import split_refusal
from epilogues import (
    BIAS_TYPE,
    Doubled,
    Elsewhere,
    FEATURES,
    Feature,
    differ,
    feature,
    judge,
)
from activations import check_activations, check_nan
from operations.nvidia.stream import Stream
from buffers import (
    BLOCKS,
    GUARD,
    data_of,
    elements_of,
    poison,
    put_constant,
    put_integers,
    put_random,
    reads_of,
)
from kernels import THREADS, convolve
from problems import Case, read_cases
from prepared import Prepared, whole_pieces
from timing import input_sets, time_captured

comptime VARIANTS = 10
"""Configurations beside the candidates, for what no candidate uses."""

comptime TIMED = DType.bfloat16
"""The type of timed operands."""

comptime REPEATS = 3
"""Launches of a configuration with an epilogue."""


def _variant(
    num_epi_load_stages: Int,
    num_output_stages: Int,
    *,
    reuse_c: Bool = False,
    delay_store: Bool = False,
    fragment_size: Int = 16,
    swapped: Bool = True,
    halo: Int = 0,
    whole_rows: Bool = False,
    tile_m: Int = 128,
) -> Sm90Config:
    """A configuration with an epilogue of its own."""
    return Sm90Config(
        block_tile_shape=IndexList[2](tile_m, 128),
        cluster_shape=IndexList[3](1, 1, 1),
        consumers=2,
        cooperative=True,
        swapped=swapped,
        halo=halo,
        num_act_pipeline_stages=3,
        num_filter_pipeline_stages=3,
        num_gather_stages=0,
        stationary=False,
        unaligned=False,
        epilogue=EpilogueConfig(
            output_tile_shape=IndexList[2](64, SUBTILE_FILTERS),
            num_epi_load_stages=num_epi_load_stages,
            num_output_stages=num_output_stages,
            fragment_size=fragment_size,
            reuse_c=reuse_c,
            delay_store=delay_store,
            tma_store=halo == 0,
            whole_rows=whole_rows,
        ),
    )


def configuration(index: Int) -> Sm90Config:
    """A configuration to test.

    Args:
        index: Of a candidate, or `CANDIDATES` and up to `VARIANTS` more.
    """
    if index < CANDIDATES:
        return candidate(index)
    var variant = index - CANDIDATES
    if variant == 0:
        return _variant(2, 1)
    if variant == 1:
        return _variant(3, 2, fragment_size=8)
    if variant == 2:
        return _variant(2, 2, delay_store=True)
    if variant == 3:
        return _variant(3, 2, reuse_c=True, delay_store=True)
    if variant == 4:
        return _variant(2, 1, reuse_c=True, delay_store=True, halo=8)
    if variant == 5:
        return _variant(0, 2)
    if variant == 6:
        return _variant(2, 2, reuse_c=True, swapped=False)
    if variant == 7:
        return _variant(
            2, 2, halo=8, whole_rows=True, delay_store=True, fragment_size=32
        )
    if variant == 8:
        return _variant(3, 3, reuse_c=True, tile_m=192)
    # Ping-pong hides the epilogue behind the other consumer's multiplies.
    return Sm90Config(
        block_tile_shape=IndexList[2](128, 128),
        cluster_shape=IndexList[3](2, 1, 1),
        consumers=2,
        cooperative=False,
        swapped=True,
        halo=8,
        num_act_pipeline_stages=4,
        num_filter_pipeline_stages=6,
        num_gather_stages=0,
        stationary=False,
        unaligned=False,
        epilogue=EpilogueConfig(
            output_tile_shape=IndexList[2](64, SUBTILE_FILTERS),
            num_epi_load_stages=3,
            num_output_stages=2,
            fragment_size=16,
            reuse_c=True,
            delay_store=False,
            tma_store=False,
            whole_rows=True,
        ),
    )


struct Check[dtype: DType, in_type: DType](Movable):
    """A problem's operands, filled with integers, and its sums.

    Parameters:
        dtype: Of output and residual.
        in_type: Of activation and filter.
    """

    comptime Buffer = DeviceBuffer[Self.dtype]

    var problem: ConvProblem
    var activation: DeviceBuffer[Self.in_type]
    var filter: DeviceBuffer[Self.in_type]
    var bias: DeviceBuffer[BIAS_TYPE]
    var residual: Self.Buffer
    var unread: Self.Buffer
    """A residual that no kernel may read: NaN everywhere."""
    var sums: DeviceBuffer[DType.float32]
    var found: Self.Buffer
    var before: Self.Buffer
    """The first launch's output."""
    var counts: DeviceBuffer[DType.uint32]

    def __init__(out self, ctx: DeviceContext, problem: ConvProblem) raises:
        """Fills the operands and convolves naively.

        Args:
            ctx: The device.
            problem: The convolution.
        """
        var x, w, y = elements_of(problem)
        self.problem = problem
        self.activation = ctx.enqueue_create_buffer[Self.in_type](x)
        self.filter = ctx.enqueue_create_buffer[Self.in_type](w)
        self.bias = ctx.enqueue_create_buffer[BIAS_TYPE](problem.filters)
        self.residual = ctx.enqueue_create_buffer[Self.dtype](y)
        self.unread = ctx.enqueue_create_buffer[Self.dtype](y)
        self.sums = ctx.enqueue_create_buffer[DType.float32](y)
        self.found = ctx.enqueue_create_buffer[Self.dtype](y + 2 * GUARD)
        self.before = ctx.enqueue_create_buffer[Self.dtype](y + 2 * GUARD)
        self.counts = ctx.enqueue_create_buffer[DType.uint32](2)
        put_integers(ctx, self.activation, 1, 1)
        put_integers(ctx, self.filter, 1, 2)
        put_integers(ctx, self.bias, 9, 3)
        put_integers(ctx, self.residual, 40, 4)
        put_constant(ctx, self.unread, Float32(0) / Float32(0))
        ctx.enqueue_function[convolve[Self.in_type, DType.float32]](
            self.activation,
            self.filter,
            self.sums,
            problem,
            grid_dim=BLOCKS,
            block_dim=THREADS,
        )

    def run[
        config: Sm90Config, Output: OutputTarget
    ](
        self,
        ctx: DeviceContext,
        what: Feature,
        output: Output,
        scale: Float32,
        split_k: Int,
    ) raises -> String:
        """Runs a configuration with an epilogue.

        Parameters:
            config: The configuration.
            Output: The output.

        Args:
            ctx: The device.
            what: The epilogue.
            output: The output, which writes to `found`.
            scale: What the output makes of rounded values.
            split_k: Of a tile's sum.

        Returns:
            "ok", or what is wrong.
        """
        comptime assert Output.dtype == Self.dtype
        self.counts.enqueue_fill(0)
        self.counts.create_sub_buffer[DType.uint32](1, 1).enqueue_fill(
            UInt32.MAX
        )
        var reads = what.has_residual and what.beta != 0
        var residual = self.residual if reads else self.unread
        var fused = what.epilogue[Output.dtype](
            reads_of(self.bias),
            rebind[Reads[Output.dtype]](reads_of(residual)),
        )
        var judged = rebind[Epilogue[BIAS_TYPE, Self.dtype]](fused)
        judged.has_residual = reads
        var prepared = Prepared[config](
            ctx,
            self.problem,
            GemmOperands[Self.in_type, Output](
                reads_of(self.activation),
                reads_of(self.filter),
                fused.residual,
                output,
            ),
            ConvVisitor[BIAS_TYPE].of(fused),
            split_k,
        )
        var count = len(self.found)
        for repeat in range(REPEATS):
            poison(ctx, self.found)
            prepared.launch(ctx)
            if repeat == 0:
                ctx.enqueue_function[judge[Self.dtype]](
                    self.sums,
                    self.found,
                    Int64(count - 2 * GUARD),
                    Int64(GUARD),
                    Int64(self.problem.filters),
                    judged,
                    tolerance_of[Self.dtype](what),
                    scale,
                    self.counts,
                    self.counts.create_sub_buffer[DType.uint32](1, 1),
                    grid_dim=BLOCKS,
                    block_dim=THREADS,
                )
                self.found.enqueue_copy_to(self.before)
            else:
                ctx.enqueue_function[differ[Self.dtype]](
                    self.before,
                    self.found,
                    Int64(count),
                    self.counts,
                    self.counts.create_sub_buffer[DType.uint32](1, 1),
                    grid_dim=BLOCKS,
                    block_dim=THREADS,
                )
        with self.counts.map_to_host() as counts:
            if counts[0] == 0:
                return "ok"
            var pixel, filter = divmod(
                Int(counts[1]) - GUARD, self.problem.filters
            )
            return String(
                t"WRONG: {counts[0]} elements, the first of pixel {pixel},"
                t" filter {filter}"
            )


def tolerance_of[dtype: DType](what: Feature) -> Float32:
    """What a value may be off: half of the last place of its type, what
    `conv.activations` allows itself (4e-6), and the reference's own error in
    float32, of which the GPU's `tanh` has 2^-11 (tanh.approx, PTX ISA)."""
    if what.exact:
        return 0
    comptime if dtype == DType.bfloat16:
        return 1.0 / 256 + 1e-5
    comptime if dtype == DType.float16:
        return 1.0 / 2048 + 1.0 / 2048
    return 1.0 / 2048


def selected(index: Int) raises -> Bool:
    """Whether the command line asks for a configuration."""
    var words = argv()
    if len(words) <= 3:
        return True
    for i in range(3, len(words)):
        if Int(String(words[i])) == index:
            return True
    return False


def check_types[
    dtype: DType, in_type: DType, stride: Int
](ctx: DeviceContext, named: Case) raises -> Int:
    """Checks a problem on every `stride`-th configuration, and returns how
    many results are wrong."""
    var wrong = 0
    var check = Check[dtype, in_type](ctx, named.problem)
    var traversal = Traversal(named.problem, in_type)
    comptime for index in range(0, CANDIDATES + VARIANTS, stride):
        comptime config = configuration(index)
        comptime whole = whole_pieces[
            in_type, MemoryOutput[dtype], ConvVisitor[BIAS_TYPE], config
        ]()
        if selected(index) and not problem_refusal(
            config, traversal, dtype, whole_pieces=whole
        ):
            var output = MemoryOutput(data_of(check.found, GUARD))
            var ran = 0
            for i in range(FEATURES):
                var what = feature(i)
                if what.has_residual and residual_refusal(
                    config.epilogue.num_epi_load_stages
                ):
                    continue
                for split_k in range(1, 3):
                    if split_k > 1 and (
                        i % 4 != 3 or split_refusal(config, traversal, split_k)
                    ):
                        continue
                    var result = check.run[config](
                        ctx, what, output, 1, split_k
                    )
                    ran += 1
                    if result != "ok":
                        print(
                            named.name, dtype, index, what.name, split_k, result
                        )
                        wrong += 1
            print(named.name, dtype, index, ran, "epilogues")
    return wrong


def check_fused[dtype: DType](ctx: DeviceContext, named: Case) raises -> Int:
    """Checks outputs that the graph compiler fused something behind."""
    var wrong = 0
    var p = named.problem
    if p.output[0] != 1:
        return 0
    var check = Check[dtype, dtype](ctx, p)
    var shape = IndexList[4](p.batch, p.output[1], p.output[2], p.filters)
    var found = data_of(check.found, GUARD)
    var computed = ComputedOutput[dtype, 4, Doubled](found, Doubled(shape))
    var stored = StoredOutput[dtype, 4, Elsewhere[dtype]](
        data_of(check.before, GUARD), Elsewhere[dtype](shape, found)
    )
    var traversal = Traversal(p, dtype)
    comptime for index in [0, 1, 6, 8, CANDIDATES + 1, CANDIDATES + 3]:
        comptime config = configuration(index)
        if selected(index) and not problem_refusal(config, traversal, dtype):
            for i in range(7):
                var what = feature(i)
                var result = check.run[config](ctx, what, computed, 2, 1)
                if result != "ok":
                    print(named.name, index, what.name, "computed", result)
                    wrong += 1
                result = check.run[config](ctx, what, stored, 2, 1)
                if result != "ok":
                    print(named.name, index, what.name, "stored", result)
                    wrong += 1
            print(named.name, dtype, index, "fused outputs")
    return wrong


def time_of[
    index: Int
](ctx: DeviceContext, problem: ConvProblem, what: Feature) raises -> Float64:
    """The time of a launch with an epilogue, in milliseconds: the median of
    graph replays, input sets rotated.

    Parameters:
        index: Of the configuration.

    Args:
        ctx: The device.
        problem: The convolution.
        what: The epilogue.
    """
    comptime Launch = Prepared[
        in_type=TIMED,
        Output=MemoryOutput[TIMED],
        Visitor=ConvVisitor[BIAS_TYPE],
        configuration(index),
    ]
    var x, w, y = elements_of(problem)
    var sets = input_sets(2 * (x + w + 2 * y))
    var sizes: List[Int] = [x, w, y, problem.filters, y]
    var buffers = List[DeviceBuffer[TIMED]]()
    var launches = List[Launch]()
    for i in range(sets):
        for j in range(len(sizes)):
            var buffer = ctx.enqueue_create_buffer[TIMED](sizes[j])
            put_random(ctx, buffer, 2 * i + 1001 * j)
            buffers.append(buffer)
        var first = len(sizes) * i
        var fused = what.epilogue[TIMED](
            data_of(buffers[first + 3]), data_of(buffers[first + 2])
        )
        launches.append(
            Launch(
                ctx,
                problem,
                GemmOperands[TIMED, MemoryOutput[TIMED]](
                    reads_of(buffers[first]),
                    reads_of(buffers[first + 1]),
                    fused.residual,
                    MemoryOutput(data_of(buffers[first + 4])),
                ),
                ConvVisitor[BIAS_TYPE].of(fused),
            )
        )

    def enqueue(mut stream: Stream, index: Int) raises {imm}:
        launches[index % sets].enqueue(stream)

    var ms = time_captured(ctx, enqueue)
    _ = buffers^
    return ms


def time_case(ctx: DeviceContext, named: Case) raises:
    """Times a problem: bare, with bias and ReLU, and with bias, SiLU and a
    residual; on what is chosen bare, and on what is chosen with all of it."""
    var device = device_of(ctx)
    var work = Operands.bare(OperandTypes.unfused(TIMED, TIMED))
    var choice = plan_gemm(named.problem, work, device).candidate
    work.bias = True
    work.residual = True
    work.activation = ACTIVATION_SILU
    var fused = plan_gemm(named.problem, work, device).candidate
    var bare = feature(0)
    var relu = feature(2)
    relu.has_bias = True
    var silu = feature(3)
    silu.has_bias = True
    silu.activation = feature(7).activation
    comptime for index in range(CANDIDATES + VARIANTS):
        var asked = len(argv()) > 3 and selected(index)
        var chosen = choice == index or fused == index
        comptime whole = whole_pieces[
            TIMED,
            MemoryOutput[TIMED],
            ConvVisitor[BIAS_TYPE],
            configuration(index),
        ]()
        if (asked or chosen) and not problem_refusal(
            configuration(index),
            Traversal(named.problem, TIMED),
            TIMED,
            whole_pieces=whole,
        ):
            var one = time_of[index](ctx, named.problem, bare)
            var two = time_of[index](ctx, named.problem, relu)
            var three = time_of[index](ctx, named.problem, silu)
            print(
                named.name,
                index,
                round(one * 1e4) / 1e4,
                round(two * 1e4) / 1e4,
                round(three * 1e4) / 1e4,
                "ratio",
                round(three / one * 1e3) / 1e3,
                configuration(index),
                "| chosen bare" if choice == index else "",
                "| chosen fused" if fused == index else "",
            )


def main() raises:
    var mode = String(argv()[1])
    var ctx = DeviceContext()
    var wrong = 0
    comptime for index in range(CANDIDATES + VARIANTS):
        var refusal = configuration(index).refusal()
        if refusal:
            raise Error(t"configuration {index}: {refusal.value()}")
    if mode == "activations":
        wrong = check_activations[True](ctx) + check_nan[True](ctx)
        wrong += check_activations[False](ctx) + check_nan[False](ctx)
    else:
        for named in read_cases(String(argv()[2])):
            if mode == "time":
                time_case(ctx, named)
                continue
            wrong += check_types[DType.bfloat16, DType.bfloat16, 1](ctx, named)
            wrong += check_types[DType.float16, DType.float16, 4](ctx, named)
            wrong += check_types[DType.float32, DType.bfloat16, 4](ctx, named)
            wrong += check_fused[DType.bfloat16](ctx, named)
    if wrong > 0:
        raise Error(t"{wrong} wrong")
    print("END")
