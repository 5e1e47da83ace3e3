"""The order of a packed filter's elements within a panel.

A panel is `PANEL` filters, side by side for each product. Dot-product
instructions add up neighbouring products of each filter, as many as 4 bytes
hold, which lie side by side then, and a filter row, the `S * C / groups` products
of one `(t, r)`, is filled up with zeros to whole `ROW_BYTES`. Elements of 32 bits
are neither paired nor filled up. Behind a panel of 8 bits lie the sums of its
filters, int32: times the activation's zero point they are what it added.
"""

from std.math import ceildiv
from std.sys.info import size_of

from .fields import PANEL, ROW_BYTES


def interleaved_products(dtype: DType) -> Int:
    """Neighbouring products of a filter that lie side by side in a panel: as
    many as 4 bytes hold.

    Args:
        dtype: Of the filter.

    Returns:
        4 for integers of 8 bits, 2 for types of 16 bits, otherwise 1.
    """
    if dtype == DType.int8 or dtype == DType.uint8:
        return 4
    return 2 if dtype.is_half_float() else 1


def shared_interleaved(dtype: DType, group_channels: Int) -> Int:
    """Neighbouring products of a filter that lie side by side in a panel that
    groups share: channels of one pixel.

    Args:
        dtype: Of the filter.
        group_channels: Channels of a group: 2, 4 or 8.

    Returns:
        `interleaved_products`, but 1 where groups have fewer channels.
    """
    var products = interleaved_products(dtype)
    return products if group_channels % products == 0 else 1


def chunk_products(dtype: DType) -> Int:
    """Products of a filter in `ROW_BYTES`, to whole ones of which a filter row is
    filled up: those of a step of a register tile.

    Args:
        dtype: Of the filter, of 8 or 16 bits.
    """
    return ROW_BYTES * interleaved_products(dtype) // size_of[DType.int32]()


@fieldwise_init
struct PanelLayout(Equatable, ImplicitlyCopyable, Movable):
    """Where a panel's elements lie: `[rows][row_depth / interleaved][PANEL]
    [interleaved]`."""

    var rows: Int
    """Filter rows."""
    var products: Int
    """Products of a filter row."""
    var row_depth: Int
    """The same with the zeros that fill it up."""
    var interleaved: Int
    """Neighbouring products of a filter that lie side by side."""

    @staticmethod
    def of(rows: Int, products: Int, dtype: DType) -> PanelLayout:
        """The layout for dot products.

        Args:
            rows: Filter rows.
            products: Of each.
            dtype: Of the filter.
        """
        var interleaved = interleaved_products(dtype)
        if interleaved == 1:
            return Self.plain(rows, products)
        var unit = chunk_products(dtype)
        return PanelLayout(
            rows, products, ceildiv(products, unit) * unit, interleaved
        )

    @staticmethod
    def plain(rows: Int, products: Int) -> PanelLayout:
        """A product after the other, with no zeros between.

        Args:
            rows: Filter rows.
            products: Of each.
        """
        return PanelLayout(rows, products, products, 1)

    @always_inline
    def depth(self) -> Int:
        """Products of a filter, zeros included."""
        return self.rows * self.row_depth

    @always_inline
    def sums_offset(self) -> Int:
        """Elements in front of the sums of a panel's filters."""
        return self.depth() * PANEL

    @always_inline
    def has_sums(self) -> Bool:
        """Whether the sums of its filters lie behind a panel."""
        return self.interleaved == 4

    @always_inline
    def elements(self) -> Int:
        """Of a panel, with the sums of its filters if it has them."""
        var sums = size_of[DType.int32]() * PANEL if self.has_sums() else 0
        return self.sums_offset() + sums

    @always_inline
    def offset(self, step: Int, lane: Int) -> Int:
        """Where an element lies in its panel.

        Args:
            step: The product, from 0 to `depth() - 1`.
            lane: The filter, from 0 to `PANEL - 1`.
        """
        # Filters that each call packs ask for every product: no division.
        if self.interleaved == 1:
            return step * PANEL + lane
        var set, place = divmod(step, self.interleaved)
        return (set * PANEL + lane) * self.interleaved + place
