"""The convolutions behind which the graph compiler fuses nothing. An output that
takes fused work has a type of its own in each place, and what is compiled for
it; those of these ops are pointers, and all ops of a type share their kernels.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu, is_gpu

from .conv.fields import OP_CONV_UNFUSED_CPU, OP_CONV_UNFUSED_GPU
from .conv.known import ANY_KERNEL, UNKNOWN, UNKNOWN_FEATURES, KnownProblem
from .cpu.convolve import Cpu
from .nvidia.convolve import Gpu
from .registrations import convolve


@register(OP_CONV_UNFUSED_CPU)
struct ConvUnfusedCpu:
    """`maxconv_conv_cpu` whose output is stored as it is."""

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
        output: OutputTensor[rank=rank, ...],
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

        All parameters and operands are those of `ConvCpu.execute`.
        """
        comptime assert is_cpu[target](), (
            OP_CONV_UNFUSED_CPU + " runs on a CPU only"
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


@register(OP_CONV_UNFUSED_GPU)
struct ConvUnfusedGpu:
    """`maxconv_conv_gpu` whose output is stored as it is."""

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
        output: OutputTensor[rank=rank, ...],
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
        comptime assert is_gpu[target](), (
            OP_CONV_UNFUSED_GPU + " runs on a GPU only"
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
