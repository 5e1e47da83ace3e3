"""``maxconv doctor``: what this machine has, and which kernel a convolution gets and why."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from typing import Any

from . import _library as library
from ._dtypes import DTYPE_BYTES, INPUT_BYTES
from ._fields import BLOCKED_IMAGES
from ._machine import cpu_features, cpu_model
from ._problem import ConvProblem
from ._problems import (
    add_geometry,
    find_problem,
    load_problems,
    parse_integers,
    parse_padding,
    parse_problem,
)
from ._progress import progress
from ._targets import TARGETS
from ._version import __version__

__all__ = ["add_arguments", "run", "versions"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``maxconv doctor``."""
    parser.add_argument("--json", action="store_true", help="print JSON, for a program")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--problem", metavar="NAME", help="a named problem; see --list")
    which.add_argument(
        "--conv", metavar="SPEC", help="NxSPATIALxC:KxTAPS, channels last: 1x56x56x64:64x3x3"
    )
    which.add_argument("--list", action="store_true", help="list the named problems and end")
    add_geometry(parser)
    parser.add_argument("--dtype", choices=INPUT_BYTES, default="float32", help="storage type")
    parser.add_argument(
        "--layout",
        choices=("NHWC", *BLOCKED_IMAGES),
        default="NHWC",
        help="of activation and output; a GPU takes NC/4HW4, of int8",
    )
    parser.add_argument(
        "--target",
        choices=("cpu", "gpu", *TARGETS),
        default="cpu",
        help="where it would run: this machine's CPU or GPU, or a GPU that need not be here",
    )
    parser.add_argument(
        "--multiprocessors",
        type=int,
        metavar="N",
        help="of the GPU that need not be here; by default those of a product that has it",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the report; returns the exit status.

    Raises:
        ValueError: The named or written problem is none, or its target cannot be asked.
        LibraryError: A kernel is asked about, and the kernels cannot be compiled.
    """
    if args.list:
        return _list(args.json)
    # Before anything slow: a mistake in the problem is told at once.
    problem = _problem(args)
    report: dict[str, Any] = {
        "versions": versions(),
        "cpu": _cpu(),
        "gpus": _gpus(),
        "cache": _cache(),
    }
    if problem is not None:
        report["problem"] = _explain(args.problem or args.conv, problem, args)
    print(json.dumps(report, indent=2) if args.json else _text(report))
    return 0


def _list(as_json: bool) -> int:
    named = load_problems().values()
    if as_json:
        rows = [{"name": n.name, "family": n.family, "problem": str(n.problem)} for n in named]
        print(json.dumps(rows, indent=2))
        return 0
    width = max(len(entry.name) for entry in named)
    for entry in named:
        print(f"{entry.name:{width}}  {entry.problem}")
    return 0


def _problem(args: argparse.Namespace) -> ConvProblem | None:
    if args.problem:
        return find_problem(args.problem).problem
    if args.conv:
        return parse_problem(
            args.conv,
            stride=parse_integers("stride", args.stride),
            dilation=parse_integers("dilation", args.dilation),
            padding=parse_padding(args.padding),
            groups=args.groups,
        )
    return None


def _explain(name: str, problem: ConvProblem, args: argparse.Namespace) -> dict[str, Any]:
    from ._explain import explain_choice

    dtype, target, multiprocessors = args.dtype, args.target, args.multiprocessors
    with progress("asking the kernels"):
        kernel, reason = explain_choice(
            problem,
            dtype=dtype,
            device=target,
            multiprocessors=multiprocessors,
            layout=args.layout,
        )
    if target in TARGETS and multiprocessors is None:
        multiprocessors = TARGETS[target].multiprocessors
    gemm = problem.gemm
    return {
        "name": name,
        "convolution": str(problem),
        "dtype": dtype,
        "layout": args.layout,
        "target": target,
        "multiprocessors": multiprocessors,
        "output_shape": problem.output_shape,
        "gemm": {"m": gemm.m, "n": gemm.n, "k": gemm.k, "groups": gemm.groups},
        "flops": problem.flops,
        "bytes": problem.nbytes(dtype, dtype if dtype in DTYPE_BYTES else "bfloat16"),
        "kernel": kernel,
        "reason": reason,
    }


def versions() -> dict[str, str | None]:
    """Returns the versions of everything that decides a result; ``None`` for what is missing."""
    return {
        "maxconv": __version__,
        "max": library.max_version(),
        "mojo": library.mojo_version(),
        "python": platform.python_version(),
        "numpy": _distribution("numpy"),
        "torch": _distribution("torch"),
        "platform": platform.platform(),
    }


def _distribution(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    count = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else count
    return {
        "model": cpu_model(),
        "features": list(cpu_features()),
        "threads": count,
        "usable_threads": usable,
    }


def _gpus() -> list[dict[str, Any]]:
    from max.driver import Accelerator, accelerator_count

    devices = (Accelerator(index) for index in range(accelerator_count()))
    return [{"api": gpu.api, "architecture": gpu.architecture_name} for gpu in devices]


def _cache() -> dict[str, Any]:
    state = library.cache_state()
    return {
        "directory": str(state.directory),
        "entry": str(state.entry),
        "compiled": state.compiled,
        "entries": state.entries,
        "bytes": state.size,
    }


def _text(report: dict[str, Any]) -> str:
    cpu, cache = report["cpu"], report["cache"]
    rows = [(name, value or "not installed") for name, value in report["versions"].items()]
    threads = f"{cpu['usable_threads']} threads usable of {cpu['threads']}"
    rows += [("cpu", f"{cpu['model']}, {threads}"), ("", " ".join(cpu["features"]))]
    rows += [("gpu", f"{gpu['architecture']} ({gpu['api']})") for gpu in report["gpus"]]
    if not report["gpus"]:
        rows.append(("gpu", "none"))
    state = "compiled" if cache["compiled"] else "not compiled yet: the first use does it, once"
    rows += [("kernels", state), ("", f"{cache['directory']}, {cache['bytes'] / 1e6:.1f} MB")]
    if problem := report.get("problem"):
        gemm = problem["gemm"]
        groups = f", {gemm['groups']} groups" if gemm["groups"] > 1 else ""
        rows += [
            ("problem", f"{problem['name']}: {problem['convolution']}, {_tensors_text(problem)}"),
            ("", f"{problem['flops'] / 1e9:.3g} GFLOP, {problem['bytes'] / 1e6:.3g} MB at least"),
            ("", f"as a matrix product {gemm['m']} x {gemm['n']} x {gemm['k']}{groups}"),
            ("target", _target_text(problem)),
            ("kernel", problem["kernel"]),
            ("why", problem["reason"]),
        ]
    return "\n".join(f"{name:9} {value}" for name, value in rows)


def _tensors_text(problem: dict[str, Any]) -> str:
    dtype: str = problem["dtype"]
    return dtype if problem["layout"] == "NHWC" else f"{dtype} in {problem['layout']}"


def _target_text(problem: dict[str, Any]) -> str:
    name: str = problem["target"]
    if name not in TARGETS:
        return f"this machine's {name}"
    return f"{name} with {problem['multiprocessors']} multiprocessors ({TARGETS[name].product})"
