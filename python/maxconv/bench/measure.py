"""Measures a problem, on any device: checks that the contenders agree, times them in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from maxconv._dtypes import INT8
from maxconv._problems import NamedProblem

from .device import MAX_TOLERANCE, ROUNDED_BETWEEN, TOLERANCE, out_type
from .entrant import (
    BARE,
    BFLOAT16,
    CALL,
    FIGURES,
    FUSED,
    KERNEL,
    MAX,
    TORCH,
    TORCH_COMPILE,
    WRONG,
    Entrant,
    Key,
    Mismatch,
)
from .record import Measurement, Result
from .timing import Protocol, interleave

__all__ = ["measure_entrants", "measure_problem"]


def measure_problem(
    named: NamedProblem,
    entrants: Mapping[Key, Entrant],
    references: Mapping[str, Any],
    dtype: str,
    protocol: Protocol,
    missing: Mapping[Key, str],
    *,
    go_on: bool = False,
) -> Result:
    """Checks and times the contenders of a problem.

    Args:
        named: The problem.
        entrants: The contenders.
        references: What they must compute, by work, as the device keeps it.
        dtype: Storage type.
        protocol: How often and how long.
        missing: Why contenders that are not in ``entrants`` are not.
        go_on: See ``measure_entrants``.

    Raises:
        Mismatch: A contender's output differs from the reference; a wrong result of MAX's own
            convolutions, which are another project's to mend, is recorded instead.
    """
    problem = named.problem
    kernels = [entrant.kernel for entrant in entrants.values() if entrant.kernel is not None]
    return Result(
        name=named.name,
        family=named.family,
        problem=str(problem),
        rank=problem.spatial_rank,
        depthwise=problem.is_depthwise,
        flops=problem.flops,
        nbytes=problem.nbytes(dtype, out_type(dtype)),
        convolutions=max((run.convolutions for run in kernels), default=1),
        measurements=measure_entrants(
            named.name,
            entrants,
            references,
            lambda key: _tolerance(key, dtype),
            protocol,
            missing,
            go_on=go_on,
        ),
    )


def _tolerance(key: Key, dtype: str) -> float:
    if key.contender == MAX:
        return MAX_TOLERANCE[dtype]
    if key.contender == BFLOAT16:
        return TOLERANCE[BFLOAT16]
    if dtype == INT8 and key.work == BARE:
        return 0.0
    between = key.work == FUSED and key.contender in (TORCH, TORCH_COMPILE)
    return TOLERANCE[dtype] * (ROUNDED_BETWEEN if between else 1)


def measure_entrants(
    name: str,
    entrants: Mapping[Key, Entrant],
    references: Mapping[str, Any],
    tolerance: Callable[[Key], float],
    protocol: Protocol,
    missing: Mapping[Key, str],
    *,
    go_on: bool = False,
) -> list[Measurement]:
    """Checks and times contenders: see ``measure_problem``.

    Where the call that gives a kernel's time makes one convolution, it gives both figures.

    Args:
        name: What an error calls the problem.
        entrants: The contenders.
        references: What they must compute, by work.
        tolerance: How far an output may lie from the reference, unless its entrant says so.
        protocol: How often and how long.
        missing: Why contenders that are not in ``entrants`` are not.
        go_on: Whether a wrong output is recorded, whoever's it is, and the rest measured.

    Raises:
        Mismatch: As ``measure_problem``.
    """
    errors: dict[Key, float] = {}
    missing = dict(missing)
    for key, entrant in entrants.items():
        expected = references[key.work]
        allowed = tolerance(key) if entrant.tolerance is None else entrant.tolerance
        try:
            errors[key] = max(run.error(expected, allowed) for _, run in entrant.runs())
        except Mismatch as error:
            if key.contender != MAX and not go_on:
                raise Mismatch(f"{name}: {key}: {error}") from error
            missing[key] = f"{WRONG}: {error}"
    runs = {(key, figure): run for key in errors for figure, run in entrants[key].runs()}
    timed = interleave({name: run.burst for name, run in runs.items()}, protocol)
    timings = {name: timing.per(runs[name].convolutions) for name, timing in timed.items()}
    measurements = []
    for key in errors:
        figures = {figure: timings.get((key, figure)) for figure in FIGURES}
        kernel = entrants[key].kernel
        if kernel is not None and kernel.convolutions == 1 and figures[CALL] is None:
            figures[CALL] = figures[KERNEL]
        note = entrants[key].note
        measurements.append(
            Measurement(*key, figures[KERNEL], figures[CALL], error=errors[key], note=note)
        )
    return measurements + [Measurement(*key, missing=why) for key, why in missing.items()]
