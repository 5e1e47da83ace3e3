"""Measures problems on a CPU: makes the contenders and times them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from maxconv._problems import NamedProblem
from maxconv._progress import progress
from maxconv.torch._threads import threads

from ..device import is_narrow
from ..entrant import MAX, MAXCONV, Entrant, Key
from ..environment import usable_threads
from ..measure import measure_problem
from ..record import Functions, Peak, Result
from ..timing import Protocol, interleave
from . import integers, peers_max, peers_torch
from .memory import Memory, largest, measure
from .ours import OwnGraphs, Through, kinds, through_functions
from .peak import PeakMeter
from .workload import Workload

__all__ = ["Measured", "measure_memory", "measure_problems"]

_MEMORY_PROBLEMS = 4


class Measured(NamedTuple):
    """What was found."""

    results: list[Result]
    functions: Functions | None = None
    peak: Peak | None = None
    """Of the type's multiplications, if maxconv takes part."""


def measure_problems(
    problems: Sequence[NamedProblem],
    dtype: str,
    protocol: Protocol,
    contenders: Collection[str],
    works: Collection[str],
) -> Measured:
    """Measures problems, family by family, and the public functions on one problem of each.

    Args:
        problems: What to measure.
        dtype: Storage type.
        protocol: How often and how long.
        contenders: The names of those that take part; without maxconv neither functions nor the
            peak are measured.
        works: The kinds of work.

    Raises:
        Mismatch: A contender's output differs from the reference.
        maxconv.library.LibraryError: maxconv's kernels cannot be compiled.
    """
    if is_narrow(dtype):
        return _measure_integers(problems, dtype, protocol, contenders, works)
    families: dict[str, list[NamedProblem]] = {}
    for named in problems:
        families.setdefault(named.family or "others", []).append(named)
    graphs = OwnGraphs(dtype) if MAXCONV in contenders else None
    if graphs is not None:
        for wanted in dict.fromkeys(kinds(named.problem) for named in problems):
            with progress(f"compiling maxconv's graphs: {'; '.join(map(str, wanted))}"):
                graphs.models(wanted)
    results: list[Result] = []
    functions = peak = None
    with peers_torch.session(usable_threads()):
        meter = _meter(dtype, contenders)
        for family, members in families.items():
            calls: dict[str, dict[Key, Entrant]] = {}
            missing: dict[str, dict[Key, str]] = {}
            if MAX in contenders:
                with progress(f"compiling and trying MAX's own convolutions: {family}"):
                    calls, missing = _max_contenders(members, dtype)
            for number, named in enumerate(members, start=1):
                with progress(f"timing {named.name} ({number} of {len(members)} in {family})"):
                    work = Workload.make(named, dtype)
                    entrants, reasons = peers_torch.contenders(work, contenders)
                    ours = graphs.contenders(work) if graphs else {}
                    entrants = {**ours, **entrants, **calls.get(named.name, {})}
                    entrants = {key: made for key, made in entrants.items() if key.work in works}
                    reasons |= missing.get(named.name, {})
                    reasons = {key: why for key, why in reasons.items() if key.work in works}
                    reference = peers_torch.reference(work)
                    if meter is not None:
                        meter.burst()
                    results.append(
                        measure_problem(named, entrants, reference, dtype, protocol, reasons)
                    )
        if meter is not None:
            meter.burst()
            peak = meter.peak()
        if graphs is not None:
            firsts = [Workload.make(members[0], dtype) for members in families.values()]
            with progress("compiling and timing maxconv's public functions"):
                through = through_functions(firsts, dtype)
                functions = _measure_functions(through, firsts, graphs, protocol)
    return Measured(results, functions, peak)


def _meter(dtype: str, contenders: Collection[str]) -> PeakMeter | None:
    """Returns what measures the peak, within PyTorch's session.

    ``None`` where maxconv does not take part, or PyTorch's threads cannot be used.
    """
    number = usable_threads()
    if MAXCONV not in contenders or threads() != number:
        return None
    return PeakMeter(dtype, number)


def _measure_integers(
    problems: Sequence[NamedProblem],
    dtype: str,
    protocol: Protocol,
    contenders: Collection[str],
    works: Collection[str],
) -> Measured:
    """Measures problems of 8-bit integers, one after the other."""
    graphs = integers.IntegerGraphs() if MAXCONV in contenders else None
    results = []
    peak = None
    with peers_torch.session(usable_threads()):
        meter = _meter(dtype, contenders)
        for number, named in enumerate(problems, start=1):
            with progress(f"timing {named.name} ({number} of {len(problems)})"):
                work = integers.IntegerWorkload.make(named)
                entrants, missing = integers.contenders(work, contenders)
                if graphs is not None:
                    entrants = {**graphs.contenders(work), **entrants}
                entrants = {key: made for key, made in entrants.items() if key.work in works}
                missing = {key: why for key, why in missing.items() if key.work in works}
                reference = integers.reference(work)
                if meter is not None:
                    meter.burst()
                results.append(
                    measure_problem(named, entrants, reference, dtype, protocol, missing)
                )
        if meter is not None:
            meter.burst()
            peak = meter.peak()
    return Measured(results, peak=peak)


def _max_contenders(
    problems: Sequence[NamedProblem], dtype: str
) -> tuple[dict[str, dict[Key, Entrant]], dict[str, dict[Key, str]]]:
    """Returns MAX's entrants, and why others are missing, by problem."""
    tried = peers_max.try_all(problems, partial(peers_max.run_child, dtype=dtype))
    by_name = {named.name: named for named in problems}
    entrants: dict[str, dict[Key, Entrant]] = {}
    for unit in tried.units:
        works = [Workload.make(by_name[name], dtype) for name in unit.names]
        for name, entrant in peers_max.load(works, constant=unit.constant).items():
            if name in tried.runs[unit.constant]:
                entrants.setdefault(name, {})[peers_max.KEYS[unit.constant]] = entrant
    missing = {
        name: {peers_max.KEYS[constant]: reason for constant, reason in reasons.items()}
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
    calls = {"the graph": through.call, **singles}
    timings = interleave({name: call.burst for name, call in calls.items()}, protocol)
    graph = timings.pop("the graph")
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
