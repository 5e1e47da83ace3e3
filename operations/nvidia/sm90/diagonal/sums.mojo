"""The sums of the diagonal kernel: its loads from shared memory and its
multiplies."""

from std.utils import StaticTuple

from ...pipeline.chunks import CHUNK_BYTES
from ...tma.copy import SharedAddress
from .block import DiagonalWorker
from .geometry import DiagonalGeometry
from ...pipeline.matrices import load_matrices
from .mma import (
    DiagonalFilter,
    Sums,
    keep_rolled,
    multiply_one,
    multiply_two,
    thread_anew,
    unknown_sum,
)
from .plan import MATRIX, STAGE_ROWS, STEP_ROWS, DiagonalConfig


@fieldwise_init
struct DiagonalSums[dtype: DType, config: DiagonalConfig]:
    """A warp's work for the sums of 8 channels. A load takes 16 pixels of each
    row of a stage. In registers they are the operand of two taps of a column,
    and those of one row the operand of a single tap. Where groups have more
    than 8 channels, a load takes 16 pixels of one row and two chunks of
    channels, the operand of one tap.

    Parameters:
        dtype: Of activation and filter: bfloat16 or float16.
        config: The configuration.
    """

    comptime taps = Self.config.taps
    comptime stride = Self.config.stride
    comptime window = Self.config.window()
    comptime Stages = StaticTuple[SharedAddress, Self.config.window_stages()]
    """Addresses of a step's stages, at the pixels whose addresses the thread
    passes."""
    comptime RowSums = StaticTuple[Sums, STEP_ROWS]
    """16 pixels of each of a step's rows: 8, and 8 more."""
    comptime Taps = DiagonalFilter[
        Self.dtype, Self.taps, Self.config.group_chunks
    ]
    comptime Worker = DiagonalWorker[Self.config]
    comptime mixes_groups = Self.config.group_chunks == 1
    """Whether a multiply may have several groups, whose channels are multiplied
    by zeros outside their own block of the matrix."""

    @staticmethod
    @always_inline
    def multiply(
        stages: Self.Stages,
        worker: Self.Worker,
        shift: UInt32,
        filter: Self.Taps,
    ) -> Self.RowSums:
        """The sums of a set.

        Args:
            stages: The window's.
            worker: What the thread computes.
            shift: Bytes from the thread's first pixel to that of the set.
            filter: The channels' filters.
        """
        comptime if Self.mixes_groups:
            return Self._multiply_rows[False](stages, worker, shift, filter, 0)
        return Self._multiply_chunks(stages, worker, shift, filter)

    @staticmethod
    @always_inline
    def _multiply_rows[
        masks: Bool
    ](
        stages: Self.Stages,
        worker: Self.Worker,
        shift: UInt32,
        filter: Self.Taps,
        mask: UInt32,
    ) -> Self.RowSums:
        """`multiply` for groups of up to 8 channels, two rows at a time. With
        `masks`, of every pair of channels only the bits of `mask` count."""
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
    def _multiply_chunks(
        stages: Self.Stages,
        worker: Self.Worker,
        shift: UInt32,
        filter: Self.Taps,
    ) -> Self.RowSums:
        """`multiply` for groups of several chunks of channels, two chunks at a
        time."""
        var places = stages
        comptime for j in range(Self.config.window_stages()):
            places[j] = unknown_sum(stages[j], shift)
        var sums = Self.RowSums(fill=Sums(0))
        comptime for s in range(Self.taps):
            comptime for row in range(Self.window):
                var at = (
                    places[row // STAGE_ROWS]
                    + worker.offset[s, row % STAGE_ROWS]()
                )
                comptime for chunk in range(0, Self.config.group_chunks, 2):
                    # The swizzle keeps a group's chunks within 32 or 64 bytes.
                    var pixels = load_matrices[4](
                        at ^ UInt32(chunk * CHUNK_BYTES)
                    )
                    comptime for y in range(STEP_ROWS):
                        comptime r = row - y * Self.stride
                        comptime if r >= 0 and r < Self.taps:
                            comptime tap = r * Self.taps + s
                            sums[y] = multiply_two[Self.dtype](
                                sums[y],
                                StaticTuple[UInt32, 2](pixels[0], pixels[1]),
                                filter.matrix[tap, chunk](),
                                StaticTuple[UInt32, 2](pixels[2], pixels[3]),
                                filter.matrix[tap, chunk + 1](),
                            )
        return sums

    @staticmethod
    @always_inline
    def multiply_singly(
        geometry: DiagonalGeometry,
        stages: Self.Stages,
        worker: Self.Worker,
        shift: UInt32,
        filter: Self.Taps,
    ) -> Self.RowSums:
        """Computes the sums of a set group by group, with zeros for the
        channels of other groups.

        Args:
            geometry: The problem.
            stages: The window's.
            worker: What the thread computes.
            shift: Bytes from the thread's first pixel to that of the set.
            filter: The channels' filters.
        """
        var result = Self.RowSums(fill=Sums(0))
        # Neither unrolled nor hoisted: it hardly ever runs.
        var group = UInt32(0)
        while group < unknown_sum(UInt32(MATRIX), 0) >> geometry.group_log:
            keep_rolled()
            var first = thread_anew() % 4 * 2
            var mask = UInt32(0)
            comptime for i in range(2):
                if (first + UInt32(i)) >> geometry.group_log == group:
                    mask |= UInt32(0xFFFF << (16 * i))
            var sums = Self._multiply_rows[True](
                stages, worker, shift, filter, mask
            )
            comptime for y in range(STEP_ROWS):
                comptime for i in range(4):
                    if mask & UInt32(1 << (16 * (i % 2))) != 0:
                        result[y][i] = sums[y][i]
            group += 1
        return result
