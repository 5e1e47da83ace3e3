"""What measurements chose: the configuration and the blocks that share a tile, of
problems that the tuner met on a device."""

from std.collections import Optional

from ....conv.operands import Device, OperandTypes
from ....conv.problem import ConvProblem
from ...epilogue.work import FusedWork
from .tuned_rows import (
    CAPABILITY,
    ELSEWHERE,
    KEYS,
    L2_BYTES,
    ROWS,
    SPLITS,
    UNITS,
    WORKS,
)

comptime BARE = 1
"""A choice for the convolution alone."""

comptime FUSED = 2
"""A choice for a bias, an activation and a residual. What is fused otherwise was
not measured: it takes a choice for both."""

comptime _OFFSET = UInt64(0xCBF29CE484222325)
"""What the hash of no numbers is (FNV-1a of 64 bits, Fowler, Noll and Vo)."""

comptime _PRIME = UInt64(0x100000001B3)
"""Of the same hash."""


def problem_key(problem: ConvProblem) -> UInt64:
    """A hash of a problem's numbers, in the order of `ConvProblem.of_numbers`:
    FNV-1a, a number a step.

    Args:
        problem: The convolution.
    """
    var key = _OFFSET
    for number in problem.numbers():
        key = (key ^ UInt64(number)) * _PRIME
    return key


def tuned_choice(
    problem: ConvProblem,
    types: OperandTypes,
    work: FusedWork,
    device: Device,
) -> Optional[Tuple[Int, Int]]:
    """The row of the table that was measured to be fastest, and the blocks that
    share a tile; None where nothing was measured.

    Args:
        problem: The convolution.
        types: Of the operands; types of 16 bits were measured.
        work: What the epilogue has to do.
        device: The device.
    """
    if device.capability != CAPABILITY or device.units != UNITS:
        return None
    if not (types.input.is_half_float() and types.output.is_half_float()):
        return None
    var key = problem_key(problem)
    var asked = BARE | FUSED
    if work.residual:
        asked = FUSED
    elif not work.visits:
        asked = BARE
    var here = device.l2_bytes == L2_BYTES
    comptime for i in range(len(KEYS)):
        comptime known = KEYS[i]
        comptime row = ROWS[i]
        comptime split_k = SPLITS[i]
        comptime works = WORKS[i]
        comptime elsewhere = ELSEWHERE[i]
        if key == known and works & asked == asked and (elsewhere or here):
            return (row, split_k)
    return None
