"""The registered poolings: operands -> problem -> launch, and no arithmetic."""

from extensibility import (
    InputTensor,
    ManagedTensorSlice,
    _FusedComputeOutputTensor,
    register,
)
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu, is_gpu
from std.utils import IndexList

from .conv.access import OutputTarget
from .conv.fields import OP_POOL_CPU, OP_POOL_GPU
from .conv.known import UNKNOWN
from .conv.memory import Reads, operand
from .conv.pooling import PoolProblem
from .conv.problem import Geometry
from .cpu.direct.pooling import pool as pool_on_cpu
from .cpu.pool import CpuContext, MaxPool
from .nvidia.generic.pooling_launch import pool as pool_on_gpu
from .nvidia.stream import Stream
from .outputs import target_of


trait Place:
    """Where a pooling runs."""

    @staticmethod
    def pool[
        dtype: DType, Output: OutputTarget
    ](
        pooling: PoolProblem,
        input: Reads[dtype],
        output: Output,
        ctx: DeviceContext,
    ) raises:
        """Runs a pooling, or enqueues it.

        Parameters:
            dtype: Of input and output.
            Output: How the output is reached.

        Args:
            pooling: The geometry, valid.
            input: `[N, *input, C]`.
            output: `[N, *output, C]`.
            ctx: The device.

        Raises:
            What the target refuses.
        """
        ...


struct OnCpu[average: Bool](Place):
    """The threads of MAX's runtime.

    Parameters:
        average: Whether means are wanted, not the largest elements.
    """

    @staticmethod
    def pool[
        dtype: DType, Output: OutputTarget
    ](
        pooling: PoolProblem,
        input: Reads[dtype],
        output: Output,
        ctx: DeviceContext,
    ) raises:
        """See `Place`."""
        var threads = MaxPool(rebind[CpuContext](ctx))
        pool_on_cpu[Self.average](threads, pooling, input, output)


struct OnGpu[average: Bool, whole: Bool, channels: Int, taps: Int, stride: Int](
    Place
):
    """The GPU that the op is compiled for, in MAX's queue.

    Parameters:
        average: Whether means are wanted, not the largest elements.
        whole: What the graph knows, as `PoolGpu.execute` has it.
        channels: The same.
        taps: The same.
        stride: The same.
    """

    @staticmethod
    def pool[
        dtype: DType, Output: OutputTarget
    ](
        pooling: PoolProblem,
        input: Reads[dtype],
        output: Output,
        ctx: DeviceContext,
    ) raises:
        """See `Place`."""
        var stream = Stream(ctx)
        pool_on_gpu[
            Self.average, Self.whole, Self.channels, Self.taps, Self.stride
        ](stream, pooling, input, output)


def _pool[
    On: Place, whole: Bool
](
    output: ManagedTensorSlice[mut=True, ...],
    x: ManagedTensorSlice,
    geometry: ManagedTensorSlice[dtype=DType.int64, ...],
    pooling: ManagedTensorSlice[dtype=DType.int64, ...],
    ctx: DeviceContext,
) raises:
    """Decodes and checks the operands, and pools into memory, or into what the
    graph compiler fused behind."""
    var problem = PoolProblem(
        Geometry(operand(geometry), geometry.size()),
        operand(pooling),
        pooling.size(),
        x.shape(),
        rebind[IndexList[x.rank]](output.shape()),
        whole=whole,
    )
    On.pool(problem, operand(x), target_of(output), ctx)


@register(OP_POOL_CPU)
struct PoolCpu:
    """A pooling of spatial rank 1 to 3 on a CPU, its geometry a run-time value.
    """

    @staticmethod
    def execute[
        target: StaticString,
        dtype: DType,
        rank: Int,
        average: Bool,
        whole: Bool = False,
    ](
        output: _FusedComputeOutputTensor[dtype=dtype, rank=rank, ...],
        x: InputTensor[dtype=dtype, rank=rank, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        pooling: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Pools.

        Parameters:
            target: Where: cpu.
            dtype: Of input and output.
            rank: Of the tensors: the spatial rank and two.
            average: Whether means are wanted, not the largest elements.
            whole: Whether the window is the image, whatever `geometry` says.

        Args:
            output: `[N, *output, C]`.
            x: `[N, *input, C]`.
            geometry: A convolution's, whose filter is the window: see
                fields.mojo.
            pooling: See fields.mojo.
            ctx: The device.

        Raises:
            Naming the argument, its value and what is allowed.
        """
        comptime assert is_cpu[target](), OP_POOL_CPU + " runs on a CPU only"
        _pool[OnCpu[average], whole](output, x, geometry, pooling, ctx)


@register(OP_POOL_GPU)
struct PoolGpu:
    """A pooling of spatial rank 1 to 3 on a GPU, its geometry a run-time value.
    """

    @staticmethod
    def execute[
        target: StaticString,
        dtype: DType,
        rank: Int,
        average: Bool,
        whole: Bool = False,
        channels: Int = UNKNOWN,
        taps: Int = UNKNOWN,
        stride: Int = UNKNOWN,
    ](
        output: _FusedComputeOutputTensor[dtype=dtype, rank=rank, ...],
        x: InputTensor[dtype=dtype, rank=rank, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        pooling: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Pools.

        All other parameters and all operands are those of `PoolCpu.execute`.

        Parameters:
            target: Where: gpu.
            dtype: Of input and output.
            rank: Of the tensors.
            average: Whether means are wanted, not the largest elements.
            whole: Whether the window is the image.
            channels: What the graph knows, like those that follow: the op is
                compiled for that alone. Here the channels of a pixel.
            taps: Of the window along w, if they are next to each other.
            stride: Along w.
        """
        comptime assert is_gpu[target](), OP_POOL_GPU + " runs on a GPU only"
        _pool[OnGpu[average, whole, channels, taps, stride], whole](
            output, x, geometry, pooling, ctx
        )
