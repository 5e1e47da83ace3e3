"""What a command line asks to tune: convolutions by name, written out, or of suites."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from .._problem import ConvProblem
from .._problems import (
    find_problem,
    load_problems,
    network_problems,
    parse_integers,
    parse_padding,
    parse_problem,
)
from .heron import OPERATORS, operator_problems
from .models import layers_of

T = TypeVar("T")

__all__ = ["SUITES", "Asked", "add_arguments", "asked_of", "asks_any", "say_left_out", "spaces_of"]


@dataclass(frozen=True)
class Asked:
    """A convolution to tune."""

    name: str
    problem: ConvProblem
    optional: bool = False
    """Whether it is left out where the target cannot take it: what a person named is not."""
    count: int = 1
    """How many layers of what was asked for are it."""


def _problems() -> list[tuple[str, ConvProblem]]:
    return [(name, named.problem) for name, named in load_problems().items()]


def _networks() -> list[tuple[str, ConvProblem]]:
    return [(named.name, named.problem) for named in network_problems()]


def _operators(names: Sequence[str] = ()) -> list[tuple[str, ConvProblem]]:
    return [(named.name, named.problem) for named in operator_problems(names)]


#: What ``--suite`` takes: the convolutions of each, by name.
SUITES: Mapping[str, Callable[[], list[tuple[str, ConvProblem]]]] = {
    "problems": _problems,
    "networks": _networks,
    "heron": _operators,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that ask for many convolutions at once."""
    parser.add_argument(
        "--suite",
        choices=tuple(SUITES),
        help="all of problems.yaml, all that real networks convolve (networks.yaml), or the "
        "operators that Heron was evaluated on; those that the target cannot take are named and "
        "left out",
    )
    parser.add_argument(
        "--operator",
        nargs="+",
        choices=tuple(OPERATORS),
        default=[],
        help="with --suite heron: of its operators these alone",
    )
    parser.add_argument(
        "--model",
        metavar="PACKAGE:NAME",
        help="all that a model convolves, each once, what takes it longest first: "
        "torchvision:resnet50, or another that `maxconv bench --models` knows",
    )
    parser.add_argument(
        "--batch", type=int, default=1, metavar="N", help="with --model: of its input; by default 1"
    )


def asks_any(args: argparse.Namespace) -> bool:
    """Returns whether a command line asks for any convolution."""
    return bool(args.problems or args.conv or args.suite or args.model)


def asked_of(args: argparse.Namespace) -> list[Asked]:
    """Returns the convolutions that are asked for; of equal ones the first.

    Raises:
        ValueError: There is none, or one is none.
    """
    found = [Asked(name, find_problem(name).problem) for name in args.problems]
    for text in args.conv:
        problem = parse_problem(
            text,
            stride=parse_integers("stride", args.stride),
            dilation=parse_integers("dilation", args.dilation),
            padding=parse_padding(args.padding),
            groups=args.groups,
        )
        found.append(Asked(text, problem))
    if args.operator and args.suite != "heron":
        raise ValueError("--operator: it goes with --suite heron, which has operators")
    if args.suite is not None:
        listed = _operators(args.operator) if args.operator else SUITES[args.suite]()
        found += [Asked(name, problem, optional=True) for name, problem in listed]
    if args.model is not None:
        found += _layers(args.model, args.batch)
    if not found:
        raise ValueError(
            "problem: none is given; name one, a --suite or a --model, or write one with --conv"
        )
    return _distinct(found)


def _layers(model: str, batch: int) -> list[Asked]:
    """Returns a model's convolutions; says which of its layers are none that can be tuned."""
    layers = layers_of(model, batch)
    say_left_out({each.name: each.reason for each in layers if each.problem is None}, len(layers))
    found = [
        Asked(each.name, each.problem, optional=True, count=each.count)
        for each in layers
        if each.problem is not None
    ]
    if not found:
        raise ValueError(f"--model: {model} convolves nothing that can be tuned")
    return found


def _distinct(found: Sequence[Asked]) -> list[Asked]:
    """Joins what was asked for several times, under any name: the first name counts."""
    first: dict[tuple[int, ...], Asked] = {}
    for asked in found:
        key = tuple(asked.problem.numbers())
        known = first.get(key)
        first[key] = asked if known is None else replace(known, count=known.count + asked.count)
    return list(first.values())


def spaces_of(
    asked: Sequence[Asked], open_one: Callable[[ConvProblem], T]
) -> tuple[dict[str, T], dict[str, str]]:
    """Opens the spaces of convolutions.

    Args:
        asked: The convolutions.
        open_one: Opens the spaces of one.

    Returns:
        The spaces by name, and why others have none, by name.

    Raises:
        ValueError: One that may not be left out has no space, or none has one.
    """
    spaces: dict[str, T] = {}
    left_out: dict[str, str] = {}
    for each in asked:
        try:
            spaces[each.name] = open_one(each.problem)
        except ValueError as error:
            if not each.optional:
                raise
            left_out[each.name] = str(error)
    if not spaces:
        name, reason = next(iter(left_out.items()))
        raise ValueError(f"all {len(left_out)} convolutions are left out, {name} since {reason}")
    return spaces, left_out


def say_left_out(left_out: Mapping[str, str], of: int) -> None:
    """Says on stderr which convolutions are left out, and why.

    Args:
        left_out: Reasons by name.
        of: How many were asked for.
    """
    for name, reason in left_out.items():
        print(f"{name}: left out: {reason}", file=sys.stderr)
    if left_out:
        print(f"{len(left_out)} of {of} convolutions are left out", file=sys.stderr, flush=True)
