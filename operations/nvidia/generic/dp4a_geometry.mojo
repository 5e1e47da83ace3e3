"""A problem as the dp4a kernel sees it, and which problems it takes."""

from std.collections import Optional

from ...conv.device_value import DeviceValue
from ...conv.divisor import Divisor
from ...conv.fields import INTERLEAVED, KERNEL_DP4A
from ...conv.interleave import Interleaved
from ...conv.operands import Operands
from ...conv.problem import ConvProblem
from ...conv.kernel import kernel_name
from ...conv.tile_maps import DP4A_BYTES
from ..geometry import (
    GpuGeometry,
    Position,
    geometry_refusal,
    keeps_pixels,
)
from ..limits import MAX_GRID_ROWS, MAX_INDEX
from .dp4a_tile import SMALL, VECTOR

comptime Map = Interleaved[INTERLEAVED]
"""Where a tensor's blocks of 4 channels lie: words of int8."""


@fieldwise_init
struct Dp4aGeometry(DeviceValue, TrivialRegisterPassable):
    """The geometry of a two-dimensional convolution of interleaved tensors."""

    var general: GpuGeometry
    var activation: Map
    var filter: Map
    var output: Map
    var output_height: Divisor
    var output_width: Divisor
    var taps: Int32

    def __init__(out self, problem: ConvProblem):
        """Converts a problem.

        Args:
            problem: The convolution; `dp4a_refusal` has agreed.
        """
        self.general = GpuGeometry(problem)
        self.activation = Map.of_image(
            problem.channels, problem.input[1], problem.input[2]
        )
        self.filter = Map.of_filter(problem.taps(), problem.filters)
        self.output = Map.of_image(
            problem.filters, problem.output[1], problem.output[2]
        )
        self.output_height = Divisor(problem.output[1])
        self.output_width = Divisor(problem.output[2])
        self.taps = Int32(problem.taps())

    @always_inline
    def pixel(self, index: Int) -> Position:
        """The position of an output pixel.

        Args:
            index: Counted over all images, below `general.pixels`.
        """
        var rest, q = self.output_width.split(UInt32(index))
        var n, p = self.output_height.split(rest)
        return Position(0, Int32(p), Int32(q), Int32(n))


def dp4a_refusal(problem: ConvProblem, operands: Operands) -> Optional[String]:
    """Why the kernel cannot take a problem, or None.

    Args:
        problem: The convolution.
        operands: Its operands.
    """
    var name = kernel_name(KERNEL_DP4A)
    if (
        problem.filter[0] != 1
        or problem.input[0] != 1
        or problem.output[0] != 1
    ):
        return String(
            t"{name} takes two spatial dimensions; here input {problem.input}"
            t" and filter {problem.filter}"
        )
    if problem.groups != 1:
        return String(t"{name} takes one group; here {problem.groups}")
    if problem.channels % INTERLEAVED or problem.filters % INTERLEAVED:
        return String(
            t"{name} takes multiples of {INTERLEAVED} channels and filters;"
            t" here {problem.channels} and {problem.filters}"
        )
    # A word is 4 elements of int8.
    if operands.alignment < DP4A_BYTES:
        return String(
            t"{name} reads {INTERLEAVED} elements an access: operands at"
            t" multiples of {DP4A_BYTES} bytes; here one is at a multiple of"
            t" {operands.alignment}"
        )
    if problem.gemm_m() >= MAX_INDEX:
        return String(
            t"{name} takes fewer than {MAX_INDEX} output pixels; here"
            t" {problem.gemm_m()}"
        )
    var most = MAX_GRID_ROWS * SMALL.filters
    if problem.filters > most:
        return String(
            t"{name} takes up to {most} filters; here {problem.filters}"
        )
    return geometry_refusal(problem)


def reads_vectors(problem: ConvProblem, operands: Operands) -> Bool:
    """Whether neighbouring output pixels are made of neighbouring words at
    multiples of `VECTOR`, which one access reads.

    Args:
        problem: The convolution.
        operands: Its operands.
    """
    return (
        operands.aligned()
        and keeps_pixels(problem)
        and problem.input[1] * problem.input[2] % VECTOR == 0
    )
