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
from max.gpu.host.info import is_gpu
from std.collections import Optional
from std.utils import IndexList

from .conv.access import MemoryActivation
from .conv.epilogue import Epilogue, validate_operands, validate_scale
from .conv.fields import (
    GEOMETRY_FILTER_LAYOUT,
    INTERLEAVED,
    OP_CONV_INTERLEAVED_GPU,
    OP_CONV_INTERLEAVED_UNFUSED_GPU,
)
from .conv.interleave import channels_last_shape
from .conv.known import KnownProblem
from .conv.memory import Reads, operand
from .conv.operands import Arguments
from .conv.problem import ConvProblem, Geometry
from .nvidia.convolve import Gpu
from .outputs import target_of

comptime TENSOR_RANK = 5
"""Of `[N, C / x, H, W, x]`."""


def convolve_interleaved[
    scaled: Bool
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
    """Decodes and checks the operands of an op, and runs the convolution.

    Parameters:
        scaled: As `ConvInterleavedGpu.execute` has it, like all that follow.

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
    comptime assert x.dtype == filter.dtype
    # Both are in host memory.
    var decoded = Geometry(operand(geometry), geometry.size())
    var x_shape = rebind[IndexList[TENSOR_RANK]](x.shape())
    var out_shape = rebind[IndexList[TENSOR_RANK]](output.shape())
    var problem = ConvProblem(
        decoded,
        channels_last_shape[INTERLEAVED]("input", x_shape),
        channels_last_shape[INTERLEAVED]("output", out_shape),
    )
    problem.validate(
        decoded[GEOMETRY_FILTER_LAYOUT],
        filter.size(),
        filter.dtype,
        interleaved=True,
    )
    validate_operands(
        problem,
        decoded,
        scalars.size(),
        bias.size(),
        rebind[IndexList[TENSOR_RANK]](residual.shape()),
        out_shape,
    )
    var factors = Optional[Reads[DType.float32]]()
    validate_scale(problem, scale.size(), scaled)
    comptime if scaled:
        factors = operand(scale)
    Gpu.convolve[KnownProblem.nothing(), scaled](
        problem,
        Arguments(
            MemoryActivation[x.dtype, INTERLEAVED](operand(x)),
            rebind[Reads[x.dtype]](operand(filter)),
            Epilogue(
                decoded,
                operand(scalars),
                operand(bias),
                operand(residual),
                factors,
            ),
            target_of(output),
        ),
        decoded,
        ctx,
    )


@register(OP_CONV_INTERLEAVED_GPU)
struct ConvInterleavedGpu:
    """A convolution of two spatial dimensions of interleaved tensors on a GPU,
    its geometry a run-time value."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, scaled: Bool = False
    ](
        output: _FusedComputeOutputTensor[rank=TENSOR_RANK, ...],
        x: InputTensor[dtype=dtype, rank=TENSOR_RANK, ...],
        filter: InputTensor[dtype=dtype, rank=1, ...],
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
            dtype: Of activation and filter.
            scaled: Whether each filter's sums are multiplied with its `scale`.

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
        convolve_interleaved[scaled](
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
        target: StaticString, dtype: DType, scaled: Bool = False
    ](
        output: OutputTensor[rank=TENSOR_RANK, ...],
        x: InputTensor[dtype=dtype, rank=TENSOR_RANK, ...],
        filter: InputTensor[dtype=dtype, rank=1, ...],
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
        convolve_interleaved[scaled](
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
