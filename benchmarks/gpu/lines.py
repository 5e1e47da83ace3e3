"""Writes problems as the programs that run on the GPU machine read them.

    python benchmarks/gpu/lines.py > build/gpu_problems.txt

A line is a name and 22 integers: batch, channels, filters, groups, then three each (depth, height,
width) of input, filter, stride, dilation, padding before and padding after.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from maxconv._problem import ConvProblem
from maxconv._problems import load_problems

PROBLEMS = Path(__file__).parent / "problems.yaml"


def line_of(name: str, problem: ConvProblem) -> str:
    """Returns a problem's line."""
    missing = 3 - problem.spatial_rank
    numbers: list[object] = [problem.batch, problem.channels, problem.filters, problem.groups]
    for values, fill in (
        (problem.input_size, 1),
        (problem.filter_size, 1),
        (problem.stride, 1),
        (problem.dilation, 1),
        (problem.pad_before, 0),
        (problem.pad_after, 0),
    ):
        numbers += [*[fill] * missing, *values]
    return " ".join((name, *map(str, numbers)))


def main() -> None:
    """Prints the lines of a file of problems."""
    parser = argparse.ArgumentParser(description="writes problems as lines of numbers")
    parser.add_argument("problems", type=Path, nargs="?", default=PROBLEMS)
    parser.add_argument("--bench", nargs="+", help="only these groups of the file")
    arguments = parser.parse_args()
    for name, named in load_problems(arguments.problems).items():
        if arguments.bench is None or named.family in arguments.bench:
            print(line_of(name, named.problem))


if __name__ == "__main__":
    main()
