"""The registered convolutions of the interleaved layouts: operands -> problem ->
plan -> launch, as registrations.mojo has them of channels last."""

from extensibility import (
    InputTensor,
    ManagedTensorSlice,
    OutputTensor,
    _FusedComputeOutputTensor,
    register,
)
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu, is_gpu
from std.utils import IndexList

from .calls import read_call, read_geometry
from .conv.access import ActivationSource, MemoryActivation, OutputTarget
from .conv.blocks import BlockedActivation, BlockedOutput
from .conv.fields import (
    GEOMETRY_INPUT_BATCH_LAST,
    GEOMETRY_OUTPUT_BATCH_LAST,
    INTERLEAVED,
    OP_CONV_INTERLEAVED_CPU,
    OP_CONV_INTERLEAVED_GPU,
    OP_CONV_INTERLEAVED_UNFUSED_CPU,
    OP_CONV_INTERLEAVED_UNFUSED_GPU,
)
from .conv.interleave import (
    BLOCKED_RANK,
    BlockLayout,
    Interleaved,
    block_refusal,
)
from .conv.known import ANY_KERNEL, UNKNOWN, UNKNOWN_FEATURES, KnownProblem
from .conv.memory import Reads, operand
from .cpu.convolve import Cpu
from .nvidia.convolve import Gpu
from .outputs import target_of

comptime TENSOR_RANK = BLOCKED_RANK
"""Of `[N, C / x, H, W, x]`."""


@fieldwise_init
struct Placed(ImplicitlyCopyable, Movable):
    """The layout of an op's tensor, and its shape with the channels last."""

    var layout: BlockLayout
    var shape: IndexList[4]

    @staticmethod
    def of[
        rank: Int
    ](
        name: StaticString, shape: IndexList[rank], batch_last: Bool
    ) raises -> Self:
        """Reads them off a tensor.

        Parameters:
            rank: Of the tensor: 4 has the channels last.

        Args:
            name: The tensor's, for messages.
            shape: Its shape.
            batch_last: Whether images are the last but one.

        Raises:
            If there are no such blocks.
        """
        comptime if rank == TENSOR_RANK:
            var whole = rebind[IndexList[TENSOR_RANK]](shape)
            var layout = BlockLayout(whole[4], batch_last)
            var refusal = block_refusal(name, layout)
            if refusal:
                raise Error(refusal.value())
            return Placed(layout, layout.channels_last_shape(name, whole))
        else:
            return Placed(BlockLayout(0, False), rebind[IndexList[4]](shape))

    def map(self) -> Interleaved[]:
        """The address map of an interleaved tensor."""
        return Interleaved[].of_layout(self.layout, self.shape)


def convolve_blocks[
    scaled: Bool, kernel: Int, features: Int
](
    output: ManagedTensorSlice[mut=True, ...],
    x: ManagedTensorSlice,
    filter: ManagedTensorSlice,
    bias: ManagedTensorSlice,
    residual: ManagedTensorSlice,
    scale: ManagedTensorSlice[dtype=DType.float32, ...],
    geometry: ManagedTensorSlice[dtype=DType.int64, ...],
    scalars: ManagedTensorSlice[dtype=DType.float32, ...],
    ctx: DeviceContext,
) raises:
    """Decodes and checks the operands of an op on a CPU, and runs the
    convolution.

    Parameters:
        scaled: As `ConvInterleavedCpu.execute` has it, like all that follow.
        kernel: The same.
        features: The same.

    Args:
        output: The same.
        x: The same.
        filter: The same.
        bias: The same.
        residual: The same.
        scale: The same.
        geometry: The same.
        scalars: The same.
        ctx: The device.

    Raises:
        Naming the argument, its value and what is allowed.
    """
    comptime assert TENSOR_RANK in (x.rank, output.rank)
    var decoded = read_geometry(geometry)
    var placed = Placed.of(
        "input", x.shape(), decoded[GEOMETRY_INPUT_BATCH_LAST] != 0
    )
    var out_placed = Placed.of(
        "output", output.shape(), decoded[GEOMETRY_OUTPUT_BATCH_LAST] != 0
    )
    var call = read_call[scaled](
        decoded,
        placed.shape,
        out_placed.shape,
        output,
        x,
        filter,
        bias,
        residual,
        scale,
        scalars,
    )
    if call.problem.groups != 1:
        raise Error(
            t"groups: {call.problem.groups} is not supported from"
            t" {placed.layout.name()} to {out_placed.layout.name()}; 1 is"
            t" allowed"
        )

    comptime known = KnownProblem(
        kernel,
        False,
        1,
        UNKNOWN,
        UNKNOWN,
        UNKNOWN,
        UNKNOWN,
        features=features,
    )

    def run[
        Source: ActivationSource, Output: OutputTarget
    ](activation: Source, target: Output) raises {imm}:
        Cpu.convolve[known, scaled](
            call.problem,
            call.arguments(
                activation,
                rebind[Reads[Source.dtype]](
                    operand(filter).unsafe_bitcast[Scalar[Source.dtype]]()
                ),
                target,
            ),
            call.geometry,
            ctx,
        )

    comptime if x.rank == TENSOR_RANK:
        var source = BlockedActivation[x.dtype](operand(x), placed.map())
        comptime if output.rank == TENSOR_RANK:
            run(source, BlockedOutput(target_of(output), out_placed.map()))
        else:
            run(source, target_of(output))
    else:
        run(
            MemoryActivation[x.dtype](operand(x)),
            BlockedOutput(target_of(output), out_placed.map()),
        )


