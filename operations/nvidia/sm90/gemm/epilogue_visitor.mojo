"""The visitor of an op's own epilogue: what of `conv.epilogue.Epilogue` there is
is known at run time, but for a scale.
"""

from std.utils import StaticTuple

from ...epilogue.activations import (
    DeviceActivation,
    keep_branch,
    run_time,
    silu_of_half,
)
from ....conv.epilogue import Epilogue
from ....conv.memory import Reads
from .epilogue_callbacks import (
    LOOPED,
    EpilogueVisitor,
    Residual,
    Subtile,
    VisitLayout,
    Visited,
)
from .epilogue_config import SUBTILE_FILTERS
from .epilogue_fragment import MATRIX_ROWS, Place

comptime MAX_PARTS = 4
"""Sub-tiles along the filters of a consumer's part, at most."""

comptime FAST = [DeviceActivation.LIMITS, DeviceActivation.SILU]
"""Activations with a form of their own; without one, the limits are infinite.
"""

comptime ChannelState = SIMD[DType.float32, 2 * MAX_PARTS]
"""What a thread knows of its filters: two of each part, where filters are the
multiply's rows."""


struct ChannelVector[dtype: DType](TrivialRegisterPassable):
    """One value a filter, in device memory.

    Parameters:
        dtype: Of the values.
    """

    var data: Reads[Self.dtype]

    @always_inline
    def __init__(out self, data: Reads[Self.dtype]):
        """Values in device memory.

        Args:
            data: The first filter's.
        """
        self.data = data

    @always_inline
    def _load(self, filter: UInt32, filters: UInt32) -> Float32:
        """A filter's value, 0 beyond the last."""
        if filter < filters:
            return self.data[unsafe_offset=Int(filter)].cast[DType.float32]()
        return 0

    @always_inline
    def begin[
        swapped: Bool, parts: Int
    ](
        self, place: Place[swapped], filter: UInt32, filters: UInt32
    ) -> ChannelState:
        """Loads ahead what the thread will need, if that is little.

        Parameters:
            swapped: As in `Place`.
            parts: Sub-tiles along the filters.

        Args:
            place: The thread's.
            filter: The first filter of the consumer's part.
            filters: One beyond the last filter that there is.
        """
        var state = ChannelState(0)
        comptime if swapped:
            comptime for part in range(parts):
                comptime for half in range(2):
                    state[2 * part + half] = self._load(
                        filter
                        + place.filter()
                        + UInt32(part * SUBTILE_FILTERS + 8 * half),
                        filters,
                    )
        return state

    @always_inline
    def values[
        swapped: Bool, parts: Int, size: Int
    ](
        self,
        state: ChannelState,
        place: Place[swapped],
        part: UInt32,
        group: UInt32,
        filter: UInt32,
        filters: UInt32,
    ) -> SIMD[DType.float32, size]:
        """The values that belong to a fragment.

        Parameters:
            swapped: As in `Place`.
            parts: As in `begin`.
            size: Values of the fragment.

        Args:
            state: What `begin` returned.
            place: The thread's.
            part: The sub-tile's place along the filters.
            group: Of the fragment's first values, as in `Place.matrices`.
            filter: As in `begin`.
            filters: As in `begin`.
        """
        var result = SIMD[DType.float32, size](0)
        comptime if swapped:
            var pair = SIMD[DType.float32, 2](state[0], state[1])
            comptime for other in range(1, parts):
                if part == UInt32(other):
                    pair = SIMD[DType.float32, 2](
                        state[2 * other], state[2 * other + 1]
                    )
            comptime for i in range(size):
                comptime half = Place[swapped].filter_of(i) // 8
                result[i] = pair[half]
        else:
            comptime for i in range(size):
                result[i] = self._load(
                    filter
                    + part * SUBTILE_FILTERS
                    + place.filter()
                    + group * MATRIX_ROWS
                    + UInt32(Place[swapped].filter_of(i)),
                    filters,
                )
        return result


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

    var bias: ChannelVector[Self.bias_type]
    var scale: StaticTuple[ChannelVector[DType.float32], Self.VECTORS - 1]
    var has_bias: Bool
    var has_residual: Bool
    var beta: Float32
    var activation: DeviceActivation
    var final_activation: DeviceActivation

    @staticmethod
    def get_type_name() -> String:
        """The name in messages."""
        return "ConvVisitor"

    @staticmethod
    def of[
        residual_type: DType
    ](epilogue: Epilogue[Self.bias_type, residual_type]) raises -> Self:
        """The device's view of an epilogue; a residual that is multiplied with
        0 is none, and is not read.

        Parameters:
            residual_type: Of the residual.

        Args:
            epilogue: As the op has it.

        Raises:
            If there is a scale, or none, but the visitor is compiled for the
            contrary.
        """
        if epilogue.has_scale != Self.scaled:
            raise Error(
                t"sm90: has_scale is {epilogue.has_scale}, but the kernel was"
                t" compiled with scaled={Self.scaled}"
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

    @always_inline
    def reads_residual(self) -> Bool:
        """See `EpilogueVisitor`."""
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
        """See `EpilogueVisitor`."""
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
    def begin[layout: VisitLayout](self, at: Visited[layout]) -> Self.State:
        """Loads the thread's bias and scale."""
        var state = Self.State(fill=ChannelState(0))
        if self.has_bias:
            state[0] = self.bias.begin[parts=layout.parts](
                at.place, at.tile.filter, at.filter_end()
            )
        comptime if Self.scaled:
            state[Self.VECTORS - 1] = self.scale[0].begin[parts=layout.parts](
                at.place, at.tile.filter, at.filter_end()
            )
        return state

    @always_inline
    def visit[
        layout: VisitLayout, form: Int, size: Int
    ](
        self,
        mut state: Self.State,
        at: Visited[layout],
        subtile: Subtile,
        group: UInt32,
        residual: Residual[layout],
        values: SIMD[DType.float32, size],
    ) -> SIMD[DType.float32, size]:
        """See `EpilogueVisitor`."""
        comptime exact = layout.residual_type == DType.float32
        var bias = self._bias[size=size](state, at, subtile, group)
        comptime if form != LOOPED and not (exact or Self.scaled):
            comptime if FAST[form] == DeviceActivation.SILU:
                # One rounding, and the same value, as half of the sum.
                var half = values.fma(
                    SIMD[DType.float32, size](0.5), bias * 0.5
                )
                return self._limit(
                    self._add(silu_of_half(half), residual, group)
                )
        var v = values
        comptime if Self.scaled:
            v *= self.scale[0].values[parts=layout.parts, size=size](
                state[Self.VECTORS - 1],
                at.place,
                subtile.part,
                group,
                at.tile.filter,
                at.filter_end(),
            )
        v += bias
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
        layout: VisitLayout, size: Int
    ](
        self,
        state: Self.State,
        at: Visited[layout],
        subtile: Subtile,
        group: UInt32,
    ) -> SIMD[DType.float32, size]:
        """The bias of a fragment, or zeros."""
        # Without a bias the state is 0: no need to ask.
        if layout.swapped or self.has_bias:
            return self.bias.values[parts=layout.parts, size=size](
                state[0],
                at.place,
                subtile.part,
                group,
                at.tile.filter,
                at.filter_end(),
            )
        return SIMD[DType.float32, size](0)

    @always_inline
    def _add[
        layout: VisitLayout, size: Int
    ](
        self,
        v: SIMD[DType.float32, size],
        residual: Residual[layout],
        group: UInt32,
    ) -> SIMD[DType.float32, size]:
        """The residual on top, if there is one."""
        var result = v
        if residual.present:
            keep_branch()
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
