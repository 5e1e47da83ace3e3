"""The command line: ``python -m ptxemu`` and ``ptxemu``.

It runs a kernel from a PTX file on the CPU as a JSON file describes, under several seeds, compares
outputs and writes timelines. ``--schema`` prints what a description may hold. The folder
``example`` has a kernel with two warps and a ring of two stages, and its description::

    cd python/ptxemu/example
    python -m ptxemu ring.ptx --config ring.json --trace trace.json --plot trace.png
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import EmulatorError, PtxSyntaxError, Trace, UnsupportedError
from ._run.config import Comparison, Config, Result, read_config
from ._run.schema import SCHEMA, ConfigError

__all__ = ["build_parser", "main"]

#: Elements of an array that are printed without ``--json``, and values in JSON.
_SHOWN, _LISTED = 64, 4096

#: Exit statuses.
_RIGHT, _WRONG, _MISUSED = 0, 1, 2


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="ptxemu", description="Run a kernel from a PTX file on the CPU."
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("kernel", type=Path, nargs="?", metavar="KERNEL.ptx", help="a PTX file")
    parser.add_argument("--config", type=Path, metavar="RUN.json", help="what a launch passes")
    parser.add_argument(
        "--seed", type=int, nargs="+", metavar="SEED", help="instead of the file's seeds"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="OUT.json",
        help="write a timeline that ui.perfetto.dev opens: of the first seed that goes wrong, or "
        "of the first",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="OUT.png", help="draw the timeline: a .png, .svg or .pdf"
    )
    parser.add_argument(
        "--schema", action="store_true", help="print what RUN.json may hold, and run nothing"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
        The exit status: 0 if every run ended and compared right, 1 if not or after an error that
        is told, 2 if the description or the command line is wrong.
    """
    args = build_parser().parse_args(arguments)
    try:
        status = _run(args)
        # Where the reader of a pipe has gone, this is what meets it, not the interpreter's exit.
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _WRONG
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        if args.debug or (error.name or "ptxemu").startswith("ptxemu"):
            raise
        remedy = "pip install 'maxconv[plot]'"
        print(f"ptxemu: {error.name} is not installed; {remedy}", file=sys.stderr)
        return _WRONG
    except (OSError, ValueError) as error:
        if args.debug:
            raise
        print(f"ptxemu: {error}", file=sys.stderr)
        return _WRONG
    return status


def _run(args: argparse.Namespace) -> int:
    """Runs a kernel under each seed and reports; returns the exit status.

    Raises:
        ModuleNotFoundError: ``--plot`` without matplotlib.
        OSError: A file cannot be read or written.
    """
    if args.schema:
        print(json.dumps(SCHEMA, indent=2))
        return _RIGHT
    # Before anything runs: a picture may need what is not installed.
    plot = importlib.import_module("._run.plot", __package__) if args.plot else None
    try:
        if args.kernel is None or args.config is None:
            raise ConfigError("KERNEL.ptx and --config RUN.json are needed; see --help")
        if plot is not None:
            plot.check_format(args.plot)
        config = read_config(args.config)
        results, trace = _run_all(config, args)
    except ConfigError as error:
        print(f"ptxemu: {error}", file=sys.stderr)
        return _MISUSED
    except (PtxSyntaxError, UnsupportedError) as error:
        return _report_unread(error, args.json)
    _save(config, results[0])
    if trace is not None and args.trace:
        trace.write(args.trace)
    if trace is not None and plot is not None:
        plot.plot(trace, args.plot)
    if args.json:
        print(json.dumps([_as_json(config, result) for result in results], indent=2))
    else:
        for result in results:
            print("\n".join(_lines(config, result)))
    return _RIGHT if all(result.is_right for result in results) else _WRONG


def _run_all(config: Config, args: argparse.Namespace) -> tuple[list[Result], Trace | None]:
    """Runs every seed; returns the results and the trace that is worth seeing."""
    ptx = args.kernel.read_text(encoding="utf-8")
    results: list[Result] = []
    chosen: Trace | None = None
    for seed in args.seed or config.seeds:
        found_wrong = any(not result.is_right for result in results)
        trace = Trace() if (args.trace or args.plot) and not found_wrong else None
        result = config.run(ptx, seed, trace)
        results.append(result)
        if trace is not None and (chosen is None or not result.is_right):
            chosen = trace
    return results, chosen


def _report_unread(error: EmulatorError, as_json: bool) -> int:
    kind = type(error).__name__
    if as_json:
        print(json.dumps([{"status": "refused", "error": {"kind": kind, "message": str(error)}}]))
    else:
        print(f"refused: {kind}: {error}")
    return _WRONG


def _save(config: Config, result: Result) -> None:
    for name, path in config.saved.items():
        np.save(path, result.arrays[name])


def _lines(config: Config, result: Result) -> list[str]:
    """What a run gave, for a reader."""
    if result.error is not None:
        lines = [f"seed {result.seed}: {type(result.error).__name__}", f"  {result.error}"]
    else:
        lines = [f"seed {result.seed}: ended after {result.instructions:,} instructions"]
    for comparison in result.comparisons:
        lines.append(f"  {_compared(comparison)}")
    for name in config.printed:
        values = result.arrays[name]
        lines.append(f"  {name}: {config.dtypes[name]} {list(values.shape)}")
        text = np.array2string(values, threshold=_SHOWN, max_line_width=96)
        lines += [f"    {line}" for line in text.splitlines()]
    return lines


def _compared(entry: Comparison) -> str:
    if not entry.wrong:
        return f"{entry.array}: as expected, largest difference {entry.largest:g}"
    assert entry.first is not None
    index, value, expected = entry.first
    return (
        f"{entry.array}: {entry.wrong} of {entry.count} elements are wrong, largest difference "
        f"{entry.largest:g}; the first at {list(index)} is {value:g} and not {expected:g}"
    )


def _as_json(config: Config, result: Result) -> dict[str, Any]:
    found: dict[str, Any] = {
        "seed": result.seed,
        "status": "ended" if result.error is None else "stopped",
        "instructions": result.instructions,
        "arrays": {},
        "compared": [
            {
                "array": entry.array,
                "wrong": entry.wrong,
                "elements": entry.count,
                "largest_difference": entry.largest,
            }
            for entry in result.comparisons
        ],
    }
    for name in config.printed:
        values = result.arrays[name]
        shown = values.tolist() if values.size <= _LISTED else None
        description = {"dtype": config.dtypes[name], "shape": list(values.shape)}
        found["arrays"][name] = {**description, "values": shown}
    error = result.error
    if error is not None:
        place = vars(error.place) if error.place is not None else None
        waiting = [{**vars(where), "for": reason} for where, reason in error.waiting]
        report = {"kind": type(error).__name__, "message": error.message, "place": place}
        found["error"] = {**report, "waiting": waiting}
    return found
