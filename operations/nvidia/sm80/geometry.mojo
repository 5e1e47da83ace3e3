"""A problem as the kernel sees it."""

from std.collections import Optional
from std.math import ceildiv

from ...conv.device_value import DeviceValue
from ...conv.divisor import Divisor
from ...conv.fields import KERNEL_SM80
from ...conv.problem import ConvProblem
from ...conv.kernel import kernel_name
from ..geometry import (
    GpuGeometry,
    Position,
    geometry_refusal,
    keeps_pixels,
)
from ..limits import MAX_INDEX
from .tile import SMALL, MmaTile


comptime WORD_BYTES = 4
"""What is loaded at once of 8 and 16-bit types where chunks are not whole."""


@fieldwise_init
struct MmaGeometry(DeviceValue, TrivialRegisterPassable):
    """The geometry of a convolution, cut into tiles."""

    var general: GpuGeometry
    var in_place: Int32
    """1 if output pixel m is made of input pixel m alone, otherwise 0."""
    var words: Int32
    """1 if a group's channels are whole words of `WORD_BYTES`, at addresses
    that are too, otherwise 0."""
    var output_depth: Divisor
    var output_height: Divisor
    var output_width: Divisor
    var filter_tiles: Divisor
    """Of a group."""
    var pixel_tiles: Divisor

    def __init__(
        out self, problem: ConvProblem, tile: MmaTile, *, words: Bool = False
    ):
        """Cuts a problem.

        Args:
            problem: The convolution; `mma_geometry_refusal` has agreed.
            tile: Of a block.
            words: Whether a group's channels are whole words of `WORD_BYTES`,
                at addresses that are too.
        """
        self.words = Int32(1 if words else 0)
        self.general = GpuGeometry(problem)
        self.in_place = Int32(1 if keeps_pixels(problem) else 0)
        self.output_depth = Divisor(problem.output[0])
        self.output_height = Divisor(problem.output[1])
        self.output_width = Divisor(problem.output[2])
        self.filter_tiles = Divisor(
            ceildiv(problem.group_filters(), tile.filters)
        )
        self.pixel_tiles = Divisor(ceildiv(problem.gemm_m(), tile.pixels))

    def tiles(self) -> Int:
        """Tiles of all groups."""
        return (
            Int(self.filter_tiles.value)
            * Int(self.pixel_tiles.value)
            * self.general.groups
        )

    @always_inline
    def output(self, pixel: Int) -> Position:
        """The position of an output pixel.

        Args:
            pixel: Counted over all images.
        """
        if self.general.pixels >= MAX_INDEX:
            return self.general.pixel(pixel)
        var rest, q = self.output_width.split(UInt32(pixel))
        var slice, p = self.output_height.split(rest)
        var n, z = self.output_depth.split(slice)
        return Position(Int32(z), Int32(p), Int32(q), Int32(n))


def mma_geometry_refusal(problem: ConvProblem) -> Optional[String]:
    """Why the kernel's numbers do not hold a problem, or None.

    Args:
        problem: The convolution.
    """
    # Of the smallest tile.
    var tiles = (
        ceildiv(problem.gemm_m(), SMALL.pixels)
        * ceildiv(problem.group_filters(), SMALL.filters)
        * problem.groups
    )
    if tiles >= MAX_INDEX:
        return String(
            t"{kernel_name(KERNEL_SM80)} takes fewer than {MAX_INDEX} tiles of"
            t" {SMALL.pixels} pixels and {SMALL.filters} filters; here {tiles}"
        )
    return geometry_refusal(problem)
