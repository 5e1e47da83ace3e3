"""Prints what the Blackwell kernel's model says of a problem, for
`model_sm100.py`.

    model_sm100 MULTIPROCESSORS GEOMETRY...

GEOMETRY are 22 numbers of a `ConvProblem`, in its fields' order but for the
output's extents. For each configuration and each kind of epilogue, a line: the
configuration's index, 1 if dispatch considers it, tiles, waves, cycles of a tile
to multiply, load and store, seconds of memory and in all, what bounds it, and
the configuration. A line of two words says why it cannot.
"""

from std.sys import argv

from operations.conv.problem import ConvProblem
from operations.nvidia.sm100.candidates import CANDIDATES, candidate, offered
from operations.nvidia.sm100.dispatch import is_considered
from operations.nvidia.sm100.model import predict


def problem_of() raises -> ConvProblem:
    """The problem that the arguments behind the multiprocessors describe."""
    return ConvProblem.of_numbers(
        [Int(argv()[i]) for i in range(2, len(argv()))]
    )


def main() raises:
    comptime Type = DType.bfloat16
    var problem = problem_of()
    var multiprocessors = Int(argv()[1])
    comptime for index in range(CANDIDATES):
        comptime config = candidate[Type, Type, Type](index)
        var refusal = config.can_implement(problem)
        if refusal:
            print(t"{index}|{refusal.value()}")
        else:
            var p = predict[config](problem, multiprocessors)
            var considered = offered[Type](index) and is_considered[config](p)
            print(
                t"{index}|{Int(considered)}|{p.tiles}|{p.waves}|"
                t"{p.multiply}|{p.load}|{p.store}|{p.memory}|{p.seconds}|"
                t"{p.bound()}|{config}"
            )
