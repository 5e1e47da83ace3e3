"""How kernels reach an activation and an output in an interleaved layout that a
call tells (interleave.mojo)."""

from std.utils import IndexList

from .access import ActivationSource, OutputTarget
from .fields import INTERLEAVED
from .interleave import ANY_BLOCK, Interleaved
from .memory import Reads, Writes
from .problem import SPATIAL


@fieldwise_init
struct BlockedActivation[element_type: DType](ActivationSource):
    """An interleaved activation in memory, of one volume of depth 1.

    Parameters:
        element_type: Of its elements.
    """

    comptime dtype = Self.element_type
    comptime interleaved = ANY_BLOCK
    comptime fused = False

    var elements: Reads[Self.element_type]
    var map: Interleaved[]

    @always_inline
    def data(self) -> Reads[Self.dtype]:
        """The elements."""
        return self.elements

    def batch_last(self) -> Bool:
        return self.map.batch_last

    @always_inline
    def load[
        width: Int, alignment: Int = width
    ](self, n: Int, at: IndexList[SPATIAL], channel: Int, offset: Int) -> SIMD[
        Self.dtype, width
    ]:
        var values = SIMD[Self.dtype, width](0)
        comptime for i in range(width):
            values[i] = self.elements[
                unsafe_offset=self.map.offset(n, channel + i, at[1], at[2])
            ]
        return values


@fieldwise_init
struct BlockedOutput[Tensor: OutputTarget](OutputTarget):
    """An interleaved output, of one volume of depth 1. Vectors that are longer
    than a block are stored a block at a time.

    Parameters:
        Tensor: The op's tensor, of rank 5: a pointer, or fused work.
    """

    comptime dtype = Self.Tensor.dtype
    comptime interleaved = ANY_BLOCK
    comptime computes = Self.Tensor.computes
    comptime stores = True

    var tensor: Self.Tensor
    var map: Interleaved[]

    @always_inline
    def data(self) -> Writes[Self.dtype]:
        """Nothing that may be written."""
        return self.tensor.data()

    def batch_last(self) -> Bool:
        return self.map.batch_last

    @always_inline
    def store[
        width: Int, alignment: Int = width
    ](
        self,
        n: Int,
        at: IndexList[SPATIAL],
        filter: Int,
        offset: Int,
        value: SIMD[Self.dtype, width],
    ):
        comptime if width > INTERLEAVED:
            if self.map.x() < width:
                comptime for i in range(0, width, INTERLEAVED):
                    self._store[INTERLEAVED](
                        n,
                        at,
                        filter + i,
                        value.slice[INTERLEAVED, offset=i](),
                    )
                return
        self._store[width](n, at, filter, value)

    @always_inline
    def _store[
        width: Int
    ](
        self,
        n: Int,
        at: IndexList[SPATIAL],
        filter: Int,
        value: SIMD[Self.dtype, width],
    ):
        """Stores neighbouring filters of one block."""
        var index = self.map.index(n, filter, at[1], at[2])
        # The tensor's own index, in the places of one of channels last.
        self.tensor.store[width, alignment=1](
            index[0],
            IndexList[SPATIAL](index[1], index[2], index[3]),
            index[4],
            self.map.offset(n, filter, at[1], at[2]),
            rebind[SIMD[Self.Tensor.dtype, width]](value),
        )

    @always_inline
    def load_beside[
        dtype: DType, width: Int
    ](
        self,
        other: Reads[dtype],
        n: Int,
        at: IndexList[SPATIAL],
        filter: Int,
        offset: Int,
    ) -> SIMD[dtype, width]:
        comptime if width > INTERLEAVED:
            if self.map.x() < width:
                var values = SIMD[dtype, width](0)
                comptime for i in range(0, width, INTERLEAVED):
                    var piece = other.unsafe_load[width=INTERLEAVED](
                        self.map.offset(n, filter + i, at[1], at[2])
                    )
                    values = values.insert[offset=i](piece)
                return values
        return other.unsafe_load[width=width](
            self.map.offset(n, filter, at[1], at[2])
        )