def convolve_interleaved[
    scaled: Bool, centered: Bool
](
    output: ManagedTensorSlice[mut=True, ...],
    x: ManagedTensorSlice,
    filter: ManagedTensorSlice,
    bias: ManagedTensorSlice,
    residual: ManagedTensorSlice,
    scale: ManagedTensorSlice[dtype=DType.float32, ...],
    geometry: ManagedTensorSlice[dtype=DType.int64, ...],
    scalars: ManagedTensorSlice[dtype=DType.float32, ...],
    ctx: DeviceContext,
) raises:
    """Decodes and checks the operands of an op on a GPU, and runs the
    convolution.

    Parameters:
        scaled: As `ConvInterleavedGpu.execute` has it, like all that follow.
        centered: The same.

    Args:
        output: The same.
        x: The same.
        filter: The same.
        bias: The same.
        residual: The same.
        scale: The same.
        geometry: The same.
        scalars: The same.
        ctx: The device.

    Raises:
        Naming the argument, its value and what is allowed.
    """
    comptime assert x.rank == TENSOR_RANK
    comptime layout = BlockLayout(INTERLEAVED, batch_last=False)
    var call = read_call[scaled, interleaved=True](
        read_geometry(geometry),
        layout.channels_last_shape(
            "input", rebind[IndexList[TENSOR_RANK]](x.shape())
        ),
        layout.channels_last_shape(
            "output", rebind[IndexList[TENSOR_RANK]](output.shape())
        ),
        output,
        x,
        filter,
        bias,
        residual,
        scale,
        scalars,
    )
    comptime known = KnownProblem(
        ANY_KERNEL,
        False,
        UNKNOWN,
        UNKNOWN,
        UNKNOWN,
        UNKNOWN,
        UNKNOWN,
        centered,
    )
    Gpu.convolve[known, scaled](
        call.problem,
        call.arguments(
            MemoryActivation[x.dtype, INTERLEAVED](operand(x)),
            operand(filter).unsafe_bitcast[Scalar[x.dtype]](),
            target_of(output),
        ),
        call.geometry,
        ctx,
    )


