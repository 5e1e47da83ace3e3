"""A convolution's filters as pixels of a larger image: its sub-pixel form (Shi
et al., "Real-Time Single Image and Video Super-Resolution Using an Efficient
Sub-Pixel Convolutional Neural Network", CVPR 2016).

A convolution of an image that was enlarged by repeating its pixels is one of
the small image, with a filter for each place in a block of pixels; taps that
meet in a pixel are summed (Aitken et al., "Checkerboard artifact free sub-pixel
convolution", 2017). The kernels compute the convolution of the small image, and
store each value at its place in the large one.
"""

from std.utils import IndexList

from .access import OutputTarget
from .divisor import Divisor
from .fields import GEOMETRY_BLOCK_D, GEOMETRY_CROP_D
from .memory import Writes
from .problem import SPATIAL, ConvProblem, Geometry


@fieldwise_init
struct Place(TrivialRegisterPassable):
    """Where a value of the convolution lies in the large image."""

    var at: IndexList[SPATIAL]
    """The pixel."""
    var filter: Int
    """Of all groups."""
    var following: Int
    """Filters behind it that are in the same pixel."""


struct DepthToSpace(ImplicitlyCopyable, TrivialRegisterPassable):
    """Which pixels of a large image a convolution's filters are.

    Of the filters of a group, `K / groups` follow each other for each place in
    a block, row by row. Output pixel `p` of the convolution is the block that
    begins at `p * block - crop`; of blocks that lie across the image's border,
    what is outside is dropped.
    """

    var group_filters: Divisor
    """Of the large image."""
    var places: Divisor
    """In a block."""
    var rows: Divisor
    var columns: Divisor
    var block: IndexList[SPATIAL]
    """Pixels that a small one becomes."""
    var crop: IndexList[SPATIAL]
    """Pixels of the first block that lie in front of the image."""
    var size: IndexList[SPATIAL]
    """Of the large image."""
    var filters: Int
    """Of the large image."""

    def __init__[
        rank: Int
    ](
        out self,
        geometry: Geometry,
        problem: ConvProblem,
        out_shape: IndexList[rank],
    ) raises:
        """Reads the geometry operand.

        Args:
            geometry: The decoded geometry operand.
            problem: The convolution of the small image, valid.
            out_shape: `[N, *size, K]`.

        Raises:
            Naming the argument, its value and what is allowed.
        """
        self.block = geometry.spatial(GEOMETRY_BLOCK_D)
        self.crop = geometry.spatial(GEOMETRY_CROP_D)
        self.size = IndexList[SPATIAL](fill=1)
        comptime missing = SPATIAL - (rank - 2)
        comptime for i in range(rank - 2):
            self.size[missing + i] = out_shape[1 + i]
        var places = 1
        for axis in range(SPATIAL):
            var block, crop = self.block[axis], self.crop[axis]
            if block < 1:
                raise Error(
                    t"upsample: {block} is not positive; every factor must be"
                    t" at least 1"
                )
            if crop < 0 or crop >= block:
                raise Error(
                    t"upsample: {crop} pixels in front of the image are not 0"
                    t" to {block - 1}"
                )
            places *= block
        self.filters = out_shape[rank - 1]
        self.group_filters = Divisor(max(1, self.filters // problem.groups))
        self.places = Divisor(places)
        self.rows = Divisor(self.block[1])
        self.columns = Divisor(self.block[2])

    @always_inline
    def place(self, at: IndexList[SPATIAL], filter: Int) -> Place:
        """Where a value of the convolution lies; it may be outside the image.

        Args:
            at: The convolution's output pixel.
            filter: The convolution's filter.
        """
        var piece, within = self.group_filters.split(UInt32(filter))
        var group, index = self.places.split(piece)
        var line, column = self.columns.split(index)
        var plane, row = self.rows.split(line)
        var inside = IndexList[SPATIAL](Int(plane), Int(row), Int(column))
        var found = at * self.block - self.crop + inside
        return Place(
            found,
            Int(group * self.group_filters.value + within),
            Int(self.group_filters.value - within - 1),
        )

    @always_inline
    def has(self, at: IndexList[SPATIAL]) -> Bool:
        """Whether the image has a pixel.

        Args:
            at: The pixel.
        """
        var inside = True
        comptime for axis in range(SPATIAL):
            inside &= 0 <= at[axis] < self.size[axis]
        return inside

    @always_inline
    def offset(self, n: Int, place: Place) -> Int:
        """The row-major offset of a value.

        Args:
            n: The image.
            place: Where it lies.
        """
        var pixel = n
        comptime for axis in range(SPATIAL):
            pixel = pixel * self.size[axis] + place.at[axis]
        return pixel * self.filters + place.filter


@fieldwise_init
struct DepthToSpaceOutput[Image: OutputTarget](OutputTarget):
    """The output of a convolution whose filters are pixels of a larger image.

    Parameters:
        Image: How the large image is reached.
    """

    comptime dtype = Self.Image.dtype
    comptime computes = False
    comptime stores = True

    var image: Self.Image
    var arrangement: DepthToSpace

    @always_inline
    def data(self) -> Writes[Self.dtype]:
        """Nothing that may be written."""
        return self.image.data()

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
        var place = self.arrangement.place(at, filter)
        # A vector of filters lies in one pixel where the pixel is made of such.
        var aligned = self.arrangement.group_filters.value % UInt32(
            alignment
        ) == UInt32(0)
        if aligned and place.following >= width - 1:
            if self.arrangement.has(place.at):
                self.image.store[width, alignment](
                    n,
                    place.at,
                    place.filter,
                    self.arrangement.offset(n, place),
                    value,
                )
            return
        comptime for i in range(width):
            var single = self.arrangement.place(at, filter + i)
            if self.arrangement.has(single.at):
                self.image.store[1](
                    n,
                    single.at,
                    single.filter,
                    self.arrangement.offset(n, single),
                    SIMD[Self.dtype, 1](value[i]),
                )


def validate_single_pixels(geometry: Geometry) raises:
    """Checks that a filter is one of the output's, as an op takes it that has
    no larger image.

    Args:
        geometry: The decoded geometry operand.

    Raises:
        If it is not.
    """
    var block = geometry.spatial(GEOMETRY_BLOCK_D)
    if block != IndexList[SPATIAL](fill=1):
        raise Error(
            t"upsample: {block}, but this op was compiled without; 1 along"
            t" every axis is allowed"
        )
