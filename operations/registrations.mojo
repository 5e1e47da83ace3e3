"""The registered ops: operands -> problem -> dispatch, and no arithmetic."""

from extensibility import (
    InputTensor,
    ManagedTensorSlice,
    OutputTensor,
    _FusedComputeOutputTensor,
    _FusedInputTensor,
    register,
)
from max.gpu.host import DeviceAttribute, DeviceContext
from max.gpu.host.info import is_cpu, is_gpu
from std.collections import Optional
from std.utils import IndexList

from .conv.access import (
    ActivationSource,
    ComputedOutput,
    GraphActivation,
    MemoryActivation,
    MemoryOutput,
    StoredOutput,
)
from .conv.epilogue import Epilogue, validate_operands, validate_scale
from .conv.fields import (
    GEOMETRY_FILTER_LAYOUT,
    GEOMETRY_KERNEL,
    GEOMETRY_PRECISION,
    LAYOUT_KRSC,
    PRECISION_FLOAT32,
)
from .conv.known import KnownFilter, KnownProblem
from .conv.memory import Reads, operand
from .conv.operands import Arguments
from .conv.problem import ConvProblem, Geometry
from .cpu.convolve import convolve
from .cpu.pool import CpuContext, MaxPool
from .explain import (
    Answer,
    explain_on_cpu,
    explain_on_gpu,
    explain_on_other_gpu,
)
from .nvidia.config import is_blackwell, is_hopper
from .nvidia.dispatch import ALL_KERNELS
from .nvidia.dispatch import convolve as convolve_gpu


