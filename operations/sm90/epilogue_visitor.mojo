"""What happens to the values of a sub-tile between multiply and store, all in
float32.

A visitor sees a consumer's part of a tile: `begin` before it is multiplied, then
of each sub-tile `visit`, a fragment of its values at a time.
"""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder

from ..conv.epilogue import Epilogue
from ..conv.memory import Reads
from .epilogue_config import SUBTILE_FILTERS
from .epilogue_fragment import MATRIX_ROWS, Place
from .epilogue_math import DeviceActivation, keep_branch

comptime MAX_PARTS = 4
"""Sub-tiles along the filters of a consumer's part, at most."""

comptime ANY_FORMULA = Int32(-1)
"""An activation that is known at run time only."""

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
struct ConvVisitor[bias_type: DType](DevicePassable, TrivialRegisterPassable):
    """The work of `conv.epilogue.Epilogue`: bias, activation, residual, final
    activation, each or none as run-time values say.

    Parameters:
        bias_type: Of the bias.
    """

    var bias: ChannelVector[Self.bias_type]
    var has_bias: Bool
    var has_residual: Bool
    var beta: Float32
    var activation: DeviceActivation
    var final_activation: DeviceActivation

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """The name in messages."""
        return "ConvVisitor"

    @staticmethod
    def of[
        residual_type: DType
    ](epilogue: Epilogue[Self.bias_type, residual_type]) -> Self:
        """The device's view of an epilogue; a residual that is multiplied with
        0 is none, and is not read.

        Parameters:
            residual_type: Of the residual.

        Args:
            epilogue: As the op has it.
        """
        return Self(
            ChannelVector(epilogue.bias),
            epilogue.has_bias,
            epilogue.has_residual and epilogue.beta != 0,
            epilogue.beta,
            DeviceActivation.of(epilogue.activation),
            DeviceActivation.of(epilogue.final_activation),
        )

    @always_inline
    def has_simple_end(self) -> Bool:
        """Whether the final activation is none, or limits values."""
        return (
            self.final_activation.formula == DeviceActivation.NONE
            or self.final_activation.formula == DeviceActivation.LIMITS
        )

    @always_inline
    def is_identity(self) -> Bool:
        """Whether `visit` changes nothing."""
        return not (
            self.has_bias
            or self.has_residual
            or self.activation.formula != DeviceActivation.NONE
            or self.final_activation.formula != DeviceActivation.NONE
        )

    @always_inline
    def begin[
        swapped: Bool, parts: Int
    ](
        self, place: Place[swapped], filter: UInt32, filters: UInt32
    ) -> ChannelState:
        """Loads the thread's bias.

        Parameters:
            swapped: As in `Place`.
            parts: As in `ChannelVector.begin`.

        Args:
            place: As in `ChannelVector.begin`.
            filter: As in `ChannelVector.begin`.
            filters: As in `ChannelVector.begin`.
        """
        if self.has_bias:
            return self.bias.begin[swapped, parts](place, filter, filters)
        return ChannelState(0)

    @always_inline
    def visit[
        swapped: Bool, parts: Int, formula: Int32, size: Int
    ](
        self,
        state: ChannelState,
        place: Place[swapped],
        part: UInt32,
        group: UInt32,
        filter: UInt32,
        filters: UInt32,
        accumulators: SIMD[DType.float32, size],
    ) -> SIMD[DType.float32, size]:
        """Bias and activation.

        Parameters:
            swapped: As in `Place`.
            parts: As in `ChannelVector.begin`.
            formula: The activation's, or `ANY_FORMULA`, and it is still to be
                applied.
            size: Values of the fragment.

        Args:
            state: What `begin` returned.
            place: As in `ChannelVector.values`.
            part: As in `ChannelVector.values`.
            group: As in `ChannelVector.values`.
            filter: As in `ChannelVector.values`.
            filters: As in `ChannelVector.values`.
            accumulators: The sums.
        """
        var v = accumulators
        # Without a bias the state is 0: no need to ask.
        if swapped or self.has_bias:
            v += self.bias.values[swapped, parts, size](
                state, place, part, group, filter, filters
            )
        comptime if formula == ANY_FORMULA:
            return v
        else:
            return self.activation.evaluate[formula](v)

    @always_inline
    def add[
        size: Int
    ](
        self,
        v: SIMD[DType.float32, size],
        residual: SIMD[DType.float32, size],
    ) -> SIMD[DType.float32, size]:
        """The residual on top.

        Parameters:
            size: Values of the fragment.

        Args:
            v: What `visit` returned.
            residual: The residual's values.
        """
        return residual.fma(SIMD[DType.float32, size](self.beta), v)

    @always_inline
    def end[
        size: Int
    ](self, v: SIMD[DType.float32, size]) -> SIMD[DType.float32, size]:
        """The final activation, if it `has_simple_end`.

        Parameters:
            size: Values of the fragment.

        Args:
            v: What `visit` or `add` returned.

        Returns:
            The values to be rounded.
        """
        var result = v
        if self.final_activation.formula != DeviceActivation.NONE:
            keep_branch()
            result = self.final_activation.evaluate[DeviceActivation.LIMITS](v)
        return result
