"""The sums of the diagonal kernel: its loads from shared memory and its
multiplies."""

from max.gpu import thread_idx
from std.utils import StaticTuple

from ..tma.copy import SharedAddress
from .diagonal_block import DiagonalWorker
from .diagonal_mma import (
    DiagonalFilter,
    Sums,
    keep_rolled,
    load_matrices,
    multiply_one,
    multiply_two,
    unknown_sum,
)
from .diagonal_plan import MATRIX, STAGE_ROWS, STEP_ROWS, DiagonalConfig


@fieldwise_init
struct DiagonalSums[dtype: DType, config: DiagonalConfig]:
    """What a warp does for the sums of 8 channels. A load brings 16 pixels of
    each of a stage's rows: as they lie in its registers, they are what two taps
    of a column see, or one of them what a single tap sees.

    Parameters:
        dtype: Of activation and filter: bfloat16 or float16.
        config: The configuration.
    """

    comptime taps = Self.config.taps
    comptime stride = Self.config.stride
    comptime window = Self.config.window()
    comptime Stages = StaticTuple[SharedAddress, Self.config.window_stages()]
    """Where the stages of a step's window are, and in them the pixels that the
    thread gives the addresses of."""
    comptime RowSums = StaticTuple[Sums, STEP_ROWS]
    """Of each of a step's rows 16 pixels: 8, and 8 more."""
    comptime Taps = DiagonalFilter[Self.dtype, Self.taps]

    @staticmethod
    @always_inline
    def multiply[
        masks: Bool
    ](
        stages: Self.Stages,
        worker: DiagonalWorker,
        shift: UInt32,
        filter: Self.Taps,
        mask: UInt32,
    ) -> Self.RowSums:
        """The sums of a set.

        Parameters:
            masks: Whether only the bits of `mask` are taken of every pair of
                channels.

        Args:
            stages: The window's.
            worker: What the thread computes.
            shift: Bytes from the thread's first pixel to that of the set.
            filter: The channels' filter.
            mask: With `masks`.
        """
        var places = stages
        comptime for j in range(Self.config.window_stages()):
            places[j] = unknown_sum(stages[j], shift)
        var sums = Self.RowSums(fill=Sums(0))
        comptime for s in range(Self.taps):
            comptime for j in range(Self.config.window_stages()):
                comptime first_row = j * STAGE_ROWS
                # The window may end with the first of a stage's rows.
                comptime count = 4 if first_row + 1 < Self.window else 2
                var pixels = load_matrices[count](
                    places[j] + worker.offset[s]()
                )
                comptime if masks:
                    comptime for i in range(count):
                        pixels[i] = pixels[i] & mask
                comptime for y in range(STEP_ROWS):
                    comptime first = first_row - y * Self.stride
                    comptime second = first + 1
                    comptime if first >= 0 and second < Self.taps:
                        sums[y] = multiply_two[Self.dtype](
                            sums[y],
                            StaticTuple[UInt32, 2](pixels[0], pixels[1]),
                            filter.matrix[first * Self.taps + s](),
                            StaticTuple[UInt32, 2](pixels[2], pixels[3]),
                            filter.matrix[second * Self.taps + s](),
                        )
                    elif first >= 0 and first < Self.taps:
                        sums[y] = multiply_one[Self.dtype](
                            sums[y],
                            StaticTuple[UInt32, 2](pixels[0], pixels[1]),
                            filter.matrix[first * Self.taps + s](),
                        )
                    elif second >= 0 and second < Self.taps:
                        sums[y] = multiply_one[Self.dtype](
                            sums[y],
                            StaticTuple[UInt32, 2](pixels[2], pixels[3]),
                            filter.matrix[second * Self.taps + s](),
                        )
        return sums

    @staticmethod
    @always_inline
    def multiply_singly(
        stages: Self.Stages,
        worker: DiagonalWorker,
        shift: UInt32,
        filter: Self.Taps,
    ) -> Self.RowSums:
        """As `multiply`, each channel by itself, the others taken for zeros.

        Args:
            stages: As for `multiply`.
            worker: As for `multiply`.
            shift: As for `multiply`.
            filter: As for `multiply`.
        """
        var result = Self.RowSums(fill=Sums(0))
        # Neither unrolled nor prepared outside: it hardly ever runs.
        var channel = UInt32(0)
        while channel < unknown_sum(UInt32(MATRIX), 0):
            keep_rolled()
            var pair, element = divmod(channel, UInt32(2))
            var own = UInt32(thread_idx.x) % 4 == pair
            var mask = UInt32(0xFFFF) << (element * 16) if own else UInt32(0)
            var sums = Self.multiply[True](stages, worker, shift, filter, mask)
            comptime for y in range(STEP_ROWS):
                comptime for i in range(4):
                    if own and element == UInt32(i % 2):
                        result[y][i] = sums[y][i]
            channel += 1
        return result
