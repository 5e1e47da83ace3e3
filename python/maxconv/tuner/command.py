"""``maxconv tune``: the space of a problem's configurations, and the search in it."""

from __future__ import annotations

import argparse

from .._dtypes import INPUT_BYTES, OUTPUT_BYTES
from .._problem import ConvProblem
from .._problems import find_problem, parse_integers, parse_padding, parse_problem
from .gpu import command as gpu
from .space import TARGET_NAMES, open_space

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``maxconv tune``."""
    parser.add_argument("problems", nargs="*", metavar="PROBLEM", help="names of problems")
    parser.add_argument(
        "--conv",
        metavar="SPEC",
        action="append",
        default=[],
        help="NxSPATIALxC:KxTAPS, channels last: 1x56x56x64:64x3x3; may be repeated",
    )
    parser.add_argument("--stride", default="1", help="with --conv: 2 or 2x1")
    parser.add_argument("--dilation", default="1", help="with --conv: 2 or 2x1")
    parser.add_argument(
        "--padding",
        default="0",
        help="with --conv: 1, same, valid, or before and after each axis: 0x1x0x1",
    )
    parser.add_argument("--groups", type=int, default=1, help="with --conv")
    parser.add_argument("--target", choices=TARGET_NAMES, default="cpu", help="by default cpu")
    parser.add_argument("--dtype", choices=tuple(INPUT_BYTES), help="of activation and filter")
    parser.add_argument("--output", choices=tuple(OUTPUT_BYTES), help="type of the output")
    parser.add_argument("--residual", action="store_true", help="with one added to the output")
    parser.add_argument(
        "--units", type=int, metavar="N", help="multiprocessors of the GPU, or threads of the CPU"
    )
    parser.add_argument(
        "--show-space", action="store_true", help="print what there is to search, and end"
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything random; by default 0")
    gpu.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the spaces; returns the exit status.

    Raises:
        ValueError: A problem is none, an argument is not allowed, or no kernel takes the problem.
        LibraryError: The library that kernels are asked through cannot be built.
    """
    if gpu.asks(args):
        return gpu.run(args)
    named = problems(args)
    spaces = [
        open_space(
            problem,
            args.target,
            dtype=args.dtype,
            out_dtype=args.output,
            residual=args.residual,
            units=args.units,
        )
        for problem in named.values()
    ]
    if not args.show_space:
        raise ValueError("--show-space: it must be given; nothing is measured yet")
    for place, (name, space) in enumerate(zip(named, spaces, strict=True)):
        print(f"{name}: {space}" if not place else f"\n{name}: {space}")
    return 0


def problems(args: argparse.Namespace) -> dict[str, ConvProblem]:
    """Returns the problems that are asked for, by name.

    Raises:
        ValueError: There is none, or one is none.
    """
    found = {name: find_problem(name).problem for name in args.problems}
    for text in args.conv:
        found[text] = parse_problem(
            text,
            stride=parse_integers("stride", args.stride),
            dilation=parse_integers("dilation", args.dilation),
            padding=parse_padding(args.padding),
            groups=args.groups,
        )
    if not found:
        raise ValueError("problem: none is given; name one, or write one with --conv")
    return found
