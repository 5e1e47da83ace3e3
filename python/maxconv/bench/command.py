"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from maxconv import _doctor as doctor
from maxconv._dtypes import DTYPE_BYTES
from maxconv._problems import NamedProblem, find_problem, load_problems

from .environment import checkout, machine, usable_threads
from .record import Record, load, results_name
from .report import render_markdown, render_text
from .timing import FULL, QUICK

__all__ = ["add_arguments", "measure", "repeat", "run", "select"]

_RESULTS = Path("benchmarks", "results")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``maxconv bench``."""
    parser.add_argument(
        "--family", nargs="+", default=[], metavar="NAME", help="these families of problems only"
    )
    parser.add_argument(
        "--problem",
        nargs="+",
        default=[],
        metavar="NAME",
        help="these named problems only; maxconv doctor --list lists them",
    )
    parser.add_argument("--dtype", choices=DTYPE_BYTES, default="float32", help="storage type")
    parser.add_argument(
        "--quick", action="store_true", help="few rounds, and one problem a family: a rough look"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record here, as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios: a .png or .svg")
    parser.add_argument(
        "--record",
        action="store_true",
        help=f"write the record to the checkout's {_RESULTS}; for a whole run",
    )
    parser.add_argument(
        "--render",
        type=Path,
        metavar="RECORD",
        help="measure nothing: print a record's table as Markdown, and draw its plot",
    )


def run(args: argparse.Namespace) -> int:
    """Measures and reports; returns the exit status: 1 if memory exceeds what is allowed.

    Raises:
        ValueError: The arguments contradict each other or name what does not exist, or contenders
            disagree about a result.
        OSError: A file cannot be written.
    """
    if args.render:
        return _render(args)
    problems = select(args.family, args.problem, quick=args.quick)
    root = _check_outputs(args)
    record = measure(problems, args)
    print(render_text(record), end="")
    if args.json:
        args.json.write_text(record.to_json(), encoding="utf-8")
    if root is not None:
        path = root / _RESULTS / results_name(record)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(record.to_json(), encoding="utf-8")
        print(f"\n{path}")
    if args.plot:
        from .plot import plot

        plot(record, args.plot)
    exceeded = [entry.name for entry in record.memory if not entry.fits]
    if exceeded:
        print(f"more memory than allowed: {', '.join(exceeded)}", file=sys.stderr)
    if record.functions is not None and not record.functions.equal:
        print("the public functions' outputs differ from the op's", file=sys.stderr)
        return 1
    return 1 if exceeded else 0


def select(
    families: Sequence[str], names: Sequence[str], *, quick: bool = False
) -> list[NamedProblem]:
    """Returns the problems of some families and of some names, in the order of the list.

    Without either: all that stand in a family; when ``quick``, the first of each.

    Raises:
        ValueError: A family or a name does not exist.
    """
    known = {named.name: named for named in load_problems().values()}
    existing = list(dict.fromkeys(named.family for named in known.values() if named.family))
    for family in families:
        if family not in existing:
            raise ValueError(
                f"family: {family!r} does not exist; {', '.join(existing)} are allowed"
            )
    wanted = {find_problem(name).name for name in names}
    if not families and not names:
        families = existing
    chosen = [named for named in known.values() if named.family in families]
    if quick:
        chosen = list({named.family: named for named in reversed(chosen)}.values())
    wanted |= {named.name for named in chosen}
    return [named for named in known.values() if named.name in wanted]


def _check_outputs(args: argparse.Namespace) -> Path | None:
    """Checks before minutes are spent that the results can be kept; returns the checkout to use."""
    for name in ("json", "plot"):
        path: Path | None = getattr(args, name)
        if path is not None and not path.resolve().parent.is_dir():
            raise ValueError(f"{name}: the folder of {path} does not exist")
    if args.plot:
        from .plot import check_format

        check_format(args.plot)
    if not args.record:
        return None
    if args.quick or args.family or args.problem:
        raise ValueError(
            "record: only a whole run is recorded, without --quick, --family and --problem; "
            "--json keeps any other"
        )
    clone = checkout()
    if clone is None:
        raise ValueError("record: this maxconv does not run from a clone; --json keeps a record")
    return clone.root


def measure(problems: Sequence[NamedProblem], args: argparse.Namespace) -> Record:
    """Measures problems as the arguments ask for.

    Raises:
        Mismatch: Contenders disagree about a result.
        RuntimeError: A child process failed.
    """
    from .runner import measure_memory, measure_problems
    from .workload import TOLERANCE

    # Before anything runs: afterwards the load is this program's own.
    here = machine()
    clone = checkout()
    started = datetime.now(timezone.utc)
    protocol = QUICK if args.quick else FULL
    # First, since it is short and may fail.
    memory = measure_memory(problems, args.dtype)
    results, functions = measure_problems(problems, args.dtype, protocol)
    return Record(
        date=started.isoformat(timespec="seconds"),
        command=repeat(args),
        commit=clone.commit if clone else None,
        modified=clone.modified if clone else False,
        dtype=args.dtype,
        threads=usable_threads(),
        machine=here,
        versions=doctor.versions(),
        protocol=protocol,
        tolerance=TOLERANCE[args.dtype],
        results=results,
        memory=memory,
        functions=functions,
    )


def repeat(args: argparse.Namespace) -> str:
    """Returns the command that repeats the measurement; where its results went is no part of it."""
    words = ["python", "-m", "maxconv", "bench"]
    for name in ("family", "problem"):
        if values := getattr(args, name):
            words += [f"--{name}", *values]
    if args.dtype != "float32":
        words += ["--dtype", args.dtype]
    if args.quick:
        words.append("--quick")
    return shlex.join(words)


def _render(args: argparse.Namespace) -> int:
    for name in ("family", "problem", "quick", "json", "record"):
        if getattr(args, name):
            raise ValueError(f"render: --{name} does not go with it, since nothing is measured")
    record = load(args.render)
    if args.plot:
        from .plot import plot

        plot(record, args.plot)
    print(render_markdown(record), end="")
    return 0
