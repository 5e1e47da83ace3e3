"""The traversal of TMA over a convolution's activation (im2col), and
what a descriptor of its rank can hold.

A convolution of any rank becomes a traversal of rank 3, 4 or 5: channels, one
to three spatial axes, and what lies outermost.
"""

from std.collections import Optional
from std.math import ceildiv
from std.utils import IndexList

from ...conv.fields import COPY_BYTES
from ...conv.memory import element_bytes
from ...conv.problem import SPATIAL, ConvProblem, axis_name

comptime ROW_BYTES = 128
"""Bytes of a tile's row: the span of the swizzle."""

comptime SECTOR_BYTES = 32
"""Bytes of a sector of the L2."""

comptime MAX_ELEMENT_STRIDE = 8
"""The largest traversal stride of a descriptor."""

comptime MAX_RANK = 5
"""Coordinates of a descriptor, at most."""

comptime OFFSET_BITS = 16
"""Bits that the spatial axes of a traversal share for a load's filter offsets,
and as many for each corner (PTX ISA, "im2col mode")."""


struct Traversal(ImplicitlyCopyable, Movable):
    """A convolution's pixels in the order in which TMA visits them.

    Axes are 0 to 2: depth, height, width. Axes that a filter does not reach
    along are merged with their neighbours, so that few ranks serve all
    problems. The groups of a grouped convolution are the outermost dimension,
    whose pixels are `channels` wide, and the images are the depth: a load
    stays within its group, and beyond the group's channels come zeros."""

    var rank: Int
    """Of the descriptor; beyond `MAX_RANK` there is none."""
    var images: Int
    """Of the traversal: 1 if the images are its depth."""
    var groups: Int
    var channels: Int
    """Of a group."""
    var channel_bytes: Int
    """Of the activation's elements."""
    var filters: Int
    """Of a group."""
    var pixel_step: Int
    """Elements from a pixel to the next: the channels of all groups."""
    var input: IndexList[SPATIAL]
    var output: IndexList[SPATIAL]
    var filter: IndexList[SPATIAL]
    var stride: IndexList[SPATIAL]
    var dilation: IndexList[SPATIAL]
    var pad_before: IndexList[SPATIAL]
    var pad_after: IndexList[SPATIAL]

    def __init__(out self, problem: ConvProblem, in_type: DType):
        """Merges axes, and finds the rank.

        Args:
            problem: The convolution, valid (`ConvProblem.validate`).
            in_type: Of the activation.
        """
        self.rank = MAX_RANK
        self.images = problem.batch
        self.groups = problem.groups
        self.channels = problem.group_channels()
        self.channel_bytes = element_bytes(in_type)
        self.filters = problem.group_filters()
        self.pixel_step = problem.channels
        self.input = problem.input
        self.output = problem.output
        self.filter = problem.filter
        self.stride = problem.stride
        self.dilation = problem.dilation
        self.pad_before = problem.pad_before
        self.pad_after = problem.pad_after
        self._merge()
        if self.groups > 1:
            self._traverse_images()
        elif self._is_point(0):
            self.rank = MAX_RANK - 1
            if self._is_point(1) and self._axis_refusal(2, 0):
                self.rank = MAX_RANK - 2

    def _merge(mut self):
        """Takes the depth out of the traversal, if the filter does not reach
        along it, or along the two others."""
        if self._is_plain(0):
            self.images *= self.input[0]
            self._clear(0)
        elif self._is_plain(1) and self._is_plain(2):
            var pixels = self.input[1] * self.input[2]
            self._copy(0, 1)
            self._clear(0)
            self._clear(2)
            self.input[2] = pixels
            self.output[2] = pixels

    def _traverse_images(mut self):
        """Makes the images the traversal's depth, if that is free."""
        if not self._is_point(0):
            self.rank = MAX_RANK + 1
            return
        self.input[0] = self.images
        self.output[0] = self.images
        self.images = 1

    def _is_plain(self, axis: Int) -> Bool:
        """Whether output pixels are the input's along an axis."""
        return (
            self.filter[axis] == 1
            and (self.stride[axis] == 1 or self.input[axis] == 1)
            and self.pad_before[axis] == 0
            and self.pad_after[axis] == 0
        )

    def _is_point(self, axis: Int) -> Bool:
        """Whether there is only one pixel along an axis."""
        return self._is_plain(axis) and self.input[axis] == 1

    def _clear(mut self, axis: Int):
        """Leaves one pixel of an axis."""
        self.input[axis] = 1
        self.output[axis] = 1
        self.filter[axis] = 1
        self.stride[axis] = 1
        self.dilation[axis] = 1
        self.pad_before[axis] = 0
        self.pad_after[axis] = 0

    def _copy(mut self, source: Int, to: Int):
        """Copies an axis from another."""
        self.input[to] = self.input[source]
        self.output[to] = self.output[source]
        self.filter[to] = self.filter[source]
        self.stride[to] = self.stride[source]
        self.dilation[to] = self.dilation[source]
        self.pad_before[to] = self.pad_before[source]
        self.pad_after[to] = self.pad_after[source]

    def taps(self) -> Int:
        """Filter positions."""
        return self.filter[0] * self.filter[1] * self.filter[2]

    def slices(self) -> Int:
        """Stages that the channels of one tap fill."""
        return ceildiv(self.channels * self.channel_bytes, ROW_BYTES)

    def steps(self) -> Int:
        """Steps of a tile's sum: a slice of a tap each."""
        return self.taps() * self.slices()

    def row_channels(self) -> Int:
        """Channels of a row of a tile."""
        return ROW_BYTES // self.channel_bytes

    def slice_channels(self) -> Int:
        """Channels of a slice: equal parts, so that none ends beyond the
        channels, which takes TMA several times as long. A slice is a whole row
        where the second slice would begin within a sector of the L2."""
        var slices = self.slices()
        var part, rest = divmod(self.channels, slices)
        if slices == 1 or (
            rest == 0 and part * self.channel_bytes % SECTOR_BYTES == 0
        ):
            return part
        return self.row_channels()

    def span(self, axis: Int) -> Int:
        """Input pixels that the dilated filter covers along an axis."""
        return (self.filter[axis] - 1) * self.dilation[axis] + 1

    def upper(self, axis: Int, halo: Int) -> Int:
        """The upper corner along an axis: the filter's last position, or,
        along the width of a tile with a halo, the padding's end.

        Args:
            axis: 0 to 2.
            halo: The configuration's.

        Returns:
            Pixels beyond the tensor's end, negative before it.
        """
        if halo > 0 and axis == 2:
            return self.pad_after[axis]
        return self.pad_after[axis] - (self.span(axis) - 1)

    def width(self, halo: Int) -> Int:
        """Pixels of a row of the traversal: the output's, or the padded input's
        if tiles have a halo."""
        if halo > 0:
            return self.input[2] + self.pad_before[2] + self.pad_after[2]
        return self.output[2]

    def rows(self) -> Int:
        """Rows of the traversal, over all depths and images."""
        return self.images * self.output[0] * self.output[1]

    def pixels(self, halo: Int) -> Int:
        """Pixels of the traversal."""
        return self.rows() * self.width(halo)

    def refusal(self, halo: Int) -> Optional[String]:
        """Why no descriptor holds the traversal.

        Returns:
            The reason, or None.
        """
        if self.rank > MAX_RANK:
            return String(
                t"a descriptor has {MAX_RANK} dimensions, and {self.groups}"
                t" groups of a convolution over depth, height and width need"
                t" {self.rank}"
            )
        var refusal = self.channel_refusal()
        if refusal:
            return refusal
        for axis in range(SPATIAL - (self.rank - 2), SPATIAL):
            var refused = self._axis_refusal(axis, halo)
            if refused:
                return refused
        return None

    def channel_refusal(self) -> Optional[String]:
        """Why no descriptor holds the activation's pixels, or None."""
        if self.channels * self.channel_bytes % COPY_BYTES == 0:
            return None
        return String(
            t"TMA takes pixels of multiples of {COPY_BYTES} bytes; here"
            t" {self.channels} input channels{self._each()}"
        )

    def output_refusal(self, filter_bytes: Int) -> Optional[String]:
        """Why no descriptor holds the output.

        Args:
            filter_bytes: Of the output's elements.

        Returns:
            The reason, or None.
        """
        if self.filters * filter_bytes % COPY_BYTES == 0:
            return None
        return String(
            t"TMA takes pixels of multiples of {COPY_BYTES} bytes; here"
            t" {self.filters} output channels{self._each()}"
        )

    def _each(self) -> String:
        """What messages add to a count of channels."""
        return " in each group" if self.groups > 1 else ""

    def _axis_refusal(self, axis: Int, halo: Int) -> Optional[String]:
        """Why a descriptor of the traversal's rank cannot hold an axis."""
        var name = axis_name(axis)
        if self.stride[axis] > MAX_ELEMENT_STRIDE:
            return String(
                t"a descriptor's stride is at most {MAX_ELEMENT_STRIDE}; here"
                t" {self.stride[axis]} along {name}"
            )
        var bits = OFFSET_BITS // (self.rank - 2)
        var lowest = -(1 << (bits - 1))
        var highest = (1 << (bits - 1)) - 1
        var upper = self.upper(axis, halo)
        if -self.pad_before[axis] < lowest or upper < lowest or upper > highest:
            return String(
                t"corners of a descriptor of rank {self.rank} lie within"
                t" {lowest} to {highest}; here {-self.pad_before[axis]} and"
                t" {upper} along {name}"
            )
        if self.span(axis) - 1 >= 1 << bits:
            return String(
                t"offsets of a load of rank {self.rank} are at most"
                t" {(1 << bits) - 1}; here {self.span(axis) - 1} along {name}"
            )
        if self.input[axis] >= 1 << 31:
            return String(
                t"{self.input[axis]} pixels along {name}; coordinates have 31"
                t" bits"
            )
        return None
