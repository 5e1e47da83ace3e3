"""The sums of the diagonal kernel: its loads from shared memory and its
multiplies, and in which order taps are multiplied."""

from std.math import ceildiv
from std.utils import StaticTuple

from ..tma.copy import SharedAddress
from .diagonal_block import DiagonalWorker, chunk
from .diagonal_mma import (
    DiagonalFilter,
    Sums,
    load_matrices,
    multiply_one,
    multiply_two,
    unknown_quotient,
    unknown_sum,
)
from .diagonal_plan import MATRIX, STEP_ROWS, DiagonalConfig

comptime LOADED_ROWS = 4
"""Rows that one instruction loads 8 pixels of."""


def loaded_row(config: DiagonalConfig, matrix: Int) -> Int:
    """The row of the window that a matrix of the loads holds: in an order in
    which a load's registers are those of a multiply of two taps.

    Args:
        config: The configuration.
        matrix: Of all loads, `LOADED_ROWS` each.
    """
    if config.stride == 1:
        return matrix
    var load, place = divmod(matrix, LOADED_ROWS)
    return load * LOADED_ROWS + place % 2 * 2 + place // 2


def pair_distance(config: DiagonalConfig) -> Int:
    """Rows between two taps of a column that are multiplied together.

    Args:
        config: The configuration.
    """
    return 2 if config.stride == 1 else 1


def pair_row(config: DiagonalConfig, pair: Int) -> Int:
    """The row of the first of two taps that are multiplied together.

    Args:
        config: The configuration.
        pair: Of a column of taps.
    """
    if config.stride == 1:
        return pair // 2 * 4 + pair % 2
    return 2 * pair


def loose_row(config: DiagonalConfig) -> Int:
    """The row of the tap that is left: multiplied with the next column's.

    Args:
        config: The configuration.
    """
    var paired_last = config.stride == 1 and config.taps % 4 == 3
    return config.taps - 2 if paired_last else config.taps - 1


