"""The registered ops: operands -> problem -> plan -> launch, and no arithmetic.
"""

from extensibility import (
    InputTensor,
    ManagedTensorSlice,
    _FusedComputeOutputTensor,
    _FusedInputTensor,
    register,
)
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu, is_gpu
from std.utils import IndexList

from .calls import OpCall, read_call, read_geometry
from .conv.access import (
    ActivationSource,
    GraphActivation,
    MemoryActivation,
    OutputTarget,
)
from .conv.depth_to_space import DepthToSpace, DepthToSpaceOutput
from .conv.fields import (
    OP_CONV_CPU,
    OP_CONV_FUSED_INPUT_CPU,
    OP_CONV_FUSED_INPUT_GPU,
    OP_CONV_GPU,
)
from .conv.known import ANY_KERNEL, UNKNOWN, UNKNOWN_FEATURES, KnownProblem
from .conv.memory import Reads, operand
from .conv.target import Target
from .cpu.convolve import Cpu
from .nvidia.convolve import Gpu
from .outputs import target_of


def convolve[
    On: Target,
    known: KnownProblem,
    scaled: Bool,
    depth_to_space: Bool,
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
        On: The target.
        known: What the graph knows of the problem.
        scaled: As `ConvCpu.execute` has it, like all that follow.
        depth_to_space: The same.

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
    var call = read_call[scaled, depth_to_space=depth_to_space](
        read_geometry(geometry),
        x.shape(),
        rebind[IndexList[x.rank]](output.shape()),
        output,
        x,
        filter,
        bias,
        residual,
        scale,
        scalars,
    )
    _load[On, known, scaled, depth_to_space](
        output,
        x,
        operand(filter).unsafe_bitcast[Scalar[x.dtype]](),
        call,
        ctx,
    )


def _load[
    filter_type: DType,
    //,
    On: Target,
    known: KnownProblem,
    scaled: Bool,
    depth_to_space: Bool,
](
    output: ManagedTensorSlice[mut=True, ...],
    x: ManagedTensorSlice,
    filter: Reads[filter_type],
    call: OpCall,
    ctx: DeviceContext,
) raises:
    """Takes the activation out of its tensor: a pointer, or fused work."""
    comptime assert x.dtype == filter_type
    var data = rebind[Reads[filter_type]](operand(x))
    comptime run = _run[On, known, scaled, depth_to_space]
    comptime if x._has_input_fusion:
        run(
            target_of(output),
            output.shape(),
            GraphActivation[filter_type, x.rank](data, x.in_fusion),
            filter,
            call,
            ctx,
        )
    else:
        run(
            target_of(output),
            output.shape(),
            MemoryActivation[filter_type](data),
            filter,
            call,
            ctx,
        )


def _run[
    Output: OutputTarget,
    rank: Int,
    Source: ActivationSource,
    //,
    On: Target,
    known: KnownProblem,
    scaled: Bool,
    depth_to_space: Bool,
](
    output: Output,
    out_shape: IndexList[rank],
    activation: Source,
    filter: Reads[Source.dtype],
    call: OpCall,
    ctx: DeviceContext,
) raises:
    """Runs the convolution, whose filters may be pixels of a larger image."""
    comptime if depth_to_space:
        var places = DepthToSpace(call.geometry, call.problem, out_shape)
        On.convolve[known, scaled](
            call.problem,
            call.arguments(
                activation, filter, DepthToSpaceOutput(output, places)
            ),
            call.geometry,
            ctx,
        )
    else:
        On.convolve[known, scaled](
            call.problem,
            call.arguments(activation, filter, output),
            call.geometry,
            ctx,
        )


@register(OP_CONV_CPU)
struct ConvCpu:
    """A convolution of spatial rank 1 to 3 on a CPU, its geometry a run-time
    value."""

    @staticmethod
    def execute[
        target: StaticString,
        dtype: DType,
        rank: Int,
        scaled: Bool = False,
        depth_to_space: Bool = False,
        kernel: Int = ANY_KERNEL,
        exact: Bool = False,
        groups: Int = UNKNOWN,
        channels: Int = UNKNOWN,
        filters: Int = UNKNOWN,
        taps: Int = UNKNOWN,
        stride: Int = UNKNOWN,
        features: Int = UNKNOWN_FEATURES,
    ](
        output: _FusedComputeOutputTensor[rank=rank, ...],
        x: InputTensor[dtype=dtype, rank=rank, ...],
        filter: InputTensor[rank=1, ...],
        bias: InputTensor[rank=1, ...],
        residual: InputTensor[rank=rank, ...],
        scale: InputTensor[dtype=DType.float32, rank=1, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        scalars: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the convolution.

        Parameters:
            target: Where: cpu.
            dtype: Of activation and filter.
            rank: Of the tensors: the spatial rank and two.
            scaled: Whether each filter's sums are multiplied with its `scale`.
            depth_to_space: Whether filters are pixels of a larger image, which
                `output` then is.
            kernel: What the graph knows of the problem, like those that follow
                (`KnownProblem`): the op is compiled for that alone. Here the
                `KERNEL_*` code that is asked for.
            exact: Whether products of float32 are not rounded to tf32.
            groups: Of the problem.
            channels: Input channels of a group.
            filters: Of a group.
            taps: Along w.
            stride: Along w.
            features: Of the CPU.

        Args:
            output: `[N, *output, K]`. Where filters are pixels of it,
                `filter`, `bias` and `scale` are of the convolution's filters.
            x: The activation, `[N, *input, C]`.
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
        comptime assert is_cpu[target](), OP_CONV_CPU + " runs on a CPU only"
        convolve[
            Cpu,
            KnownProblem(
                kernel,
                exact,
                groups,
                channels,
                filters,
                taps,
                stride,
                features=features,
            ),
            scaled,
            depth_to_space,
        ](
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


@register(OP_CONV_GPU)
struct ConvGpu:
    """A convolution of spatial rank 1 to 3 on a GPU, its geometry a run-time
    value."""

    @staticmethod
    def execute[
        target: StaticString,
        dtype: DType,
        rank: Int,
        scaled: Bool = False,
        depth_to_space: Bool = False,
        kernel: Int = ANY_KERNEL,
        exact: Bool = False,
        groups: Int = UNKNOWN,
        channels: Int = UNKNOWN,
        filters: Int = UNKNOWN,
        taps: Int = UNKNOWN,
        stride: Int = UNKNOWN,
        centered: Bool = False,
    ](
        output: _FusedComputeOutputTensor[rank=rank, ...],
        x: InputTensor[dtype=dtype, rank=rank, ...],
        filter: InputTensor[rank=1, ...],
        bias: InputTensor[rank=1, ...],
        residual: InputTensor[rank=rank, ...],
        scale: InputTensor[dtype=DType.float32, rank=1, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        scalars: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the convolution.

        All parameters and operands are those of `ConvCpu.execute`, but for
        `centered`: whether the activation has a zero point.
        """
        comptime assert is_gpu[target](), OP_CONV_GPU + " runs on a GPU only"
        convolve[
            Gpu,
            KnownProblem(
                kernel, exact, groups, channels, filters, taps, stride, centered
            ),
            scaled,
            depth_to_space,
        ](
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


@register(OP_CONV_FUSED_INPUT_CPU)
struct ConvFusedInputCpu:
    """`maxconv_conv_cpu` that loads its activation through the elementwise
    work that the graph compiler fused in front of it."""

    @staticmethod
    def execute[
        target: StaticString,
        dtype: DType,
        rank: Int,
        scaled: Bool = False,
        depth_to_space: Bool = False,
        kernel: Int = ANY_KERNEL,
        exact: Bool = False,
        groups: Int = UNKNOWN,
        channels: Int = UNKNOWN,
        filters: Int = UNKNOWN,
        taps: Int = UNKNOWN,
        stride: Int = UNKNOWN,
        features: Int = UNKNOWN_FEATURES,
    ](
        output: _FusedComputeOutputTensor[rank=rank, ...],
        x: _FusedInputTensor[dtype=dtype, rank=rank, ...],
        filter: InputTensor[rank=1, ...],
        bias: InputTensor[rank=1, ...],
        residual: InputTensor[rank=rank, ...],
        scale: InputTensor[dtype=DType.float32, rank=1, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        scalars: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the convolution of an activation that may not be in memory:
        `x` loads each element through the work that the graph compiler fused.

        All other parameters and operands are those of `ConvCpu.execute`.
        """
        comptime assert is_cpu[target](), (
            OP_CONV_FUSED_INPUT_CPU + " runs on a CPU only"
        )
        convolve[
            Cpu,
            KnownProblem(
                kernel,
                exact,
                groups,
                channels,
                filters,
                taps,
                stride,
                features=features,
            ),
            scaled,
            depth_to_space,
        ](
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


@register(OP_CONV_FUSED_INPUT_GPU)
struct ConvFusedInputGpu:
    """`maxconv_conv_gpu` that loads its activation through the elementwise
    work that the graph compiler fused in front of it."""

    @staticmethod
    def execute[
        target: StaticString,
        dtype: DType,
        rank: Int,
        scaled: Bool = False,
        depth_to_space: Bool = False,
        kernel: Int = ANY_KERNEL,
        exact: Bool = False,
        groups: Int = UNKNOWN,
        channels: Int = UNKNOWN,
        filters: Int = UNKNOWN,
        taps: Int = UNKNOWN,
        stride: Int = UNKNOWN,
        centered: Bool = False,
    ](
        output: _FusedComputeOutputTensor[rank=rank, ...],
        x: _FusedInputTensor[dtype=dtype, rank=rank, ...],
        filter: InputTensor[rank=1, ...],
        bias: InputTensor[rank=1, ...],
        residual: InputTensor[rank=rank, ...],
        scale: InputTensor[dtype=DType.float32, rank=1, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        scalars: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the convolution of an activation that may not be in memory:
        `x` loads each element through the work that the graph compiler fused.

        All other parameters and operands are those of `ConvGpu.execute`.
        """
        comptime assert is_gpu[target](), (
            OP_CONV_FUSED_INPUT_GPU + " runs on a GPU only"
        )
        convolve[
            Gpu,
            KnownProblem(
                kernel, exact, groups, channels, filters, taps, stride, centered
            ),
            scaled,
            depth_to_space,
        ](
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