@register(OP_CONV_INTERLEAVED_CPU)
struct ConvInterleavedCpu:
    """A convolution of two spatial dimensions on a CPU whose activation or
    output is interleaved, its geometry and the layouts run-time values."""

    @staticmethod
    def execute[
        target: StaticString,
        dtype: DType,
        rank: Int,
        out_rank: Int,
        scaled: Bool = False,
        kernel: Int = ANY_KERNEL,
        features: Int = UNKNOWN_FEATURES,
    ](
        output: _FusedComputeOutputTensor[rank=out_rank, ...],
        x: InputTensor[dtype=dtype, rank=rank, ...],
        filter: InputTensor[rank=1, ...],
        bias: InputTensor[rank=1, ...],
        residual: InputTensor[rank=out_rank, ...],
        scale: InputTensor[dtype=DType.float32, rank=1, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        scalars: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the convolution.

        Parameters:
            target: Where: cpu.
            dtype: Of activation and filter.
            rank: Of the activation: 4 with the channels last, 5 in blocks.
            out_rank: The same of output and residual.
            scaled: Whether each filter's sums are multiplied with its `scale`.
            kernel: The `KERNEL_*` code that is asked for.
            features: Of the CPU, as in `KnownProblem`: the op is compiled for
                those alone.

        Args:
            output: `[N, K / x, P, Q, x]`, or where `geometry` says so `[K / x,
                P, Q, N, x]`; or `[N, P, Q, K]`.
            x: The activation, with blocks of its own.
            filter: The filter, flat, in the layout that `geometry` names, of
                type `dtype`, of int8 beside uint8.
            bias: One value a filter, or empty.
            residual: The output's shape, or empty.
            scale: One factor a filter; empty if not `scaled`.
            geometry: See fields.mojo.
            scalars: See fields.mojo.
            ctx: The device.

        Raises:
            Naming the argument, its value and what is allowed.
        """
        comptime assert is_cpu[target](), (
            OP_CONV_INTERLEAVED_CPU + " runs on a CPU only"
        )
        convolve_blocks[scaled, kernel, features](
            output,
            x,
            filter,
            bias,
            residual,
            scale,
            geometry,
            scalars,
            ctx,
        )


@register(OP_CONV_INTERLEAVED_UNFUSED_CPU)
struct ConvInterleavedUnfusedCpu:
    """`maxconv_conv_interleaved_cpu` whose output is stored as it is."""

    @staticmethod
    def execute[
        target: StaticString,
        dtype: DType,
        rank: Int,
        out_rank: Int,
        scaled: Bool = False,
        kernel: Int = ANY_KERNEL,
        features: Int = UNKNOWN_FEATURES,
    ](
        output: OutputTensor[rank=out_rank, ...],
        x: InputTensor[dtype=dtype, rank=rank, ...],
        filter: InputTensor[rank=1, ...],
        bias: InputTensor[rank=1, ...],
        residual: InputTensor[rank=out_rank, ...],
        scale: InputTensor[dtype=DType.float32, rank=1, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        scalars: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the convolution.

        All parameters and operands are those of `ConvInterleavedCpu.execute`.
        """
        comptime assert is_cpu[target](), (
            OP_CONV_INTERLEAVED_UNFUSED_CPU + " runs on a CPU only"
        )
        convolve_blocks[scaled, kernel, features](
            output,
            x,
            filter,
            bias,
            residual,
            scale,
            geometry,
            scalars,
            ctx,
        )


@register(OP_CONV_INTERLEAVED_GPU)
struct ConvInterleavedGpu:
    """A convolution of two spatial dimensions of interleaved tensors on a GPU,
    its geometry a run-time value."""

    @staticmethod
    def execute[
        target: StaticString,
        dtype: DType,
        scaled: Bool = False,
        centered: Bool = False,
    ](
        output: _FusedComputeOutputTensor[rank=TENSOR_RANK, ...],
        x: InputTensor[dtype=dtype, rank=TENSOR_RANK, ...],
        filter: InputTensor[rank=1, ...],
        bias: InputTensor[rank=1, ...],
        residual: InputTensor[rank=TENSOR_RANK, ...],
        scale: InputTensor[dtype=DType.float32, rank=1, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        scalars: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the convolution.

        Parameters:
            target: Where: gpu.
            dtype: Of the activation; the filter is of int8.
            scaled: Whether each filter's sums are multiplied with its `scale`.
            centered: Whether the activation has a zero point.

        Args:
            output: `[N, K / 4, P, Q, 4]`.
            x: The activation, `[N, C / 4, H, W, 4]`.
            filter: `[C / 4, R, S, K, 4]`, flat.
            bias: One value a filter, or empty.
            residual: The output's shape, or empty.
            scale: One factor a filter; empty if not `scaled`.
            geometry: See fields.mojo.
            scalars: See fields.mojo.
            ctx: The device.

        Raises:
            Naming the argument, its value and what is allowed.
        """
        comptime assert is_gpu[target](), (
            OP_CONV_INTERLEAVED_GPU + " runs on a GPU only"
        )
        convolve_interleaved[scaled, centered](
            output,
            x,
            filter,
            bias,
            residual,
            scale,
            geometry,
            scalars,
            ctx,
        )


@register(OP_CONV_INTERLEAVED_UNFUSED_GPU)
struct ConvInterleavedUnfusedGpu:
    """`maxconv_conv_interleaved_gpu` whose output is stored as it is."""

    @staticmethod
    def execute[
        target: StaticString,
        dtype: DType,
        scaled: Bool = False,
        centered: Bool = False,
    ](
        output: OutputTensor[rank=TENSOR_RANK, ...],
        x: InputTensor[dtype=dtype, rank=TENSOR_RANK, ...],
        filter: InputTensor[rank=1, ...],
        bias: InputTensor[rank=1, ...],
        residual: InputTensor[rank=TENSOR_RANK, ...],
        scale: InputTensor[dtype=DType.float32, rank=1, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        scalars: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the convolution.

        All parameters and operands are those of `ConvInterleavedGpu.execute`.
        """
        comptime assert is_gpu[target](), (
            OP_CONV_INTERLEAVED_UNFUSED_GPU + " runs on a GPU only"
        )
        convolve_interleaved[scaled, centered](
            output,
            x,
            filter,
            bias,
            residual,
            scale,
            geometry,
            scalars,
            ctx,
        )
