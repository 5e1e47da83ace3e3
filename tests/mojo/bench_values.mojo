"""Prints values that the GPU benchmark's program fills its operands with.

    bench_values SEED EXPONENT INDEX ...
"""

from kernels import TYPE, power_of_two, value_of
from std.sys import argv


def main() raises:
    var seed = Int(argv()[1])
    var scale = power_of_two(Int(argv()[2]))
    for i in range(3, len(argv())):
        var value = value_of[TYPE](Int(argv()[i]), seed, scale)
        print(value.cast[DType.float32]())
