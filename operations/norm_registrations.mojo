"""The registered normalizations: operands -> problem -> launch, and no
arithmetic."""

from extensibility import (
    InputTensor,
    ManagedTensorSlice,
    OutputTensor,
    _FusedComputeOutputTensor,
    register,
)
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu
from std.utils import IndexList

from .conv.access import OutputTarget
from .conv.epilogue import Activation
from .conv.fields import (
    NORM_ACTIVATION,
    NORM_GROUPS,
    NORM_LENGTH,
    NORM_SCALARS_EPSILON,
    NORM_SCALARS_LENGTH,
    NORM_SCALARS_P0,
    NORM_SCALARS_P1,
    OP_GROUP_NORM_GPU,
    OP_GROUP_NORM_UNFUSED_GPU,
    OP_RMS_NORM_GPU,
    OP_RMS_NORM_UNFUSED_GPU,
)
from .conv.memory import Reads, operand
from .conv.problem import SPATIAL
from .nvidia.device import device_of
from .nvidia.epilogue.activations import DeviceActivation
from .nvidia.generic.group_norm_launch import (
    NormOperands,
    NormProblem,
    launch_group_norm,
    plan_group_norm,
)
from .nvidia.generic.mean import LOAD_BYTES
from .nvidia.generic.rms_norm_launch import RmsProblem, launch_rms_norm
from .nvidia.stream import Stream
from .outputs import target_of


@fieldwise_init
struct Call[dtype: DType](Copyable, Movable):
    """The operands of a call, decoded."""

    var input: Reads[Self.dtype]
    """`[N, D, H, W, C]`."""
    var images: Int
    var size: IndexList[SPATIAL]
    """`[D, H, W]`."""
    var channels: Int
    var weight: Reads[DType.float32]
    """`[C]`."""
    var bias: Reads[DType.float32]
    """`[C]`."""
    var affine: Bool
    """Whether there are a weight and a bias."""
    var groups: Int
    var epsilon: Float32
    var activation: DeviceActivation
    var ctx: DeviceContext

    def is_empty(self) -> Bool:
        """Whether there is no pixel."""
        return self.images * self.size[0] * self.size[1] * self.size[2] == 0

    def is_aligned(self, output: Some[OutputTarget]) -> Bool:
        """Whether vectors may be loaded and stored.

        Args:
            output: How the output is reached.
        """
        var aligned = Int(self.input) % LOAD_BYTES == 0
        comptime if not type_of(output).stores:
            aligned = aligned and Int(output.data()) % LOAD_BYTES == 0
        return aligned


trait Norm:
    """A normalization on the GPU that an op is compiled for."""

    @staticmethod
    def run[
        dtype: DType, Output: OutputTarget, //, channels: Int
    ](call: Call[dtype], output: Output) raises:
        """Enqueues it in MAX's queue.

        Parameters:
            dtype: Of input and output.
            Output: How the output is reached.
            channels: Of a pixel.

        Args:
            call: The operands.
            output: `[N, D, H, W, C]`.

        Raises:
            Naming the argument, its value and what is allowed; what the driver
            refused.
        """
        ...


struct GroupNorm(Norm):
    """Mean and variance of each image's groups of channels."""

    @staticmethod
    def run[
        dtype: DType, Output: OutputTarget, //, channels: Int
    ](call: Call[dtype], output: Output) raises:
        """See `Norm`."""
        var problem = NormProblem(
            call.images, call.size, call.channels, call.groups, call.epsilon
        )
        var refusal = problem.refusal()
        if refusal:
            raise Error(refusal.value())
        if call.is_empty():
            return
        var plan = plan_group_norm[dtype](
            problem,
            aligned=call.is_aligned(output),
            device=device_of(call.ctx),
        )
        var buffer = call.ctx.enqueue_create_buffer[DType.float32](
            plan.workspace()
        )
        var workspace = (
            buffer.unsafe_ptr()
            .unsafe_mut_cast[True]()
            .unsafe_origin_cast[MutUntrackedOrigin]()
        )
        var queue = Stream(call.ctx)
        launch_group_norm[channels](
            plan,
            NormOperands(
                call.input,
                call.weight,
                call.bias,
                call.affine,
                call.activation,
                output,
                workspace,
            ),
            queue,
        )
        # Freed in the stream's order, after the kernels.
        _ = buffer^


struct RmsNorm(Norm):
    """The root mean square of each pixel's channels."""

    @staticmethod
    def run[
        dtype: DType, Output: OutputTarget, //, channels: Int
    ](call: Call[dtype], output: Output) raises:
        """See `Norm`."""
        var problem = RmsProblem(
            call.images, call.size, call.channels, call.epsilon
        )
        var refusal = problem.refusal()
        if refusal:
            raise Error(refusal.value())
        if call.is_empty():
            return
        var queue = Stream(call.ctx)
        launch_rms_norm[channels](
            problem,
            call.input,
            call.weight,
            call.activation,
            output,
            queue,
            aligned=call.is_aligned(output)
            and Int(call.weight) % LOAD_BYTES == 0,
            device=device_of(call.ctx),
        )


