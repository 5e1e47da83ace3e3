"""The tile of a block, and who computes which part of it."""

from std.sys.info import size_of

from ..limits import MAX_SHARED_BYTES, MMA_K_BYTES, WARP
from ..pipeline.chunks import CHUNK_BYTES

comptime ROW_BYTES = 128
"""Bytes of a pixel's, or a filter's, slice of products in shared memory."""

comptime RESERVED_BYTES = 1024
"""Of a block's shared memory, what the system takes (CUDA C++ Programming Guide,
compute capability 8.0 and above)."""

comptime ROW_CHUNKS = ROW_BYTES // CHUNK_BYTES
"""Copies of a row."""

comptime STEPS = ROW_BYTES // MMA_K_BYTES
"""Multiplies of a slice, one after the other."""

comptime MATRIX_ROWS = 16
"""Pixels of a multiply, and filters of two that share a load."""

comptime SPREAD = 8
"""Elements by which rows of sums are longer than the filters: four rows of a
store are then in all banks."""


@fieldwise_init
struct MmaTile(Equatable, ImplicitlyCopyable, Movable):
    """A tile of pixels by filters, and the warps that multiply it."""

    var pixels: Int
    var filters: Int
    var pixel_warps: Int
    """Warps along the pixels."""
    var filter_warps: Int
    """Warps along the filters."""
    var product_warps: Int
    """Warps that share a part of the tile: each multiplies some of a slice's
    products."""
    var stages: Int
    """Slices that are loaded or multiplied at the same time."""

    def threads(self) -> Int:
        """Threads of a block."""
        return WARP * self.pixel_warps * self.filter_warps * self.product_warps

    def warp_pixels(self) -> Int:
        """Pixels of a warp."""
        return self.pixels // self.pixel_warps

    def warp_filters(self) -> Int:
        """Filters of a warp."""
        return self.filters // self.filter_warps

    def warp_steps(self) -> Int:
        """Multiplies of a slice that a warp does."""
        return STEPS // self.product_warps

    def stage_bytes(self) -> Int:
        """Shared memory of a slice."""
        return (self.pixels + self.filters) * ROW_BYTES

    def sums_stride(self) -> Int:
        """Elements from one pixel's sums to the next's."""
        return self.filters + SPREAD

    def part_elements(self) -> Int:
        """Elements of the sums of one of `product_warps`."""
        return self.pixels * self.sums_stride()

    def shared_bytes(self) -> Int:
        """Shared memory of a block: the stages, and the sums in their place."""
        return max(
            self.stages * self.stage_bytes(),
            self.product_warps
            * self.part_elements()
            * size_of[DType.float32](),
        )

    def resident(self) -> Int:
        """Blocks for which a Hopper multiprocessor's shared memory has room."""
        return (MAX_SHARED_BYTES + RESERVED_BYTES) // (
            self.shared_bytes() + RESERVED_BYTES
        )

    def is_valid(self) -> Bool:
        """Whether warps and threads divide the tile's parts and loads evenly.
        """
        var threads = self.threads()
        return (
            self.warp_pixels() % MATRIX_ROWS == 0
            and self.warp_filters() % MATRIX_ROWS == 0
            and STEPS % self.product_warps == 0
            and self.stages >= 2
            # A thread's rows have the same place in the swizzle's pattern.
            and threads % (8 * ROW_CHUNKS) == 0
            and self.pixels * ROW_CHUNKS % threads == 0
            and self.filters * ROW_CHUNKS % threads == 0
        )


comptime LARGE = MmaTile(
    pixels=128,
    filters=64,
    pixel_warps=4,
    filter_warps=1,
    product_warps=1,
    stages=4,
)
"""For many pixels: 98,304 bytes, which every GPU since Ampere has."""

comptime SQUARE = MmaTile(
    pixels=64,
    filters=64,
    pixel_warps=2,
    filter_warps=2,
    product_warps=1,
    stages=4,
)
"""For fewer."""

comptime TALL = MmaTile(
    pixels=64,
    filters=32,
    pixel_warps=2,
    filter_warps=1,
    product_warps=2,
    stages=4,
)
"""For as few, and few filters or many slices: warps share the products."""

comptime SMALL = MmaTile(
    pixels=32,
    filters=32,
    pixel_warps=1,
    filter_warps=1,
    product_warps=4,
    stages=4,
)
"""For few pixels: more blocks, whose warps share the products."""

comptime TILES = [LARGE, SQUARE, TALL, SMALL]
"""The tiles that are compiled, larger ones first."""
