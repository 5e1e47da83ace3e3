"""Visitors that change values, or drop them: what epilogues are composed of.

    ChannelScale(scale).then(ChannelBias(bias)).then(Activate[ACTIVATION_SILU]())

is an op's scale, bias and activation; unlike with `ConvVisitor` what there is is
all known at compile time.
"""

from std.collections import Optional

from .activations import DeviceActivation
from ...conv.epilogue import Activation
from ...conv.memory import Reads
from ...conv.problem import ConvProblem
from .callbacks import (
    EpilogueVisitor,
    Subtile,
    Visited,
)
from .channels import ChannelState, ChannelVector
from .layout import Fragments, VisitLayout


@fieldwise_init
struct Stateless(TrivialRegisterPassable):
    """The state of a visitor that keeps nothing."""

    pass


# One value a filter.


struct ChannelScale[dtype: DType](EpilogueVisitor):
    """Each value times its filter's scale.

    Parameters:
        dtype: Of the scales.
    """

    comptime State = ChannelState

    var vector: ChannelVector[Self.dtype]

    def __init__(out self, scale: Reads[Self.dtype]):
        """Scales in device memory.

        Args:
            scale: `[K]`.
        """
        self.vector = ChannelVector(scale)

    def refusal(
        self, layout: VisitLayout, problem: ConvProblem
    ) -> Optional[String]:
        return self.vector.refusal("scale", layout)

    @always_inline
    def begin[Values: Fragments](self, at: Visited[Values]) -> Self.State:
        """Loads the thread's scales."""
        return self.vector.begin(at)

    @always_inline
    def visit[
        Values: Fragments, form: Int, size: Int
    ](
        self,
        mut state: Self.State,
        at: Visited[Values],
        subtile: Subtile,
        group: UInt32,
        residual: Values.Residual,
        values: SIMD[DType.float32, size],
    ) -> SIMD[DType.float32, size]:
        return values * self.vector.values[size](state, at, subtile, group)


struct ChannelBias[dtype: DType](EpilogueVisitor):
    """Each value plus its filter's bias.

    Parameters:
        dtype: Of the biases.
    """

    comptime State = ChannelState

    var vector: ChannelVector[Self.dtype]

    def __init__(out self, bias: Reads[Self.dtype]):
        """Biases in device memory.

        Args:
            bias: `[K]`.
        """
        self.vector = ChannelVector(bias)

    def refusal(
        self, layout: VisitLayout, problem: ConvProblem
    ) -> Optional[String]:
        return self.vector.refusal("bias", layout)

    @always_inline
    def begin[Values: Fragments](self, at: Visited[Values]) -> Self.State:
        """Loads the thread's biases."""
        return self.vector.begin(at)

    @always_inline
    def visit[
        Values: Fragments, form: Int, size: Int
    ](
        self,
        mut state: Self.State,
        at: Visited[Values],
        subtile: Subtile,
        group: UInt32,
        residual: Values.Residual,
        values: SIMD[DType.float32, size],
    ) -> SIMD[DType.float32, size]:
        return values + self.vector.values[size](state, at, subtile, group)


# One function of every value.


struct Activate[code: Int](EpilogueVisitor):
    """An activation.

    Parameters:
        code: `ACTIVATION_*`.
    """

    comptime State = Stateless

    var activation: DeviceActivation

    def __init__(out self, p0: Float32 = 0, p1: Float32 = 0):
        """The activation with its parameters.

        Args:
            p0: The activation's first parameter, if it has one.
            p1: Its second.
        """
        self.activation = DeviceActivation.of(Activation(Self.code, p0, p1))

    @always_inline
    def begin[Values: Fragments](self, at: Visited[Values]) -> Self.State:
        """Keeps nothing."""
        return Stateless()

    @always_inline
    def visit[
        Values: Fragments, form: Int, size: Int
    ](
        self,
        mut state: Self.State,
        at: Visited[Values],
        subtile: Subtile,
        group: UInt32,
        residual: Values.Residual,
        values: SIMD[DType.float32, size],
    ) -> SIMD[DType.float32, size]:
        comptime formula = DeviceActivation.of(
            Activation(Self.code, 0, 0)
        ).formula
        comptime exact = Values.layout.out_type == DType.float32
        return self.activation.evaluate[formula, exact=exact](values)


@fieldwise_init
struct AddResidual(EpilogueVisitor):
    """Each value plus `beta` times the residual's; the residual is not read if
    `beta` is 0."""

    comptime State = Stateless
    comptime adds_residual = True

    var beta: Float32

    @always_inline
    def reads_residual(self) -> Bool:
        return self.beta != 0

    @always_inline
    def begin[Values: Fragments](self, at: Visited[Values]) -> Self.State:
        """Keeps nothing."""
        return Stateless()

    @always_inline
    def visit[
        Values: Fragments, form: Int, size: Int
    ](
        self,
        mut state: Self.State,
        at: Visited[Values],
        subtile: Subtile,
        group: UInt32,
        residual: Values.Residual,
        values: SIMD[DType.float32, size],
    ) -> SIMD[DType.float32, size]:
        var result = values
        if residual.is_present():
            result = residual.read[size](group).fma(
                SIMD[DType.float32, size](self.beta), values
            )
        return result


@fieldwise_init
struct Rounded[dtype: DType](EpilogueVisitor):
    """Each value as a type has it, for visitors behind that are to see what is
    stored."""

    comptime State = Stateless

    @always_inline
    def begin[Values: Fragments](self, at: Visited[Values]) -> Self.State:
        """Keeps nothing."""
        return Stateless()

    @always_inline
    def visit[
        Values: Fragments, form: Int, size: Int
    ](
        self,
        mut state: Self.State,
        at: Visited[Values],
        subtile: Subtile,
        group: UInt32,
        residual: Values.Residual,
        values: SIMD[DType.float32, size],
    ) -> SIMD[DType.float32, size]:
        return values.cast[Self.dtype]().cast[DType.float32]()


@fieldwise_init
struct Discard(EpilogueVisitor):
    """No output: only what visitors before it store or add up is kept. The last
    of a chain."""

    comptime State = Stateless
    comptime discards = True

    @always_inline
    def begin[Values: Fragments](self, at: Visited[Values]) -> Self.State:
        """Keeps nothing."""
        return Stateless()

    @always_inline
    def visit[
        Values: Fragments, form: Int, size: Int
    ](
        self,
        mut state: Self.State,
        at: Visited[Values],
        subtile: Subtile,
        group: UInt32,
        residual: Values.Residual,
        values: SIMD[DType.float32, size],
    ) -> SIMD[DType.float32, size]:
        return values
