"""How kernels of a device reach the activation and the output: as memory, or
through what the graph compiler fused.

A slice that is passed to a kernel loses its fusion on the way, so the fusion
itself is passed, in one of the types below. With nothing fused they are
pointers, and all ops of a type share one compiled kernel.
"""

from extensibility.managed_tensor_slice import (
    ComputeOutputFusion,
    InputFusion,
    OutputFusion,
)
from std.sys.info import size_of
from std.utils import IndexList

from .device_value import DeviceValue
from .memory import Reads, Writes
from .problem import SPATIAL


@always_inline
def tensor_index[
    rank: Int
](n: Int, at: IndexList[SPATIAL], channel: Int) -> IndexList[rank]:
    """The index of an element in a tensor that lacks the leading spatial ones.

    Parameters:
        rank: Of the tensor: batch, spatial dimensions, channels.

    Args:
        n: The image.
        at: The position, with three spatial coordinates.
        channel: The channel.

    Returns:
        `[n, *at, channel]`, without the leading spatial coordinates.
    """
    var index = IndexList[rank](fill=0)
    index[0] = n
    comptime missing = SPATIAL - (rank - 2)
    comptime for i in range(rank - 2):
        index[1 + i] = at[missing + i]
    index[rank - 1] = channel
    return index


trait ActivationSource(DeviceValue, TrivialRegisterPassable):
    """The activation of a kernel, `[N, D, H, W, C]` unless `interleaved`."""

    comptime dtype: DType
    """Of its elements."""

    comptime interleaved: Int = 0
    """Channels of a block in the layouts of interleave.mojo, `ANY_BLOCK`, or
    0."""

    comptime fused: Bool
    """Whether loads compute what the graph compiler fused in front of the
    op."""

    def data(self) -> Reads[Self.dtype]:
        """The elements, if they are not `fused`."""
        ...

    def batch_last(self) -> Bool:
        """Whether the images are neighbours in memory, and not the pixels."""
        return False

    def load[
        width: Int, alignment: Int = width
    ](self, n: Int, at: IndexList[SPATIAL], channel: Int, offset: Int) -> SIMD[
        Self.dtype, width
    ]:
        """Neighbouring channels of one input pixel.

        Parameters:
            width: How many.
            alignment: Elements; the first one lies at a multiple of as many.

        Args:
            n: The image.
            at: The pixel, inside the image.
            channel: The first channel.
            offset: The first element's row-major offset.
        """
        ...


