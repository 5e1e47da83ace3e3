"""What a pooling is, on every target: a window that moves over each channel as
a depthwise filter does, and what is made of the elements in it.
"""

from std.sys.info import is_gpu
from std.sys.intrinsics import llvm_intrinsic
from std.utils import IndexList

from .device_value import DeviceValue
from .fields import (
    COUNTED_INPUT,
    COUNTED_WINDOW,
    LAYOUT_KRSC,
    POOLING_CEIL,
    POOLING_COUNTED,
    POOLING_LENGTH,
)
from .memory import Reads
from .problem import SPATIAL, ConvProblem, Geometry


@fieldwise_init
struct PoolProblem(DeviceValue, ImplicitlyCopyable, Movable, Writable):
    """The geometry of one pooling, as run-time values.

    Input `[batch, *input, channels]`, output `[batch, *output, channels]`.
    """

    var window: ConvProblem
    """The depthwise convolution whose filter is the window. What ceil mode adds
    to an output is padding behind."""
    var counts_padding: Bool
    """Whether a mean counts the padding's zeros."""
    var counted_after: IndexList[SPATIAL]
    """The padding behind that it counts: what ceil mode adds only if asked to."""

    def __init__[
        rank: Int
    ](
        out self,
        geometry: Geometry,
        pooling: Reads[DType.int64],
        length: Int,
        x_shape: IndexList[rank],
        out_shape: IndexList[rank],
        *,
        whole: Bool,
    ) raises:
        """Reads a pooling off its operands, and checks it.

        Args:
            geometry: The decoded geometry operand: the filter is the window;
                groups are not read.
            pooling: `POOLING_LENGTH` values in host memory: see fields.mojo.
            length: How many there are.
            x_shape: `[batch, *input, channels]`.
            out_shape: `[batch, *output, channels]`.
            whole: Whether the window is the image, whatever `geometry` says.

        Raises:
            Naming the argument, its value and what is allowed.
        """
        if length != POOLING_LENGTH:
            raise Error(
                t"pooling: {length} values, but this op takes {POOLING_LENGTH};"
                t" the Python package and operations/ are of different versions"
            )
        var window = ConvProblem(geometry, x_shape, out_shape)
        if window.filters != window.channels:
            raise Error(
                t"output: {window.filters} channels, but the input has"
                t" {window.channels}; a pooling keeps them"
            )
        window.groups = max(1, window.channels)
        if whole:
            window.filter = window.input
        var counted = Int(pooling[unsafe_offset=POOLING_COUNTED])
        self.counts_padding = counted != COUNTED_INPUT
        self.counted_after = window.pad_after
        if pooling[unsafe_offset=POOLING_CEIL] != 0:
            for axis in range(SPATIAL):
                window.pad_after[axis] += Self._missing(window, axis)
        if counted == COUNTED_WINDOW:
            self.counted_after = window.pad_after
        window.validate(
            LAYOUT_KRSC, window.filters * window.gemm_k(), DType.float32
        )
        self.window = window

    @staticmethod
    def of_window(
        window: ConvProblem, *, ceil: Bool, counts_padding: Bool
    ) -> Self:
        """A pooling of a known window.

        Args:
            window: The depthwise convolution whose filter is the window, valid.
            ceil: Whether the output's extents are rounded up; no window begins
                behind the input.
            counts_padding: Whether a mean counts the padding's zeros.
        """
        var result = Self(window, counts_padding, window.pad_after)
        if ceil:
            ref raised = result.window
            for axis in range(SPATIAL):
                var begin = raised.output[axis] * raised.stride[axis]
                var room = raised.padded(axis) - raised.span(axis)
                if (
                    room % raised.stride[axis] != 0
                    and begin < raised.input[axis] + raised.pad_before[axis]
                ):
                    raised.output[axis] += 1
                raised.pad_after[axis] += Self._missing(raised, axis)
        return result

    @staticmethod
    def _missing(window: ConvProblem, axis: Int) -> Int:
        """What the last window of ceil mode lacks of padding behind: less than
        a stride, or the output is not of ceil mode."""
        var end = (window.output[axis] - 1) * window.stride[axis]
        var missing = end + window.span(axis) - window.padded(axis)
        return missing if 0 < missing < window.stride[axis] else 0

    def counts_every_tap(self) -> Bool:
        """Whether a mean divides by the window's size everywhere."""
        ref window = self.window
        for axis in range(SPATIAL):
            if not self.counts_padding and (
                window.pad_before[axis] != 0 or window.pad_after[axis] != 0
            ):
                return False
            if self.counted_after[axis] != window.pad_after[axis]:
                return False
        return True

    def share(self) -> Float32:
        """One over the window's size, or 0: each window counts its own taps."""
        return 1 / Float32(self.window.taps()) if self.counts_every_tap() else 0

    @always_inline
    def counted(self, axis: Int, at: Int) -> Int:
        """Taps along an axis that a mean counts.

        Args:
            axis: The axis.
            at: The output position.
        """
        ref window = self.window
        var origin = at * window.stride[axis] - window.pad_before[axis]
        var end = window.input[axis]
        if self.counts_padding:
            end += self.counted_after[axis]
        var count = window.taps_before(axis, origin, end)
        if not self.counts_padding:
            count -= window.taps_before(axis, origin, 0)
        return count

    def write_to(self, mut writer: Some[Writer]):
        """Writes the geometry on one line.

        Args:
            writer: Where to.
        """
        writer.write(self.window)


