"""The space of configurations of a kernel for one problem on one target.

It is the constraint model that rules generate from what the kernel says, and the kernel as judge.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .._dtypes import DTYPE_BYTES, GPU_BYTES, HALF_DTYPES
from .._fields import Kernel
from .._problem import ConvProblem
from .._targets import BLACKWELL, HOPPER, TARGETS
from .families import cpu, sm90, sm100
from .kernels import Judged, KernelSpace, rules
from .model import Assignment, Model
from .rules import Rule, Workload, generate

__all__ = ["TARGET_NAMES", "Space", "TunerTarget", "configuration", "named", "open_space"]


@dataclass(frozen=True)
class TunerTarget:
    """A target that has spaces."""

    kernels: tuple[Kernel, ...]
    """Those with a space, in the order in which the registry asks them."""
    rules: Sequence[Rule]
    dtype: str
    """Of activation and filter, if none is asked for."""
    dtypes: tuple[str, ...]
    """Those that may be."""
    architecture: str | None = None
    """Of a GPU."""

    @property
    def units(self) -> int:
        """A GPU's multiprocessors, or the threads that a CPU may run."""
        if self.architecture is not None:
            return TARGETS[self.architecture].multiprocessors
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else _cores()


def _cores() -> int:
    return os.cpu_count() or 1


_FLOATS, _NARROW = tuple(DTYPE_BYTES), tuple(GPU_BYTES)

_TARGETS = {
    "cpu": TunerTarget((Kernel.IMPLICIT_GEMM,), cpu.RULES, "float32", _FLOATS),
    "sm90": TunerTarget(
        (Kernel.SM90, Kernel.UNALIGNED), sm90.RULES, "bfloat16", (*_FLOATS, *_NARROW), HOPPER
    ),
    "sm100": TunerTarget((Kernel.SM100,), sm100.RULES, "bfloat16", (*_FLOATS, *_NARROW), BLACKWELL),
}

#: Targets that have spaces.
TARGET_NAMES = tuple(_TARGETS)


@dataclass(frozen=True)
class Space:
    """A space."""

    problem: ConvProblem
    target: str
    dtype: str
    out_dtype: str
    residual: bool
    units: int
    kernel: Kernel
    model: Model
    applied: tuple[Rule, ...]
    """The schedule rules that apply."""
    judge: KernelSpace

    def judged(self, assignments: Sequence[Assignment]) -> list[Judged]:
        """Returns what the kernel says of configurations."""
        return self.judge.judge(assignments)

    def __str__(self) -> str:
        rows = [f"  {rule.kind.value}: {rule.name}" for rule in self.applied]
        return "\n".join(
            (
                f"{self.problem}",
                f"{self.kernel.name.lower()} on {self.target}, {self.dtype} to {self.out_dtype}, "
                f"{self.units} {'threads' if self.target == 'cpu' else 'multiprocessors'}",
                f"{len(self.applied)} schedule rules",
                *rows,
                str(self.model),
            )
        )


def configuration(space: Space, assignment: Assignment) -> dict[str, int]:
    """Returns the fields of the kernel's configuration, of an assignment of all variables."""
    return {name: assignment[name] for name in space.judge.fields}


def open_space(
    problem: ConvProblem,
    target: str,
    *,
    dtype: str | None = None,
    out_dtype: str | None = None,
    residual: bool = False,
    units: int | None = None,
) -> Space:
    """Returns the space of the first of a target's kernels that takes a problem.

    Args:
        problem: The convolution; all sizes known.
        target: One of ``TARGET_NAMES``.
        dtype: Of activation and filter; by default float32 on a CPU, otherwise bfloat16.
        out_dtype: Of the output; by default ``dtype``, or bfloat16 where that has 8 bits.
        residual: Whether one is added to the output.
        units: Multiprocessors or threads; by default those of a product that has the architecture,
            or of this process.

    Raises:
        ValueError: An argument is not allowed, or none of the kernels takes the problem; the
            message says why of each.
        LibraryError: The library that is asked cannot be built.
    """
    if target not in _TARGETS:
        raise ValueError(f"target: {target!r} is not one of {', '.join(_TARGETS)}")
    described = _TARGETS[target]
    dtype = described.dtype if dtype is None else dtype
    if dtype not in described.dtypes:
        raise ValueError(f"dtype: {dtype!r} is not one of {', '.join(described.dtypes)}")
    if out_dtype is None:
        out_dtype = dtype if dtype in DTYPE_BYTES else HALF_DTYPES[0]
    units = described.units if units is None else units
    reasons = []
    for kernel in described.kernels:
        try:
            judge = rules().open(kernel, problem, dtype, out_dtype, residual=residual, units=units)
        except ValueError as error:
            reasons.append(str(error))
            continue
        workload = Workload(target, judge.facts, residual)
        model, applied = generate(described.rules, workload)
        _check_fields(model, judge)
        return Space(
            problem, target, dtype, out_dtype, residual, units, kernel, model, (*applied,), judge
        )
    raise ValueError("; ".join(dict.fromkeys(reasons)))


def _check_fields(model: Model, judge: KernelSpace) -> None:
    """Holds rules and kernel together: each tunable is a field, and each field a tunable."""
    if odd := set(model.tunables) ^ set(judge.fields):
        raise RuntimeError(f"fields: {', '.join(sorted(odd))} are not both of rules and kernel")


def named(values: Mapping[str, int]) -> str:
    """Returns a configuration on one line."""
    return ", ".join(f"{name} {value}" for name, value in values.items())
