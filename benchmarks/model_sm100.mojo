"""Prints what the Blackwell kernel's model says of a problem, for
`model_sm100.py`.

    model_sm100 MULTIPROCESSORS GEOMETRY...

GEOMETRY are 22 numbers of a `ConvProblem`, in its fields' order but for the
output's extents. For each configuration and each kind of epilogue, a line: the
configuration's index, 1 if dispatch offers it, tiles, waves, cycles of a tile
to multiply, load and store, seconds of memory and in all, what bounds it, and
the configuration. A line of two words says why it cannot.
"""

from std.sys import argv
from std.utils import IndexList

from operations.conv.problem import SPATIAL, ConvProblem
from operations.sm100.candidates import CANDIDATES, candidate, offered
from operations.sm100.model import predict


def number(index: Int) raises -> Int:
    """An argument behind the multiprocessors."""
    return Int(argv()[2 + index])


def problem_of() raises -> ConvProblem:
    """The problem that the arguments describe."""
    var triples = Array[IndexList[SPATIAL], 6](fill=IndexList[SPATIAL](fill=1))
    for i in range(6):
        for axis in range(SPATIAL):
            triples[i][axis] = number(4 + i * SPATIAL + axis)
    var problem = ConvProblem(
        spatial_rank=3,
        batch=number(0),
        channels=number(1),
        filters=number(2),
        groups=number(3),
        input=triples[0],
        filter=triples[1],
        output=triples[0],
        stride=triples[2],
        dilation=triples[3],
        pad_before=triples[4],
        pad_after=triples[5],
    )
    for axis in range(SPATIAL):
        problem.output[axis] = problem.expected_output(axis)
    problem.validate(1, problem.filter_length(1))
    return problem


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
            print(
                t"{index}|{Int(offered[Type](index))}|{p.tiles}|{p.waves}|"
                t"{p.multiply}|{p.load}|{p.store}|{p.memory}|{p.seconds}|"
                t"{p.bound()}|{config}"
            )
