"""The visitor of an op's own epilogue: what of `conv.epilogue.Epilogue` there is
is known at run time, but for a scale.
"""

from std.collections import Optional
from std.utils import StaticTuple

from ...conv.epilogue import Epilogue
from ...conv.problem import ConvProblem
from .activations import FAST, DeviceActivation, keep_branch, silu_of_half
from ..run_time import run_time
from .callbacks import LOOPED, EpilogueVisitor, Subtile, Visited
from .channels import ChannelState, ChannelVector
from .layout import Fragments, ResidualTile, VisitLayout


@fieldwise_init
struct ConvVisitor[bias_type: DType, scaled: Bool = False](EpilogueVisitor):
    """The work of `conv.epilogue.Epilogue`: scale, bias, activation, residual,
    final activation. There is a scale if `scaled`, and the others as run-time
    values say.

    Its forms are the activations of `FAST` with a final activation that is
    none or limits values, and `LOOPED` for all others.

    Parameters:
        bias_type: Of the bias.
        scaled: Whether each filter has a scale.
    """

    comptime VECTORS = 2 if Self.scaled else 1
    comptime State = StaticTuple[ChannelState, Self.VECTORS]
    """Of the bias, then of the scale."""
    comptime forms = len(FAST)
    comptime looped = True
    comptime whole_subtiles = True
    comptime adds_residual = True
    comptime any_filters = True

    var bias: ChannelVector[Self.bias_type]
    var scale: StaticTuple[ChannelVector[DType.float32], Self.VECTORS - 1]
    var has_bias: Bool
    var has_residual: Bool
    var beta: Float32
    var activation: DeviceActivation
    var final_activation: DeviceActivation

    @staticmethod
    def of[
        residual_type: DType
    ](epilogue: Epilogue[Self.bias_type, residual_type]) raises -> Self:
        """The device's view of an epilogue; a residual that is multiplied with
        0 is none, and is not read.

        Args:
            epilogue: As the op has it.

        Raises:
            If there is a scale, or none, but the visitor is compiled for the
            contrary.
        """
        if epilogue.has_scale != Self.scaled:
            raise Error(
                t"epilogue: has_scale is {epilogue.has_scale}, but the kernel"
                t" was compiled with scaled={Self.scaled}"
            )
        var scale = StaticTuple[ChannelVector[DType.float32], Self.VECTORS - 1](
            fill=ChannelVector(epilogue.scale)
        )
        return Self(
            ChannelVector(epilogue.bias),
            scale,
            epilogue.has_bias,
            epilogue.has_residual and epilogue.beta != 0,
            epilogue.beta,
            DeviceActivation.of(epilogue.activation),
            DeviceActivation.of(epilogue.final_activation),
        )

    def refusal(
        self, layout: VisitLayout, problem: ConvProblem
    ) -> Optional[String]:
        comptime if Self.scaled:
            var refused = self.scale[0].refusal("scale", layout)
            if refused:
                return refused
        if self.has_bias:
            return self.bias.refusal("bias", layout)
        return None

    @always_inline
    def reads_residual(self) -> Bool:
        return self.has_residual

    @always_inline
    def has_forms(self) -> Bool:
        """Whether the final activation is none, or limits values."""
        return (
            self.final_activation.formula == DeviceActivation.NONE
            or self.final_activation.formula == DeviceActivation.LIMITS
        )

    @always_inline
    def is_form[form: Int](self) -> Bool:
        comptime formula = FAST[form]
        comptime if formula == DeviceActivation.LIMITS:
            if self.activation.formula == DeviceActivation.NONE:
                return True
        return self.activation.formula == formula

    @always_inline
    def is_identity(self) -> Bool:
        """Whether `visit` changes nothing."""
        return not (
            Self.scaled
            or self.has_bias
            or self.has_residual
            or self.activation.formula != DeviceActivation.NONE
            or self.final_activation.formula != DeviceActivation.NONE
        )

    @always_inline
    def begin[Values: Fragments](self, at: Visited[Values]) -> Self.State:
        """Loads the thread's bias and scale."""
        var state = Self.State(fill=ChannelState(0))
        if self.has_bias:
            state[0] = self.bias.begin(at)
        comptime if Self.scaled:
            state[Self.VECTORS - 1] = self.scale[0].begin(at)
        return state

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
        comptime exact = Values.layout.out_type == DType.float32
        comptime if form != LOOPED and not (exact or Self.scaled):
            comptime if FAST[form] == DeviceActivation.SILU:
                # One rounding, and the same value, as half of the sum.
                var bias = self._bias[size=size](state, at, subtile, group)
                var half = values.fma(
                    SIMD[DType.float32, size](0.5), bias * 0.5
                )
                return self._limit(
                    self._add(silu_of_half(half), residual, group)
                )
        var v = values
        comptime if Self.scaled:
            v *= self.scale[0].values[size](
                state[Self.VECTORS - 1], at, subtile, group
            )
        comptime if Values.layout.whole_pixels():
            if self.has_bias:
                v += self.bias.values[size](state[0], at, subtile, group)
        else:
            v += self._bias[size](state, at, subtile, group)
        comptime if form == LOOPED:
            # One copy of all formulas serves both activations.
            var activation = self.activation
            for step in range(run_time(2)):
                v = activation.apply[exact=exact](v)
                if step == 0:
                    v = self._add(v, residual, group)
                    activation = self.final_activation
            return v
        else:
            comptime formula = FAST[form]
            v = self.activation.evaluate[formula, exact=exact](v)
            return self._limit(self._add(v, residual, group))

    @always_inline
    def _bias[
        Values: Fragments, //, size: Int
    ](
        self,
        state: Self.State,
        at: Visited[Values],
        subtile: Subtile,
        group: UInt32,
    ) -> SIMD[DType.float32, size]:
        """The bias of a fragment, or zeros."""
        # Without a bias what is kept is 0: no need to ask.
        if Values.layout.keeps_filters() or self.has_bias:
            return self.bias.values[size](state[0], at, subtile, group)
        return SIMD[DType.float32, size](0)

    @always_inline
    def _add[
        Source: ResidualTile, size: Int
    ](
        self,
        v: SIMD[DType.float32, size],
        residual: Source,
        group: UInt32,
    ) -> SIMD[DType.float32, size]:
        """The residual on top, if there is one."""
        var result = v
        if residual.is_present():
            result = residual.read[size](group).fma(
                SIMD[DType.float32, size](self.beta), v
            )
        return result

    @always_inline
    def _limit[
        size: Int
    ](self, v: SIMD[DType.float32, size]) -> SIMD[DType.float32, size]:
        """The final activation, if this `has_forms`."""
        var result = v
        if self.final_activation.formula != DeviceActivation.NONE:
            keep_branch()
            result = self.final_activation.evaluate[DeviceActivation.LIMITS](v)
        return result