def _convolve[
    target: StaticString,
    kernels: Int,
    known: KnownFilter,
    scaled: Bool,
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
    """Decodes the operands, checks them, and dispatches."""
    # Both are in host memory on every target.
    var decoded = Geometry(operand(geometry), geometry.size())
    var out_shape = rebind[IndexList[x.rank]](output.shape())
    var problem = ConvProblem(decoded, x.shape(), out_shape)
    problem.validate(decoded[GEOMETRY_FILTER_LAYOUT], filter.size())
    validate_operands(
        problem,
        decoded,
        scalars.size(),
        bias.size(),
        rebind[IndexList[x.rank]](residual.shape()),
        out_shape,
    )
    var factors = Optional[Reads[DType.float32]]()
    comptime if scaled:
        validate_scale(problem, scale.size())
        factors = operand(scale)
    else:
        if scale.size() != 0:
            raise Error(
                t"scale: {scale.size()} elements, but the op is compiled"
                t" without a scale; none are allowed"
            )
    var epilogue = Epilogue(
        decoded,
        operand(scalars),
        operand(bias),
        operand(residual),
        factors,
    )
    comptime if is_cpu[target]():
        _convolve_cpu[scaled](
            output,
            x,
            operand(filter),
            epilogue,
            problem,
            decoded,
            rebind[CpuContext](ctx),
        )
    elif is_gpu[target]():
        _convolve_gpu[kernels, known, scaled](
            output, x, operand(filter), epilogue, problem, decoded, ctx
        )
    else:
        raise Error(
            t"maxconv.conv: device {target} is not supported; allowed: cpu, gpu"
        )


def _convolve_cpu[
    filter_type: DType, //, scaled: Bool
](
    output: ManagedTensorSlice[mut=True, ...],
    x: ManagedTensorSlice,
    filter: Reads[filter_type],
    epilogue: Epilogue,
    problem: ConvProblem,
    geometry: Geometry,
    ctx: CpuContext,
) raises:
    """Takes the activation out of its tensor: a pointer, or what is fused."""
    comptime assert x.dtype == filter_type
    var data = rebind[Reads[filter_type]](operand(x))
    comptime if x._has_input_fusion:
        _store_cpu[scaled](
            output,
            GraphActivation[filter_type, x.rank](data, x.in_fusion),
            filter,
            epilogue,
            problem,
            geometry,
            ctx,
        )
    else:
        _store_cpu[scaled](
            output,
            MemoryActivation[filter_type](data),
            filter,
            epilogue,
            problem,
            geometry,
            ctx,
        )


def _store_cpu[
    Source: ActivationSource, //, scaled: Bool
](
    output: ManagedTensorSlice[mut=True, ...],
    activation: Source,
    filter: Reads[Source.dtype],
    epilogue: Epilogue,
    problem: ConvProblem,
    geometry: Geometry,
    ctx: CpuContext,
) raises:
    """Takes the output out of its tensor: a pointer, or what is fused."""
    var data = output.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    var layout = geometry[GEOMETRY_FILTER_LAYOUT]
    var kernel = geometry[GEOMETRY_KERNEL]
    var pool = MaxPool(ctx)
    comptime known = KnownProblem.nothing()
    comptime if output._has_output_store_fusion:
        convolve[known=known, scaled=scaled](
            pool,
            problem,
            Arguments(
                activation,
                filter,
                epilogue,
                StoredOutput[output.dtype, output.rank](
                    data, output.out_fusion
                ),
            ),
            layout=layout,
            requested=kernel,
        )
    elif output._has_compute_fusion:
        convolve[known=known, scaled=scaled](
            pool,
            problem,
            Arguments(
                activation,
                filter,
                epilogue,
                ComputedOutput[output.dtype, output.rank](
                    data, output.compute_fusion
                ),
            ),
            layout=layout,
            requested=kernel,
        )
    else:
        convolve[known=known, scaled=scaled](
            pool,
            problem,
            Arguments(
                activation, filter, epilogue, MemoryOutput[output.dtype](data)
            ),
            layout=layout,
            requested=kernel,
        )


def _convolve_gpu[
    filter_type: DType, //, kernels: Int, known: KnownFilter, scaled: Bool
](
    output: ManagedTensorSlice[mut=True, ...],
    x: ManagedTensorSlice,
    filter: Reads[filter_type],
    epilogue: Epilogue,
    problem: ConvProblem,
    geometry: Geometry,
    ctx: DeviceContext,
) raises:
    """Takes the activation out of its tensor: a pointer, or what is fused."""
    comptime assert x.dtype == filter_type
    comptime if x._has_input_fusion:
        _store_gpu[kernels, known, scaled](
            output,
            GraphActivation[filter_type, x.rank](
                rebind[Reads[filter_type]](operand(x)), x.in_fusion
            ),
            filter,
            epilogue,
            problem,
            geometry,
            ctx,
        )
    else:
        _store_gpu[kernels, known, scaled](
            output,
            MemoryActivation[filter_type](
                rebind[Reads[filter_type]](operand(x))
            ),
            filter,
            epilogue,
            problem,
            geometry,
            ctx,
        )


def _store_gpu[
    Source: ActivationSource,
    //,
    kernels: Int,
    known: KnownFilter,
    scaled: Bool,
](
    output: ManagedTensorSlice[mut=True, ...],
    activation: Source,
    filter: Reads[Source.dtype],
    epilogue: Epilogue,
    problem: ConvProblem,
    geometry: Geometry,
    ctx: DeviceContext,
) raises:
    """Takes the output out of its tensor: a pointer, or what is fused."""
    var data = output.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    var layout = geometry[GEOMETRY_FILTER_LAYOUT]
    var kernel = geometry[GEOMETRY_KERNEL]
    var exact = geometry[GEOMETRY_PRECISION] == PRECISION_FLOAT32
    comptime if output._has_output_store_fusion:
        convolve_gpu[kernels, known, scaled=scaled](
            ctx,
            problem,
            activation,
            filter,
            layout,
            kernel,
            epilogue,
            StoredOutput[output.dtype, output.rank](data, output.out_fusion),
            exact,
        )
    elif output._has_compute_fusion:
        convolve_gpu[kernels, known, scaled=scaled](
            ctx,
            problem,
            activation,
            filter,
            layout,
            kernel,
            epilogue,
            ComputedOutput[output.dtype, output.rank](
                data, output.compute_fusion
            ),
            exact,
        )
    else:
        convolve_gpu[kernels, known, scaled=scaled](
            ctx,
            problem,
            activation,
            filter,
            layout,
            kernel,
            epilogue,
            MemoryOutput[output.dtype](data),
            exact,
        )


@register("maxconv.conv")
struct Conv:
    """A convolution of spatial rank 1 to 3, its geometry a run-time value."""

    @staticmethod
    def execute[
        target: StaticString,
        dtype: DType,
        rank: Int,
        kernels: Int = ALL_KERNELS,
        taps: Int = 0,
        stride: Int = 0,
        group_channels: Int = 0,
        scaled: Bool = False,
    ](
        output: _FusedComputeOutputTensor[rank=rank, ...],
        x: InputTensor[dtype=dtype, rank=rank, ...],
        filter: InputTensor[dtype=dtype, rank=1, ...],
        bias: InputTensor[rank=1, ...],
        residual: InputTensor[rank=rank, ...],
        scale: InputTensor[dtype=DType.float32, rank=1, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        scalars: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the convolution.

        Parameters:
            target: Where: cpu or gpu.
            dtype: Of activation and filter.
            rank: Of the tensors: the spatial rank and two.
            kernels: The kernels that a GPU's op is compiled with, a bit each.
            taps: `KnownFilter.taps`, which a GPU's op is compiled for.
            stride: `KnownFilter.stride`.
            group_channels: `KnownFilter.group_channels`.
            scaled: Whether each filter's sums are multiplied with its `scale`.

        Args:
            output: `[N, *output, K]`.
            x: The activation, `[N, *input, C]`.
            filter: The filter, flat, in the layout that `geometry` names.
            bias: One value a filter, or empty.
            residual: The output's shape, or empty.
            scale: One factor a filter; empty if not `scaled`.
            geometry: See fields.mojo.
            scalars: See fields.mojo.
            ctx: The device.

        Raises:
            Naming the argument, its value and what is allowed.
        """
        _convolve[
            target, kernels, KnownFilter(taps, stride, group_channels), scaled
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


@register("maxconv.conv_fused_input")
struct ConvFusedInput:
    """`maxconv.conv` that loads its activation through whatever elementwise
    work stands before it in the graph."""

    @staticmethod
    def execute[
        target: StaticString,
        dtype: DType,
        rank: Int,
        kernels: Int = ALL_KERNELS,
        taps: Int = 0,
        stride: Int = 0,
        group_channels: Int = 0,
        scaled: Bool = False,
    ](
        output: _FusedComputeOutputTensor[rank=rank, ...],
        x: _FusedInputTensor[dtype=dtype, rank=rank, ...],
        filter: InputTensor[dtype=dtype, rank=1, ...],
        bias: InputTensor[rank=1, ...],
        residual: InputTensor[rank=rank, ...],
        scale: InputTensor[dtype=DType.float32, rank=1, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        scalars: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the convolution of an activation that may not be in memory:
        `x` loads each element through the work that the graph compiler fused.

        All other parameters and operands are those of `Conv.execute`.
        """
        _convolve[
            target, kernels, KnownFilter(taps, stride, group_channels), scaled
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


@register("maxconv.explain")
struct Explain:
    """Says which kernel a convolution would run on, without running it."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        kernel: OutputTensor[dtype=DType.int64, rank=1, ...],
        reason: OutputTensor[dtype=DType.uint8, rank=1, ...],
        x_shape: InputTensor[dtype=DType.int64, rank=1, ...],
        out_shape: InputTensor[dtype=DType.int64, rank=1, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        device: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Chooses. All tensors are in host memory on every target.

        Parameters:
            target: Where: cpu or gpu.
            dtype: Of activation and filter.

        Args:
            kernel: One value: the chosen `KERNEL_*` code.
            reason: UTF-8 text, cut to fit and filled with zeros.
            x_shape: `[N, D, H, W, C]`.
            out_shape: `[N, Z, P, Q, K]`.
            geometry: See fields.mojo.
            device: Three values: a GPU's compute capability times ten and its
                multiprocessors, of which zeros mean the device that this op
                runs on; and whether the graph compiler fuses something behind.
            ctx: The device.

        Raises:
            Naming the argument, its value and what is allowed.
        """
        var decoded = Geometry(operand(geometry), geometry.size())
        var input = IndexList[5](fill=0)
        var output = IndexList[5](fill=0)
        for i in range(5):
            input[i] = Int(operand(x_shape)[unsafe_offset=i])
            output[i] = Int(operand(out_shape)[unsafe_offset=i])
        var problem = ConvProblem(decoded, input, output)
        problem.validate(LAYOUT_KRSC, problem.filter_length(LAYOUT_KRSC))
        var requested = decoded[GEOMETRY_KERNEL]
        var exact = decoded[GEOMETRY_PRECISION] == PRECISION_FLOAT32
        var capability = Int(operand(device)[unsafe_offset=0])
        var multiprocessors = Int(operand(device)[unsafe_offset=1])
        var fused = operand(device)[unsafe_offset=2] != 0
        var answer: Answer
        if capability > 0:
            answer = explain_on_other_gpu[dtype](
                requested,
                problem,
                exact,
                fused,
                capability,
                multiprocessors,
            )
        else:
            comptime if is_gpu[target]():
                answer = explain_on_gpu[dtype, is_hopper(), is_blackwell()](
                    requested,
                    problem,
                    exact,
                    fused,
                    ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT),
                )
            else:
                var pool = MaxPool(rebind[CpuContext](ctx))
                answer = explain_on_cpu[dtype](
                    requested, problem, pool.threads()
                )
        kernel.unsafe_ptr()[unsafe_offset=0] = Int64(answer.kernel)
        var text = answer.reason.as_bytes()
        for i in range(reason.size()):
            reason.unsafe_ptr()[unsafe_offset=i] = text[i] if i < len(
                text
            ) else UInt8(0)
