"""``maxconv tune``: the space of a problem's configurations, and the search in it."""

from __future__ import annotations

import argparse
import contextlib
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .._doctor import versions
from .._dtypes import INPUT_BYTES, OUTPUT_BYTES
from .._fields import Kernel
from .._machine import cpu_model
from .._problem import ConvProblem
from .._problems import add_geometry
from .._tuned_table import kernel_versions, read_table, this_device, user_table
from . import asked as asking
from . import comparing
from .cost import Study
from .gpu import command as gpu
from .measure import CpuMeasurer, executor_of
from .measure.base import Configuration
from .records import Environment, Records
from .rivals import Rival, rivals, shares
from .search import SEARCHES
from .session import Result, tune
from .several import Totals, reports, search_all
from .space import TARGET_NAMES, Space, configuration, named, open_space, open_spaces
from .table import Confirmation, change_table, configuration_in
from .transfer import Transfer

__all__ = ["add_arguments", "run", "this_environment"]

#: What ``--export`` without a file stands for: the user's own table.
_OWN = Path()


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
    add_geometry(parser)
    asking.add_arguments(parser)
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
    parser.add_argument(
        "--budget",
        type=int,
        default=200,
        metavar="N",
        help="trials of each problem; by default 200",
    )
    parser.add_argument(
        "--search", choices=tuple(SEARCHES), default="genetic", help="by default genetic"
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything random; by default 0")
    parser.add_argument(
        "--executor", metavar="ADDRESS", help="measure elsewhere: dask://HOST:PORT of a scheduler"
    )
    parser.add_argument(
        "--records", type=Path, metavar="FILE", help="where trials are kept, and read again"
    )
    parser.add_argument(
        "--no-table",
        action="store_true",
        help="do not write what is found into your tuned table, which PyTorch and graphs use",
    )
    parser.add_argument(
        "--export",
        type=Path,
        nargs="?",
        const=_OWN,
        metavar="FILE",
        help="search nothing; write what --records has for this machine into a tuned table, by "
        "default your own",
    )
    comparing.add_arguments(parser)
    gpu.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the spaces, searches them, or exports records; returns the exit status.

    Raises:
        ValueError: A problem is none, an argument is not allowed, or no kernel takes the problem.
        LibraryError: A library cannot be built.
        ModuleNotFoundError: The extra is not installed.
    """
    if args.export is not None:
        return _export(args)
    if gpu.asks(args):
        return gpu.run(args)
    if args.budget < 1:
        raise ValueError(f"--budget: {args.budget} is not positive; at least 1 trial is needed")
    asked = asking.asked_of(args)
    if not args.show_space and args.target != "cpu" and not comparing.asks(args):
        raise ValueError(
            f"--target: {args.target} can be shown with --show-space; cpu is searched, and sm90 "
            "measured in steps: --build, --from, --import"
        )

    spaces, left_out = asking.spaces_of(asked, lambda problem: _spaces(problem, args))
    asking.say_left_out(left_out, len(asked))
    if args.show_space:
        print("\n\n".join(f"{name}: {space}" for name in spaces for space in spaces[name]))
        return 0
    if comparing.asks(args):
        first = {name: of_problem[0] for name, of_problem in spaces.items()}
        return comparing.run(args, first, this_environment())
    with contextlib.ExitStack() as stack:
        records = None
        if args.records is not None:
            records = stack.enter_context(Records(args.records, this_environment()))
        return _search(asked, spaces, args, records)


def _spaces(problem: ConvProblem, args: argparse.Namespace) -> list[Space]:
    """Returns the spaces of a problem: on a CPU of all kernels that take it."""
    if args.target != "cpu":
        return [_opened(problem, args)]
    return open_spaces(problem, args.target, **_as_asked(args))


def _opened(problem: ConvProblem, args: argparse.Namespace, kernel: Kernel | None = None) -> Space:
    """Returns the space of a kernel, by default of the first that takes a problem."""
    return open_space(problem, args.target, kernel=kernel, **_as_asked(args))


def _as_asked(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what the command line says of every space."""
    return {
        "dtype": args.dtype,
        "out_dtype": args.output,
        "residual": args.residual,
        "units": args.units,
    }


def this_environment() -> Environment:
    """Returns this machine's CPU and the versions of what runs on it."""
    found = {name: str(version) for name, version in versions().items()}
    found |= kernel_versions() | {"features": " ".join(this_device().features)}
    return Environment(cpu_model(), platform.release(), found)


def _export(args: argparse.Namespace) -> int:
    """Writes a table from records."""
    if args.target != "cpu":
        raise ValueError(f"--export: --target {args.target} has no tuned table; cpu has one")
    if asking.asks_any(args):
        raise ValueError("--export: it takes all problems of --records; name none")
    if args.records is None or not args.records.is_file():
        raise ValueError(f"--records: {args.records} is no file; --export reads one")
    path = user_table() if args.export == _OWN else args.export
    with Records(args.records, this_environment()) as records:
        found = records.confirmations("cpu")
    changes = change_table(path, found, this_device(), kernel_versions())
    print(f"{path}: {len(found)} confirmations of this machine and version; {changes}")
    return 0


def _tabled(confirmed: Sequence[Confirmation]) -> str:
    """Writes a problem's confirmations into the user's table; says what became of them."""
    path = user_table()
    path.parent.mkdir(parents=True, exist_ok=True)
    changes = change_table(path, confirmed, this_device(), kernel_versions())
    holding = [confirmation for confirmation in confirmed if confirmation.holds]
    if holding:
        kernel = max(holding, key=lambda confirmation: confirmation.gain[1]).tuned
        return f"{kernel} in {path}; the next process uses it"
    removed = "; the row that was there is removed" if changes.removed else ""
    return f"no gain beyond the noise, not in {path}{removed}"


def _known(space: Space) -> Configuration | None:
    """Returns what the user's table has for a space."""
    path = user_table()
    if not path.exists():
        return None
    return configuration_in(read_table(path), space, this_device())


def _search(
    asked: Sequence[asking.Asked],
    spaces: Mapping[str, Sequence[Space]],
    args: argparse.Namespace,
    records: Records | None,
) -> int:
    """Searches spaces; says and keeps what is found in each. Returns the exit status."""
    counts = {each.name: each.count for each in asked}
    totals = Totals()
    # The cost model of the others would not read it.
    transfer = Transfer(records) if records is not None and args.search == "genetic" else None

    def search(told: str, name: str) -> bool:
        results = _tuned(told, counts[name], spaces[name], args, records, transfer)
        confirmed = [r.confirmation for r in results if r.confirmation is not None]
        if confirmed and not args.no_table:
            print(f"{told}: {_tabled(confirmed)}", flush=True)
        totals.add(confirmed, counts[name])
        return results[-1].interrupted

    status = search_all(list(spaces), search, {each.name for each in asked if each.optional})
    if totals.layers > 1:
        print(totals)
    return status


def _tuned(
    name: str,
    count: int,
    spaces: Sequence[Space],
    args: argparse.Namespace,
    records: Records | None,
    transfer: Transfer | None,
) -> list[Result]:
    """Searches a problem's spaces, one after the other, and prints what each has found."""
    make = executor_of(args.executor)
    found = rivals(
        spaces,
        lambda space: CpuMeasurer(space, make=make),
        lambda space: None if args.no_table else _known(space),
    )
    layers = f" x{count}" if count > 1 else ""
    results: list[Result] = []
    for rival, budget in zip(found, shares(args.budget, len(found)), strict=True):
        label = f"{name} on {rival.space.kernel.name.lower()}" if len(found) > 1 else name
        try:
            if not (results and results[-1].interrupted):
                others = _studies(rival.space, args, transfer)
                results.append(_searched(label, rival, budget, args, records, others))
                print(_line(label + layers, rival.space, results[-1]), flush=True)
        finally:
            rival.measurer.close()
    return results


def _studies(space: Space, args: argparse.Namespace, transfer: Transfer | None) -> list[Study]:
    """Returns what records have of other problems for a space's kernel."""
    if transfer is None:
        return []
    return transfer.studies(space, lambda problem: _opened(problem, args, space.kernel))


def _searched(
    name: str,
    rival: Rival,
    budget: int,
    args: argparse.Namespace,
    records: Records | None,
    others: Sequence[Study],
) -> Result:
    """Searches one space."""
    with reports(name) as report:
        return tune(
            rival.space,
            SEARCHES[args.search](rival.space, args.seed, others),
            rival.measurer,
            budget=budget,
            records=records,
            tabled=rival.tabled,
            name=args.search,
            seed=args.seed,
            report=report,
        )


def _line(name: str, space: Space, result: Result) -> str:
    """Returns a result for people."""
    text = f"{name}: {len(result.trials)} trials; dispatch {result.dispatch * 1e6:.1f} us"
    text += f" ({result.kernel})"
    stopped = "; interrupted" if result.interrupted else ""
    if result.best is None or result.confirmation is None:
        return f"{text}, nothing faster{stopped}"
    low, _, high = result.confirmation.gain
    text += f", best {(result.best.seconds or 0.0) * 1e6:.1f} us, {result.gain:.2f}x"
    fields = named(configuration(space, result.best.candidate.values))
    return f"{text} ({low:.2f} to {high:.2f}); {fields}{stopped}"
