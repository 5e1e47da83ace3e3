"""Pixels of images: where they lie, and loads of their channels."""

from std.math import iota
from std.memory import bitcast
from std.sys.info import size_of
from std.sys.intrinsics import masked_load
from std.utils import IndexList

from ..conv.access import ActivationSource
from ..conv.memory import Reads
from ..conv.problem import SPATIAL, ConvProblem


@fieldwise_init
struct Pixel(ImplicitlyCopyable, Movable):
    """A pixel of an image: `[n, z, p, q]` of the output or `[n, d, h, w]` of
    the input."""

    var n: Int
    var at: IndexList[SPATIAL]

    def __init__(out self, problem: ConvProblem, row: Int):
        """The output pixel of a row of the implicit GEMM.

        Args:
            problem: The convolution.
            row: From 0 to `problem.gemm_m() - 1`.
        """
        var rest, q = divmod(row, problem.output[2])
        var zn, p = divmod(rest, problem.output[1])
        var n, z = divmod(zn, problem.output[0])
        self.n = n
        self.at = IndexList[SPATIAL](z, p, q)

    @always_inline
    def advance(mut self, problem: ConvProblem):
        """Moves to the next row's output pixel.

        Args:
            problem: The convolution.
        """
        self.at[2] += 1
        if self.at[2] < problem.output[2]:
            return
        self.at[2] = 0
        self.at[1] += 1
        if self.at[1] < problem.output[1]:
            return
        self.at[1] = 0
        self.at[0] += 1
        if self.at[0] == problem.output[0]:
            self.at[0] = 0
            self.n += 1

    @always_inline
    def input(self, problem: ConvProblem) -> Pixel:
        """The input pixel, perhaps outside the image, that tap 0 of this output
        pixel reads.

        Args:
            problem: The convolution.
        """
        return Pixel(self.n, self.at * problem.stride - problem.pad_before)

    @always_inline
    def tap(self, problem: ConvProblem, t: Int, r: Int, s: Int) -> Pixel:
        """The input pixel of another tap, where this is that of tap 0.

        Args:
            problem: The convolution.
            t: The tap along d.
            r: The tap along h.
            s: The tap along w.
        """
        return Pixel(
            self.n, self.at + IndexList[SPATIAL](t, r, s) * problem.dilation
        )

    @always_inline
    def is_inside(self, problem: ConvProblem, axis: Int) -> Bool:
        """Whether this input pixel lies inside the image along an axis.

        Args:
            problem: The convolution.
            axis: The spatial axis.
        """
        return 0 <= self.at[axis] < problem.input[axis]

    @always_inline
    def input_offset(self, problem: ConvProblem) -> Int:
        """The row-major offset of this input pixel's channels, in elements. The
        pixel may lie outside the image.

        Args:
            problem: The convolution.
        """
        var row = (self.n * problem.input[0] + self.at[0]) * problem.input[1]
        return (
            (row + self.at[1]) * problem.input[2] + self.at[2]
        ) * problem.channels


@always_inline
def load_activation[
    Source: ActivationSource, //, dtype: DType, width: Int
](x: Source, problem: ConvProblem, pixel: Pixel, channel: Int) -> SIMD[
    dtype, width
]:
    """Neighbouring channels of one input pixel, through whatever the graph
    compiler fused in front of the op.

    Parameters:
        Source: How the activation is reached.
        dtype: Of the result.
        width: How many channels.

    Args:
        x: The activation.
        problem: The convolution.
        pixel: The input pixel, inside the image.
        channel: The first channel.
    """
    return x.load[width, alignment=1](
        pixel.n, pixel.at, channel, pixel.input_offset(problem) + channel
    ).cast[dtype]()


@always_inline
def load_channels[
    dtype: DType, width: Int, whole: Bool
](source: Reads[dtype], count: Int) -> SIMD[DType.float32, width]:
    """Neighbouring values in memory.

    Parameters:
        dtype: Of the values.
        width: How many lanes.
        whole: Whether there is a value for each lane.

    Args:
        source: The first value.
        count: How many there are if not `whole`; the other lanes are zeros.
    """
    comptime if whole:
        return source.unsafe_load[width=width]().cast[DType.float32]()
    else:
        # As integers: a masked load of another 16-bit type is taken apart.
        comptime bits = DType.uint32 if size_of[dtype]() == 4 else DType.uint16
        return bitcast[dtype, width](
            masked_load[width](
                source.unsafe_bitcast[Scalar[bits]](),
                iota[DType.int32, width]().lt(Int32(count)),
                SIMD[bits, width](0),
            )
        ).cast[DType.float32]()