@fieldwise_init
struct Reduction[dtype: DType, average: Bool]:
    """What is made of a window's elements: the largest, or the mean.

    Parameters:
        dtype: Of the elements.
        average: Whether it is the mean.
    """

    comptime compares = not Self.average and (
        Self.dtype.is_half_float() or Self.dtype == DType.float32
    )
    """Whether elements are compared as they are."""
    comptime accumulator = Self.dtype if Self.compares else DType.float32
    """The type of what is held of a window. Float32 holds every element of a
    type of 8 bits."""

    @staticmethod
    @always_inline
    def neutral[width: Int]() -> SIMD[Self.accumulator, width]:
        """What changes nothing: zeros of sums, the type's smallest value."""
        comptime if Self.average:
            return 0
        else:
            comptime infinite = (
                not Self.dtype.is_integral()
                and Self.dtype != DType.float8_e4m3fn
            )
            comptime smallest = (
                Scalar[Self.dtype]
                .MIN if infinite else Scalar[Self.dtype]
                .MIN_FINITE
            )
            return SIMD[Self.accumulator, width](
                smallest.cast[Self.accumulator]()
            )

    @staticmethod
    @always_inline
    def held[
        width: Int
    ](value: SIMD[Self.dtype, width]) -> SIMD[Self.accumulator, width]:
        """An element as it is held.

        Parameters:
            width: Channels.

        Args:
            value: The element.
        """
        return value.cast[Self.accumulator]()

    @staticmethod
    @always_inline
    def combine[
        width: Int
    ](
        first: SIMD[Self.accumulator, width],
        other: SIMD[Self.accumulator, width],
    ) -> SIMD[Self.accumulator, width]:
        """What is held of two parts of a window. The largest with a NaN is NaN.

        Parameters:
            width: Channels.

        Args:
            first: What is held of a part.
            other: Of the other.
        """
        comptime if Self.average:
            return first + other
        elif is_gpu():
            # An instruction; 16 bits by pairs (PTX ISA, "max", ".NaN").
            return llvm_intrinsic[
                "llvm.maximum", type_of(first), has_side_effect=False
            ](first, other)
        else:
            # A comparison with a NaN is false: a NaN that is held stays.
            return (other.gt(first) | ~other.eq(other)).select(other, first)

    @staticmethod
    @always_inline
    def rounded[
        width: Int
    ](value: SIMD[Self.accumulator, width]) -> SIMD[Self.dtype, width]:
        """A result in the type of the elements; a mean of integers is rounded
        to the nearest, halves to even.

        Parameters:
            width: Channels.

        Args:
            value: The result.
        """
        comptime if Self.dtype.is_integral():
            return round(value).cast[Self.dtype]()
        else:
            return value.cast[Self.dtype]()
