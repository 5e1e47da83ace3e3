"""The program that measures configurations of the Hopper implicit GEMM, as
`maxconv tune --from` asks over a pipe.

It is compiled with a module `configurations`, which `--build` writes: `NUMBERS`,
the numbers of `TunedSm90.fields` of each configuration but for the plan's, and
`ROWS`, the row of the hand-written table that each is, or -1. The table's rows
that dispatch chooses for a problem must be among them.

Reads lines, and answers each with one line of JSON: what was asked for, or
`{"error": ...}`. A configuration is named by its index. `WORK` is `bare`, the
convolution alone, or `fused`, with bias, SiLU and a residual; both are one
kernel. A graph is named by the number that `prepare` answered, until the next
problem.

    load INDEX                  compiles a configuration for the device
    problem NUMBERS SETS EXPONENT FILTER_EXPONENT
                                makes so many sets of operands
    choose WORK                 what dispatch chooses, computed as what is right;
                                before `prepare` of this work
    prepare INDEX SPLIT_K WORK LAUNCHES
                                runs a configuration on poisoned output, compares
                                every element, and captures a graph of launches,
                                each on the next set, if all are right
    replay GRAPH TIMES          ns on the device of so many replays of the graph

NUMBERS and values are those of the benchmark's program, `bench/gpu/kernels.mojo`.
"""

from max.gpu.host import DeviceContext
from std.collections import Optional

from kernels import OUT_TYPE, TYPE, integers, said, words_of
from measured import (
    CONFIGURATIONS,
    COUNT,
    Problem,
    Visitor,
    are_numbers,
    is_fused,
)
from operations.conv.access import MemoryOutput
from operations.nvidia.device import device_of
from operations.nvidia.sm90.gemm.kernel import ConvKernel
from requests import Requests


def load(ctx: DeviceContext, index: Int) raises -> String:
    """The answer to `load`."""
    comptime assert are_numbers(), "fields and configurations differ"
    comptime for known in range(COUNT):
        comptime config = CONFIGURATIONS[known]
        comptime Kernel = ConvKernel[
            TYPE, MemoryOutput[OUT_TYPE], Visitor, config
        ]
        if index == known:
            comptime if config.gathers():
                _ = ctx.compile_function[Kernel.run_gathered]()
            else:
                _ = ctx.compile_function[Kernel.run]()
    return String(t'{{"loaded": {index}}}')


def answer(
    ctx: DeviceContext, mut problem: Optional[Problem], words: List[String]
) raises -> String:
    """The answer to a line.

    Args:
        ctx: The device.
        problem: The last one.
        words: Of the line.
    """
    if words[0] == "load":
        return load(ctx, Int(words[1]))
    if words[0] == "problem":
        # Its memory first.
        problem = None
        problem = Problem(ctx, integers(words))
        ctx.synchronize()
        return "{}"
    if not problem:
        raise Error(t"{words[0]}: there is no problem yet")
    if words[0] == "choose":
        return problem.value().choose(ctx, is_fused(words[1]))
    if words[0] == "prepare":
        return problem.value().prepare(
            ctx,
            Int(words[1]),
            Int(words[2]),
            is_fused(words[3]),
            Int(words[4]),
        )
    if words[0] == "replay":
        return problem.value().replay(Int(words[1]), Int(words[2]))
    raise Error(t"{words[0]} is no request")


def main() raises:
    try:
        var ctx = DeviceContext()
        var device = device_of(ctx)
        print(
            (
                t'{{"device": "{ctx.name()}", "units": {device.units},'
                t' "l2_bytes": {device.l2_bytes},'
                t' "configurations": {COUNT}}}'
            ),
            flush=True,
        )
        var problem = Optional[Problem](None)
        var requests = Requests()
        while True:
            var line = requests.next()
            try:
                print(answer(ctx, problem, words_of(line)), flush=True)
            except error:
                print(said(error), flush=True)
    except error:
        print(said(error), flush=True)