@fieldwise_init
struct DiagonalSums[dtype: DType, config: DiagonalConfig]:
    """What a warp does for the sums of 8 channels.

    Parameters:
        dtype: Of activation and filter: bfloat16 or float16.
        config: The configuration.
    """

    comptime taps = Self.config.taps
    comptime stride = Self.config.stride
    comptime window = Self.config.window()
    comptime all_taps = Self.taps * Self.taps
    comptime loads = ceildiv(Self.window, LOADED_ROWS)
    """Instructions that load the window's rows, moved by a tap."""
    comptime together = Self.config.together()
    comptime Places = StaticTuple[UInt32, Self.together]
    """Where 8 columns begin: bytes."""
    comptime AllSums = StaticTuple[Sums, Self.together]
    comptime Taps = DiagonalFilter[Self.dtype, Self.taps]
    comptime Column = StaticTuple[UInt32, Self.window]
    """8 pixels of every row of a window."""

    @staticmethod
    @always_inline
    def _load_column(
        rows: StaticTuple[SharedAddress, Self.loads], shift: UInt32
    ) -> Self.Column:
        """Loads the pixels that 8 columns see with a column of taps."""
        var column = Self.Column(fill=0)
        comptime for i in range(Self.loads):
            comptime left = Self.window - LOADED_ROWS * i
            comptime count = left if left < 3 else LOADED_ROWS
            var loaded = load_matrices[count](rows[i] + shift)
            comptime for j in range(count):
                comptime row = loaded_row(Self.config, LOADED_ROWS * i + j)
                comptime if row < Self.window:
                    column[row] = loaded[j]
        return column

    @staticmethod
    @always_inline
    def _pixels[r: Int](column: Self.Column) -> StaticTuple[UInt32, STEP_ROWS]:
        """What a row of taps sees: of the step's first row and its second."""
        return StaticTuple[UInt32, STEP_ROWS](
            column[r], column[r + Self.stride]
        )

    @staticmethod
    @always_inline
    def multiply[
        masks: Bool
    ](
        rows: StaticTuple[SharedAddress, Self.loads],
        worker: DiagonalWorker,
        from_: Self.Places,
        filter: Self.Taps,
        mask: UInt32,
    ) -> Self.AllSums:
        """The sums of `together` times 8 columns: two chains each, so that a
        multiply need not wait for the one before it.

        Parameters:
            masks: Whether only the bits of `mask` are taken of every pair of
                channels.

        Args:
            rows: Where the stages are that hold the rows whose addresses the
                thread gives, one a load.
            worker: What the thread computes.
            from_: Bytes from the first column to each 8.
            filter: The channels' filter.
            mask: With `masks`.
        """
        comptime last = loose_row(Self.config)
        var places = StaticTuple[
            StaticTuple[SharedAddress, Self.loads], Self.together
        ](fill=rows)
        comptime for i in range(Self.together):
            comptime for load in range(Self.loads):
                places[i][load] = unknown_sum(rows[load], from_[i])
        var even = Self.AllSums(fill=Sums(0))
        var odd = Self.AllSums(fill=Sums(0))
        var loose = StaticTuple[StaticTuple[UInt32, STEP_ROWS], Self.together](
            fill=StaticTuple[UInt32, STEP_ROWS](fill=0)
        )
        comptime for s in range(Self.taps):
            var columns = StaticTuple[Self.Column, Self.together](
                fill=Self.Column(fill=0)
            )
            var shift = chunk(worker.pixel + UInt32(s), worker.group)
            comptime for i in range(Self.together):
                columns[i] = Self._load_column(places[i], shift)
                comptime if masks:
                    comptime for row in range(Self.window):
                        columns[i][row] = columns[i][row] & mask
            comptime for pair in range(Self.taps // 2):
                comptime first = pair_row(Self.config, pair)
                comptime second = first + pair_distance(Self.config)
                var first_tap = filter.matrix[first * Self.taps + s]()
                var second_tap = filter.matrix[second * Self.taps + s]()
                comptime for i in range(Self.together):
                    ref chain = even if (s + pair) % 2 == 0 else odd
                    chain[i] = multiply_two[Self.dtype](
                        chain[i],
                        Self._pixels[first](columns[i]),
                        first_tap,
                        Self._pixels[second](columns[i]),
                        second_tap,
                    )
            comptime if s % 2 == 1:
                var first_tap = filter.matrix[last * Self.taps + s - 1]()
                var second_tap = filter.matrix[last * Self.taps + s]()
                comptime for i in range(Self.together):
                    odd[i] = multiply_two[Self.dtype](
                        odd[i],
                        loose[i],
                        first_tap,
                        Self._pixels[last](columns[i]),
                        second_tap,
                    )
            elif s == Self.taps - 1:
                var tap = filter.matrix[last * Self.taps + s]()
                comptime for i in range(Self.together):
                    odd[i] = multiply_one[Self.dtype](
                        odd[i], Self._pixels[last](columns[i]), tap
                    )
            else:
                comptime for i in range(Self.together):
                    loose[i] = Self._pixels[last](columns[i])
        comptime for i in range(Self.together):
            even[i] += odd[i]
        return even

    @staticmethod
    @always_inline
    def multiply_singly(
        rows: StaticTuple[SharedAddress, Self.loads],
        worker: DiagonalWorker,
        from_: Self.Places,
        filter: Self.Taps,
    ) -> Self.AllSums:
        """As `multiply`, each channel by itself, the others taken for zeros.

        Args:
            rows: As for `multiply`.
            worker: As for `multiply`.
            from_: As for `multiply`.
            filter: As for `multiply`.
        """
        var result = Self.AllSums(fill=Sums(0))
        for channel in range(UInt32(MATRIX)):
            var pair, element = divmod(channel, UInt32(2))
            var own = worker.lane % 4 == pair
            var mask = UInt32(0xFFFF) << (element * 16) if own else UInt32(0)
            # Addresses of their own, for the same reason.
            var again = from_
            comptime for i in range(Self.together):
                again[i] = unknown_sum(from_[i], unknown_quotient(channel))
            var sums = Self.multiply[True](rows, worker, again, filter, mask)
            comptime for i in range(Self.together):
                comptime for j in range(4):
                    if own and element == UInt32(j % 2):
                        result[i][j] = sums[i][j]
        return result
