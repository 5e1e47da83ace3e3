"""``maxconv tune --target sm90`` in three steps: ``--build``, ``--from`` and ``--import``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..._program import ProgramError
from .folder import read_folder
from .run import WORKS, measure

if TYPE_CHECKING:
    from .results import Summary

__all__ = ["add_arguments", "asks", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the three steps."""
    group = parser.add_argument_group(
        "measuring on a GPU, with --target sm90",
        "Configurations are chosen and compiled where Mojo is, measured where a GPU is, and what "
        "was measured is read where the records are.",
    )
    steps = group.add_mutually_exclusive_group()
    steps.add_argument(
        "--build", type=Path, metavar="FOLDER", help="choose configurations and compile them"
    )
    steps.add_argument(
        "--from",
        dest="built",
        type=Path,
        metavar="FOLDER",
        help="measure what --build wrote; goes on where an earlier run ended",
    )
    steps.add_argument(
        "--import",
        dest="results",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help="show what --from measured: a folder of --build and one of its results, and so on for "
        "further builds; with --records, keep it",
    )
    group.add_argument(
        "--configurations",
        type=int,
        default=60,
        metavar="N",
        help="with --build: how many, beside the hand-written table's; by default 60",
    )
    group.add_argument(
        "--studied",
        type=int,
        default=40,
        metavar="N",
        help="with --build: problems that configurations are bred for; by default 40",
    )
    group.add_argument(
        "--most",
        type=int,
        default=300,
        metavar="N",
        help="with --build and no PROBLEM: so many of the networks' convolutions, those of the "
        "most layers; by default 300",
    )
    group.add_argument(
        "--slower",
        type=float,
        default=1.4,
        metavar="RATIO",
        help="with --build: the model's time over the table's best up to which a configuration is "
        "measured; by default 1.4",
    )
    group.add_argument(
        "--out", type=Path, metavar="FOLDER", help="with --from: where the results are written"
    )
    group.add_argument(
        "--minutes",
        type=float,
        default=9.0,
        metavar="N",
        help="with --from: after these no further problem begins; by default 9",
    )
    group.add_argument(
        "--works",
        nargs="+",
        choices=WORKS,
        default=list(WORKS[:1]),
        help="with --from: the convolution alone, or with bias, SiLU and a residual; by default "
        "the former",
    )
    group.add_argument(
        "--workers",
        type=int,
        default=8,
        metavar="N",
        help="with --from: processes that assemble kernels before anything is measured; 0 "
        "assembles each when it is measured first; by default 8",
    )
    group.add_argument(
        "--rows",
        type=int,
        default=10,
        metavar="N",
        help="with --import: how many new rows of the table to propose; by default 10",
    )
    group.add_argument(
        "--tuned",
        type=Path,
        metavar="FILE",
        help="with --import: write which of the table's rows the problems are fastest with (YAML)",
    )
    group.add_argument(
        "--confirm",
        type=Path,
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="with --tuned: pairs of a folder of --build and its results, of other devices: rows "
        "that are faster there too are for all, the others for this device",
    )
    group.add_argument(
        "--keep",
        type=Path,
        metavar="FILE",
        help="with --tuned: the table that dispatch had where it was measured, whose rows stay "
        "unless another is faster (YAML)",
    )


def asks(args: argparse.Namespace) -> bool:
    """Returns whether one of the three steps is asked for."""
    return any(value is not None for value in (args.build, args.built, args.results))


def run(args: argparse.Namespace) -> int:
    """Runs a step; returns the exit status.

    Raises:
        ValueError: An argument is not allowed.
        LibraryError: Something cannot be compiled.
        MissingExtraError: A package that the choice needs is not installed.
    """
    if args.target != "sm90":
        raise ValueError(
            f"--target: {args.target} is not measured in steps; --build, --from and --import take "
            "sm90"
        )
    if args.build is not None:
        return _build(args)
    if args.built is not None:
        return _measure(args)
    return _import(args)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _build(args: argparse.Namespace) -> int:
    # The choice takes packages that the GPU machine lacks.
    from ..asked import asked_of, asks_any, say_left_out
    from .build import build, built_versions, tasks_of
    from .choose import ChoiceSettings, choose
    from .folder import check_folder
    from .problems import hopper_problems, those_of_hopper

    settings = ChoiceSettings(
        configurations=args.configurations, studied=args.studied, seed=args.seed
    )
    check_folder(args.build)
    if asks_any(args):
        given = asked_of(args)
        asked, left_out = those_of_hopper(given)
        say_left_out(left_out, len(given))
    else:
        asked = hopper_problems(args.most)
    configurations = choose(asked, settings, _say)
    tasks = tasks_of(asked, configurations, args.slower)
    count = len(configurations.listed)
    _say(f"compiling {count} configurations for {len(tasks)} problems")
    build(args.build, configurations, tasks, built_versions())
    pairs = sum(len(task.candidates) for task in tasks)
    print(f"{args.build}: {count} configurations, {len(tasks)} problems, {pairs} to measure")
    return 0


def _measure(args: argparse.Namespace) -> int:
    if args.out is None:
        raise ValueError("--out: it must be given with --from; results are written there")
    held = read_folder(args.built)
    try:
        left = measure(
            args.built,
            held,
            args.out,
            minutes=args.minutes,
            works=args.works,
            report=_say,
            workers=args.workers,
        )
    except ProgramError as error:
        raise ValueError(f"--from: the program of {args.built} does not run: {error}") from error
    print(f"{left} left: run it again, with the same --out" if left else "all is measured")
    return 0


def _import(args: argparse.Namespace) -> int:
    from .results import environment_of, joined, record

    if args.rows < 1:
        raise ValueError(f"--rows: {args.rows} is not positive; at least 1 is needed")
    parts = _summaries("--import", args.results)
    summary = joined([*parts.values()])
    print("\n".join(summary.lines(args.rows)))
    if args.tuned is not None:
        _write_tuned(args, summary, next(iter(parts)))
    if args.records is None:
        return 0
    from ..records import Records

    count = 0
    for results, part in parts.items():
        with Records(args.records, environment_of(results)) as records:
            count += record(records, part, seed=args.seed)
    print(f"{count} trials written to {args.records}")
    return 0


def _summaries(option: str, folders: Sequence[Path]) -> dict[Path, Summary]:
    """Reads pairs of a folder of ``--build`` and its results; returns them by the latter."""
    from .results import summarize

    if len(folders) % 2:
        raise ValueError(
            f"{option}: {len(folders)} folders are no pairs of a folder of --build and its results"
        )
    return {
        results: summarize(read_folder(build, whole=False).configurations, results)
        for build, results in zip(folders[::2], folders[1::2], strict=True)
    }


def _write_tuned(args: argparse.Namespace, summary: Summary, results: Path) -> None:
    """Writes the tuned table."""
    from .results import environment_of, sizes_of
    from .tuned import keeping, read, select, write

    where = environment_of(results)
    units, l2_bytes = sizes_of(results)
    confirmed = {
        environment_of(each).device: part
        for each, part in _summaries("--confirm", args.confirm).items()
    }
    tuned = select(
        summary,
        device=where.device,
        driver=where.driver,
        units=units,
        l2_bytes=l2_bytes,
        confirmed=confirmed,
    )
    if args.keep is not None:
        tuned = keeping(tuned, read(args.keep))
    write(args.tuned, tuned)
    print(f"{len(tuned.rows)} problems written to {args.tuned}")