trait OutputTarget(DeviceValue, TrivialRegisterPassable):
    """The output of a kernel, `[N, Z, P, Q, K]` unless `interleaved`, after the
    epilogue and the rounding."""

    comptime dtype: DType
    """Of the rounded values."""

    comptime interleaved: Int = 0
    """`ANY_BLOCK` of interleave.mojo where `store` finds an element's place by
    its index, and not by an offset; else 0."""

    comptime computes: Bool
    """Whether `compute` changes values before they are stored."""

    comptime stores: Bool
    """Whether the fused work stores the values itself, and not at `data`."""

    def data(self) -> Writes[Self.dtype]:
        """The elements, if the fused work does not store."""
        ...

    def batch_last(self) -> Bool:
        """Whether the images are neighbours in memory, and not the pixels."""
        return False

    def addresses(self) -> Int:
        """The addresses that a plan looks at, or 0 if the fused work stores."""
        comptime if Self.stores:
            return 0
        return Int(self.data())

    @always_inline
    def compute[
        width: Int, alignment: Int = width
    ](
        self,
        n: Int,
        at: IndexList[SPATIAL],
        filter: Int,
        value: SIMD[Self.dtype, width],
    ) -> SIMD[Self.dtype, width]:
        """What to store at `data` for neighbouring filters of one pixel;
        `value` unless `computes`.

        Parameters:
            width: How many.
            alignment: Elements; the first one lies at a multiple of as many.

        Args:
            n: The image.
            at: The pixel.
            filter: The first filter.
            value: The rounded values.
        """
        return value

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
        """Computes, if anything is fused, and stores.

        Parameters:
            width: How many.
            alignment: Elements; the first one is at a multiple of as many.

        Args:
            n: The image.
            at: The pixel.
            filter: The first filter.
            offset: The first element's row-major offset.
            value: The rounded values.
        """
        comptime bytes = alignment * size_of[Self.dtype]()
        self.data().unsafe_store[alignment=bytes](
            offset, self.compute[width, alignment](n, at, filter, value)
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
        """Neighbouring filters of one pixel of another tensor that is laid out
        as the output is: a residual.

        Parameters:
            dtype: Of its elements.
            width: How many.

        Args:
            other: The tensor.
            n: The image.
            at: The pixel.
            filter: The first filter.
            offset: The first element's row-major offset.
        """
        return other.unsafe_load[width=width](offset)


@fieldwise_init
struct MemoryActivation[element_type: DType, block: Int = 0](ActivationSource):
    """An activation in memory.

    Parameters:
        element_type: Of its elements.
        block: Channels of a block in the layout of interleave.mojo, or 0.
    """

    comptime dtype = Self.element_type
    comptime interleaved = Self.block
    comptime fused = False

    var elements: Reads[Self.element_type]

    @always_inline
    def data(self) -> Reads[Self.dtype]:
        """The elements."""
        return self.elements

    @always_inline
    def load[
        width: Int, alignment: Int = width
    ](self, n: Int, at: IndexList[SPATIAL], channel: Int, offset: Int) -> SIMD[
        Self.dtype, width
    ]:
        comptime bytes = alignment * size_of[Self.dtype]()
        return self.elements.unsafe_load[width=width, alignment=bytes](offset)


@fieldwise_init
struct GraphActivation[element_type: DType, rank: Int, Fusion: InputFusion](
    ActivationSource
):
    """An activation that the work fused in front of the op computes.

    Parameters:
        element_type: Of its elements.
        rank: Of the op's tensor.
        Fusion: What the graph compiler made of it.
    """

    comptime dtype = Self.element_type
    comptime fused = True

    var elements: Reads[Self.element_type]
    var fusion: Self.Fusion

    @always_inline
    def data(self) -> Reads[Self.dtype]:
        """Nothing that may be read."""
        return self.elements

    @always_inline
    def load[
        width: Int, alignment: Int = width
    ](self, n: Int, at: IndexList[SPATIAL], channel: Int, offset: Int) -> SIMD[
        Self.dtype, width
    ]:
        return self.fusion.load[Self.dtype, Self.rank, width, alignment](
            tensor_index[Self.rank](n, at, channel)
        )


@fieldwise_init
struct MemoryOutput[element_type: DType](OutputTarget):
    """An output in memory, with nothing fused behind it.

    Parameters:
        element_type: Of its elements.
    """

    comptime dtype = Self.element_type
    comptime computes = False
    comptime stores = False

    var elements: Writes[Self.element_type]

    @always_inline
    def data(self) -> Writes[Self.dtype]:
        """The elements."""
        return self.elements


@fieldwise_init
struct ComputedOutput[
    element_type: DType, rank: Int, Fusion: ComputeOutputFusion
](OutputTarget):
    """An output whose values the graph compiler changes before the store.

    Parameters:
        element_type: Of its elements.
        rank: Of the op's tensor.
        Fusion: What the graph compiler made of the work behind the op.
    """

    comptime dtype = Self.element_type
    comptime computes = True
    comptime stores = False

    var elements: Writes[Self.element_type]
    var fusion: Self.Fusion

    @always_inline
    def data(self) -> Writes[Self.dtype]:
        """The elements."""
        return self.elements

    @always_inline
    def compute[
        width: Int, alignment: Int = width
    ](
        self,
        n: Int,
        at: IndexList[SPATIAL],
        filter: Int,
        value: SIMD[Self.dtype, width],
    ) -> SIMD[Self.dtype, width]:
        return self.fusion.compute[Self.dtype, Self.rank, width, alignment](
            tensor_index[Self.rank](n, at, filter), value
        )


@fieldwise_init
struct StoredOutput[element_type: DType, rank: Int, Fusion: OutputFusion](
    OutputTarget
):
    """An output that the graph compiler stores itself, maybe in another order
    or in another tensor.

    Parameters:
        element_type: Of the rounded values.
        rank: Of the op's tensor.
        Fusion: What the graph compiler made of the work behind the op.
    """

    comptime dtype = Self.element_type
    comptime computes = False
    comptime stores = True

    var elements: Writes[Self.element_type]
    var fusion: Self.Fusion

    @always_inline
    def data(self) -> Writes[Self.dtype]:
        """Nothing that may be written."""
        return self.elements

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
        self.fusion.store[Self.dtype, Self.rank, width, alignment](
            tensor_index[Self.rank](n, at, filter), value
        )
