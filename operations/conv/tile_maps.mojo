"""Which outputs a block of a grid computes where tensors are interleaved, and what
accesses the layouts allow.

The matrix product has K rows, the filters, and N * P * Q columns, the pixels. A
block multiplies tile_M x tile_N x tile_K of them a step.
"""

from std.collections import Optional
from std.math import ceildiv
from std.utils import IndexList

from .interleave import BlockLayout
from .memory import element_bytes

comptime DP4A_BYTES = 4
"""Of an access of a dp4a kernel: what an instruction multiplies."""

comptime TENSOR_CORE_BYTES = 16
"""Of an access of a kernel of tensor cores: what a thread copies at a time."""


@fieldwise_init
struct TileOrigin(Equatable, ImplicitlyCopyable, Movable):
    """The first output of a block of the batch map."""

    var p: Int
    var q: Int
    var n: Int
    var k: Int


@fieldwise_init
struct TileMap(Equatable, ImplicitlyCopyable, Movable):
    """The tile of a block, tile_M x tile_N x tile_K.

    With channel-blocked tensors, NC/xHWx, the grid is

        (ceil(N * P * Q / tile_N), ceil(K / tile_M), 1)

    and block (x, y) computes rows from y * tile_M and columns from x * tile_N on.
    With batch-blocked tensors, C/xHWNx, it is

        (P * Q, ceil(N / tile_N), ceil(K / tile_M))

    and block (x, y, z) computes the pixel p = x / Q, q = x - p * Q of the images
    from n = y * tile_N on by the filters from k = z * tile_M on. Both take
    ceil(C / tile_K) steps for each tap.
    """

    var filters: Int
    """tile_M."""
    var columns: Int
    """tile_N: pixels, or images."""
    var channels: Int
    """tile_K."""

    def grid(self, pixels: Int, filters: Int) -> IndexList[3]:
        """The blocks of channel-blocked tensors.

        Args:
            pixels: Of the output, N * P * Q.
            filters: Of the problem, K.
        """
        return IndexList[3](
            ceildiv(pixels, self.columns), ceildiv(filters, self.filters), 1
        )

    def batch_grid(
        self, pixels: Int, images: Int, filters: Int
    ) -> IndexList[3]:
        """The blocks of batch-blocked tensors.

        Args:
            pixels: Of an image of the output, P * Q.
            images: N.
            filters: K.
        """
        return IndexList[3](
            pixels,
            ceildiv(images, self.columns),
            ceildiv(filters, self.filters),
        )

    @always_inline
    def first_column(self, x: Int) -> Int:
        """The first column of a block of channel-blocked tensors.

        Args:
            x: The block's index along x.
        """
        return x * self.columns

    @always_inline
    def first_filter(self, y: Int) -> Int:
        """The first filter of a block of channel-blocked tensors.

        Args:
            y: The block's index along y.
        """
        return y * self.filters

    def batch_origin(self, block: IndexList[3], width: Int) -> TileOrigin:
        """The first output of a block of batch-blocked tensors.

        Args:
            block: The block's index.
            width: Of the output, Q.
        """
        var p, q = divmod(block[0], width)
        return TileOrigin(
            p, q, block[1] * self.columns, block[2] * self.filters
        )

    @always_inline
    def steps(self, channels: Int) -> Int:
        """Steps of a tap.

        Args:
            channels: Of the problem, C.
        """
        return ceildiv(channels, self.channels)


def access_refusal(
    layout: BlockLayout, dtype: DType, bytes: Int
) -> Optional[String]:
    """Why a layout does not allow accesses of so many bytes, or None: its strides
    are multiples of a block, and so must be those of the accesses.

    Args:
        layout: The layout, not channels last.
        dtype: Of the elements.
        bytes: Of an access.
    """
    var elements = bytes // element_bytes(dtype)
    if layout.x % elements == 0:
        return None
    return String(
        t"accesses of {bytes} bytes are {elements} elements of {dtype}; the"
        t" strides of {layout.name()} are multiples of {layout.x}"
    )
