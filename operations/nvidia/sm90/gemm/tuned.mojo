"""What measurements chose: the configuration and the blocks that share a tile, of
problems that the tuner met on a device."""

from std.collections import Optional

from ....conv.operands import Device, OperandTypes
from ....conv.problem import ConvProblem
from .tuned_rows import CAPABILITY, KEYS, ROWS, SPLITS, UNITS

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
    problem: ConvProblem, types: OperandTypes, device: Device
) -> Optional[Tuple[Int, Int]]:
    """The row of the table that was measured to be fastest, and the blocks that
    share a tile; None where nothing was measured.

    Args:
        problem: The convolution.
        types: Of the operands; types of 16 bits were measured.
        device: The device.
    """
    if device.capability != CAPABILITY or device.units != UNITS:
        return None
    if not (types.input.is_half_float() and types.output.is_half_float()):
        return None
    var key = problem_key(problem)
    comptime for i in range(len(KEYS)):
        comptime known = KEYS[i]
        comptime row = ROWS[i]
        comptime split_k = SPLITS[i]
        if key == known:
            return (row, split_k)
    return None
