"""What all ops of convolutions read off their operands: problem, epilogue and
integers, checked."""

from extensibility import ManagedTensorSlice
from std.collections import Optional
from std.utils import IndexList

from .conv.access import ActivationSource, OutputTarget
from .conv.depth_to_space import validate_single_pixels
from .conv.epilogue import Epilogue, validate_operands, validate_scale
from .conv.fields import (
    GEOMETRY_FILTER_LAYOUT,
    GEOMETRY_RESIDUAL_ZERO_POINT,
)
from .conv.memory import Reads, operand
from .conv.operands import Arguments
from .conv.problem import ConvProblem, Geometry
from .conv.quantization import Quantization, filter_dtype


@fieldwise_init
struct OpCall[bias_type: DType, residual_type: DType](
    ImplicitlyCopyable, Movable
):
    """A call of an op, valid, without its activation, filter and output.

    Parameters:
        bias_type: Of the bias.
        residual_type: Of the residual.
    """

    var geometry: Geometry
    """The decoded geometry operand."""
    var problem: ConvProblem
    var epilogue: Epilogue[Self.bias_type, Self.residual_type]
    var quantization: Quantization

    def arguments[
        Source: ActivationSource, Output: OutputTarget, //
    ](
        self,
        activation: Source,
        filter: Reads[Source.dtype],
        output: Output,
    ) -> Arguments[Source, Output, Self.bias_type, Self.residual_type]:
        """The operands of the call.

        Parameters:
            Source: How the activation is reached.
            Output: How the output is reached.

        Args:
            activation: As in `Arguments`, like the others.
            filter: The same.
            output: The same.
        """
        return Arguments(
            activation, filter, self.epilogue, output, self.quantization
        )


def read_geometry(
    geometry: ManagedTensorSlice[dtype=DType.int64, ...]
) raises -> Geometry:
    """Decodes the geometry operand, which is in host memory on every target.

    Args:
        geometry: The operand.

    Raises:
        If it is another version's.
    """
    return Geometry(operand(geometry), geometry.size())


def read_call[
    rank: Int,
    //,
    scaled: Bool,
    *,
    depth_to_space: Bool = False,
    interleaved: Bool = False,
](
    geometry: Geometry,
    x_shape: IndexList[rank],
    out_shape: IndexList[rank],
    output: ManagedTensorSlice,
    x: ManagedTensorSlice,
    filter: ManagedTensorSlice,
    bias: ManagedTensorSlice,
    residual: ManagedTensorSlice,
    scale: ManagedTensorSlice[dtype=DType.float32, ...],
    scalars: ManagedTensorSlice[dtype=DType.float32, ...],
) raises -> OpCall[bias.dtype, residual.dtype]:
    """Checks the operands of an op.

    Parameters:
        rank: Of activation and output with the channels last.
        scaled: As `ConvCpu.execute` has it, like all that follow but for the
            shapes.
        depth_to_space: The same.
        interleaved: Whether the filter is in `LAYOUT_INTERLEAVED`.

    Args:
        geometry: What `read_geometry` returned.
        x_shape: The activation's shape, with the channels last.
        out_shape: The output's.
        output: The same.
        x: The same.
        filter: The same.
        bias: The same.
        residual: The same.
        scale: The same.
        scalars: The same.

    Returns:
        The call.

    Raises:
        Naming the argument, its value and what is allowed.
    """
    comptime assert filter.dtype == filter_dtype(x.dtype)
    var problem = ConvProblem(geometry, x_shape, out_shape)
    comptime if not depth_to_space:
        validate_single_pixels(geometry)
    problem.validate(
        geometry[GEOMETRY_FILTER_LAYOUT],
        filter.size(),
        filter.dtype,
        interleaved=interleaved,
    )
    validate_operands(
        problem,
        geometry,
        scalars.size(),
        bias.size(),
        rebind[IndexList[output.rank]](residual.shape()),
        output.shape(),
    )
    validate_scale(problem, scale.size(), scaled)
    var factors = Optional[Reads[DType.float32]]()
    comptime if scaled:
        factors = operand(scale)
    var quantization = Quantization(geometry, operand(scalars))
    quantization.validate[x.dtype, output.dtype](
        Float32(geometry[GEOMETRY_RESIDUAL_ZERO_POINT])
    )
    return OpCall(
        geometry,
        problem,
        Epilogue(
            geometry,
            operand(scalars),
            operand(bias),
            operand(residual),
            factors,
        ),
        quantization,
    )
