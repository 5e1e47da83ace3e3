"""Measures: makes the contenders, checks that they agree, times them in turns."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from maxconv._problems import NamedProblem
from maxconv._progress import progress

from . import peers_max, peers_torch
from .entrant import Entrant
from .environment import usable_threads
from .memory import Memory, largest, measure
from .ours import OwnGraphs, Through, kinds, through_functions
from .record import Functions, Result
from .statistics import Timing
from .timing import Protocol, interleave
from .workload import (
    MAX_TOLERANCE,
    TOLERANCE,
    Float32,
    Mismatch,
    Workload,
    check,
    convolutions,
)

__all__ = ["measure_memory", "measure_problem", "measure_problems"]

_MEMORY_PROBLEMS = 4


def measure_problem(
    named: NamedProblem,
    entrants: Mapping[str, Entrant],
    reference: tuple[Float32, Float32],
    dtype: str,
    protocol: Protocol,
    missing: Mapping[str, str],
) -> Result:
    """Checks and times the contenders of a problem.

    Args:
        named: The problem.
        entrants: The contenders by name. Names that begin with ``max`` are another project's to
            mend: their wrong results are recorded, not raised.
        reference: What they must compute: without and with the epilogue.
        dtype: Storage type.
        protocol: How often and how long.
        missing: Why contenders that are not in ``entrants`` are not.

    Raises:
        Mismatch: A contender's output differs from the reference.
    """
    errors: dict[str, float] = {}
    missing = dict(missing)
    count = convolutions(named.problem)
    for name, entrant in entrants.items():
        is_max = name.startswith("max")
        tolerance = (MAX_TOLERANCE if is_max else TOLERANCE)[dtype]
        try:
            errors[name] = _check(entrant, count, reference[entrant.fused], tolerance)
        except Mismatch as error:
            if not is_max:
                raise Mismatch(f"{named.name}: {name}: {error}") from error
            missing[name] = f"wrong result: {error}"
    runs = {(name, single): run for name in errors for run, single in entrants[name].runs()}
    timings = interleave(runs, protocol)
    problem = named.problem
    return Result(
        name=named.name,
        family=named.family,
        problem=str(problem),
        rank=problem.spatial_rank,
        depthwise=problem.is_depthwise,
        flops=problem.flops,
        nbytes=problem.nbytes(dtype),
        convolutions=count,
        timings={name: t.per(count) for (name, single), t in timings.items() if not single},
        singles={name: timing for (name, single), timing in timings.items() if single},
        errors=errors,
        missing=missing,
    )


def _check(entrant: Entrant, count: int, reference: Float32, tolerance: float) -> float:
    """Returns how far the farthest of an entrant's outputs lies from the reference.

    Raises:
        Mismatch: Too far, or there are not as many outputs as convolutions.
    """
    worst = 0.0
    for run, single in entrant.runs():
        outputs = run.outputs()
        if len(outputs) != (1 if single else count):
            raise Mismatch(f"there are {len(outputs)} outputs, not {1 if single else count}")
        worst = max(worst, *(check(output, reference, tolerance) for output in outputs))
    return worst


def measure_problems(
    problems: Sequence[NamedProblem], dtype: str, protocol: Protocol
) -> tuple[list[Result], Functions]:
    """Measures problems, family by family, and the public functions on one problem of each.

    Raises:
        Mismatch: A contender's output differs from the reference.
        maxconv.LibraryError: maxconv's kernels cannot be compiled.
    """
    families: dict[str, list[NamedProblem]] = {}
    for named in problems:
        families.setdefault(named.family or "others", []).append(named)
    graphs = OwnGraphs(dtype)
    for wanted in dict.fromkeys(kinds(named.problem) for named in problems):
        with progress(f"compiling maxconv's graphs: {'; '.join(map(str, wanted))}"):
            graphs.models(wanted)
    firsts = [Workload.make(members[0], dtype) for members in families.values()]
    with progress("compiling maxconv's public functions"):
        through = through_functions(firsts, dtype)
    results: list[Result] = []
    with peers_torch.session(usable_threads()):
        for family, members in families.items():
            with progress(f"compiling and trying MAX's own convolutions: {family}"):
                calls, missing = _max_contenders(members, dtype)
            for number, named in enumerate(members, start=1):
                with progress(f"timing {named.name} ({number} of {len(members)} in {family})"):
                    work = Workload.make(named, dtype)
                    torch_entrants, reasons = peers_torch.contenders(work)
                    entrants = {
                        **graphs.contenders(work),
                        **calls.get(named.name, {}),
                        **torch_entrants,
                    }
                    reasons |= missing.get(named.name, {})
                    reference = peers_torch.reference(work)
                    results.append(
                        measure_problem(named, entrants, reference, dtype, protocol, reasons)
                    )
        with progress("timing maxconv's public functions"):
            functions = _measure_functions(through, firsts, graphs, protocol)
    return results, functions


def _max_contenders(
    problems: Sequence[NamedProblem], dtype: str
) -> tuple[dict[str, dict[str, Entrant]], dict[str, dict[str, str]]]:
    """Returns MAX's entrants, and why others are missing, by problem and then by contender."""
    names = {True: "max", False: "max_input"}
    tried = peers_max.try_all(problems, partial(peers_max.run_child, dtype=dtype))
    by_name = {named.name: named for named in problems}
    entrants: dict[str, dict[str, Entrant]] = {}
    for unit in tried.units:
        works = [Workload.make(by_name[name], dtype) for name in unit.names]
        for name, entrant in peers_max.load(works, constant=unit.constant).items():
            if name in tried.runs[unit.constant]:
                entrants.setdefault(name, {})[names[unit.constant]] = entrant
    missing = {
        name: {names[constant]: reason for constant, reason in reasons.items()}
        for name, reasons in tried.failures.items()
    }
    return entrants, missing


def _measure_functions(
    through: Through, works: Sequence[Workload], graphs: OwnGraphs, protocol: Protocol
) -> Functions:
    singles = {work.named.name: graphs.single(work) for work in works}
    outputs = through.outputs()
    equal = all(
        np.array_equal(call.outputs()[0].reshape(-1), outputs[name].reshape(-1))
        for name, call in singles.items()
    )
    timings = interleave({"the graph": through.call, **singles}, protocol)
    graph: Timing = timings.pop("the graph")
    return Functions(
        names=through.names,
        equal=equal,
        graph_s=graph.median_s,
        sum_s=sum(timing.median_s for timing in timings.values()),
    )


def measure_memory(problems: Sequence[NamedProblem], dtype: str) -> list[Memory]:
    """Measures the memory of the largest problems; says on stderr where it cannot."""
    found = []
    for named in largest(problems, _MEMORY_PROBLEMS):
        with progress(f"measuring the memory of {named.name}"):
            try:
                found.append(measure(named, dtype))
            except OSError as error:
                print(f"memory is not measured: {error}", file=sys.stderr)
                break
    return found
