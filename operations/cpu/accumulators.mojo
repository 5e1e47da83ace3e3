"""A register tile's sums in memory, and the outputs that they are for."""

from ..conv.fields import PANEL
from ..conv.memory import CACHE_LINE, Reads, Writes


@fieldwise_init
struct FilterSums(ImplicitlyCopyable, Movable):
    """What products of integers have too much: the sums of the filters, times
    how far the activations were above what they are."""

    var elements: Reads[DType.int32]
    """The filters' own sums, those of a panel side by side."""
    var panel_stride: Int
    """Elements between those of two panels."""
    var zero_point: Int32
    """How far above they are the activations were multiplied."""

    @staticmethod
    def none() -> Self:
        """Nothing that is read."""
        return Self(Reads[DType.int32](unsafe_from_address=CACHE_LINE), 0, 0)

    @always_inline
    def behind(self, panels: Int) -> Self:
        """Those of later panels.

        Args:
            panels: How many lie in front.
        """
        return Self(
            self.elements.unsafe_offset(panels * self.panel_stride),
            self.panel_stride,
            self.zero_point,
        )

    @always_inline
    def excess[
        dtype: DType, width: Int
    ](self, first: Int) -> SIMD[dtype, width]:
        """What is to be subtracted from the sums of neighbouring filters. Both
        may have wrapped; the difference has not.

        Parameters:
            dtype: Of the sums, int32.
            width: How many filters.

        Args:
            first: The first filter of the tile.
        """
        var panel, lane = divmod(first, PANEL)
        var sums = self.elements.unsafe_load[width=width, alignment=1](
            panel * self.panel_stride + lane
        )
        return (sums * self.zero_point).cast[dtype]()


@fieldwise_init
struct Accumulators[dtype: DType](ImplicitlyCopyable, Movable):
    """The sums of a tile, in memory.

    Parameters:
        dtype: Of the sums: float32, or int32 of which something is left to
            subtract.
    """

    var elements: Writes[DType.float32]
    """Bits of the sums."""
    var row_stride: Int
    """Elements between two rows of sums."""
    var filter_sums: FilterSums
    """What is left to subtract, if `dtype` is int32."""

    @staticmethod
    def floats(
        elements: Writes[DType.float32], row_stride: Int
    ) -> Accumulators[DType.float32]:
        """Sums that are complete.

        Args:
            elements: The sums.
            row_stride: Elements between two rows of them.
        """
        return {elements, row_stride, FilterSums.none()}

    @always_inline
    def excess[width: Int](self, first: Int) -> SIMD[Self.dtype, width]:
        """What is to be subtracted from the sums of neighbouring filters.

        Parameters:
            width: How many filters.

        Args:
            first: The first filter of the tile.
        """
        comptime if Self.dtype == DType.int32:
            return self.filter_sums.excess[Self.dtype, width](first)
        return SIMD[Self.dtype, width](0)

    @always_inline
    def load[
        width: Int
    ](self, at: Int, excess: SIMD[Self.dtype, width]) -> SIMD[
        DType.float32, width
    ]:
        """Neighbouring sums as numbers.

        Parameters:
            width: How many.

        Args:
            at: The first, counted from `elements`.
            excess: What `excess` returned for them.
        """
        comptime if Self.dtype == DType.int32:
            var sums = self.elements.unsafe_bitcast[Scalar[Self.dtype]]()
            return (sums.unsafe_load[width=width](at) - excess).cast[
                DType.float32
            ]()
        else:
            return self.elements.unsafe_load[width=width](at)


@fieldwise_init
struct OutputTile(ImplicitlyCopyable, Movable):
    """Outputs that are stored together: rows of the implicit GEMM, which are
    pixels, by neighbouring filters."""

    var row: Int
    """The first."""
    var rows: Int
    var filter: Int
    """The first, counted over all groups."""
    var filters: Int
