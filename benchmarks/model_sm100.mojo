"""Prints what the Blackwell kernel's model says of a problem, for
`model_sm100.py`.

    model_sm100 MULTIPROCESSORS GEOMETRY...

GEOMETRY are 22 numbers of a `ConvProblem`, in its fields' order but for the
output's extents. For each configuration that an op has, a line: its index in
the table, tiles, waves, cycles of a tile to multiply, load and store, seconds
of memory and in all, what bounds it, and the configuration. A line of two words
says why it cannot.
"""

from std.sys import argv

from operations.conv.operands import Device, Operands, OperandTypes
from operations.conv.problem import ConvProblem
from operations.nvidia.sm100.model import predict
from operations.nvidia.sm100.plan import GemmCandidates


def problem_of() raises -> ConvProblem:
    """The problem that the arguments behind the multiprocessors describe."""
    return ConvProblem.of_numbers(
        [Int(argv()[i]) for i in range(2, len(argv()))]
    )


def main() raises:
    var problem = problem_of()
    var device = Device(100, Int(argv()[1]))
    var types = OperandTypes.unfused(DType.bfloat16, DType.bfloat16)
    var table = GemmCandidates(problem, Operands.bare(types), device)
    for i in range(table.count()):
        var row = table.rows[i]
        var refusal = table.refusal(i)
        if refusal:
            print(t"{row}|{refusal.value()}")
            continue
        ref config = table.table[row].config
        var p = predict(config, problem, device.units)
        print(
            t"{row}|{p.tiles}|{p.waves}|{p.multiply}|{p.load}|{p.store}|"
            t"{p.memory}|{p.seconds}|{p.bound()}|{config}"
        )
