"""A problem as the general kernels see it: in 32 bits where they suffice, with
precomputed divisors."""

from std.collections import Optional
from std.utils import IndexList

from ..conv.device_value import DeviceValue
from ..conv.divisor import Divisor
from ..conv.problem import SPATIAL, ConvProblem

comptime Position = SIMD[DType.int32, 4]
"""A pixel: depth, height, width, image."""

comptime IMAGE = 3
"""The index of the image in a `Position`."""

comptime LIMIT = 1 << 30
"""The limit of extents, of filter elements of one output channel, and of
images."""

comptime OUTSIDE = Int32(-(1 << 30))
"""A coordinate from which no tap reaches the image."""


@fieldwise_init
struct GpuGeometry(DeviceValue, TrivialRegisterPassable):
    """The geometry of a convolution, for a kernel."""

    var pixels: Int
    """Output pixels of all images."""
    var groups: Int
    var output: Position
    var input: Position
    var stride: Position
    var padding: Position
    """Before each dimension."""
    var dilation: Position
    var channels: Int32
    """Of all groups."""
    var filters: Int32
    """Of all groups."""
    var group_channels: Divisor
    var group_filters: Divisor
    var rows: Divisor
    """Taps along h."""
    var columns: Divisor
    """Taps along w."""
    var depth: Int32
    """Products of an output element."""

    def __init__(out self, problem: ConvProblem):
        """Converts a problem.

        Args:
            problem: The convolution; `geometry_refusal` has agreed.
        """
        self.pixels = problem.gemm_m()
        self.groups = problem.groups
        self.output = _position(problem.output, problem.batch)
        self.input = _position(problem.input, problem.batch)
        self.stride = _position(problem.stride, 1)
        self.padding = _position(problem.pad_before, 0)
        self.dilation = _position(problem.dilation, 0)
        self.channels = Int32(problem.channels)
        self.filters = Int32(problem.filters)
        self.group_channels = Divisor(problem.group_channels())
        self.group_filters = Divisor(problem.group_filters())
        self.rows = Divisor(problem.filter[1])
        self.columns = Divisor(problem.filter[2])
        self.depth = Int32(problem.gemm_k())

    @always_inline
    def pixel(self, index: Int) -> Position:
        """An output pixel.

        Args:
            index: Counted over all images, below `pixels`.
        """
        var rest, q = divmod(index, Int(self.output[2]))
        var zn, p = divmod(rest, Int(self.output[1]))
        var n, z = divmod(zn, Int(self.output[0]))
        return Position(Int32(z), Int32(p), Int32(q), Int32(n))

    @always_inline
    def tap(self, index: UInt32) -> Position:
        """The offset of a tap in the input.

        Args:
            index: `(t * R + r) * S + s`.
        """
        var tr, s = self.columns.split(index)
        var t, r = self.rows.split(tr)
        return Position(Int32(t), Int32(r), Int32(s), 0) * self.dilation

    @always_inline
    def inside(self, at: Position) -> Bool:
        """Whether a position is in the image rather than in the padding.

        Args:
            at: The position.
        """
        return (
            UInt32(at[0]) < UInt32(self.input[0])
            and UInt32(at[1]) < UInt32(self.input[1])
            and UInt32(at[2]) < UInt32(self.input[2])
        )

    @always_inline
    def offset(self, at: Position) -> Int:
        """Elements of the activation before a position, or before the offset of
        a tap; negative before the image.

        Args:
            at: The position.
        """
        var slice = Int(at[IMAGE]) * Int(self.input[0]) + Int(at[0])
        var row = slice * Int(self.input[1]) + Int(at[1])
        var pixel = row * Int(self.input[2]) + Int(at[2])
        return pixel * Int(self.channels)


def _position(values: IndexList[SPATIAL], image: Int) -> Position:
    """Three spatial values and one for the image."""
    return Position(
        Int32(values[0]), Int32(values[1]), Int32(values[2]), Int32(image)
    )


@always_inline
def spatial(at: Position) -> IndexList[SPATIAL]:
    """A position without its image.

    Args:
        at: The position.
    """
    return IndexList[SPATIAL](Int(at[0]), Int(at[1]), Int(at[2]))


def keeps_pixels(problem: ConvProblem) -> Bool:
    """Whether output pixel m is made of input pixel m alone.

    Args:
        problem: The convolution.
    """
    return (
        problem.taps() == 1
        and problem.input == problem.output
        and problem.pad_before == IndexList[SPATIAL](fill=0)
        and problem.pad_after == IndexList[SPATIAL](fill=0)
    )


def geometry_refusal(problem: ConvProblem) -> Optional[String]:
    """Why 32 bits do not hold a problem's geometry, or None."""
    for axis in range(SPATIAL):
        var reach = max(
            problem.padded(axis), problem.stride[axis] * problem.output[axis]
        )
        if reach + problem.span(axis) >= LIMIT:
            return String(
                t"an extent with its padding, or a filter's span, is {LIMIT} or"
                t" more; here input {problem.input}, padding"
                t" {problem.pad_before}/{problem.pad_after}, filter"
                t" {problem.filter}, dilation {problem.dilation}"
            )
    if problem.gemm_k() >= LIMIT or problem.batch >= LIMIT:
        return String(
            t"filters of {problem.gemm_k()} elements or {problem.batch} images;"
            t" fewer than {LIMIT} are allowed"
        )
    if problem.channels >= LIMIT or problem.filters >= LIMIT:
        return String(
            t"{problem.channels} channels and {problem.filters} filters; fewer"
            t" than {LIMIT} are allowed"
        )
    return None