def _normalize[
    On: Norm, channels: Int
](
    output: ManagedTensorSlice[mut=True, ...],
    x: ManagedTensorSlice,
    weight: ManagedTensorSlice[dtype=DType.float32, ...],
    bias: ManagedTensorSlice[dtype=DType.float32, ...],
    norm: ManagedTensorSlice[dtype=DType.int64, ...],
    scalars: ManagedTensorSlice[dtype=DType.float32, ...],
    ctx: DeviceContext,
) raises:
    """Decodes and checks the operands, and normalizes into memory, or into
    what the graph compiler fused behind."""
    if norm.size() != NORM_LENGTH or scalars.size() != NORM_SCALARS_LENGTH:
        raise Error(
            t"norm: {norm.size()} integers and {scalars.size()} numbers;"
            t" {NORM_LENGTH} and {NORM_SCALARS_LENGTH} are allowed"
        )
    var shape = x.shape()
    if shape[x.rank - 1] != channels:
        raise Error(
            t"input: {shape[x.rank - 1]} channels; the op is compiled for"
            t" {channels}"
        )
    for size in [weight.size(), bias.size()]:
        if size != 0 and size != channels:
            raise Error(
                t"weight, bias: {weight.size()} and {bias.size()} elements;"
                t" {channels} or none are allowed"
            )
    var size = IndexList[SPATIAL](fill=1)
    comptime missing = SPATIAL - (x.rank - 2)
    comptime for i in range(x.rank - 2):
        size[missing + i] = shape[1 + i]
    var given = operand(norm)
    var numbers = operand(scalars)
    var call = Call[x.dtype](
        operand(x),
        shape[0],
        size,
        channels,
        operand(weight),
        operand(bias),
        weight.size() > 0,
        Int(given[unsafe_offset=NORM_GROUPS]),
        numbers[unsafe_offset=NORM_SCALARS_EPSILON],
        DeviceActivation.of(
            Activation(
                Int(given[unsafe_offset=NORM_ACTIVATION]),
                numbers[unsafe_offset=NORM_SCALARS_P0],
                numbers[unsafe_offset=NORM_SCALARS_P1],
            )
        ),
        ctx,
    )
    On.run[channels](call, target_of(output))


@register(OP_GROUP_NORM_GPU)
struct GroupNormGpu:
    """Group normalization on a GPU, with an activation."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, rank: Int, channels: Int
    ](
        output: _FusedComputeOutputTensor[dtype=dtype, rank=rank, ...],
        x: InputTensor[dtype=dtype, rank=rank, ...],
        weight: InputTensor[dtype=DType.float32, rank=1, ...],
        bias: InputTensor[dtype=DType.float32, rank=1, ...],
        norm: InputTensor[dtype=DType.int64, rank=1, ...],
        scalars: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Normalizes.

        Parameters:
            target: Where: gpu.
            dtype: Of input and output.
            rank: Of the tensors: the spatial rank and two.
            channels: Of a pixel.

        Args:
            output: `[N, *spatial, C]`.
            x: `[N, *spatial, C]`.
            weight: `[C]`, or empty.
            bias: `[C]`, or empty, like `weight`.
            norm: See fields.mojo; in host memory, like the next one.
            scalars: See fields.mojo.
            ctx: The device.

        Raises:
            Naming the argument, its value and what is allowed.
        """
        comptime assert is_gpu[target](), (
            OP_GROUP_NORM_GPU + " runs on a GPU only"
        )
        _normalize[GroupNorm, channels](
            output, x, weight, bias, norm, scalars, ctx
        )


@register(OP_GROUP_NORM_UNFUSED_GPU)
struct GroupNormUnfusedGpu:
    """`GroupNormGpu` whose output is stored as it is."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, rank: Int, channels: Int
    ](
        output: OutputTensor[dtype=dtype, rank=rank, ...],
        x: InputTensor[dtype=dtype, rank=rank, ...],
        weight: InputTensor[dtype=DType.float32, rank=1, ...],
        bias: InputTensor[dtype=DType.float32, rank=1, ...],
        norm: InputTensor[dtype=DType.int64, rank=1, ...],
        scalars: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Normalizes.

        All parameters and operands are those of `GroupNormGpu.execute`.
        """
        comptime assert is_gpu[target](), (
            OP_GROUP_NORM_UNFUSED_GPU + " runs on a GPU only"
        )
        _normalize[GroupNorm, channels](
            output, x, weight, bias, norm, scalars, ctx
        )


@register(OP_RMS_NORM_GPU)
struct RmsNormGpu:
    """Normalization by the root mean square of each pixel, with an activation.
    """

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, rank: Int, channels: Int
    ](
        output: _FusedComputeOutputTensor[dtype=dtype, rank=rank, ...],
        x: InputTensor[dtype=dtype, rank=rank, ...],
        weight: InputTensor[dtype=DType.float32, rank=1, ...],
        bias: InputTensor[dtype=DType.float32, rank=1, ...],
        norm: InputTensor[dtype=DType.int64, rank=1, ...],
        scalars: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Normalizes.

        All parameters and operands are those of `GroupNormGpu.execute`;
        `weight` is not empty, and `bias` and the groups are not read.
        """
        comptime assert is_gpu[target](), (
            OP_RMS_NORM_GPU + " runs on a GPU only"
        )
        _normalize[RmsNorm, channels](
            output, x, weight, bias, norm, scalars, ctx
        )


@register(OP_RMS_NORM_UNFUSED_GPU)
struct RmsNormUnfusedGpu:
    """`RmsNormGpu` whose output is stored as it is."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, rank: Int, channels: Int
    ](
        output: OutputTensor[dtype=dtype, rank=rank, ...],
        x: InputTensor[dtype=dtype, rank=rank, ...],
        weight: InputTensor[dtype=DType.float32, rank=1, ...],
        bias: InputTensor[dtype=DType.float32, rank=1, ...],
        norm: InputTensor[dtype=DType.int64, rank=1, ...],
        scalars: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Normalizes.

        All parameters and operands are those of `GroupNormGpu.execute`;
        `weight` is not empty, and `bias` and the groups are not read.
        """
        comptime assert is_gpu[target](), (
            OP_RMS_NORM_UNFUSED_GPU + " runs on a GPU only"
        )
        _normalize[RmsNorm, channels](
            output, x, weight, bias, norm, scalars, ctx
        )
